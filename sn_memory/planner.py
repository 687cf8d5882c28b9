"""plan_graph: the fastest plan that can be found whose true peak keeps a budget in bytes.

Planners in use bound something else: torch's budget caps the saved bytes as a knapsack, and its
peak is not even monotone in it; SuperNeurons always goes to the smallest memory. Here each plan is
scored by the true peak, rebuilds and workspaces included, and comes with a lower bound on the
seconds of any plan, so that the gap says how much is left to gain. `docs/decisions/0012-planner.md`
tells how.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from . import policies
from .bound import smallest_peak
from .clock import now
from .drafting import decisions_of, draft
from .errors import BudgetError, PlanError
from .exact import solve as solve_exactly
from .gaps import gaps
from .graph import Graph
from .liveness import baseline_seconds, peak
from .plan import Plan
from .search import Candidate, Progress, Search
from .sizes import parse_bytes, show_bytes

log = logging.getLogger(__name__)

ACTIONS = ("keep", "recompute", "offload")
EXACT_OPS = 10


def plan_graph(
    graph: Graph,
    budget: int | str,
    *,
    planner: str = "auto",
    actions: Sequence[str] = ACTIONS,
    time_limit_s: float = 60.0,
    progress: Progress | None = None,
) -> Plan:
    """Plan a graph within a budget.

    Parameters
    ----------
    graph
        What is to be carried out.
    budget
        The most live bytes, resident storages included: bytes, text as "6GiB", or "60%" of the
        graph's own peak.
    planner
        `auto`, or the name of a historical planner (`sn_memory.policies.names()`).
    actions
        What `auto` may do: `keep` always, `recompute`, `offload` (where the device states transfer
        speeds).
    time_limit_s
        After this many seconds of work `auto` answers with the best it has. The CPU time of the
        calling thread counts, so plans do not depend on what else the machine does.
    progress
        Called with a line of text and the best seconds so far (or None) after each attempt.

    Returns
    -------
    Plan
        Accepted by `check_plan`, within the budget.

    Raises
    ------
    BudgetError
        If no plan was found that keeps the budget; it carries the smallest peak found and its op.
    PlanError
        For an unknown planner or action.
    """
    return plan_front(
        graph,
        [budget],
        planner=planner,
        actions=actions,
        time_limit_s=time_limit_s,
        progress=progress,
    )[0]


def plan_front(
    graph: Graph,
    budgets: Sequence[int | str],
    *,
    planner: str = "auto",
    actions: Sequence[str] = ACTIONS,
    time_limit_s: float = 60.0,
    progress: Progress | None = None,
) -> list[Plan]:
    """Plan a graph for several budgets; the plans are monotone in the budget, in time and in peak.

    Parameters are those of `plan_graph`; `time_limit_s` is for each budget.
    """
    for action in actions:
        if action not in ACTIONS:
            raise PlanError(f"got action {action!r}, expected some of {', '.join(ACTIONS)}.")
    if planner != "auto" and planner not in policies.names():
        raise PlanError(f"got planner {planner!r}, expected auto, {', '.join(policies.names())}.")
    if not time_limit_s > 0:
        raise PlanError(f"got time_limit_s {time_limit_s!r}, expected a number above 0.")
    whole = peak(graph).bytes
    sizes = [parse_bytes(budget, whole=whole) for budget in budgets]
    if planner != "auto":
        return [_named(graph, planner, size) for size in sizes]
    return _Auto(graph, actions, time_limit_s, progress).front(sizes)


def _named(graph: Graph, planner: str, budget_bytes: int) -> Plan:
    """Return a historical planner's plan; raises BudgetError where it does not keep the budget."""
    began = now()
    plan = policies.policy(planner)(graph, budget_bytes=budget_bytes)
    if plan.peak_bytes > budget_bytes:
        raise BudgetError(
            f"{planner} needs {show_bytes(plan.peak_bytes)}; the budget is "
            f"{show_bytes(budget_bytes)}. Raise the budget, or take the planner 'auto'.",
            peak_bytes=plan.peak_bytes,
            budget_bytes=budget_bytes,
            op=graph.ops[peak(graph).op].name,
            plan=plan,
        )
    return replace(plan, budget_bytes=budget_bytes, solve_s=now() - began)


