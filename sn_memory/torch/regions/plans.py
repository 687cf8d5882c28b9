"""The plans that a region may follow, from one that keeps everything to the leanest.

A plan of a whole graph is judged by its peak. For a region, the bytes kept while other regions run
matter as much, but the search has no such limit: so its graph gets one more op between the passes,
with enough scratch that a plan within the budget keeps no more than intended. That op is removed
from the plan afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ...check import carry_out
from ...graph.graph import Graph
from ...graph.liveness import baseline_seconds, unplanned_bytes
from ...graph.records import LOSS, Op, Workspace
from ...plan.plan import BudgetError, Plan
from ...plan.policies import policy
from ..trace.record import View
from ..trace.trace import Trace

BETWEEN = "between the passes"
# Targets of the search: kept bytes, as shares of those kept if nothing runs again; and lower peaks,
# as shares of the peak then, each with shares of kept bytes. Halves, as the next plan then frees at
# most twice what is needed, and combinations of several regions fill the gaps.
_KEPT = (0.75, 0.5, 0.25, 0.125, 0.0)
_LOWER = ((0.75, (0.5, 0.0)), (0.5, (0.25, 0.0)), (0.25, (0.0,)))

Searched = Callable[[Graph, int], Plan]


@dataclass(frozen=True, eq=False)
class RegionPlan:
    """A plan of a region, and what it adds to the step around it.

    plan : for the region's graph
    kept_bytes : held from its forward to its backward pass, without its inputs
    forward_bytes, backward_bytes : peak of either pass, without parameters and inputs, including
        what is kept
    extra_s : seconds in addition to those of the region if nothing runs again
    """

    plan: Plan
    kept_bytes: int
    forward_bytes: int
    backward_bytes: int
    extra_s: float

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.kept_bytes, self.forward_bytes, self.backward_bytes


def as_part(traced: Trace) -> Trace:
    """Return the trace of a region, whose outputs are held by their readers, not by the region.

    It may free them once they are returned, and recompute them for the backward pass.
    """
    captured, graph = traced.captured, traced.graph
    inputs = captured.recording.roles
    returned = {view.storage for view in captured.outputs if isinstance(view, View)} - set(inputs)
    outputs = {name for name, number in traced.named.storage_of.items() if number in returned}
    # An output that shares its storage with a gradient stays.
    outputs -= {storage.name for storage in graph.storages if storage.role == "gradient"}
    storages = tuple(
        replace(storage, keep=False, held=False) if storage.name in outputs else storage
        for storage in graph.storages
    )
    ops = tuple(replace(op, once=False) if outputs & {*op.outputs} else op for op in graph.ops)
    part = replace(graph, storages=storages, ops=ops)
    return replace(traced, named=replace(traced.named, graph=part))


def frontier(graph: Graph, searched: Searched) -> list[RegionPlan]:
    """Return plans for a region's graph, the fastest first; none is dominated by another.

    searched : plans a graph within a number of bytes, or raises BudgetError
    """
    keeps = keeping_all(graph)
    return useful([keeps, *_searched(graph, searched, keeps)])


def keeping_all(graph: Graph) -> RegionPlan:
    """Return the plan in which nothing runs again."""
    return priced(graph, policy("liveness")(graph, budget_bytes=None))


def _searched(graph: Graph, searched: Searched, keeps: RegionPlan) -> Iterator[RegionPlan]:
    if not keeps.kept_bytes:
        return
    base, unplanned = graph.base_bytes, unplanned_bytes(graph)
    # With the gradients of its outputs, which the caller computes.
    sizes = _sizes(graph)
    held_anyway = base + sum(sizes[name] for name in {*graph.ops[graph.op_index[LOSS]].outputs})
    refused_at = keeps.kept_bytes + 1
    for part, shares in ((1.0, _KEPT), *_LOWER):
        room = base + int(part * (unplanned - base))
        for share in shares:
            kept_bytes = int(share * keeps.kept_bytes)
            scratch = room - held_anyway - kept_bytes
            # Without scratch the op changes nothing; and a refused target fails in less room, too.
            if scratch <= 0 or kept_bytes >= refused_at:
                continue
            try:
                plan = searched(with_scratch_between(graph, scratch), room)
            except BudgetError as error:
                if error.plan is None:
                    continue
                refused_at, plan = kept_bytes, error.plan
            yield priced(graph, without_between(plan))


def with_scratch_between(graph: Graph, scratch_bytes: int) -> Graph:
    """Return a graph with an op between its passes that takes this much scratch."""
    at = graph.op_index[LOSS] + 1
    between = Op(
        BETWEEN,
        kind=LOSS,
        phase="backward",
        seconds=0.0,
        effect=True,
        fixed=True,
        workspaces=(Workspace(scratch_bytes),),
    )
    return replace(graph, ops=(*graph.ops[:at], between, *graph.ops[at:]))


def without_between(plan: Plan) -> Plan:
    """Return a plan without that op."""
    actions = tuple(step for step in plan.actions if (step.kind, step.target) != ("run", BETWEEN))
    return replace(plan, actions=actions)


def priced(graph: Graph, plan: Plan) -> RegionPlan:
    """Return a plan with its bytes and seconds on a graph; PlanError if it is for another one."""
    carried = carry_out(graph, plan)
    live, base = carried.live_bytes, graph.base_bytes
    loss = plan.actions.index(("run", LOSS, 0))
    plan = replace(plan, peak_bytes=carried.peak_bytes, seconds=carried.seconds)
    return RegionPlan(
        plan,
        _kept_bytes(graph, plan),
        max(0, int(live[:loss].max(initial=base)) - base),
        max(0, int(live[loss:].max(initial=base)) - base),
        max(0.0, carried.seconds - baseline_seconds(graph)),
    )


def _kept_bytes(graph: Graph, plan: Plan) -> int:
    """Bytes that a plan holds between the passes, without gradients of the outputs."""
    loss = plan.actions.index(("run", LOSS, 0))
    size, outputs = _sizes(graph), {op.name: op.outputs for op in graph.ops}
    held: set[str] = set()
    for step, (kind, target, _) in enumerate(plan.actions):
        if kind == "run" and step > loss:
            break
        if kind == "run" and step < loss:
            held.update(outputs[target])
        elif kind == "free":
            held.discard(target)
    return sum(size[name] for name in held - _resident(graph))


def _sizes(graph: Graph) -> dict[str, int]:
    names = (storage.name for storage in graph.storages)
    return dict(zip(names, graph.arrays.bytes.tolist(), strict=True))


def _resident(graph: Graph) -> set[str]:
    return {storage.name for storage in graph.storages if storage.resident}


def inner_bytes(graph: Graph) -> int:
    """Return the bytes that a graph keeps between its passes, without inputs and outputs."""
    kept = _kept_bytes(graph, policy("liveness")(graph, budget_bytes=None))
    outputs = {*graph.ops[graph.op_index[LOSS]].inputs}
    backward = (op for op in graph.ops if op.phase == "backward" and op.name != LOSS)
    read = {name for op in backward for name in op.inputs}
    sizes = _sizes(graph)
    return kept - sum(sizes[name] for name in outputs & read - _resident(graph))


def useful(plans: list[RegionPlan]) -> list[RegionPlan]:
    """Return the plans that no other dominates, the fastest first."""
    best: list[RegionPlan] = []
    for plan in sorted(plans, key=lambda plan: (plan.extra_s, *plan.sizes)):
        if not any(
            all(size <= limit for size, limit in zip(other.sizes, plan.sizes, strict=True))
            for other in best
        ):
            best.append(plan)
    return best
