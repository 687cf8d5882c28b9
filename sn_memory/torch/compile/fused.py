"""Plans of a step that Inductor compiles, made on its fused kernels and promised on its own order.

The graph that is planned has Inductor's kernels of torch's own partition as ops. Fusion changes
with the partition, so each plan is lowered, without compiling a kernel, and run on paper: that peak
is the promise. Where it is not the one the plan was made for, the plan is made anew with so much
more or less.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import fx

from ...base.clock import counts_work, stage
from ...base.progress import say
from ...base.sizes import parse_bytes, show_bytes
from ...graph.graph import Graph
from ...graph.liveness import peak
from ...graph.records import Device, Storage
from ...plan.buffers import peak_action
from ...plan.plan import BudgetError, Decision, Plan, percent_kept
from ...plan.policies import policy
from ..errors import ReplayError
from .dry_step import DryStep, dry_step
from .floor import floor_bytes
from .kernel_graph import KernelCost, KernelGraph, kernel_graph
from .lowering import Lowered, lowered
from .partition_fused import Fused
from .program import Program, ground_of, rebuilt, results_of

# Plans that are lowered for one budget, of torch's own partition and of one with torch's budget.
_TRIES = 5
_TRIES_OF_OTHERS = 2
# Shares of torch's own budget whose partitions are lowered. What a step holds does not always grow
# with the share: U-Net holds 9.25 MiB at 0.7 and 9.69 at 0.5, Llama 18.2 at 0.7 and 18.8 at 0.5,
# and those of 0.7 take the fewest seconds of all. So shares are spread before any is halved in. The
# first keeps some budget soonest, should seconds run out.
_GRID = (0.5, 0.7, 0.3, 0.9, 0.1)
# How often what lies between the largest share that keeps the bytes and the next is halved in; with
# another solver it is done near to where that ended.
_HALVED = 3
_NEAR_SHARE = 1 / 8
# These are tried where nothing else keeps the bytes.
_LAST_SHARES = (0.8, 0.6, 0.4, 0.2, 0.15)
# What is made again breaks and joins loops of kernels, which is not in the seconds that are
# reckoned: GPT-2's took about four times as much longer (benchmarks/compiled_peaks.py).
_UNSEEN = 4
# A plan that takes no more than so much longer is cheap enough to look no further.
_CHEAP = 0.005
# So many plans are worth timing: the best of each kind, and where those are fewer, what is reckoned
# to take at most so many times as long as the fastest.
_COMPARED = 3
_NEAR_S = 1.1
# With fewer seconds left, what keeps the budget is taken as it is.
_LEAST_S = 5.0
# What a lowered step holds does not grow evenly with what its plan was made for: kernels of several
# blocks are fused, and wait for the last of them. Where nothing else keeps the budget, plans are
# tried that hold so many times the smallest.
_ABOVE = (1.02, 1.04, 1.06)
# So near below the budget a plan is near enough.
_NEAR = 0.01


# Setting (the share and the solver), forward and backward graph.
Partition = tuple[tuple[float, str] | None, fx.GraphModule, fx.GraphModule]


@dataclass(frozen=True)
class Found:
    """A plan that was lowered: as a graph of its own kernels.

    `program` is None for torch's own partition; `start_s` are the seconds of that partition of
    torch's that the plan started from.
    """

    program: Program | None
    step: DryStep
    graph: Graph
    plan: Plan
    start_s: float


@dataclass(frozen=True)
class Compilation:
    """torch's own partition of a model, and what Inductor was told to compile it with.

    Parameters
    ----------
    forward, backward
        The two graphs.
    inputs
        Fake tensors for the forward graph; and for the backward graph those that are not handed
        over: gradients of outputs.
    told
        Per graph, what the inner compiler was told beside.
    outputs
        How many results of the forward graph go to the caller.
    static
        Which placeholders are parameters and buffers.
    lowered
        The forward graph, where it is lowered already.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    inputs: tuple[list[Any], list[Any]]
    told: tuple[dict[str, Any], dict[str, Any]]
    outputs: int
    static: frozenset[int]
    lowered: Lowered | None = None

    def lower(
        self, forward: fx.GraphModule, backward: fx.GraphModule
    ) -> tuple[tuple[Lowered, Lowered], DryStep]:
        """Lower a partition of the same step and run it on paper."""
        context = torch._guards.TracingContext.get()
        before = context.fw_metadata
        saved = results_of(forward)[self.outputs :]
        try:
            context.fw_metadata = _with_donated(before, forward, backward, saved)
            first = self.lowered if forward is self.forward else None
            if first is None:
                first = lowered(forward, self.inputs[0], self.told[0])
            given = [
                _laid_out(node.meta["val"], strides)
                for node, strides in zip(saved, first.strides[self.outputs :], strict=True)
            ]
            second = lowered(backward, [*given, *self.inputs[1]], self.told[1])
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


