"""Choice of a plan for each call of a region, so that a step with all calls keeps one budget.

A step is a sequence of moments: code between two calls of regions, the forward pass of a call, its
backward pass. The bytes held outside of regions at each moment were measured, and what the calls
add depends only on their plans: so a peak is a sum, computed in microseconds, and the choice is a
multiple-choice knapsack with one limit per moment. Its relaxation, in which plans may be mixed,
gives the bound on the seconds and an initial choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .plans import RegionPlan

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

# Attempts to take a faster plan. This takes about a second for a thousand calls.
_ATTEMPTS = 20_000
# Moments that the relaxation limits: those with the highest peaks if everything is kept.
_LIMITED = 16
# Seconds counted for a change of plan that costs none, as bytes are divided by them.
_NOTHING_S = 1e-12


@dataclass(frozen=True, eq=False)
class Timeline:
    """The moments of a step.

    outside : [moments] the most bytes held outside of regions in each moment
    forward, backward : [calls] the moments of their passes; the number of moments if no backward
        pass was observed.
    gradients : [moments] bytes of the parameters' gradients at each moment, counted in `outside`
    """

    outside: Ints
    forward: Ints
    backward: Ints
    gradients: Ints | None = None


class Choices:
    """The plans that the calls of a step may follow; bytes and seconds of any choice of them.

    timeline : the step
    ladders : the plans of each call, the fastest first
    """

    def __init__(self, timeline: Timeline, ladders: Sequence[Sequence[RegionPlan]]) -> None:
        self.timeline, self.outside = timeline, timeline.outside
        self.ladders = ladders
        # Bytes kept, and taken by either pass: [3, calls, plans]; seconds: [calls, plans].
        self.sizes: Ints = np.zeros((3, len(ladders), 1), dtype=np.int64)
        self.extra: Floats = np.zeros((len(ladders), 1))
        self.calls = np.arange(len(ladders))
        for call, ladder in enumerate(ladders):
            self.set_plans(call, ladder)

    @property
    def kept(self) -> Ints:
        """Bytes that each plan of each call keeps between its passes."""
        return self.sizes[0]

    def peaks(self, choice: Ints) -> Ints:
        """Return the bytes held at each moment."""
        timeline, count = self.timeline, len(self.outside)
        # Kept bytes are added between the two passes: the bytes of either pass include them.
        kept, in_forward, in_backward = self.sizes[:, self.calls, choice]
        change = np.zeros(count + 2, dtype=np.int64)
        np.add.at(change, timeline.forward + 1, kept)
        np.subtract.at(change, timeline.backward, kept)
        peaks = self.outside + np.cumsum(change)[:count]
        peaks[timeline.forward] += in_forward
        # A call without a backward pass keeps its bytes to the end.
        ran = timeline.backward < count
        peaks[timeline.backward[ran]] += in_backward[ran]
        return peaks

    def peak(self, choice: Ints) -> int:
        return int(self.peaks(choice).max(initial=0))

    def copied(self) -> Choices:
        """Return a copy with its own tables and bytes outside."""
        other = copy(self)
        for name in ("outside", "sizes", "extra"):
            setattr(other, name, getattr(self, name).copy())
        return other

    def set_plans(self, call: int, ladder: Sequence[RegionPlan]) -> None:
        """Offer a call these plans."""
        if (more := len(ladder) - self.extra.shape[1]) > 0:
            self.sizes = np.pad(self.sizes, ((0, 0), (0, 0), (0, more)), mode="edge")
            self.extra = np.pad(self.extra, ((0, 0), (0, more)), mode="edge")
        # Short ladders are padded with their last plan.
        plans = [ladder[min(i, len(ladder) - 1)] for i in range(self.extra.shape[1])]
        self.sizes[:, call] = np.transpose([plan.sizes for plan in plans])
        self.extra[call] = [plan.extra_s for plan in plans]

    def leave_out(self, calls: Sequence[int]) -> None:
        """Count nothing for these calls, which did not occur."""
        self.sizes[:, calls] = self.extra[calls] = 0

    def scale(self, since: int, factor: float) -> None:
        """Multiply the bytes of everything from a call on."""
        self.sizes[:, since:] = self.sizes[:, since:] * factor
        timeline = self.timeline
        now = int(timeline.forward[since - 1]) if since else 0
        # What is held from the beginning, e.g. parameters, does not grow.
        first = self.outside[0]
        self.outside[now:] = first + (self.outside[now:] - first) * factor

    def hold(self, since: int, nbytes: int) -> None:
        """Count more bytes from a moment on."""
        self.outside[since:] += nbytes

    def seconds(self, choice: Ints) -> float:
        return float(self.extra[self.calls, choice].sum())

    def adds(self, moment: int) -> Ints:
        """Return the bytes that each plan of each call adds at a moment."""
        timeline = self.timeline
        waits = (timeline.forward < moment) & (moment < timeline.backward)
        kept, in_forward, in_backward = self.sizes
        added = np.where(waits[:, None], kept, 0)
        for moments, table in ((timeline.forward, in_forward), (timeline.backward, in_backward)):
            added = np.where((moments == moment)[:, None], table, added)
        return added

    def solve(self, budget_bytes: int) -> Ints:
        """Return the fastest choice found that keeps a budget; else one with the least excess."""
        last = np.array([len(ladder) - 1 for ladder in self.ladders], dtype=np.int64)
        return np.minimum(self._solved(budget_bytes), last)

    def _solved(self, budget_bytes: int) -> Ints:
        fastest = np.zeros(len(self.ladders), dtype=np.int64)
        if self.peak(fastest) <= budget_bytes:
            return fastest
        starts = [fastest, self._relaxed(budget_bytes)[1]]
        choices = [self.leaner(start, budget_bytes) for start in starts]
        within = [candidate for candidate in choices if self.peak(candidate) <= budget_bytes]
        if not within:
            # Seconds do not count: an error states the smallest peak.
            least_kept = np.argmin(self.kept, axis=1)
            choices += [self.leaner(start, 0, free=True) for start in (fastest, least_kept)]
            return min(choices, key=lambda candidate: self._excess(candidate, budget_bytes))
        faster = (self._faster(candidate, budget_bytes) for candidate in within)
        return min(faster, key=self.seconds)

    def _relaxed(self, budget_bytes: int) -> tuple[float, Ints]:
        """Return the fewest seconds if plans may be mixed, and the largest part of each call.

        Only the highest moments are limited, so this takes milliseconds.
        """
        from scipy.optimize import linprog
        from scipy.sparse import identity, kron

        fastest = np.zeros(len(self.ladders), dtype=np.int64)
        moments = np.argsort(-self.peaks(fastest))[:_LIMITED]
        adds = np.array([self.adds(int(moment)).ravel() for moment in moments])
        unit = max(1, budget_bytes)
        # In units of the budget and of the slowest plan: solvers have absolute tolerances.
        slowest = self.extra.max(initial=0.0) or 1.0
        mixed = linprog(
            self.extra.ravel() / slowest,
            A_ub=adds / unit,
            b_ub=(budget_bytes - self.outside[moments]) / unit,
            A_eq=kron(identity(len(fastest)), np.ones((1, self.extra.shape[1]))),
            b_eq=np.ones(len(fastest)),
        )
        # If not even mixed plans keep the budget, any bound holds.
        if not mixed.success:
            return 0.0, fastest
        parts = mixed.x.reshape(self.extra.shape)
        return max(0.0, float(mixed.fun) * slowest), parts.argmax(axis=1)

    def leaner(
        self, choice: Ints, budget_bytes: int, *, free: bool = False, since: int = 0
    ) -> Ints:
        """Free the cheapest bytes at the highest moment, until the budget is kept.

        A moment that no plan lowers is skipped, and the others are lowered: the real step may take
        less there than simulated.
        free : seconds do not count; since : only calls from this one on change their plans
        """
        choice, rejected = choice.copy(), np.zeros(self.kept.shape, dtype=bool)
        rejected[:since] = True
        stuck = np.zeros(len(self.outside), dtype=bool)
        best, least = choice.copy(), self._excess(choice, budget_bytes)
        while True:
            excess = self._excess(choice, budget_bytes)
            if excess < least:
                best, least = choice.copy(), excess
            peaks = np.where(stuck, 0, self.peaks(choice))
            moment = int(peaks.argmax())
            if peaks[moment] <= budget_bytes or stuck.all():
                return best
            adds = self.adds(moment)
            gain = np.minimum(
                adds[self.calls, choice][:, None] - adds, peaks[moment] - budget_bytes
            )
            cost = self.extra - self.extra[self.calls, choice][:, None]
            price = np.where(free, 1.0, np.maximum(cost, _NOTHING_S))
            worth = np.where((gain > 0) & ~rejected, gain / price, 0.0)
            call, plan = np.unravel_index(int(worth.argmax()), worth.shape)
            if worth[call, plan] <= 0:
                stuck[moment] = True
                continue
            # A rejected plan is not taken again, or two moments could alternate forever.
            rejected[call, choice[call]] = True
            choice[call] = plan

    def _excess(self, choice: Ints, budget_bytes: int) -> list[int]:
        """Return the peaks above a budget, the highest first, by which choices are compared."""
        above: list[int] = np.sort(np.maximum(self.peaks(choice), budget_bytes))[::-1].tolist()
        return above

    def _faster(self, choice: Ints, budget_bytes: int) -> Ints:
        """Take faster plans while the budget is kept, those that save most time first."""
        choice, tried = choice.copy(), 0
        better = True
        while better and tried < _ATTEMPTS:
            better = False
            saved = self.extra[self.calls, choice][:, None] - self.extra
            for place in np.argsort(-saved, axis=None):
                call, plan = divmod(int(place), saved.shape[1])
                now = self.extra[call, choice[call]]
                if saved.flat[place] <= 0 or tried >= _ATTEMPTS:
                    break
                if self.extra[call, plan] >= now:
                    continue
                tried += 1
                before, choice[call] = choice[call], plan
                if self.peak(choice) <= budget_bytes:
                    better = True
                else:
                    choice[call] = before
        return choice

    def floor(self) -> int:
        """Return a lower bound on the peak of any choice."""
        moments = range(len(self.outside))
        least = (int(self.outside[i] + self.adds(i).min(axis=1).sum()) for i in moments)
        return max(least, default=0)

    def bound(self, budget_bytes: int) -> float:
        """Return a lower bound on the seconds of reruns of any choice within a budget."""
        fastest = np.zeros(len(self.ladders), dtype=np.int64)
        return 0.0 if self.peak(fastest) <= budget_bytes else self._relaxed(budget_bytes)[0]
