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

from ...base.clock import after, late_or_units
from ...cost.offload import BACK, BESIDE, BOTH, OUT
from ...graph.holes import KEEP, Holes
from ...graph.numbers import Ints
from ..compiled import compiled
from .mixed import Mixed, carried

# Heat, in shares of the first seconds: what a try may lose at the start, and at the end.
COLD = 1e-5
WORD = (1 << 64) - 1
# What a hole that is moved is tried with.
WAITS = (BESIDE, BESIDE, BESIDE, BESIDE, BESIDE, OUT, BACK, BOTH)


@dataclass(frozen=True)
class Rules:
    """What an annealing may do.

    Parameters
    ----------
    budget_bytes
        To be kept by what is found.
    offload, recompute
        Whether holes may be spent on the host; whether storages may be made again.
    tries
        Changes to try; the heat falls over all of them.
    warm
        Heat at the start.
    seed
        Of the random numbers.
    wait
        Whether holes are tried on the host with ops that wait for the copies.
    """

    budget_bytes: int
    offload: bool
    recompute: bool
    tries: int
    warm: float
    seed: int = 0
    wait: bool = True


def anneal(holes: Holes, start: Mixed, rules: Rules, *, deadline: float) -> Mixed | None:
    """Return the fastest found within the budget; where there is none, the smallest peak found.

    None where the last word cannot be carried out, which the start can.
    """
    native = compiled(holes)
    if native is None:
        choice, moved = _Annealer(holes, start, rules).run(after(deadline))
        return carried(holes, choice, moved)
    device = holes.graph.device
    lanes = (0.0, 0.0, 0.0)
    out, back = device.to_host_bytes_per_s, device.to_device_bytes_per_s
    if rules.offload and out is not None and back is not None:
        lanes = (out, back, device.transfer_latency_s)
    pinned = -1 if device.pinned_bytes is None else device.pinned_bytes
    # 0 is a hole that is not moved.
    away = [1 + start.moved[hole] if hole in start.moved else 0 for hole in range(holes.count)]
    choice, away = native.anneal(
        start.choice, away, rules.budget_bytes, late_or_units(deadline), (*lanes, pinned),
        (rules.warm, COLD), tries=rules.tries, seed=rules.seed, recompute=rules.recompute,
        wait=rules.wait,
    )  # fmt: skip
    return carried(holes, choice, {hole: it - 1 for hole, it in enumerate(away) if it})


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

    def __init__(self, holes: Holes, start: Mixed, rules: Rules) -> None:
        self.holes, self.rules, self.draw = holes, rules, _Draw(rules.seed)
        self.choice, self.moved = list(start.choice), dict(start.moved)
        lanes = rules.offload and holes.graph.device.can_offload
        self.leaves, self.again = [], []
        for hole, storage in enumerate(holes.storage):
            self.leaves.append(lanes and holes.may_leave(hole))
            self.again.append(
                rules.recompute and holes.rebuildable[storage] and not holes.stays[hole]
            )
        self.free = [hole for hole in range(holes.count) if self.leaves[hole] or self.again[hole]]
        self.best: tuple[int, float, list[int], dict[int, int]] | None = None

    def run(self, late: Callable[[], bool]) -> tuple[list[int], dict[int, int]]:
        here = carried(self.holes, self.choice, self.moved)
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
            before = list(self.choice), dict(self.moved)
            self.propose()
            if (self.choice, self.moved) == before:
                continue
            trial = carried(self.holes, self.choice, self.moved)
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
        room = self.rules.budget_bytes - self.holes.graph.base_bytes
        # As a whole number the sum may pass 64 bits.
        return float(above.sum(dtype=float)) / max(1, room)

    def take(self, here: Mixed) -> None:
        """Stand where this was carried out; note it if it is the best so far."""
        schedule = here.schedule
        self.seconds, self.over = here.seconds, self.excess(schedule.live_bytes)
        over = (schedule.live_bytes > self.rules.budget_bytes).tolist()
        self.hot = [at for at, above in zip(schedule.at, over, strict=True) if above]
        rank = (max(0, schedule.peak_bytes - self.rules.budget_bytes), here.seconds)
        if self.best is None or rank < self.best[:2]:
            self.best = (*rank, list(self.choice), dict(self.moved))

    def propose(self) -> None:
        many = self.draw.part()
        hole = self.first()
        self.alter(hole)
        for limit in (0.5, 0.2):
            if many >= limit:
                break
            hole = self.near(hole) if self.draw.below(2) else self.any()
            self.alter(hole)

    def any(self) -> int:
        return self.free[self.draw.below(len(self.free))]

    def first(self) -> int:
        """Where it is over the budget, a hole there; else rather one that costs something."""
        aimed = self.draw.below(4) != 0
        hot = self.hot[self.draw.below(len(self.hot))] if aimed and self.hot else None
        hole = self.any()
        for _ in range(12 if aimed else 0):
            there = self.choice[hole] == KEEP and hole not in self.moved
            if (
                self.holes.start[hole] < hot <= self.holes.end[hole]
                if hot is not None
                else not there
            ):
                break
            hole = self.any()
        return hole

    def near(self, hole: int) -> int:
        """A hole of something that this hole's storage is made from, when it is made again."""
        holes, draw = self.holes, self.draw
        chain = holes.chain[holes.storage[hole]]
        reads: Sequence[int] = ()
        if chain:
            reads = holes.graph.arrays.reads[chain[draw.below(len(chain))]]
        if not reads:
            return hole
        for other in holes.of(reads[draw.below(len(reads))]):
            if holes.end[other] >= holes.end[hole]:
                return other if self.leaves[other] or self.again[other] else hole
        return hole

    def alter(self, hole: int) -> None:
        way, held = self.draw.below(8), KEEP
        away = self.leaves[hole] and way >= 6
        if not away and self.again[hole] and way >= 2:
            start, end = self.holes.start[hole], self.holes.end[hole]
            held = 0
            if way == 4:
                held = len(self.holes.graph.ops)
            elif way == 5:
                held = start + 1 + self.draw.below(end - start)
        self.choice[hole] = held
        if away:
            self.moved[hole] = WAITS[self.draw.below(len(WAITS))] if self.rules.wait else BESIDE
        else:
            self.moved.pop(hole, None)
