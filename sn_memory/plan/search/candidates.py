"""Candidates that the search has found for a graph: feasible choices, and their schedules.

All of them are kept. A front over many budgets is monotone by construction, because each budget
takes the fastest of all candidates within it, whatever budget they were found for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...base.progress import late_or_units
from ...cost.offload import BOTH, Impossible, Schedule, equip, host_peak_bytes, lane_seconds
from ...graph.liveness import KEEP, Holes
from ..simulate import compiled, simulate, simulate_moved

# Graphs of up to this many ops are simulated for every decision that `trim` may undo.
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
    """Drop storages until the true peak is within the budget.

    `factors`, one per hole, multiply the prices, which changes the order.
    Returns the choice and its schedule, or None if nothing is left to drop or time is up.
    """
    until = late_or_units(deadline)
    fitted = compiled(holes).fit(choice, budget_bytes, until, moves, rounds, factors)
    return None if fitted is None else (fitted, simulate(holes, fitted, moves))


def trim(
    holes: Holes,
    choice: Sequence[int],
    budget_bytes: int,
    *,
    deadline: float,
    moves: dict[int, tuple[int, int]] | None = None,
) -> tuple[list[int], Schedule]:
    """Undo decisions, the most expensive first, where the budget allows and seconds are saved."""
    # On larger graphs, only try storages that fit at every op of the hole: ten times cheaper, but
    # misses cases where fewer rebuilds make room (1.7 points on ResNet-50, decision 75).
    filtered = len(holes.graph.ops) > TRY_ALL
    order = _dearest(holes, choice)
    until = late_or_units(deadline)
    trimmed = compiled(holes).trim(choice, order, budget_bytes, until, moves, filtered=filtered)
    return trimmed, simulate(holes, trimmed, moves)


def _dearest(holes: Holes, choice: Sequence[int]) -> list[int]:
    """Return the holes dropped before a later use, the most expensive per byte first."""
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


@dataclass(frozen=True)
class Candidate:
    """A choice with moved holes, simulated.

    choice : see `simulate`
    moved : the holes that are spent on the host, each with the copies that ops wait for: see
        `windows`.
    schedule, seconds : the result
    origin : how it was found
    """

    choice: list[int] = field(repr=False)
    moved: Mapping[int, int]
    schedule: Schedule = field(repr=False)
    seconds: float
    origin: str = ""

    @property
    def peak_bytes(self) -> int:
        return self.schedule.peak_bytes


def finished(
    shape: Holes, choice: Sequence[int], schedule: Schedule, moved: Mapping[int, int]
) -> Candidate | None:
    """Return the candidate of a schedule; None if the host is too small for it."""
    pinned = shape.graph.device.pinned_bytes
    if pinned is not None and host_peak_bytes(shape, schedule) > pinned:
        return None
    return Candidate(list(choice), dict(moved), schedule, lane_seconds(shape, schedule))


def carried(shape: Holes, choice: Sequence[int], moved: Mapping[int, int]) -> Candidate | None:
    """Simulate a choice with moved holes; None if it is impossible, or the host too small."""
    try:
        schedule, _ = simulate_moved(shape, choice, moved)
    except Impossible:
        return None
    return finished(shape, choice, schedule, moved)


def all_moved(shape: Holes) -> Candidate | None:
    """Return the smallest candidate without rebuilds: everything is moved between its uses."""
    leaves = [hole for hole in range(shape.count) if shape.may_leave(hole)]
    return carried(shape, shape.natural(), dict.fromkeys(leaves, BOTH))


class Archive:
    """Candidates for one graph; the first is the graph without a plan."""

    def __init__(self, shape: Holes) -> None:
        self.shape = shape
        self.items: list[Candidate] = []
        self.with_ways: dict[tuple[int, int], Candidate] = {}
        self.choosy = any(len(ways) > 1 for ways in shape.graph.arrays.seconds)
        # Nothing is moved, so it is never refused: any graph has a first candidate.
        natural = shape.natural()
        self.add(natural, simulate(shape, natural), "keep")

    def add(
        self,
        choice: Sequence[int],
        schedule: Schedule,
        origin: str,
        moved: Mapping[int, int] | None = None,
    ) -> None:
        """Add a candidate, unless it exceeds the host's limit."""
        candidate = finished(self.shape, choice, schedule, moved or {})
        if candidate is not None:
            self.items.append(replace(candidate, origin=origin))

    def best(self, budget_bytes: int) -> Candidate | None:
        """Return the fastest candidate within a budget; among equals the smallest peak.

        Where ops have several ways, each candidate uses its free memory for faster ones.
        """
        # Holes are priced with the smallest workspaces, so that no candidate is missed here.
        within = [item for item in self.items if item.peak_bytes <= budget_bytes]
        # Which one is fastest depends on the ways that each has room for.
        if self.choosy:
            within = [self.equipped(item, budget_bytes) for item in within]
        return min(within, key=lambda item: (item.seconds, item.peak_bytes), default=None)

    def smallest(self) -> Candidate:
        """Return the candidate of the smallest peak; among equals the fastest."""
        return min(self.items, key=lambda item: (item.peak_bytes, item.seconds))

    def start(self, budget_bytes: int) -> Candidate:
        """Return the candidate to improve: the fastest within the budget, else the smallest."""
        within = [item for item in self.items if item.peak_bytes <= budget_bytes]
        return min(within, key=lambda item: item.seconds, default=self.smallest())

    def equipped(self, item: Candidate, budget_bytes: int) -> Candidate:
        """Return a candidate with the fastest way for each op that fits the budget."""
        # By id, which is unique as the archive keeps all candidates.
        key = (id(item), budget_bytes)
        if key not in self.with_ways:
            schedule = equip(self.shape, item.schedule, budget_bytes)
            self.with_ways[key] = replace(
                item, schedule=schedule, seconds=lane_seconds(self.shape, schedule)
            )
        return self.with_ways[key]
