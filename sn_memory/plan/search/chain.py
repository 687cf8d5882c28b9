"""A training graph as a chain of blocks, and checkpoints of the chain at several levels.

Rotor (Beaumont et al., 2019) and Rockmate (2023) cut a network where one tensor is all that goes
on, and solve each block by itself. We do the same, and allow more than one storage to cross a cut,
so that skips over many blocks (U-Net) make wider cuts instead of one huge block. A block is its
forward ops, its backward ops, and one stand-in op between them for all later blocks. Blocks that
are equal as numbers are solved once: an `Option` is one way to carry a block out, a trade of memory
for time.

E(i, j)[m] is the fewest extra seconds to carry blocks i to j out, forward and backward, within m
bytes above what is held before block i:

    take an option of block i, and go on with i + 1 to j in what its held bytes leave, or
    run i to k - 1 forward holding nothing, do k to j, then i to k - 1 from the start again.

This is rotor's recursion with more than one option per block. Bytes are counted in units, held and
peak rounded up, so that what fits in units fits in bytes. One table serves all budgets. Stretches
of equal blocks that are crossed by as many bytes share one entry: a loop of a thousand equal calls
has as many entries as it has lengths, not their square.

A solution is written down as a choice per hole: what the second line holds at an inner level is
held only from the moment that level begins.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field

import numpy as np

from ...base.progress import now, spend
from ...cost.offload import Impossible, Schedule
from ...graph.graph import Floats, Graph
from ...graph.liveness import KEEP, Holes, holes
from ...graph.records import Op, Storage
from ..bound import relax
from ..simulate import simulate
from .candidates import fit, trim

REST = "later blocks"
UNITS = 400
# Units of work to look at one way over all budgets.
WAY = 60


@dataclass(frozen=True)
class Block:
    """A stretch of forward ops with the backward ops that belong to it.

    first, last : its forward ops, half-open
    turn, until : its backward ops, half-open
    crossing : storages of earlier ops that ops from `first` on read in the forward pass
    shape : the holes of its own graph; `ops` are the graph's numbers of that graph's ops, -1 for
        the stand-in, and `storages` those of its storages.
    forward_s, forward_peak_bytes : its forward ops run once more, holding nothing but what crosses
    ambient_bytes : what backward ops of other blocks have made and still hold during its backward
    """

    first: int
    last: int
    turn: int
    until: int
    crossing: tuple[int, ...]
    shape: Holes = field(repr=False)
    ops: list[int] = field(repr=False)
    storages: list[int] = field(repr=False)
    forward_s: float
    forward_peak_bytes: int
    ambient_bytes: int


def turn_of(graph: Graph) -> int:
    """Return the first backward op; the number of ops if there is none."""
    for at, op in enumerate(graph.ops):
        if op.phase == "backward":
            return at
    return len(graph.ops)


def split(shape: Holes, *, most: int = 100) -> list[Block]:
    """Cut a graph into at most about `most` blocks; an empty list where there is no backward."""
    graph = shape.graph
    turn = turn_of(graph)
    if turn == len(graph.ops) or turn < 4:
        return []
    last_forward = [-1] * len(graph.storages)
    for op in range(turn):
        for storage in shape.touched[op]:
            last_forward[storage] = op
    cuts = _cuts(shape, turn, last_forward, most)
    owner = [-1] * len(graph.storages)
    for number, (first, last) in enumerate(itertools.pairwise(cuts)):
        for op in range(first, last):
            for storage in graph.arrays.outputs[op]:
                owner[storage] = number
    turns = _turns(shape, cuts, owner, last_forward, turn)
    until = max(at for at, op in enumerate(graph.ops) if op.phase == "backward") + 1
    ambient = _ambient(shape, turn, turns, until)
    blocks = []
    for number, (first, last) in enumerate(itertools.pairwise(cuts)):
        end = turns[number - 1] if number else until
        blocks.append(_block(shape, first, last, turns[number], end, ambient[number]))
    return blocks


def _cuts(shape: Holes, turn: int, last_forward: list[int], most: int) -> list[int]:
    """Choose where to cut: at few crossing storages, before dear ops, not too often."""
    width = np.zeros(turn + 1, np.int64)
    for storage, last in enumerate(last_forward):
        if last >= 0 and shape.chain[storage]:
            maker = shape.chain[storage][0]
            if maker < turn:
                width[maker + 1 : last + 1] += 1
    longest = max(24, 2 * turn // most)
    shortest = max(2, turn // (2 * most))
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
            # Where nothing is narrow, at the narrowest of the second half.
            cuts.append(cuts[-1] + longest // 2 + int(span.argmin()))
    return [*cuts, turn]


def _turns(
    shape: Holes, cuts: list[int], owner: list[int], last_forward: list[int], turn: int
) -> list[int]:
    """Return the backward op at which each block's own backward begins; falling along the chain."""
    count = len(cuts) - 1
    begins = [len(shape.graph.ops)] * count
    for op in range(len(shape.graph.ops) - 1, turn - 1, -1):
        for storage in shape.touched[op]:
            block = owner[storage]
            if block >= 0 and last_forward[storage] < cuts[block + 1]:
                begins[block] = op
    begins[-1] = turn
    for block in range(count - 2, -1, -1):
        if begins[block] == len(shape.graph.ops):
            begins[block] = begins[block + 1]
        begins[block] = max(begins[block], begins[block + 1])
    return begins


