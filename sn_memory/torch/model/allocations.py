"""AllocationTracker: how many bytes torch's CPU allocator has given out while something runs.

Compiled code takes its buffers past torch's dispatcher, so StorageTracker does not see those that
no op of torch ever gets. The allocator sees all, and tells a profiler what it gave and took back.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

from ..target.accelerator import is_apart, memory_of, synchronize


class AllocationTracker:
    """Counts the bytes that torch's CPU allocator holds, from those of known tensors on.

    Parameters
    ----------
    known
        Tensors that are there already; counted from the start.
    kernels
        Count what an op takes and gives back by itself as well. Otherwise, as in StorageTracker,
        the sum is looked at when an op has ended, and at each allocation outside of ops.
    device
        Whose memory is counted. One apart from the host tells its peak, kernels' too, and no op.

    Attributes
    ----------
    start_bytes, live_bytes, peak_bytes
        At the start, when the context was last left, and the most so far.
    peak_op
        The op, or the compiled region, that the peak was reached in.
    """

    def __init__(
        self,
        known: Iterable[torch.Tensor] = (),
        *,
        kernels: bool = False,
        device: torch.device | None = None,
    ) -> None:
        self._kernels = kernels
        self._device = device if device is not None and is_apart(device) else None
        held = {it.untyped_storage()._cdata: it.untyped_storage().nbytes() for it in known}
        self.start_bytes = self.live_bytes = self.peak_bytes = sum(held.values())
        self.peak_op = "start"

    def meet(self, tensor: torch.Tensor) -> None:
        """Count a tensor that was made outside of the context."""
        self.live_bytes += tensor.untyped_storage().nbytes()

    def __enter__(self) -> AllocationTracker:
        # What was there before and is let go meanwhile would count as given back by what runs.
        self._collects = gc.isenabled()
        gc.disable()
        if self._device is not None:
            synchronize(self._device)
            memory = memory_of(self._device)
            memory.reset_peak_memory_stats(self._device)
            self._before = memory.memory_allocated(self._device)
            return self
        # The older of torch's two profilers: its events are in order, and it writes no lines of its
        # own to standard output.
        kind, more = ProfilerState.CPU, _ExperimentalConfig()
        wanted = ProfilerConfig(kind, False, True, False, False, False, more)
        torch._C._autograd._enable_profiler_legacy(wanted)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._collects:
            gc.enable()
        if self._device is not None:
            synchronize(self._device)
            memory = memory_of(self._device)
            most = self.live_bytes + memory.max_memory_allocated(self._device) - self._before
            self.live_bytes += memory.memory_allocated(self._device) - self._before
            if most > self.peak_bytes:
                self.peak_bytes, self.peak_op = most, "the step"
            return
        for thread in torch._C._autograd._disable_profiler_legacy():
            self._read(thread)

    def _read(self, events: Iterable[Any]) -> None:
        # Names of what runs, from the outside in; ops are what has a namespace.
        stack: list[str] = []
        op: int | None = None
        for event in events:
            kind: Any = event.kind()
            if kind == "push":
                stack.append(event.name())
                if op is None and stack[-1].partition("::")[0] in _NAMESPACES:
                    op = len(stack)
            elif kind == "pop":
                if op == len(stack):
                    self._sample(stack[-1])
                    op = None
                if stack:
                    stack.pop()
            elif kind == "memory_alloc":
                self.live_bytes += event.cpu_memory_usage()
                if op is None or self._kernels:
                    self._sample(stack[-1] if stack else "outside of ops")

    def _sample(self, what: str) -> None:
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_op = self.live_bytes, what


def is_profiled() -> bool:
    """Whether the caller profiles this thread; an AllocationTracker would raise RuntimeError."""
    return bool(torch._C._autograd._profiler_enabled())


def measured_bytes(run: Callable[[], Any], device: torch.device) -> int:
    """Return the scratch of what one run of an op takes, as the device's allocator tells it."""
    with AllocationTracker(kernels=True, device=device) as tracker:
        result = run()
    del result
    return max(0, tracker.peak_bytes - tracker.live_bytes)


# Of ops that reach kernels; autograd's own records have names with colons too.
_NAMESPACES = ("aten", "mkldnn", "prims", "inductor", "quantized", "torchvision", "mkl")
