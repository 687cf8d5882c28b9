"""A training graph as a chain of blocks, with multi-level checkpoints.

Rotor (Beaumont et al., 2019) cuts a network where a single tensor crosses. We do the same, but
allow several storages to cross a cut, so that skips over many blocks (U-Net) make wider cuts
instead of one huge block. A block has forward ops and backward ops; it keeps everything that its
backward ops read, or only what later blocks read. Which parts of a block are worth keeping is
decided afterwards, on the graph itself (`fit`, `trim`).

E(i, j)[m] is the fewest extra seconds to run blocks i to j, forward and backward, within m bytes
above what is held before block i:

    keep block i, or rebuild it, and continue with i + 1 to j in the bytes that remain, or
    run i to k - 1 forward holding nothing, do k to j, then i to k - 1 from the start again.

This is rotor's recursion. Bytes are counted in units, held and peak rounded up, so that what fits
in units fits in bytes. One table serves all budgets. Stretches of equal blocks that are crossed by
equally many bytes share one entry: a loop of a thousand equal calls has one entry per length, not
the square of that.

A solution is converted to a choice per hole: what the second line holds at an inner level is held
only from the moment when that level begins.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ...base.progress import now, spend
from ...graph.graph import Floats
from ...graph.liveness import KEEP, Holes

UNITS = 400
# The table has an entry for each stretch of blocks, so its size is quadratic in their number.
MOST_BLOCKS = 100
# Units of work per way evaluated over all budgets.
WAY = 60


class Option(NamedTuple):
    """One way to run a block.

    kept : whether the results of its forward ops are kept for its backward ops
    held_bytes : held from its forward to its backward, including what crosses into the next block
    peak_bytes : the peak of its own forward or backward, above what earlier blocks hold
    extra_s : seconds of rebuilds
    """

    kept: bool
    held_bytes: int
    peak_bytes: int
    extra_s: float


@dataclass(frozen=True)
class Block:
    """A stretch of forward ops with the backward ops that belong to it.

    first, last : its forward ops, half-open
    turn : the first of its backward ops
    created : storages that its forward ops make
    crossing : storages of earlier ops that forward ops from `first` on read
    forward_s, forward_peak_bytes : of rerunning its forward ops, holding only what crosses
    options : kept, and rebuilt if that holds less
    """

    first: int
    last: int
    turn: int
    created: tuple[int, ...] = field(repr=False)
    crossing: tuple[int, ...] = field(repr=False)
    forward_s: float
    forward_peak_bytes: int
    options: tuple[Option, ...]


def split(shape: Holes) -> list[Block]:
    """Cut a graph into at most about MOST_BLOCKS; an empty list if there is no backward."""
    graph = shape.graph
    backward = [at for at, op in enumerate(graph.ops) if op.phase == "backward"]
    # Fewer forward ops cannot be cut.
    if not backward or backward[0] < 4:
        return []
    turn, until = backward[0], backward[-1] + 1
    last_forward = [-1] * len(graph.storages)
    for op in range(turn):
        for storage in shape.touched[op]:
            last_forward[storage] = op
    cuts = _cuts(shape, turn, last_forward)
    owner = [
        bisect_right(cuts, chain[0]) - 1 if chain and chain[0] < turn else -1
        for chain in shape.chain
    ]
    turns = _turns(shape, cuts, owner, last_forward, turn)
    return _blocks(shape, cuts, [*turns, turn], owner, last_forward, until)


def _cuts(shape: Holes, turn: int, last_forward: list[int]) -> list[int]:
    """Choose where to cut: at few crossing bytes, before expensive ops, not too often."""
    width = np.zeros(turn + 1, np.int64)
    for storage, last in enumerate(last_forward):
        if last >= 0 and shape.chain[storage]:
            maker = shape.chain[storage][0]
            if maker < turn:
                width[maker + 1 : last + 1] += 1
    longest = max(24, 2 * turn // MOST_BLOCKS)
    shortest = max(2, turn // (2 * MOST_BLOCKS))
    cuts = [0]
    for at in range(1, turn):
        if at - cuts[-1] < shortest or turn - at < 2:
            continue
        narrow = width[at] <= 1
        dear = shape.seconds[at] >= shape.seconds[at - 1]
        if narrow and (dear or at - cuts[-1] >= 4):
            cuts.append(at)
        elif at - cuts[-1] >= longest:
            span = width[cuts[-1] + longest // 2 : at + 1]
            # If no cut is narrow, take the narrowest of the second half.
            cuts.append(cuts[-1] + longest // 2 + int(span.argmin()))
    return [*cuts, turn]


def _turns(
    shape: Holes, cuts: list[int], owner: list[int], last_forward: list[int], turn: int
) -> list[int]:
    """Return the op at which each block's backward begins; decreasing along the chain."""
    count = len(cuts) - 1
    begins = [len(shape.graph.ops)] * count
    for op in range(len(shape.graph.ops) - 1, turn - 1, -1):
        for storage in shape.touched[op]:
            block = owner[storage]
            if block >= 0 and last_forward[storage] < cuts[block + 1]:
                begins[block] = op
    begins[-1] = turn
    for block in range(count - 2, -1, -1):
        # A block that no backward op touches begins where the next one does.
        if begins[block] == len(shape.graph.ops):
            begins[block] = begins[block + 1]
        # The backward pass takes blocks from the last to the first.
        begins[block] = max(begins[block], begins[block + 1])
    return begins


