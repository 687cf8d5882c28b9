"""What of parameters and optimizer state lies on the host, planned together with the activations.

The state of a parameter is moved once per step, the parameter itself twice or more: so states go to
the host first, the largest first, and parameters after all states. How many of these is searched:
more of them cost transfers, fewer leave less room for activations. Each number is planned as any
graph is (what to rebuild, what to fetch again), its copies are started ahead, and what ends first
on three lanes - ops, fetches, stores - is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..base.sizes import show_bytes
from ..cost.state_lanes import LaneSeconds, lane_seconds
from ..graph.graph import Graph
from ..graph.hosted import Unit, with_state
from .ahead import ahead, live_bytes
from .plan import BudgetError, Plan

# Numbers of units on the host that are planned, beside the fewest and the most: each is a search.
TRIED = 3

Planner = Callable[[Graph, int], Plan]


@dataclass(frozen=True)
class StatePlan:
    """A plan of a step with its updates.

    Parameters
    ----------
    graph
        The step with its updates; see `with_state`.
    plan
        A plan of it. Its `seconds` count copies as ops.
    places
        Per parameter that may move: `device`, `state` or `host`.
    lanes
        When it ends, copies on their lanes.
    step_peak_bytes
        The most that is live while the optimizer's step updates what is on the host, one parameter
        after the other; 0 where all updates are in the plan.
    """

    graph: Graph
    plan: Plan
    places: Mapping[str, str]
    lanes: LaneSeconds
    step_peak_bytes: int = 0


def plan_state(
    graph: Graph,
    units: Sequence[Unit],
    budget_bytes: int,
    planner: Planner,
    *,
    update: str = "backward",
) -> StatePlan:
    """Return the fastest plan found of a step with its updates, and what of the state moves.

    Parameters
    ----------
    graph
        Forward and backward pass.
    units
        Its parameters.
    budget_bytes
        The most that is live on the device.
    planner
        Plans a graph within so many bytes; raises BudgetError.
    update
        As in `with_state`.

    Raises
    ------
    BudgetError
        If even with all of it on the host no plan keeps the budget.
    """
    moves = moves_of(graph, units)
    found: dict[int, StatePlan] = {}

    def planned(count: int) -> StatePlan | None:
        if count not in found:
            try:
                found[count] = planned_with(
                    graph, units, dict(moves[:count]), budget_bytes, planner, update=update
                )
            except BudgetError:
                if count == len(moves):
                    raise
                return None
        return found[count]

    whole = planned(len(moves))
    assert whole is not None
    low, high = 0, len(moves)  # the fewest that keep the budget are in here
    if planned(0) is not None:
        high = 0
    while high - low > 1:
        middle = (low + high) // 2
        if planned(middle) is None:
            low = middle
        else:
            high = middle
    for part in range(1, TRIED + 1):
        planned(high + (len(moves) - high) * part // (TRIED + 1))
    return min(found.values(), key=lambda it: (it.lanes.seconds, it.lanes.copies_s))


def moves_of(graph: Graph, units: Sequence[Unit]) -> list[tuple[str, str]]:
    """Return what may move to the host, in the order in which it does: (parameter, place)."""
    able = [it for it in units if it.movable]
    size = {it.parameter: graph.storages[graph.storage_index[it.parameter]].bytes for it in able}
    states = sorted((it for it in able if it.gradient and it.state_bytes),
                    key=lambda it: (-it.state_bytes, it.parameter))  # fmt: skip
    whole = sorted(able, key=lambda it: (-size[it.parameter], it.parameter))
    return [*((it.parameter, "state") for it in states), *((it.parameter, "host") for it in whole)]


def planned_with(
    graph: Graph, units: Sequence[Unit], places: Mapping[str, str], budget_bytes: int,
    planner: Planner, *, update: str = "backward",
) -> StatePlan:  # fmt: skip
    """Return a plan with this on the host; raises BudgetError."""
    whole = with_state(graph, units, places, update=update)
    later = step_peak(whole, units, places) if update == "step" else 0
    if later > budget_bytes:
        raise BudgetError(
            f"the optimizer's step needs {show_bytes(later)}, for what stays on the device and the "
            f"largest parameter with its gradient and state. The budget is "
            f"{show_bytes(budget_bytes)}. Raise it.",
            peak_bytes=later, budget_bytes=budget_bytes, op="optimizer.step",
        )  # fmt: skip
    plan = planner(whole, budget_bytes)
    if all(it.kind in ("run", "free") for it in plan.actions):
        actions = ahead(whole, plan.actions, budget_bytes)
        peak = max(live_bytes(whole, actions), default=plan.peak_bytes)
        plan = replace(plan, actions=actions, peak_bytes=peak)
    every = {it.parameter: places.get(it.parameter, "device") for it in units}
    return StatePlan(whole, plan, every, lane_seconds(whole, plan.actions), later)


def step_bytes(unit: Unit, place: str, size: int) -> tuple[int, int]:
    """Return what the update of a unit brings to the device, and what it holds beside that.

    size : bytes of its parameter, as many as of its gradient
    """
    brought = {"device": 0, "state": size + unit.state_bytes, "host": 2 * size + unit.state_bytes}
    return brought[place], unit.scratch_bytes


def step_peak(whole: Graph, units: Sequence[Unit], places: Mapping[str, str]) -> int:
    """Return the most that is live in the optimizer's step; one update after the other.

    Resident storages are there, gradients that stay on the device, and the parameter, gradient,
    state and scratch memory of one unit.
    """
    size = {it.name: it.bytes for it in whole.storages}
    kept = (it.bytes for it in whole.storages if it.role == "gradient" and it.keep)
    trained = (it for it in units if it.gradient is not None)
    each = (
        sum(step_bytes(it, places.get(it.parameter, "device"), size[it.parameter]))
        for it in trained
    )
    return whole.base_bytes + sum(kept) + max(each, default=0)
