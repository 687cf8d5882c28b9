"""Ways in which DDP averages gradients, by name: torch's own hooks, and this project's.

"plain", "fp16", "powersgd RANK", "low rank RATIO", "auto RATIO", "gather"
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from sn_compress import AutoCompression, FFTCompression, LowRankCompression
from sn_compress.torch.ddp import CompressionState, compression_hook

Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]


def ours(way: str, net: nn.Module, dense: int) -> tuple[Any, Hook]:
    """State and hook of a way of this project: the one place where a compression is made."""
    named = list(net.named_parameters())
    if way == "gather":
        return CompressionState(FFTCompression, named_parameters=named), compression_hook
    kind, ratio = way.rsplit(" ", 1)
    summed = AutoCompression if kind == "auto" else LowRankCompression
    compression = summed.using(ratio=float(ratio), warmup=dense)
    state = CompressionState(compression, named_parameters=named)
    return state, compression_hook


def rivals(way: str, dense: int) -> tuple[Any, Hook]:
    """State and hook of a way of torch's."""
    if way == "fp16":
        return None, default_hooks.fp16_compress_hook
    rank = int(way.removeprefix("powersgd "))
    state = powerSGD_hook.PowerSGDState(None, rank, start_powerSGD_iter=max(dense, 2))
    return state, powerSGD_hook.powerSGD_hook


class OpCount(TorchDispatchMode):
    """ATen ops that a hook calls in the thread that calls it, and the buckets it was called with.

    Counts between `start` and `stop`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.on, self.buckets = False, 0
        self.ops: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace != "c10d":
            self.ops.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))

    def around(self, hook: Hook) -> Hook:
        """The hook, counted while this is on; DDP sees its annotations."""

        @functools.wraps(hook)
        def counted(state: Any, bucket: dist.GradBucket) -> Any:
            if not self.on:
                return hook(state, bucket)
            self.buckets += 1
            with self:
                return hook(state, bucket)

        return counted

    def a_bucket(self) -> float | None:
        """Ops of a bucket's step; None where no product is among them: the codec is not torch's."""
        products = {"mm", "bmm", "addmm", "baddbmm", "matmul", "_int_mm"}
        if not self.buckets or not products & set(self.ops):
            return None
        return len(self.ops) / self.buckets


def wrapped(
    way: str, net: nn.Module, *, dense: int, count: OpCount | None = None
) -> tuple[DistributedDataParallel, Any]:
    """DDP of a net by a way whose first `dense` steps travel uncompressed, and the hook's state.

    torch's PowerSGD gets one bucket: with more, over Gloo, its collectives meet in another order on
    each rank ("collective mismatch").
    """
    one = way.startswith("powersgd")
    ddp = DistributedDataParallel(net, bucket_cap_mb=1000 if one else None)
    if way == "plain":
        return ddp, None
    is_ours = way == "gather" or way.startswith(("low rank ", "auto "))
    state, hook = ours(way, net, dense) if is_ours else rivals(way, dense)
    ddp.register_comm_hook(state, count.around(hook) if count else hook)
    return ddp, state
