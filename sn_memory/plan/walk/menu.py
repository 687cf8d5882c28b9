"""Plans of a policy that has one free number, scored once per graph and asked at many budgets.

The number (bytes of a segment, capacity of a knapsack, how many storages leave) does not know the
budget, so its plans are the same for every budget. Only their peaks and seconds are remembered:
the plans of a deep net fill memory themselves.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from ...base.clock import spend, spent_units
from ...graph.graph import Graph
from ..plan import Plan


@dataclass(frozen=True)
class _Scored:
    recipe: Any
    peak_bytes: int
    seconds: float


# By policy and id of the graph; an entry goes with its graph, before the id can come again.
# With the work it took, which counts each time: what is counted depends on the problem alone.
_SCORED: dict[tuple[str, int], tuple[list[_Scored], int]] = {}


def from_menu(
    graph: Graph,
    policy: str,
    recipes: Callable[[], Iterable[Any]],
    cook: Callable[[Any], Plan],
    budget_bytes: int | None,
) -> Plan:
    """Return the fastest plan that keeps the budget, else the one of least peak.

    Parameters
    ----------
    recipes
        All settings of the free number, hashable; asked once per graph.
    cook
        Makes the plan of a setting.
    """
    key = (policy, id(graph))
    if key not in _SCORED:
        scored: list[_Scored] = []
        before = spent_units()
        for recipe in dict.fromkeys(recipes()):
            plan = cook(recipe)
            scored.append(_Scored(recipe, plan.peak_bytes, plan.seconds))
        _SCORED[key] = scored, spent_units() - before
        weakref.finalize(graph, _SCORED.pop, key, None)
    else:
        spend(_SCORED[key][1])
    found = _SCORED[key][0]
    fitting = [it for it in found if budget_bytes is not None and it.peak_bytes <= budget_bytes]
    if not fitting:
        least = min(found, key=lambda it: (it.peak_bytes, it.seconds))
        return cook(least.recipe)
    best = min(fitting, key=lambda it: (it.seconds, it.peak_bytes))
    return replace(cook(best.recipe), budget_bytes=budget_bytes)
