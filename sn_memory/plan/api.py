"""plan_graph: the fastest plan that can be found whose true peak keeps a budget in bytes.

Planners in use bound something else: torch's budget caps the saved bytes as a knapsack, and its
peak is not even monotone in it; SuperNeurons always goes to the smallest memory. Here each plan is
scored by the true peak, rebuilds and workspaces included, and comes with a lower bound on the
seconds of any plan, so that the gap says how much is left to gain. `docs/decisions/0012-planner.md`
tells how.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

from ..base.clock import counting, now, stage
from ..base.errors import PlanError
from ..base.progress import Wanted, speaking
from ..base.sizes import parse_bytes
from ..graph.graph import Graph
from ..graph.liveness import unplanned_bytes
from . import policies
from .auto import Auto
from .plan import Plan
from .refusal import over_budget

TECHNIQUES = ("keep", "recompute", "offload")


def plan_graph(
    graph: Graph,
    budget: float | str,
    *,
    planner: str = "auto",
    techniques: Sequence[str] = TECHNIQUES,
    time_limit_s: float = 60.0,
    deterministic: bool = False,
    progress: Wanted = False,
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
        `auto`, or the name of a planner of the literature (`sn_memory.plan.policies.names()`).
    techniques
        What `auto` may do: `keep` always, `recompute`, and `offload` (where the device states
        transfer speeds).
    time_limit_s
        After this many seconds on the wall `auto` answers with the best it has, to a tenth of
        them: all its stages share them. A search that ends by itself is the same on any machine;
        one that is cut depends on the machine and its load. A named planner takes what it takes.
    deterministic
        Count work in place of seconds: `time_limit_s` is then so many times 20 million units, of
        which an op carried out on paper is one. The same graph gets the same plan on a slow machine
        and on a fast one, whatever the load, with the same versions of this package and of SciPy.
        `solve_s` of the plan is counted as well.
    progress
        True writes to standard error how far it is: a bar on a terminal, else lines. None does so
        on a terminal only. A function takes a `Progress` at each attempt. False is silent.
    historical
        Whether `auto` begins from the plan of `sqrt_n`.

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
        historical=historical,
    )[0]


def plan_front(
    graph: Graph,
    budgets: Sequence[float | str],
    *,
    planner: str = "auto",
    techniques: Sequence[str] = TECHNIQUES,
    time_limit_s: float = 60.0,
    deterministic: bool = False,
    progress: Wanted = False,
    historical: bool = True,
) -> list[Plan]:
    """Plan a graph for several budgets; the plans are monotone in the budget, in time and in peak.

    Parameters are those of `plan_graph`; `time_limit_s` is for each budget.
    """
    check_techniques(techniques)
    if planner != "auto" and planner not in policies.names():
        raise PlanError(f"got planner {planner!r}, expected auto, {', '.join(policies.names())}.")
    if not time_limit_s > 0:
        raise PlanError(f"got time_limit_s {time_limit_s!r}, expected a number above 0.")
    whole = unplanned_bytes(graph)
    sizes = [parse_bytes(budget, whole=whole) for budget in budgets]
    spoken = nullcontext() if progress is False else speaking(progress)
    with stage() as left_s, counting(deterministic), spoken:
        if not deterministic:
            # Inside a longer piece of work no more than is left of its seconds.
            time_limit_s = min(time_limit_s, left_s)
        if planner != "auto":
            return [_named(graph, planner, size) for size in sizes]
        return Auto(graph, techniques, time_limit_s, historical=historical).front(sizes)


def check_techniques(techniques: Sequence[str]) -> None:
    """Raise PlanError for a technique that no plan has."""
    for technique in techniques:
        if technique == "compress":
            raise PlanError(
                "got technique 'compress': plans keep, recompute and offload whole storages. To "
                "keep what is saved for the backward pass in few bits, call "
                "`sn_memory.torch.compress_activations(model, bits=4)` instead of planning (for "
                "Keras that of `sn_memory.tensorflow`)."
            )
        if technique not in TECHNIQUES:
            raise PlanError(
                f"got technique {technique!r}, expected some of {', '.join(TECHNIQUES)}."
            )


def _named(graph: Graph, planner: str, budget_bytes: int) -> Plan:
    """Return a named planner's plan; raises BudgetError where it does not keep the budget."""
    began = now()
    plan = policies.policy(planner)(graph, budget_bytes=budget_bytes)
    if plan.peak_bytes > budget_bytes:
        raise over_budget(
            graph, plan, budget_bytes, what=planner, instead="take the planner 'auto'"
        )
    return replace(plan, budget_bytes=budget_bytes, solve_s=now() - began)
