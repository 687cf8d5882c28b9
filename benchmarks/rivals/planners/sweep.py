"""Plans of a planner with one free parameter, scored once per graph, for many budgets.

The number (bytes of a segment, capacity of a knapsack, how many storages leave) does not know the
budget, so its plans are the same for every budget. Only their peaks and seconds are remembered:
the plans of a deep net fill memory themselves.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from sn_memory import Graph, Plan


@dataclass(frozen=True)
class _Scored:
    setting: Any
    peak_bytes: int
    seconds: float


# By planner and id of the graph; an entry goes with its graph, before the id can come again.
_SCORED: dict[tuple[str, int], list[_Scored]] = {}


def best_of_sweep(
    graph: Graph,
    planner: str,
    settings: Callable[[], Iterable[Any]],
    build: Callable[[Any], Plan],
    budget_bytes: int | None,
) -> Plan:
    """Return the fastest plan that keeps the budget, else the one of least peak.

    Parameters
    ----------
    settings
        All settings of the free number, hashable; asked once per graph.
    build
        Makes the plan of a setting.
    """
    key = (planner, id(graph))
    if key not in _SCORED:
        scored: list[_Scored] = []
        for setting in dict.fromkeys(settings()):
            plan = build(setting)
            scored.append(_Scored(setting, plan.peak_bytes, plan.seconds))
        _SCORED[key] = scored
        weakref.finalize(graph, _SCORED.pop, key, None)
    scored = _SCORED[key]
    fitting = [
        plan for plan in scored if budget_bytes is not None and plan.peak_bytes <= budget_bytes
    ]
    if not fitting:
        least = min(scored, key=lambda plan: (plan.peak_bytes, plan.seconds))
        return build(least.setting)
    best = min(fitting, key=lambda plan: (plan.seconds, plan.peak_bytes))
    return replace(build(best.setting), budget_bytes=budget_bytes)
