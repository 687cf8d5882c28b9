"""What allocators that keep what is freed have in common: blocks cut, joined, found by their size.

torch's (`caching.py`) and TensorFlow's (`bfc.py`) differ in what they reserve and where they cut.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

UNLIMITED: Final = 1 << 62
# The second step begins with what the first has left.
_STEPS = 2

Rows = list[tuple[int, int, int]]
"""(lower, upper, size), half-open in numbers of actions."""


@dataclass(frozen=True)
class Reserved:
    """What an allocator reserves for a step.

    Parameters
    ----------
    peak_bytes
        The most, with what is resident.
    pool_bytes
        Of the segment that the pool of the step begins with; 0 for none.
    """

    peak_bytes: int
    pool_bytes: int = 0


class Settings(Protocol):
    """The settings of an allocator, and what it reserves by them."""

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
    """A piece of what is reserved: in use, free, or (torch) without memory behind it."""

    __slots__ = ("address", "after", "before", "size", "small", "state")

    def __init__(self, address: int, size: int, state: str, *, small: bool) -> None:
        self.address, self.size, self.state, self.small = address, size, state, small
        self.before: Block | None = None
        self.after: Block | None = None


class BlockAllocator(ABC):
    """Hands out blocks of what it has reserved, and keeps them when they are freed.

    Parameters
    ----------
    limit_bytes
        The most that can be reserved.

    Attributes
    ----------
    allocated_bytes, reserved_bytes
        Now: of blocks in use, as large as they are handed out; of all that is reserved.
    peak_allocated_bytes, peak_reserved_bytes
        The most so far.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        # Per pool, whether small: free blocks as (bytes, address), and those without memory.
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._unmapped: dict[bool, list[int]] = {True: [], False: []}
        # Every block that is not in use, by address, and those in use, by the caller's key.
        self._at: dict[int, Block] = {}
        self._held: dict[object, Block] = {}
        self._next_address = 0

    @abstractmethod
    def allocate(self, key: object, nbytes: int) -> None:
        """Take a block; of 0 bytes none is taken. A key that is held is freed first.

        Raises MemoryError where the limit has no room for it.
        """

    def free(self, key: object) -> None:
        """Give a block back, joined with free neighbours; nothing for a key that is not held."""
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

    def _full(self, size: int) -> MemoryError:
        return MemoryError(
            f"{size} bytes do not fit: {self.reserved_bytes} of {self.limit_bytes} are "
            f"reserved, {self.allocated_bytes} in use."
        )

    def _reserve(self, nbytes: int) -> bool:
        if self.reserved_bytes + nbytes > self.limit_bytes:
            return False
        self.reserved_bytes += nbytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def _cut(self, block: Block, size: int) -> None:
        """Keep so many bytes of a free block that is taken; the rest is free."""
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
        """Return a new block right after one, whose size the caller has set."""
        rest = Block(block.address + block.size, size, state, small=block.small)
        rest.before, rest.after = block, block.after
        if block.after is not None:
            block.after.before = rest
        block.after = rest
        return rest

    def _joined(self, block: Block) -> Block:
        """Return the block with its neighbours of the same state, which leave their rows."""
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


def replay(memory: BlockAllocator, rows: Rows) -> None:
    """Make steps: buffers come and go in the order of time, and of rows; all go in the end."""
    events = [(lower, 1, at) for at, (lower, _, _) in enumerate(rows)]
    events += [(upper, 0, at) for at, (_, upper, _) in enumerate(rows)]
    events.sort()
    for _ in range(_STEPS):
        for _, allocates, at in events:
            if allocates:
                memory.allocate(at, rows[at][2])
            else:
                memory.free(at)
