"""The candidates found so far for a graph: all of them stay.

A front over many budgets is monotone by construction when each budget takes the fastest of all
candidates within it, whatever budget they were found for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...cost.offload import host_peak_bytes, lane_seconds
from ...cost.schedule import Schedule, equip
from ...graph.holes import Holes
from ..simulate import simulate
from .mixed import Mixed


@dataclass(frozen=True)
class Candidate:
    """A choice that can be carried out, and what it leads to."""

    choice: list[int] = field(repr=False)
    schedule: Schedule = field(repr=False)
    seconds: float
    origin: str
    moved: Mapping[int, int]

    @property
    def peak_bytes(self) -> int:
        return self.schedule.peak_bytes

    @property
    def mixed(self) -> Mixed:
        """The same as a start for improvements."""
        return Mixed(self.choice, self.moved, self.schedule, self.seconds)


class Archive:
    """Candidates for one graph; the first is the graph as it stands."""

    def __init__(self, shape: Holes) -> None:
        self.shape = shape
        self.items: list[Candidate] = []
        self.with_ways: dict[tuple[int, int], Candidate] = {}
        self.choosy = any(len(ways) > 1 for ways in shape.graph.arrays.seconds)
        natural = shape.natural()
        self.add(natural, simulate(shape, natural), "keep")

    def add(
        self,
        choice: Sequence[int],
        schedule: Schedule,
        origin: str,
        moved: Mapping[int, int] | None = None,
    ) -> Candidate | None:
        """Put a candidate in, unless it breaks the host's limit."""
        pinned = self.shape.graph.device.pinned_bytes
        if pinned is not None and host_peak_bytes(self.shape, schedule) > pinned:
            return None
        seconds = lane_seconds(self.shape, schedule)
        candidate = Candidate(list(choice), schedule, seconds, origin, moved or {})
        self.items.append(candidate)
        return candidate

    def best(self, budget_bytes: int) -> Candidate | None:
        """Return the fastest candidate within a budget; among equals the smallest peak.

        Where ops can be carried out in several ways, each candidate uses what it leaves free.
        """
        within = [item for item in self.items if item.peak_bytes <= budget_bytes]
        if self.choosy:
            within = [self.equipped(item, budget_bytes) for item in within]
        return min(within, key=lambda item: (item.seconds, item.peak_bytes), default=None)

    def smallest(self) -> Candidate:
        """Return the candidate of the smallest peak; among equals the fastest."""
        return min(self.items, key=lambda item: (item.peak_bytes, item.seconds))

    def start(self, budget_bytes: int) -> Candidate:
        """Return what to improve for a budget: the fastest within it, else the smallest peak."""
        within = [item for item in self.items if item.peak_bytes <= budget_bytes]
        return min(within, key=lambda item: item.seconds, default=self.smallest())

    def equipped(self, item: Candidate, budget_bytes: int) -> Candidate:
        """Return a candidate with the fastest way for each op that the budget leaves room for."""
        key = (id(item), budget_bytes)
        if key not in self.with_ways:
            schedule = equip(self.shape, item.schedule, budget_bytes)
            self.with_ways[key] = replace(
                item, schedule=schedule, seconds=lane_seconds(self.shape, schedule)
            )
        return self.with_ways[key]