def _blocks(
    shape: Holes, cuts: list[int], turns: list[int], owner: list[int], last_forward: list[int],
    until: int,
) -> list[Block]:  # fmt: skip
    """Return the blocks with their held bytes: all kept, or only what crosses into the next."""
    count, ops = len(cuts) - 1, len(shape.graph.ops)
    ends = [until, *turns]
    created: list[list[int]] = [[] for _ in range(count)]
    crossing: list[list[int]] = [[] for _ in range(count)]
    held, passed = [0] * count, [0] * count
    # Live bytes of each block's storages during its own ops; of backward ops' storages until they
    # are freed. `bare`: of its forward ops if nothing is kept.
    live, bare = np.zeros(ops + 1, np.int64), np.zeros(ops + 1, np.int64)
    for storage, chain in enumerate(shape.chain):
        if not chain:
            continue
        size, last_hole = shape.bytes[storage], shape.of(storage)[-1]
        stays, used = shape.stays[last_hole], shape.start[last_hole]
        block = owner[storage]
        if block < 0:
            live[chain[0]] += size
            live[ops if stays else used + 1] -= size
            continue
        # From here on: storages made by a forward op of a block.
        created[block].append(storage)
        forward, end = last_forward[storage], cuts[block + 1]
        for later in range(block + 1, bisect_right(cuts, forward)):
            crossing[later].append(storage)
        needed = stays or used > forward
        stuck = needed and (stays or not shape.rebuildable[storage])
        held[block] += size * (needed or forward >= end)
        passed[block] += size * (stuck or forward >= end)
        for curve, waits in ((live, needed), (bare, stuck)):
            curve[chain[0]] += size
            curve[end if waits else min(forward + 1, end)] -= size
        begin, done = turns[block], ends[block]
        if needed:
            live[begin] += size
            live[done if stays else min(max(used + 1, begin), done)] -= size
    live, bare = np.cumsum(live), np.cumsum(bare)
    blocks = []
    for at, (first, last) in enumerate(itertools.pairwise(cuts)):
        backward = int(live[turns[at] : ends[at]].max(initial=0))
        kept, again = int(live[first:last].max()), int(bare[first:last].max())
        forward_s = sum(shape.seconds[first:last])
        options = [Option(True, held[at], max(kept, backward), 0.0)]
        if passed[at] < held[at]:
            options.append(Option(False, passed[at], max(again, backward), forward_s))
        blocks.append(
            Block(
                first, last, turns[at], tuple(created[at]), tuple(crossing[at]), forward_s, again,
                tuple(options),
            )
        )  # fmt: skip
    return blocks