def _ambient(shape: Holes, turn: int, turns: list[int], until: int) -> list[int]:
    """Return for each block the bytes that backward ops made before it and hold until after it."""
    spans = []
    for storage, chain in enumerate(shape.chain):
        if chain and chain[0] >= turn:
            mine = shape.of(storage)
            end = len(shape.graph.ops) if shape.stays[mine[-1]] else shape.start[mine[-1]]
            spans.append((chain[0], end, shape.bytes[storage]))
    result = []
    ends = [until, *turns[:-1]]
    starts = np.array([span[0] for span in spans], np.int64)
    stops = np.array([span[1] for span in spans], np.int64)
    sizes = np.array([span[2] for span in spans], np.int64)
    for begin, end in zip(turns, ends, strict=True):
        if not spans:
            result.append(0)
            continue
        result.append(int(sizes[(starts < begin) & (stops >= end)].sum()))
    return result


def _block(shape: Holes, first: int, last: int, turn: int, until: int, ambient: int) -> Block:
    graph, arrays = shape.graph, shape.graph.arrays
    forward, backward = list(range(first, last)), list(range(turn, until))
    inside = {*forward, *backward}
    outputs = {storage for op in inside for storage in arrays.outputs[op]}
    made_forward = {storage for op in forward for storage in arrays.outputs[op]}
    read = {storage for op in inside for storage in shape.needs[op]}
    crossing_in = {
        storage for op in forward for storage in shape.needs[op] if storage not in made_forward
    }
    incoming = {
        storage
        for op in backward
        for storage in shape.needs[op]
        if storage not in outputs and shape.chain[storage] and shape.chain[storage][0] >= last
    }
    going_out, keep = [], set()
    for storage in sorted(outputs | incoming):
        outside = [
            shape.start[hole] for hole in shape.of(storage) if shape.start[hole] not in inside
        ]
        if storage in made_forward and any(op < turn for op in outside):
            going_out.append(storage)
        if graph.storages[storage].keep or any(op >= until for op in outside):
            keep.add(storage)
    numbers = sorted(outputs | read | incoming)
    storages = [
        Storage(
            graph.storages[storage].name,
            shape.bytes[storage],
            "activation" if storage in outputs or storage in incoming else "input",
            keep=storage in keep,
        )
        for storage in numbers
    ]
    names = [storage.name for storage in graph.storages]
    rest = Op(
        REST,
        tuple(names[storage] for storage in going_out),
        tuple(names[storage] for storage in sorted(incoming)),
        seconds=0.0,
        once=True,
    )
    ops = [_copy(graph, shape, op, outputs) for op in forward]
    ops += [rest, *(_copy(graph, shape, op, outputs | incoming) for op in backward)]
    own = holes(Graph(storages, ops, name=REST))
    forward_s = sum(shape.seconds[op] for op in forward)
    rise = simulate(own, own.natural()).live_bytes[: len(forward)].max(initial=0)
    return Block(
        first,
        last,
        turn,
        until,
        tuple(sorted(storage for storage in crossing_in if shape.chain[storage])),
        own,
        [*forward, -1, *backward],
        numbers,
        forward_s,
        int(rise) - own.graph.base_bytes,
        ambient,
    )


def _copy(graph: Graph, shape: Holes, op: int, outputs: set[int]) -> Op:
    record, arrays = graph.ops[op], graph.arrays
    names = [graph.storages[storage].name for storage in arrays.reads[op]]
    written = {graph.storages[storage].name for storage in arrays.writes[op]}
    return Op(
        record.name,
        tuple(name for name in names if name not in written),
        tuple(graph.storages[storage].name for storage in arrays.outputs[op]),
        tuple(name for name in names if name in written),
        tuple(
            graph.storages[release].name for release in arrays.releases[op] if release in outputs
        ),
        seconds=shape.seconds[op],
        once=not record.repeatable,
        workspaces=(),
    )


