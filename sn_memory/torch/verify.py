"""verify: a planned model and the plain one side by side; what was predicted, what came true."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..base.errors import PlanError
from ..base.sizes import show_bytes
from .model.compare import differences
from .model.kinds import kind_of
from .model.step import Loss, Measured, put_back, run_step
from .model.wrapping import RECORD, plain_model
from .plan import Planned
from .trace.trace import call_arguments


@dataclass(frozen=True)
class Verification:
    """What a training step did with the plan and without.

    Parameters
    ----------
    predicted_peak_bytes, measured_peak_bytes
        Of the planned step; measured by StorageTracker.
    unplanned_peak_bytes
        The same step without the plan, measured.
    peak_op
        What ran when the planned step reached its peak.
    predicted_s, measured_s, unplanned_s
        Seconds of the step; the last two measured without the tracker, the better of two runs.
    different
        Outputs, gradients and buffers that are not bit-equal to the unplanned run's.
    difference
        The largest of their differences, against the size of the output, gradient or buffer; a
        gradient counts as a tenth, at least, of its share of all gradients.
    """

    predicted_peak_bytes: int
    measured_peak_bytes: int
    unplanned_peak_bytes: int
    peak_op: str
    predicted_s: float
    measured_s: float
    unplanned_s: float
    different: tuple[str, ...]
    difference: float
    _planned: Planned = field(repr=False, compare=False)

    @property
    def equal(self) -> bool:
        """Whether all outputs, gradients and buffers are bit-equal."""
        return not self.different

    @property
    def error(self) -> float:
        """Measured peak over predicted peak, less one."""
        return self.measured_peak_bytes / self.predicted_peak_bytes - 1

    def report(self, path: str | Path) -> None:
        """Write the plan's HTML page; needs matplotlib."""
        self._planned.report(path)

    def __str__(self) -> str:
        result = "bit-equal"
        if not self.equal:
            result = f"different by {self.difference:.1e} at most: {', '.join(self.different)}"
        return (
            f"peak {show_bytes(self.measured_peak_bytes)} at {self.peak_op}, predicted "
            f"{show_bytes(self.predicted_peak_bytes)} ({self.error:+.2%}), without the plan "
            f"{show_bytes(self.unplanned_peak_bytes)}\n"
            f"{self.measured_s:.3g} s, predicted {self.predicted_s:.3g} s, without the plan "
            f"{self.unplanned_s:.3g} s\noutputs, gradients and buffers: {result}"
        )


def verify(model: torch.nn.Module, sample: Any, *, loss: Loss | None = None) -> Verification:
    """Run a training step with the plan and without, and compare.

    Called where the forward pass of a training step is called, inside `torch.autocast` if that is;
    the backward pass runs outside of it. Buffers, gradients and the state of the random number
    generator are put back afterwards. The step without the plan needs the memory it needs.

    Parameters
    ----------
    model
        Made by `plan`.
    sample
        A real input like the one it was planned for.
    loss
        Makes the loss of what the model returns. Without, it is what the model returns as `loss`;
        where it returns none, the outputs' gradients are random (1 for a scalar), the same in both
        runs.

    Raises
    ------
    PlanError
        If the model is not planned, or not for this input.
    """
    record = model.__dict__.get(RECORD)
    arguments = call_arguments(sample)
    step = record and record.steps.get(kind_of(model, *arguments, record.noted))
    if step is None:
        raise PlanError(
            "the model has no plan for this sample; call verify with what "
            "sn_memory.torch.plan returned, and with a sample like the one it was given."
        )
    plain = plain_model(model)

    def measured(run: Any, *, count: bool) -> Measured:
        with put_back(model, sample):
            return run_step(
                run,
                model,
                arguments,
                known=step.known,
                ignored=step.ignored,
                count=count,
                loss=loss,
            )

    expected, got = measured(plain, count=True), measured(model, count=True)
    different = differences(expected.results, got.results)
    planned_s = min(measured(model, count=False).seconds for _ in range(2))
    plain_s = min(measured(plain, count=False).seconds for _ in range(2))
    return Verification(
        predicted_peak_bytes=step.plan.peak_bytes,
        measured_peak_bytes=got.peak_bytes + step.beside_bytes,
        unplanned_peak_bytes=expected.peak_bytes + step.beside_bytes,
        peak_op=got.peak_op,
        predicted_s=step.plan.seconds,
        measured_s=planned_s,
        unplanned_s=plain_s,
        different=tuple(different),
        difference=max(different.values(), default=0.0),
        _planned=record,
    )
