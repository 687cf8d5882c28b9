"""plan_graph: find the fastest plan whose true peak keeps a budget in bytes.

Other planners bound something else: torch's budget caps the saved bytes by a knapsack, and its peak
is not even monotone in it; SuperNeurons always minimizes memory. Here each plan is scored by the
true peak, including rebuilds and workspaces, and comes with a lower bound on the seconds of any
plan, so that the gap says how much could still be gained. See `docs/decisions/0075`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

from ..base.errors import PlanError
from ..base.progress import ProgressOption, counting, now, progress_output, report_progress, stage
from ..base.sizes import parse_bytes, show_bytes
from ..graph.graph import Graph
from ..graph.liveness import holes, unplanned_bytes
from . import policies
from .bound import smallest_peak
from .buffers import over_budget, peak_op, placed, refused
from .plan import TECHNIQUES, BudgetError, Plan, check_techniques
from .policies import origins, sqrt_n_choices
from .search.candidates import Candidate
from .search.search import LARGE, Search
from .simulate import emit, simulate

log = logging.getLogger(__name__)

# The share of the time limit that is reserved for a refusal while no plan keeps the budget: the
# error states the smallest peak, which takes another search.
TO_REFUSE = 0.2


def plan_graph(
    graph: Graph,
    budget: float | str,
    *,
    planner: str = "auto",
    techniques: Sequence[str] = TECHNIQUES,
    time_limit_s: float = 60.0,
    deterministic: bool = False,
    progress: ProgressOption = False,
    from_sqrt_n: bool = True,
) -> Plan:
    """Plan a graph within a budget.

    Parameters
    ----------
    graph
        The graph to plan.
    budget
        The most live bytes, including resident storages: bytes, text such as "6GiB", or "60%" of
        the graph's own peak.
    planner
        `auto`, or the name of a planner from the literature (`sn_memory.plan.policies.names()`).
    techniques
        What `auto` may do: `keep` always, `recompute`, and `offload` (if the device states transfer
        speeds).
    time_limit_s
        After this many wall-clock seconds, to within a tenth, `auto` returns the best plan it has;
        all its stages share them. A search that ends by itself is the same on any machine; one that
        is cut off depends on the machine and its load. A named planner has no limit.
    deterministic
        Count work instead of seconds: `time_limit_s` is then multiplied by 20 million units, of
        which one is one simulated op. The same graph gets the same plan on slow and on fast
        machines, whatever their load, with the same versions of this package and of SciPy.
        `solve_s` of the plan is counted likewise.
    progress
        True writes progress to standard error: one line on a terminal, else several. None does so
        only on a terminal. A function is called with a `Progress` at each attempt. False is silent.
    from_sqrt_n
        Whether `auto` begins from the plan of `sqrt_n`.

    Returns
    -------
    Plan
        Accepted by `check_plan`, within the budget.

    Raises
    ------
    BudgetError
        If no plan was found that keeps the budget. It carries the smallest peak found, its op and
        plan, and a lower bound for any plan; its message says whether the search ended by itself,
        independently of the machine, or by `time_limit_s`.
    PlanError
        For an unknown planner or technique.
    """
    return plan_front(
        graph,
        [budget],
        planner=planner,
        techniques=techniques,
        time_limit_s=time_limit_s,
        deterministic=deterministic,
        progress=progress,
        from_sqrt_n=from_sqrt_n,
    )[0]


def plan_front(
    graph: Graph,
    budgets: Sequence[float | str],
    *,
    planner: str = "auto",
    techniques: Sequence[str] = TECHNIQUES,
    time_limit_s: float = 60.0,
    deterministic: bool = False,
    progress: ProgressOption = False,
    from_sqrt_n: bool = True,
) -> list[Plan]:
    """Plan a graph for several budgets; the plans are monotone in the budget, in time and in peak.

    Parameters are those of `plan_graph`; `time_limit_s` is for each budget.
    """
    check_techniques(techniques)
    if planner != "auto" and planner not in policies.names():
        raise PlanError(f"got planner {planner!r}, expected auto, {', '.join(policies.names())}.")
    if not time_limit_s > 0:
        raise PlanError(f"got time_limit_s {time_limit_s!r}, expected a number above 0.")
    unplanned = unplanned_bytes(graph)
    sizes = [parse_bytes(budget, whole=unplanned) for budget in budgets]
    spoken = nullcontext() if progress is False else progress_output(progress)
    with stage() as left_s, counting(deterministic), spoken:
        if not deterministic:
            # Inside a larger task, use no more than what is left of its seconds.
            time_limit_s = min(time_limit_s, left_s)
        if planner != "auto":
            return [_named(graph, planner, size) for size in sizes]
        return Auto(graph, techniques, time_limit_s, from_sqrt_n=from_sqrt_n).front(sizes)


def _named(graph: Graph, planner: str, budget_bytes: int) -> Plan:
    """Return a named planner's plan; raise BudgetError if it does not keep the budget."""
    began = now()
    plan = policies.policy(planner)(graph, budget_bytes=budget_bytes)
    if plan.peak_bytes > budget_bytes:
        raise over_budget(
            graph, plan, budget_bytes, what=planner, instead="take the planner 'auto'"
        )
    return replace(plan, budget_bytes=budget_bytes, solve_s=now() - began)


