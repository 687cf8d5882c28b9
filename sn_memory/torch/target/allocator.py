"""torch's allocator in this process: replacement by the placing allocator, and pools of steps.

By default torch's caching allocator serves tensors, and plans follow its rules. With
`use_placing_allocator` it is ours, which puts the tensors of a step at packed addresses.

Other allocations of the program are never between the tensors of a step, as those come from a
separate pool, which can be released as a whole. torch routes the allocations of a thread to a pool,
not those of the program: code that runs a part of a step enters the pool in its own thread (in the
backward pass, autograd's), and only while that part runs. Gradients of parameters come from the
pool and outlive the step: until they are freed, their part of it stays.
"""

from __future__ import annotations

import ctypes
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch

from ...pool.placing import PlacingAllocator, PlacingStatistics, library_path
from .accelerator import COUNTED, module_of

# Our library's functions, by the hooks of torch's allocator for which they are set.
_HOOKS: Final = {
    "set_reset_fn": "trim",  # empty_cache
    "set_record_stream_fn": "record_stream",
    "set_begin_allocate_to_pool": "refuse_pool",  # MemPool, CUDA graphs
}
_DEVICE_TYPE = "cuda"
_active: PlacingAllocator | None = None
_NO_POOL: Final = nullcontext()


def use_placing_allocator() -> None:
    """Make torch use sn_memory's placing allocator on CUDA, for the rest of the process.

    Steps of planned models then use packed addresses: the height of their packing is reserved for
    them, whereas torch's own allocator reserves up to 45 % more. Statistics of torch's own
    allocator are lost: `torch.cuda.memory_stats` and all that depends on it raise errors, and so do
    CUDA graphs and `MemPool`. Use `placing_statistics` instead. See docs/pool.md.

    Raises
    ------
    RuntimeError
        If CUDA is in use already, this torch has no CUDA, or the library was not built.
    """
    global _active
    if _active is not None:
        return
    if torch.version.cuda is None:
        raise RuntimeError(
            "use_placing_allocator() got a torch without CUDA; expected one built for CUDA, whose "
            "allocator it replaces. Leave the call out on other devices."
        )
    if torch.cuda.is_initialized():
        raise RuntimeError(
            "use_placing_allocator() was called after CUDA was first used; expected before, as "
            "torch cannot change an allocator that has allocated. Call it right after the imports."
        )
    major = torch.version.cuda.split(".")[0]
    memory = PlacingAllocator(f"libcudart.so.{'11.0' if major == '11' else major}")
    try:
        path = str(library_path())
        pluggable: Any = torch.cuda.memory.CUDAPluggableAllocator(
            path, "sn_placing_malloc", "sn_placing_free"
        )
        library, hooks = ctypes.CDLL(path), pluggable.allocator()
        for name, function in _HOOKS.items():
            pointer = ctypes.cast(getattr(library, f"sn_placing_{function}"), ctypes.c_void_p)
            getattr(hooks, name)(pointer.value)
        torch.cuda.memory.change_current_allocator(pluggable)
    except BaseException:
        memory.close()
        raise
    # Now it is torch's allocator for good: torch cannot switch back.
    _active = memory
    COUNTED[_DEVICE_TYPE] = Counts(memory)


def active(device: torch.device | None = None) -> PlacingAllocator | None:
    """Return the placing allocator if it is torch's, and serves the device, if one is given."""
    return _active if device is None or device.type == _DEVICE_TYPE else None


def placing_statistics(device: torch.device | str | int | None = None) -> PlacingStatistics:
    """Return the placing allocator's statistics of a device; default: the current one.

    Raises RuntimeError if it is not torch's allocator.
    """
    if _active is None:
        raise RuntimeError(
            "placing_statistics() got torch's own allocator; expected use_placing_allocator() "
            "before the first use of CUDA. For torch's own call torch.cuda.memory_stats()."
        )
    return _active.statistics(index_of(device))


def index_of(device: torch.device | str | int | None) -> int:
    """Return the index of a CUDA device; for None, or without an index, the current one's."""
    if isinstance(device, int):
        return device
    number = None if device is None else torch.device(device).index
    return torch.cuda.current_device() if number is None else number


def stream_of(device: torch.device) -> int:
    """Return the handle of this thread's current stream, as the allocator receives it."""
    stream: int = torch.cuda.current_stream(device).cuda_stream
    return stream


class Counts:
    """The memory counters of `torch.cuda`, implemented by the placing allocator's statistics."""

    def __init__(self, memory: PlacingAllocator) -> None:
        self._memory = memory

    def memory_allocated(self, device: torch.device) -> int:
        return self._memory.statistics(index_of(device)).allocated_bytes

    def max_memory_allocated(self, device: torch.device) -> int:
        return self._memory.statistics(index_of(device)).peak_allocated_bytes

    def memory_reserved(self, device: torch.device) -> int:
        return self._memory.statistics(index_of(device)).reserved_bytes

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self._memory.reset_peaks(index_of(device))


class StepPool:
    """A memory pool on a device for the steps of one planned model, created when first needed."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._device: torch.device | None = None
        self._first_bytes = 0
        self._arena: int | None = None  # of the placing allocator

    def inside(
        self, device: torch.device, first_bytes: int, *, step: int, begins: bool
    ) -> AbstractContextManager[Any]:
        """Return the context in which this thread allocates from the pool.

        first_bytes : size of the free segment with which torch's pool begins. If an earlier step
            needed less, a new pool is made, and the old one is freed with the tensors in it.
        step, begins : the step of the model that this is a part of, and whether it is the first
        """
        memory = active(device)
        if memory is not None:
            return self._placed(memory, device, step, begins=begins)
        module = module_of(device)
        if not hasattr(module, "MemPool"):
            return _NO_POOL
        if self._pool is None or first_bytes > self._first_bytes:
            self._begin(module, device, first_bytes)
        pool: AbstractContextManager[Any] = module.use_mem_pool(self._pool, device)
        return pool

    def _placed(
        self, memory: PlacingAllocator, device: torch.device, step: int, *, begins: bool
    ) -> AbstractContextManager[Any]:
        if self._arena is None:
            self._arena = memory.new_pool(index_of(device))
            weakref.finalize(self, memory.forget, self._arena)
        if begins:
            try:
                memory.begin(self._arena, step, stream_of(device))
            except MemoryError as error:
                raise torch.cuda.OutOfMemoryError(str(error)) from error
        return memory.inside(self._arena)

    def _begin(self, module: Any, device: torch.device, first_bytes: int) -> None:
        # Workspaces that libraries keep from their first product on must not stay in the pool:
        # each thread has its own, so the backward pass computes a product as well.
        one = torch.ones(1, 1, device=device, requires_grad=True)
        with torch.enable_grad():
            (one @ one).backward()
        # This pool cannot use cached segments of other pools, and torch does not release them for
        # it.
        self.release()
        module.empty_cache()
        self._pool, self._device = module.MemPool(), device
        self._first_bytes = first_bytes
        if first_bytes:
            # Not as a tensor, which trackers of the step would count.
            with module.use_mem_pool(self._pool, device):
                module.caching_allocator_delete(module.caching_allocator_alloc(first_bytes, device))

    def release(self) -> None:
        """Release unused memory; the next step begins with a new pool."""
        memory = active()
        if memory is not None and self._arena is not None:
            memory.give_back(self._arena)
            memory.trim()
        self._pool, self._first_bytes = None, 0
        if self._device is not None:
            module_of(self._device).empty_cache()
