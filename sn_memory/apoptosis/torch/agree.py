"""All ranks do the same, or all stop: sums over ranks, and a hash that has to be one.

torch.distributed is asked if it is initialised, else Horovod; alone, there is nobody to agree with.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..agreement import check_same, digest


def _horovod() -> Any:
    """Return horovod.torch where the user has initialised it; it is not imported for this."""
    hvd = sys.modules.get("horovod.torch")
    return hvd if hvd is not None and hvd.is_initialized() and hvd.size() > 1 else None


def _distributed() -> Any:
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return dist
    return None


def sum_over_ranks(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors summed over ranks, the same bits on each; one message for all of them."""
    if not values or (_distributed() is None and _horovod() is None):
        return list(values)
    flat = torch.cat([value.reshape(-1) for value in values])
    if dist := _distributed():
        dist.all_reduce(flat)
    else:
        hvd = _horovod()
        flat = hvd.allreduce(flat, op=hvd.Sum, name="sn_memory.apoptosis.statistics")
    parts = flat.split([value.numel() for value in values])
    return [part.view(value.shape) for part, value in zip(parts, values, strict=True)]


def stack_over_ranks(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return rows [r x rows, ...] of all ranks; tensors must have as many rows on each."""
    ranks, rank = place()
    found = []
    for value in values:
        every = value.new_zeros(ranks, *value.shape)
        every[rank] = value
        found.append(every)
    return [every.flatten(0, 1) for every in sum_over_ranks(found)]


def place() -> tuple[int, int]:
    """Return how many ranks there are, and which this is."""
    if dist := _distributed():
        return dist.get_world_size(), dist.get_rank()
    if hvd := _horovod():
        return hvd.size(), hvd.rank()
    return 1, 0


def largest_of_ranks(values: Sequence[float]) -> list[float]:
    """Return the largest of each value over all ranks."""
    mine = torch.tensor(values, dtype=torch.float64)
    if dist := _distributed():
        if dist.get_backend() == "nccl":
            mine = mine.cuda()
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    elif hvd := _horovod():
        mine = hvd.allreduce(mine, op=hvd.Max, name="sn_memory.apoptosis.largest")
    return [float(value) for value in mine]


def fingerprint(values: Iterable[torch.Tensor]) -> str:
    """Return a hash of the bits of tensors; empty where there is nobody to compare with."""
    if _distributed() is None and _horovod() is None:
        return ""
    found = hashlib.sha256()
    for value in values:
        plain = value.detach().cpu().contiguous().reshape(-1)
        found.update(plain.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def require_same(what: str, text: str, device: torch.device) -> None:
    """Raise AgreementError on every rank unless all gave the same text."""
    mine = torch.frombuffer(bytearray(digest(text)), dtype=torch.uint8).to(device)
    check_same(what, text, _gather(mine))


def _gather(mine: torch.Tensor) -> list[bytes]:
    if dist := _distributed():
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(every, mine)
    elif hvd := _horovod():
        every = list(hvd.allgather(mine[None], name="sn_memory.apoptosis.hash"))
    else:
        every = [mine]
    return [bytes(one.cpu().numpy()) for one in every]