class Auto:
    """The planner `auto` for one graph and any number of budgets.

    Our own search, which begins from the choice of `sqrt_n`. The search and a possible refusal
    share one deadline: see `look`.

    graph : the graph to plan
    techniques : `keep`, `recompute`, `offload`, or some of them
    time_limit_s : seconds of `progress.now` per budget; for the first one, from here on
    from_sqrt_n : whether the search begins from the plan of `sqrt_n`
    """

    def __init__(
        self,
        graph: Graph,
        techniques: Sequence[str],
        time_limit_s: float,
        *,
        from_sqrt_n: bool = True,
    ) -> None:
        self.graph, self.limit_s, self.from_sqrt_n = graph, time_limit_s, from_sqrt_n
        # When the first budget's time began, None after it; when the current budget's time ends.
        self.began: float | None = now()
        self.end = self.began + time_limit_s
        self.search = Search(
            holes(graph, lean=True),
            offload="offload" in techniques,
            recompute="recompute" in techniques,
            deadline=self.end,
        )
        self.floor = smallest_peak(self.search.shape, offload=self.search.offload)

    def front(self, budgets: Sequence[int]) -> list[Plan]:
        """Return a plan for each budget; the largest is searched first, as its plans serve all."""
        spent: dict[int, float] = {}
        for budget in sorted(set(budgets), reverse=True):
            began = now()
            self.look(budget)
            spent[budget] = now() - began
        # Only in the end: a plan found for a smaller budget may be the fastest for a larger one.
        return [self.answer(budget, spent[budget]) for budget in budgets]

    def look(self, budget_bytes: int) -> None:
        """Fill the archive with candidates for a budget."""
        # The first budget's time includes the holes and the floor, computed in `__init__`.
        began = now() if self.began is None else self.began
        self.began, self.end = None, began + self.limit_s
        self.search.began = began
        # Below the floor a search could only fail; `answer` refuses.
        if self.floor[0] > budget_bytes:
            return
        start = self.sqrt_n(budget_bytes)
        known = self.search.archive.best(budget_bytes) is not None
        self.search.deadline = self.end - (0 if known else self.limit_s * TO_REFUSE)
        self.search.end = self.end
        # On a large graph, the search finds more in the time that improving this plan would take.
        if start is not None and len(self.graph.ops) <= LARGE:
            self.search.from_sqrt_n(start, budget_bytes)
        self.search.solve(budget_bytes)

    def sqrt_n(self, budget_bytes: int) -> Sequence[int] | None:
        """Add the choice of `sqrt_n`, and return it if it keeps the budget.

        Done whatever time is left, so that a budget that it keeps is not refused for lack of time:
        it takes a tenth of a second for three thousand ops, one second for twenty thousand.
        """
        own = self.search.archive.best(budget_bytes)
        # If everything can be kept, no plan is faster.
        kept = own is not None and own.origin == "keep"
        if kept or not self.from_sqrt_n or not self.search.recompute:
            return None
        report_progress("search", now() - self.search.began, self.limit_s, "sqrt_n")
        for choice in sqrt_n_choices(origins(self.search.shape)):
            schedule = simulate(self.search.shape, choice)
            if schedule.peak_bytes <= budget_bytes:
                self.search.archive.add(choice, schedule, "sqrt_n")
                return choice
        return None

    def answer(self, budget_bytes: int, solve_s: float) -> Plan:
        """Return the fastest plan that keeps a budget, with its bound."""
        plan = self.fastest(budget_bytes)
        if plan is None:
            # Stating the smallest peak takes another search, which may find a plan.
            error = self.refusal(budget_bytes)
            plan = self.fastest(budget_bytes)
            if plan is None:
                raise error
        bound = min(self.search.bound(budget_bytes), plan.seconds)
        plan = replace(plan, lower_bound_seconds=bound, solve_s=solve_s)
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
        """Return the fastest plan found so far that keeps a budget, without its bound."""
        candidate = self.search.archive.best(budget_bytes)
        return None if candidate is None else self.emitted(candidate, budget_bytes)

    def emitted(self, candidate: Candidate, budget_bytes: int | None) -> Plan:
        return emit(
            self.search.shape, candidate.schedule, planner="auto", budget_bytes=budget_bytes
        )

    def refusal(self, budget_bytes: int) -> BudgetError:
        """Return the error that states the smallest peak, as far as it can be found."""
        # For later budgets of a front no time is left for this.
        end = max(self.end, now() + self.limit_s * TO_REFUSE)
        floor, op = self.floor[0], self.graph.ops[self.floor[1]].name
        # The stated peak must be kept when requested as a budget: so this search depends neither on
        # the refused budget, nor on the candidates found for it.
        search = Search(
            self.search.shape, offload=self.search.offload, recompute=self.search.recompute,
            deadline=end,
        )  # fmt: skip
        search.end = end
        search.least(floor)
        ended = not search.late
        if self.search.recompute and self.from_sqrt_n:
            for choice in sqrt_n_choices(origins(self.search.shape)):
                search.archive.add(choice, simulate(search.shape, choice), "sqrt_n")
        smallest = search.archive.smallest()
        # It may keep this budget after all, or a later one of the front.
        self.search.archive.items.append(smallest)
        least = self.emitted(search.archive.equipped(smallest, smallest.peak_bytes), None)
        size, name = least.peak_bytes, peak_op(self.graph, least)
        where = placed(self.graph, name)
        if size <= floor:
            text = f"no plan has a peak below {show_bytes(size)}, set by {where}"
        else:
            how = "found" if ended else f"found in {self.limit_s:g} s, when the search was stopped,"
            text = (
                f"the smallest peak {how} is {show_bytes(size)}, set by {where}; no plan can go "
                f"below {show_bytes(floor)}, what {op!r} works on"
            )
        return refused(text, self.graph, least, budget_bytes, op=name, floor_bytes=floor)
