"""What `verify` of the frameworks returns: a training step with its plan and without."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..base.sizes import show_bytes
from .planned import PlannedRecord

_FEW = 3


@dataclass(frozen=True)
class Verification:
    """What a training step did with the plan and without.

    Parameters
    ----------
    predicted_peak_bytes, measured_peak_bytes
        Of the planned step. Measured: with torch, by StorageTracker; with TensorFlow, what was
        resident before, as the plan counts it, and the most that ops asked for beyond that
        (`Allocations`).
    unplanned_peak_bytes
        The same step without the plan, measured.
    peak_op
        With torch, what ran when the planned step reached its peak; with TensorFlow, the op that
        reaches the predicted one.
    predicted_s, measured_s, unplanned_s
        Seconds of the step; the last two measured, the better of two runs.
    different
        Outputs or results, gradients, buffers and variables that are not bit-equal to the unplanned
        run's.
    difference
        The largest of their differences, relative to the size of what differs. What is zero but for
        rounding is held against more than itself: see `model/compare.py` of the rim.
    allocated_peak_bytes
        Of the planned step, in blocks as TensorFlow's allocator handed them out: what is asked for,
        and what its blocks were too large by. None with torch.
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
    _planned: PlannedRecord[Any] = field(repr=False, compare=False)
    allocated_peak_bytes: int | None = None

    @property
    def equal(self) -> bool:
        """Whether all that was compared is bit-equal."""
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
            few = ", ".join(self.different[:_FEW])
            result = f"{len(self.different)} differ by up to {self.difference:.1e} ({few})"
        blocks = ""
        if self.allocated_peak_bytes is not None:
            blocks = f"; in blocks handed out {show_bytes(self.allocated_peak_bytes)}"
        return (
            f"peak {show_bytes(self.measured_peak_bytes)} at {self.peak_op}, predicted "
            f"{show_bytes(self.predicted_peak_bytes)} ({self.error:+.2%}), without the plan "
            f"{show_bytes(self.unplanned_peak_bytes)}{blocks}\n"
            f"{self.measured_s:.3g} s, predicted {self.predicted_s:.3g} s, without the plan "
            f"{self.unplanned_s:.3g} s\nresults, gradients and variables: {result}"
        )