class Chain:
    """The blocks of a graph, and the table E.

    shape : the holes of the graph
    most_bytes : the peak of the graph without a plan; larger budgets need no chain.
    end : when the table has to be complete; else there is no table.
    """

    def __init__(self, shape: Holes, most_bytes: int, *, end: float) -> None:
        self.shape = shape
        self.blocks = split(shape)
        self.base = shape.graph.base_bytes
        self.unit = max(1, -(-(most_bytes - self.base) // UNITS))
        # Per stretch a number, shared by stretches with equal blocks and crossings.
        self.numbers: dict[object, int] = {}
        self.stretch: dict[tuple[int, int], int] = {}
        for at, block in enumerate(self.blocks):
            alike = block.options, block.forward_s, block.forward_peak_bytes
            self.stretch[at, at] = self._number(alike)
        # Prefix sums, so that the difference of two is the sum of a stretch.
        self.forward_s = np.cumsum([0.0, *(block.forward_s for block in self.blocks)])
        self.turn_holes = _turn_holes(shape, self.blocks)
        self.crossing: dict[int, list[int]] = {}
        self.table: dict[tuple[int, int], Floats] = {}
        # An incomplete table is useless: without blocks there is no choice.
        if self.blocks and not self._filled(end):
            self.blocks = []

    def _units(self, size: int) -> int:
        return -(-max(0, size) // self.unit)

    def _crossing(self, first: int, cut: int) -> int:
        """Bytes that cross into block `cut` and are made by blocks from `first` on."""
        if cut not in self.crossing:
            outputs = [
                (self.shape.chain[storage][0], self.shape.bytes[storage])
                for storage in self.blocks[cut].crossing
            ]
            self.crossing[cut] = [
                sum(size for op, size in outputs if op >= block.first)
                for block in self.blocks[:cut]
            ]
        return self.crossing[cut][first]

    def _filled(self, end: float) -> bool:
        """Fill the table; return False if time is up before."""
        count = len(self.blocks)
        solved: dict[int, Floats] = {}
        # Short stretches first: longer ones read the entries of their parts.
        for length in range(1, count + 1):
            for i in range(count - length + 1):
                if now() > end:
                    return False
                j = i + length - 1
                number = self._stretch(i, j)
                if number not in solved:
                    best = np.full(UNITS + 1, np.inf)
                    for value, _ in self._ways(i, j):
                        np.minimum(best, value, out=best)
                    solved[number] = best
                self.table[i, j] = solved[number]
        return True

    def _stretch(self, i: int, j: int) -> int:
        """Return the number of stretch i to j, derived from those of its two longest parts."""
        if (i, j) not in self.stretch:
            parts = self.stretch[i, j - 1], self.stretch[i + 1, j], self._crossing(i, j)
            self.stretch[i, j] = self._number(parts)
        return self.stretch[i, j]

    def _number(self, key: object) -> int:
        return self.numbers.setdefault(key, len(self.numbers))

    def _ways(self, i: int, j: int) -> list[tuple[Floats, Option | int]]:
        """Return E(i, j) by each way: its values, and an option of block i, or where to cut."""
        ways: list[tuple[Floats, Option | int]] = []
        block, forward = self.blocks[i], self.forward_s
        for option in block.options:
            value = np.full(UNITS + 1, np.inf)
            shift = self._units(option.held_bytes)
            if i == j:
                value[:] = option.extra_s
            elif shift <= UNITS:
                value[shift:] = self.table[i + 1, j][: UNITS + 1 - shift] + option.extra_s
            # Below its own peak an option is infeasible.
            value[: self._units(option.peak_bytes)] = np.inf
            ways.append((value, option))
        # Or run to block k, holding only what crosses into it, and rerun these blocks later.
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
            ways.append((value, k))
        spend(WAY * len(ways))
        return ways

    def choice(self, budget_bytes: int) -> list[int] | None:
        """Return the choice of the table's solution for a budget; None if it has none."""
        last, units = len(self.blocks) - 1, (budget_bytes - self.base) // self.unit
        # With more units than the table has, everything is kept.
        units = min(units, UNITS)
        if not self.blocks or units < 0 or not np.isfinite(self.table[0, last][units]):
            return None
        writer = _Writer(self)
        self._descend(0, last, units, KEEP, writer)
        return writer.result

    def _descend(self, i: int, j: int, units: int, since: int, writer: _Writer) -> None:
        """Write the solution of E(i, j); `since` is the op from which its level holds."""
        while i <= j:
            _, way = min(self._ways(i, j), key=lambda way: way[0][units])
            if isinstance(way, Option):
                writer.option(i, way, since)
                units -= self._units(way.held_bytes)
                i += 1
            else:
                writer.hold(way, self.blocks[i].first, since)
                # Blocks before the cut are rerun once the backward pass has reached it.
                self._descend(i, way - 1, units, self.blocks[way - 1].turn, writer)
                units -= self._units(self._crossing(i, way))
                i = way


class _Writer:
    """Collects a choice while a solution is traversed."""

    def __init__(self, chain: Chain) -> None:
        self.chain, self.shape = chain, chain.shape
        self.result = chain.shape.natural()
        self.held: dict[int, int] = {}

    def hold(self, cut: int, made_from: int, since: int) -> None:
        """Hold what crosses into a block from op `since` on (KEEP: from the start).

        made_from : the first op whose storages count
        """
        for storage in self.chain.blocks[cut].crossing:
            if self.shape.chain[storage][0] >= made_from:
                self._put(self.chain.turn_holes[storage], since)

    def option(self, number: int, option: Option, since: int) -> None:
        """Run a block in one way, at a level that holds from op `since` on."""
        block, turn = self.chain.blocks[number], self.chain.blocks[-1].last
        for storage in block.created:
            hole = self.chain.turn_holes[storage]
            if option.kept and self.shape.start[hole] < turn <= self.shape.end[hole]:
                self._put(hole, since)
            # Rebuilt storages stay from the beginning of the block's own backward ops.
            elif hole not in self.held and self._goes(hole):
                self.result[hole] = block.turn
        if number + 1 < len(self.chain.blocks):
            self.hold(number + 1, block.first, since)

    def _put(self, hole: int, since: int) -> None:
        if self._goes(hole):
            # An outer level that holds it longer takes precedence.
            self.held[hole] = min(since, self.held.get(hole, since))
            self.result[hole] = self.held[hole]

    def _goes(self, hole: int) -> bool:
        return not self.shape.stays[hole] and self.shape.rebuildable[self.shape.storage[hole]]


def _turn_holes(shape: Holes, blocks: list[Block]) -> dict[int, int]:
    """Return per forward storage the hole between forward and backward, or its last one."""
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
