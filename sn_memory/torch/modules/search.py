"""The search for the modules to run again.

With a sample that fits: a plain step, cuts of the model at three depths, then as many modules kept
as the budget allows, by bisection; each choice is a step that is run and counted. With an input
that may not fit: no step but those in which most runs again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ...base.sizes import parse_bytes
from ...run.measured_choice import MeasuredPlan, measured_plan, min_recompute
from ..model.sharded import most
from ..model.snapshot import version_of
from ..model.step import Measured, around, device_of, restore_step, run_step, seed
from .probe import Probe
from .rerun import Input, Unit, rerunning

# Modules are cut into units no deeper than this: deeper ones are mostly single ops.
_DEPTH = 3
# Where what runs depends on random numbers, so many steps are looked at, and each choice is
# measured on so many of them, those that save most.
_COURSES, _MEASURED = 32, 4
# A safe cut is chosen before it is measured, so that more depths cost nothing: blocks lie this deep
# in a model that adapters and a loss are wrapped around.
_SAFE_DEPTH = 6


class _OverwrittenError(Exception):
    """A unit's input is not what it was when the unit ran; autograd would refuse to go on."""

    def __init__(self, unit: str) -> None:
        super().__init__(unit)
        self.unit = unit


class Search:
    """Looks for the modules to run again: probes once, then measures choices.

    model, arguments : the plain model and a real sample
    resident_bytes : what counts beside a step
    waiting_bytes : of the step that was chosen, as of MeasuredStep
    """

    waiting_bytes = (0, 0)

    def __init__(self, model: torch.nn.Module, arguments: Any, resident_bytes: int) -> None:
        self.model, self.arguments, self.resident_bytes = model, arguments, resident_bytes
        # Seeds of the courses that each choice is measured on, and of all; None is the state of
        # chance as it is.
        self.courses: list[int | None] = [None]
        self.all_courses: list[int | None] = [None]
        probe = Probe(model, arguments)
        # Ranks that share parameters decide alike.
        if most(model, [float(probe.by_chance)])[0]:
            self._look_at_courses(probe)
        probe.agree()
        self.behaviour, self.changed = probe.behaviour, probe.changed
        self.changes_inputs, self.written = probe.changes_inputs, probe.written
        self.sets, self.reads = probe.sets, probe.reads

    def _look_at_courses(self, probe: Probe) -> None:
        """Let the probe know all modules that some course runs; note the courses, largest first."""
        saved: dict[int, int] = {}
        seen = set()
        for course in range(_COURSES):
            other = Probe(self.model, self.arguments, partial(seed, self.model, course))
            saved[course] = int(most(self.model, [other.saved_bytes])[0])
            seen.add(saved[course])
            probe.join(other)
        if len(seen) > 1:
            self.all_courses = [*sorted(saved, key=saved.__getitem__, reverse=True)]
            self.courses = self.all_courses[:_MEASURED]

    def plan(self, budget: float | str) -> tuple[MeasuredPlan, list[Unit]]:
        while True:
            plan, again = self._plan(budget)
            # What is promised was seen: a course in which the choice holds more than the budget is
            # one that choices are measured on.
            unmeasured = [course for course in self.all_courses if course not in self.courses]
            peaks = {course: self._measured_on(course, again).peak_bytes for course in unmeasured}
            largest = max(peaks, key=lambda course: peaks[course], default=None)
            if largest is None or peaks[largest] <= plan.budget_bytes:
                return replace(plan, peak_bytes=max(plan.peak_bytes, *peaks.values(), 0)), again
            self.courses.append(largest)

    def _plan(self, budget: float | str) -> tuple[MeasuredPlan, list[Unit]]:
        baseline = self.measured([])
        budget_bytes = parse_bytes(budget, whole=baseline.peak_bytes)
        # The smallest of those that ranks sharing parameters were given.
        budget_bytes = -int(most(self.model, [-budget_bytes])[0])
        units, best = self.cut(baseline, budget_bytes)
        again, best = min_recompute(
            units,
            best,
            self.measured,
            budget_bytes=budget_bytes,
            baseline_bytes=baseline.peak_bytes,
            how="run again module by module",
        )
        self.waiting_bytes = best.waiting_bytes(self.arguments)
        plan = measured_plan(
            units,
            again,
            best,
            baseline,
            budget_bytes=budget_bytes,
            baseline_seconds=baseline.seconds,
            courses=len(self.all_courses),
        )
        return plan, again

    def safe(self, budget_bytes: int) -> tuple[MeasuredPlan, list[Unit]]:
        """Return the first cut, of those that promise least, that keeps the budget.

        Where there is room left then, units are kept by what they save, as far as that is sure.
        """
        budget_bytes = -int(most(self.model, [-budget_bytes])[0])
        best: tuple[list[Unit], Measured] | None = None
        for units in self.safe_cuts():
            try:
                units, step = self.without_overwritten(units)
            except torch.OutOfMemoryError:
                continue
            if best is None or step.peak_bytes < best[1].peak_bytes:
                best = (units, step)
            if step.peak_bytes <= budget_bytes:
                break
        if best is None:
            raise torch.OutOfMemoryError(
                "a step of the model does not fit into memory, whichever modules run again"
            )
        units, step = best
        again = self.as_room_allows(units, budget_bytes - step.peak_bytes)
        if len(again) < len(units):
            try:
                kept = self.measured(again)
            except torch.OutOfMemoryError:
                kept = step
            if kept.peak_bytes <= budget_bytes and kept is not step:
                step = kept
            else:
                again = units
        self.waiting_bytes = step.waiting_bytes(self.arguments)
        plan = measured_plan(
            units,
            again,
            step,
            Measured({}, 0, "", 0.0),  # its own step is the only one there is
            budget_bytes=budget_bytes,
            baseline_seconds=max(0.0, step.seconds - sum(unit.seconds for unit in again)),
            courses=len(self.all_courses),
        )
        return plan, again

    def safe_cuts(self) -> list[list[Unit]]:
        """Return the cuts at all depths, that with the smallest expected peak first."""
        cuts: dict[tuple[str, ...], list[Unit]] = {}
        for depth in range(1, _SAFE_DEPTH + 1):
            units = list(self.units(depth))
            cuts.setdefault(tuple(unit.name for unit in units), units)
        return sorted((cut for cut in cuts.values() if cut), key=self.expected) or [[]]

    def expected(self, units: list[Unit]) -> int:
        """Return what is saved in a cut when a unit runs again, as far as the probe tells."""
        does = self.behaviour.get(self.model)
        inside = sum(unit.saved_bytes + unit.saved_input_bytes for unit in units)
        outside = max(0, (does.saved_bytes if does else 0) - inside)
        return (
            outside
            + sum(unit.given_bytes for unit in units)
            + max(unit.saved_bytes for unit in units)
        )

    def as_room_allows(self, units: list[Unit], room_bytes: int) -> list[Unit]:
        """Return what still runs again when those whose rerun costs most for a byte are kept."""
        again = []
        for unit in sorted(units, key=lambda unit: -unit.seconds / max(1, unit.saved_bytes)):
            if unit.saved_bytes <= room_bytes:
                room_bytes -= unit.saved_bytes
            else:
                again.append(unit)
        return again

    def unrepeatable(self, module: torch.nn.Module) -> bool:
        """Whether running a module again would do otherwise than the first time."""
        return any(
            self.behaviour[inner].unrepeatable
            for inner in self.behaviour.keys() & {*module.modules()}
        )

    def cut(self, baseline: Measured, budget_bytes: int) -> tuple[list[Unit], Measured]:
        """Return the units with the smallest peak when all run again, and that step."""
        best: tuple[list[Unit], Measured] = ([], baseline)
        if baseline.peak_bytes <= budget_bytes:
            return best
        seen: set[tuple[str, ...]] = set()
        for depth in range(1, _DEPTH + 1):
            units, step = self.without_overwritten(list(self.units(depth)))
            names = tuple(unit.name for unit in units)
            if units and names not in seen:
                seen.add(names)
                if step.peak_bytes < best[1].peak_bytes:
                    best = (units, step)
        return best

    def without_overwritten(self, units: list[Unit]) -> tuple[list[Unit], Measured]:
        """Leave out units whose input is changed in place before they would run again."""
        while True:
            try:
                return units, self.measured(units)
            except _OverwrittenError as error:
                units = [unit for unit in units if unit.name != error.unit]

    def units(self, depth: int) -> Iterator[Unit]:
        """Cut the model into modules of a depth; what cannot be run again is cut further."""
        paths = {module: name for name, module in reversed(list(self.model.named_modules()))}

        def below(module: torch.nn.Module, depth: int) -> Iterator[torch.nn.Module]:
            for child in module.children():
                if child not in self.behaviour:
                    # A list of modules is no call of its own, and no depth.
                    yield from below(child, depth)
                elif (depth > 1 and next(child.children(), None)) or self.unrepeatable(child):
                    yield from below(child, depth - 1)
                else:
                    yield child

        for module in dict.fromkeys(below(self.model, depth)):
            does, inside = self.behaviour[module], set(module.modules())
            if does.saved_bytes:
                changed = tuple(buffer for buffer in self.changed if buffer[0] in inside)
                yield Unit(**vars(does), name=paths[module], changed=changed)

    def measured(self, again: Sequence[Unit]) -> Measured:
        """Return the step of the largest peak, of the courses, with units run again."""
        steps = [self._measured_on(course, again) for course in self.courses]
        return max(steps, key=lambda step: step.peak_bytes)

    def _measured_on(self, course: int | None, again: Sequence[Unit]) -> Measured:
        """Run a step of the sample with units run again; put everything back."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            noted: list[Input] = []

            def rerun(model: torch.nn.Module, args: Any, kwargs: Any) -> Any:
                with rerunning(model, again, noted):
                    return type(model).forward(model, *args, **kwargs)

            try:
                outputs = around(self.model, rerun)(*args, **kwargs)
                for unit, tensor, version in noted:
                    if version_of(tensor) != version:
                        raise _OverwrittenError(unit)
            finally:
                # Who runs again holds the list, and what is in it would hold who runs again.
                noted.clear()
            return outputs

        with restore_step(
            self.model, self.arguments, inputs_too=self.changes_inputs, written=self.written
        ):
            seed(self.model, course)
            step = run_step(
                forward,
                self.model,
                self.arguments,
                kernels=device_of(self.model).type == "cpu",
            )
        # Ranks that share parameters decide by the same numbers, or their collectives would part.
        peak, seconds = most(self.model, [step.peak_bytes + self.resident_bytes, step.seconds])
        return replace(step, results={}, peak_bytes=int(peak), seconds=seconds)
