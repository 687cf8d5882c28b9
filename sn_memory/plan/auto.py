"""The `auto` planner: a search of our own that begins from the plan of `sqrt_n`.

Very small graphs are solved exactly. Exact solving, the search, and what it takes to say no share
one deadline: see `Auto.look` for their parts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from ..base.clock import now
from ..base.progress import say
from ..base.sizes import show_bytes
from ..graph.graph import Graph
from ..graph.holes import holes
from ..graph.liveness import baseline_seconds, unplanned_bytes
from .answers import answers
from .bound import smallest_peak
from .buffers import peak_action
from .emit import decisions_of, emit
from .plan import BudgetError, Plan
from .policies.sqrt_n import sqrt_n
from .refusal import placed, refused
from .search.archive import Candidate
from .search.exact import solve as solve_exactly
from .search.search import LARGE, Search

log = logging.getLogger(__name__)

EXACT_OPS = 10
# Of the time limit: what exact solving may take; and what is left to find the smallest peak, as
# long as no plan keeps the budget.
PART, TO_REFUSE = 0.5, 0.2


class Auto:
    """The planning of one graph, for any number of budgets.

    Parameters
    ----------
    graph
        What is to be carried out.
    techniques
        `keep`, `recompute`, `offload`, or some of them.
    time_limit_s
        Seconds of `clock.now` for each budget, of the first one from here on.
    historical
        Whether the search begins from the plan of `sqrt_n`.
    """

    def __init__(
        self,
        graph: Graph,
        techniques: Sequence[str],
        time_limit_s: float,
        *,
        historical: bool = True,
    ) -> None:
        self.graph, self.limit_s, self.historical = graph, time_limit_s, historical
        # When the budget that is looked at began, if it has, and when its time is over.
        self.began: float | None = now()
        self.end = self.began + time_limit_s
        self.search = Search(
            holes(graph, lean=True),
            offload="offload" in techniques,
            recompute="recompute" in techniques,
            deadline=self.end,
        )
        self.plans: list[Plan] = []
        # Whether exact solving has given up, so that it proves nothing.
        self.gave_up = False
        self.floor = smallest_peak(self.search.shape, offload=self.search.offload)

    def front(self, budgets: Sequence[int]) -> list[Plan]:
        return answers(budgets, self.look, self.answer)

    def look(self, budget_bytes: int) -> None:
        """Fill the archives with what can be found for a budget."""
        began = now() if self.began is None else self.began
        self.began, self.end = None, began + self.limit_s
        self.search.began = began
        if self.exactly(budget_bytes, began + self.limit_s * PART) and not self.search.offload:
            return
        if self.floor[0] > budget_bytes:
            return
        self.from_sqrt_n(budget_bytes)
        within = [plan for plan in self.plans if plan.peak_bytes <= budget_bytes]
        best = min(within, key=lambda plan: plan.seconds, default=None)
        known = best is not None or self.search.archive.best(budget_bytes) is not None
        self.search.deadline = self.end - (0 if known else self.limit_s * TO_REFUSE)
        self.search.end = self.end
        # On a large graph the search finds more in the time that it takes to improve this plan.
        worth = self.search.recompute and len(self.graph.ops) <= LARGE
        if best is not None and best.planner != "exact" and worth:
            self.search.from_plan(best, budget_bytes)
        self.search.solve(budget_bytes)
        self.search.widened(budget_bytes)

    @property
    def small(self) -> bool:
        """Whether the graph is small enough to be solved exactly."""
        few = len(self.graph.ops) <= EXACT_OPS and self.search.recompute
        return few and not self.gave_up

    def exactly(self, budget_bytes: int, deadline: float) -> bool:
        """Put an optimal plan without transfers, if there is one, among the plans.

        False where the graph is too large for that.
        """
        if not self.small:
            return False
        try:
            found = solve_exactly(self.graph, budget_bytes, deadline=deadline)
        except (MemoryError, TimeoutError):
            self.gave_up = True
            return False
        if found is None:
            return True
        self.plans.append(
            Plan(
                actions=found.actions,
                decisions=decisions_of(self.graph, found.actions),
                planner="exact",
                peak_bytes=found.peak_bytes,
                seconds=found.seconds,
                lower_bound_seconds=found.seconds if not self.search.offload else 0.0,
                baseline_peak_bytes=unplanned_bytes(self.graph),
                baseline_seconds=baseline_seconds(self.graph),
                seconds_sources=self.graph.seconds_sources,
                graph_name=self.graph.name,
            )
        )
        return True

    def from_sqrt_n(self, budget_bytes: int) -> None:
        """Take the plan of `sqrt_n` in.

        Whatever time there is, so that a budget which it keeps is not refused for want of time: it
        takes a tenth of a second for three thousand ops, one for twenty thousand.
        """
        own = self.search.archive.best(budget_bytes)
        if not self.historical or (own is not None and own.origin == "keep"):
            return
        say("search", now() - self.search.began, self.limit_s, "sqrt_n")
        plan = sqrt_n(self.graph, budget_bytes=budget_bytes)
        if self.allowed(plan):
            self.plans.append(plan)

    def allowed(self, plan: Plan) -> bool:
        """Whether a plan does only what this search may do."""
        offloads = any(action.kind == "offload" for action in plan.actions)
        reruns = sum(action.kind == "run" for action in plan.actions) > len(self.graph.ops)
        return (self.search.offload or not offloads) and (self.search.recompute or not reruns)

    def answer(self, budget_bytes: int, solve_s: float) -> Plan:
        """Return the fastest of all that keeps a budget, with its bound."""
        plan = self.fastest(budget_bytes)
        if plan is None:
            # To say what the smallest peak is takes a search of its own, which may find a plan.
            error = self.refusal(budget_bytes)
            plan = self.fastest(budget_bytes)
            if plan is None:
                raise error
        proven = (
            it.lower_bound_seconds
            for it in self.plans
            if it.planner == "exact" and it.peak_bytes <= budget_bytes
        )
        bound = max([self.search.bound(budget_bytes), *proven])
        plan = replace(plan, lower_bound_seconds=min(bound, plan.seconds), solve_s=solve_s)
        log.info(
            "%s: peak %s -> %s, %+.1f %% time, gap %.1f %%, %.1f s of planning",
            self.graph.name or "graph",
            show_bytes(plan.baseline_peak_bytes),
            show_bytes(plan.peak_bytes),
            100 * plan.overhead,
            100 * plan.gap,
            solve_s,
        )
        return plan

    def fastest(self, budget_bytes: int) -> Plan | None:
        """Return the fastest plan found so far that keeps a budget; its bound is still to come."""
        found = self.search.archive.best(budget_bytes)
        others = [plan for plan in self.plans if plan.peak_bytes <= budget_bytes]
        other = min(others, key=lambda plan: (plan.seconds, plan.peak_bytes), default=None)
        if other is not None and (
            found is None or (other.seconds, other.peak_bytes) < (found.seconds, found.peak_bytes)
        ):
            return replace(other, planner=f"auto ({other.planner})", budget_bytes=budget_bytes)
        return None if found is None else self.emitted(found, budget_bytes)

    def emitted(self, found: Candidate, budget_bytes: int | None) -> Plan:
        return emit(self.search.shape, found.schedule, planner="auto", budget_bytes=budget_bytes)

    def refusal(self, budget_bytes: int) -> BudgetError:
        """Return the error that says what the smallest peak is, as far as it can be found."""
        # After a front of budgets, those after the first have no part of the time left for this.
        end = max(self.end, now() + self.limit_s * TO_REFUSE)
        floor, op = self.floor[0], self.graph.ops[self.floor[1]].name
        before = len(self.plans)
        if self.search.recompute:
            self.from_sqrt_n(floor)
        # What it names is found again when it is asked for: nothing below depends on this budget,
        # nor on what the search for it has found.
        search = Search(
            self.search.shape,
            offload=self.search.offload,
            recompute=self.search.recompute,
            deadline=end,
        )
        search.end = end
        ended = self.shrink(search, floor)
        smallest = search.archive.smallest()
        found = self.emitted(search.archive.equipped(smallest, smallest.peak_bytes), None)
        self.plans.append(found)
        least = min(self.plans[before:], key=lambda plan: (plan.peak_bytes, plan.seconds))
        size, name = least.peak_bytes, self.peak_op(least)
        if self.small and not self.search.offload:
            floor, op = size, name
        where = placed(self.graph, name)
        if size <= floor:
            text = f"no plan has a peak below {show_bytes(size)}, set by {where}"
        else:
            how = "found" if ended else f"found in {self.limit_s:g} s, when the search was cut,"
            text = (
                f"the smallest peak {how} is {show_bytes(size)}, set by {where}; no plan can go "
                f"below {show_bytes(floor)}, what {op!r} works on"
            )
        return refused(text, self.graph, least, budget_bytes, op=name, floor_bytes=floor)

    def peak_op(self, plan: Plan) -> str:
        """Return the op that runs at the peak of a plan, or next after it."""
        first = peak_action(self.graph, plan)
        later = (action.target for action in plan.actions[first:] if action.kind == "run")
        return next(later, self.graph.ops[-1].name)

    def shrink(self, search: Search, low: int) -> bool:
        """Look for plans of ever smaller peaks; whether this ended by itself, not by the clock."""
        high = min(item.peak_bytes for item in search.archive.items)
        while self.small and high > low:
            middle = (low + high) // 2
            before = len(self.plans)
            self.exactly(middle, search.deadline)
            low, high = (low, middle) if len(self.plans) > before else (middle + 1, high)
        if not self.small or search.offload:
            search.least(self.floor[0])
        return not search.late
