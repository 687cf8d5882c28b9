"""What a planned model carries as `model.sn_memory`, whatever the framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar, overload

from ..base.errors import MissingExtra, PlanError
from ..graph.graph import Graph
from ..report.report import report
from .process import process_bytes

# Kinds of input that are named; there may be dozens.
_SHOWN: Final = 3


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
    # Per kind of input, how it was planned.
    told: dict[Any, PlannedKind]

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

    @property
    def process_bytes(self) -> int:
        """What the process takes beyond the plan's tensors and what it held before `plan`.

        On a host, where malloc returns what is freed (SN_MEMORY_MALLOC), and once planning has
        been imported, which takes 130 MiB in the first plan of a process. A limit of what was held
        before, less parameters and input, and the budget, and this, is kept.
        """
        traced = self.latest_trace
        return process_bytes(None if traced is None else traced.graph)

    @property
    def reserved_peak_bytes(self) -> int | None:
        """What a card's allocator reserves for the plan made last; None where there is none."""
        return getattr(self.plan, "reserved_peak_bytes", None)

    @property
    def kinds(self) -> list[PlannedKind]:
        """The kinds of input that have a plan by now: what they are, how it came, its peak."""
        return list(self.told.values())

    @property
    def planned_inputs(self) -> list[str]:
        """The kinds of input that have a plan: names and shapes of their tensors."""
        return [it.inputs for it in self.kinds]

    def __repr__(self) -> str:
        inputs = self.planned_inputs
        shown = "; ".join(inputs[:_SHOWN])
        if len(inputs) > _SHOWN:
            shown += f"; and {len(inputs) - _SHOWN} more"
        planned = f"planned for {len(inputs)}: {shown}" if inputs else "planned for no input"
        return f"{self.plan!r}\nback end {self.backend}, {planned}"

    def _repr_html_(self) -> str:
        """What a notebook shows: these lines, and the picture of the report."""
        if self.latest_trace is None:
            picture = ""
        else:
            try:
                picture = report(self.trace.graph, self.plan)._repr_html_()
            except MissingExtra as missing:
                picture = f"<p>{escape(str(missing))}</p>"
        return f"<pre>{escape(repr(self))}</pre>{picture}"

    @overload
    def report(self, path: None = None) -> str: ...

    @overload
    def report(self, path: str | Path) -> None: ...

    def report(self, path: str | Path | None = None) -> str | None:
        """Write one HTML page with pictures and tables, or return it where no path is given.

        Needs matplotlib and a trace.
        """
        made = report(self.trace.graph, self.plan)
        if path is None:
            return made.html()
        made.write_html(path)
        return None
