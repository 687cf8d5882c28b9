"""StorageTracker: how many bytes of storages are really held while something runs.

torch counts memory on CUDA devices only, and a process's size says little. Here a dispatch mode
sees each storage that a call returns and notes when it dies; what a kernel uses inside is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._pytree import tree_leaves

from ...graph.numbers import rounded
from ..device.host_resident import asked_for_device
from .sharded import pieces

# Of a call: its overload, its arguments by place and by name, and its results.
Scratch = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], int]


class StorageTracker(TorchDispatchMode):
    """Counts the bytes of live storages on one device while the context is open.

    Parameters
    ----------
    known
        Tensors that are there already; counted from the start.
    device
        Storages elsewhere are not counted; None counts all.
    allocator
        How sizes are rounded, as in Graph.
    ignored
        Tensors whose storages are never counted.
    heard
        Called after each call with the live bytes then.
    scratch
        Returns what a call takes while it runs, by its overload, arguments and results.
    moved
        Called with the key and the bytes of a storage when it is counted, and with 0 bytes when it
        is gone; keys of those that are gone come again.

    Attributes
    ----------
    start_bytes, live_bytes, peak_bytes
        At the start, now, and the most so far. Sampled after each call, when its arguments and
        results are all there.
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
        # Per storage that lives: who tells when it is gone; its bytes, and those it counts with.
        self._held: dict[int, weakref.ref[Any]] = {}
        self._sizes: dict[int, tuple[int, int]] = {}
        self._ignored = {tensor.untyped_storage()._cdata for tensor in ignored}
        for tensor in known:
            self.meet(tensor)
        self.start_bytes = self.peak_bytes = self.live_bytes

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tell torch.compile that compiled code runs under it as any other."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            # A tensor made of others (DTensor) runs ops on these, which come by here in turn.
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

        # FSDP2 frees what it gathers, and takes it again, beside all ops.
        torch.UntypedStorage.resize_ = resize_
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        torch.UntypedStorage.resize_ = self._resize
        return super().__exit__(*error)

    def meet(self, tensor: torch.Tensor) -> None:
        """Count a tensor from now on, if it was not yet; again, if it has another size now."""
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

        self._held[key] = weakref.ref(memory, gone)
