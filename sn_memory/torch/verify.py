"""verify: a planned model and the plain one side by side; what was predicted, what came true."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..errors import PlanError
from ..sizes import show_bytes
from .apply import Planned
from .kinds import kind_of
from .step import Measured, put_back, run_step
from .trace import call_arguments
from .wrapping import RECORD, plain_model


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
    """

    predicted_peak_bytes: int
    measured_peak_bytes: int
    unplanned_peak_bytes: int
    peak_op: str
    predicted_s: float
    measured_s: float
    unplanned_s: float
    different: tuple[str, ...]
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
        result = "bit-equal" if self.equal else f"different: {', '.join(self.different)}"
        return (
            f"peak {show_bytes(self.measured_peak_bytes)} at {self.peak_op}, predicted "
            f"{show_bytes(self.predicted_peak_bytes)} ({self.error:+.2%}), without the plan "
            f"{show_bytes(self.unplanned_peak_bytes)}\n"
            f"{self.measured_s:.3g} s, predicted {self.predicted_s:.3g} s, without the plan "
            f"{self.unplanned_s:.3g} s\noutputs, gradients and buffers: {result}"
        )


def verify(model: torch.nn.Module, sample: Any) -> Verification:
    """Run a training step with the plan and without, and compare.

    In place of a loss, the outputs' gradients are random (1 for a scalar), the same in both runs.
    Buffers, gradients and the state of the random number generator are put back afterwards. The
    step without the plan needs the memory it needs.

    Parameters
    ----------
    model
        Made by `plan`.
    sample
        A real input like the one it was planned for.

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
                run, model, arguments, known=step.known, ignored=step.ignored, count=count
            )

    expected, got = measured(plain, count=True), measured(model, count=True)
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
        different=tuple(
            name
            for name in expected.results.keys() | got.results.keys()
            if not _same(expected.results.get(name), got.results.get(name))
        ),
        _planned=record,
    )


def _same(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    return left.dtype == right.dtype and torch.equal(
        left.detach().contiguous().view(-1).view(torch.uint8) if left.numel() else left,
        right.detach().contiguous().view(-1).view(torch.uint8) if right.numel() else right,
    )
