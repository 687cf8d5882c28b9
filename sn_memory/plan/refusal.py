"""The error that no plan keeps a budget: where the peak is, and which budget can be had."""

from __future__ import annotations

from ..base.sizes import show_bytes
from ..graph.graph import Graph, module_of
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
    nearest_bytes: int | None = None,
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
    nearest_bytes
        The nearest budget, where it is not the plan's peak but what is reserved for that.
    """
    nearest = plan.peak_bytes if nearest_bytes is None else nearest_bytes
    error = BudgetError(
        "",
        peak_bytes=nearest,
        budget_bytes=budget_bytes,
        op=op,
        plan=plan,
        floor_bytes=floor_bytes,
        module=module_of(graph, op),
        percent=percent_kept(nearest, plan.baseline_peak_bytes),
    )
    share = f', or "{error.percent}%" of the unplanned peak' if error.percent else ""
    scratch = graph.ops[graph.op_index[op]].workspaces if op in graph.op_index else ()
    if scratch:
        least = min(it.bytes for it in scratch)
        text += f"; {op!r} takes {show_bytes(least)} of scratch beside its tensors"
    if budget_bytes < graph.base_bytes:
        text += (
            f"; parameters, inputs and what else is there whatever the plan take "
            f"{show_bytes(graph.base_bytes)} alone"
        )
    error.args = (
        f"{text}. The {budget_line(budget_bytes, nearest)}. The nearest that can be had is "
        f"{nearest} bytes{share}, with the plan that this error carries. Raise the budget, "
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