def _made_again(
    plain: Compilation, other: Compilation, setting: tuple[float, str]
) -> list[Decision]:
    """Return a decision for each value that torch's budget has made again."""
    share, solver = setting
    reason = f"torch's partition with activation_memory_budget={share:g}, solver {solver}"
    handed = {it.name for it in results_of(other.forward)[other.outputs :]}
    return [
        Decision(it.name, "recompute", reason, it.meta["val"].nbytes)
        for it in results_of(plain.forward)[plain.outputs :]
        if it.name not in handed and isinstance(it.meta.get("val"), torch.Tensor)
    ]


@dataclass(frozen=True)
class Costs:
    """Speeds, and what each kernel of a step costs."""

    device: Device
    of: Callable[[DryStep], list[KernelCost]]


@dataclass(frozen=True)
class Ground:
    """A partition of torch's that plans start from.

    Parameters
    ----------
    setting
        The budget and the solver it was made with; None: without one.
    compilation
        The partition.
    fused
        Its kernels and values.
    own
        The partition as it is, lowered.
    values
        The graph that is planned.
    """

    setting: tuple[float, str] | None
    compilation: Compilation
    fused: Fused
    own: Found
    values: KernelGraph


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
    other
        Returns torch's partition with a budget of its own, a share, and one of `solvers`: the
        setting, the two graphs. None: there is none.
    solvers
        Those of torch that are asked, the best first.
    """

    def __init__(
        self,
        compilation: Compilation,
        costs: Costs,
        extra: Sequence[Storage] = (),
        *,
        name: str = "",
        allocator: str = "none",
        other: Callable[[float, str], Partition] | None = None,
        solvers: Sequence[str] = (),
    ) -> None:
        self.compilation, self.costs, self.other = compilation, costs, other
        self.solvers = tuple(solvers)
        self.extra, self.name, self.allocator = tuple(extra), name, allocator
        self.ground = self.grounded(None, compilation)
        self.plain = replace(self.ground.own, program=None)
        # What was lowered is kept for other budgets.
        key = ground_of(compilation.forward, compilation.backward)
        self._by_key = {key: self.ground}
        self._by_setting: dict[tuple[float, str], str] = {}

    def grounded(self, setting: tuple[float, str] | None, compilation: Compilation) -> Ground:
        """Lower a partition of torch's."""
        forward, backward = compilation.forward, compilation.backward
        with stage():
            lowered, step = compilation.lower(forward, backward)
        fused = Fused(forward, backward, lowered, step, compilation.outputs)
        as_it_is = Program(ground_of(forward, backward), setting, (), (), ())
        values = self.graph(compilation, step, by_value=True, once=fused.once())
        own = self.found(compilation, as_it_is, step)
        if setting is not None:
            again = _made_again(self.compilation, compilation, setting)
            own = replace(own, plan=replace(own.plan, decisions=(*own.plan.decisions, *again)))
        return Ground(setting, compilation, fused, own, values)

    def graph(
        self,
        compilation: Compilation,
        step: DryStep,
        *,
        by_value: bool,
        once: frozenset[int] = frozenset(),
    ) -> KernelGraph:
        """Return the graph of a step's kernels."""
        nodes = compilation.forward.graph.find_nodes(op="placeholder")
        static = compilation.static
        return kernel_graph(
            step,
            name=self.name,
            inputs=[it.name for it in nodes],
            roles=["parameter" if at in static else "input" for at in range(len(nodes))],
            device=self.costs.device,
            costs=self.costs.of(step),
            once=once,
            extra=self.extra,
            allocator=self.allocator,
            by_value=by_value,
        )

    def found(self, compilation: Compilation, program: Program, step: DryStep) -> Found:
        """Return what was lowered, in terms of the kernels it has."""
        graph = self.graph(compilation, step, by_value=False).graph
        plan = policy("liveness")(graph, budget_bytes=None)
        return Found(program, step, graph, plan, plan.seconds)

    def lower(self, ground: Ground, made: Plan) -> Found:
        """Return a plan of the kernels of a partition, lowered."""
        compilation = ground.compilation
        program = ground.fused.written(ground.values, made, ground.setting)
        forward, backward = rebuilt(
            compilation.forward, compilation.backward, compilation.outputs, program
        )
        with stage():
            _, step = compilation.lower(forward, backward)
        found = self.found(compilation, program, step)
        again = (*made.decisions, *ground.own.plan.decisions)
        plan = replace(
            found.plan,
            planner=made.planner,
            decisions=(
                *found.plan.decisions,
                *(it for it in again if it.technique.startswith("recompute")),
            ),
            solve_s=made.solve_s,
        )
        return replace(found, plan=plan, start_s=ground.own.plan.seconds)

    def plans(self, budget: float | str, make: Callable[[Graph, int], Plan]) -> list[Found]:
        """Return plans that keep a budget when they are lowered, the one reckoned fastest first.

        There are several where it is worth while to time them: the fastest of torch's partitions,
        the fastest plan made from one, and the next.

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
        ground = self.plain.plan
        allowed = parse_bytes(budget, whole=ground.peak_bytes)
        if ground.peak_bytes <= allowed:
            return [replace(self.plain, plan=replace(ground, budget_bytes=allowed))]
        # Several budgets may give one partition.
        others = list({id(it): it for it in self.grounds(allowed)}.values())
        kept = [it.own for it in others if it.own.plan.peak_bytes <= allowed]
        missed = [it.own for it in others if it.own.plan.peak_bytes > allowed]
        for start, tries in self.starts(others, allowed):
            if kept and self.is_late():
                break
            more, less = self.search(
                start, allowed, make, tries, above=not kept and start is self.ground
            )
            kept += more
            missed += less
            if min((self.cost(it) for it in kept), default=math.inf) <= ground.seconds * (
                1 + _CHEAP
            ):
                break
        if not kept:
            late = [it.own for it in self.passed_by(allowed)]
            kept = [it for it in late if it.plan.peak_bytes <= allowed]
            missed += late
        if not kept:
            raise self.refusal(missed, allowed)
        return [
            replace(
                it,
                plan=replace(
                    it.plan,
                    budget_bytes=allowed,
                    baseline_peak_bytes=ground.peak_bytes,
                    baseline_seconds=ground.seconds,
                    # What bounds the plans of one partition does not bound those of another.
                    lower_bound_seconds=0.0,
                ),
            )
            for it in self.compared(kept)
        ]

    def compared(self, kept: Sequence[Found]) -> list[Found]:
        """Return those that may be the fastest, the one reckoned so first.

        Of torch's own partitions that is the one of the largest budget of each solver, as it runs
        least again: seconds that were reckoned for one partition say little about another. And it
        is the one of the smallest: to read less can be quicker than to run less again. A GPT-2's
        step of 16.0 MiB took 5 % less than one of 17.0, and 2 % less than the plain one. And it is
        one between: of those that keep 17 MiB the quickest holds 14.5, the smallest 11.8.
        """
        kept = sorted(kept, key=lambda it: (self.cost(it), it.plan.peak_bytes))
        # Without lines it is torch's own partition, with the share and solver of its setting.
        settings = {
            at: it.program.setting
            for at, it in enumerate(kept)
            if it.program and it.program.setting and not it.program.lines
        }
        largest: dict[str, int] = {}
        for at, (share, solver) in settings.items():
            if solver not in largest or share > settings[largest[solver]][0]:
                largest[solver] = at
        by_share = sorted(settings, key=lambda at: settings[at][0])
        between = {by_share[0], by_share[len(by_share) // 2]} if by_share else set()
        made = [at for at in range(len(kept)) if at not in settings]
        chosen = {*made[:1], *largest.values(), *between}
        for at in range(len(kept)):
            if len(chosen) < _COMPARED and self.cost(kept[at]) <= _NEAR_S * self.cost(kept[0]):
                chosen.add(at)
        return [kept[at] for at in sorted(chosen)]

    def cost(self, found: Found) -> float:
        """Return the seconds by which plans are compared."""
        return found.start_s + _UNSEEN * (found.plan.seconds - found.start_s)

    def is_late(self) -> bool:
        """Whether what keeps the budget is to be taken as it is."""
        with stage() as left_s:
            return left_s < _LEAST_S and not counts_work()

    def starts(self, others: Sequence[Ground], allowed: int) -> Iterator[tuple[Ground, int]]:
        """Yield the partitions that plans for a budget start from, and how often."""
        yield self.ground, _TRIES
        # Of those that hold too much the one that holds least: it lacks the fewest bytes.
        over = [it for it in others if it.own.plan.peak_bytes > allowed]
        if over:
            yield min(over, key=lambda it: it.own.plan.peak_bytes), _TRIES_OF_OTHERS

    def grounds(self, allowed: int) -> list[Ground]:
        """Return torch's partitions with budgets of its own around the one that holds as much.

        Its budget is a share of saved bytes, and what a step then holds is known when it is
        lowered; so shares are spread, and the best of them halved in.
        """
        if self.other is None or not self.solvers:
            return []
        first, *more = self.solvers
        found: list[Ground] = []
        best = self.spread(first, allowed, found)
        if best:
            higher = min((it for it in _GRID if it > best), default=1.0)
            best = self.halved(first, best, higher, _HALVED, allowed, found)
        for solver in more:
            if not best:
                self.spread(solver, allowed, found)
            elif not self.is_late():
                low, high = max(0.0, best - _NEAR_SHARE), min(1.0, best + _NEAR_SHARE)
                self.halved(solver, low, high, _HALVED, allowed, found)
        return found

    def spread(self, solver: str, allowed: int, found: list[Ground]) -> float:
        """Add partitions of shares all over; return the largest whose step keeps the bytes."""
        best = 0.0
        for share in _GRID:
            if best and self.is_late():
                break
            found.append(self.with_budget(share, solver))
            if found[-1].own.plan.peak_bytes <= allowed:
                best = max(best, share)
        return best

    def passed_by(self, allowed: int) -> list[Ground]:
        """Return torch's partitions with further budgets, until one keeps the bytes."""
        found: list[Ground] = []
        if self.other is None:
            return found
        for share, solver in product(_LAST_SHARES, self.solvers):
            found.append(self.with_budget(share, solver))
            if found[-1].own.plan.peak_bytes <= allowed:
                break
        return found

    def halved(
        self, solver: str, low: float, high: float, tries: int, allowed: int, found: list[Ground]
    ) -> float:
        """Add partitions of a solver; return the largest share found whose step keeps the bytes."""
        for _ in range(tries):
            share = (low + high) / 2
            ground = self.with_budget(share, solver)
            found.append(ground)
            if ground.own.plan.peak_bytes > allowed:
                high = share
            else:
                low = share
                if self.is_late():
                    break
        return low

    def with_budget(self, share: float, solver: str) -> Ground:
        """Return torch's partition with a budget of its own; each is lowered once."""
        assert self.other is not None
        if (share, solver) not in self._by_setting:
            setting, forward, backward = self.other(share, solver)
            key = ground_of(forward, backward)
            if key not in self._by_key:
                say("lower", len(self._by_key), len(self._by_key) + 1)
                other = replace(self.compilation, forward=forward, backward=backward, lowered=None)
                self._by_key[key] = self.grounded(setting, other)
            self._by_setting[share, solver] = key
        return self._by_key[self._by_setting[share, solver]]

    def search(
        self,
        ground: Ground,
        allowed: int,
        make: Callable[[Graph, int], Plan],
        tries: int,
        *,
        above: bool = False,
    ) -> tuple[list[Found], list[Found]]:
        """Return plans that start from a partition: those that keep the budget, and the others.

        above : whether to go on above the smallest plan where none keeps it
        """
        kept: list[Found] = []
        missed: list[Found] = []
        own = ground.own.plan.peak_bytes
        if own <= allowed:
            return kept, missed
        # In the graph of values buffers are not used again, so its peaks are a little larger.
        asked = allowed + max(0, peak(ground.values.graph).bytes - own)
        low, high, smallest = 0, 1 << 62, 0
        for tried in range(tries):
            say("lower", tried, tries)
            try:
                found = self.lower(ground, make(ground.values.graph, asked))
            except BudgetError as error:
                low, smallest = max(low, asked), error.peak_bytes
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
                if -over <= _NEAR * allowed or self.is_late():
                    break
            asked = min(max(asked - over, low + 1), high - 1)
            if asked <= low or asked >= high:
                break
        for number, times in enumerate(_ABOVE if above and smallest and not kept else ()):
            say("lower", tries + number, tries + len(_ABOVE))
            try:
                found = self.lower(ground, make(ground.values.graph, int(times * smallest)))
            except (BudgetError, ReplayError):
                continue
            if found.plan.peak_bytes <= allowed:
                return [found], missed
            missed.append(found)
        return kept, missed

    def refusal(self, missed: list[Found], allowed: int) -> BudgetError:
        """Return the error that no plan was found."""
        nearest = min([*missed, self.plain], key=lambda it: it.plan.peak_bytes)
        ground, found = self.plain.plan.peak_bytes, nearest.plan.peak_bytes
        op = next(
            it.target
            for it in nearest.plan.actions[peak_action(nearest.graph, nearest.plan) :]
            if it.kind == "run"
        )
        percent = percent_kept(found, ground)
        share = f', "{percent}%" of the compiled step without a plan' if percent else ""
        floor, working = self.floor()
        why = f"what {working!r} works on" if working else "what it ends with"
        # It carries no plan: one of fused kernels fits no graph that could be planned again.
        return BudgetError(
            f"the compiled step needs {show_bytes(found)}, set by {op!r}; no plan of it can go "
            f"below {show_bytes(floor)}, {why}. The budget is {show_bytes(allowed)}. The nearest "
            f"that was found is {found} bytes{share}. Raise the budget, make the batch smaller, or "
            "plan with backend='graph', which may also move the order of calls.",
            peak_bytes=found,
            budget_bytes=allowed,
            op=op,
            floor_bytes=floor,
            percent=percent,
        )

    def floor(self) -> tuple[int, str]:
        """Return bytes that no partition goes below, and the node at work then, if there is one."""
        compilation, fused = self.compilation, self.ground.fused
        return floor_bytes(
            compilation.forward,
            compilation.backward,
            compilation.outputs,
            self.plain.graph.base_bytes,
            fused.called(),
        )
