"""`model.sn_memory` of a planned model, and the result of `verify`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar, overload

from ..base.errors import MissingExtra, PlanError
from ..base.sizes import show_bytes
from ..graph.graph import Graph
from .reserved import process_bytes

if TYPE_CHECKING:
    from ..report.report import Report

# How many kinds of input, or differing results, are listed; there may be dozens.
_SHOWN: Final = 3


class Traced(Protocol):
    """A trace of either framework."""

    @property
    def graph(self) -> Graph: ...


class Step(Protocol):
    """A step that runs as planned."""

    plan: Any


T = TypeVar("T", bound=Traced)
S = TypeVar("S", bound=Step)


@dataclass(frozen=True)
class PlannedKind:
    """A kind of input that the model has a plan for.

    inputs : names and shapes of its tensors
    how : `planned` by `plan`. If it was planned while training: `nothing runs again`, `carried over
        from the plan of` another kind, `planned at once`, `planned by regions` (torch only), or
        `modules run again` (TensorFlow: layers).
    peak_bytes : predicted; measured if modules are recomputed; 0 if neither was possible.
    budget_bytes : the budget
    unlike : how it differs from the most similar known kind; empty if `plan` planned it.
    seconds : that planning took while training
    """

    inputs: str
    how: str
    peak_bytes: int
    budget_bytes: int
    unlike: str = ""
    seconds: float = 0.0


@dataclass
class KeptStep(Generic[S]):
    """The step kept for a kind of input.

    step : what runs in place of the forward pass
    summary : how it was planned
    call : which arguments of its sample were passed by position or keyword, where that matters
    used : if it was planned while training, the count of steps at its last use; else None
    """

    step: S
    summary: PlannedKind
    call: Any = None
    used: int | None = None


class PlannedRecord(ABC, Generic[T, S]):
    """Back end, plan, trace and report of a planned model.

    A rim's record has the back end, the latest plan (`plan`), and its trace (`latest_trace`).
    """

    backend: str
    # Per kind of input.
    kept: Mapping[Any, KeptStep[S]]

    @property
    @abstractmethod
    def plan(self) -> Any:
        """The latest plan: a Plan, or a MeasuredPlan if parts of the model are recomputed."""

    @property
    @abstractmethod
    def latest_trace(self) -> T | None:
        """The latest planned trace; None if the model was planned without one."""

    @property
    def trace(self) -> T:
        """The latest planned trace. Raises PlanError if the model was planned without one."""
        if self.latest_trace is None:
            raise PlanError(
                f"the model was planned by {self.backend}, because it cannot be traced, so there "
                f"is no graph of it. Its plan lists the {self.backend}."
            )
        return self.latest_trace

    @property
    def process_bytes(self) -> int:
        """Bytes of the process beyond the plan's tensors and what it held before `plan`.

        On a host, if malloc returns what is freed (SN_MEMORY_MALLOC), and once planning has been
        imported, which takes 130 MiB in the first plan of a process. A process keeps within the sum
        of what it held before (without parameters and input), the budget, and this.
        """
        traced = self.latest_trace
        return process_bytes(None if traced is None else traced.graph)

    @property
    def reserved_peak_bytes(self) -> int | None:
        """What a card's allocator reserves for the latest plan; None if none is modelled."""
        return getattr(self.plan, "reserved_peak_bytes", None)

    @property
    def kinds(self) -> list[PlannedKind]:
        """The kinds of input that have a plan so far, with how it was made and its peak."""
        return [kept.summary for kept in self.kept.values()]

    @property
    def steps(self) -> dict[Any, S]:
        """The steps that replace the forward pass, per kind of input."""
        return {kind: kept.step for kind, kept in self.kept.items()}

    @property
    def planned_inputs(self) -> list[str]:
        """The kinds of input that have a plan: names and shapes of their tensors."""
        return [kind.inputs for kind in self.kinds]

    def __repr__(self) -> str:
        inputs = self.planned_inputs
        shown = "; ".join(inputs[:_SHOWN])
        if len(inputs) > _SHOWN:
            shown += f"; and {len(inputs) - _SHOWN} more"
        planned = f"planned for {len(inputs)}: {shown}" if inputs else "planned for no input"
        return f"{self.plan!r}\nback end {self.backend}, {planned}"

    def _repr_html_(self) -> str:
        """For a notebook: the lines of `repr`, and the figure of the report."""
        picture = ""
        if self.latest_trace is not None:
            try:
                picture = self._page()._repr_html_()
            # Without matplotlib a notebook still shows the lines.
            except MissingExtra as missing:
                picture = f"<p>{escape(str(missing))}</p>"
        return f"<pre>{escape(repr(self))}</pre>{picture}"

    @overload
    def report(self, path: None = None) -> str: ...

    @overload
    def report(self, path: str | Path) -> None: ...

    def report(self, path: str | Path | None = None) -> str | None:
        """Write one HTML page with pictures and tables, or return it if no path is given.

        Needs matplotlib and a trace.
        """
        page = self._page()
        if path is None:
            return page.html()
        page.write_html(path)
        return None

    def _page(self) -> Report:
        """The report of the plan, as `sn_memory.report` makes it."""
        # Not at the top: a training process should import as little as possible (`test_closure`).
        from ..report.report import report

        return report(self.trace.graph, self.plan)


@dataclass(frozen=True)
class Verification:
    """Comparison of a training step with the plan and without.

    predicted_peak_bytes, measured_peak_bytes : of the planned step. Measured: with torch, by
        StorageTracker; with TensorFlow, what was resident before, as counted by the plan, plus the
        most that ops requested beyond that (`Allocations`).
    unplanned_peak_bytes : the same step without the plan, measured
    peak_op : with torch, what ran when the planned step reached its peak; with TensorFlow, the op
        that reaches the predicted one
    predicted_s, measured_s, unplanned_s : seconds of the step; the last two measured, the better of
        two runs
    different : outputs or results, gradients, buffers and variables that are not bit-equal to the
        unplanned run's
    difference : the largest of their differences, relative to the size of the tensor. A tensor that
        is zero except for rounding has another reference: see `model/results.py` of the rim.
    allocated_peak_bytes : of the planned step, in blocks of TensorFlow's allocator: the requested
        bytes, and those by which its blocks were larger. None with torch.
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
    _planned: PlannedRecord[Any, Any] = field(repr=False, compare=False)
    allocated_peak_bytes: int | None = None

    @property
    def equal(self) -> bool:
        """Whether everything compared is bit-equal."""
        return not self.different

    @property
    def error(self) -> float:
        """Measured peak divided by predicted peak, minus one."""
        return self.measured_peak_bytes / self.predicted_peak_bytes - 1

    def report(self, path: str | Path) -> None:
        """Write the plan's HTML page; needs matplotlib."""
        self._planned.report(path)

    def __str__(self) -> str:
        result = "bit-equal"
        if not self.equal:
            few = ", ".join(self.different[:_SHOWN])
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
