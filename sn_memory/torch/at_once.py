"""A plan of a graph at once, while training: one made for another input, or a short search.

Ops of one model have the same names at any batch size and length, so that a plan is a plan of the
new graph as it stands; what it needs there is known when it has been carried out on paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..base.errors import PlanError
from ..graph.graph import Graph
from ..plan.emit import decisions_of
from ..plan.plan import BudgetError, Plan
from ..plan.policies import policy
from .planning import Planning, smallest, within

# How a kind of input was planned; the last two by a search.
NOTHING_AGAIN = "nothing runs again"
CARRIED_OVER = "carried over from the plan of"
PLANNED = "planned"
AT_ONCE = "planned at once"


@dataclass(frozen=True)
class PlanAtOnce:
    """A plan, how it came about, and the error that says it does not keep the budget."""

    plan: Plan
    how: str
    over: BudgetError | None = None


def plan_at_once(
    graph: Graph, planning: Planning, budget_bytes: int, plans: Sequence[tuple[str, Plan]]
) -> PlanAtOnce:
    """Plan a graph at once.

    Parameters
    ----------
    graph
        A step of the model on a new input.
    planning
        How the model was planned.
    budget_bytes
        The most live bytes; where no plan keeps it, that with the smallest peak is returned.
    plans
        Those that a search found for other inputs, with what to call these.
    """
    whole = policy("liveness")(graph, budget_bytes=None)
    if whole.peak_bytes <= budget_bytes:
        return PlanAtOnce(whole, NOTHING_AGAIN)
    found = [(name, carried_over(graph, made, budget_bytes)) for name, made in plans]
    kept = [(name, plan) for name, plan in found if plan is not None]
    if kept:
        name, plan = min(kept, key=lambda it: it[1].seconds)
        return PlanAtOnce(plan, f"{CARRIED_OVER} {name}")
    try:
        plan = planning.at_once(budget_bytes, None).planned(graph)
    except BudgetError as error:
        return PlanAtOnce(error.plan or smallest(graph), AT_ONCE, error)
    return PlanAtOnce(plan, AT_ONCE)


def carried_over(graph: Graph, made: Plan, budget_bytes: int) -> Plan | None:
    """Return a plan of the same model for another input as one of this graph.

    Ops of one model have the same names at any size. None where they have not, or the budget would
    not be kept.
    """
    # Ways to carry convolutions out are not offered without timing them: all take the first.
    actions = tuple(action._replace(way=0) for action in made.actions)
    try:
        found = within(graph, replace(made, actions=actions), budget_bytes)
    except (PlanError, BudgetError):
        return None
    if not found.decided("compress"):
        found = replace(found, decisions=decisions_of(graph, actions))
    return found
