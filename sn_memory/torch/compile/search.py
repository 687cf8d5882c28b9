"""Search for the fastest of torch's own partitions of a step that keeps the budget, by measurement.

The peak of a compiled step is known only once it has run: fusion decides which values are in
memory, the order of kernels decides when, and the solver of a memory budget counts neither. A
smaller share may hold more (pytorch issue 197838), and a solver may save what it does not count
(197871). So each candidate is compiled and run once. It is accepted only if it computes what the
plain compiled step does, and holds no more than the budget.

A step is run as in training, on tensors that share the memory of the parameters but are not
parameters, so that it accumulates no gradients in the model and runs no hooks. Whatever it writes
to is copied first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from ...base.progress import counts_work, report_progress, stage
from ...base.sizes import parse_bytes, show_bytes
from ...plan.plan import BudgetError, budget_line, percent_kept
from ...run.measured_choice import Choice
from ..eager.trial import NOISE, ROUNDING
from ..model.results import Results, differences
from ..model.signature import tensors
from ..model.step import Measured, restore_rng_state
from ..model.tracker import AllocationTracker
from ..target.accelerator import is_apart, synchronize
from ..trace.op_seconds import clock_of
from .backend import CompiledPlan, Setting, Settings, storage_bytes
from .partitioner import (
    SOLVERS,
    BudgetPartitioner,
    JointRecorder,
    Partition,
    Run,
    compile_step,
)

log = logging.getLogger(__name__)

# Shares tried before any in between, as the peak does not always grow with the share: a U-Net
# holds 9.3 MiB at 0.7 and 10.4 at 0.5. This order finds one that keeps the budget early, in case
# time runs out.
_GRID = (0.5, 0.7, 0.3, 0.9, 0.1)
# Bisections between the largest share that keeps the budget and the next larger one; with another
# solver, within this distance of the first solver's result.
_HALVED = 3
_NEAR_SHARE = 1 / 8
# Tried if no other share keeps the budget.
_LAST_SHARES = (0.2, 0.05, 0.8, 0.6, 0.4, 0.02)
# Measured to find the smallest budget, which a refusal names.
_LEAST_SHARES = (0.1, 0.05, 0.02)
# With fewer seconds left, no more settings are tried if one keeps the budget.
_LEAST_S = 5.0
# Products in TF32 round like those of 16-bit floats.
_TF32 = ROUNDING[torch.float16]
# Timed rounds; fewer once `_MOST_S` seconds are spent. With seven rounds on a busy machine, the
# slower by 2 % of two steps of 27 ms was chosen.
ROUNDS = 30
_MOST_S = 10.0


@dataclass(frozen=True)
class Candidate:
    """A partition that was compiled and run; the setting is None for torch's own."""

    setting: Setting | None
    partition: Partition
    run: Run
    step: Measured

    @property
    def saved_bytes(self) -> int:
        """Bytes that are saved for the backward pass."""
        return sum(self.partition.saved().values())


