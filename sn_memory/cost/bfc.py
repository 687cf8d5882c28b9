"""Simulation of TensorFlow's BFC allocator: what it reserves on a GPU for given allocations.

The rules are those of `xla/tsl/framework/bfc_allocator.cc` and of TensorFlow's
`gpu_bfc_allocator.cc`, as of TensorFlow 2.21. Sizes are multiples of 256 bytes. The smallest free
block that is large enough is taken (of equal ones the one at the lowest address), and split only if
it is at least twice as large as requested, or 128 MiB would be left: else it is used entirely. A
freed block is merged with free neighbours in its region.

By default a process reserves one region, its entire limit, when it first needs memory; with memory
growth, regions of 2 MiB and more, each twice the previous one, or as large as needed. They are not
merged. If the limit has no room for a region, empty regions are released first.

Not modelled: a driver with less memory than the limit, for which regions become smaller; internal
fragmentation as a share of the limit; more than one stream.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Final

from .caching import UNLIMITED, Block, BlockAllocator, Reserved, Rows, replay

_MIB = 1 << 20
GRAIN: Final = 256
FIRST_REGION: Final = 2 * _MIB
# Blocks of less than twice the request are split if this much is left.
MOST_LEFT: Final = 128 * _MIB
# Sizes tried for one region: the highest address of a step, and this many hundredths more.
_MORE = range(16)


@dataclass(frozen=True)
class BFCSettings:
    """Settings of TensorFlow's allocator that affect what it reserves.

    growth : memory growth: `tf.config.experimental.set_memory_growth`, TF_FORCE_GPU_ALLOW_GROWTH.
    limit_bytes : the most that the process may reserve
    gives_back : TF_ENABLE_GPU_GARBAGE_COLLECTION
    caching : whether this allocator is used: not with TF_GPU_ALLOCATOR=cuda_malloc_async, whose
        rules are not public.
    """

    growth: bool = False
    limit_bytes: int = UNLIMITED
    gives_back: bool = True
    caching: bool = True

    @property
    def name(self) -> str:
        """The allocator and its settings, as text."""
        if not self.caching:
            return "TF_GPU_ALLOCATOR"
        return f"TensorFlow's allocator ({'memory growth' if self.growth else 'one region'})"

    @property
    def reserves(self) -> str:
        """Text to precede the number of reserved bytes."""
        verb = "reserves" if self.growth else "needs a region of"
        return f"TensorFlow's allocator {verb}"

    @property
    def others(self) -> dict[str, BFCSettings]:
        """Settings that may reserve less, by the text that says how to set them."""
        if not self.growth:
            return {}
        return {"a memory_limit without memory growth": replace(self, growth=False)}

    def reserved(self, resident: Rows, step: Rows) -> Reserved:
        """Return what is reserved with a step: with memory growth, all regions.

        Otherwise the smallest region in which the step fits: a process that may reserve more does
        so, whatever the step needs.
        """
        if self.growth:
            # The limit matters only if it is reached: then empty regions are released.
            try:
                return Reserved(self._steps(self.limit_bytes, resident, step).peak_reserved_bytes)
            except MemoryError:
                grown = self._steps(UNLIMITED, resident, step).peak_reserved_bytes
                # Above the limit in any case, so that no budget within it appears to be kept.
                return Reserved(max(grown, self.limit_bytes + 1))
        # A smaller region is split differently, so try whether the step fits.
        reach = self._steps(UNLIMITED, resident, step).reach_bytes
        for hundredths in _MORE:
            region = -(-reach * (100 + hundredths) // 100 // GRAIN) * GRAIN
            try:
                self._steps(region, resident, step)
            except MemoryError:
                continue
            return Reserved(region)
        # With MOST_LEFT to spare, every block is split as in an infinite region.
        return Reserved(reach + MOST_LEFT)

    def most(self, budget_bytes: int) -> int:
        """Return the most that can be reserved within a budget: with growth, whole regions.

        Assumes that each is twice the previous one, as is the case if no block is larger.
        """
        if not self.growth or budget_bytes >= self.limit_bytes:
            return budget_bytes
        # Below its limit TensorFlow only reserves whole regions.
        total, region = 0, FIRST_REGION
        while total + region <= budget_bytes:
            total, region = total + region, 2 * region
        return total

    def _steps(self, limit_bytes: int, resident: Rows, step: Rows) -> BFCAllocator:
        memory = BFCAllocator(replace(self, limit_bytes=limit_bytes))
        for number, (_, _, size) in enumerate(resident):
            memory.allocate(("resident", number), size)
        replay(memory, step)
        return memory


class BFCAllocator(BlockAllocator):
    """Reserves regions for blocks that are allocated and freed.

    settings : of the process; default: one infinite region
    reach_bytes : the end of the highest block so far; regions are contiguous

    Examples
    --------
    >>> from sn_memory.cost.bfc import BFCAllocator, BFCSettings
    >>> memory = BFCAllocator(BFCSettings(growth=True))
    >>> memory.allocate("x", 1000)
    >>> memory.allocated_bytes, memory.reserved_bytes
    (1024, 2097152)
    """

    def __init__(self, settings: BFCSettings | None = None) -> None:
        self.settings = settings or BFCSettings()
        super().__init__()
        self.limit_bytes = self.settings.limit_bytes
        self.reach_bytes = 0
        first = min(self.limit_bytes, FIRST_REGION) if self.settings.growth else self.limit_bytes
        self._region_bytes = -(-first // GRAIN) * GRAIN

    def allocate(self, key: object, nbytes: int) -> None:
        """Allocate a block; raise MemoryError if the limit has no room."""
        self.free(key)
        if not nbytes:
            return
        size = -(-nbytes // GRAIN) * GRAIN
        block = self._cached(size)
        # Like TensorFlow: first a new region; empty ones are released for it only at the limit.
        if block is None and (self._extend(size) or (self._give_back(size) and self._extend(size))):
            block = self._cached(size)
        if block is None:
            raise MemoryError(
                f"{size} bytes do not fit: {self.reserved_bytes} of {self.limit_bytes} are "
                f"reserved, {self.allocated_bytes} in use."
            )
        if block.size >= 2 * size or block.size - size >= MOST_LEFT:
            self._cut(block, size)
        self._hold(key, block)
        self.reach_bytes = max(self.reach_bytes, block.address + block.size)

    def _cached(self, size: int) -> Block | None:
        """Return the smallest free block that is large enough, removed from the free list."""
        free = self._free[False]
        place = bisect_left(free, (size, -1))
        return None if place == len(free) else self._take(self._at[free[place][1]])

    def _extend(self, size: int) -> bool:
        """Reserve one more region, twice the last one or as large as needed, if there is room."""
        room = (self.limit_bytes - self.reserved_bytes) // GRAIN * GRAIN
        if size > room:
            return False
        doubled = False
        while self._region_bytes < size:
            self._region_bytes, doubled = 2 * self._region_bytes, True
        region = min(self._region_bytes, room)
        # Like TensorFlow: a region enlarged for its block does not double the next one.
        if not doubled:
            self._region_bytes *= 2
        self._reserve(region)
        self._put(Block(self._next_address, region, "free", small=False))
        self._next_address += region
        return True

    def _give_back(self, size: int) -> bool:
        """Release empty regions if that makes room."""
        rows = [self._at[address] for _, address in self._free[False]]
        # A free block without neighbours is an entire region.
        free = [row for row in rows if row.before is None and row.after is None]
        freed = sum(row.size for row in free)
        room = self.limit_bytes - self.reserved_bytes + freed
        if not self.settings.gives_back or not freed or size > room:
            return False
        for block in free:
            self._take(block)
        self.reserved_bytes -= freed
        return True
