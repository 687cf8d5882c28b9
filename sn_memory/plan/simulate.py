"""Simulate decisions: what is rerun when, how long storages are held, and the cost.

A choice says for each hole of each storage: keep, or drop. The ops run in their order. Before an
op, its inputs that are not on the device are rebuilt, by all ops that this takes, in their order.
Intermediate results of a rebuild may be held for their own next use or dropped again; that is the
number of the choice:

    KEEP (-1)      the storage stays through the hole
    h >= 0         it leaves; a rebuild at op t inside the hole holds it if t >= h, else drops it

0 is SuperNeurons' speed-centric recomputation (rebuild once, hold), the number of ops is its
memory-centric one (rebuild for each use), and values between give the nested checkpoints of
multi-level schedules, where a second-level checkpoint is held only while its segment is at work.

Storages are freed right after the last run that touches them, so the memory at any run follows from
the intervals between first and last touch alone.

The loops are in the C++ extension (csrc/memory); `tests/oracles` has them in plain Python, some
fifty times slower, and tests compare the two bit by bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from ..base.errors import core
from ..base.progress import spend
from ..cost.offload import HostCopy, Impossible, Schedule, lane_seconds, windows
from ..graph.graph import Floats, Graph, Ints, Ints32
from ..graph.liveness import Holes, baseline_seconds, unplanned_bytes
from .plan import Action, Decision, Plan

# Units of work per op of a simulation, most of them for converting its schedule to Python.
AROUND = 10
Moves = Mapping[int, tuple[int, int]]
# When a search ends: a predicate, or units of work.
Until = Callable[[], bool] | int


def simulate(
    holes: Holes, choice: Sequence[int], moves: Mapping[int, tuple[int, int]] | None = None
) -> Schedule:
    """Simulate a choice; `choice` has one number per hole.

    `moves` are the holes that are spent on the host: the op after which the device memory is freed
    and the op before which it is allocated again.
    A rebuild that needs a storage on the host fetches it immediately, earlier than in `moves`.

    Raises Impossible if a rebuild would have to run an op whose inputs have changed since, or would
    need a storage that cannot be rebuilt.
    """
    spend(AROUND * len(holes.graph.ops))
    schedule = compiled(holes).simulate(choice, moves)
    if schedule is None:
        raise Impossible
    return schedule


def simulate_moved(
    holes: Holes, choice: Sequence[int], moved: Mapping[int, int]
) -> tuple[Schedule, dict[int, tuple[int, int]]]:
    """Simulate a choice with holes spent on the host; return the schedule and the windows.

    Rebuilds may need a storage earlier than its own next use. A first simulation shows when, and
    the copy back gets a window that ends there. Raises Impossible as `simulate` does.
    """
    first = windows(holes, moved)
    schedule = simulate(holes, choice, first)
    needed = {}
    for hole, (_, back) in first.items():
        storage = holes.storage[hole]
        # The one of the storage's stays on the host that begins with this hole.
        for host_copy in schedule.host_copies:
            mine = host_copy.storage == storage and schedule.at[host_copy.left] == holes.start[hole]
            if mine and schedule.at[host_copy.fetched] < back:
                needed[hole] = schedule.at[host_copy.fetched]
    if not needed:
        return schedule, first
    narrowed = windows(holes, moved, needed)
    return simulate(holes, choice, narrowed), narrowed


class Compiled:
    """The holes of a graph in the extension. For one thread at a time.

    core : the extension
    holes : of the graph
    """

    def __init__(self, core: Any, holes: Holes) -> None:
        arrays, last = holes.graph.arrays, len(holes.graph.ops)
        self._core = core
        self._tables = core.tables(
            _ragged(arrays.reads),
            _ragged(arrays.outputs),
            _ragged(holes.touched),
            _ragged(holes.chain),
            _column(holes.first),
            _column(holes.storage),
            _column(holes.start),
            _column(holes.end),
            # Infinity has no int64; the number of ops means never as well.
            _column(int(min(op, last)) for op in holes.expires),
            _column(holes.bytes),
            _column(holes.workspace),
            np.array(holes.seconds, np.float64),
            arrays.resident.astype(np.int64),
            arrays.keep.astype(np.int64),
            _column(holes.rebuildable),
            _column(holes.stays),
            holes.graph.base_bytes,
        )
        self._leaves = _column(map(holes.may_leave, range(holes.count)))
        # Rebuilds for one hole that take longer than the whole step are not tried.
        self._dear = sum(holes.seconds)
        # Op numbers, one more for the end, and last KEEP, which is -1.
        self._numbers = [*range(last + 1), -1]

    def simulate(self, choice: Sequence[int], moves: Moves | None) -> Schedule | None:
        """Return the schedule of a choice; None if it is impossible."""
        simulated = self._core.simulate(self._tables, _column(choice), _moves(moves))
        if simulated is None:
            return None
        ops, at, intervals, live, host_copies, seconds = simulated
        # The extension's rows begin with the hole, which a schedule does not need.
        rows = np.frombuffer(host_copies, np.int32).reshape(-1, 5)[:, 1:]
        return Schedule(
            self._listed(np.frombuffer(ops, np.int32)),
            self._listed(np.frombuffer(at, np.int32)),
            np.frombuffer(intervals, np.int32).reshape(-1, 3),
            np.frombuffer(live, np.int64),
            seconds,
            tuple(HostCopy(*row) for row in rows.tolist()),
        )

    def fit(
        self,
        choice: Sequence[int],
        budget_bytes: int,
        late: Until,
        moves: Moves | None,
        rounds: int,
        factors: Sequence[float],
    ) -> list[int] | None:
        """Return the choice that `greedy.fit` finds."""
        held = _column(choice)
        weights = np.array(factors, np.float64)
        has_fit, work = self._core.fit(
            self._tables, held, _moves(moves), weights, budget_bytes, self._dear, rounds, late
        )
        spend(work)
        return self._listed(held) if has_fit else None

    def _listed(self, numbers: Ints | Ints32) -> list[int]:
        """Return numbers of ops, or KEEP, as a list that shares equal int objects.

        Many schedules of one graph are held at a time, and each new int object takes 28 bytes.
        """
        return list(map(self._numbers.__getitem__, numbers.tolist()))

    def trim(
        self,
        choice: Sequence[int],
        order: Sequence[int],
        budget_bytes: int,
        late: Until,
        moves: Moves | None,
        *,
        filtered: bool,
    ) -> list[int]:
        """Return the choice that `greedy.trim` ends with, holes tried in this order."""
        held = _column(choice)
        work = self._core.trim(
            self._tables, held, _moves(moves), _column(order), budget_bytes, filtered, late
        )
        spend(work)
        return self._listed(held)

    def anneal(
        self,
        choice: Sequence[int],
        moved: Sequence[int],
        budget_bytes: int,
        late: Until,
        lanes: tuple[float, Floats, Floats, int],
        heat: tuple[float, float],
        *,
        tries: int,
        seed: int,
        recompute: bool,
        wait: bool,
    ) -> tuple[list[int], list[int]]:
        """Return the choice that `anneal.anneal` ends with, and what is moved.

        `moved`, per hole: 0, or one more than the copies that ops wait for.
        """
        held, away = _column(choice), _column(moved)
        work = self._core.anneal(
            self._tables, held, away, self._leaves,
            budget_bytes, tries, seed, recompute, wait, lanes, heat, late,
        )  # fmt: skip
        spend(work)
        return self._listed(held), away.tolist()


def compiled(holes: Holes) -> Compiled:
    """Return the holes in the extension, transferred once."""
    if "compiled" not in holes.memo:
        holes.memo["compiled"] = Compiled(core(), holes)
    handle: Compiled = holes.memo["compiled"]
    return handle


def _column(values: Iterable[int]) -> Ints:
    return np.array(list(values), np.int64)


def _ragged(rows: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    return _column(map(len, rows)), _column(chain.from_iterable(rows))


def _moves(moves: Moves | None) -> Ints:
    return np.array([(hole, *ends) for hole, ends in (moves or {}).items()], np.int64).reshape(-1)


def emit(
    shape: Holes,
    schedule: Schedule,
    *,
    planner: str,
    budget_bytes: int | None = None,
) -> Plan:
    """Return the plan of a schedule."""
    # Without ops nothing runs, and the peak is the resident bytes.
    plan = finished_plan(
        shape.graph,
        _actions(shape, schedule),
        planner=planner,
        peak_bytes=schedule.peak_bytes or shape.graph.base_bytes,
        seconds=lane_seconds(shape, schedule),
    )
    return replace(plan, budget_bytes=budget_bytes)


def finished_plan(
    graph: Graph,
    actions: Sequence[Action],
    *,
    planner: str,
    peak_bytes: int,
    seconds: float,
) -> Plan:
    """Return a plan with the fields that follow from its graph; its bound: all ops run once."""
    bound = sum(min(options) for options in graph.arrays.seconds)
    return Plan(
        actions=tuple(actions),
        decisions=decisions_of(graph, actions),
        planner=planner,
        peak_bytes=peak_bytes,
        seconds=seconds,
        # Both sum the same terms in another order, and rounding must not lift the bound above.
        lower_bound_seconds=min(bound, seconds),
        baseline_peak_bytes=unplanned_bytes(graph),
        baseline_seconds=baseline_seconds(graph),
        seconds_sources=graph.seconds_sources,
        graph_name=graph.name,
    )


def decisions_of(graph: Graph, actions: Iterable[Action]) -> tuple[Decision, ...]:
    """Return the decisions that actions imply, by how often each storage is made.

    It is made whenever an op outputs it while it is not on the device.
    """
    arrays, device = graph.arrays, graph.device
    times_made: Counter[int] = Counter()
    cost: dict[int, float] = {}
    present: set[int] = set()
    offloaded: set[int] = set()
    ran: set[int] = set()
    for kind, target, way in actions:
        if kind == "run":
            op = graph.op_index[target]
            fresh = [storage for storage in arrays.outputs[op] if storage not in present]
            present.update(fresh)
            times_made.update(fresh)
            # An in-place write makes no storage; the cost of its rerun counts for what it writes.
            changed = fresh or arrays.writes[op]
            for storage in changed if op in ran else ():
                # Several storages made by one rerun share its seconds.
                share = arrays.seconds[op][way] / len(changed)
                cost[storage] = cost.get(storage, 0.0) + share
            ran.add(op)
            continue
        storage = graph.storage_index[target]
        if kind == "free":
            present.discard(storage)
        elif kind == "offload":
            offloaded.add(storage)
        else:
            present.add(storage)
    result = []
    for number, record in enumerate(graph.storages):
        # Resident ones are never made, so there is no decision about them.
        times, size = times_made[number], int(arrays.bytes[number])
        if not times:
            continue
        seconds = cost.get(number, 0.0)
        if number in offloaded:
            technique, text = "offload", "spends its longest gap on the host"
            seconds = device.to_host_s(size) + device.to_device_s(size)
        elif times == 1:
            technique, text = "keep", "on the device from its making to its last use"
            size, seconds = 0, 0.0
        else:
            technique = "recompute" if times == 2 else "recompute_each"
            text = f"made {times} times, for {seconds:.3g} s more"
        result.append(Decision(record.name, technique, text, size, seconds))
    return tuple(result)


def _actions(holes: Holes, schedule: Schedule) -> tuple[Action, ...]:
    """Convert a schedule to the actions of a plan."""
    graph = holes.graph
    ways = schedule.ways or (0,) * len(schedule.ops)
    names = [storage.name for storage in graph.storages]
    after: list[list[Action]] = [[] for _ in schedule.ops]
    before: list[list[Action]] = [[] for _ in schedule.ops]
    end = len(schedule.ops) - 1
    for host_copy in schedule.host_copies:
        # Added before the frees: a copy out has to start while the storage is on the device.
        after[host_copy.left].append(Action("offload", names[host_copy.storage]))
        before[host_copy.fetched].append(Action("prefetch", names[host_copy.storage]))
    for storage, _, run in schedule.intervals.tolist():
        # Kept storages stay after the last run.
        if run != end or not graph.storages[storage].keep:
            after[run].append(Action("free", names[storage]))
    result: list[Action] = []
    for run, op in enumerate(schedule.ops):
        result += before[run]
        result.append(Action("run", graph.ops[op].name, ways[run]))
        result += after[run]
    return tuple(result)
