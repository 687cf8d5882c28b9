"""What csrc/memory/simulation.cpp does, in plain Python: a choice carried out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from sn_memory.cost.offload import HostCopy, Impossible, Schedule
from sn_memory.graph.graph import Ints
from sn_memory.graph.liveness import KEEP, Holes


def simulate(
    holes: Holes, choice: Sequence[int], moves: Mapping[int, tuple[int, int]] | None = None
) -> Schedule:
    """Return what `sn_memory.plan.simulate.simulate` returns; raises Impossible as it does."""
    reads, outputs = holes.graph.arrays.reads, holes.graph.arrays.outputs
    resident = holes.graph.arrays.resident.tolist()
    seconds, touched = holes.seconds, holes.touched
    hole = [first - 1 for first in holes.first]
    # Per storage: run of its first touch in the current interval, or -1 when absent; last touch.
    opened = [0 if there else -1 for there in resident]
    last = [0] * len(resident)
    ops: list[int] = []
    at: list[int] = []
    intervals: list[tuple[int, int, int]] = []
    # Bytes that a run makes a second time: for certain, and where the first may still be there.
    extra: dict[int, int] = {}
    doubled: list[tuple[int, int]] = []
    away = _Away(moves or {}, holes)
    total = 0.0
    for op in range(len(reads)):
        if op in away.back:
            for moved in away.back[op]:
                storage = holes.storage[moved]
                if storage in away.absent:
                    opened[storage] = last[storage] = len(ops)
                    away.returned(storage, len(ops))
        if any(opened[storage] < 0 for storage in reads[op]):
            built = []
            rebuild, fetched = _closure(holes, op, opened, away.absent)
            for storage in fetched:
                opened[storage] = last[storage] = len(ops)
                away.returned(storage, len(ops))
            for again in rebuild:
                run = len(ops)
                ops.append(again)
                at.append(op)
                total += seconds[again]
                for storage in reads[again]:
                    last[storage] = run
                for storage in outputs[again]:
                    if storage in away.absent:
                        extra[run] = extra.get(run, 0) + holes.bytes[storage]
                    elif opened[storage] < 0:
                        opened[storage] = last[storage] = run
                        built.append(storage)
                    else:
                        doubled.append((storage, run))
            needed = touched[op]
            for storage in built:
                if storage not in needed and choice[hole[storage]] > op:
                    intervals.append((storage, opened[storage], last[storage]))
                    opened[storage] = -1
        run = len(ops)
        ops.append(op)
        at.append(op)
        total += seconds[op]
        for storage in outputs[op]:
            opened[storage] = run
        for storage in touched[op]:
            last[storage] = run
            hole[storage] += 1
            here = hole[storage]
            if here in away.moves:
                away.left(here, run)
            elif choice[here] != KEEP:
                intervals.append((storage, opened[storage], run))
                opened[storage] = -1
        if op in away.out:
            for moved in away.out[op]:
                storage = holes.storage[moved]
                intervals.append((storage, opened[storage], run))
                opened[storage] = -1
                away.gone(moved, run)
    end = len(ops) - 1
    keep = holes.graph.arrays.keep.tolist()
    for storage, start in enumerate(opened):
        if start >= 0 and not resident[storage]:
            intervals.append((storage, start, end if keep[storage] else last[storage]))
    _settle(holes, doubled, intervals, extra)
    live = _live(holes, ops, intervals, extra)
    spans = np.array(intervals, np.int32).reshape(-1, 3)
    return Schedule(ops, at, spans, live, total, tuple(away.host_copies.values()))


class _Away:
    """The storages on the host while a choice is carried out."""

    def __init__(self, moves: Mapping[int, tuple[int, int]], holes: Holes) -> None:
        self.moves, self.holes = moves, holes
        self.out: dict[int, list[int]] = {}
        self.back: dict[int, list[int]] = {}
        # Storages on the host now, and the hole each spends there.
        self.absent: dict[int, int] = {}
        self.host_copies: dict[int, HostCopy] = {}
        for hole, (out, back) in moves.items():
            self.out.setdefault(out, []).append(hole)
            self.back.setdefault(back, []).append(hole)

    def left(self, hole: int, run: int) -> None:
        self.host_copies[hole] = HostCopy(self.holes.storage[hole], run, run, run)

    def gone(self, hole: int, run: int) -> None:
        self.host_copies[hole] = replace(self.host_copies[hole], freed=run)
        self.absent[self.holes.storage[hole]] = hole

    def returned(self, storage: int, run: int) -> None:
        hole = self.absent.pop(storage)
        self.host_copies[hole] = replace(self.host_copies[hole], fetched=run)


def _closure(
    holes: Holes, op: int, opened: list[int], absent: Mapping[int, int]
) -> tuple[list[int], list[int]]:
    """Return the ops to run again before `op`, in order, and the storages to fetch for them."""
    arrays, chain, expires = holes.graph.arrays, holes.chain, holes.expires
    reads, outputs = arrays.reads, arrays.outputs
    missing = [storage for storage in holes.graph.arrays.reads[op] if opened[storage] < 0]
    seen, runs, fetched = set(missing), set(), []
    while missing:
        storage = missing.pop()
        if storage in absent:
            fetched.append(storage)
            continue
        if not holes.rebuildable[storage]:
            raise Impossible
        for again in chain[storage]:
            if again >= op:
                break
            if again in runs:
                continue
            if expires[again] < op:
                raise Impossible
            runs.add(again)
            for source in reads[again]:
                if opened[source] < 0 and source not in seen:
                    seen.add(source)
                    missing.append(source)
            for made in outputs[again]:
                # What was changed in place since must not come back in its first version.
                away = made in absent or opened[made] >= 0
                if not away and made not in seen and len(chain[made]) > 1:
                    seen.add(made)
                    missing.append(made)
    return sorted(runs), fetched


def _settle(
    holes: Holes,
    doubled: list[tuple[int, int]],
    intervals: list[tuple[int, int, int]],
    extra: dict[int, int],
) -> None:
    """Enter what runs made a second time into `extra`.

    A double made after the last touch of the first is none: it gets an interval of its own.
    """
    watched = {storage for storage, _ in doubled}
    spans: dict[int, list[tuple[int, int]]] = {storage: [] for storage in watched}
    for storage, start, end in intervals:
        if storage in watched:
            spans[storage].append((start, end))
    for storage, run in doubled:
        if any(a <= run <= b for a, b in spans[storage]):
            extra[run] = extra.get(run, 0) + holes.bytes[storage]
        else:
            intervals.append((storage, run, run))


def _live(
    holes: Holes, ops: list[int], intervals: list[tuple[int, int, int]], extra: Mapping[int, int]
) -> Ints:
    change = np.zeros(len(ops) + 1, np.int64)
    if intervals:
        table = np.array(intervals, np.int64)
        sizes = np.array(holes.bytes, np.int64)[table[:, 0]]
        np.add.at(change, table[:, 1], sizes)
        np.subtract.at(change, table[:, 2] + 1, sizes)
    live = np.cumsum(change)[:-1] + np.array(holes.workspace, np.int64)[np.array(ops, np.int64)]
    for run, size in extra.items():
        live[run] += size
    return live + holes.graph.base_bytes
