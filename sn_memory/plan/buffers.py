"""The memory of a plan: the buffers with their lifetimes in actions, and live bytes.

`pack` takes the buffers. Live bytes of actions are only summed here, and in `check.py`, which
shares nothing with the planner. The error for a budget that no plan keeps is here as well: it says
where the peak is, and which budget can be kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..base.errors import PlanError
from ..base.sizes import show_bytes
from ..graph.graph import Graph, module_of
from .plan import Action, BudgetError, Plan, budget_line, percent_kept


@dataclass(frozen=True)
class PlanBuffers:
    """Allocations of a plan, in the order in which they are made; resident storages first.

    names : the storage of each; `NAME (second copy)` for an output that a rerun makes again while
        the first copy is live, and `workspace of OP`.
    buffers : (lower, upper, size), half-open in numbers of actions
    """

    names: tuple[str, ...]
    buffers: tuple[tuple[int, int, int], ...]


def plan_buffers(graph: Graph, plan: Plan) -> PlanBuffers:
    """Return the allocations of a plan that `check_plan` accepts.

    A storage that is freed and made again has one buffer for each stay, so its address may change.
    The largest sum of live sizes is the plan's peak.

    Raises PlanError for an action that frees a storage that is not allocated.

    Examples
    --------
    >>> from sn_memory import Graph, Op, Storage, pack
    >>> from sn_memory.plan import policies
    >>> graph = Graph(
    ...     [Storage("x", 8, "input"), Storage("h", 4), Storage("y", 2, keep=True)],
    ...     [Op("f", ("x",), ("h",), seconds=1.0), Op("g", ("h",), ("y",), seconds=1.0)],
    ... )
    >>> plan = policies.policy("liveness")(graph, budget_bytes=None)
    >>> found = plan_buffers(graph, plan)
    >>> found.names, pack(found.buffers, capacity=plan.peak_bytes)
    (('x', 'h', 'y'), [0, 8, 12])
    """
    rows = _rows(graph, plan.actions)
    return PlanBuffers(tuple(row[0] for row in rows), tuple(row[1:] for row in rows))


def live_bytes(graph: Graph, actions: Sequence[Action]) -> list[int]:
    """Return the bytes live during each action; during a free, those before it."""
    change = [0] * (len(actions) + 2)
    for _, lower, upper, size in _rows(graph, actions):
        change[lower] += size
        change[upper] -= size
    live = list(accumulate(change))[: len(actions)]
    sizes, names = graph.arrays.bytes, graph.storage_index
    for at, action in enumerate(actions):
        # The buffer ends where its free begins, but its bytes are live until the free has run.
        if action.kind == "free":
            live[at] += int(sizes[names[action.target]])
    return live


def peak_action(graph: Graph, plan: Plan) -> int:
    """Return the first action at which a plan has the most live bytes; 0 for no actions."""
    live = live_bytes(graph, plan.actions)
    return live.index(max(live)) if live else 0


def _rows(graph: Graph, actions: Sequence[Action]) -> list[tuple[str, int, int, int]]:
    """Return (name, lower, upper, size) of all allocations."""
    arrays, sizes = graph.arrays, graph.arrays.bytes.tolist()
    names = [storage.name for storage in graph.storages]
    rows: list[tuple[str, int, int, int]] = []
    # Per allocated storage its row, as if it stayed to the end.
    present: dict[int, int] = {}

    def take(storage: int, at: int) -> None:
        present[storage] = len(rows)
        rows.append((names[storage], at, max(len(actions), 1), sizes[storage]))

    # First, as callers rely on to distinguish them from what the step allocates.
    for storage, resident in enumerate(arrays.resident.tolist()):
        if resident:
            take(storage, 0)
    for at, (kind, target, way) in enumerate(actions):
        if kind == "run":
            op = graph.op_index[target]
            for storage in arrays.outputs[op]:
                # A rerun writes all outputs of the op, also those that are still live.
                if storage in present:
                    rows.append((f"{names[storage]} (second copy)", at, at + 1, sizes[storage]))
                else:
                    take(storage, at)
            if space := arrays.workspace_bytes[op][way]:
                rows.append((f"workspace of {target}", at, at + 1, space))
            continue
        # An offload changes nothing: its bytes stay live until the free.
        storage = graph.storage_index[target]
        if kind == "prefetch":
            take(storage, at)
        elif kind == "free":
            if storage not in present:
                raise PlanError(
                    f"action {at}: frees {names[storage]!r}, which is not there; check the plan "
                    "first."
                )
            name, lower, _, size = rows[present[storage]]
            rows[present.pop(storage)] = name, lower, at, size
    return rows


def peak_op(graph: Graph, plan: Plan) -> str:
    """Return the op that runs at the peak of a plan, or the next one after it."""
    first = peak_action(graph, plan)
    later = (action.target for action in plan.actions[first:] if action.kind == "run")
    return next(later, graph.ops[-1].name)


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
    """Return the error that no plan keeps a budget, with the budget that can be kept.

    text : the result: the peak, and the op that sets it.
    plan : the plan with the smallest peak found
    op : the op at that peak
    floor_bytes : see BudgetError
    instead : what to do other than raise the budget
    nearest_bytes : the smallest budget, if that is the plan's reserved bytes and not its peak
    """
    nearest = plan.peak_bytes if nearest_bytes is None else nearest_bytes
    percent = percent_kept(nearest, plan.baseline_peak_bytes)
    share = f', or "{percent}%" of the unplanned peak' if percent else ""
    # The peak may be mostly scratch, which no plan reduces.
    scratch = graph.ops[graph.op_index[op]].workspaces if op in graph.op_index else ()
    if scratch:
        least = min(workspace.bytes for workspace in scratch)
        text += f"; {op!r} takes {show_bytes(least)} of scratch besides its tensors"
    # Not even a plan that keeps nothing would fit.
    if budget_bytes < graph.base_bytes:
        text += (
            f"; parameters, inputs and everything else that any plan holds take "
            f"{show_bytes(graph.base_bytes)} alone"
        )
    return BudgetError(
        f"{text}. The {budget_line(budget_bytes, nearest)}. The smallest budget that can be kept "
        f"is {nearest} bytes{share}, with the plan in the attribute `plan` of this error. Raise "
        f"the budget, or {instead}.",
        peak_bytes=nearest, budget_bytes=budget_bytes, op=op, plan=plan, floor_bytes=floor_bytes,
        module=module_of(graph, op), percent=percent,
    )  # fmt: skip


def over_budget(
    graph: Graph, plan: Plan, budget_bytes: int, *, what: str, instead: str
) -> BudgetError:
    """Return the error for a plan that needs more than the budget.

    what, instead : what needs more, and what to do other than raise the budget
    """
    op = peak_op(graph, plan)
    text = f"{what} needs {show_bytes(plan.peak_bytes)}, set by {placed(graph, op)}"
    return refused(text, graph, plan, budget_bytes, op=op, instead=instead)
