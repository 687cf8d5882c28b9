"""From decisions to actions: what runs again when, what is held how long, and what that costs.

A choice says for each hole of each storage: keep, or let go. The ops run in their order. Before an
op, what it needs and is not there is rebuilt: all ops this takes, in their order. What a rebuild
makes on the way may be held for its own next use or dropped again; that is the number of the
choice:

    KEEP (-1)      the storage stays through the hole
    h >= 0         it leaves; a rebuild at op t inside the hole holds it if t >= h, else drops it

0 is SuperNeurons' speed-centric recomputation (rebuild once, hold), the number of ops is its
memory-centric one (rebuild for each use), and values between give the nested checkpoints of
multi-level schedules, where a second-level checkpoint is held only while its segment is at work.

Storages leave right after the last run that touches them, so the memory at any run follows from
the intervals between first and last touch alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..base.clock import spend
from ..cost.offload import windows
from ..cost.schedule import HostCopy, Impossible, Schedule
from ..graph.holes import KEEP, Holes
from ..graph.numbers import Ints
from .compiled import compiled

# Units of work an op, most of them to bring what was found to Python.
AROUND = 10


def simulate(
    holes: Holes, choice: Sequence[int], moves: Mapping[int, tuple[int, int]] | None = None
) -> Schedule:
    """Carry a choice out; `choice` has one number per hole.

    `moves` are the holes that are spent on the host: the op after which the device memory is given
    back and the op before which it is taken again.

    A rebuild that needs what is on the host fetches it at once, earlier than `moves` says.

    Raises Impossible if a rebuild would have to run an op whose inputs have changed since, or would
    need what cannot be made again.
    """
    spend(AROUND * len(holes.graph.ops))
    native = compiled(holes)
    if native is None:
        return simulate_in_python(holes, choice, moves)
    found = native.simulate(choice, moves)
    if found is None:
        raise Impossible
    ops, at, intervals, live, host_copies, seconds = found
    return Schedule(
        ops, at, intervals, live, seconds, tuple(HostCopy(*host_copy) for host_copy in host_copies)
    )


def simulate_in_python(
    holes: Holes, choice: Sequence[int], moves: Mapping[int, tuple[int, int]] | None = None
) -> Schedule:
    """Do what `simulate` does without the extension: the same schedule, many times slower."""
    reads, outputs = holes.graph.arrays.reads, holes.graph.arrays.outputs
    resident = holes.graph.arrays.resident.tolist()
    seconds, touched, needs = holes.seconds, holes.touched, holes.needs
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
        if any(opened[storage] < 0 for storage in needs[op]):
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
    missing = [storage for storage in holes.needs[op] if opened[storage] < 0]
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


def simulate_moved(
    holes: Holes, choice: Sequence[int], moved: Mapping[int, int]
) -> tuple[Schedule, dict[int, tuple[int, int]]]:
    """Carry a choice out with holes spent on the host; return the schedule and the windows.

    Rebuilds may need a storage earlier than its own next use. Simulated once, that moment is known,
    and the copy back gets a window that ends there. Raises Impossible as `simulate` does.
    """
    first = windows(holes, moved)
    schedule = simulate(holes, choice, first)
    needed = {}
    for hole, (_, back) in first.items():
        storage = holes.storage[hole]
        for host_copy in schedule.host_copies:
            mine = host_copy.storage == storage and schedule.at[host_copy.left] == holes.start[hole]
            if mine and schedule.at[host_copy.fetched] < back:
                needed[hole] = schedule.at[host_copy.fetched]
    if not needed:
        return schedule, first
    again = windows(holes, moved, needed)
    return simulate(holes, choice, again), again