class _Auto:
    """The `auto` planner: a search of our own, and the plans of all others as candidates."""

    def __init__(
        self,
        graph: Graph,
        actions: Sequence[str],
        time_limit_s: float,
        progress: Progress | None,
    ) -> None:
        self.graph, self.limit_s = graph, time_limit_s
        self.search = Search(
            gaps(graph, lean=True),
            offload="offload" in actions,
            recompute="recompute" in actions,
            deadline=now() + time_limit_s,
            progress=progress,
        )
        self.plans: list[Plan] = []
        self.floor = smallest_peak(self.search.shape, offload=self.search.offload)

    def front(self, budgets: Sequence[int]) -> list[Plan]:
        spent: dict[int, float] = {}
        for budget in sorted(set(budgets), reverse=True):
            began = now()
            self.look(budget)
            spent[budget] = now() - began
        return [self.answer(budget, spent[budget]) for budget in budgets]

    def look(self, budget_bytes: int) -> None:
        """Fill the archives with what can be found for a budget."""
        if self.exactly(budget_bytes) and not self.search.offload:
            return
        if self.floor[0] > budget_bytes:
            return
        self.from_policies(budget_bytes)
        self.search.deadline = now() + self.limit_s
        within = [plan for plan in self.plans if plan.peak_bytes <= budget_bytes]
        best = min(within, key=lambda plan: plan.seconds, default=None)
        if best is not None and best.planner != "exact" and self.search.recompute:
            self.search.from_plan(best, budget_bytes)
        self.search.solve(budget_bytes)

    @property
    def small(self) -> bool:
        """Whether the graph is small enough to be solved exactly."""
        return len(self.graph.ops) <= EXACT_OPS and self.search.recompute

    def exactly(self, budget_bytes: int) -> bool:
        """Put an optimal plan without transfers, if there is one, among the plans.

        False where the graph is too large for that.
        """
        if not self.small:
            return False
        try:
            found = solve_exactly(self.graph, budget_bytes)
        except MemoryError:
            return False
        if found is None:
            return True
        self.plans.append(
            Plan(
                steps=found.steps,
                decisions=decisions_of(self.graph, found.steps),
                planner="exact",
                peak_bytes=found.peak_bytes,
                seconds=found.seconds,
                lower_bound_seconds=found.seconds if not self.search.offload else 0.0,
                baseline_peak_bytes=peak(self.graph).bytes,
                baseline_seconds=baseline_seconds(self.graph),
                seconds_sources=self.graph.seconds_sources,
                graph_name=self.graph.name,
            )
        )
        return True

    def from_policies(self, budget_bytes: int) -> None:
        """Take the plans of the historical planners in, those that keep the budget.

        All of them, whatever time they take, so that `auto` is not slower than any of them on any
        machine: seconds for a thousand ops, a minute for twenty thousand.
        """
        own = self.search.best(budget_bytes)
        if own is not None and own.origin == "keep":
            return
        for name in policies.names():
            try:
                plan = policies.policy(name)(self.graph, budget_bytes=budget_bytes)
            except BudgetError:
                continue
            if self.allowed(plan):
                self.plans.append(plan)

    def allowed(self, plan: Plan) -> bool:
        """Whether a plan does only what this search may do."""
        offloads = any(step.action == "offload" for step in plan.steps)
        reruns = sum(step.action == "run" for step in plan.steps) > len(self.graph.ops)
        return (self.search.offload or not offloads) and (self.search.recompute or not reruns)

    def answer(self, budget_bytes: int, solve_s: float) -> Plan:
        """Return the fastest of all that keeps a budget, with its bound."""
        bound = self.search.bound(budget_bytes)
        found = self.search.best(budget_bytes)
        others = [plan for plan in self.plans if plan.peak_bytes <= budget_bytes]
        other = min(others, key=lambda plan: (plan.seconds, plan.peak_bytes), default=None)
        bound = max([bound, *(it.lower_bound_seconds for it in others if it.planner == "exact")])
        if found is None and other is None:
            raise self.refusal(budget_bytes)
        if found is None or (
            other is not None
            and (other.seconds, other.peak_bytes) < (found.seconds, found.peak_bytes)
        ):
            assert other is not None
            plan = replace(
                other,
                planner=f"auto ({other.planner})",
                budget_bytes=budget_bytes,
                lower_bound_seconds=min(bound, other.seconds),
                solve_s=solve_s,
            )
        else:
            plan = self.drafted(found, budget_bytes)
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

    def drafted(self, found: Candidate, budget_bytes: int | None) -> Plan:
        return draft(self.search.shape, found.schedule, planner="auto", budget_bytes=budget_bytes)

    def refusal(self, budget_bytes: int) -> BudgetError:
        """Return the error that says what the smallest peak is, as far as it can be found."""
        self.search.deadline = now() + self.limit_s
        self.shrink(max(budget_bytes, self.floor[0]))
        smallest: Candidate = min(self.search.archive, key=lambda item: item.peak_bytes)
        run = int(smallest.schedule.live_bytes.argmax())
        size, name = smallest.peak_bytes, self.graph.ops[smallest.schedule.ops[run]].name
        least = min(self.plans, key=lambda plan: plan.peak_bytes, default=None)
        if least is not None and least.peak_bytes < size:
            size, name = least.peak_bytes, self.graph.ops[self.floor[1]].name
        else:
            least = self.drafted(smallest, None)
        floor, op = self.floor[0], self.graph.ops[self.floor[1]].name
        return BudgetError(
            f"the smallest peak found is {show_bytes(size)}, set by {name!r}; no plan can go below "
            f"{show_bytes(floor)}, what {op!r} works on. The budget is {show_bytes(budget_bytes)}. "
            "Raise the budget, or make the batch smaller.",
            peak_bytes=size,
            budget_bytes=budget_bytes,
            op=name,
            plan=least,
        )

    def shrink(self, low: int) -> None:
        """Fill the archives with plans of ever smaller peaks: a descent, then bisection."""
        if self.search.recompute and not self.small:
            self.search.descend(low)
        high = min(item.peak_bytes for item in self.search.archive)
        for _ in range(20 if self.small else 3):
            if self.search.late or high <= low:
                return
            middle = (low + high) // 2
            done = self.exactly(middle) and not self.search.offload
            if not done and not any(plan.peak_bytes <= middle for plan in self.plans):
                self.search.solve(middle)
            peaks = [item.peak_bytes for item in self.search.archive]
            peaks += [plan.peak_bytes for plan in self.plans]
            fits = min(peaks) <= middle
            low, high = (low, middle) if fits else (middle + 1, high)
