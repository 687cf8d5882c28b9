"""Choose which parts of a model to recompute by measured steps, without a graph to predict from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ..base.sizes import decided_line, peak_line, seconds_line, show_bytes
from ..plan.plan import BudgetError, Plan, budget_line, percent_kept


@dataclass(frozen=True)
class Choice:
    """The decision for what a part saves for the backward pass.

    name : a module's or a layer's path, or "first to last" for several layers
    technique : `keep` or `recompute`
    saved_bytes : saved besides parameters and its inputs or results, measured
    seconds : of its forward pass, measured; the cost of recomputing it
    """

    name: str
    technique: str
    saved_bytes: int
    seconds: float


@dataclass(frozen=True, repr=False)
class MeasuredPlan:
    """Which parts are recomputed, and the memory and time measured on the sample.

    choices : one for each part that could be chosen
    budget_bytes : the budget
    peak_bytes, baseline_peak_bytes : measured with the plan and without; 0 if no such step was run.
    seconds, baseline_seconds : `baseline_seconds` was timed without the plan (torch: a step;
        TensorFlow: the forward pass of all layers); `seconds` adds the cost of the reruns.
    peak_op : the op that holds the most at the peak
    runs : over how many runs of the step, with other samples or random seeds, the peak is the
        maximum; 1 for a model whose ops do not depend on random numbers.
    """

    choices: tuple[Choice, ...]
    budget_bytes: int
    peak_bytes: int
    baseline_peak_bytes: int
    seconds: float
    baseline_seconds: float
    peak_op: str
    runs: int = 1

    def __repr__(self) -> str:
        of = "" if self.runs == 1 else f", the peak is that of the largest of {self.runs}"
        return "\n".join(
            (
                f"Plan by measured steps{of}",
                peak_line(self.budget_bytes, self.baseline_peak_bytes, self.peak_bytes),
                decided_line(
                    ((choice.technique, choice.saved_bytes) for choice in self.choices), "parts"
                ),
                seconds_line(self.baseline_seconds, self.seconds),
            )
        )

    def decided(self, technique: str) -> tuple[str, ...]:
        """Return the names of the parts with this technique."""
        return tuple(choice.name for choice in self.choices if choice.technique == technique)


class Part(Protocol):
    """A part that may be recomputed: its forward seconds, and bytes saved for the backward pass."""

    @property
    def name(self) -> str: ...
    @property
    def seconds(self) -> float: ...
    @property
    def saved_bytes(self) -> int: ...


class Step(Protocol):
    """A measured step."""

    @property
    def peak_bytes(self) -> int: ...
    @property
    def peak_op(self) -> str: ...


P = TypeVar("P", bound=Part)
S = TypeVar("S", bound=Step)


def min_recompute(
    parts: Sequence[P],
    smallest: S,
    measured: Callable[[Sequence[P]], S],
    *,
    budget_bytes: int,
    baseline_bytes: int,
    how: str,
) -> tuple[list[P], S]:
    """Return the parts to recompute within a budget, and that step.

    Parts whose rerun costs most per byte are kept first, as many as fit, by bisection. Keeping all
    of them is not an option: that step exceeded the budget, and measured again it may be below it
    by chance.

    parts, smallest : all parts that may be recomputed, and the step in which all are
    measured : measures a step in which the given parts are recomputed
    baseline_bytes : the peak without the plan
    how : what was tried, the beginning of the error

    Raises BudgetError if even the smallest step is above the budget.
    """
    if smallest.peak_bytes > budget_bytes:
        percent = percent_kept(smallest.peak_bytes, baseline_bytes)
        share = f', or "{percent}%" of the unplanned peak' if percent else ""
        raise BudgetError(
            f"{how}, the model needs {show_bytes(smallest.peak_bytes)} on the sample; the "
            f"{budget_line(budget_bytes, smallest.peak_bytes)}. The smallest budget that can be "
            f"kept is {smallest.peak_bytes} bytes{share}. Raise the budget, make the batch "
            "smaller, or change the model so that it can be traced.",
            peak_bytes=smallest.peak_bytes,
            budget_bytes=budget_bytes,
            op=smallest.peak_op,
            percent=percent,
        )
    # A part that saves nothing is kept first: its rerun would cost time and free no bytes.
    order = sorted(parts, key=lambda part: -part.seconds / max(1, part.saved_bytes))
    best, low, high = smallest, 0, len(order)
    # Never with `middle` at the end of `order`, where nothing would be recomputed.
    while high - low > 1:
        # The first `middle` are kept; assumed to need more memory the more are kept.
        middle = (low + high) // 2
        step = measured(order[middle:])
        if step.peak_bytes <= budget_bytes:
            low, best = middle, step
        else:
            high = middle
    return order[low:], best


def measured_plan(
    parts: Sequence[P],
    rerun: Sequence[P],
    best: S,
    baseline: S,
    *,
    budget_bytes: int,
    baseline_seconds: float,
    runs: int = 1,
) -> MeasuredPlan:
    """Return the plan in which the parts of `rerun` are recomputed.

    parts : all that could be chosen
    best, baseline : the step with the plan, and without
    baseline_seconds : timed without the plan
    runs : see MeasuredPlan
    """
    # By id, as two may have one name: a layer that is called twice.
    chosen = {id(part) for part in rerun}
    return MeasuredPlan(
        choices=tuple(
            Choice(
                part.name,
                "recompute" if id(part) in chosen else "keep",
                part.saved_bytes,
                part.seconds,
            )
            for part in parts
        ),
        budget_bytes=budget_bytes,
        peak_bytes=best.peak_bytes,
        baseline_peak_bytes=baseline.peak_bytes,
        seconds=baseline_seconds + sum(part.seconds for part in rerun),
        baseline_seconds=baseline_seconds,
        peak_op=best.peak_op,
        runs=runs,
    )


def summary(plan: Plan | MeasuredPlan) -> str:
    """Summarize peaks and cost in one line, as far as they were measured."""
    if not plan.baseline_peak_bytes:
        return f"peak {show_bytes(plan.peak_bytes)}" if plan.peak_bytes else "not measured"
    extra = plan.seconds / plan.baseline_seconds - 1 if plan.baseline_seconds else 0.0
    peaks = f"{show_bytes(plan.baseline_peak_bytes)} -> {show_bytes(plan.peak_bytes)}"
    return f"peak {peaks}, {extra:+.1%} time"
