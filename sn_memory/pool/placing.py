"""The placing allocator: a step's allocations get offsets packed from a recorded earlier step.

`csrc/placing/placing.cpp` does the work, for device or host memory; this module calls it and packs
recordings. There is one per process, since it serves the allocations of a process.

Rules: the first step of a kind is recorded, and again if the next one differs, at most three times;
from then on the n-th allocation of the step gets its place, if its size is as recorded and the
place is free. Allocations that outlive their step, and all others, use size classes.
"""

from __future__ import annotations

import ctypes
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Final

from .pack import arrange

GRAIN: Final = 512
# An arena is reserved in multiples of this, the unit in which a driver maps memory.
GRANULE: Final = 2 << 20
# Time limit for packing a recording, in counted work, so that places are reproducible.
PACK_S: Final = 1.0
# As in csrc/placing: 16 classes per power of two, since with 8 the parameters of networks took 7 to
# 37 % more than their bytes (decision 73); segments are shared by 8 blocks of up to 16 MiB.
_SMALL, _SHARED, _TOGETHER, _DIVISIONS = 1 << 20, 16 << 20, 8, 16

# Return values of the library's `begin`; it is called again once a recording has its places.
_PLACED, _RECORDED, _TO_PLACE = 0, 1, 2


@dataclass(frozen=True)
class PlacingStatistics:
    """Memory held by the placing allocator on a device.

    Parameters
    ----------
    reserved_bytes, peak_reserved_bytes
        From the driver: arenas and the segments of size classes, including cached ones.
    arena_bytes
        The part of it in arenas, in which steps are placed.
    allocated_bytes, peak_allocated_bytes
        Of blocks in use, rounded to their classes.
    hits, misses
        Allocations of placed steps that got their place, and those that were not recorded or whose
        place was taken, which use size classes.
    bad_frees
        Pointers that were freed twice, or that another allocator returned. Each prints one line to
        stderr.
    """

    reserved_bytes: int
    peak_reserved_bytes: int
    arena_bytes: int
    allocated_bytes: int
    peak_allocated_bytes: int
    hits: int
    misses: int
    bad_frees: int


@dataclass(frozen=True)
class StepStatistics:
    """Statistics of the allocations of a step.

    hits, misses : as in `PlacingStatistics`
    kept : those that outlive the step in its recording, and use size classes
    skipped : recorded ones with a place that the step did not request
    """

    hits: int
    misses: int
    kept: int
    skipped: int