class Search:
    """A search for one traced model.

    module, inputs : as torch.compile passes them to a back end
    request : what to search for; its resident bytes are all that are not inputs of the step

    plain : the step as torch compiles it by default; None if there is nothing to differentiate
    """

    def __init__(self, module: fx.GraphModule, inputs: list[Any], request: Settings) -> None:
        self.module, self.inputs, self.request = module, inputs, request
        self.recorder = JointRecorder()
        report_progress("compile", 0, 1)
        with stage():
            run = compile_step(module, inputs, self.recorder)
        self.plain: Candidate | None = None
        self.known_bytes = storage_bytes(tensors(inputs)) + request.resident_bytes
        self._partitions: dict[Setting, Partition] = {}
        # By what is saved; None if a partition does not run, or computes something else.
        self._by_saved: dict[tuple[str, ...], Candidate | None] = {}
        if self.recorder.plain is None:
            return
        step = measured_step(run, inputs)
        self.expected = step.results
        self.rounding = self._rounding(measured_step(run, inputs).results)
        self.plain = Candidate(None, self.recorder.plain, run, replace(step, results={}))
        self._by_saved[tuple(self.recorder.plain.saved())] = self.plain

    def _rounding(self, second: Results) -> float:
        """Return the largest error of steps that compute the same in a different order.

        second : results of a second plain step: nondeterministic kernels differ from run to run
        """
        noise = max(differences(self.expected, second).values(), default=0.0)
        errors = [NOISE * noise, *(ROUNDING.get(dtype, 0.0) for dtype in self.recorder.dtypes())]
        on_card = any(is_apart(tensor.device) for tensor in tensors(self.inputs))
        if on_card and (torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32):
            errors.append(_TF32)
        return max(errors)

    def peak_bytes(self, candidate: Candidate) -> int:
        """Return the peak of a candidate, including resident bytes."""
        return candidate.step.peak_bytes + self.request.resident_bytes

    def best(self) -> CompiledPlan:
        """Return the plan: the fastest candidate that was measured to keep the budget.

        Raises BudgetError if no candidate keeps the budget.
        """
        assert self.plain is not None
        allowed = parse_bytes(self.request.budget, whole=self.peak_bytes(self.plain))
        if self.peak_bytes(self.plain) <= allowed:
            return self.plan(self.plain, allowed, (0.0, 0.0))
        for known in self.request.known:
            candidate = self.candidate(known, allowed)
            if candidate is not None and self.peak_bytes(candidate) <= allowed:
                return self.plan(candidate, allowed, (0.0, 0.0))
        kept = self.within(allowed) if self.request.recompute else []
        if not kept:
            raise self.refusal(allowed)
        # Without timing, the one that saves most is taken.
        kept.sort(key=lambda choice: (-choice.saved_bytes, choice.step.peak_bytes))
        chosen, seconds = kept[0], (0.0, 0.0)
        if self.request.timed and not counts_work():
            report_progress("time steps", 0, 1)
            with stage():
                runs = [self.plain.run, *(choice.run for choice in kept)]
                plain_s, *took = step_seconds(runs, self.inputs, rounds=ROUNDS)
            for choice, step_s in zip(kept, took, strict=True):
                log.info(
                    "%s takes %.2e s, torch's own partition %.2e s", choice.setting, step_s, plain_s
                )
            fastest = min(range(len(kept)), key=took.__getitem__)
            chosen, seconds = kept[fastest], (took[fastest], plain_s)
        return self.plan(chosen, allowed, seconds)

    def within(self, allowed: int) -> list[Candidate]:
        """Return candidates that keep a budget, each partition once."""
        kept: dict[int, Candidate] = {}

        def keeps(share: float, solver: str) -> bool:
            if kept and _is_late():
                return False
            candidate = self.candidate(Setting(share, solver), allowed)
            if candidate is None or self.peak_bytes(candidate) > allowed:
                return False
            kept[id(candidate)] = candidate
            return True

        def largest_of_grid(solver: str) -> float:
            return max((share for share in _GRID if keeps(share, solver)), default=0.0)

        def largest_between(solver: str, low: float, high: float) -> float:
            for _ in range(_HALVED):
                middle = (low + high) / 2
                low, high = (middle, high) if keeps(middle, solver) else (low, middle)
            return low

        first, *more = SOLVERS
        best = largest_of_grid(first)
        if best:
            higher = min((share for share in _GRID if share > best), default=1.0)
            best = largest_between(first, best, higher)
        for solver in more:
            if best:
                near = max(0.0, best - _NEAR_SHARE), min(1.0, best + _NEAR_SHARE)
                largest_between(solver, *near)
            else:
                best = largest_of_grid(solver)
        if not best:
            any(keeps(share, first) for share in _LAST_SHARES)
        return list(kept.values())

    def candidate(self, setting: Setting, allowed: int) -> Candidate | None:
        """Return the partition of a setting, measured once even if several settings give it.

        None if what it saves alone exceeds the budget, if there is no memory to run it, or if it
        does not compute what the plain step does.
        """
        if setting not in self._partitions:
            with stage():
                self._partitions[setting] = self.recorder.partition(setting)
        saved = self._partitions[setting].saved()
        key, least = tuple(saved), self.known_bytes + sum(saved.values())
        if key not in self._by_saved and least <= allowed:
            report_progress("compile", len(self._by_saved), len(self._by_saved) + 1)
            with stage():
                self._by_saved[key] = self._measured(setting)
        return self._by_saved.get(key)

    def _measured(self, setting: Setting) -> Candidate | None:
        try:
            run = compile_step(self.module, self.inputs, BudgetPartitioner(setting))
            step = measured_step(run, self.inputs)
        except torch.OutOfMemoryError as error:
            log.info("%s does not fit into memory: %s", setting, error)
            return None
        errors = differences(self.expected, step.results)
        worst = max(errors, key=lambda name: errors[name], default="")
        if worst and errors[worst] > self.rounding:
            log.warning(
                "%s gives other results than the plain compiled step (%s by %.1e); left out",
                setting,
                worst,
                errors[worst],
            )
            return None
        log.info("%s holds %s", setting, show_bytes(step.peak_bytes))
        return Candidate(setting, self._partitions[setting], run, replace(step, results={}))

    def plan(self, chosen: Candidate, allowed: int, seconds: tuple[float, float]) -> CompiledPlan:
        """Return the plan of a candidate; seconds are those of its step and of the plain one."""
        assert self.plain is not None
        saved = chosen.partition.saved()
        # Fused kernels compute several values, so no value has a time of its own.
        choices = tuple(
            Choice(name, "keep" if name in saved else "recompute", size, 0.0)
            for name, size in self.plain.partition.saved().items()
        )
        return CompiledPlan(
            choices=choices,
            budget_bytes=allowed,
            peak_bytes=self.peak_bytes(chosen),
            baseline_peak_bytes=self.peak_bytes(self.plain),
            seconds=seconds[0],
            baseline_seconds=seconds[1],
            peak_op=chosen.step.peak_op,
            setting=chosen.setting,
        )

    def refusal(self, allowed: int) -> BudgetError:
        """Return the error that says that no candidate keeps the budget."""
        assert self.plain is not None
        if self.request.recompute:
            # Those that save least may be unmeasured, as even what they save exceeds the budget.
            for share in _LEAST_SHARES:
                self.candidate(Setting(share, SOLVERS[0]), 1 << 62)
        tried = [measured for measured in self._by_saved.values() if measured is not None]
        nearest = min(tried, key=self.peak_bytes)
        peak, op = self.peak_bytes(nearest), nearest.step.peak_op
        percent = percent_kept(peak, self.peak_bytes(self.plain))
        hint = f', "{percent}%" of the compiled step without a plan' if percent else ""
        return BudgetError(
            f"the compiled step needs {show_bytes(peak)}, set by {op!r}. The "
            f"{budget_line(allowed, peak)}. The smallest budget found is {peak} bytes{hint}. Raise "
            "the budget, make the batch smaller, or plan with backend='graph', which may also move "
            "the order of calls.",
            peak_bytes=peak,
            budget_bytes=allowed,
            op=op,
            percent=percent,
        )


