"""The error that no plan keeps a budget: where the peak is, and which budget can be had."""

from __future__ import annotations

from ..base.sizes import show_bytes
from ..graph.graph import Graph
from ..graph.places import module_of
from .buffers import peak_action
from .plan import BudgetError, Plan, budget_line, percent_kept


def placed(graph: Graph, op: str) -> str:
    """Return an op's name for a message, with the path of its module."""
    module = module_of(graph, op)
    return f"{op!r} (module {module!r})" if module else repr(op)


def refused(
    text: str,
    graph: Graph,
    plan: Plan,
    budget_bytes: int,
    *,
    op: str,
    floor_bytes: int | None = None,
    instead: str = "make the batch smaller",
) -> BudgetError:
    """Return the error.

    Parameters
    ----------
    text
        What was found: the peak, and the op that sets it.
    plan
        The plan of the smallest peak that was found: the nearest budget that can be had is its.
    op
        The op at that peak.
    floor_bytes
        See BudgetError.
    instead
        What else than raising the budget may be done.
    """
    error = BudgetError(
        "",
        peak_bytes=plan.peak_bytes,
        budget_bytes=budget_bytes,
        op=op,
        plan=plan,
        floor_bytes=floor_bytes,
        module=module_of(graph, op),
        percent=percent_kept(plan.peak_bytes, plan.baseline_peak_bytes),
    )
    share = f', or "{error.percent}%" of the unplanned peak' if error.percent else ""
    if budget_bytes < graph.base_bytes:
        text += (
            f"; parameters, inputs and what else is there whatever the plan take "
            f"{show_bytes(graph.base_bytes)} alone"
        )
    error.args = (
        f"{text}. The {budget_line(budget_bytes, plan.peak_bytes)}. The nearest that can be had is "
        f"{plan.peak_bytes} bytes{share}, with the plan that this error carries. Raise the budget, "
        f"or {instead}.",
    )
    return error


def over_budget(
    graph: Graph, plan: Plan, budget_bytes: int, *, what: str, instead: str
) -> BudgetError:
    """Return the error for a plan that needs more than the budget.

    what, instead : what needs it, and what else one may do
    """
    first = peak_action(graph, plan)
    later = (action.target for action in plan.actions[first:] if action.kind == "run")
    op = next(later, graph.ops[-1].name)
    text = f"{what} needs {show_bytes(plan.peak_bytes)}, set by {placed(graph, op)}"
    return refused(text, graph, plan, budget_bytes, op=op, instead=instead)
