"""Planning a model for one input: the options of `plan`, and the choice of a back end.

The planned model keeps its options, so that it can be planned again for an input of another kind.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from .. import settings
from ..base.errors import PlanError
from ..base.host import return_freed
from ..base.progress import report_progress
from ..base.sizes import parse_bytes, show_bytes
from ..check import carry_out, check_plan
from ..graph.graph import Graph
from ..graph.liveness import unplanned_bytes
from ..graph.records import Device
from ..plan.copies import WIDE, spread_copies
from ..plan.plan import BudgetError, Plan
from ..run.reserved import within_reserved
from ..run.unseen import SEARCH_S, smallest, within
from .eager.replay import Replay
from .eager.trial import Trial, after_first, runs_on, tried, until_laid_out
from .errors import ReplayError, SampleError, SetsStateError, TraceError, first_line, out_of_memory
from .large_logits import logits_note
from .model.guards import GuardCache, every_read, recorded_reads
from .model.modes import outside_saved_tensors_hooks, warn
from .model.sharded import is_sharded
from .model.signature import Arguments, InputSignature, changeable, detached
from .model.step import around, device_of, measured_step, restore_rng_state, wanted_bytes
from .model.wrapping import check_memory
from .step import EstimateOnlyStep, Step
from .target.capacity import planned_settings
from .target.gpu import gpu_of
from .trace.fake_step import fake_step
from .trace.record import Layouts
from .trace.trace import CallArguments, Trace, resident_bytes, trace

if TYPE_CHECKING:
    from .state.model_state import ModelState

log = logging.getLogger(__name__)

# The searches that share the time limit of a step with its state: about as many as bisection takes.
_STATE_SEARCHES = 8
# Up to this relative difference between the traced baseline and the plain step's peak, no note.
_BASELINE_ERROR = 0.005


@dataclass(frozen=True)
class PlanningResult:
    """A step that was planned.

    laid_out_otherwise : whether it was traced again because kernels used other memory layouts than
        traced
    after_first : whether it was traced in the model's state after a first forward pass
    """

    step: Step
    trial: Trial
    laid_out_otherwise: bool = False
    after_first: bool = False


@dataclass(frozen=True)
class PlanOptions:
    """How to plan a model for an input: the parameters of `plan`, and these.

    plan_graph : that of `sn_memory`, passed in so that running a plan does not import the search.
    share : the budget as passed in, if it was a percentage
    overlap : whether gradients of parameters are computed no later than in torch, if a plan in that
        order keeps the budget, so that ranks can exchange them early.
    update : `hooks`: the caller's hooks update each parameter when its gradient is complete.
    accumulate : whether parameters have gradients when the step begins
    trial : whether the step is tried on its input
    """

    budget: float | str
    planner: str | Plan
    techniques: tuple[str, ...]
    backend: str
    profile: bool
    device: Device | str | None
    optimizer: Any
    time_limit_s: float
    plan_graph: Callable[..., Plan]
    share: float | str = ""
    overlap: bool = False
    update: str = "step"
    accumulate: bool = False
    trial: bool = True
    from_sqrt_n: bool = True
    was_compiled: bool = False
    state: ModelState | None = None
    # Whether the step is traced after a first forward pass, in which the model sets attributes.
    after_first: bool = False
    # Which outputs the backward pass begins at, as in `trace`, if steps have shown it.
    ends: tuple[bool, ...] = ()
    # More samples of the same shapes, which `regions` and `modules` also plan for.
    alike: tuple[Arguments, ...] = ()
    # Memory layouts of results that differ from those of the trace, as seen in a run.
    layouts: Layouts | None = None
    # Plans a trace, in place of `planned_trace`.
    plan_of_trace: Callable[[Trace], Plan] | None = None

    def at_once(self, budget_bytes: int, device: Device | None) -> PlanOptions:
        """Return the options for planning while training: a short search, no ops timed, no trial.

        device : the speeds that the earlier plans were made with
        """
        return replace(
            self,
            budget=budget_bytes,
            planner="auto" if isinstance(self.planner, Plan) else self.planner,
            profile=False,
            device=device,
            time_limit_s=SEARCH_S,
            trial=False,
            from_sqrt_n=False,
        )

    def planned_step(self, model: torch.nn.Module, arguments: Arguments) -> PlanningResult:
        """Plan the plain model for an input, by the requested back end or the first that can."""
        if self.backend == "auto" and self.was_compiled:
            return self.plan_compiled(model, arguments)
        name = "graph" if self.backend == "auto" else self.backend
        try:
            with restore_rng_state():
                return self.in_trial(self.by_backend(name, model, arguments), model, arguments)
        # No other back end would help.
        except (BudgetError, SampleError, ValueError, torch.OutOfMemoryError):
            raise
        except Exception as failure:
            error: Exception = failure
            # A trial has to compare that first pass; with state on the host nothing is compared.
            may_run_first = self.trial and self.state is None and not self.after_first
            if isinstance(error, SetsStateError) and name == "graph" and may_run_first:
                try:
                    return self.plan_after_first(model, arguments)
                except (BudgetError, SampleError, torch.OutOfMemoryError):
                    raise
                except TraceError as second:
                    # If later forward passes set attributes as well, the first message stands.
                    error = failure if isinstance(second, SetsStateError) else second
            # Regions and modules are chosen by measurements, which differ from run to run, and
            # neither plans state.
            if self.backend != "auto" or settings.deterministic or self.state:
                if error is failure:
                    raise
                raise error from failure
            kind_of_error = "" if isinstance(error, TraceError) else f"{type(error).__name__}: "
            why = f"it cannot be traced: {kind_of_error}{error}"
        return self.plan_by_parts(model, arguments, why)

    def plan_by_parts(
        self, model: torch.nn.Module, arguments: Arguments, why: str
    ) -> PlanningResult:
        """Plan a model that cannot be traced: by regions, or by modules if it has no regions.

        why : the reason, for messages
        """
        # Imported here, as most processes need no regions; tests/frame/test_closure.py counts.
        from .regions.step import RegionsBudgetError

        name = type(model).__name__
        over: BudgetError | None = None
        try:
            with restore_rng_state():
                result = self.in_trial(self.by_regions(model, arguments, why), model, arguments)
            warn(
                f"{name} is planned by regions, and the code between them runs unchanged, "
                f"because {why}",
            )
            return result
        except RegionsBudgetError as error:
            over = error
            # `modules` also recomputes the code between regions. If that holds most of the bytes,
            # it may need less.
            error.args = (f"{error} {name} is planned by regions because {why}",)
            if 2 * error.outside_bytes < error.peak_bytes:
                raise
            regions = f"its regions need {show_bytes(error.peak_bytes)}"
        except (SampleError, torch.OutOfMemoryError):
            raise
        # `modules` takes any model; if the model itself fails on the sample, it raises that error.
        except Exception as error:  # noqa: BLE001
            regions = f"it has no plan by regions: {first_line(error)}"
            log.info("%s: %s", name, regions)
        try:
            step = self.by_modules(model, arguments)
        except BudgetError as error:
            if over is not None and over.peak_bytes <= error.peak_bytes:
                raise over from None
            error.args = (f"{error} {name} is planned by modules because {why}",)
            raise
        except TraceError:
            raise
        except Exception as error:
            if out_of_memory(error):
                raise
            runs_on(model, arguments)  # most often it does not, and this says so
            raise TraceError(
                f"{name} runs on the sample, but has no plan, because {why} By regions: {regions} "
                f"By modules: {type(error).__name__}: {first_line(error)}. Train it without a plan."
            ) from error
        warn(
            f"{name} is planned by modules, which saves less than a plan of its ops, because {why} "
            f"By regions: {regions}",
        )
        return self.in_trial(step, model, arguments)

    def plan_after_first(self, model: torch.nn.Module, arguments: Arguments) -> PlanningResult:
        """Plan by graph the steps after the first, in which the model sets attributes.

        Some classes of transformers write to their configuration in the first step, or install
        hooks. The trial shows whether the first step computes the same.
        """
        later = replace(self, after_first=True)
        with restore_rng_state():
            result = later.in_trial(later.by_graph(model, arguments), model, arguments)
        if not result.trial.compared:
            raise TraceError(
                "the forward pass sets attributes in its first run, and no trial could compare "
                f"that run with a plan for later runs ({result.trial.remark}). Run one step first."
            )
        return replace(result, after_first=True)

    def plan_compiled(self, model: torch.nn.Module, arguments: Arguments) -> PlanningResult:
        """Plan a compiled model: compiled if possible, else like any other, with a warning."""
        try:
            with restore_rng_state():
                return self.in_trial(self.by_compiler(model, arguments), model, arguments)
        except (BudgetError, TraceError) as error:
            warn(
                f"{type(model).__name__} was compiled and is planned without torch.compile, which "
                f"is slower, because there is no plan of its compiled step: {error}",
            )
        return replace(self, was_compiled=False).planned_step(model, arguments)

    def by_backend(self, name: str, model: torch.nn.Module, arguments: Arguments) -> Step:
        """Return a step of a back end."""
        if name == "graph":
            return self.by_graph(model, arguments)
        if name == "regions":
            return self.by_regions(model, arguments)
        return (self.by_compiler if name == "compile" else self.by_modules)(model, arguments)

    def by_graph(self, model: torch.nn.Module, arguments: Arguments) -> Step:
        """Return a step that replays the recorded calls."""
        unseen = changeable(*arguments)
        if unseen:
            raise TraceError(
                f"an argument is a {', '.join(unseen)}: its contents could change from step to "
                "step, and a replay would not see it. Pass the tensors and numbers in it."
            )
        # For a GPU that is not here the step is traced but cannot run; all state is resident.
        if isinstance(self.device, str) and gpu_of(self.device, device_of(model)) is not None:
            traced = replace(self, state=None, update="step").traced(model, arguments)
            return EstimateOnlyStep(traced, self.planned_trace(traced), self.device)
        return self.replay(model, arguments)

    def by_compiler(
        self,
        model: torch.nn.Module,
        arguments: Arguments,
        known: tuple[tuple[float, str], ...] = (),
    ) -> Step:
        """Return a compiled step; known : settings that kept the budget for other inputs."""
        from .compile.backend import CompiledStep, Setting, Settings

        check_memory(model, arguments, "compiling a model runs parts of it")
        # Settings carried over from another input are not cached for later processes.
        key = repr((self.techniques, self.time_limit_s, self.profile, settings.deterministic))
        measuring = Settings(
            self.budget,
            timed=self.profile and not settings.deterministic,
            recompute="recompute" in self.techniques,
            resident_bytes=resident_bytes(model, self.optimizer),
            # The compiled graph returns all new gradients at its end, when the earlier ones are
            # still held.
            earlier_bytes=wanted_bytes(model) if self.accumulate else 0,
            known=tuple(Setting(*setting) for setting in known),
            key=None if known else key,
        )
        with outside_saved_tensors_hooks():
            try:
                return CompiledStep(model, arguments, measuring)
            except TraceError:
                if self.trial:
                    # If the model itself fails on the sample, this raises that error instead.
                    runs_on(model, arguments)
                raise

    def by_modules(
        self,
        model: torch.nn.Module,
        arguments: Arguments,
        *,
        safely: bool = False,
        held_bytes: int = 0,
        earlier_bytes: int = 0,
    ) -> Step:
        """Return a step in which modules are recomputed.

        safely, earlier_bytes : as in ModuleStep
        held_bytes : bytes that count besides the step and the optimizer's state
        """
        from .modules.backend import ModuleStep
        from .modules.probe import Probe

        check_memory(model, arguments, "planning by modules runs the model")
        if self.alike:
            # Of samples of the same shapes, the one that saves most for the backward pass.
            arguments = max(
                (arguments, *self.alike), key=lambda sample: Probe(model, sample).saved_bytes
            )
        step = ModuleStep(
            model,
            # As leaves: the graph that computed them is not part of the measured step.
            detached(arguments),
            self.budget,
            resident_bytes=resident_bytes(model, self.optimizer) + held_bytes,
            earlier_bytes=earlier_bytes,
            safely=safely,
        )
        if step.plan.runs > 1 and not safely:
            warn(
                f"what {type(model).__name__} runs depends on random numbers. The budget holds for "
                f"the largest of {step.plan.runs} steps that were tried; a rarer step may hold "
                "more. Leave room for it.",
            )
        return step

    def by_regions(
        self, model: torch.nn.Module, arguments: Arguments, why: str = "", *, safely: bool = False
    ) -> Step:
        """Return a step in which all parts of a model that can be traced are planned together.

        why : the reason why the model is not planned as one graph; safely : as in RegionOptions
        """
        from .regions.search import RegionOptions, region_step

        check_memory(model, arguments, "planning by regions runs the model")
        if is_sharded(model):
            raise TraceError("parameters are sharded, and regions compute with unsharded ones")

        def search(graph: Graph, budget_bytes: int, seconds: float) -> Plan:
            # A plan passed in as planner is for a whole model.
            options = replace(self, time_limit_s=seconds, planner="auto")
            return options.searched(graph, budget_bytes)

        options = RegionOptions(
            self.budget,
            search,
            self.time_limit_s,
            self.profile,
            self.device,
            resident_bytes(model, self.optimizer),
            why,
            safely=safely,
            alike=self.alike,
        )
        return region_step(model, arguments, options)

    def planned(self, graph: Graph, budget: float | str | None = None) -> Plan:
        """Return a plan of a graph, within this budget or another."""
        budget = self.budget if budget is None else budget
        if graph.allocator != "torch":
            # Only torch's caching allocator reserves more than the live bytes.
            return self.searched(graph, budget)
        allowed = parse_bytes(budget, whole=unplanned_bytes(graph))

        def search(live_bytes: int, seconds: float | None) -> Plan:
            options = self
            if seconds is not None:
                options = replace(self, time_limit_s=seconds, from_sqrt_n=False)
            return options.searched(graph, live_bytes)

        return within_reserved(graph, allowed, search, planned_settings())

    def searched(self, graph: Graph, budget: float | str) -> Plan:
        """Return a plan of a graph whose live bytes keep a budget."""
        if isinstance(self.planner, Plan):
            return within(graph, self.planner, budget)
        plan = self.plan_graph(
            graph,
            budget,
            planner=self.planner,
            techniques=self.techniques,
            time_limit_s=self.time_limit_s,
            deterministic=settings.deterministic,
            from_sqrt_n=self.from_sqrt_n,
        )
        if plan.decided("offload"):
            room = parse_bytes(budget, whole=unplanned_bytes(graph))
            # Moving copies makes other ops wait, so peak and seconds are taken from a replay.
            actions = spread_copies(graph, plan.actions, room, times=WIDE)
            replayed = carry_out(graph, replace(plan, actions=actions))
            plan = replace(
                plan, actions=actions, peak_bytes=replayed.peak_bytes, seconds=replayed.seconds
            )
        check_plan(graph, plan)
        return plan

    def planned_trace(self, traced: Trace) -> Plan:
        """Return a plan of a trace."""
        if self.plan_of_trace is not None:
            return self.plan_of_trace(traced)
        try:
            plan = self.planned(traced.graph)
        except BudgetError as error:
            if error.plan is not None:
                error.args = (" ".join((str(error), *logits_note(traced.graph, error.plan))),)
            raise
        notes = (*plan.notes, *traced.notes, *logits_note(traced.graph, plan))
        return replace(plan, notes=notes)

    def replay(self, model: torch.nn.Module, arguments: Arguments) -> Replay:
        """Trace the model, and return a step that replays the trace by a plan."""
        if self.overlap:
            # In torch's order gradients may need more than the budget (BudgetError), and a plan
            # that was passed in may be for the other order (PlanError).
            with suppress(BudgetError, PlanError):
                return self._replay(model, arguments)
        return replace(self, overlap=False)._replay(model, arguments)

    def _replay(self, model: torch.nn.Module, arguments: Arguments) -> Replay:
        traced = self.traced(model, arguments)
        if self.state is not None:
            # Nothing is measured if speeds were passed in, or without profiling.
            measured = self.profile and self.device is None
            search = replace(self, time_limit_s=self.time_limit_s / _STATE_SEARCHES)
            return self.state.replay(model, traced, self.budget, search.planned, measured=measured)
        return Replay(traced, self.planned_trace(traced))

    def traced(self, model: torch.nn.Module, arguments: Arguments) -> Trace:
        """Trace the step of an input."""
        report_progress("trace", 0, 1)
        with after_first(model, arguments) if self.after_first else nullcontext():
            return trace(
                model,
                CallArguments(*arguments),
                profile=self.profile,
                device=self.device,
                # With planned state, the optimizer's state is part of the plan, not resident.
                optimizer=None if self.state else self.optimizer,
                overlap=self.overlap,
                layouts=self.layouts or {},
                accumulate=self.accumulate,
                update=self.update,
                # Not while training, when planning has to be fast and the budget is in bytes.
                unplanned=self.from_sqrt_n,
                ends=self.ends,
            )

    def layouts_seen(self, first: Layouts, model: torch.nn.Module, arguments: Arguments) -> Layouts:
        """Return the layouts of results on an input; `first` : those a first trial saw."""
        untimed = replace(self, profile=False, plan_of_trace=lambda traced: smallest(traced.graph))

        def run(step: Step) -> None:
            with suppress(ReplayError):
                measured_step(around(model, step.run), model, arguments, count=False)

        return until_laid_out(first, untimed.replay_of(model, arguments), run)[1]

    def replay_of(
        self, model: torch.nn.Module, arguments: Arguments
    ) -> Callable[[Layouts], Replay]:
        """Return a function that makes the step of an input from observed layouts."""
        return lambda layouts: replace(self, layouts=layouts).replay(model, arguments)

    def in_trial(self, step: Step, model: torch.nn.Module, arguments: Arguments) -> PlanningResult:
        """Try a step on its input; if kernels use other layouts, trace and plan it again."""
        if device_of(model).type == "cpu" and step.runs_here:
            # malloc may keep what tracing freed, which a process near its limit needs now.
            return_freed(step.plan.peak_bytes)
        if self.trial and self.state is not None:
            report_progress("trial", 0, 1)
            before = step
            assert isinstance(before, Replay)  # the one back end that plans state
            again = self.replay_of(model, arguments)
            step = self.state.dry_run(before, model, arguments, again)
            remark = "with its state on the host the planned step ran alone"
            return PlanningResult(step, Trial(False, {}, remark=remark), step is not before)
        if self.trial and step.runs_here and not step.rounds_alike:
            runs_on(model, arguments)
        if not (self.trial and step.runs_here and step.rounds_alike):
            remark = "planned while training, or compiled, or planned for another device"
            return PlanningResult(step, Trial(False, {}, remark=remark))

        if self.update == "hooks":
            # In a trial no hook frees gradients, so all of them would be held.
            own = step.plan.peak_bytes + wanted_bytes(model)
            if own > parse_bytes(self.budget, whole=step.plan.baseline_peak_bytes):
                remark = "the budget has no room for all gradients, which a trial holds"
                return PlanningResult(step, Trial(False, {}, remark=remark))

        def trial_of_step() -> Trial:
            report_progress("trial", 0, 1)
            need = step.plan.baseline_peak_bytes
            # With optimizer state or earlier gradients the baseline counts more than the step.
            counted = self.profile and self.optimizer is None and not self.accumulate
            return tried(step, model, arguments, plain_bytes=need, counted=counted)

        result = trial_of_step()
        otherwise = bool(result.layouts)
        if otherwise:
            seen = self.layouts_seen(result.layouts, model, arguments)
            step = self.replay_of(model, arguments)(seen)
            result = trial_of_step()
        if result.failure or result.layouts:
            first = next(iter(result.layouts), None)
            reason = result.failure or f"kernels return {first} in another layout than traced"
            raise TraceError(f"a step with the plan, tried on the sample, failed: {reason}")
        note = _baseline_note(result.plain_peak_bytes, step.plan.baseline_peak_bytes)
        if note and step.trace is not None:
            step.plan = replace(step.plan, notes=(*step.plan.notes, note))
        return PlanningResult(step, result, otherwise)


def _baseline_note(plain_bytes: int, baseline_bytes: int) -> str:
    """Describe the difference between traced baseline and plain step's peak; empty if small."""
    part = baseline_bytes / plain_bytes - 1 if plain_bytes else 0.0
    if abs(part) <= _BASELINE_ERROR:
        return ""
    return (
        f"the plain step allocated {show_bytes(plain_bytes)}, and needs "
        f"{show_bytes(baseline_bytes)} ({100 * part:+.1f} %) by its trace: percentages refer to "
        "the latter"
    )


def guarded(
    guards: GuardCache,
    kind: InputSignature,
    model: torch.nn.Module,
    arguments: Arguments,
    step: Step,
) -> InputSignature:
    """Return the signature that a step is for, from what its forward read during planning."""
    reads = step.reads
    if not reads:
        # torch.compile traces the forward by itself, so record the reads of a step without values.
        with recorded_reads(model) as seen:
            try:
                fake_step(model, arguments)
                reads = seen()
            except Exception:  # noqa: BLE001 - the compiled model does run, so every read counts
                reads = every_read(model)
    return guards.add(kind, model, arguments, reads, step.looked)
