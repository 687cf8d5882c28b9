"""What csrc/memory/annealing.cpp does, in plain Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from sn_memory.base.progress import now
from sn_memory.cost.offload import BACK, BESIDE, BOTH, OUT
from sn_memory.graph.graph import Ints
from sn_memory.graph.liveness import KEEP, Holes
from sn_memory.plan.search.candidates import Candidate, carried
from sn_memory.plan.search.improve import COLD

WORD = (1 << 64) - 1
# What a hole that is moved is tried with.
WAITS = (BESIDE, BESIDE, BESIDE, BESIDE, BESIDE, OUT, BACK, BOTH)


def anneal(
    holes: Holes, start: Candidate, budget_bytes: int, *, deadline: float, **rules: Any
) -> Candidate | None:
    """Return what `sn_memory.plan.search.improve.anneal` returns; `rules` are its keywords."""
    annealer = _Annealer(holes, start, SimpleNamespace(budget_bytes=budget_bytes, **rules))
    return carried(holes, *annealer.run(lambda: now() > deadline))


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
    def __init__(self, holes: Holes, start: Candidate, rules: SimpleNamespace) -> None:
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

    def take(self, here: Candidate) -> None:
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
