"""Fitting a choice under a budget by the prices of rebuilds, and taking back what was not needed.

`fit` lets go what relieves the most over-budget bytes per second of closure (`recompute.py`),
simulates the choice, looks at the true peak, and repeats; `trim` then takes decisions back. Both
run in the compiled extension (csrc/memory/fitting.cpp).
"""

from __future__ import annotations

from collections.abc import Sequence

from ...base.clock import late_or_units
from ...cost.schedule import Schedule
from ...graph.holes import KEEP, Holes
from ..simulate import compiled, simulate

# Graphs of up to this many ops are simulated for every decision that `trim` might take back.
TRY_ALL = 6000


def fit(
    holes: Holes,
    choice: Sequence[int],
    budget_bytes: int,
    *,
    deadline: float,
    moves: dict[int, tuple[int, int]] | None = None,
    rounds: int = 200,
    factors: Sequence[float] = (),
) -> tuple[list[int], Schedule] | None:
    """Let storages go until the true peak is within the budget.

    `factors`, one per hole, are multiplied to the prices: other factors, another order.
    Returns the choice and its schedule, or None if this way leads nowhere or time is over.
    """
    until = late_or_units(deadline)
    found = compiled(holes).fit(choice, budget_bytes, until, moves, rounds, factors)
    return None if found is None else (found, simulate(holes, found, moves))


def trim(
    holes: Holes,
    choice: Sequence[int],
    budget_bytes: int,
    *,
    deadline: float,
    moves: dict[int, tuple[int, int]] | None = None,
) -> tuple[list[int], Schedule]:
    """Take decisions back, dearest first, where the budget allows and seconds are saved.

    On large graphs, where that is dear, only what fits into the room left at every op of the
    hole is tried; that misses cases where fewer rebuilds make the room.
    """
    filtered = len(holes.graph.ops) > TRY_ALL
    order = _dearest(holes, choice)
    until = late_or_units(deadline)
    found = compiled(holes).trim(choice, order, budget_bytes, until, moves, filtered=filtered)
    return found, simulate(holes, found, moves)


def _dearest(holes: Holes, choice: Sequence[int]) -> list[int]:
    """Return the holes let go before a later use, dearest per byte first."""
    inner = [
        hole
        for hole, held in enumerate(choice)
        if held != KEEP and hole + 1 < holes.first[holes.storage[hole] + 1]
    ]
    price = {
        hole: sum(holes.seconds[op] for op in holes.chain[holes.storage[hole]])
        / max(1, holes.bytes[holes.storage[hole]])
        for hole in inner
    }
    return sorted(inner, key=lambda hole: -price[hole])
