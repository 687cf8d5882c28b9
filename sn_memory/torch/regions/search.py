"""Planning by regions: find and observe them, then choose and measure their plans."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from ...base.progress import report_progress
from ...base.sizes import parse_bytes, show_bytes
from ...graph.graph import Graph
from ...plan.plan import BudgetError, Plan, budget_line, percent_kept
from ...run.measured_choice import Choice
from ..eager.trial import enough_memory
from ..errors import TraceError
from ..model.signature import Arguments
from ..model.step import (
    Measured,
    around,
    device_of,
    gradient_bytes,
    restore_rng_state,
    restore_step,
    run_step,
    seed,
)
from ..modules.probe import Behaviour, Probe
from ..trace.op_seconds import scratch_of_steps
from ..trace.record import Layouts
from .choose import Choices, Timeline
from .find import Finder, StepObserver
from .forward_pass import Chosen
from .plans import RegionPlan, frontier
from .region import Arriving, TracedCall, plans_at_once, structure, traced_call
from .step import RegionsBudgetError, RegionsPlan, RegionStep

# If random numbers decide what runs: the number of seeds observed, and the number of runs, those
# that keep most, on which a choice is measured.
_SEEDS, _MEASURED = 16, 3
# If this many runs keep the same, random numbers decide nothing, and one run is enough.
_ALIKE = 5
# Limit on retracing regions with observed layouts, and on repeating choices with measured peaks.
_ROUNDS = 8
# Searches for a region's plans (`plans.frontier`), and the most seconds of one: the search for a
# transformer layer of 90 ops ends in half a second.
_SEARCHES = 10
_ENOUGH_S, _OPS_A_SECOND = 0.5, 100
# If fewer plans can be reused, the call has other ops, and gets its own search.
_FEW = 3
# If a measured choice leaves this part of the budget unused, another is made with that room.
_UNUSED = 0.02


@dataclass(frozen=True)
class RegionOptions:
    """Options for planning by regions; see PlanOptions.

    searched : plans a graph within bytes and seconds, or raises BudgetError
    why : why the model is not planned as a whole
    safely : for an input that may not fit without a plan: the model's own step is not run, and if
        no choice keeps the budget the one with the smallest peak is returned.
    alike : more samples of the same shapes, whose values may decide what runs
    """

    budget: float | str
    searched: Callable[[Any, int, float], Any]
    time_limit_s: float
    profile: bool
    device: Any
    resident_bytes: int
    why: str
    safely: bool = False
    alike: tuple[Arguments, ...] = ()


class Run(NamedTuple):
    """A step to observe: the model's arguments, and a seed; None seeds no generator."""

    arguments: Arguments
    seed: int | None


def region_step(model: torch.nn.Module, arguments: Arguments, options: RegionOptions) -> RegionStep:
    """Plan a model by regions; it is left unchanged.

    Raises TraceError if no part of it is a region.
    Raises BudgetError if no choice keeps the budget on each of the samples, unless `safely`.
    """
    return _Search(model, arguments, options).step()


