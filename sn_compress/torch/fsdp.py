"""Compressed averages between the replicas of torch's FSDP2, when it shards within a node (HSDP).

    module.set_all_reduce_hook(fsdp_hook(CompressionState(FFTCompression, replicas), name))

Everything but what FSDP2 hands over is that of the DDP hook, its state too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..errors import CompressError
from .ddp import CompressionState, Part, check_state


def fsdp_hook(state: CompressionState, name: str) -> Callable[[torch.Tensor], None]:
    """Make the hook for one module of FSDP2, for FSDPModule.set_all_reduce_hook.

    The module is sharded over one dimension of the mesh; `state` has the process group of the
    other one, the replicas. All the module's shards are one vector with one memory, under `name`.

    Raises CompressError for LowRankCompression with a ratio above 2: a vector has no low rank, and
    would travel in 16 bits whatever ratio is set.
    """
    check_state(state, "fsdp_hook")
    if state.settings.exchange == "shared" and state.settings.ratio > 2:
        raise CompressError(
            f"fsdp_hook of a state with {state.compression!r}: shards are one vector and would "
            f"travel in 16 bits, a ratio of 2 and not {state.settings.ratio:g}. Use "
            "FFTCompression, or LowRankCompression.using(ratio=2) if 16 bits will do."
        )

    @torch.no_grad()
    def average(shards: torch.Tensor) -> None:
        for _ in state.rounds([(shards, [Part(name, 0, tuple(shards.shape))])]):
            pass

    return average
