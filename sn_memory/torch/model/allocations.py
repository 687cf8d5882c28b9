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

    Attributes
    ----------
    start_bytes, live_bytes, peak_bytes
        At the start, when the context was last left, and the most so far.
    peak_op
        The op, or the compiled region, that the peak was reached in.

    Examples
    --------
    >>> import torch
    >>> from sn_memory.torch.model.allocations import AllocationTracker
    >>> x = torch.zeros(256)
    >>> with AllocationTracker([x]) as tracker:
    ...     y = torch.relu(torch.relu(x))
    >>> tracker.start_bytes, tracker.peak_bytes, tracker.live_bytes
    (1024, 3072, 2048)
    """

    def __init__(self, known: Iterable[torch.Tensor] = (), *, kernels: bool = False) -> None:
        self._kernels = kernels
        held = {}
        for tensor in known:
            memory = tensor.untyped_storage()
            held[memory._cdata] = memory.nbytes()
        self.start_bytes = self.live_bytes = sum(held.values())
        self.peak_bytes = self.start_bytes
        self.peak_op = "start"

    def meet(self, tensor: torch.Tensor) -> None:
        """Count a tensor that was made outside of the context."""
        self.live_bytes += tensor.untyped_storage().nbytes()

    def __enter__(self) -> AllocationTracker:
        # The older of torch's two profilers: its events are in order, and it writes no lines of its
        # own to standard output.
        kind, more = ProfilerState.CPU, _ExperimentalConfig()
        wanted = ProfilerConfig(kind, False, True, False, False, False, more)
        torch._C._autograd._enable_profiler_legacy(wanted)
        # What was there before and is let go meanwhile would count as given back by what runs.
        self._collects = gc.isenabled()
        gc.disable()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._collects:
            gc.enable()
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
    if is_apart(device):
        synchronize(device)
        memory = memory_of(device)
        memory.reset_peak_memory_stats(device)
        before = memory.memory_allocated(device)
        result = run()
        left = memory.memory_allocated(device) - before
        peak = memory.max_memory_allocated(device) - before
    else:
        with AllocationTracker(kernels=True) as tracker:
            result = run()
        left, peak = tracker.live_bytes, tracker.peak_bytes
    del result
    return max(0, peak - left)


# Of ops that reach kernels; autograd's own records have names with colons too.
_NAMESPACES = ("aten", "mkldnn", "prims", "inductor", "quantized", "torchvision", "mkl")
