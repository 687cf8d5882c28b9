"""The placing allocator as torch's allocator on CUDA, asked for before CUDA is used."""

from __future__ import annotations

import ctypes
from typing import Any, Final

import torch

from ...pool.placing import PlacingAllocator, PlacingStatistics, library_path
from .accelerator import COUNTED

# The functions of the library, by what torch's allocator calls them for.
_HOOKS: Final = {
    "set_reset_fn": "trim",  # empty_cache
    "set_record_stream_fn": "record_stream",
    "set_begin_allocate_to_pool": "refuse_pool",  # MemPool, CUDA graphs
}
_DEVICE_TYPE = "cuda"
_active: PlacingAllocator | None = None


def use_placing_allocator() -> None:
    """Let torch allocate on CUDA by sn_memory's placing allocator, for the rest of the process.

    Steps of planned models then lie at packed addresses: what is reserved for them is the height of
    their packing, where torch's own allocator reserves up to 45 % more. What torch knows of its own
    allocator is lost: `torch.cuda.memory_stats` and all that counts by it raise errors, and so do
    CUDA graphs and `MemPool`. `placing_statistics` counts instead. See docs/pool.md.

    Raises
    ------
    RuntimeError
        Where CUDA is in use already, this torch has no CUDA, or the library was not built.
    """
    global _active
    if _active is not None:
        return
    if torch.version.cuda is None:
        raise RuntimeError(
            "use_placing_allocator() got a torch without CUDA; expected one built for CUDA, whose "
            "allocator it takes the place of. Leave the call out on other devices."
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
    _active = memory
    COUNTED[_DEVICE_TYPE] = Counts(memory)


def active(device: torch.device | None = None) -> PlacingAllocator | None:
    """Return the placing allocator where it is torch's, and a device's, if one is asked for."""
    return _active if device is None or device.type == _DEVICE_TYPE else None


def placing_statistics(device: torch.device | str | int | None = None) -> PlacingStatistics:
    """Return what the placing allocator holds on a device; default: the current one.

    Raises RuntimeError where it is not torch's allocator.
    """
    if _active is None:
        raise RuntimeError(
            "placing_statistics() got torch's own allocator; expected use_placing_allocator() "
            "before the first use of CUDA. torch.cuda.memory_stats() tells of torch's own."
        )
    return _active.statistics(index_of(device))


def index_of(device: torch.device | str | int | None) -> int:
    """Return the number of a CUDA device; of none, or without a number, the current one's."""
    if isinstance(device, int):
        return device
    number = None if device is None else torch.device(device).index
    return torch.cuda.current_device() if number is None else number


def stream_of(device: torch.device) -> int:
    """Return the stream that this thread runs on, as the allocator is told of it."""
    stream: int = torch.cuda.current_stream(device).cuda_stream
    return stream


class Counts:
    """The functions of `torch.cuda` that count memory, by the placing allocator's statistics."""

    def __init__(self, memory: PlacingAllocator) -> None:
        self._memory = memory

    def memory_allocated(self, device: torch.device) -> int:
        """Return the bytes of blocks in use."""
        return self._memory.statistics(index_of(device)).allocated_bytes

    def max_memory_allocated(self, device: torch.device) -> int:
        """Return the most bytes of blocks in use."""
        return self._memory.statistics(index_of(device)).peak_allocated_bytes

    def memory_reserved(self, device: torch.device) -> int:
        """Return the bytes taken from the driver."""
        return self._memory.statistics(index_of(device)).reserved_bytes

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        """Let peaks begin at what is held now."""
        self._memory.reset_peaks(index_of(device))
