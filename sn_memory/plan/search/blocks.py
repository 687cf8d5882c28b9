"""A training graph as a chain of blocks, each with its ways to trade memory for time.

Rotor (Beaumont et al., 2019) and Rockmate (2023) cut a network where one tensor is all that goes
on, and solve each block by itself. We do the same, and allow more than one storage to cross a cut,
so that skips over many blocks (U-Net) make wider cuts instead of one huge block. A block is its
forward ops, its backward ops, and one stand-in op between them for all later blocks. Blocks that
are equal as numbers are solved once.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np

from ...graph.graph import Graph
from ...graph.holes import Holes, holes
from ...graph.records import Op, Storage
from ..simulate import simulate

REST = "later blocks"


@dataclass(frozen=True)
class Block:
    """A stretch of forward ops with the backward ops that belong to it.

    Parameters
    ----------
    first, last
        Its forward ops, half-open.
    turn, until
        Its backward ops, half-open.
    crossing
        Storages of earlier ops that ops from `first` on read in the forward pass.
    shape
        The holes of its own graph; `ops` are the graph's numbers of that graph's ops, -1 for the
        stand-in, and `storages` those of its storages.
    forward_s, forward_peak_bytes
        Its forward ops run once more, holding nothing but what crosses.
    ambient_bytes
        What backward ops of other blocks have made and still hold during its backward.
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
            made = shape.chain[storage][0]
            if made < turn:
                width[made + 1 : last + 1] += 1
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
    made = {storage for op in inside for storage in arrays.outputs[op]}
    made_forward = {storage for op in forward for storage in arrays.outputs[op]}
    read = {storage for op in inside for storage in shape.needs[op]}
    crossing_in = {
        storage for op in forward for storage in shape.needs[op] if storage not in made_forward
    }
    incoming = {
        storage
        for op in backward
        for storage in shape.needs[op]
        if storage not in made and shape.chain[storage] and shape.chain[storage][0] >= last
    }
    going_out, keep = [], set()
    for storage in sorted(made | incoming):
        outside = [
            shape.start[hole] for hole in shape.of(storage) if shape.start[hole] not in inside
        ]
        if storage in made_forward and any(op < turn for op in outside):
            going_out.append(storage)
        if graph.storages[storage].keep or any(op >= until for op in outside):
            keep.add(storage)
    numbers = sorted(made | read | incoming)
    storages = [
        Storage(
            graph.storages[storage].name,
            shape.bytes[storage],
            "activation" if storage in made or storage in incoming else "input",
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
    ops = [_copy(graph, shape, op, made) for op in forward]
    ops += [rest, *(_copy(graph, shape, op, made | incoming) for op in backward)]
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


def _copy(graph: Graph, shape: Holes, op: int, made: set[int]) -> Op:
    record, arrays = graph.ops[op], graph.arrays
    names = [graph.storages[storage].name for storage in arrays.reads[op]]
    written = {graph.storages[storage].name for storage in arrays.writes[op]}
    return Op(
        record.name,
        tuple(name for name in names if name not in written),
        tuple(graph.storages[storage].name for storage in arrays.outputs[op]),
        tuple(name for name in names if name in written),
        tuple(graph.storages[it].name for it in arrays.releases[op] if it in made),
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
