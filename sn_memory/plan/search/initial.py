"""Choices to start from: what a relaxation keeps, what another planner rebuilds."""

from __future__ import annotations

from ...graph.idle import KEEP, Gaps
from ..bound import Relaxed
from ..plan import Plan


def start_from_relaxed(shape: Gaps, relaxed: Relaxed) -> list[int]:
    """Return the choice that keeps what the relaxation has at least half of, at its op."""
    choice = shape.natural()
    for storage, kept in relaxed.kept.items():
        for gap in shape.of(storage):
            spans = shape.start[gap] < relaxed.at < shape.end[gap]
            if spans and shape.rebuildable[storage] and not shape.stays[gap]:
                choice[gap] = KEEP if kept > 0.5 else 0
    return choice


def starts_from_plan(shape: Gaps, plan: Plan) -> tuple[list[int], list[int]]:
    """Return choices that rebuild what a plan rebuilds; what it moves to the host is kept here.

    Two of them: with storages held after their last use for what is rebuilt from them, as the
    planners of the literature do, and without.
    """
    choice = shape.natural()
    for decision in plan.decisions:
        storage = shape.graph.storage_index[decision.storage]
        if not shape.rebuildable[storage] or not decision.action.startswith("recompute"):
            continue
        for gap in shape.of(storage):
            after = shape.start[gap] >= shape.start[shape.main(storage)]
            if after and not shape.stays[gap]:
                each = decision.action == "recompute_each"
                choice[gap] = len(shape.graph.ops) if each else 0
                if not each:
                    break
    held = list(choice)
    for last in (first - 1 for first in shape.first[1:]):
        if last >= 0 and held[last] == 0:
            held[last] = KEEP
    return held, choice
