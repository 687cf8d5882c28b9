"""Which parameters and optimizer state are on the host, planned together with the activations.

The state of a parameter is moved once per step, the parameter itself twice or more: so states go to
the host first, the largest first, and parameters after all states. Their number is searched: more
of them cost transfers, fewer leave less room for activations. For each number the graph is planned
like any other (what to rebuild, what to fetch again), and copies are started early; the number
whose step ends first on its lanes - ops, fetches, stores, the host's updates - is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..base.sizes import show_bytes
from ..graph.graph import Graph
from ..graph.hosted import Unit, scratch_bytes, update_seconds, with_state
from .buffers import live_bytes
from .copies import LaneSeconds, seconds_on_lanes, spread_copies
from .plan import BudgetError, Plan

# How many numbers of units on the host are tried between the fewest and all: each is a search.
TRIED = 3
# The fewest that keep the budget are found to this share of all: each halving is a search.
GRAIN = 1 / 256

Planner = Callable[[Graph, int], Plan]


@dataclass(frozen=True)
class StatePlan:
    """A plan of a step with its updates.

    graph : the step with its updates; see `with_state`.
    plan : a plan of it. Its `seconds` count copies as ops.
    places : per parameter that may move: `device`, `state` or `host`.
    lanes : when it ends, with copies on their lanes
    step_peak_bytes : the most live bytes while the optimizer's step updates what is on the host,
        one parameter after the other; 0 if all updates are in the plan.
    updaters : per trained parameter with something on the host, what updates it: `device`, `host`
        or `in place`.
    step_s : seconds of the optimizer's step, whose copies overlap with updates; 0 if all updates
        are in the plan.
    """

    graph: Graph
    plan: Plan
    places: Mapping[str, str]
    lanes: LaneSeconds
    step_peak_bytes: int = 0
    updaters: Mapping[str, str] = field(default_factory=dict)
    step_s: float = 0.0

    @property
    def seconds(self) -> float:
        """When everything has ended."""
        return self.lanes.seconds + self.step_s


def plan_state(
    graph: Graph,
    units: Sequence[Unit],
    budget_bytes: int,
    planner: Planner,
    *,
    update: str = "backward",
    by: str = "device",
    places: Sequence[str] = ("state", "host"),
) -> StatePlan:
    """Return the fastest plan found of a step with its updates, over the state that moves.

    graph : forward and backward pass
    units : its parameters
    budget_bytes : the most live bytes on the device
    planner : plans a graph within a number of bytes; raises BudgetError
    update : as in `with_state`
    by : what updates the units on the host
    places : the allowed places of what moves; see `with_state`

    Raises BudgetError if no plan keeps the budget even with all state on the host.
    """
    moves = [move for move in moves_of(graph, units) if move[1] in places]
    updaters = {unit.parameter: by for unit in units}
    # A plan of a deep net has tens of thousands of actions: hold only the best so far.
    best: StatePlan | None = None
    keeps: dict[int, bool] = {}

    def ends(state_plan: StatePlan) -> tuple[float, float]:
        return state_plan.seconds, state_plan.lanes.copies_s

    def kept(count: int) -> bool:
        """Plan with `count` on the host; return whether that keeps the budget."""
        nonlocal best
        if count not in keeps:
            try:
                state_plan = planned_with(
                    graph, units, dict(moves[:count]), budget_bytes, planner, update=update,
                    updaters=updaters,
                )  # fmt: skip
            except BudgetError:
                # With everything on the host there is nothing left to try.
                if count == len(moves):
                    raise
                keeps[count] = False
                return False
            keeps[count] = True
            # Of two with the same end, the one that copies less.
            if best is None or ends(state_plan) < ends(best):
                best = state_plan
        return keeps[count]

    # First, as it raises if no number of units keeps the budget.
    kept(len(moves))
    low, high = 0, len(moves)
    if kept(0):
        high = 0
    # `high` keeps the budget; `low` does not, unless both are 0.
    while high - low > max(1, GRAIN * len(moves)):
        middle = (low + high) // 2
        if kept(middle):
            high = middle
        else:
            low = middle
    # More than the fewest may be faster: with more room, less has to be recomputed.
    for part in range(1, TRIED + 1):
        kept(high + (len(moves) - high) * part // (TRIED + 1))
    assert best is not None
    return best


def moves_of(graph: Graph, units: Sequence[Unit]) -> list[tuple[str, str]]:
    """Return what may move to the host, in this order: (parameter, place)."""
    able = [unit for unit in units if unit.movable]
    size = {
        unit.parameter: graph.storages[graph.storage_index[unit.parameter]].bytes for unit in able
    }
    # Names break ties, so that the order does not depend on that of the parameters.
    states = sorted((unit for unit in able if unit.gradient and unit.state_bytes),
                    key=lambda unit: (-unit.state_bytes, unit.parameter))  # fmt: skip
    movable = sorted(able, key=lambda unit: (-size[unit.parameter], unit.parameter))
    return [
        *((state.parameter, "state") for state in states),
        *((unit.parameter, "host") for unit in movable),
    ]


def planned_with(
    graph: Graph, units: Sequence[Unit], places: Mapping[str, str], budget_bytes: int,
    planner: Planner, *, update: str = "backward", updaters: Mapping[str, str] | None = None,
) -> StatePlan:  # fmt: skip
    """Return a plan with these places; raise BudgetError if none keeps the budget."""
    by = updaters or {}
    extended = with_state(graph, units, places, update=update, updaters=by)
    later = step_peak(extended, units, places, by) if update == "step" else 0
    # Before any search: no plan of the graph reduces the optimizer's step.
    if later > budget_bytes:
        raise BudgetError(
            f"the optimizer's step needs {show_bytes(later)}, for what stays on the device and the "
            f"largest parameter with its gradient and state. The budget is "
            f"{show_bytes(budget_bytes)}. Raise it.",
            peak_bytes=later, budget_bytes=budget_bytes, op="optimizer.step",
        )  # fmt: skip
    plan = planner(extended, budget_bytes)
    if all(action.kind in ("run", "free") for action in plan.actions):
        actions = spread_copies(extended, plan.actions, budget_bytes)
        peak = max(live_bytes(extended, actions), default=plan.peak_bytes)
        plan = replace(plan, actions=actions, peak_bytes=peak)
    every = {unit.parameter: places.get(unit.parameter, "device") for unit in units}
    moved = (
        unit.parameter for unit in units if unit.gradient and every[unit.parameter] != "device"
    )
    who = {name: by.get(name, "device") for name in moved}
    lanes = seconds_on_lanes(extended, plan.actions)
    step_s = step_seconds(graph, units, every, who) if update == "step" else 0.0
    return StatePlan(extended, plan, every, lanes, later, who, step_s)


def step_bytes(unit: Unit, place: str, size: int, by: str = "device") -> tuple[int, int]:
    """Return the bytes that a unit's update copies to the device, and its scratch memory there.

    size : bytes of its parameter, and of its gradient
    """
    if place == "device":
        return 0, unit.scratch_bytes
    # The gradient was stored when complete, and is copied back; so is a parameter on the host.
    brought = (size if place == "state" else 2 * size) + unit.state_bytes
    return brought if by == "device" else 0, scratch_bytes(unit, by)


def step_peak(
    graph: Graph, units: Sequence[Unit], places: Mapping[str, str], updaters: Mapping[str, str]
) -> int:
    """Return the peak of the optimizer's step, with one update after the other.

    Live are resident storages, gradients that stay on the device, and the parameter, gradient,
    state and scratch memory of one unit.
    """
    size = {storage.name: storage.bytes for storage in graph.storages}
    kept = (
        storage.bytes for storage in graph.storages if storage.role == "gradient" and storage.keep
    )
    most = 0
    for unit in units:
        if unit.gradient is not None:
            name = unit.parameter
            place, by = places.get(name, "device"), updaters.get(name, "device")
            most = max(most, sum(step_bytes(unit, place, size[name], by)))
    return graph.base_bytes + sum(kept) + most


def step_seconds(
    graph: Graph, units: Sequence[Unit], places: Mapping[str, str], updaters: Mapping[str, str]
) -> float:
    """Return the seconds of the optimizer's step: those of its slowest lane."""
    ops = host = 0.0
    back_bytes = out_bytes = 0
    for unit in units:
        if unit.gradient is None:
            continue
        size = graph.storages[graph.storage_index[unit.parameter]].bytes
        place, by = places[unit.parameter], updaters.get(unit.parameter, "device")
        # Updates by the host need no copy to it; a parameter kept on the device is copied back.
        if by == "host":
            host += update_seconds(unit, by)
            back_bytes += size if place == "state" else 0
            continue
        ops += update_seconds(unit, by)
        back_bytes += step_bytes(unit, place, size, by)[0]
        if place != "device" and by == "device":
            out_bytes += unit.state_bytes + (size if place == "host" else 0)
    # If the device states no speeds, copies take no time; only ops count.
    device = graph.device
    back = back_bytes / (device.to_device_bytes_per_s or math.inf)
    out = out_bytes / (device.to_host_bytes_per_s or math.inf)
    return max(back, out, ops, host)
