"""The back end for models that cannot be traced: chosen modules run again in the backward pass.

torch.utils.checkpoint runs modules again, with the random numbers of the first run. It leaves to
users which modules, whether that fits, and what a second run does to statistics. Here the sample is
run: each module's seconds and saved bytes are measured, modules that save most seconds per byte are
not recomputed, and the bytes of each choice are counted, so the budget is kept on the sample or
refused.

With a sample that fits: a plain step, cuts of the model at three depths, then as many modules kept
as the budget allows, by bisection; each choice is a step that is run and counted. For an input that
arrives during training, and may not fit, there is a safe choice: it runs only steps in which most
modules are recomputed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ...base.sizes import parse_bytes
from ...run.measured_choice import MeasuredPlan, measured_plan, min_recompute
from ..model.sharded import most
from ..model.signature import Arguments
from ..model.snapshot import version_of
from ..model.step import Measured, around, device_of, restore_step, run_step, seed
from ..step import Call, MeasuredStep
from .probe import Probe
from .rerun import Input, Unit, rerunning

# Modules are cut into units no deeper than this: deeper ones are mostly single ops.
_DEPTH = 3
# If random numbers decide what runs: the number of seeds that are probed, and the number of those,
# the ones that save most, with which each choice is measured.
_SEEDS, _MEASURED = 32, 4
# A safe cut is chosen before it is measured, so more depths cost nothing: blocks are this deep in a
# model wrapped by adapters and a loss.
_SAFE_DEPTH = 6


class _OverwrittenError(Exception):
    """A unit's input was changed in place after the unit ran, so it cannot run again."""

    def __init__(self, unit: str) -> None:
        super().__init__(unit)
        self.unit = unit


class Search:
    """Search for the modules to run again: probes once, then measures choices.

    model, arguments : the plain model and a real sample
    resident_bytes : bytes counted in addition to a step
    waiting_bytes : of the chosen step, as in MeasuredStep
    """

    waiting_bytes = (0, 0)

    def __init__(self, model: torch.nn.Module, arguments: Any, resident_bytes: int) -> None:
        self.model, self.arguments, self.resident_bytes = model, arguments, resident_bytes
        # Seeds with which each choice is measured, and all seeds; None: do not seed.
        self.seeds: list[int | None] = [None]
        self.all_seeds: list[int | None] = [None]
        probe = Probe(model, arguments)
        # Ranks that share parameters must decide alike, as a rerun may run collectives.
        if most(model, [float(probe.by_chance)])[0]:
            self._probe_seeds(probe)
        probe.agree()
        self.probe, self.behaviour = probe, probe.behaviour

    def _probe_seeds(self, probe: Probe) -> None:
        """Merge probes with many seeds into this one; store the seeds, largest first."""
        saved: dict[int, int] = {}
        seen = set()
        for number in range(_SEEDS):
            other = Probe(self.model, self.arguments, partial(seed, self.model, number))
            saved[number] = int(most(self.model, [other.saved_bytes])[0])
            seen.add(saved[number])
            probe.join(other)
        if len(seen) > 1:
            self.all_seeds = [*sorted(saved, key=saved.__getitem__, reverse=True)]
            self.seeds = self.all_seeds[:_MEASURED]

    def plan(self, budget: float | str) -> tuple[MeasuredPlan, list[Unit]]:
        while True:
            plan, again = self._plan(budget)
            # The promised peak must hold for all seeds: if the choice exceeds the budget with one,
            # choices are measured with that seed, too.
            unmeasured = [number for number in self.all_seeds if number not in self.seeds]
            peaks = {number: self._measured_with(number, again).peak_bytes for number in unmeasured}
            largest = max(peaks, key=lambda number: peaks[number], default=None)
            if largest is None or peaks[largest] <= plan.budget_bytes:
                return replace(plan, peak_bytes=max(plan.peak_bytes, *peaks.values(), 0)), again
            self.seeds.append(largest)

    def _plan(self, budget: float | str) -> tuple[MeasuredPlan, list[Unit]]:
        baseline = self.measured([])
        budget_bytes = parse_bytes(budget, whole=baseline.peak_bytes)
        # The smallest budget of all ranks.
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
            runs=len(self.all_seeds),
        )
        return plan, again

    def safe(self, budget_bytes: int) -> tuple[MeasuredPlan, list[Unit]]:
        """Return the first cut that keeps the budget, in order of expected peaks.

        If that leaves room, units whose saved bytes fit are not recomputed, provided that this step
        keeps the budget, too.
        """
        budget_bytes = -int(most(self.model, [-budget_bytes])[0])
        best: tuple[list[Unit], Measured] | None = None
        for units in sorted(self.cuts(_SAFE_DEPTH), key=self.expected) or [[]]:
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
        again, fewer = units, self.as_room_allows(units, budget_bytes - step.peak_bytes)
        if len(fewer) < len(units):
            with suppress(torch.OutOfMemoryError):
                kept = self.measured(fewer)
                if kept.peak_bytes <= budget_bytes:
                    step, again = kept, fewer
        self.waiting_bytes = step.waiting_bytes(self.arguments)
        plan = measured_plan(
            units,
            again,
            step,
            Measured({}, 0, "", 0.0),  # no step without a plan was run
            budget_bytes=budget_bytes,
            baseline_seconds=max(0.0, step.seconds - sum(unit.seconds for unit in again)),
            runs=len(self.all_seeds),
        )
        return plan, again

    def cuts(self, deepest: int) -> list[list[Unit]]:
        """Return the distinct cuts of the model at all depths."""
        cuts = (list(self.units(depth)) for depth in range(1, deepest + 1))
        return [*{tuple(unit.name for unit in units): units for units in cuts if units}.values()]

    def expected(self, units: list[Unit]) -> int:
        """Return the bytes saved while one unit of a cut runs again, estimated from the probe."""
        does = self.behaviour.get(self.model)
        inside = sum(unit.saved_bytes + unit.saved_input_bytes for unit in units)
        outside = max(0, (does.saved_bytes if does else 0) - inside)
        return (
            outside
            + sum(unit.given_bytes for unit in units)
            + max(unit.saved_bytes for unit in units)
        )

    def as_room_allows(self, units: list[Unit], room_bytes: int) -> list[Unit]:
        """Return the units to run again if those with the costliest rerun per byte are kept."""
        again = []
        for unit in sorted(units, key=lambda unit: -unit.seconds / max(1, unit.saved_bytes)):
            if unit.saved_bytes <= room_bytes:
                room_bytes -= unit.saved_bytes
            else:
                again.append(unit)
        return again

    def unrepeatable(self, module: torch.nn.Module) -> bool:
        """Whether a module, or one in it, would differ when run again."""
        return any(
            self.behaviour[inner].unrepeatable
            for inner in self.behaviour.keys() & {*module.modules()}
        )

    def cut(self, baseline: Measured, budget_bytes: int) -> tuple[list[Unit], Measured]:
        """Return the cut with the smallest peak when all its units run again, and that step."""
        best: tuple[list[Unit], Measured] = ([], baseline)
        for cut in self.cuts(_DEPTH) if baseline.peak_bytes > budget_bytes else ():
            units, step = self.without_overwritten(cut)
            if units and step.peak_bytes < best[1].peak_bytes:
                best = (units, step)
        return best

    def without_overwritten(self, units: list[Unit]) -> tuple[list[Unit], Measured]:
        """Drop units whose input is changed in place before they would run again."""
        while True:
            try:
                return units, self.measured(units)
            except _OverwrittenError as error:
                units = [unit for unit in units if unit.name != error.unit]

    def units(self, depth: int) -> Iterator[Unit]:
        """Cut the model into modules at a depth; modules that cannot run again are cut further."""
        paths = {module: name for name, module in reversed(list(self.model.named_modules()))}

        def below(module: torch.nn.Module, depth: int) -> Iterator[torch.nn.Module]:
            for child in module.children():
                if child not in self.behaviour:
                    # A ModuleList is never called, so it does not count as a level.
                    yield from below(child, depth)
                elif (depth > 1 and next(child.children(), None)) or self.unrepeatable(child):
                    yield from below(child, depth - 1)
                else:
                    yield child

        for module in dict.fromkeys(below(self.model, depth)):
            does, inside = self.behaviour[module], set(module.modules())
            if does.saved_bytes:
                changed = tuple(buffer for buffer in self.probe.changed if buffer[0] in inside)
                yield Unit(**vars(does), name=paths[module], changed=changed)

    def measured(self, again: Sequence[Unit]) -> Measured:
        """Return the step with the largest peak over all seeds, with units run again."""
        steps = [self._measured_with(number, again) for number in self.seeds]
        return max(steps, key=lambda step: step.peak_bytes)

    def _measured_with(self, number: int | None, again: Sequence[Unit]) -> Measured:
        """Run a step of the sample with units run again; restore everything."""

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
                # Breaks a cycle: the reruns hold the list, whose tensors hold the reruns' graph.
                noted.clear()
            return outputs

        with restore_step(
            self.model,
            self.arguments,
            inputs_too=self.probe.changes_inputs,
            written=self.probe.written,
        ):
            seed(self.model, number)
            step = run_step(
                forward,
                self.model,
                self.arguments,
                kernels=device_of(self.model).type == "cpu",
            )
        peak, seconds = most(self.model, [step.peak_bytes + self.resident_bytes, step.seconds])
        return replace(step, results={}, peak_bytes=int(peak), seconds=seconds)


