"""Choices to start from: what a relaxation keeps, what another planner rebuilds."""

from __future__ import annotations

from ...graph.holes import KEEP, Holes
from ..bound import Relaxed
from ..plan import Plan


def start_from_relaxed(shape: Holes, relaxed: Relaxed) -> list[int]:
    """Return the choice that keeps what the relaxation has at least half of, at its op."""
    choice = shape.natural()
    for storage, kept in relaxed.kept.items():
        for hole in shape.of(storage):
            spans = shape.start[hole] < relaxed.at < shape.end[hole]
            if spans and shape.rebuildable[storage] and not shape.stays[hole]:
                choice[hole] = KEEP if kept > 0.5 else 0
    return choice


def starts_from_plan(shape: Holes, plan: Plan) -> tuple[list[int], list[int]]:
    """Return choices that rebuild what a plan rebuilds; what it moves to the host is kept here.

    Two of them: with storages held after their last use for what is rebuilt from them, as the
    planners of the literature do, and without.
    """
    choice = shape.natural()
    for decision in plan.decisions:
        storage = shape.graph.storage_index[decision.storage]
        if not shape.rebuildable[storage] or not decision.technique.startswith("recompute"):
            continue
        for hole in shape.of(storage):
            after = shape.start[hole] >= shape.start[shape.main(storage)]
            if after and not shape.stays[hole]:
                each = decision.technique == "recompute_each"
                choice[hole] = len(shape.graph.ops) if each else 0
                if not each:
                    break
    held = list(choice)
    for last in (first - 1 for first in shape.first[1:]):
        if last >= 0 and held[last] == 0:
            held[last] = KEEP
    return held, choice
