"""How a model is planned for an input: everything `plan` was told, kept for inputs to come.

The planned model keeps it, so that it can be planned once more when an input of another kind comes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from ..base.errors import PlanWarning
from ..base.host import return_freed
from ..base.progress import report_progress
from ..base.sizes import parse_bytes, show_bytes
from ..check.replay import carry_out, check_plan
from ..graph.graph import Graph
from ..graph.liveness import unplanned_bytes
from ..graph.records import Device
from ..plan.copies import WIDE, spread_copies
from ..plan.plan import BudgetError, Plan
from ..run.at_once import SEARCH_S, smallest, within
from ..run.measured_choice import MeasuredPlan
from ..run.reserved import within_reserved
from .compile.backend import CompiledStep, Settings
from .eager.replay import Replay
from .eager.trial import Trial, after_first, layouts_seen, runs_on, tried
from .errors import (
    SampleError,
    SetsStateError,
    TraceError,
    fails_on_sample,
)
from .large_logits import logits_note
from .model.guards import GuardCache, every_read, recorded_reads
from .model.modes import outside_saved_tensors_hooks
from .model.signature import Arguments, InputSignature, changeable
from .model.step import device_of, restore_rng_state, wanted_bytes
from .model.wrapping import check_memory
from .modules.backend import ModuleStep
from .on_paper import EstimateOnlyStep
from .target.capacity import planned_settings
from .target.gpu import gpu_of
from .trace.fake_step import fake_step
from .trace.op_seconds import Measure
from .trace.record import Layouts
from .trace.trace import Given, Trace, resident_storages, trace

# Gradients of parameters that are there when a step begins.
EARLIER = "gradients of earlier micro-batches"
# Searches of one step with its state, about as many as bisecting its parameters takes.
STATE_SEARCHES = 8
# Part by which what a budget's percent are of may be another than the plain step, without a word.
_APART = 0.005


class Step(Protocol):
    """What carries the forward pass of a planned model out, for one kind of input."""

    @property
    def plan(self) -> Plan | MeasuredPlan:
        """What was decided."""

    @property
    def trace(self) -> Trace | None:
        """The graph it was decided on; None where there is none."""

    @property
    def known(self) -> list[torch.Tensor]:
        """Tensors it holds between steps, beside the model's; they count as live."""

    @property
    def ignored(self) -> list[torch.Tensor]:
        """Tensors it holds that lie on the host."""

    @property
    def resident_bytes(self) -> int:
        """What is resident and no part of the step: the optimizer's state."""

    def run(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward pass; the rest of the plan happens in the backward pass."""


class StateOnHost(Protocol):
    """All of the state of a model, and how a step with it is planned; see state/model_state.py."""

    @property
    def places(self) -> Mapping[str, str]:
        """Per parameter, where it lies: `device`, `state` or `host`."""

    def replay(
        self,
        model: torch.nn.Module,
        traced: Trace,
        budget: float | str,
        planner: Callable[[Graph, int], Plan],
        *,
        measured: bool,
    ) -> Replay:
        """Return what carries a traced step out, its updates included."""

    def brought(self) -> AbstractContextManager[Any]:
        """Let ops inside find on the device what rests on the host."""

    def with_inputs(self, given: Arguments) -> Arguments:
        """Return arguments with their tensors of the host on the device that the model works on."""

    def dry_run(
        self,
        replay: Replay,
        model: torch.nn.Module,
        given: Arguments,
        planned_with: Callable[[Layouts], Replay],
    ) -> Replay:
        """Return a step that runs on a sample as traced."""


@dataclass(frozen=True)
class PlanningResult:
    """A step that was planned.

    Parameters
    ----------
    step
        What carries it out.
    backend
        By which back end.
    trial
        What its trial found.
    laid_out_otherwise
        Whether kernels laid results out otherwise than traced, so that it was traced again.
    first
        What runs in its place where no gradients are there, if it was planned for some.
    after_first
        Whether it was traced as it is after a first forward pass.
    """

    step: Step
    backend: str
    trial: Trial
    laid_out_otherwise: bool = False
    first: Step | None = None
    after_first: bool = False


@dataclass(frozen=True)
class PlanOptions:
    """How to plan a model for an input; the parameters are those of `plan`.

    `share` is the budget as it was asked for, if that was a percentage. `plan_graph` is the one of
    `sn_memory`, handed in: what carries plans out need not know how they are found.
    """

    budget: float | str
    planner: str | Plan
    techniques: tuple[str, ...]
    backend: str
    profile: bool
    device: Device | str | None
    optimizer: Any
    time_limit_s: float
    overlap: bool
    workspaces: bool | Measure
    trial: bool
    plan_graph: Callable[..., Plan]
    accumulate: bool = False
    deterministic: bool = False
    share: float | str = ""
    from_sqrt_n: bool = True
    was_compiled: bool = False
    state: StateOnHost | None = None
    update: str = "step"
    # Whether the step is traced as it is after a first forward pass, which sets what it keeps.
    after_first: bool = False
    # Where the backward pass begins, as in `trace`, if steps have shown it.
    ends: tuple[bool, ...] = ()

    def at_once(self, budget_bytes: int, device: Device | None) -> PlanOptions:
        """Return how to plan while training: a short search, no op timed, no trial.

        device : the speeds that the plans before were made with
        """
        return replace(
            self,
            budget=budget_bytes,
            planner="auto" if isinstance(self.planner, Plan) else self.planner,
            profile=False,
            device=device,
            time_limit_s=SEARCH_S,
            workspaces=False,
            trial=False,
            from_sqrt_n=False,
        )

    def made(self, model: torch.nn.Module, given: Arguments) -> PlanningResult:
        """Plan the plain model for an input; as `plan` tells."""
        if self.backend == "auto" and self.was_compiled:
            return self.made_compiled(model, given)
        name = "graph" if self.backend == "auto" else self.backend
        backends: dict[str, Callable[..., Step]] = {
            "graph": self.by_graph,
            "compile": self.by_compiler,
            "modules": self.by_modules,
        }
        try:
            with restore_rng_state():
                return self.in_trial(backends[name](model, given), name, model, given)
        except (BudgetError, SampleError, ValueError, torch.OutOfMemoryError):
            raise
        except Exception as failure:
            error: Exception = failure
            if isinstance(error, SetsStateError) and name == "graph" and self.may_run_first:
                try:
                    return self.made_after_first(model, given)
                except (BudgetError, SampleError, torch.OutOfMemoryError):
                    raise
                except TraceError as second:
                    # Where it sets the same in each step, that is the reason, as at first.
                    error = failure if isinstance(second, SetsStateError) else second
            # Modules are chosen by what was measured.
            if self.backend != "auto" or self.deterministic or self.state:
                if error is failure:
                    raise
                raise error from failure
            kind_of_error = "" if isinstance(error, TraceError) else f"{type(error).__name__}: "
            why = f"it cannot be traced: {kind_of_error}{error}"
        name = type(model).__name__
        try:
            step = self.by_modules(model, given)
        except BudgetError as error:
            error.args = (f"{error} {name} is planned by modules because {why}",)
            raise
        except (TraceError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if "allocate memory" in str(error):  # the CPU's allocator has no class for it
                raise
            # Most of all a sample that the model does not take.
            raise fails_on_sample(name, *given, error) from error
        warnings.warn(
            f"{name} is planned by modules, which saves less than a plan of its ops, because {why}",
            PlanWarning,
            stacklevel=3,
        )
        return self.in_trial(step, "modules", model, given)

    @property
    def may_run_first(self) -> bool:
        """Whether a first forward pass may set what it keeps: a trial compares then."""
        return self.trial and self.state is None and not self.after_first

    def made_after_first(self, model: torch.nn.Module, given: Arguments) -> PlanningResult:
        """Plan by graph what steps do after the first, which sets what it keeps.

        Classes of transformers write into their configuration then, or install hooks. The trial
        says whether the first step computes the same.
        """
        later = replace(self, after_first=True)
        with restore_rng_state():
            made = later.in_trial(later.by_graph(model, given), "graph", model, given)
        if not made.trial.compared:
            raise TraceError(
                "the forward pass sets attributes in its first run, and no trial could compare "
                f"that run with a plan of the others ({made.trial.remark}). Run one step first."
            )
        return replace(made, after_first=True)

    def made_compiled(self, model: torch.nn.Module, given: Arguments) -> PlanningResult:
        """Plan a model that was compiled: compiled, or as any other, with the reason."""
        try:
            with restore_rng_state():
                return self.in_trial(self.by_compiler(model, given), "compile", model, given)
        except (BudgetError, TraceError) as error:
            warnings.warn(
                f"{type(model).__name__} was compiled and is planned without torch.compile, which "
                f"is slower, because there is no plan of its compiled step: {error}",
                PlanWarning,
                stacklevel=4,
            )
        return replace(self, was_compiled=False).made(model, given)

    def like(self, step: Step, model: torch.nn.Module, given: Arguments) -> Step:
        """Plan by the back end of a step that was tried; what its trial saw holds for this too."""
        if isinstance(step, Replay):
            seen = step.trace.layouts or {}
            return self.replay(model, given, seen, self.planned_trace, self.profile)
        if isinstance(step, CompiledStep):
            return self.by_compiler(model, given)
        return self.by_modules(model, given)

    def by_graph(
        self,
        model: torch.nn.Module,
        given: Arguments,
        layouts: Layouts | None = None,
        planned: Callable[[Trace], Plan] | None = None,
    ) -> Step:
        """Return a step that replays the recorded calls."""
        unseen = changeable(*given)
        if unseen:
            raise TraceError(
                f"an argument is a {', '.join(unseen)}: what it holds could change from step to "
                "step, and a replay would not see it. Pass the tensors and numbers in it."
            )
        if isinstance(self.device, str) and gpu_of(self.device, device_of(model)) is not None:
            traced = trace(
                model,
                Given(*given),
                device=self.device,
                optimizer=self.optimizer,
                overlap=self.overlap,
                accumulate=self.accumulate,
            )
            return EstimateOnlyStep(traced, (planned or self.planned_trace)(traced), self.device)
        return self.replay(model, given, layouts or {}, planned or self.planned_trace, self.profile)

    def by_compiler(
        self,
        model: torch.nn.Module,
        given: Arguments,
        known: tuple[tuple[float, str], ...] = (),
    ) -> CompiledStep:
        """Return a step that torch.compile made; `known`: what kept the budget for other inputs."""
        check_memory(model, given, "compiling a model runs parts of it")
        # A plan that was carried over is not kept for later processes.
        key = repr((self.techniques, self.time_limit_s, self.profile, self.deterministic))
        settings = Settings(
            self.budget,
            timed=self.profile and not self.deterministic,
            recompute="recompute" in self.techniques,
            resident_bytes=sum(it.bytes for it in resident_storages(model, self.optimizer)),
            # All that are new come at the end, when the graph returns, beside those.
            earlier_bytes=wanted_bytes(model) if self.accumulate else 0,
            known=known,
            key=None if known else key,
        )
        with outside_saved_tensors_hooks():
            try:
                return CompiledStep(model, *given, settings)
            except TraceError:
                if self.trial:
                    # Where the model itself fails on the sample, that is what to say.
                    runs_on(model, given)
                raise

    def by_modules(self, model: torch.nn.Module, given: Arguments) -> ModuleStep:
        """Return a step in which modules run again."""
        check_memory(model, given, "planning by modules runs the model")
        held = sum(it.bytes for it in resident_storages(model, self.optimizer))
        step = ModuleStep(
            model, *given, self.budget, resident_bytes=held, accumulate=self.accumulate
        )
        if step.plan.courses > 1:
            warnings.warn(
                f"what {type(model).__name__} runs depends on random numbers. The budget holds for "
                f"the largest of {step.plan.courses} steps that were tried; a step that is rarer "
                "may hold more. Leave room for it.",
                PlanWarning,
                stacklevel=4,
            )
        return step

    def planned(self, graph: Graph, budget: float | str | None = None) -> Plan:
        """Return a plan of a graph, within this budget or another."""
        budget = self.budget if budget is None else budget
        if graph.allocator != "torch":
            return self.searched(graph, budget)
        allowed = parse_bytes(budget, whole=unplanned_bytes(graph))

        def search(live_bytes: int, seconds: float | None) -> Plan:
            if seconds is None:
                return self.searched(graph, live_bytes)
            return replace(self, time_limit_s=seconds, from_sqrt_n=False).searched(
                graph, live_bytes
            )

        return within_reserved(graph, allowed, search, planned_settings())

    def searched(self, graph: Graph, budget: float | str) -> Plan:
        """Return a plan of a graph whose live bytes keep a budget."""
        if isinstance(self.planner, Plan):
            return within(graph, self.planner, budget)
        made = self.plan_graph(
            graph,
            budget,
            planner=self.planner,
            techniques=self.techniques,
            time_limit_s=self.time_limit_s,
            deterministic=self.deterministic,
            from_sqrt_n=self.from_sqrt_n,
        )
        if made.decided("offload"):
            room = parse_bytes(budget, whole=unplanned_bytes(graph))
            actions = spread_copies(graph, made.actions, room, times=WIDE)
            found = carry_out(graph, replace(made, actions=actions))
            made = replace(
                made, actions=actions, peak_bytes=found.peak_bytes, seconds=found.seconds
            )
        check_plan(graph, made)
        return made

    def planned_trace(self, traced: Trace) -> Plan:
        """Return a plan of what was traced."""
        try:
            made = self.planned(traced.graph)
        except BudgetError as error:
            if error.plan is not None:
                error.args = (" ".join((str(error), *logits_note(traced.graph, error.plan))),)
            raise
        notes = (*made.notes, *traced.notes, *logits_note(traced.graph, made))
        return replace(made, notes=notes)

    def planned_state(self, graph: Graph, budget_bytes: int) -> Plan:
        """Return a plan of a step with its updates; one of several searches."""
        searched = replace(self, time_limit_s=self.time_limit_s / STATE_SEARCHES)
        return searched.planned(graph, budget_bytes)

    def replay(
        self,
        model: torch.nn.Module,
        given: Arguments,
        layouts: Layouts,
        planned: Callable[[Trace], Plan],
        profile: bool,
    ) -> Replay:
        """Return a step that replays what is traced with such layouts, planned so."""
        report_progress("trace", 0, 1)

        def traced_now() -> Trace:
            return trace(
                model,
                Given(*given),
                profile=profile,
                device=self.device,
                optimizer=None if self.state else self.optimizer,
                workspaces=self.workspaces,
                overlap=self.overlap,
                layouts=layouts,
                accumulate=self.accumulate,
                update=self.update,
                # Not while training, when seconds count and the budget is in bytes.
                unplanned=self.from_sqrt_n,
                ends=self.ends,
            )

        if self.after_first:
            with after_first(model, given):
                traced = traced_now()
        else:
            traced = traced_now()
        if self.state is not None:
            # Speeds that were handed in, or that stand for any machine, are not measured.
            measured = profile and self.device is None
            return self.state.replay(
                model, traced, self.budget, self.planned_state, measured=measured
            )
        made = planned(traced)
        return Replay(traced, made)

    def in_trial(
        self, step: Step, backend: str, model: torch.nn.Module, given: Arguments
    ) -> PlanningResult:
        """Try a step on its input; trace and plan it again where kernels lay out otherwise."""
        if device_of(model).type == "cpu" and not isinstance(step, EstimateOnlyStep):
            return_freed(step.plan.peak_bytes)
        if self.trial and self.state is not None and isinstance(step, Replay):
            report_progress("trial", 0, 1)
            before = step
            step = self.state.dry_run(
                step,
                model,
                given,
                lambda seen: self.replay(model, given, seen, self.planned_trace, self.profile),
            )
            remark = "with its state on the host the planned step ran alone"
            return PlanningResult(
                step, backend, Trial(False, {}, remark=remark), step is not before
            )
        if self.trial and isinstance(step, CompiledStep):
            runs_on(model, given)
        if not self.trial or isinstance(step, CompiledStep | EstimateOnlyStep):
            remark = "no trial was asked for, or compiled, or planned for another device"
            return PlanningResult(step, backend, Trial(False, {}, remark=remark))

        def found() -> Trial:
            report_progress("trial", 0, 1)
            need = step.plan.baseline_peak_bytes
            # Beside an optimizer's state and earlier gradients the step itself is not all of it.
            counted = self.profile and self.optimizer is None and not self.accumulate
            return tried(step, model, given, plain_bytes=need, counted=counted)

        result = found()
        otherwise = bool(result.layouts)
        if otherwise:
            seen = layouts_seen(
                result.layouts,
                model,
                given,
                lambda known: self.replay(model, given, known, smallest_of_trace, False),
            )
            step = self.replay(model, given, seen, self.planned_trace, self.profile)
            result = found()
        if result.failure or result.layouts:
            reason = result.failure or f"kernels lay out otherwise {next(iter(result.layouts))}"
            raise TraceError(f"a step with the plan, tried on the sample, failed: {reason}")
        note = _apart(result.plain_peak_bytes, step.plan.baseline_peak_bytes)
        if note and isinstance(step, Replay):
            step.plan = replace(step.plan, notes=(*step.plan.notes, note))
        return PlanningResult(step, backend, result, otherwise)


def _apart(plain_bytes: int, baseline_bytes: int) -> str:
    """Say by how much the plain step is another than the trace's; nothing for less than 0.5 %."""
    part = baseline_bytes / plain_bytes - 1 if plain_bytes else 0.0
    if abs(part) <= _APART:
        return ""
    return (
        f"the plain step had {show_bytes(plain_bytes)} of the allocator, and needs "
        f"{show_bytes(baseline_bytes)} ({100 * part:+.1f} %) as traced: percent are of the latter"
    )


def guarded(
    guards: GuardCache, kind: InputSignature, model: torch.nn.Module, given: Arguments, step: Step
) -> InputSignature:
    """Return the kind that a step is for, by what its forward pass read as it was planned."""
    captured = step.trace and step.trace.captured
    reads = step.reads if isinstance(step, ModuleStep) else captured and captured.reads
    if not reads:
        # torch.compile follows a forward without running it: a step without values is recorded.
        with recorded_reads(model) as seen:
            try:
                fake_step(model, given)
                reads = seen()
            except Exception:  # noqa: BLE001 - it is compiled all the same: everything counts
                reads = every_read(model)
    return guards.add(kind, model, given, reads, captured.looked if captured else ())


def smallest_of_trace(traced: Trace) -> Plan:
    """Return such a plan of what was traced."""
    return smallest(traced.graph)
