"""Measure the bytes held while something runs, by torch's ops or by its allocator.

torch counts memory only on CUDA devices, and a process's size says little. StorageTracker, a
dispatch mode, sees each storage that a call returns and when it is freed; it does not see memory
used inside kernels. Compiled code allocates its buffers without the dispatcher; AllocationTracker
uses the CPU allocator, which reports all allocations and frees to a profiler.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._pytree import tree_leaves

from ...graph.graph import rounded
from ..target.accelerator import asked_for_device, is_apart, memory_of, synchronize
from .sharded import pieces
from .signature import storage_sizes

# Called with a call's overload, positional and keyword arguments, and results.
Scratch = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], int]


class StorageTracker(TorchDispatchMode):
    """Counts the bytes of live storages on one device while the context is open.

    Parameters
    ----------
    known
        Existing tensors; counted from the start.
    device
        Only storages on this device are counted; None counts all.
    allocator
        How sizes are rounded, as in Graph.
    ignored
        Tensors whose storages are never counted.
    heard
        Called after each call with the live bytes at that time.
    scratch
        Returns the scratch bytes of a call, from its overload, arguments and results.
    moved
        Called with the key and the bytes of a storage when it is counted, and with 0 bytes when it
        is freed; keys of freed storages are reused.

    Attributes
    ----------
    start_bytes, live_bytes, peak_bytes
        At the start, now, and the most so far. Sampled after each call, when its arguments and
        results are all live.
    peak_op
        The call that reached the peak.

    Examples
    --------
    >>> import torch
    >>> from sn_memory.torch import StorageTracker
    >>> x = torch.zeros(256)
    >>> with StorageTracker([x]) as tracker:
    ...     y = (x + 1).mul(2)
    >>> tracker.start_bytes, tracker.peak_bytes, tracker.live_bytes
    (1024, 3072, 2048)
    """

    def __init__(
        self,
        known: Iterable[torch.Tensor] = (),
        *,
        device: torch.device | None = None,
        allocator: str = "none",
        ignored: Iterable[torch.Tensor] = (),
        heard: Callable[[int], None] | None = None,
        scratch: Scratch | None = None,
        moved: Callable[[int, int], None] | None = None,
    ) -> None:
        super().__init__()
        self.device, self.allocator, self.heard = device, allocator, heard
        self._scratch, self._moved = scratch, moved
        self.live_bytes = self.peak_bytes = 0
        self.peak_op = "start"
        # Per live storage: a reference that reports its end; its bytes, actual and as counted.
        self._held: dict[int, weakref.ref[Any]] = {}
        self._sizes: dict[int, tuple[int, int]] = {}
        self._ignored = {tensor.untyped_storage()._cdata for tensor in ignored}
        for tensor in known:
            self.meet(tensor)
        self.start_bytes = self.peak_bytes = self.live_bytes

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile run compiled code under this mode."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            # A DTensor runs the op on its local tensor, and that call is dispatched here in turn.
            return NotImplemented
        device = asked_for_device(func, args)
        if device is not None:
            return device
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self.meet(value)
        scratch = 0 if self._scratch is None else self._scratch(func, args, kwargs or {}, result)
        self._sample(str(func), scratch)
        return result

    def _sample(self, what: str, scratch: int = 0) -> None:
        if self.live_bytes + scratch > self.peak_bytes:
            self.peak_bytes, self.peak_op = self.live_bytes + scratch, what
        if self.heard is not None:
            self.heard(self.live_bytes + scratch)

    def __enter__(self) -> Any:
        self._resize = torch.UntypedStorage.resize_
        own, tracker = self._resize, self

        def resize_(memory: Any, size: int) -> Any:
            result = own(memory, size)
            if memory._cdata in tracker._held or memory.device == (tracker.device or memory.device):
                tracker._meet(memory)
                tracker._sample("resize_")
            return result

        # FSDP2 frees gathered parameters and allocates them again by this method; no op is called.
        torch.UntypedStorage.resize_ = resize_
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        torch.UntypedStorage.resize_ = self._resize
        return super().__exit__(*error)

    def meet(self, tensor: torch.Tensor) -> None:
        """Start to count a tensor; if it is counted already, update its size."""
        if tensor.layout is not torch.strided or is_traceable_wrapper_subclass(tensor):
            for piece in pieces(tensor):
                self.meet(piece)
            return
        if self.device is None or tensor.device == self.device:
            self._meet(tensor.untyped_storage())

    def _meet(self, memory: Any) -> None:
        key = memory._cdata
        if key in self._ignored:
            return
        nbytes = memory.nbytes()
        was, counted = self._sizes.get(key, (-1, 0))
        if nbytes == was:
            return
        size = int(rounded(np.array([nbytes]), self.allocator)[0])
        self._sizes[key] = (nbytes, size)
        self.live_bytes += size - counted
        if self._moved is not None:
            self._moved(key, nbytes)
        if key in self._held:
            return

        def gone(_: Any) -> None:
            del self._held[key]
            self.live_bytes -= self._sizes.pop(key)[1]
            if self._moved is not None:
                self._moved(key, 0)

        # The storage object lives as long as any tensor that uses it.
        self._held[key] = weakref.ref(memory, gone)


class AllocationTracker:
    """Counts the bytes that torch's CPU allocator holds, starting from those of known tensors.

    known : existing tensors; counted from the start.
    kernels : also count what an op allocates and frees internally. Otherwise, as in StorageTracker,
        the sum is sampled at the end of each op, and at each allocation outside of ops.
    device : the device whose memory is counted. If it has memory of its own, its allocator reports
        the peak, including kernels' scratch, but not the op.

    start_bytes, live_bytes, peak_bytes : at the start, when the context was last left, and the most
        so far
    peak_op : the op, or the compiled region, that reached the peak
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
        self.start_bytes = self.live_bytes = self.peak_bytes = sum(storage_sizes(known).values())
        self.peak_op = "start"

    def meet(self, tensor: torch.Tensor) -> None:
        """Count a tensor that was created outside of the context."""
        self.live_bytes += tensor.untyped_storage().nbytes()

    def __enter__(self) -> AllocationTracker:
        # Collecting older garbage meanwhile would count as memory freed by what runs.
        self._collects = gc.isenabled()
        gc.disable()
        if self._device is not None:
            synchronize(self._device)
            memory = memory_of(self._device)
            memory.reset_peak_memory_stats(self._device)
            self._before = memory.memory_allocated(self._device)
            return self
        # The older of torch's two profilers: its events come in order, and it prints nothing.
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
        # Names of the running records, outermost first; ops are those with a namespace.
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
    """Whether this thread is already profiled; an AllocationTracker would raise RuntimeError."""
    return bool(torch._C._autograd._profiler_enabled())


def measured_bytes(run: Callable[[], Any], device: torch.device) -> int:
    """Return the scratch memory of one run of an op, by the device's allocator."""
    with AllocationTracker(kernels=True, device=device) as tracker:
        # Held until the tracker ends, so that it counts as live and not as scratch.
        result = run()
    del result
    return max(0, tracker.peak_bytes - tracker.live_bytes)


# Namespaces of ops that reach kernels; autograd's own records have names with colons too.
_NAMESPACES = ("aten", "mkldnn", "prims", "inductor", "quantized", "torchvision", "mkl")
