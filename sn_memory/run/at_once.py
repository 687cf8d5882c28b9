"""A plan of a graph at once, while training: one made for another input, or a short search.

Ops of one model have the same names at any batch size and length, so that a plan is a plan of the
new graph as it stands; what it needs there is known when it has been carried out on paper.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..base.errors import PlanError
from ..base.sizes import parse_bytes
from ..check.replay import carry_out
from ..cost.blocks import Settings
from ..graph.graph import Graph
from ..graph.liveness import baseline_seconds, unplanned_bytes
from ..plan.emit import decisions_of
from ..plan.plan import BudgetError, Plan
from ..plan.policies import policy
from ..plan.refusal import over_budget
from .reserved import keeping_reserved

# A search while training ends after so many seconds.
SEARCH_S = 1.0
# Planning while training may take so much of the time, and so many seconds before that counts.
SHARE = 0.1
ALLOWED_S = 30.0
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
    graph: Graph,
    search: Callable[[Graph], Plan],
    budget_bytes: int,
    plans: Sequence[tuple[str, Plan]],
    allocator: Settings | None = None,
) -> PlanAtOnce:
    """Plan a graph at once.

    Parameters
    ----------
    graph
        A step of the model on a new input.
    search
        Plans a graph within these bytes, in about SEARCH_S.
    budget_bytes
        The most bytes; where no plan keeps it, that with the smallest peak is returned.
    plans
        Those that a search found for other inputs, with what to call these.
    allocator
        That of a card: what it reserves keeps the budget, too.
    """

    def kept(plan: Plan | None) -> Plan | None:
        if plan is None or plan.peak_bytes > budget_bytes:
            return None
        return keeping_reserved(graph, plan, budget_bytes, allocator)

    if whole := kept(policy("liveness")(graph, budget_bytes=None)):
        return PlanAtOnce(whole, NOTHING_AGAIN)
    tried = [(name, kept(carried_over(graph, plan, budget_bytes))) for name, plan in plans]
    if keeping := [(name, plan) for name, plan in tried if plan is not None]:
        name, carried = min(keeping, key=lambda row: row[1].seconds)
        return PlanAtOnce(carried, f"{CARRIED_OVER} {name}")
    try:
        plan = search(graph)
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
    return replace(found, decisions=decisions_of(graph, actions))


def smallest(graph: Graph) -> Plan:
    """Return a plan that needs little memory and is found at once."""
    return policy("superneurons_memory")(graph, budget_bytes=None)


def within(graph: Graph, made: Plan, budget: float | str) -> Plan:
    """Return a plan made before, if it is one of this graph and keeps the budget."""
    found = carry_out(graph, made)
    allowed = parse_bytes(budget, whole=unplanned_bytes(graph))
    # Op seconds may have been measured anew since; its bound holds for the old ones.
    made = replace(
        made,
        budget_bytes=allowed,
        peak_bytes=found.peak_bytes,
        seconds=found.seconds,
        baseline_seconds=baseline_seconds(graph),
        lower_bound_seconds=0.0,
    )
    if made.peak_bytes > allowed:
        raise over_budget(
            graph, made, allowed, what="the plan passed in", instead="pass a planner's name"
        )
    return made


class TimeToPlan:
    """Seconds that planning at first sight took since a model was planned, and whether more may.

    Attributes
    ----------
    planning_s, longest_s
        What it took in all, and most.
    """

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.planning_s = self.longest_s = 0.0

    def took(self, seconds: float) -> None:
        """Count one more."""
        self.planning_s += seconds
        self.longest_s = max(self.longest_s, seconds)

    def left(self) -> bool:
        """Whether there is time to plan one more kind, as long as the longest took."""
        passed = time.perf_counter() - self.began
        return self.planning_s + self.longest_s <= ALLOWED_S + SHARE * passed

    def __str__(self) -> str:
        return (
            f"planning new kinds of input has taken {self.planning_s:.0f} s, more than a tenth of "
            "the time since planning"
        )
