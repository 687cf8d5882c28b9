"""Plans for several budgets: looked for from the largest down, so that what is found serves all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..base.clock import now
from .plan import Plan


def answers(
    budgets: Sequence[int], look: Callable[[int], None], answer: Callable[[int, float], Plan]
) -> list[Plan]:
    """Look for plans from the largest budget down; return one for each, with its seconds."""
    spent: dict[int, float] = {}
    for budget in sorted(set(budgets), reverse=True):
        began = now()
        look(budget)
        spent[budget] = now() - began
    return [answer(budget, spent[budget]) for budget in budgets]