def signature(block: Block) -> tuple[object, ...]:
    """Return what two blocks share exactly when one's options are the other's."""
    graph = block.shape.graph
    return (
        tuple(block.shape.bytes),
        tuple((storage.role, storage.keep) for storage in graph.storages),
        tuple(block.shape.seconds),
        tuple(block.shape.workspace),
        tuple(graph.arrays.reads),
        tuple(graph.arrays.outputs),
        tuple(graph.arrays.writes),
        tuple(graph.arrays.releases),
        tuple(op.once for op in graph.ops),
    )


@dataclass(frozen=True)
class Option:
    """One way to carry a block out.

    held_bytes : held from its forward to its backward, what crosses into the next block included
    peak_bytes : the most in its own forward or backward, above what earlier blocks hold
    extra_s : seconds of rebuilds
    choice : per hole of the block's own graph
    """

    held_bytes: int
    peak_bytes: int
    extra_s: float
    choice: tuple[int, ...] = field(repr=False)


def options(block: Block, *, deadline: float, points: int = 8) -> list[Option]:
    """Return the block's ways to trade held bytes and peak for seconds, none worse in all three."""
    shape = block.shape
    natural = shape.natural()
    start = simulate(shape, natural)
    chosen = [_option(block, natural, start)]
    rest = block.last - block.first
    base = shape.graph.base_bytes
    incoming = sum(shape.bytes[storage] for storage in shape.graph.arrays.outputs[rest])
    held = chosen[0].held_bytes
    least = sum(shape.bytes[storage] for storage in shape.graph.arrays.reads[rest])
    for point in range(points):
        if now() > deadline:
            break
        room = least + (held - least) * point // points
        relaxed = relax(shape, rest, base + incoming + room, offload=False, deadline=deadline)
        if relaxed is None:
            continue
        choice = list(natural)
        for storage, kept in relaxed.kept.items():
            for hole in shape.of(storage):
                spans = shape.start[hole] < rest < shape.end[hole] and not shape.stays[hole]
                if spans and shape.rebuildable[storage]:
                    # Letting go what it keeps in part holds no more than it counts.
                    choice[hole] = KEEP if kept > 0.999 else 0
        _consider(block, choice, chosen)
    low = max(_working_set(shape), base)
    for point in range(1, points):
        if now() > deadline:
            break
        target = low + (start.peak_bytes - low) * point // points
        fitted = fit(shape, natural, target, deadline=deadline, rounds=30)
        if fitted is not None:
            choice, _ = trim(shape, fitted[0], target, deadline=deadline)
            _consider(block, choice, chosen)
    return _best(chosen)


def _working_set(shape: Holes) -> int:
    return shape.graph.base_bytes + max(
        sum(shape.bytes[storage] for storage in touched) for touched in shape.touched
    )


def _consider(block: Block, choice: list[int], options: list[Option]) -> None:
    try:
        schedule = simulate(block.shape, choice)
    except Impossible:
        return
    options.append(_option(block, choice, schedule))


def _option(block: Block, choice: list[int], schedule: Schedule) -> Option:
    shape = block.shape
    rest = block.last - block.first
    base = shape.graph.base_bytes
    incoming = sum(shape.bytes[storage] for storage in shape.graph.arrays.outputs[rest])
    run = schedule.ops.index(rest)
    return Option(
        int(schedule.live_bytes[run]) - base - incoming,
        schedule.peak_bytes - base,
        schedule.run_seconds - sum(shape.seconds),
        tuple(choice),
    )


def _best(options: list[Option]) -> list[Option]:
    """Leave out options that another one beats or equals in all three."""
    kept: list[Option] = []
    for option in sorted(
        options, key=lambda option: (option.extra_s, option.held_bytes, option.peak_bytes)
    ):
        if not any(
            other.held_bytes <= option.held_bytes and other.peak_bytes <= option.peak_bytes
            for other in kept
        ):
            kept.append(option)
    return kept


class Chain:
    """The blocks of a graph, their options, and the table E.

    shape : the holes of the graph
    most_bytes : budgets above this need no chain: the peak of the graph as it stands.
    deadline, end : for finding options, and for the table: where it is not full by then, there is
        none.
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
                # Equal blocks of a deep net are solved once.
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
        weights = []
        block = self.blocks[i]
        for number, option in enumerate(self.options[i]):
            value = np.full(UNITS + 1, np.inf)
            shift = self._units(option.held_bytes)
            if i == j:
                value[:] = option.extra_s
            elif shift <= UNITS:
                value[shift:] = self.table[i + 1, j][: UNITS + 1 - shift] + option.extra_s
            # Below its own peak an option is none.
            value[: self._units(option.peak_bytes + block.ambient_bytes)] = np.inf
            weights.append((value, "option", number))
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
            weights.append((value, "cut", k))
        spend(WAY * len(weights))
        return weights

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
                turn = self.blocks[number - 1].turn
                self._descend(i, number - 1, units, turn, writer, forward)
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
