"""Checkpoints at several levels: dynamic programming over the chain of blocks.

E(i, j)[m] is the fewest extra seconds to carry blocks i to j out, forward and backward, within m
bytes above what is held before block i:

    take an option of block i, and go on with i + 1 to j in what its held bytes leave, or
    run i to k - 1 forward holding nothing, do k to j, then i to k - 1 from the start again.

This is rotor's recursion (Beaumont et al., 2019) with more than one option per block. Bytes are
counted in units, held and peak rounded up, so that what fits in units fits in bytes. One table
serves all budgets. Stretches of equal blocks that are crossed by as many bytes share one entry: a
loop of a thousand equal calls has as many entries as it has lengths, not their square.

A solution is written down as a choice per hole: what the second line holds at an inner level is
held only from the moment that level begins.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import numpy as np

from ...base.clock import now, spend
from ...graph.graph import Floats
from ...graph.holes import KEEP, Holes
from .block_options import Option, options
from .blocks import Block, signature, split

UNITS = 400
# Units of work to look at one way over all budgets.
WAY = 60


class Chain:
    """The blocks of a graph, their options, and the table E.

    Parameters
    ----------
    shape
        The holes of the graph.
    most_bytes
        Budgets above this need no chain: the peak of the graph as it stands.
    deadline, end
        For finding options, and for the table: where it is not full by then, there is none.
    """

    def __init__(self, shape: Holes, most_bytes: int, *, deadline: float, end: float) -> None:
        self.shape = shape
        self.blocks = split(shape)
        self.base = shape.graph.base_bytes
        self.unit = max(1, -(-(most_bytes - self.base) // UNITS))
        solved: dict[object, list[Option]] = {}
        self.options: list[list[Option]] = []
        # Per stretch a number that it shares with those of equal blocks and crossings.
        self.numbers: dict[object, int] = {}
        self.stretch: dict[tuple[int, int], int] = {}
        for at, block in enumerate(self.blocks):
            key = signature(block)
            if key not in solved:
                solved[key] = options(block, deadline=deadline)
            self.options.append(solved[key])
            self.stretch[at, at] = self._number((key, block.ambient_bytes))
        self.turn_holes = _turn_holes(shape, self.blocks)
        self.crossing: dict[int, list[int]] = {}
        self.table: dict[tuple[int, int], Floats] = {}
        if self.blocks and not self._filled(end):
            self.blocks = []

    def _units(self, size: int) -> int:
        return -(-max(0, size) // self.unit)

    def _crossing(self, first: int, cut: int) -> int:
        """Bytes that cross into block `cut` and were made by blocks from `first` on."""
        if cut not in self.crossing:
            made = [
                (self.shape.chain[storage][0], self.shape.bytes[storage])
                for storage in self.blocks[cut].crossing
            ]
            self.crossing[cut] = [
                sum(size for op, size in made if op >= block.first) for block in self.blocks[:cut]
            ]
        return self.crossing[cut][first]

    def _filled(self, end: float) -> bool:
        """Fill the table; False if time is over before."""
        count = len(self.blocks)
        forward = np.cumsum([0.0, *(block.forward_s for block in self.blocks)])
        solved: dict[int, Floats] = {}
        for length in range(1, count + 1):
            for i in range(count - length + 1):
                if now() > end:
                    return False
                j = i + length - 1
                number = self._stretch(i, j)
                if number not in solved:
                    best = np.full(UNITS + 1, np.inf)
                    for value, _, _ in self._ways(i, j, forward):
                        np.minimum(best, value, out=best)
                    solved[number] = best
                self.table[i, j] = solved[number]
        return True

    def _stretch(self, i: int, j: int) -> int:
        """Return the number of blocks i to j, which follows from those of its two longest parts."""
        if (i, j) not in self.stretch:
            parts = self.stretch[i, j - 1], self.stretch[i + 1, j], self._crossing(i, j)
            self.stretch[i, j] = self._number(parts)
        return self.stretch[i, j]

    def _number(self, key: object) -> int:
        return self.numbers.setdefault(key, len(self.numbers))

    def _ways(self, i: int, j: int, forward: Floats) -> list[tuple[Floats, str, int]]:
        """Return E(i, j) by each way: its values, and `option` or `cut` with its number."""
        found = []
        block = self.blocks[i]
        for number, option in enumerate(self.options[i]):
            value = np.full(UNITS + 1, np.inf)
            shift = self._units(option.held_bytes)
            if i == j:
                value[:] = option.extra_s
            elif shift <= UNITS:
                value[shift:] = self.table[i + 1, j][: UNITS + 1 - shift] + option.extra_s
            value[: self._units(option.peak_bytes + block.ambient_bytes)] = np.inf
            found.append((value, "option", number))
        rise = 0
        for k in range(i + 1, j + 1):
            rise = max(rise, self.blocks[k - 1].forward_peak_bytes)
            shift = self._units(self._crossing(i, k))
            if shift > UNITS:
                continue
            value = np.full(UNITS + 1, np.inf)
            value[shift:] = self.table[k, j][: UNITS + 1 - shift] + (forward[k] - forward[i])
            value += self.table[i, k - 1]
            value[: self._units(rise)] = np.inf
            found.append((value, "cut", k))
        spend(WAY * len(found))
        return found

    def extra_seconds(self, budget_bytes: int) -> float:
        """Return the table's answer for a budget; infinity if it has none."""
        units = (budget_bytes - self.base) // self.unit
        if not self.blocks or units < 0:
            return float("inf")
        return float(self.table[0, len(self.blocks) - 1][min(units, UNITS)])

    def choice(self, budget_bytes: int) -> list[int] | None:
        """Return the choice of the table's solution for a budget; None if it has none."""
        if not np.isfinite(self.extra_seconds(budget_bytes)):
            return None
        writer = _Writer(self)
        units = min(UNITS, (budget_bytes - self.base) // self.unit)
        forward = np.cumsum([0.0, *(block.forward_s for block in self.blocks)])
        self._descend(0, len(self.blocks) - 1, units, KEEP, writer, forward)
        return writer.result

    def _descend(
        self, i: int, j: int, units: int, since: int, writer: _Writer, forward: Floats
    ) -> None:
        """Write the solution of E(i, j) down; `since` is the op from which its level holds."""
        while i <= j:
            ways = self._ways(i, j, forward)
            _, kind, number = min(ways, key=lambda way: way[0][units])
            if kind == "option":
                option = self.options[i][number]
                writer.option(i, option, since)
                units -= self._units(option.held_bytes)
                i += 1
            else:
                writer.hold(self.blocks[number].crossing, self.blocks[i].first, since)
                again = self.blocks[number - 1].turn
                self._descend(i, number - 1, units, again, writer, forward)
                units -= self._units(self._crossing(i, number))
                i = number


class _Writer:
    """Collects a choice while a solution is walked."""

    def __init__(self, chain: Chain) -> None:
        self.chain, self.shape = chain, chain.shape
        self.result = chain.shape.natural()
        self.held: dict[int, int] = {}

    def hold(self, storages: tuple[int, ...], made_from: int, since: int) -> None:
        """Hold storages over the turn from op `since` on (KEEP: from the start)."""
        for storage in storages:
            if self.shape.chain[storage][0] >= made_from and storage in self.chain.turn_holes:
                self._put(self.chain.turn_holes[storage], since)

    def _put(self, hole: int, since: int) -> None:
        storage = self.shape.storage[hole]
        if self.shape.stays[hole] or not self.shape.rebuildable[storage]:
            return
        # An outer level that holds it longer has the last word.
        self.held[hole] = min(since, self.held.get(hole, since))
        self.result[hole] = self.held[hole]

    def option(self, number: int, option: Option, since: int) -> None:
        block = self.chain.blocks[number]
        local = block.shape
        for hole, held in enumerate(option.choice):
            storage = block.storages[local.storage[hole]]
            target = self._global(block, hole, storage)
            if target is None or self.shape.stays[target] or not self.shape.rebuildable[storage]:
                continue
            over = target == self.chain.turn_holes.get(storage)
            if held == KEEP:
                if over:
                    self._put(target, since)
                else:
                    self.result[target] = KEEP
            elif target not in self.held:
                self.result[target] = self._moment(block, held, over)
        crossing = tuple(
            block.storages[storage]
            for storage in local.graph.arrays.reads[block.last - block.first]
        )
        self.hold(crossing, block.first, since)

    def _moment(self, block: Block, held: int, over: bool) -> int:
        """Translate an op number of the block's graph into one of the whole graph."""
        if held == 0 or not over:
            return block.turn if over else 0
        if held >= len(block.ops):
            return len(self.shape.graph.ops)
        at = block.ops[held]
        return block.turn if at < block.turn else at

    def _global(self, block: Block, hole: int, storage: int) -> int | None:
        local = block.shape
        # Of a weight that a loop reads a thousand times there are as many holes, in order.
        mine, shape = self.shape.of(storage), self.shape
        start = block.ops[local.start[hole]]
        if start >= 0:
            at = bisect_left(shape.start, start, mine.start, mine.stop)
            return at if at < mine.stop and shape.start[at] == start else None
        if local.end[hole] < len(block.ops):
            end = block.ops[local.end[hole]]
            at = bisect_right(shape.end, end, mine.start, mine.stop) - 1
            return at if at >= mine.start and shape.end[at] == end else None
        return None


def _turn_holes(shape: Holes, blocks: list[Block]) -> dict[int, int]:
    """Return for each storage of the forward pass the hole that spans the turn, or its last."""
    if not blocks:
        return {}
    turn = blocks[-1].last
    result = {}
    for storage, chain in enumerate(shape.chain):
        if chain and chain[0] < turn:
            mine = shape.of(storage)
            spanning = [hole for hole in mine if shape.start[hole] < turn <= shape.end[hole]]
            result[storage] = spanning[0] if spanning else mine[-1]
    return result
