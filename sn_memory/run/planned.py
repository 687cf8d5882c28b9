"""What a planned model carries as `model.sn_memory`, whatever the framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from ..base.errors import PlanError
from ..graph.graph import Graph
from ..report.report import report


class Traced(Protocol):
    """What a trace of either rim has."""

    @property
    def graph(self) -> Graph: ...


T = TypeVar("T", bound=Traced)


@dataclass(frozen=True)
class PlannedKind:
    """A kind of input that the model has a plan for.

    Parameters
    ----------
    inputs
        Names and shapes of its tensors.
    how
        `planned` by `plan`. At first sight: `nothing runs again`, `carried over from the plan of`
        another kind, `planned at once`, or `modules run again` (TensorFlow: layers).
    peak_bytes
        Predicted; measured where modules run again; 0 where neither could be.
    budget_bytes
        What was to be kept.
    unlike
        What was otherwise than in the nearest kind that was known; nothing if `plan` was asked.
    seconds
        What planning it took, at first sight.
    """

    inputs: str
    how: str
    peak_bytes: int
    budget_bytes: int
    unlike: str = ""
    seconds: float = 0.0


class PlannedRecord(ABC, Generic[T]):
    """Back end, plan, trace and report of a planned model.

    A rim's record says which back end it is, what was planned last (`plan`), and on which trace
    (`latest_trace`).
    """

    backend: str

    @property
    @abstractmethod
    def plan(self) -> Any:
        """The plan made last: a Plan, or a MeasuredPlan where parts of the model run again."""

    @property
    @abstractmethod
    def latest_trace(self) -> T | None:
        """The trace planned last; None where the model was planned without one."""

    @property
    def trace(self) -> T:
        """The trace planned last. Raises PlanError where the model was planned without one."""
        if self.latest_trace is None:
            raise PlanError(
                f"the model was planned by {self.backend}, because it cannot be traced, so there "
                f"is no graph of it. Its plan lists the {self.backend}."
            )
        return self.latest_trace

    def report(self, path: str | Path) -> None:
        """Write one HTML page with pictures and tables; needs matplotlib and a trace."""
        report(self.trace.graph, self.plan).write_html(path)