class _Search:
    def __init__(
        self, model: torch.nn.Module, arguments: Arguments, options: RegionOptions
    ) -> None:
        self.model, self.arguments, self.options = model, arguments, options
        if not options.why:
            self.options = replace(options, why=_refusal(model, arguments))
        self.probe = Probe(model, arguments)
        # The runs of each sample, the one that keeps most first.
        self.runs = [[Run(sample, None)] for sample in (arguments, *options.alike)]

    def step(self) -> RegionStep:
        # The regions, and the plans that their calls may follow.
        finder, calls = self._surveyed()
        self._plan_kinds(finder, calls)
        step = self._step_of(finder, None)
        # The step without a plan is measured if it fits; else its peak is simulated, below.
        baseline = self._baseline()
        self.seconds = baseline.seconds if baseline else 0.0
        report_progress("trial", 0, 1)
        # A choice is made for the sample that needs most if nothing runs again, and measured on
        # all samples.
        peak, observer, leanest = max(
            (self._most(step, runs[0]) for runs in self.runs), key=lambda most: most[0]
        )
        timeline = observer.timeline()
        if baseline is None:
            baseline = replace(leanest, peak_bytes=peak + self.options.resident_bytes)
            self.seconds = leanest.seconds
        budget = parse_bytes(self.options.budget, whole=baseline.peak_bytes)
        base = RegionsPlan(
            (), budget, 0, baseline.peak_bytes, 0.0, self.seconds, "",
            runs=sum(map(len, self.runs)),
            breaks=finder.breaks(self._saved, self.options.why),
        )  # fmt: skip
        chosen = _Choosing(self, step, observer.calls, timeline, base).measured(budget)
        # From here on the user runs its steps, and they may warn.
        chosen.warned = set()
        return chosen

    def _most(self, step: RegionStep, run: Run) -> tuple[int, StepObserver, Measured]:
        """Return the simulated peak if nothing runs again, and the observed step."""
        observer, leanest = self._observed(step, run)
        ladders = [kind.plans for _, kind, _ in observer.calls]
        choices = Choices(observer.timeline(), ladders)
        return choices.peak(np.zeros(len(ladders), dtype=np.int64)), observer, leanest

    @property
    def measured(self) -> list[Run]:
        """The steps that a choice is measured on."""
        return [run for runs in self.runs for run in runs[:_MEASURED]]

    def _saved(self, path: str) -> int:
        does = self.probe.behaviour.get(self.model.get_submodule(path), Behaviour())
        return does.saved_bytes + does.saved_input_bytes

    def _surveyed(self) -> tuple[Finder, Sequence[tuple[str, TracedCall, int]]]:
        """Return the Finder of the regions, and the calls of a step; order the runs.

        Regions are retraced until results and gradients have the traced layouts.
        """
        layouts: Layouts = {}
        arriving: dict[str, Arriving] = {}
        sharing: set[Hashable] = set()
        for _ in range(_ROUNDS):
            report_progress("trace", 0, 1)
            how = {"profile": self.options.profile, "device": self.options.device}
            finder = Finder(self.model, layouts, arriving, sharing, **how)
            with self._restored(self.arguments):
                finder.look(self.arguments)
            if not finder.regions:
                raise TraceError(
                    "no part of the model can be traced whole: "
                    f"{next(iter(finder.refused.values()), 'it has no modules inside')}"
                )
            # Before the step is observed: modules that run unplanned affect gradient layouts.
            finder.leave_small(finder.calls)
            new_layouts: Layouts = {}
            run = Run(self.arguments, None)
            observer, _ = self._observed(self._step_of(finder, new_layouts), run, counted=False)
            known_before = len(layouts), len(sharing)
            layouts |= new_layouts
            regions = finder.regions.items()
            now_arriving = {path: region.arriving for path, region in regions if region.arriving}
            sharing |= {structure(self.model.get_submodule(path)) for path in observer.shared}
            if now_arriving == arriving and known_before == (len(layouts), len(sharing)):
                break
            arriving = now_arriving
        for path, region in finder.regions.items():
            region.alike.shares_inputs = structure(self.model.get_submodule(path)) in sharing
        if self.probe.by_chance:
            self.runs = [
                self._seeded(finder, first.arguments, range(_SEEDS)) for first, *_ in self.runs
            ]
            finder.siblings()
        else:
            for first, *_ in self.runs[1:]:
                self._seeded(finder, first.arguments, [None])
        step = self._step_of(finder, {})
        observed = [self._observed(step, runs[0], counted=False)[0] for runs in self.runs]
        return finder, [call for observer in observed for call in observer.calls]

    def _seeded(
        self, finder: Finder, arguments: Arguments, seeds: Sequence[int | None]
    ) -> list[Run]:
        """Find regions in runs of a sample; return the runs, the one that keeps most first."""
        kept_bytes: dict[int | None, int] = {}
        for number in seeds:
            with self._restored(arguments):
                seed(self.model, number)
                finder.look(arguments)
                kept_bytes[number] = finder.kept_bytes
            if len(kept_bytes) == _ALIKE and len({*kept_bytes.values()}) == 1:
                break
        order = sorted(kept_bytes, key=kept_bytes.__getitem__, reverse=True)
        count = len(order) if len({*kept_bytes.values()}) > 1 else 1
        return [Run(arguments, number) for number in order[:count]]

    def _restored(self, arguments: Arguments) -> Any:
        probe = self.probe
        return restore_step(
            self.model, arguments, inputs_too=probe.changes_inputs, written=probe.written
        )

    def _step_of(self, finder: Finder, layouts: Layouts | None) -> RegionStep:
        step = RegionStep(
            self.model,
            dict(finder.regions),
            self.probe.reads,
            self.probe.sets,
            self.options.resident_bytes,
        )
        step.layouts = layouts
        return step

    def _observed(
        self, step: RegionStep, run: Run, *, counted: bool = True
    ) -> tuple[StepObserver, Measured]:
        """Run a step in which all calls take their leanest plans; return the observations.

        counted : whether bytes are counted, which takes a millisecond per op
        """
        observer = StepObserver(lambda: torch.empty(0), lambda: gradient_bytes(self.model))
        step.observer = observer
        device = device_of(self.model)
        scratch = scratch_of_steps(device, profile=self.options.profile)
        try:
            measured = self._measured(
                around(self.model, step.run), run, known=step.known, count=counted,
                heard=observer.heard, scratch=scratch,
            )  # fmt: skip
        finally:
            step.observer = None
        return observer, measured

    def _measured(self, forward: Callable[..., Any], run: Run, **how: Any) -> Measured:
        """Run and measure a step with `run_step`; restore everything."""
        with self._restored(run.arguments):
            seed(self.model, run.seed)
            measured = run_step(forward, self.model, run.arguments, **how)
        return replace(measured, results={})

    def _baseline(self) -> Measured | None:
        """Return the model's own step; None if it may not fit."""
        parameter_bytes = sum(param.nbytes for param in self.model.parameters())
        # Parameters, their gradients, and saved tensors: a little less than its peak.
        needed_bytes = 2 * parameter_bytes + self.probe.saved_bytes
        if self.options.safely or not enough_memory(needed_bytes, device_of(self.model)):
            return None
        steps = [self.run(self.model, run) for run in self.measured]
        return max(steps, key=lambda step: step.peak_bytes)

    def run(self, forward: Callable[..., Any], run: Run) -> Measured:
        """Return a measured step; its peak includes resident bytes."""
        measured = self._measured(forward, run, kernels=device_of(self.model).type == "cpu")
        return replace(measured, peak_bytes=measured.peak_bytes + self.options.resident_bytes)

    def _plan_kinds(self, finder: Finder, calls: Sequence[tuple[str, TracedCall, int]]) -> None:
        """Search plans for the traced calls; modules that keep too little run unplanned."""
        finder.leave_small([(path, kind) for path, kind, _ in calls])
        groups = [alike.traced for alike in finder.groups]
        limit_s = self.options.time_limit_s / len(groups) / _SEARCHES

        def searched(graph: Graph, budget_bytes: int) -> Plan:
            enough_s = max(_ENOUGH_S, len(graph.ops) / _OPS_A_SECOND)
            return self.options.searched(graph, budget_bytes, min(limit_s, enough_s))

        # Equal graphs are searched once.
        known: dict[Hashable, list[RegionPlan]] = {}
        for index, kinds in enumerate(groups):
            report_progress("search", index, len(groups))
            # Plans are searched for the largest call; calls with the same ops reuse them.
            planned: list[TracedCall] = []
            for kind in sorted(kinds, key=lambda kind: -kind.given_bytes):
                graph = kind.traced.graph
                plans = plans_at_once(graph, planned, kind.given_bytes) if planned else []
                if len(plans) < _FEW:
                    key = graph.storages, graph.ops
                    plans = known[key] = known.get(key) or frontier(graph, searched)
                kind.replan(plans)
                planned.append(kind)


