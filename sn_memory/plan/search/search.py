"""The search: the candidates found so far for a graph, and the heuristics that find more.

Each heuristic starts from another choice of what to keep (nothing, what the linear relaxation
keeps, what the chain of blocks keeps), fits it to the budget by its true peak, and trims it. The
best is then improved by annealing and by ruin and repair (`improve.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial

from ...base.progress import is_heard, now, report_progress
from ...cost.offload import BESIDE, BOTH, Impossible, Schedule
from ...graph.liveness import KEEP, Holes
from ..bound import Relaxed, moments, relax
from ..simulate import simulate, simulate_moved
from .candidates import Archive, Candidate, all_moved, carried, fit, trim
from .chain import Chain
from .improve import anneal, improve, refine


def _rounded(shape: Holes, relaxed: Relaxed, *, recompute: bool) -> tuple[list[int], list[int]]:
    """Return the choice that a relaxation rounds to, and the holes that it moves to the host.

    Kept are storages of which it has more than half on the device at its op.
    """
    choice, moved = shape.natural(), []
    for storage, kept in relaxed.kept.items():
        for hole in shape.of(storage):
            spans = shape.start[hole] < relaxed.at < shape.end[hole]
            if not spans or shape.stays[hole]:
                continue
            if shape.bytes[storage] and relaxed.moved[storage] > max(0.5, kept):
                # A storage on the host need not be rebuilt.
                choice[hole] = KEEP
                if hole + 1 < shape.first[storage + 1]:
                    moved.append(hole)
            elif recompute and shape.rebuildable[storage]:
                choice[hole] = KEEP if kept > 0.5 else 0
    return choice, moved


# A candidate this close to the bound ends the search.
ENOUGH = 1e-4
# Above this many ops a single simulation takes so long that the heuristics' order matters.
LARGE = 4000
# Above this many ops no relaxation is solved. It takes kilobytes per op, and its bound for such
# graphs did not exceed the time without a plan (benchmarks/planner_deep.py).
RELAXED = 20_000
# Up to this many ops, ruin and repair is worth its time; attempts times ops, and most attempts.
SMALL = 6000
TRIES, MOST_TRIES = 600_000, 600
# Annealing: tries times ops of the first round and of all rounds, and the most tries of a round.
ROUND, ALL_ROUNDS, LONGEST = 8_000_000, 64_000_000, 50_000
# Initial temperature of the first round, of a round from the unplanned graph, and of later ones.
WARM, FRESH, COOL = 1e-3, 3e-3, 3e-4
# A round that gains less than this share of the seconds counts as without gain.
GAIN = 5e-4
# The search for the smallest peak takes at least this long, however late it is.
LEAST_S = 0.1


class Search:
    """The state of planning one graph: its holes, its archive and its clock.

    shape : the holes of the graph
    offload : whether storages may go to the host
    recompute : whether ops may run twice
    deadline : time of `progress.now()` at which it ends. There may be a later one, `end`, for a
        search that has found a plan within the budget.
    """

    def __init__(
        self,
        shape: Holes,
        *,
        offload: bool,
        recompute: bool,
        deadline: float,
    ) -> None:
        self.shape, self.deadline, self.end = shape, deadline, deadline
        self.began = now()
        self.recompute = recompute
        self.offload = offload and shape.graph.device.can_offload
        self.archive = Archive(shape)
        self.bounds: dict[tuple[int, int], Relaxed | None] = {}

    @property
    def late(self) -> bool:
        return now() > self.deadline

    def bound(self, budget_bytes: int, places: Sequence[int] | None = None) -> float:
        """Return the lower bound on the seconds of any plan within a budget."""
        shape = self.shape
        least = sum(min(options) for options in shape.graph.arrays.seconds)
        # The unplanned graph fits, and no op has a faster way than its default: that is optimal.
        if self.archive.items[0].peak_bytes <= budget_bytes and not self.archive.choosy:
            return least
        if (not self.recompute and not self.offload) or len(shape.graph.ops) > RELAXED:
            return least
        for at in moments(shape) if places is None else places:
            relaxed = self.relaxed(at, budget_bytes)
            if relaxed is not None:
                # The solver's result is accurate to about 1e-7; the bound is reduced by ten times
                # that.
                least = max(least, relaxed.seconds * (1 - 1e-6))
            if self.late:
                break
        return least

    def relaxed(self, at: int, budget_bytes: int) -> Relaxed | None:
        """Return the relaxation at an op, solved once per budget."""
        key = (at, budget_bytes)
        if key not in self.bounds:
            bound = relax(
                self.shape, at, budget_bytes, offload=self.offload, recompute=self.recompute,
                deadline=self.deadline,
            )  # fmt: skip
            # Possibly for lack of time: with a later deadline there may be one, so store nothing.
            if bound is None and self.late:
                return None
            self.bounds[key] = bound
        return self.bounds[key]

    def attempt(self, choice: Sequence[int], budget_bytes: int, origin: str) -> None:
        """Fit a choice to a budget and trim it; add the results to the archive."""
        # Each attempt takes at most a share of the remaining time, to leave some for the others.
        began = now()
        part = began + (self.deadline - began) / 4
        fitted = fit(self.shape, choice, budget_bytes, deadline=part)
        if fitted is None:
            return
        self.archive.add(*fitted, origin)
        part += (self.deadline - began) / 8
        trimmed = trim(self.shape, fitted[0], budget_bytes, deadline=part)
        self.archive.add(*trimmed, f"{origin}, trimmed")
        self.report(origin, budget_bytes)

    def take(self, candidate: Candidate, origin: str, budget_bytes: int) -> None:
        """Add a candidate to the archive, and report it."""
        self.archive.add(candidate.choice, candidate.schedule, origin, candidate.moved)
        self.report(origin, budget_bytes)

    def report(self, origin: str, budget_bytes: int) -> None:
        """Report progress; once a plan keeps the budget, the search may run until `end`."""
        if self.deadline < self.end and self.archive.best(budget_bytes) is not None:
            self.deadline = self.end
        if not is_heard():
            return
        best = self.archive.best(budget_bytes)
        natural = self.archive.items[0].seconds
        if best is None:
            note = f"{origin}: nothing within the budget yet"
        else:
            note = f"{origin}: best {best.seconds:.4g} s a step"
            note += f" ({best.seconds / natural - 1:+.1%})" if natural else ""
        report_progress("search", now() - self.began, self.deadline - self.began, note)

    def solve(self, budget_bytes: int) -> Candidate | None:
        """Look for a fast candidate within a budget by all heuristics; return the best."""
        best = self.archive.best(budget_bytes)
        if best is not None and best.origin == "keep":
            return best
        if not self.recompute and not self.offload:
            return best
        ways = self._ways(budget_bytes)
        if len(self.shape.graph.ops) > LARGE:
            # Before the bound, whose linear program may take all of the time.
            ways.pop(0)()
        target = self.bound(budget_bytes) * (1 + ENOUGH)
        for way in ways:
            way()
            best = self.archive.best(budget_bytes)
            if self.late or (best is not None and best.seconds <= target):
                return best
        # All candidates found are in the archive; annealing continues from the best one.
        self.annealed(budget_bytes, target)
        if self.recompute and len(self.shape.graph.ops) <= SMALL:
            self.refined(budget_bytes, target)
        return self.archive.best(budget_bytes)

    def annealed(self, budget_bytes: int, target: float) -> None:
        """Improve by annealing, in ever longer rounds, until two of them gain nothing.

        Rounds are counted in tries, not in seconds, so that their results do not depend on the
        machine, as long as the time suffices.
        """
        ops = len(self.shape.graph.ops)
        tries, left, idle, number = self.first_tries, ALL_ROUNDS // ops, 0, 0
        while tries <= left and idle < 2 and not self.late:
            start = self.archive.start(budget_bytes)
            fits = start.peak_bytes <= budget_bytes
            if fits and start.seconds <= target:
                return
            # For diversity, the second round starts from the unplanned graph.
            fresh = number == 1 and ops <= LARGE // 4
            begin = self.archive.items[0] if fresh else start
            warm = FRESH if fresh else WARM if number == 0 else COOL
            self.anneal(begin, budget_bytes, tries, warm, number, deadline=self.deadline)
            after = self.archive.start(budget_bytes)
            if fits:
                gained = after.seconds < start.seconds * (1 - GAIN)
            else:
                gained = after.peak_bytes < start.peak_bytes
            idle = 0 if gained else idle + 1
            left, number, tries = left - tries, number + 1, tries if gained else 2 * tries

    @property
    def first_tries(self) -> int:
        """Tries of the first round of annealing."""
        return max(1, min(LONGEST, ROUND // len(self.shape.graph.ops)))

    def anneal(
        self,
        start: Candidate,
        budget_bytes: int,
        tries: int,
        warm: float,
        seed: int,
        *,
        deadline: float,
    ) -> None:
        """Add the result of one annealing to the archive."""
        # If nothing waits yet, every second round does not try waits: most would be wasted.
        wait = start.peak_bytes > budget_bytes or any(start.moved.values()) or seed % 2 == 1
        annealed = anneal(
            self.shape, start, budget_bytes, offload=self.offload, recompute=self.recompute,
            wait=wait, tries=tries, warm=warm, seed=seed, deadline=deadline,
        )  # fmt: skip
        if annealed is not None:
            self.take(annealed, "annealing", budget_bytes)

    def least(self, budget_bytes: int) -> None:
        """Look for the smallest peak, down to a budget.

        A short annealing comes first, however late it is, so that something is found.
        """
        if not self.recompute and not self.offload:
            return
        away = all_moved(self.shape) if self.offload else None
        if away is not None:
            self.take(away, "all moved", budget_bytes)
        start = self.archive.smallest()
        tries = 1 + self.first_tries // 4
        until = max(self.deadline, now() + LEAST_S)
        self.anneal(start, budget_bytes, tries, FRESH, 0, deadline=until)
        if self.recompute and not self.late:
            self.attempt(self.shape.natural(), budget_bytes, "greedy")
            self.from_chain(budget_bytes)
        self.annealed(budget_bytes, 0.0)

    def refined(self, budget_bytes: int, target: float) -> None:
        """Improve the best candidate by ruin and repair."""
        best = self.archive.start(budget_bytes)
        # Repairs keep the budget, so they need a plan within it to compare with.
        if best.peak_bytes > budget_bytes or best.seconds <= target or self.late:
            return
        better = refine(
            self.shape,
            best,
            budget_bytes,
            offload=self.offload,
            enough_s=target,
            tries=min(MOST_TRIES, max(50, TRIES // max(1, len(self.shape.graph.ops)))),
            deadline=self.deadline,
        )
        self.take(better, "ruin and repair", budget_bytes)

    def _ways(self, budget_bytes: int) -> list[Callable[[], object]]:
        """Return the heuristics, those first that most often end the search.

        On large graphs greedy fitting comes first, then the chain, which solves equal blocks once.
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
            few = relaxed[:1] if len(self.shape.graph.ops) <= RELAXED else []
            ways = [greedy, chain, *few, *ways]
        elif self.recompute:
            ways += [greedy, *relaxed[:1], chain, *relaxed[1:]]
        return ways

    def from_sqrt_n(self, choice: Sequence[int], budget_bytes: int) -> None:
        """Start from this choice, and from the one that holds no inputs of rebuilds."""
        freed, natural = list(choice), self.shape.natural()
        # `dropping` holds inputs of rebuilds past their last use.
        for last in {first - 1 for first in self.shape.first if first}:
            freed[last] = natural[last]
        for start in (choice, freed):
            if self.simulated(start) is not None:
                self.attempt(start, budget_bytes, "sqrt_n")

    def with_lanes(self, budget_bytes: int) -> None:
        """Start from relaxations that may use the lanes, at some shares of their speed.

        Above RELAXED ops there are none; then everything that may move does, before annealing.
        """
        large = len(self.shape.graph.ops) > RELAXED
        at = moments(self.shape, 1)[0]
        starts: list[Candidate] = []
        for lanes in () if large else (1.0, 0.8, 0.6, 0.4):
            if self.late:
                break
            # With slower lanes than the real ones there are fewer copies, and fewer waits for them.
            relaxed = relax(
                self.shape, at, budget_bytes, offload=True, recompute=self.recompute, lanes=lanes,
                deadline=self.deadline,
            )  # fmt: skip
            if relaxed is None:
                continue
            for start in self.from_lanes(relaxed, budget_bytes):
                starts.append(start)
                self.take(start, f"lanes at {lanes:.0%}", budget_bytes)
        if not starts:
            away = all_moved(self.shape)
            if away is None:
                return
            self.take(away, "all moved", budget_bytes)
            if self.recompute or away.schedule.peak_bytes > budget_bytes:
                return
            starts.append(away)
        # Half of the remaining time: the heuristics without lanes need some as well.
        half = now() + (self.deadline - now()) / 2
        best = min(starts, key=lambda item: item.seconds)
        improved = improve(self.shape, best, budget_bytes, recompute=self.recompute, deadline=half)
        self.take(improved, "lanes, improved", budget_bytes)

    def from_lanes(self, relaxed: Relaxed, budget_bytes: int) -> list[Candidate]:
        """Return candidates within the budget from a relaxation's split of host and rebuilds."""
        choice, moved = _rounded(self.shape, relaxed, recompute=self.recompute)
        candidates: list[Candidate] = []
        # Copies that overlap with ops first; only if that holds too much do ops wait for them.
        for waits in (BESIDE, BOTH):
            start = self.within(choice, dict.fromkeys(moved, waits), budget_bytes)
            if start is not None:
                candidates.append(start)
                # Nothing had to be fitted, so waits could only cost time.
                if start.choice == choice:
                    break
        return candidates

    def within(
        self, choice: list[int], moved: Mapping[int, int], budget_bytes: int
    ) -> Candidate | None:
        """Simulate a choice; if it exceeds the budget, fit it, provided ops may be rerun."""
        start = carried(self.shape, choice, moved)
        if start is None or start.peak_bytes <= budget_bytes:
            return start
        if not self.recompute:
            return None
        try:
            _, windows = simulate_moved(self.shape, choice, moved)
            fitted = fit(self.shape, choice, budget_bytes, deadline=self.deadline, moves=windows)
        except Impossible:
            return None
        # Windows depend on the choice: after fitting, copies may end elsewhere.
        refitted = None if fitted is None else carried(self.shape, fitted[0], moved)
        fits = refitted is not None and refitted.peak_bytes <= budget_bytes
        return refitted if fits else None

    @cached_property
    def chain(self) -> Chain:
        """The blocks of the graph and their table, computed at first use."""
        ops = len(self.shape.graph.ops)
        note = f"tables for the blocks of {ops} ops, quadratic in their number"
        report_progress("search", now() - self.began, self.deadline - self.began, note)
        return Chain(self.shape, self.archive.items[0].peak_bytes, end=self.deadline)

    def from_chain(self, budget_bytes: int) -> None:
        """Start from the chain's checkpoints, for the largest table budget that really fits.

        The table rounds up and adds peaks that do not coincide, so the solution for a larger budget
        often fits; the largest one is found by bisection on the true peak.
        """
        if now() > self.deadline:
            return
        low, high = budget_bytes, self.archive.items[0].peak_bytes
        for number in range(8):
            if self.late and number:
                break
            # The budget itself first: if its choice does not fit, bisection has no lower end.
            middle = (low + high) // 2 if number else low
            choice = self.chain.choice(middle)
            schedule = None if choice is None else self.simulated(choice)
            if choice is not None and schedule is not None:
                self.archive.add(choice, schedule, "chain")
            fits = schedule is not None and schedule.peak_bytes <= budget_bytes
            if middle == low and not fits:
                break
            low, high = (middle, high) if fits else (low, middle)
        start = self.chain.choice(low)
        if start is not None:
            self.attempt(start, budget_bytes, "chain")

    def simulated(self, choice: Sequence[int]) -> Schedule | None:
        try:
            return simulate(self.shape, choice)
        except Impossible:
            return None

    def from_relaxation(self, budget_bytes: int, share: float) -> None:
        """Start from what the relaxation keeps, with part of the budget left for rebuilds."""
        at = moments(self.shape, 1)[0]
        base = self.shape.graph.base_bytes
        # The relaxation considers one moment, and does not count rebuilds at others.
        room = base + int((budget_bytes - base) * share)
        relaxed = relax(self.shape, at, room, offload=False, deadline=self.deadline)
        if relaxed is None:
            return
        choice, _ = _rounded(self.shape, relaxed, recompute=True)
        if self.simulated(choice) is None:
            return
        self.attempt(choice, budget_bytes, f"relaxation at {share:.0%}")
