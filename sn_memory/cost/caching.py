"""Simulation of torch's caching allocator: what it reserves for given allocations.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp` and `c10/core/AllocatorConfig.cpp` of
torch 2.13. Sizes are multiples of 512 bytes. Blocks up to 1 MiB come from segments of 2 MiB, those
below 10 MiB from segments of 20 MiB; larger ones have their own segments, multiples of 2 MiB. The
smallest free block that is large enough is taken, and split if the rest is large enough to be
useful. With expandable segments, each of the two pools is one segment that grows by 2 or 20 MiB.

Not modelled: more than one stream; a limit, at which torch releases cached segments and then
raises; and `garbage_collection_threshold`, which releases them before they are needed elsewhere and
is only effective if the process has set a memory fraction.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from ..graph.liveness import most_together

UNLIMITED: Final = 1 << 62
# The second step begins with the segments that the first has left, split as they are.
_STEPS = 2

Rows = list[tuple[int, int, int]]
"""(lower, upper, size), half-open in numbers of actions."""


@dataclass(frozen=True)
class Reserved:
    """What an allocator reserves for a step.

    peak_bytes : the most, including resident storages
    pool_bytes : size of the initial segment of the step's pool; 0 for none
    """

    peak_bytes: int
    pool_bytes: int = 0


class Settings(Protocol):
    """The settings of an allocator, and what it reserves with them."""

    @property
    def caching(self) -> bool: ...
    @property
    def name(self) -> str: ...
    @property
    def reserves(self) -> str: ...
    @property
    def others(self) -> Mapping[str, Settings]: ...
    def reserved(self, resident: Rows, step: Rows) -> Reserved: ...
    def most(self, budget_bytes: int) -> int: ...


class Block:
    """A block of reserved memory: in use, free, or (torch) unmapped."""

    __slots__ = ("address", "after", "before", "size", "small", "state")

    def __init__(self, address: int, size: int, state: str, *, small: bool) -> None:
        self.address, self.size, self.state, self.small = address, size, state, small
        self.before: Block | None = None
        self.after: Block | None = None


class BlockAllocator(ABC):
    """Allocates blocks from reserved memory, and caches them when they are freed.

    allocated_bytes, reserved_bytes : current: of blocks in use, by their block sizes; of all
        reserved memory.
    peak_allocated_bytes, peak_reserved_bytes : the most so far
    """

    def __init__(self) -> None:
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        # Per pool, whether small: free blocks as (bytes, address), and unmapped ones.
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._unmapped: dict[bool, list[int]] = {True: [], False: []}
        # Every block that is not in use, by address, and those in use, by the caller's key.
        self._at: dict[int, Block] = {}
        self._held: dict[object, Block] = {}
        self._next_address = 0

    @abstractmethod
    def allocate(self, key: object, nbytes: int) -> None:
        """Allocate a block; none for 0 bytes. A key that is held is freed first."""

    def free(self, key: object) -> None:
        """Free a block and merge it with free neighbours; ignore a key that is not held."""
        block = self._held.pop(key, None)
        if block is not None:
            self.allocated_bytes -= block.size
            block.state = "free"
            self._put(self._joined(block))

    def _hold(self, key: object, block: Block) -> None:
        block.state = "used"
        self._held[key] = block
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)

    def _reserve(self, nbytes: int) -> None:
        self.reserved_bytes += nbytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _cut(self, block: Block, size: int) -> None:
        """Keep `size` bytes of a taken block; the rest becomes free."""
        left = block.size - size
        block.size = size
        self._put(self._cut_off(block, left, "free"))

    def _put(self, block: Block) -> None:
        self._at[block.address] = block
        if block.state == "free":
            insort(self._free[block.small], (block.size, block.address))
        else:
            insort(self._unmapped[block.small], block.address)

    def _take(self, block: Block) -> Block:
        del self._at[block.address]
        if block.state == "free":
            rows = self._free[block.small]
            del rows[bisect_left(rows, (block.size, block.address))]
        else:
            places = self._unmapped[block.small]
            del places[bisect_left(places, block.address)]
        return block

    def _cut_off(self, block: Block, size: int, state: str) -> Block:
        """Return a new block right after `block`, whose size the caller has reduced."""
        rest = Block(block.address + block.size, size, state, small=block.small)
        rest.before, rest.after = block, block.after
        if block.after is not None:
            block.after.before = rest
        block.after = rest
        return rest

    def _joined(self, block: Block) -> Block:
        """Return the block merged with its neighbours of the same state."""
        before = block.before
        if before is not None and before.state == block.state:
            self._take(before)
            before.size += block.size
            self._bridge(before, block.after)
            block = before
        after = block.after
        if after is not None and after.state == block.state:
            self._take(after)
            block.size += after.size
            self._bridge(block, after.after)
        return block

    @staticmethod
    def _bridge(before: Block, after: Block | None) -> None:
        before.after = after
        if after is not None:
            after.before = before


def replay(memory: BlockAllocator, rows: Rows, most_bytes: float = math.inf) -> None:
    """Replay steps: allocate and free buffers in the order of time, then of rows.

    All are freed in the end. Stops when more than `most_bytes` are reserved.
    """
    events = [(lower, 1, at) for at, (lower, _, _) in enumerate(rows)]
    events += [(upper, 0, at) for at, (_, upper, _) in enumerate(rows)]
    # At the same time, frees come before allocations, as lifetimes are half-open.
    events.sort()
    for _ in range(_STEPS):
        for _, allocates, at in events:
            if not allocates:
                memory.free(at)
                continue
            memory.allocate(at, rows[at][2])
            if memory.peak_reserved_bytes > most_bytes:
                return


_MIB = 1 << 20
GRAIN: Final = 512
SMALL: Final = _MIB
SMALL_SEGMENT: Final = 2 * _MIB
LARGE_SEGMENT: Final = 20 * _MIB
LARGE: Final = 10 * _MIB
ROUND_LARGE: Final = 2 * _MIB
# Granules of an expandable segment: more than any device's memory.
_GRANULES = 1 << 24
# Sizes from 1 MiB to 64 GiB have a number of divisions for each power of two.
_INTERVALS = 16
# First segments that are tried: the largest sum of large blocks, and this many hundredths more.
_MORE = range(16)
_EXPANDABLE = "expandable_segments:True"
# Keys and values of settings; commas inside brackets do not separate pairs.
_PAIR = re.compile(r"([^,:\[\]]+):(\[[^\]]*\]|[^,\[\]]*)")


@dataclass(frozen=True)
class AllocatorSettings:
    """The settings in `PYTORCH_ALLOC_CONF` that affect sizes.

    expandable : `expandable_segments`
    max_split_bytes : `max_split_size_mb`: blocks of this size and more are neither split nor used
        for smaller requests.
    non_split_bytes : `max_non_split_rounding_mb`: a request of `max_split_bytes` and more takes a
        free block that is larger by less than this.
    large_segment_bytes : `large_segment_size_mb`: of segments shared by blocks below 10 MiB.
    divisions : `roundup_power2_divisions`, per power of two from 1 MiB to 64 GiB; empty rounds to
        512 bytes.
    caching : whether torch's own allocator is used: not with `backend:cudaMallocAsync`, whose rules
        are not public.
    text : the original text

    Examples
    --------
    >>> AllocatorSettings.of("expandable_segments:True").expandable
    True
    """

    expandable: bool = False
    max_split_bytes: int = UNLIMITED
    non_split_bytes: int = LARGE_SEGMENT
    large_segment_bytes: int = LARGE_SEGMENT
    divisions: tuple[int, ...] = ()
    caching: bool = True
    text: str = field(default="", compare=False)

    @staticmethod
    def of(text: str) -> AllocatorSettings:
        """Parse the text of `PYTORCH_ALLOC_CONF`, which torch has already validated."""
        values = dict(_PAIR.findall("".join(text.split())))

        def size(key: str, default: int) -> int:
            return int(values[key]) * _MIB if key in values else default

        large = size("large_segment_size_mb", LARGE_SEGMENT)
        return AllocatorSettings(
            expandable=values.get("expandable_segments") == "True",
            max_split_bytes=size("max_split_size_mb", UNLIMITED),
            non_split_bytes=size("max_non_split_rounding_mb", large),
            large_segment_bytes=large,
            divisions=_divisions(values.get("roundup_power2_divisions", "")),
            caching=values.get("backend", "native") == "native",
            text=text,
        )

    @property
    def name(self) -> str:
        """The allocator and its settings, as text."""
        return f"torch's allocator ({self.text or 'default settings'})"

    @property
    def reserves(self) -> str:
        """Text to precede the number of reserved bytes."""
        return "torch's allocator reserves"

    @property
    def others(self) -> dict[str, AllocatorSettings]:
        """Settings that may reserve less, by the text that says how to set them."""
        texts = {"no PYTORCH_ALLOC_CONF": "", f"PYTORCH_ALLOC_CONF={_EXPANDABLE}": _EXPANDABLE}
        named = {name: AllocatorSettings.of(text) for name, text in texts.items()}
        return {name: other for name, other in named.items() if other != self}

    def reserved(self, resident: Rows, step: Rows) -> Reserved:
        """Return what is reserved with a step, with the best initial segment found.

        Resident buffers are in one pool, the step in another that begins with that segment.
        """
        base = CachingAllocator(self)
        for number, (_, _, size) in enumerate(resident):
            base.allocate(number, size)
        best = Reserved(self._steps(step, 0))
        # An expandable segment needs no initial one; one that is not split is of no use.
        if not self.expandable and self.max_split_bytes == UNLIMITED:
            large = most_together(row for row in step if self.rounded(row[2]) > SMALL)
            for hundredths in _MORE if large else ():
                first = -(-large * (100 + hundredths) // 100 // ROUND_LARGE) * ROUND_LARGE
                # The first segment alone would be as large as the best so far.
                if first >= best.peak_bytes:
                    break
                # The replay stops as soon as it reserves more than the best so far.
                tried = Reserved(self._steps(step, first, best.peak_bytes), first)
                best = min(best, tried, key=lambda reserved: reserved.peak_bytes)
        return Reserved(base.reserved_bytes + best.peak_bytes, best.pool_bytes)

    def most(self, budget_bytes: int) -> int:
        """Return the most that can be reserved within a budget: segments can have any size."""
        return budget_bytes

    def _steps(self, rows: Rows, first_bytes: int, most_bytes: float = math.inf) -> int:
        memory = CachingAllocator(self)
        memory.allocate("first", first_bytes)
        memory.free("first")
        replay(memory, rows, most_bytes)
        return memory.peak_reserved_bytes

    def rounded(self, nbytes: int) -> int:
        """Return the block size for a request of `nbytes`."""
        if self.divisions and nbytes > GRAIN:
            # The first interval ends at 1 MiB, which is 2**20.
            power = nbytes.bit_length() - 1
            divisions = self.divisions[min(max(power - 20, 0), _INTERVALS - 1)]
            if divisions > 1 and nbytes > GRAIN * divisions:
                step = (1 << power) // divisions
                return -(-nbytes // step) * step
        return -(-nbytes // GRAIN) * GRAIN

    def segment(self, size: int) -> int:
        """Return the size of the segment that is reserved for a block."""
        if size <= SMALL:
            return SMALL_SEGMENT
        if size < LARGE:
            return self.large_segment_bytes
        return -(-size // ROUND_LARGE) * ROUND_LARGE

    def cuts(self, size: int, left: int, *, small: bool) -> bool:
        """Whether a block is split for a request, so that `left` bytes stay free."""
        if small or self.expandable:
            return left >= GRAIN
        # Large blocks serve requests above 1 MiB, so a smaller rest would be useless.
        return size < self.max_split_bytes and left > SMALL


def _divisions(text: str) -> tuple[int, ...]:
    """Return the divisions per interval from `8`, or from `[256:1,512:2,>:8]` in MiB."""
    if not text:
        return ()
    if not text.startswith("["):
        return (int(text),) * _INTERVALS
    divisions = [0] * _INTERVALS
    last = -1
    for first, (boundary, value) in enumerate(_PAIR.findall(text[1:-1])):
        if boundary == ">":
            divisions[last + 1 :] = [int(value)] * (_INTERVALS - last - 1)
            continue
        last = min(int(boundary).bit_length() - 1, _INTERVALS - 1)
        if not first:
            divisions[:last] = [int(value)] * last
        divisions[last] = int(value)
    return tuple(divisions)


class CachingAllocator(BlockAllocator):
    """Reserves segments for blocks that are allocated and freed.

    settings : of the process; default: torch's defaults.

    Examples
    --------
    >>> from sn_memory.cost.caching import CachingAllocator
    >>> memory = CachingAllocator()
    >>> memory.allocate("x", 1000)
    >>> memory.allocated_bytes, memory.reserved_bytes
    (1024, 2097152)
    """

    def __init__(self, settings: AllocatorSettings | None = None) -> None:
        super().__init__()
        self.settings = settings or AllocatorSettings()

    def allocate(self, key: object, nbytes: int) -> None:
        self.free(key)
        if not nbytes:
            return
        size = self.settings.rounded(nbytes)
        small = size <= SMALL
        block = self._cached(size, small) or self._reserved(size, small)
        if self.settings.cuts(size, block.size - size, small=small):
            self._cut(block, size)
        self._hold(key, block)

    def _cached(self, size: int, small: bool) -> Block | None:
        """Return the smallest free block that may be used, removed from its pool."""
        free, settings = self._free[small], self.settings
        # The key with address -1 sorts before all blocks of that size.
        place = bisect_left(free, (size, -1))
        if place == len(free):
            return None
        if settings.expandable:
            # The segment's end counts with the size it can grow to, so others are used first.
            while place + 1 < len(free) and self._room(free[place + 1]) < self._room(free[place]):
                place += 1
        have, address = free[place]
        # Large blocks are reserved for large requests, and those take none that is much larger.
        if size < settings.max_split_bytes <= have:
            return None
        if size >= settings.max_split_bytes and have >= size + settings.non_split_bytes:
            return None
        return self._take(self._at[address])

    def _room(self, row: tuple[int, int]) -> int:
        after = self._at[row[1]].after
        return row[0] + (after.size if after is not None and after.state == "unmapped" else 0)

    def _reserved(self, size: int, small: bool) -> Block:
        """Return a block in newly reserved memory."""
        if self.settings.expandable:
            return self._expanded(size, small)
        room = self.settings.segment(size)
        self._reserve(room)
        self._next_address += room
        return Block(self._next_address - room, room, "free", small=small)

    # Expandable segments.

    def _expanded(self, size: int, small: bool) -> Block:
        """Return a block at the lowest address where enough memory can be mapped."""
        block = self._expandable(size, small)
        while block.state == "unmapped" or block.size < size:
            empty, missing = block, size
            if block.state == "free":
                assert block.after is not None
                empty, missing = block.after, size - block.size
            block = self._map(empty, min(missing, empty.size))
        return self._take(block)

    def _expandable(self, size: int, small: bool) -> Block:
        """Return the first of adjacent blocks, free or unmapped, that are large enough together."""
        for address in self._unmapped[small]:
            block = self._at[address]
            if block.before is not None and block.before.state == "free":
                block = block.before
            room, at = 0, block
            while at is not None and at.state != "used" and room < size:
                room, at = room + at.size, at.after  # type: ignore[assignment]
            if room >= size:
                return block
        # If there is none: a new segment with its own address range, unmapped so far.
        granule = self._granule(small)
        address = -(-self._next_address // granule) * granule
        self._next_address = address + granule * _GRANULES
        block = Block(address, granule * _GRANULES, "unmapped", small=small)
        self._put(block)
        return block

    def _granule(self, small: bool) -> int:
        return SMALL_SEGMENT if small else self.settings.large_segment_bytes

    def _map(self, block: Block, size: int) -> Block:
        """Map memory to the first bytes of a block, in whole granules."""
        granule = self._granule(block.small)
        size = -(-size // granule) * granule
        self._reserve(size)
        self._take(block)
        if left := block.size - size:
            block.size = size
            self._put(self._cut_off(block, left, "unmapped"))
        # Set its state first: `_joined` merges neighbours of the same state.
        block.state = "free"
        block = self._joined(block)
        self._put(block)
        return block
