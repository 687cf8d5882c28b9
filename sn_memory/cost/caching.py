"""torch's caching allocator on paper: what it reserves for what is allocated.

By the rules of `c10/cuda/CUDACachingAllocator.cpp` with its default settings: sizes are multiples
of 512 bytes; blocks up to 1 MiB come from segments of 2 MiB, those below 10 MiB from segments of 20
MiB, larger ones have segments of their own, multiples of 2 MiB; the smallest free block that is
large enough is taken, and cut where what is left is worth it. Segments stay until the end.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Final

_MIB = 1 << 20
GRAIN: Final = 512
SMALL: Final = _MIB
SMALL_SEGMENT: Final = 2 * _MIB
LARGE_SEGMENT: Final = 20 * _MIB
LARGE: Final = 10 * _MIB
ROUND_LARGE: Final = 2 * _MIB


class CachingAllocator:
    """Reserves segments for blocks that come and go.

    Attributes
    ----------
    allocated_bytes, reserved_bytes
        Now: of blocks in use, rounded; of all segments.
    peak_allocated_bytes, peak_reserved_bytes
        The most so far.

    Examples
    --------
    >>> from sn_memory.cost.caching import CachingAllocator
    >>> memory = CachingAllocator()
    >>> memory.allocate("x", 1000)
    >>> memory.allocated_bytes, memory.reserved_bytes
    (1024, 2097152)
    """

    def __init__(self) -> None:
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        # Free blocks of both pools as (bytes, segment, offset), smallest first.
        self._free: dict[bool, list[tuple[int, int, int]]] = {True: [], False: []}
        # Per segment, its blocks as offset -> (bytes, in use), in order of offsets.
        self._segments: list[tuple[bool, dict[int, tuple[int, bool]]]] = []
        self._held: dict[object, tuple[int, int]] = {}

    def allocate(self, key: object, nbytes: int) -> None:
        """Take a block; of 0 bytes none is taken. A key that is held is freed first."""
        self.free(key)
        if not nbytes:
            return
        size = -(-nbytes // GRAIN) * GRAIN
        small = size <= SMALL
        pool = self._free[small]
        place = bisect_left(pool, (size, -1, -1))
        if place == len(pool):
            self._reserve(size, small)
            place = bisect_left(pool, (size, -1, -1))
        have, segment, offset = pool.pop(place)
        blocks = self._segments[segment][1]
        left = have - size
        if left >= GRAIN if small else left > SMALL:
            blocks[offset + size] = (left, False)
            insort(pool, (left, segment, offset + size))
            have = size
        blocks[offset] = (have, True)
        self._held[key] = (segment, offset)
        self.allocated_bytes += have
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)

    def free(self, key: object) -> None:
        """Give a block back, joined with free neighbours; nothing for a key that is not held."""
        if key not in self._held:
            return
        segment, offset = self._held.pop(key)
        small, blocks = self._segments[segment]
        size, _ = blocks.pop(offset)
        self.allocated_bytes -= size
        pool = self._free[small]
        after = blocks.get(offset + size)
        if after is not None and not after[1]:
            del blocks[offset + size]
            _remove(pool, (after[0], segment, offset + size))
            size += after[0]
        before = next((it for it in blocks if it + blocks[it][0] == offset), None)
        if before is not None and not blocks[before][1]:
            joined = blocks.pop(before)[0]
            _remove(pool, (joined, segment, before))
            offset, size = before, size + joined
        blocks[offset] = (size, False)
        insort(pool, (size, segment, offset))

    def _reserve(self, size: int, small: bool) -> None:
        if small:
            room = SMALL_SEGMENT
        elif size < LARGE:
            room = LARGE_SEGMENT
        else:
            room = -(-size // ROUND_LARGE) * ROUND_LARGE
        self._segments.append((small, {0: (room, False)}))
        insort(self._free[small], (room, len(self._segments) - 1, 0))
        self.reserved_bytes += room
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)


def _remove(pool: list[tuple[int, int, int]], block: tuple[int, int, int]) -> None:
    del pool[bisect_left(pool, block)]
