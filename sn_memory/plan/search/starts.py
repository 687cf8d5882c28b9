"""Choices to start from: by what a relaxation keeps and moves, or what another planner rebuilds."""

from __future__ import annotations

from collections.abc import Mapping

from ...cost.offload import BESIDE, BOTH
from ...cost.schedule import Impossible
from ...graph.holes import KEEP, Holes
from ..bound import Relaxed
from ..plan import Plan
from ..simulate import simulate_moved
from .candidates import Candidate, carried
from .fit import fit


def start_from_relaxed(shape: Holes, relaxed: Relaxed) -> list[int]:
    """Return the choice that keeps what the relaxation has at least half of, at its op."""
    return _split(shape, relaxed, recompute=True)[0]


def _split(shape: Holes, relaxed: Relaxed, *, recompute: bool) -> tuple[list[int], list[int]]:
    """Return the choice that a relaxation rounds to, and the holes that it moves to the host."""
    choice, moved = shape.natural(), []
    for storage, kept in relaxed.kept.items():
        for hole in shape.of(storage):
            spans = shape.start[hole] < relaxed.at < shape.end[hole]
            if not spans or shape.stays[hole]:
                continue
            if shape.bytes[storage] and relaxed.moved[storage] > max(0.5, kept):
                # The host copy is the storage: nothing of it is to be rebuilt from elsewhere.
                choice[hole] = KEEP
                if hole + 1 < shape.first[storage + 1]:
                    moved.append(hole)
            elif recompute and shape.rebuildable[storage]:
                choice[hole] = KEEP if kept > 0.5 else 0
    return choice, moved


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


def from_relaxed(
    shape: Holes, relaxed: Relaxed, budget_bytes: int, *, recompute: bool, deadline: float
) -> list[Candidate]:
    """Make a relaxation's split between host and rebuilds whole, within the budget.

    Moved holes get windows, the rest is fitted; where windows leave too much on the device, ops
    wait for the copies.
    """
    choice, moved = _split(shape, relaxed, recompute=recompute)
    found: list[Candidate] = []
    for waits in (BESIDE, BOTH):
        start = _within(
            shape, choice, dict.fromkeys(moved, waits), budget_bytes,
            recompute=recompute, deadline=deadline,
        )  # fmt: skip
        if start is not None:
            found.append(start)
            if start.choice == choice:
                break
    return found


def _within(
    shape: Holes,
    choice: list[int],
    moved: Mapping[int, int],
    budget_bytes: int,
    *,
    recompute: bool,
    deadline: float,
) -> Candidate | None:
    """Carry out what keeps the budget; what does not is fitted, where ops may run twice."""
    start = carried(shape, choice, moved)
    if start is None or start.schedule.peak_bytes <= budget_bytes:
        return start
    if not recompute:
        return None
    try:
        _, windows = simulate_moved(shape, choice, moved)
        fitted = fit(shape, choice, budget_bytes, deadline=deadline, moves=windows)
    except Impossible:
        return None
    if fitted is None:
        return None
    again = carried(shape, fitted[0], moved)
    return again if again is not None and again.schedule.peak_bytes <= budget_bytes else None
