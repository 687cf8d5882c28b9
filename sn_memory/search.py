"""One search: the candidates found so far for a graph, and the ways to find more.

Each way starts from another idea of what to keep (nothing, what the linear relaxation keeps, what
the chain of blocks keeps), is repaired against the true peak and trimmed. All that was found stays
in an archive, so a front over many budgets is monotone by construction: for each budget it takes
the fastest of all candidates within it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from .bound import Relaxed, moments, relax
from .chain import Chain
from .clock import now
from .fitting import fit, trim
from .gaps import Gaps
from .joint import Joint, from_relaxed, improve
from .lowering import lower
from .offload import host_peak_bytes, lane_seconds
from .plan import Plan
from .refine import descend, refine
from .schedule import Impossible, Schedule
from .starts import start_from_relaxed, starts_from_plan
from .workspace import equip

log = logging.getLogger(__name__)
# A candidate this close to the bound ends the search.
ENOUGH = 1e-4
# One this close to it needs no other start.
NEAR = 0.01
# Above this many ops a single lowering takes so long that the order of the ways matters.
LARGE = 4000
# Up to this many ops, ruin and repair is worth its time; attempts times ops, and attempts at most.
SMALL = 6000
TRIES, MOST_TRIES = 600_000, 600

Progress = Callable[[str, float | None], None]


@dataclass(frozen=True)
class Candidate:
    """A choice that can be carried out, and what it leads to."""

    choice: list[int] = field(repr=False)
    schedule: Schedule = field(repr=False)
    seconds: float
    origin: str
    moved: frozenset[int] = frozenset()

    @property
    def peak_bytes(self) -> int:
        return self.schedule.peak_bytes


class Search:
    """The state of planning one graph: its gaps, its archive and its clock.

    Parameters
    ----------
    shape
        The gaps of the graph.
    offload
        Whether storages may go to the host.
    recompute
        Whether ops may run twice.
    deadline
        Moment of `clock.now()` after which no new attempt starts.
    progress
        Called with a line of text and the seconds of the best candidate so far, after each attempt.
    """

    def __init__(
        self,
        shape: Gaps,
        *,
        offload: bool,
        recompute: bool,
        deadline: float,
        progress: Progress | None = None,
    ) -> None:
        self.shape, self.deadline, self.progress = shape, deadline, progress
        self.recompute = recompute
        self.offload = offload and shape.graph.device.can_offload
        self.archive: list[Candidate] = []
        self.bounds: dict[tuple[int, int], Relaxed | None] = {}
        self.with_ways: dict[tuple[int, int], Candidate] = {}
        self.choosy = any(len(ways) > 1 for ways in shape.graph.arrays.seconds)
        natural = shape.natural()
        self.add(natural, lower(shape, natural), "keep")

    @property
    def patience_s(self) -> float:
        """Limit of one linear program: it counts the clock on the wall, so it must not decide."""
        return 10 * max(1.0, self.deadline - now())

    @property
    def tries(self) -> int:
        """Attempts without gain after which ruin and repair ends."""
        return min(MOST_TRIES, max(50, TRIES // max(1, len(self.shape.graph.ops))))

    @property
    def late(self) -> bool:
        return now() > self.deadline

    def add(
        self,
        choice: Sequence[int],
        schedule: Schedule,
        origin: str,
        moved: frozenset[int] = frozenset(),
    ) -> Candidate | None:
        """Put a candidate into the archive, unless it breaks the host's limit."""
        pinned = self.shape.graph.device.pinned_bytes
        if pinned is not None and host_peak_bytes(self.shape, schedule) > pinned:
            return None
        seconds = lane_seconds(self.shape, schedule)
        candidate = Candidate(list(choice), schedule, seconds, origin, moved)
        self.archive.append(candidate)
        return candidate

    def best(self, budget_bytes: int) -> Candidate | None:
        """Return the fastest candidate within a budget; among equals the smallest peak.

        Where ops can be carried out in several ways, each candidate uses what it leaves free.
        """
        within = [item for item in self.archive if item.peak_bytes <= budget_bytes]
        if self.choosy:
            within = [self.equipped(item, budget_bytes) for item in within]
        return min(within, key=lambda item: (item.seconds, item.peak_bytes), default=None)

    def equipped(self, item: Candidate, budget_bytes: int) -> Candidate:
        key = (id(item), budget_bytes)
        if key not in self.with_ways:
            schedule = equip(self.shape, item.schedule, budget_bytes)
            self.with_ways[key] = replace(
                item, schedule=schedule, seconds=lane_seconds(self.shape, schedule)
            )
        return self.with_ways[key]

    def bound(self, budget_bytes: int, places: Sequence[int] | None = None) -> float:
        """Return the lower bound on the seconds of any plan within a budget."""
        shape = self.shape
        least = sum(min(options) for options in shape.graph.arrays.seconds)
        if self.archive[0].peak_bytes <= budget_bytes and not self.choosy:
            return least
        if not self.recompute and not self.offload:
            return least
        for at in moments(shape) if places is None else places:
            found = self.relaxed(at, budget_bytes)
            if found is not None:
                # The solver's answer is exact to about 1e-7; what is promised is cut by ten times
                # that.
                least = max(least, found.seconds * (1 - 1e-6))
            if self.late:
                break
        return least

    def relaxed(self, at: int, budget_bytes: int) -> Relaxed | None:
        """Return the relaxation at an op, solved once per budget."""
        key = (at, budget_bytes)
        if key not in self.bounds:
            self.bounds[key] = relax(
                self.shape,
                at,
                budget_bytes,
                offload=self.offload,
                recompute=self.recompute,
                time_limit_s=self.patience_s,
            )
        return self.bounds[key]

    def attempt(
        self,
        choice: Sequence[int],
        budget_bytes: int,
        origin: str,
        moves: dict[int, tuple[int, int]] | None = None,
    ) -> Candidate | None:
        """Fit a choice under a budget and trim it; what results goes into the archive."""
        # No attempt takes more than a part of what is left, so that the others get their turn.
        began = now()
        part = began + (self.deadline - began) / 4
        fitted = fit(self.shape, choice, budget_bytes, deadline=part, moves=moves)
        if fitted is None:
            return None
        self.add(*fitted, origin)
        part += (self.deadline - began) / 8
        trimmed = trim(self.shape, *fitted, budget_bytes, deadline=part, moves=moves)
        found = self.add(*trimmed, f"{origin}, trimmed")
        self.report(origin, budget_bytes)
        return found

    def report(self, origin: str, budget_bytes: int) -> None:
        best = self.best(budget_bytes)
        if self.progress is not None:
            self.progress(origin, None if best is None else best.seconds)

    def solve(self, budget_bytes: int) -> Candidate | None:
        """Look for a fast candidate within a budget, by all ways; return the best."""
        best = self.best(budget_bytes)
        if best is not None and best.origin == "keep":
            return best
        if not self.recompute and not self.offload:
            return best
        target = self.bound(budget_bytes) * (1 + ENOUGH)
        for way in self._ways(budget_bytes):
            way()
            best = self.best(budget_bytes)
            if self.late or (best is not None and best.seconds <= target):
                break
        if self.recompute and len(self.shape.graph.ops) <= SMALL:
            best = self.best(budget_bytes)
            if best is None or best.seconds > target * (1 + NEAR):
                self.descend(budget_bytes)
            self.refined(budget_bytes, target)
        return self.best(budget_bytes)

    def descend(self, budget_bytes: int) -> None:
        """Go down from the candidate that is fastest for what it needs above the budget."""
        above = [item for item in self.archive if item.peak_bytes > budget_bytes]
        start = min(above, key=lambda item: (item.seconds, item.peak_bytes), default=None)
        lower = [item for item in above if item.origin == "descent"]
        start = min(lower, key=lambda item: item.peak_bytes, default=start)
        if start is None:
            return
        part = now() + (self.deadline - now()) / 3
        for found in descend(
            self.shape,
            Joint(start.choice, start.moved, start.schedule, start.seconds),
            budget_bytes,
            offload=self.offload,
            tries=self.tries // 5,
            deadline=part,
        ):
            self.add(found.choice, found.schedule, "descent", found.moved)
        self.report("descent", budget_bytes)

    def from_plan(self, plan: Plan, budget_bytes: int) -> None:
        """Start from what another planner rebuilds."""
        for start in starts_from_plan(self.shape, plan):
            if self.lowered(start) is not None:
                self.attempt(start, budget_bytes, plan.planner)

    def refined(self, budget_bytes: int, target: float) -> None:
        """Improve the best candidate by ruin and repair."""
        within = [item for item in self.archive if item.peak_bytes <= budget_bytes]
        best = min(within, key=lambda item: item.seconds, default=None)
        if best is None or best.seconds <= target:
            return
        found = refine(
            self.shape,
            Joint(best.choice, best.moved, best.schedule, best.seconds),
            budget_bytes,
            offload=self.offload,
            enough_s=target,
            tries=self.tries,
            deadline=self.deadline,
        )
        self.add(found.choice, found.schedule, "ruin and repair", found.moved)
        self.report("ruin and repair", budget_bytes)

    def _ways(self, budget_bytes: int) -> list[Callable[[], object]]:
        """Return the ways to look, those first that most often end the search.

        On large graphs the chain comes first: it solves equal blocks once.
        """
        natural = self.shape.natural()
        greedy = partial(self.attempt, natural, budget_bytes, "greedy")
        relaxed = [
            partial(self.from_relaxation, budget_bytes, share) for share in (1.0, 0.95, 0.9, 0.8)
        ]
        lanes = partial(self.with_lanes, budget_bytes)
        chain = partial(self.from_chain, budget_bytes)
        ways: list[Callable[[], object]] = [lanes] if self.offload else []
        if self.recompute and len(self.shape.graph.ops) > LARGE:
            ways = [chain, greedy, *relaxed[:1], *ways]
        elif self.recompute:
            ways += [greedy, *relaxed[:1], chain, *relaxed[1:]]
        return ways

    def with_lanes(self, budget_bytes: int) -> None:
        """Start from relaxations that may use the lanes, at some shares of their speed."""
        at = moments(self.shape, 1)[0]
        starts: list[Joint] = []
        for lanes in (1.0, 0.8, 0.6, 0.4):
            if self.late:
                break
            relaxed = relax(
                self.shape,
                at,
                budget_bytes,
                offload=True,
                recompute=self.recompute,
                lanes=lanes,
                time_limit_s=self.patience_s,
            )
            start = None
            if relaxed is not None:
                start = from_relaxed(
                    self.shape,
                    relaxed,
                    budget_bytes,
                    recompute=self.recompute,
                    deadline=self.deadline,
                )
            if start is not None:
                starts.append(start)
                self.add(start.choice, start.schedule, "lanes", start.moved)
                self.report(f"lanes at {lanes:.0%}", budget_bytes)
        if not starts:
            return
        # Half of what time is left: the ways without lanes want a turn as well.
        half = now() + (self.deadline - now()) / 2
        best = min(starts, key=lambda item: item.seconds)
        found = improve(self.shape, best, budget_bytes, recompute=self.recompute, deadline=half)
        self.add(found.choice, found.schedule, "lanes, improved", found.moved)
        self.report("lanes, improved", budget_bytes)

    @cached_property
    def chain(self) -> Chain:
        """The blocks of the graph and their table, made at first need."""
        half = now() + (self.deadline - now()) / 2
        return Chain(self.shape, self.archive[0].peak_bytes, deadline=half)

    def from_chain(self, budget_bytes: int) -> None:
        """Start from the chain's checkpoints, for the largest table budget that really fits.

        The table rounds up and adds peaks that do not meet, so what it calls a larger budget often
        fits; which one is found by bisection on the true peak.
        """
        low, high = budget_bytes, self.archive[0].peak_bytes
        first: list[int] | None = None
        for _ in range(8):
            if self.late and first is not None:
                break
            middle = (low + high) // 2 if first is not None else low
            choice = self.chain.choice(middle)
            schedule = None if choice is None else self.lowered(choice)
            if choice is not None and schedule is not None and first is None:
                first = choice
            if choice is not None and schedule is not None:
                self.add(choice, schedule, "chain")
            fits = schedule is not None and schedule.peak_bytes <= budget_bytes
            if middle == low and not fits:
                break
            low, high = (middle, high) if fits else (low, middle)
        starts = [self.chain.choice(low)]
        for start in starts:
            if start is not None:
                self.attempt(start, budget_bytes, "chain")

    def lowered(self, choice: Sequence[int]) -> Schedule | None:
        try:
            return lower(self.shape, choice)
        except Impossible:
            return None

    def from_relaxation(self, budget_bytes: int, share: float) -> None:
        """Start from what the relaxation keeps, with part of the budget left for rebuilds."""
        at = moments(self.shape, 1)[0]
        base = self.shape.graph.base_bytes
        room = base + int((budget_bytes - base) * share)
        relaxed = relax(self.shape, at, room, offload=False)
        if relaxed is None:
            return
        choice = start_from_relaxed(self.shape, relaxed)
        if self.lowered(choice) is None:
            return
        self.attempt(choice, budget_bytes, f"relaxation at {share:.0%}")