def _refusal(model: torch.nn.Module, arguments: Arguments) -> str:
    """Return why a model cannot be traced as a whole; empty if it can."""
    try:
        with restore_rng_state():
            traced_call(model, arguments, layouts=None, profile=False, device=None)
    except TraceError as error:
        return str(error)
    return ""


class _Choosing:
    """Chooses plans for the calls, and measures the choices."""

    def __init__(
        self,
        search: _Search,
        step: RegionStep,
        calls: Sequence[tuple[str, TracedCall, int]],
        timeline: Timeline,
        plan: RegionsPlan,
    ) -> None:
        self.search, self.step, self.calls, self.plan = search, step, calls, plan
        resident = search.options.resident_bytes
        self.timeline = replace(timeline, outside=timeline.outside + resident)
        self.choices = Choices(self.timeline, [kind.plans for _, kind, _ in calls])

    def chosen(self, room_bytes: int) -> RegionStep:
        """Return a step that follows the choice for a peak of at most `room_bytes`."""
        choice = self.choices.solve(room_bytes)
        calls = [(path, kind) for path, kind, _ in self.calls]
        step = self.step.copied()
        # A step may take less than is simulated: if its measured peak keeps the budget, the
        # simulated one is allowed.
        room_bytes = max(room_bytes, self.choices.peak(choice))
        step.chosen = Chosen(calls, self.choices, choice, room_bytes)
        step.plan = self._plan(step.chosen)
        step.with_gradients = lambda held: self._for_gradients_of(step, held)
        return step

    def _for_gradients_of(self, step: RegionStep, held_bytes: int) -> RegionStep:
        """Return a step for parameters with gradients, into which new ones are accumulated."""
        assert step.chosen is not None
        assert self.timeline.gradients is not None
        outside = self.timeline.outside - self.timeline.gradients + held_bytes
        other = copy(self)
        other.timeline = replace(self.timeline, outside=outside)
        other.choices = Choices(other.timeline, self.choices.ladders)
        adjusted = other.chosen(step.chosen.room_bytes)
        adjusted.plan = replace(adjusted.plan, budget_bytes=step.plan.budget_bytes)
        adjusted.warned, adjusted.counts_gradients = step.warned, True
        every, callers = step.waiting_bytes
        kept = (sum(c.saved_bytes for c in one.plan.choices) for one in (adjusted, step))
        adjusted.waiting_bytes = every + next(kept) - next(kept), callers
        return adjusted

    def measured(self, budget_bytes: int) -> RegionStep:
        """Return the fastest step that was measured to keep the budget."""
        best: RegionStep | None = None
        room, excess = budget_bytes, 0
        runs = self.search.measured
        seen: set[bytes] = set()
        for attempt in range(_ROUNDS):
            step = self.chosen(room)
            assert step.chosen is not None
            choice = step.chosen.choice
            if choice.tobytes() in seen:
                if excess <= 0 or not room:
                    break
                room = 0
                continue
            seen.add(choice.tobytes())
            step.plan = replace(step.plan, budget_bytes=budget_bytes)
            largest = max(
                (self.search.run(around(self.search.model, step.run), run) for run in runs),
                key=lambda step: step.peak_bytes,
            )
            excess = largest.peak_bytes - budget_bytes
            step.waiting_bytes = largest.waiting_bytes(self.search.arguments)
            step.plan = replace(
                step.plan,
                peak_bytes=largest.peak_bytes,
                peak_op=largest.peak_op,
                leaner_steps=0,
                over_steps=0,
            )
            better = best is None or (
                step.plan.seconds < best.plan.seconds
                if excess <= 0 and best.plan.peak_bytes <= budget_bytes
                else step.plan.peak_bytes < best.plan.peak_bytes
            )
            if better:
                best = step
            if excess <= 0 and (-excess < _UNUSED * budget_bytes or not choice.any()):
                break
            # The room is corrected by the difference of measured and simulated peak, which is
            # expected to be the same for the next choice. If even the simulated peak exceeds the
            # room, the smaller of both is corrected.
            predicted = step.plan.predicted_peak_bytes
            room = (predicted if excess <= 0 else min(room, predicted)) - excess
            if excess > 0 and (room < 0 or attempt == _ROUNDS - 2):
                room = 0  # the leanest choice, so that an error names the smallest peak
        assert best is not None
        if best.plan.peak_bytes > budget_bytes and not self.search.options.safely:
            raise self._refused(best, budget_bytes)
        return best

    def _refused(self, best: RegionStep, budget_bytes: int) -> BudgetError:
        peak, baseline = best.plan.peak_bytes, best.plan.baseline_peak_bytes
        percent = percent_kept(peak, baseline)
        share = f', or "{percent}%" of the unplanned peak' if percent else ""
        worst = best.plan.breaks[0] if best.plan.breaks else None
        where = f" Most is kept in {worst.module or 'the model'}: {worst.why}" if worst else ""
        return RegionsBudgetError(
            f"with a plan for each region the model needs {show_bytes(peak)} on the sample, and "
            f"{show_bytes(best.plan.outside_bytes)} are held outside of regions; the "
            f"{budget_line(budget_bytes, peak)}. The smallest budget found is {peak} "
            f"bytes{share}. Raise the budget, make the batch smaller, or remove a break.{where}",
            peak_bytes=peak,
            budget_bytes=budget_bytes,
            op=best.plan.peak_op,
            percent=percent,
            floor_bytes=min(peak, self.choices.floor()),
            outside_bytes=best.plan.outside_bytes,
        )

    def _plan(self, chosen: Chosen) -> RegionsPlan:
        seconds, timeline = self.plan.baseline_seconds, self.timeline
        # The moment before the backward pass, when all calls wait for it.
        turn = min(int(timeline.forward.max(initial=0)) + 1, len(timeline.outside) - 1)
        peak = chosen.choices.peak(chosen.choice)
        rows = zip(chosen.calls, chosen.plans, chosen.choice, strict=True)
        return replace(
            self.plan,
            choices=tuple(
                Choice(path, "recompute" if index else "keep", plan.kept_bytes, plan.extra_s)
                for (path, _), plan, index in rows
            ),
            budget_bytes=chosen.room_bytes,
            peak_bytes=peak,
            predicted_peak_bytes=peak,
            seconds=seconds + chosen.choices.seconds(chosen.choice),
            lower_bound_seconds=seconds + chosen.choices.bound(chosen.room_bytes),
            outside_bytes=int(timeline.outside[turn]),
        )
