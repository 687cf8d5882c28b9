"""From a choice, or from decisions by name, to a finished Plan with its predictions.

Planners that think in holes call `emit`; planners that think in storages ("recompute h3", as the
named ones do) call `plan_from_decisions`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ..base.errors import PlanError
from ..cost.offload import BESIDE, lane_seconds, windows
from ..cost.schedule import Impossible, Schedule
from ..graph.graph import Graph
from ..graph.holes import KEEP, Holes, holes
from ..graph.liveness import baseline_seconds, unplanned_bytes
from .plan import DECISIONS, Action, Decision, Plan
from .simulate import simulate


def emit(
    shape: Holes,
    schedule: Schedule,
    *,
    planner: str,
    budget_bytes: int | None = None,
    lower_bound_seconds: float | None = None,
    solve_s: float = 0.0,
    reasons: Mapping[int, str] | None = None,
) -> Plan:
    """Return the plan of a schedule; `reasons` per storage replace the general sentence.

    Without a bound of the planner's own, the seconds of all ops run once in their fastest way are
    the bound.
    """
    plan = finished_plan(
        shape.graph,
        _actions(shape, schedule),
        planner=planner,
        reasons=reasons,
        peak_bytes=schedule.peak_bytes or shape.graph.base_bytes,
        seconds=lane_seconds(shape, schedule),
        lower_bound_seconds=lower_bound_seconds,
    )
    return replace(plan, budget_bytes=budget_bytes, solve_s=solve_s)


def finished_plan(
    graph: Graph,
    actions: Sequence[Action],
    *,
    planner: str,
    peak_bytes: int,
    seconds: float,
    reasons: Mapping[int, str] | None = None,
    asked: Mapping[int, int] | None = None,
    lower_bound_seconds: float | None = None,
) -> Plan:
    """Return a plan with what follows from its graph; without a bound, that of all ops run once."""
    least = sum(min(options) for options in graph.arrays.seconds)
    bound = least if lower_bound_seconds is None else lower_bound_seconds
    return Plan(
        actions=tuple(actions),
        decisions=decisions_of(graph, actions, reasons, asked),
        planner=planner,
        peak_bytes=peak_bytes,
        seconds=seconds,
        # Both are sums of the same terms in another order; a bound above by rounding is no bound.
        lower_bound_seconds=min(bound, seconds),
        baseline_peak_bytes=unplanned_bytes(graph),
        baseline_seconds=baseline_seconds(graph),
        seconds_sources=graph.seconds_sources,
        graph_name=graph.name,
    )


def plan_from_decisions(
    graph: Graph,
    decisions: Mapping[str, str],
    *,
    planner: str,
    budget_bytes: int | None = None,
    reasons: Mapping[str, str] | None = None,
) -> Plan:
    """Return the plan that carries decisions out, storage by storage.

    Parameters
    ----------
    decisions
        Storage or alias name to `keep`, `recompute`, `recompute_each` or `offload`. A storage that
        is not named is held to its last use. One that is named `keep` is held longer, while
        rebuilds still start from it. The others leave in their longest hole; `recompute_each` in
        all holes after that one too.
    planner
        Name of the planner, for the plan.
    budget_bytes
        Written into the plan; keeping it is the caller's business.
    reasons
        Storage name to a sentence for people.

    Raises
    ------
    PlanError
        For a name there is not, a technique that is not allowed for it, or decisions that cannot be
        carried out together.
    """
    shape = holes(graph)
    choice, moved = shape.natural(), {}
    for name, technique in decisions.items():
        if name not in graph.storage_index:
            raise PlanError(f"decisions: the graph has no storage or alias named {name!r}.")
        if technique not in DECISIONS:
            raise PlanError(
                f"decisions[{name!r}]: got {technique!r}, expected keep, recompute, recompute_each "
                "or offload."
            )
        storage = graph.storage_index[name]
        mine = shape.of(storage)
        if not mine or (len(mine) == 1 and technique == "offload"):
            continue
        if technique == "keep":
            choice[mine[-1]] = KEEP
        elif technique == "offload" and shape.held[storage]:
            raise PlanError(
                f"decisions[{name!r}]: got 'offload', but somebody outside holds it, so nothing "
                "would be free. Keep it."
            )
        elif technique == "offload":
            moved[shape.main(storage)] = BESIDE
        else:
            if not shape.rebuildable[storage]:
                raise PlanError(
                    f"decisions[{name!r}]: got {technique!r}, but its ops may not run twice. Keep "
                    "or offload it."
                )
            main = shape.main(storage)
            for hole in mine:
                if hole == main or (hole > main and technique == "recompute_each"):
                    choice[hole] = 0 if technique == "recompute" else len(graph.ops)
            if shape.stays[mine[-1]]:
                choice[mine[-1]] = KEEP
    named = {graph.storage_index[name]: text for name, text in (reasons or {}).items()}
    try:
        schedule = simulate(shape, choice, windows(shape, moved))
    except Impossible:
        raise PlanError(
            f"{planner}: these decisions cannot be carried out together: a rebuild would start "
            "from a storage that is on the host, has changed since, or cannot be made again. Keep "
            "that storage."
        ) from None
    return emit(shape, schedule, planner=planner, budget_bytes=budget_bytes, reasons=named)


def decisions_of(
    graph: Graph,
    actions: Iterable[Action],
    reasons: Mapping[int, str] | None = None,
    asked: Mapping[int, int] | None = None,
) -> tuple[Decision, ...]:
    """Return the decisions that actions amount to, seen from how often each storage is made.

    reasons : per storage, a sentence in place of the general one
    asked : how often each was made because somebody asked for it, where that is known; else it
        counts whenever it comes out of an op and is not on the device
    """
    arrays, device = graph.arrays, graph.device
    made: Counter[int] = Counter()
    cost: dict[int, float] = {}
    present: set[int] = set()
    offloaded: set[int] = set()
    ran: set[int] = set()
    for kind, target, way in actions:
        if kind == "run":
            op = graph.op_index[target]
            fresh = [storage for storage in arrays.outputs[op] if storage not in present]
            present.update(fresh)
            made.update(fresh)
            changed = fresh or arrays.writes[op]
            for storage in changed if op in ran else ():
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
    if asked is not None:
        made = Counter(asked)
    lanes = (device.to_host_bytes_per_s, device.to_device_bytes_per_s)
    result = []
    for number, record in enumerate(graph.storages):
        times, size = made[number], int(arrays.bytes[number])
        if not times:
            continue
        seconds = cost.get(number, 0.0)
        if number in offloaded:
            technique, text = "offload", "spends its longest gap on the host"
            seconds = sum(size / lane + device.transfer_latency_s for lane in lanes if lane)
        elif times == 1:
            technique, text = "keep", "on the device from its making to its last use"
            size, seconds = 0, 0.0
        else:
            technique = "recompute" if times == 2 else "recompute_each"
            text = f"made {times} times, for {seconds:.3g} s more"
        text = (reasons or {}).get(number, text) if technique != "keep" else text
        result.append(Decision(record.name, technique, text, size, seconds))
    return tuple(result)


def _actions(holes: Holes, schedule: Schedule) -> tuple[Action, ...]:
    """Write a schedule down as the actions of a plan."""
    graph = holes.graph
    ways = schedule.ways or (0,) * len(schedule.ops)
    names = [storage.name for storage in graph.storages]
    after: list[list[Action]] = [[] for _ in schedule.ops]
    before: list[list[Action]] = [[] for _ in schedule.ops]
    end = len(schedule.ops) - 1
    for host_copy in schedule.host_copies:
        after[host_copy.left].append(Action("offload", names[host_copy.storage]))
        before[host_copy.fetched].append(Action("prefetch", names[host_copy.storage]))
    for storage, _, run in schedule.intervals.tolist():
        if run != end or not graph.storages[storage].keep:
            after[run].append(Action("free", names[storage]))
    result: list[Action] = []
    for run, op in enumerate(schedule.ops):
        result += before[run]
        result.append(Action("run", graph.ops[op].name, ways[run]))
        result += after[run]
    return tuple(result)