class ModuleStep(MeasuredStep):
    """A model whose chosen modules run again in the backward pass.

    model, arguments : the plain model and a real sample; it is run, and left unchanged.
    budget : as in `plan`
    resident_bytes : bytes counted in addition to the step: the optimizer's state.
    earlier_bytes : bytes of gradients that exist when a step begins; they count as well.
    safely : for an input that may not fit without a plan: the model's own step is not run, time is
        ignored, and if no choice keeps the budget the one with the smallest peak is taken.

    Raises BudgetError if no choice of modules keeps the budget on the sample, unless `safely`.
    """

    backend = "modules"

    def __init__(
        self,
        model: torch.nn.Module,
        arguments: Arguments,
        budget: float | str,
        *,
        resident_bytes: int = 0,
        earlier_bytes: int = 0,
        safely: bool = False,
    ) -> None:
        super().__init__()
        self.resident_bytes, self.counts_gradients = resident_bytes, bool(earlier_bytes)
        # From the plain class: the planned model's own forward calls this step.
        self._forward = type(model).forward
        search = Search(model, arguments, resident_bytes + earlier_bytes)
        # Attributes that the forward only reads are part of the input signature; not those it sets.
        self.sets, self.reads = search.probe.sets, search.probe.reads
        if safely:
            self.plan, self._again = search.safe(parse_bytes(budget, whole=0))
        else:
            self.plan, self._again = search.plan(budget)
        self.waiting_bytes = search.waiting_bytes

    @property
    def hidden_from_hooks(self) -> str:
        """As in Step, for the modules that run again; empty if there are none."""
        again = self.plan.decided("recompute")
        return "do not see what modules keep that run again" if again else ""

    def run(self, model: torch.nn.Module, args: Any, kwargs: Any, call: Call | None = None) -> Any:
        """Run the model's own forward pass, with the chosen modules checkpointed."""
        with rerunning(model, self._again):
            returned = self._forward(model, *args, **kwargs)
        self.follow(model, returned)
        return returned