def _is_late() -> bool:
    with stage() as left_s:
        return left_s < _LEAST_S and not counts_work()


def measured_step(run: Run, inputs: Sequence[Any]) -> Measured:
    """Run a step once, untimed and always with the same random numbers; count its memory.

    run : a compiled forward pass
    inputs : parameters, buffers and inputs, as a back end gets them; real tensors, and counted
    """
    with _isolated():
        torch.manual_seed(0)
        inputs_now = _copied(inputs)
        known = [tensor for tensor in inputs_now if isinstance(tensor, torch.Tensor)]
        tracker = AllocationTracker(known, kernels=True, device=device_of(inputs))
        with tracker:
            outputs = _step(run, inputs_now)
        results = {f"output {place}": output.detach() for place, output in enumerate(outputs)}
        for place, tensor in enumerate(inputs_now):
            if isinstance(tensor, torch.Tensor):
                name = f"gradient of {place}" if tensor.requires_grad else f"buffer {place}"
                results[name] = tensor.grad if tensor.requires_grad else tensor
    return Measured(results, tracker.peak_bytes, tracker.peak_op, 0.0)


def step_seconds(runs: Sequence[Run], inputs: Sequence[Any], *, rounds: int) -> list[float]:
    """Return the minimum seconds of a step of each, over rounds in which they alternate.

    runs, inputs : as in `measured_step`
    rounds : rounds that count, after one warm-up
    """
    device = device_of(inputs)
    clock = clock_of(device)
    least = [float("inf")] * len(runs)
    began = time.perf_counter()
    with _isolated():
        for number in range(rounds + 1):
            for index, run in enumerate(runs):
                inputs_now = _copied(inputs)
                synchronize(device)
                start = clock()
                _step(run, inputs_now)
                synchronize(device)
                if number:
                    least[index] = min(least[index], clock() - start)
            if number and time.perf_counter() - began > _MOST_S:
                break
    return least


def device_of(inputs: Sequence[Any]) -> torch.device:
    """Return the device of a step: that of its first tensor."""
    return next(value.device for value in inputs if isinstance(value, torch.Tensor))


@contextmanager
def _isolated() -> Iterator[None]:
    # torch.compile calls a back end in fake tensor mode.
    with _disable_current_modes(), restore_rng_state(), torch.enable_grad():
        yield


def _copied(inputs: Sequence[Any]) -> list[Any]:
    # A step writes to the statistics of batch norms; it only reads tensors that require a gradient.
    return [
        value.detach().requires_grad_()
        if isinstance(value, torch.Tensor) and value.requires_grad
        else value.detach().clone()
        if isinstance(value, torch.Tensor)
        else value
        for value in inputs
    ]


def _step(run: Run, inputs: Sequence[Any]) -> list[torch.Tensor]:
    outputs = [tensor for tensor in run(*inputs) if isinstance(tensor, torch.Tensor)]
    ends = [output for output in outputs if output.requires_grad]
    torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
    return outputs
