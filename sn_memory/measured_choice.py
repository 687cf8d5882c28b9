"""Which parts of a model to run again, where each choice is measured: no graph to predict from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from .errors import BudgetError
from .sizes import show_bytes


class Part(Protocol):
    """What may run again: its forward seconds, and the bytes it leaves for the backward pass."""

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


def fewest_again(
    parts: Sequence[P],
    smallest: S,
    measured: Callable[[Sequence[P]], S],
    *,
    budget_bytes: int,
    how: str,
) -> tuple[list[P], S]:
    """Return the parts to run again within a budget, and that step.

    Kept first are those whose rerun costs most for a byte; as many as fit, by bisection.

    Parameters
    ----------
    parts, smallest
        All that may run again, and the step in which all do.
    measured
        Measures a step in which these parts run again.
    how
        What was tried, as an error begins.

    Raises
    ------
    BudgetError
        If even the smallest step is above the budget.
    """
    if smallest.peak_bytes > budget_bytes:
        raise BudgetError(
            f"{how}, the model needs {show_bytes(smallest.peak_bytes)} on the "
            f"sample; the budget is {show_bytes(budget_bytes)}. Raise the budget, make the "
            "batch smaller, or change the model so that it can be traced.",
            peak_bytes=smallest.peak_bytes,
            budget_bytes=budget_bytes,
            op=smallest.peak_op,
        )
    order = sorted(parts, key=lambda it: -it.seconds / max(1, it.saved_bytes))
    best, low, high = smallest, 0, len(order) + 1
    while high - low > 1:
        middle = (low + high) // 2
        found = measured(order[middle:])
        if found.peak_bytes <= budget_bytes:
            low, best = middle, found
        else:
            high = middle
    return order[low:], best
