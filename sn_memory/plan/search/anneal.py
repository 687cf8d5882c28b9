"""Choices by simulated annealing: better ones are kept, at first also slightly worse ones.

Greedy fitting only lets go, and is stuck near the floor, where the plan that fits holds something
dear for a moment, drops it, and brings it back just in time. Here a choice may be over the budget
on the way. Bytes too many have a price that rises while it is over and falls while it is within,
so that the search swings about what just fits (annealing: Kirkpatrick et al., 1983; strategic
oscillation: Glover, 1977). Rebuilds and stays on the host are chosen together, by the replayed
time of ops and lanes.

The compiled extension does this at five microseconds a try on a graph of a hundred ops, a few
hundred on thousands. The twin below makes the same choices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...base.clock import after
from ...graph.idle import KEEP, Gaps
from ...graph.numbers import Ints
from ..compiled import compiled
from .mixed import Joint, carried

# Heat, in shares of the first seconds: what a try may lose at the start, and at the end.
COLD = 1e-5
WORD = (1 << 64) - 1


@dataclass(frozen=True)
class Rules:
    """What an annealing may do.

    Parameters
    ----------
    budget_bytes
        To be kept by what is found.
    offload, recompute
        Whether gaps may be spent on the host; whether storages may be made again.
    tries
        Changes to try; the heat falls over all of them.
    warm
        Heat at the start.
    seed
        Of the random numbers.
    """

    budget_bytes: int
    offload: bool
    recompute: bool
    tries: int
    warm: float
    seed: int = 0


def anneal(gaps: Gaps, start: Joint, rules: Rules, *, deadline: float) -> Joint | None:
    """Return the fastest found within the budget; where there is none, the smallest peak found.

    None where the last word cannot be carried out, which the start can.
    """
    late = after(deadline)
    native = compiled(gaps)
    if native is None:
        choice, moved = _Annealer(gaps, start, rules).run(late)
        return carried(gaps, choice, moved)
    device = gaps.graph.device
    lanes = (0.0, 0.0, 0.0)
    out, back = device.to_host_bytes_per_s, device.to_device_bytes_per_s
    if rules.offload and out is not None and back is not None:
        lanes = (out, back, device.transfer_latency_s)
    pinned = -1 if device.pinned_bytes is None else device.pinned_bytes
    away = [gap in start.moved for gap in range(gaps.count)]
    choice, flags = native.anneal(
        start.choice, away, rules.budget_bytes, late, (*lanes, pinned), (rules.warm, COLD),
        tries=rules.tries, seed=rules.seed, recompute=rules.recompute,
    )  # fmt: skip
    return carried(gaps, choice, [gap for gap, flag in enumerate(flags) if flag])


class _Draw:
    """splitmix64 (Steele et al., 2014): the same numbers in C++ and Python."""

    def __init__(self, seed: int) -> None:
        self.state = seed

    def next(self) -> int:
        self.state = (self.state + 0x9E3779B97F4A7C15) & WORD
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
        return z ^ (z >> 31)

    def below(self, count: int) -> int:
        return self.next() % count

    def part(self) -> float:
        return (self.next() >> 11) * 2.0**-53


class _Annealer:
    """The twin of csrc/memory/annealing.cpp."""

    def __init__(self, gaps: Gaps, start: Joint, rules: Rules) -> None:
        self.gaps, self.rules, self.draw = gaps, rules, _Draw(rules.seed)
        self.choice, self.moved = list(start.choice), set(start.moved)
        lanes = rules.offload and gaps.graph.device.can_offload
        self.leaves, self.again = [], []
        for gap, storage in enumerate(gaps.storage):
            inner = gap + 1 < gaps.first[storage + 1]
            long = gaps.end[gap] - gaps.start[gap] > 1
            self.leaves.append(lanes and inner and long and gaps.bytes[storage] > 0)
            self.again.append(rules.recompute and gaps.rebuildable[storage] and not gaps.stays[gap])
        self.free = [gap for gap in range(gaps.count) if self.leaves[gap] or self.again[gap]]
        self.best: tuple[int, float, list[int], set[int]] | None = None

    def run(self, late: Callable[[], bool]) -> tuple[list[int], set[int]]:
        here = carried(self.gaps, self.choice, self.moved)
        if not self.free or here is None:
            return self.choice, self.moved
        self.take(here)
        scale = price = heat = here.seconds
        for tried in range(self.rules.tries):
            if tried % 32 == 0:
                if late():
                    break
                gone = tried / self.rules.tries
                heat = scale * self.rules.warm * math.pow(COLD / self.rules.warm, gone)
                # The price of a byte too many swings about the one at which choices just fit.
                price *= 1.05 if self.over > 0 else 0.95
                price = min(max(price, 1e-3 * scale), 1e4 * scale)
            before = list(self.choice), set(self.moved)
            self.propose()
            if (self.choice, self.moved) == before:
                continue
            trial = carried(self.gaps, self.choice, self.moved)
            if trial is not None:
                excess = self.excess(trial.schedule.live_bytes)
                worse = trial.seconds - self.seconds + price * (excess - self.over)
                if worse <= 0 or self.draw.part() < math.exp(-worse / heat):
                    self.take(trial)
                    continue
            self.choice, self.moved = before
        assert self.best is not None
        return self.best[2], self.best[3]

    def excess(self, live: Ints) -> float:
        above = live[live > self.rules.budget_bytes] - self.rules.budget_bytes
        room = self.rules.budget_bytes - self.gaps.graph.base_bytes
        # As a whole number the sum may pass 64 bits.
        return float(above.sum(dtype=float)) / max(1, room)

    def take(self, here: Joint) -> None:
        """Stand where this was carried out; note it if it is the best so far."""
        schedule = here.schedule
        self.seconds, self.over = here.seconds, self.excess(schedule.live_bytes)
        over = (schedule.live_bytes > self.rules.budget_bytes).tolist()
        self.hot = [at for at, above in zip(schedule.at, over, strict=True) if above]
        rank = (max(0, schedule.peak_bytes - self.rules.budget_bytes), here.seconds)
        if self.best is None or rank < self.best[:2]:
            self.best = (*rank, list(self.choice), set(self.moved))

    def propose(self) -> None:
        many = self.draw.part()
        gap = self.first()
        self.alter(gap)
        for limit in (0.5, 0.2):
            if many >= limit:
                break
            gap = self.near(gap) if self.draw.below(2) else self.any()
            self.alter(gap)

    def any(self) -> int:
        return self.free[self.draw.below(len(self.free))]

    def first(self) -> int:
        """Where it is over the budget, a gap there; else rather one that costs something."""
        aimed = self.draw.below(4) != 0
        hot = self.hot[self.draw.below(len(self.hot))] if aimed and self.hot else None
        gap = self.any()
        for _ in range(12 if aimed else 0):
            there = self.choice[gap] == KEEP and gap not in self.moved
            if self.gaps.start[gap] < hot <= self.gaps.end[gap] if hot is not None else not there:
                break
            gap = self.any()
        return gap

    def near(self, gap: int) -> int:
        """A gap of something that this gap's storage is made from, when it is made again."""
        gaps, draw = self.gaps, self.draw
        chain = gaps.chain[gaps.storage[gap]]
        reads: Sequence[int] = ()
        if chain:
            reads = gaps.graph.arrays.reads[chain[draw.below(len(chain))]]
        if not reads:
            return gap
        for other in gaps.of(reads[draw.below(len(reads))]):
            if gaps.end[other] >= gaps.end[gap]:
                return other if self.leaves[other] or self.again[other] else gap
        return gap

    def alter(self, gap: int) -> None:
        way, held = self.draw.below(8), KEEP
        away = self.leaves[gap] and way >= 6
        if not away and self.again[gap] and way >= 2:
            start, end = self.gaps.start[gap], self.gaps.end[gap]
            held = 0
            if way == 4:
                held = len(self.gaps.graph.ops)
            elif way == 5:
                held = start + 1 + self.draw.below(end - start)
        self.choice[gap] = held
        (self.moved.add if away else self.moved.discard)(gap)
