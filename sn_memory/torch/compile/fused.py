"""Plans of a step that Inductor compiles, made on its fused kernels and promised on its own order.

The graph that is planned has Inductor's kernels of torch's own partition as ops. Fusion changes
with the partition, so each plan is lowered, without compiling a kernel, and run on paper: that peak
is the promise. Where it is not the one the plan was made for, the plan is made anew with so much
more or less.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ...base.progress import say
from ...base.sizes import parse_bytes
from ...graph.graph import Graph
from ...graph.liveness import peak
from ...graph.records import Device, Storage
from ...plan.plan import BudgetError, Plan, percent_kept
from ...plan.policies import policy
from ...plan.refusal import over_budget
from ..errors import ReplayError
from .dry_step import DryStep, dry_step
from .kernel_graph import KernelGraph, kernel_graph
from .lowering import Lowered, lowered
from .partition_fused import Fused
from .program import Program, rebuilt, results_of

# Plans that are lowered for one budget.
_TRIES = 6
# So near below the budget a plan is near enough.
_NEAR = 0.01


@dataclass(frozen=True)
class Found:
    """A plan that was lowered: as a graph of its own kernels.

    `program` is None for torch's own partition.
    """

    program: Program | None
    step: DryStep
    graph: Graph
    plan: Plan


@dataclass(frozen=True)
class Compilation:
    """torch's own partition of a model, and what Inductor was told to compile it with.

    Parameters
    ----------
    forward, backward
        The two graphs.
    inputs
        Fake tensors for the forward graph, and for the backward graph.
    told
        Per graph, what the inner compiler was told beside.
    outputs
        How many results of the forward graph go to the caller.
    static
        Which placeholders are parameters and buffers.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    inputs: tuple[list[Any], list[Any]]
    told: tuple[dict[str, Any], dict[str, Any]]
    outputs: int
    static: frozenset[int]

    def lower(
        self, forward: fx.GraphModule, backward: fx.GraphModule
    ) -> tuple[tuple[Lowered, Lowered], DryStep]:
        """Lower a partition of the same step and run it on paper."""
        context = torch._guards.TracingContext.get()
        before = context.fw_metadata
        saved = results_of(forward)[self.outputs :]
        try:
            context.fw_metadata = _with_donated(before, forward, backward, saved)
            first = lowered(forward, self.inputs[0], self.told[0])
            given = [
                _laid_out(node.meta["val"], strides)
                for node, strides in zip(saved, first.strides[self.outputs :], strict=True)
            ]
            own = len(results_of(self.forward)) - self.outputs
            inputs = [*given, *self.inputs[1][own:]]
            second = lowered(backward, inputs, self.told[1])
        finally:
            context.fw_metadata = before
        return (first, second), dry_step(first, second, self.outputs)


def _with_donated(before: Any, forward: Any, backward: Any, saved: Sequence[fx.Node]) -> Any:
    """Return what AOTAutograd knows of a step, for another partition of it."""
    from torch._functorch._aot_autograd.graph_compile import collect_bw_donated_buffer_idxs

    made = copy.copy(before)
    made.num_symints_saved_for_bw = 0
    made.num_tensors_saved_with_no_vc_check = sum(
        bool(it.meta.get("saved_tensor_with_no_vc_check")) for it in saved
    )
    if torch._functorch.config.donated_buffer:
        made.bw_donated_idxs = collect_bw_donated_buffer_idxs(forward, backward, made)
    return made


def _laid_out(value: Any, strides: tuple[int, ...] | None) -> Any:
    if strides is None or not isinstance(value, torch.Tensor) or value.stride() == strides:
        return value
    return value.as_strided(value.size(), strides)


@dataclass(frozen=True)
class Costs:
    """Speeds, and seconds and arithmetic of each kernel of a step."""

    device: Device
    of: Callable[[DryStep], tuple[list[float | None], list[float]]]


