"""What csrc/memory/pool_search.cpp does, in plain Python: the same decisions in the same order.

The ideas are told in `sn_memory/pool/pack.py`.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final, NamedTuple

import numpy as np

from sn_memory.pool.pack import ALL, UNIT, Rule, Verdict
from sn_memory.pool.problem import Ints, Problem

# So many looks at every buffer in every section are what one decision may lead to.
_PASSES: Final = 100


class Lists:
    """The problem in plain lists: also the members of each section, who is alive with whom."""

    def __init__(self, problem: Problem) -> None:
        self.first, self.last = problem.first.tolist(), problem.last.tolist()
        self.size, self.align = problem.size.tolist(), problem.align.tolist()
        self.sections = problem.sections
        self.by_start = np.argsort(problem.first, kind="stable").tolist()
        self.members: list[list[int]] = [[] for _ in range(self.sections)]
        for i, (first, last) in enumerate(zip(self.first, self.last, strict=True)):
            for section in range(first, last):
                self.members[section].append(i)
        self.neighbours: list[list[int]] = [[] for _ in self.size]
        for at, i in enumerate(self.by_start):
            for k in self.by_start[at + 1 :]:
                if self.first[k] >= self.last[i]:
                    break
                self.neighbours[i].append(k)
                self.neighbours[k].append(i)


class _Choice(NamedTuple):
    """Where to return to: put `buffer` higher instead."""

    buffer: int
    trail: int
    component: list[int]
    pending: _Pending | None


class _Pending(NamedTuple):
    """Components still to be solved, as a linked list, and how many choices came before them."""

    component: list[int]
    next: _Pending | None
    choices: int


class PythonSearch:
    """What `sn_memory.pool.pack.Search` is."""

    def __init__(self, lists: Lists, capacity: int, rule: Rule, rank: Ints, weights: Ints) -> None:
        count = len(lists.size)
        self.lists, self.capacity, self.rule = lists, capacity, rule
        self.rank: list[int] = rank.tolist()
        self.weight: list[int] = weights.tolist()
        self.offset, self.placed = [0] * count, [False] * count
        self.least, self.base = [0] * count, [0] * count
        # By section: bytes that may be wasted (None: no buffer left), and the least `least`.
        self.slack: list[int | None] = [0] * lists.sections
        self.lowest = [0] * lists.sections
        self.queue: deque[int] = deque()
        self.marked = [False] * lists.sections
        # What to put back on the way to the last choice: of each value only how it was at that
        # choice. The stamps say which are noted already.
        self.trail: list[tuple[list[Any], int, Any]] = []
        self.level = 1
        self.stamps = {
            id(values): [0] * len(values)
            for values in (self.least, self.base, self.slack, self.lowest, self.placed)
        }
        self.choices: list[_Choice] = []
        self.component: list[int] | None = list(lists.by_start)
        self.pending: _Pending | None = None
        self.refuted = max(lists.size) > capacity
        # What a decision leads to is still being inferred; the component is split afterwards.
        self.settling = self.split_after = True
        self.decisions, self.work = 0, 0
        for i in range(count):
            self.mark(i)
        looks = sum(last - first for first, last in zip(lists.first, lists.last, strict=True))
        self.unit: int = _PASSES * (looks + lists.sections + count)

    def offsets(self) -> Ints:
        return np.array(self.offset, np.int64)

    def weights(self) -> Ints:
        return np.array(self.weight, np.int64)

    @property
    def spent(self) -> int:
        return self.decisions + self.work // self.unit

    def run(self, decisions: int, work: int = ALL) -> Verdict:
        until = self.work + work
        while not self.refuted:
            alive: bool | None = True
            if self.settling:
                alive = self.propagate(until)
                if alive is None:
                    return Verdict.UNFINISHED
                self.settling = False
                if alive and self.split_after:
                    assert self.component is not None
                    self.split(self.component)
            else:
                if self.component is None:
                    if self.pending is None:
                        return Verdict.FOUND
                    self.component, self.pending, choices = self.pending
                    # What was chosen inside the finished neighbour cannot help this component.
                    del self.choices[choices:]
                if decisions <= 0 or self.work >= until:
                    return Verdict.UNFINISHED
                decisions -= 1
                self.decisions += 1
                self.settling = alive = self.decide(self.component)
            if not alive:
                self.split_after = False
                self.settling = self.backtrack()
                self.refuted = not self.settling
        return Verdict.IMPOSSIBLE

    def decide(self, component: list[int]) -> bool:
        """Place the next buffer or put it on top of another; False where that cannot be."""
        self.work += len(component)
        i = self.pick(component)
        self.split_after = self.least[i] <= self.base[i]
        if not self.split_after:
            # It would float, so it rests on a buffer that is not placed yet.
            return self.raise_onto_others(i)
        top = self.least[i] + self.lists.size[i]
        if any(not self.placed[k] and self.least[k] < top for k in self.lists.neighbours[i]):
            self.choices.append(_Choice(i, len(self.trail), component, self.pending))
            self.level += 1
        return self.place(i)

    def set(self, values: list[Any], index: int, value: Any) -> None:
        stamp = self.stamps[id(values)]
        if stamp[index] != self.level:
            self.trail.append((values, index, values[index]))
            stamp[index] = self.level
        values[index] = value

    def mark(self, i: int) -> None:
        for section in range(self.lists.first[i], self.lists.last[i]):
            if not self.marked[section]:
                self.marked[section] = True
                self.queue.append(section)

    def clear_marks(self) -> None:
        for section in self.queue:
            self.marked[section] = False
        self.queue.clear()

    def raise_to(self, i: int, offset: int) -> bool:
        if offset <= self.least[i]:
            return True
        offset += -offset % self.lists.align[i]
        if offset > self.capacity - self.lists.size[i]:
            first, last = self.lists.first[i], self.lists.last[i]
            for section in range(first, last):
                self.weight[section] += UNIT // (last - first)
            return False
        self.set(self.least, i, offset)
        self.mark(i)
        return True

    def raise_onto_others(self, i: int) -> bool:
        tops = [
            self.least[k] + self.lists.size[k]
            for k in self.lists.neighbours[i]
            if not self.placed[k]
        ]
        return bool(tops) and self.raise_to(i, min(tops))

    def infer(self, section: int) -> bool:
        least, size = self.least, self.lists.size
        there = [k for k in self.lists.members[section] if not self.placed[k]]
        if not there:
            if self.slack[section] is not None:
                self.set(self.slack, section, None)
            return True
        height = 0
        for low, bytes_ in sorted((least[k], size[k]) for k in there):
            height = max(height, low) + bytes_
        if height > self.capacity:
            self.weight[section] += UNIT
            return False
        lowest = min(least[k] for k in there)
        slack = self.capacity - lowest - sum(size[k] for k in there)
        if slack != self.slack[section]:
            self.set(self.slack, section, slack)
        if lowest != self.lowest[section]:
            self.set(self.lowest, section, lowest)
        # min takes the first of equals, as the C++ does.
        owner = min(there, key=lambda k: least[k] + size[k])
        top = least[owner] + size[owner]
        next_top = min((least[k] + size[k] for k in there if k != owner), default=top)
        for k in there:
            if least[k] - lowest > slack and not self.raise_to(k, next_top if k == owner else top):
                return False
        return True

    def propagate(self, until: int) -> bool | None:
        """Infer until nothing is left to infer; None where `until` comes first."""
        # First come, first served converges in half the visits that last come, first served takes.
        while self.queue:
            if self.work >= until:
                return None
            section = self.queue.popleft()
            self.marked[section] = False
            self.work += 1 + len(self.lists.members[section])
            if not self.infer(section):
                self.clear_marks()
                return False
        return True

    def place(self, i: int) -> bool:
        self.offset[i] = self.least[i]
        self.set(self.placed, i, True)
        self.mark(i)
        top = self.least[i] + self.lists.size[i]
        for k in self.lists.neighbours[i]:
            if self.placed[k]:
                continue
            base = top + -top % self.lists.align[k]
            if self.base[k] < base:
                self.set(self.base, k, base)
            if not self.raise_to(k, top):
                return False
        return True

    def backtrack(self) -> bool:
        """Go back to the last choice and put its buffer higher; False where no choice is left."""
        self.clear_marks()
        while self.choices:
            choice = self.choices.pop()
            self.level += 1
            while len(self.trail) > choice.trail:
                values, index, before = self.trail.pop()
                values[index] = before
            self.component, self.pending = choice.component, choice.pending
            if self.raise_onto_others(choice.buffer):
                return True
        return False

    def split(self, component: list[int]) -> None:
        pieces: list[list[int]] = []
        end = -1
        for k in component:
            if self.placed[k]:
                continue
            if self.lists.first[k] >= end:
                pieces.append([])
            end = max(end, self.lists.last[k])
            pieces[-1].append(k)
        if len(pieces) == 1:
            self.component = component
            return
        # The smallest ends up first in the list: it is the quickest to refute.
        for piece in sorted(pieces, key=len, reverse=True):
            self.pending = _Pending(piece, self.pending, len(self.choices))
        self.component = None

    def order(self, k: int) -> tuple[int, int]:
        return self.least[k], self.rank[k]

    def score(self, section: int) -> tuple[float, float]:
        if self.rule is Rule.LOWEST:
            return self.lowest[section], self.slack[section] or 0
        low = self.lowest[section] + self.capacity // 20
        return float(low) / float(self.weight[section]), 0.0

    def pick(self, component: list[int]) -> int:
        left = [k for k in component if not self.placed[k]]
        begin = min(self.lists.first[k] for k in left)
        end = max(self.lists.last[k] for k in left)
        section = min((s for s in range(begin, end) if self.slack[s] is not None), key=self.score)
        best = min((k for k in self.lists.members[section] if not self.placed[k]), key=self.order)
        while True:
            self.work += 1 + len(self.lists.neighbours[best])
            under = [
                k
                for k in self.lists.neighbours[best]
                if not self.placed[k] and self.least[k] + self.lists.size[k] <= self.least[best]
            ]
            if not under:
                return best
            best = min(under, key=self.order)
