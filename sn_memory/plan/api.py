"""plan_graph: the fastest plan that can be found whose true peak keeps a budget in bytes.

Planners in use bound something else: torch's budget caps the saved bytes as a knapsack, and its
peak is not even monotone in it; SuperNeurons always goes to the smallest memory. Here each plan is
scored by the true peak, rebuilds and workspaces included, and comes with a lower bound on the
seconds of any plan, so that the gap says how much is left to gain. `docs/decisions/0012-planner.md`
tells how.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ..base.clock import now
from ..base.errors import PlanError
from ..base.sizes import parse_bytes, show_bytes
from ..graph.graph import Graph
from ..graph.liveness import peak
from . import policies
from .auto import Auto
from .compress import Compressing
from .plan import BudgetError, Plan
from .search.search import Progress

TECHNIQUES = ("keep", "recompute", "offload")
ALL_TECHNIQUES = (*TECHNIQUES, "compress")


def plan_graph(
    graph: Graph,
    budget: int | str,
    *,
    planner: str = "auto",
    techniques: Sequence[str] = TECHNIQUES,
    time_limit_s: float = 60.0,
    progress: Progress | None = None,
    historical: bool = True,
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
        `auto`, or the name of a historical planner (`sn_memory.plan.policies.names()`).
    techniques
        What `auto` may do: `keep` always, `recompute`, `offload` (where the device states transfer
        speeds), and, not by default as it loses bits, `compress` (where storages state a compressed
        form). With it planning takes up to twice as long, and is never slower than without.
    time_limit_s
        After this many seconds of work `auto` answers with the best it has. The CPU time of the
        calling thread counts, so plans do not depend on what else the machine does.
    progress
        Called with a line of text and the best seconds so far (or None) after each attempt.
    historical
        Whether `auto` also asks every planner of the literature, whatever time that takes: seconds
        for a thousand ops. Without, `time_limit_s` holds for larger graphs as well.

    Returns
    -------
    Plan
        Accepted by `check_plan`, within the budget.

    Raises
    ------
    BudgetError
        If no plan was found that keeps the budget. It carries the smallest peak found with its op
        and plan, and the floor that no plan can go below; its message says whether the search
        ended by itself, which does not depend on the machine, or by `time_limit_s`.
    PlanError
        For an unknown planner or technique, and `compress` for a graph without compressed forms.
    """
    return plan_front(
        graph,
        [budget],
        planner=planner,
        techniques=techniques,
        time_limit_s=time_limit_s,
        progress=progress,
        historical=historical,
    )[0]


def plan_front(
    graph: Graph,
    budgets: Sequence[int | str],
    *,
    planner: str = "auto",
    techniques: Sequence[str] = TECHNIQUES,
    time_limit_s: float = 60.0,
    progress: Progress | None = None,
    historical: bool = True,
) -> list[Plan]:
    """Plan a graph for several budgets; the plans are monotone in the budget, in time and in peak.

    Parameters are those of `plan_graph`; `time_limit_s` is for each budget.
    """
    for technique in techniques:
        if technique not in ALL_TECHNIQUES:
            raise PlanError(
                f"got technique {technique!r}, expected some of {', '.join(ALL_TECHNIQUES)}."
            )
    if planner != "auto" and planner not in policies.names():
        raise PlanError(f"got planner {planner!r}, expected auto, {', '.join(policies.names())}.")
    if not time_limit_s > 0:
        raise PlanError(f"got time_limit_s {time_limit_s!r}, expected a number above 0.")
    whole = peak(graph).bytes
    sizes = [parse_bytes(budget, whole=whole) for budget in budgets]
    if planner != "auto":
        return [_named(graph, planner, size) for size in sizes]
    auto = partial(Auto, historical=historical)
    if "compress" in techniques:
        return Compressing(auto, graph, techniques, time_limit_s, progress).front(sizes)
    return auto(graph, techniques, time_limit_s, progress).front(sizes)


def _named(graph: Graph, planner: str, budget_bytes: int) -> Plan:
    """Return a historical planner's plan; raises BudgetError where it does not keep the budget."""
    began = now()
    plan = policies.policy(planner)(graph, budget_bytes=budget_bytes)
    if plan.peak_bytes > budget_bytes:
        raise over_budget(
            graph, plan, budget_bytes, what=planner, instead="take the planner 'auto'"
        )
    return replace(plan, budget_bytes=budget_bytes, solve_s=now() - began)


def over_budget(
    graph: Graph, plan: Plan, budget_bytes: int, *, what: str, instead: str
) -> BudgetError:
    """Return the error for a plan that needs more than the budget.

    what, instead : what needs it, and what else one may do
    """
    return BudgetError(
        f"{what} needs {show_bytes(plan.peak_bytes)}; the budget is "
        f"{show_bytes(budget_bytes)}. Raise the budget, or {instead}.",
        peak_bytes=plan.peak_bytes,
        budget_bytes=budget_bytes,
        op=graph.ops[peak(graph).op].name,
        plan=plan,
    )
