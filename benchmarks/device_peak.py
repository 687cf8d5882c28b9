"""The peak of a step by CUDA's allocator, without what does not belong to the step."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable

import torch


def peak_of_step(step: Callable[[], object], kept: Iterable[torch.Tensor]) -> dict[str, int]:
    """Run a step, and return its peak and what was allocated beside it.

    What lay there before and is not of `kept` belongs to libraries (cuBLAS's workspaces) and to
    other models: it is taken off the peak and named `beside_bytes`. `reserved_bytes` has it in.
    """
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage()
        for tensor in kept
        if tensor.is_cuda
    }
    other_bytes = torch.cuda.memory_allocated() - sum(
        storage.nbytes() for storage in storages.values()
    )
    del storages
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return {
        "peak_bytes": torch.cuda.max_memory_allocated() - other_bytes,
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "beside_bytes": other_bytes,
    }