class FusedPlanner:
    """Plans a compilation for budgets.

    Parameters
    ----------
    compilation
        torch's own partition.
    costs
        What kernels cost.
    extra
        Resident storages that are no part of the step.
    name
        Of the model.
    """

    def __init__(
        self,
        compilation: Compilation,
        costs: Costs,
        extra: Sequence[Storage] = (),
        *,
        name: str = "",
        allocator: str = "none",
    ) -> None:
        self.compilation, self.costs = compilation, costs
        self.extra, self.name, self.allocator = tuple(extra), name, allocator
        ground, step = compilation.lower(compilation.forward, compilation.backward)
        self.fused = Fused(
            compilation.forward, compilation.backward, ground, step, compilation.outputs
        )
        self.plain = self.found(None, step)
        self.values = self.graph(step, by_value=True, once=self.fused.once())

    def graph(
        self, step: DryStep, *, by_value: bool, once: frozenset[int] = frozenset()
    ) -> KernelGraph:
        """Return the graph of a step's kernels."""
        seconds, flops = self.costs.of(step)
        nodes = self.compilation.forward.graph.find_nodes(op="placeholder")
        static = self.compilation.static
        return kernel_graph(
            step,
            name=self.name,
            inputs=[it.name for it in nodes],
            roles=["parameter" if at in static else "input" for at in range(len(nodes))],
            device=self.costs.device,
            seconds=seconds,
            flops=flops,
            once=once,
            extra=self.extra,
            allocator=self.allocator,
            by_value=by_value,
        )

    def found(self, program: Program | None, step: DryStep, made: Plan | None = None) -> Found:
        """Return a plan that was lowered, in terms of the kernels it has."""
        graph = self.graph(step, by_value=False).graph
        plan = policy("liveness")(graph, budget_bytes=None)
        if made is not None:
            again = [it for it in made.decisions if it.technique.startswith("recompute")]
            ground = self.plain.plan
            plan = replace(
                plan,
                planner=made.planner,
                decisions=(*plan.decisions, *again),
                baseline_peak_bytes=ground.peak_bytes,
                baseline_seconds=ground.seconds,
                lower_bound_seconds=min(made.lower_bound_seconds, plan.seconds),
                solve_s=made.solve_s,
            )
        return Found(program, step, graph, plan)

    def lower(self, made: Plan) -> Found:
        """Return a plan of the kernels of torch's partition, lowered."""
        compilation = self.compilation
        program = self.fused.written(self.values, made)
        forward, backward = rebuilt(
            compilation.forward, compilation.backward, compilation.outputs, program
        )
        _, step = compilation.lower(forward, backward)
        return self.found(program, step, made)

    def plan(self, budget: float | str, make: Callable[[Graph, int], Plan]) -> Found:
        """Return the fastest plan found that keeps a budget when it is lowered.

        Parameters
        ----------
        budget
            The most live bytes of the compiled step.
        make
            Plans a graph for bytes.

        Raises
        ------
        BudgetError
            If none was found.
        """
        ground = self.plain.plan.peak_bytes
        allowed = parse_bytes(budget, whole=ground)
        if ground <= allowed:
            return replace(self.plain, plan=replace(self.plain.plan, budget_bytes=allowed))
        # In the graph of values buffers are not used again, so its peaks are a little larger.
        asked = allowed + max(0, peak(self.values.graph).bytes - ground)
        kept: list[Found] = []
        missed: list[Found] = []
        low, high = 0, 1 << 62
        refused: BudgetError | None = None
        for tried in range(_TRIES):
            say("lower", tried, _TRIES)
            try:
                found = self.lower(make(self.values.graph, asked))
            except BudgetError as error:
                refused, low = error, max(low, asked)
                if kept or error.plan is None or error.peak_bytes >= high:
                    break
                asked = error.peak_bytes
                continue
            except ReplayError:
                high, asked = min(high, asked), asked - max(1, allowed // 50)
                continue
            over = found.plan.peak_bytes - allowed
            (missed if over > 0 else kept).append(found)
            if over > 0:
                high = min(high, asked)
            else:
                low = max(low, asked)
                if -over <= _NEAR * allowed:
                    break
            asked = min(max(asked - over, low + 1), high - 1)
            if asked <= low or asked >= high:
                break
        if not kept:
            raise self.refusal(missed, allowed, refused)
        best = min(kept, key=lambda it: (it.plan.seconds, it.plan.peak_bytes))
        return replace(best, plan=replace(best.plan, budget_bytes=allowed))

    def refusal(
        self, missed: list[Found], allowed: int, refused: BudgetError | None
    ) -> BudgetError:
        """Return the error that no plan was found."""
        nearest = min([*missed, self.plain], key=lambda it: it.plan.peak_bytes)
        error = over_budget(
            nearest.graph,
            replace(nearest.plan, baseline_peak_bytes=self.plain.plan.peak_bytes),
            allowed,
            what="the compiled step",
            instead="plan with backend='graph', which may also move the order of calls",
        )
        # A plan of fused kernels is no plan of the graph that is planned: it cannot be passed in.
        error.plan = None
        error.percent = percent_kept(nearest.plan.peak_bytes, self.plain.plan.peak_bytes)
        if refused is not None:
            error.floor_bytes = None
        return error