def class_bytes(nbytes: int) -> int:
    """Return the size class of a block: powers of two with 16 divisions."""
    size = max(-(-nbytes // GRAIN), 1) * GRAIN
    step = max((1 << (size.bit_length() - 1)) // _DIVISIONS, GRAIN)
    size = -(-size // step) * step
    return size if size <= _SHARED else -(-size // GRANULE) * GRANULE


def classes_bytes(sizes: Iterable[int]) -> int:
    """Return what size classes reserve for blocks that are allocated in this order and stay.

    Those above 16 MiB have their own segments. Others use the oldest segment with room; a new one
    is made for the fewest blocks that fill granules of 2 MiB without a rest, at most eight.

    Examples
    --------
    >>> classes_bytes([1000, 3 << 20, 20 << 20]) >> 20
    28
    """
    # Free room of each shared segment, the oldest first.
    rooms: list[int] = []
    reserved = 0
    for size in map(class_bytes, filter(None, sizes)):
        if size > _SHARED:
            reserved += _segment_bytes(size)
            continue
        at = next((at for at, room in enumerate(rooms) if room >= size), len(rooms))
        if at == len(rooms):
            rooms.append(_segment_bytes(size))
            reserved += rooms[at]
        rooms[at] -= size
    return reserved


def _segment_bytes(size: int) -> int:
    if size <= _SMALL:
        return GRANULE
    if size <= _SHARED:
        for count in range(1, _TOGETHER + 1):
            if count * size % GRANULE == 0:
                return count * size
    # No number of blocks fills granules without a rest, or the block has its own segment.
    return -(-size // GRANULE) * GRANULE


def library_path() -> Path:
    """Return the path of the compiled library; it may be missing."""
    return Path(__file__).parents[1] / f"_placing{sysconfig.get_config_var('EXT_SUFFIX')}"


@cache
def _library() -> Any:
    path = library_path()
    if not path.exists():
        note = path.with_name("_placing_missing.txt")  # left by setup.py
        why = note.read_text("utf-8").splitlines()[0] if note.exists() else f"no {path.name}"
        raise RuntimeError(
            f"the placing allocator is missing ({why}); expected its compiled library in the "
            "package sn_memory. Install again with a C++17 compiler, on Linux."
        )
    library = ctypes.CDLL(str(path))
    number, pointer, row = ctypes.c_int64, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int64)
    forms: dict[str, tuple[Any, ...]] = {
        "open": (ctypes.c_char_p, ctypes.c_char_p, number),
        "close": (None,),
        "error": (ctypes.c_char_p,),
        "allocate": (pointer, number, ctypes.c_int, pointer),
        "release": (ctypes.c_int, pointer),
        "record_stream": (None, pointer, pointer),
        "trim": (None,),
        "new_pool": (number, ctypes.c_int),
        "forget": (None, number),
        "give_back": (None, number),
        "begin": (ctypes.c_int, number, number, pointer),
        "enter": (number, number),
        "rows": (number, number, number, row, number),
        "place": (ctypes.c_int, number, number, row, number),
        "step": (None, number, number, row),
        "statistics": (None, ctypes.c_int, row),
        "reset_peaks": (None, ctypes.c_int),
    }
    for name, (result, *arguments) in forms.items():
        function = getattr(library, f"sn_placing_{name}")
        function.restype, function.argtypes = result, arguments
    return library


class PlacingAllocator:
    """The allocator of this process, opened.

    source : "host" for host memory (only address space until it is written to), or the name of
        CUDA's runtime library
    limit_bytes : the most to reserve on a device; 0 for no limit.

    Raises RuntimeError if the library was not built, or the source cannot be opened.

    Examples
    --------
    >>> from sn_memory.pool.placing import PlacingAllocator
    >>> memory = PlacingAllocator("host")
    >>> pool = memory.new_pool(0)
    >>> for _ in range(2):
    ...     memory.begin(pool, step=1)
    ...     with memory.inside(pool):
    ...         memory.release(memory.allocate(3000))
    >>> memory.step_statistics(pool, 1).hits, memory.statistics().arena_bytes >> 20
    (1, 2)
    >>> memory.close()
    """

    def __init__(self, source: str = "host", limit_bytes: int = 0) -> None:
        self._library = _library()
        if why := self._library.sn_placing_open(source.encode(), limit_bytes):
            raise RuntimeError(
                f"the placing allocator cannot take memory from {source!r}: {why.decode()}; "
                "expected one in a process, and the runtime library that torch has loaded."
            )

    def close(self) -> None:
        """Release everything, even if it is in use."""
        self._library.sn_placing_close()

    def new_pool(self, device: int) -> int:
        """Return a pool for the steps of one planned model on a device."""
        return int(self._library.sn_placing_new_pool(device))

    def begin(self, pool: int, step: int, stream: int = 0) -> None:
        """Begin a step of a pool, which is recorded or placed.

        step : the kind of step in the pool; each has its own recording

        Raises MemoryError if the arena does not fit.
        """
        state = self._library.sn_placing_begin(pool, step, stream)
        if state == _TO_PLACE:
            self._place(pool, step)
            state = self._library.sn_placing_begin(pool, step, stream)
        if state not in (_PLACED, _RECORDED):
            raise self._out_of_memory()

    def _out_of_memory(self) -> MemoryError:
        why = self._library.sn_placing_error().decode()
        return MemoryError(f"sn_memory's placing allocator: {why}")

    def _place(self, pool: int, step: int) -> None:
        # With a count of 0, the library returns the number of rows of (size, lower, upper).
        count = self._library.sn_placing_rows(pool, step, None, 0)
        numbers = (ctypes.c_int64 * (3 * count))()
        self._library.sn_placing_rows(pool, step, numbers, count)
        rows = list(zip(*[iter(numbers)] * 3, strict=True))
        # Allocations that outlive the step have no place in the arena.
        freed = [at for at, (_, _, upper) in enumerate(rows) if upper >= 0]
        buffers = [(rows[at][1], rows[at][2], rows[at][0] // GRAIN) for at in freed]
        packing = arrange(buffers, time_limit_s=PACK_S, deterministic=True)
        # Below 0: it uses its size class.
        offsets = (ctypes.c_int64 * count)(*[-1] * count)
        for at, offset in zip(freed, packing.offsets, strict=True):
            offsets[at] = offset * GRAIN
        done = self._library.sn_placing_place(pool, step, offsets, count)
        assert done == 0, "the packing does not fit its recording"

    @contextmanager
    def inside(self, pool: int) -> Iterator[None]:
        """Assign allocations of this thread to the pool's step."""
        before = self._library.sn_placing_enter(pool)
        try:
            yield
        finally:
            self._library.sn_placing_enter(before)

    def give_back(self, pool: int) -> None:
        """Release a pool's arena once it is empty; the next step reserves it again."""
        self._library.sn_placing_give_back(pool)

    def forget(self, pool: int) -> None:
        """Release a pool's arena, and drop its recordings."""
        self._library.sn_placing_forget(pool)

    def trim(self) -> None:
        """Release empty segments of size classes."""
        self._library.sn_placing_trim()

    def allocate(self, nbytes: int, device: int = 0, stream: int = 0) -> int:
        """Return the address of a block, as torch gets it.

        Raises MemoryError if there is no room.
        """
        address = self._library.sn_placing_allocate(nbytes, device, stream)
        # For 0 bytes there is no block, which is not an error.
        if address is None and nbytes:
            raise self._out_of_memory()
        return address or 0

    def release(self, address: int) -> None:
        """Free a block.

        Raises ValueError unless a block in use begins at the address.
        """
        bad = self._library.sn_placing_release(address)
        if bad:
            why = (
                "it was freed already, or is inside a block"
                if bad == 1
                else "it was not allocated here"
            )
            raise ValueError(f"cannot free {address:#x}: {why}; expected what `allocate` returned.")

    def cross(self, address: int, stream: int) -> None:
        """Record that another stream uses a block: freeing it waits for the device."""
        self._library.sn_placing_record_stream(address, stream)

    def statistics(self, device: int = 0) -> PlacingStatistics:
        """Return the memory held on a device."""
        numbers = (ctypes.c_int64 * len(fields(PlacingStatistics)))()
        self._library.sn_placing_statistics(device, numbers)
        return PlacingStatistics(*numbers)

    def step_statistics(self, pool: int, step: int) -> StepStatistics:
        """Return the statistics of the latest step of this kind."""
        numbers = (ctypes.c_int64 * len(fields(StepStatistics)))()
        self._library.sn_placing_step(pool, step, numbers)
        return StepStatistics(*numbers)

    def reset_peaks(self, device: int = 0) -> None:
        """Reset peaks to the current values."""
        self._library.sn_placing_reset_peaks(device)
