"""Optimal recomputation of very small graphs: A* over everything that can be on the device.

A state is the number of ops done and the set of storages present, each in a version. From it, the
next op or any earlier one may run in any of its ways, after giving up just enough to make room. The
seconds of the ops still to come are an admissible estimate, so the first complete state taken from
the queue is optimal. The number of states is exponential in the storages: this is for graphs of
about ten ops, where it makes `auto` optimal, and for judging the other planners.

Two rules leave states out without losing the optimum. What no op can need any more, not even to
rebuild something that is needed, is given up at once. And as giving up costs nothing, a state is
never better than one that has done as much, at most as late, and holds all of that and more.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, count, product

from ...base.progress import now, spend
from ...graph.graph import Graph
from ..plan import Action

# Looks at moves before the clock is asked at all, so that very small graphs are solved in any time,
# and between two questions.
_FREE, _BETWEEN = 5_000, 64
# Units of work a look.
_LOOK = 600

# A state: ops done, and what is present, one bit for each version of each storage.
State = tuple[int, int]


@dataclass(frozen=True)
class Exact:
    """An optimal plan: its actions, and what they lead to."""

    actions: tuple[Action, ...]
    peak_bytes: int
    seconds: float


def solve(
    graph: Graph, budget_bytes: int, *, most_states: int = 200_000, deadline: float = math.inf
) -> Exact | None:
    """Return a fastest plan within the budget; None if there is no plan.

    Raises MemoryError when more than `most_states` states would have to be looked at, and
    TimeoutError at this moment of `clock.now()`, though not before some thousands of moves.
    """
    space, last = _Space(graph, budget_bytes), len(graph.ops)
    ticket, looks = count(), 0
    best: dict[State, float] = {(0, 0): 0.0}
    origin: dict[State, tuple[State, tuple[Action, ...], int]] = {}
    closed: list[list[int]] = [[] for _ in range(last + 1)]
    queue = [(space.to_come[0], next(ticket), 0.0, (0, 0))]
    while queue:
        _, _, cost, state = heapq.heappop(queue)
        done, held = state
        # The queue is in order of seconds among states that have done as much.
        if cost > best[state] or any(not held & ~more for more in closed[done]):
            continue
        closed[done].append(held)
        if done == last and not space.final & ~held:
            return _path(origin, state, cost, graph.base_bytes)
        if len(best) > most_states:
            raise MemoryError(f"more than {most_states} states for {last} ops")
        for seconds, after, actions, live in space.moves(done, held):
            looks += 1
            if looks % _BETWEEN == 0:
                spend(_LOOK * _BETWEEN)
            if looks > _FREE and looks % _BETWEEN == 0 and now() > deadline:
                raise TimeoutError(f"no optimal plan of {last} ops was found in time")
            spent = cost + seconds
            if spent < best.get(after, float("inf")):
                best[after] = spent
                origin[after] = (state, actions, live)
                # Never more than what is to come, so the first complete state is a fastest one.
                guess = spent + space.to_come[after[0]]
                heapq.heappush(queue, (guess, next(ticket), spent, after))
    return None


class _Space:
    """The moves between states of one graph under one budget."""

    def __init__(self, graph: Graph, budget_bytes: int) -> None:
        arrays = graph.arrays
        self.graph, self.room = graph, budget_bytes - graph.base_bytes
        self.resident = arrays.resident.tolist()
        self.sizes, ops = arrays.bytes.tolist(), len(graph.ops)
        writes = [0] * len(graph.storages)
        for written in arrays.writes:
            for storage in written:
                writes[storage] += 1
        # The bit of a storage's first version, which storage a bit is of, and what is there at the
        # end.
        self.first, self.owner, self.final = [], list[int](), 0
        for storage, times in enumerate(writes):
            self.first.append(len(self.owner))
            if not self.resident[storage]:
                self.owner += [storage] * (times + 1)
                if graph.storages[storage].keep:
                    self.final |= 1 << (self.first[-1] + times)
        self.to_come = [0.0] * (ops + 1)
        for op in range(ops - 1, -1, -1):
            self.to_come[op] = self.to_come[op + 1] + min(arrays.seconds[op])
        self.versions = _resident_versions(graph)
        self.needed = [self._needed(done) for done in range(ops + 1)]
        self.size_of = cache(self._size_of)

    def _bits(self, pairs: Iterator[tuple[int, int]]) -> int:
        mask = 0
        for storage, version in pairs:
            if not self.resident[storage]:
                mask |= 1 << (self.first[storage] + version)
        return mask

    def reads(self, op: int) -> int:
        """What an op needs, each in its version."""
        arrays = self.graph.arrays
        return self._bits(zip(arrays.reads[op], arrays.version[op], strict=True))

    def makes(self, op: int) -> int:
        """What is there after an op that was not before."""
        arrays = self.graph.arrays
        outputs = self._bits((storage, 0) for storage in arrays.outputs[op])
        version = dict(zip(arrays.reads[op], arrays.version[op], strict=True))
        return outputs | self._bits((write, version[write] + 1) for write in arrays.writes[op])

    def may_rerun(self, op: int, done: int) -> bool:
        """Whether an op that was done may run once more."""
        arrays, now = self.graph.arrays, self.versions[done]
        pairs = zip(arrays.reads[op], arrays.version[op], strict=True)
        return (
            self.graph.ops[op].repeatable
            and not any(self.resident[write] for write in arrays.writes[op])
            and all(now[storage] == version for storage, version in pairs if self.resident[storage])
        )

    def _needed(self, done: int) -> int:
        """What ops to come, the end, or a rebuild of such things can need."""
        arrays, ops = self.graph.arrays, len(self.graph.ops)
        mask = self.final
        for op in range(done, ops):
            mask |= self.reads(op)
            for storage in arrays.releases[op]:
                if not self.resident[storage]:
                    for version in range(self.owner.count(storage)):
                        mask |= 1 << (self.first[storage] + version)
        while True:
            more = mask
            for op in range(ops):
                # What cannot run again now may be run for the first time later, or is past.
                if self.graph.ops[op].repeatable and self.makes(op) & more:
                    more |= self.reads(op)
            if more == mask:
                return mask
            mask = more

    def _size_of(self, held: int) -> int:
        return sum(size for bit, size in self._held(held))

    def _held(self, held: int) -> Iterator[tuple[int, int]]:
        while held:
            bit = held & -held
            held ^= bit
            yield bit, self.sizes[self.owner[bit.bit_length() - 1]]

    def moves(self, done: int, held: int) -> Iterator[tuple[float, State, tuple[Action, ...], int]]:
        """Every run that can follow: seconds, the state after it, its actions, and live bytes."""
        graph, arrays = self.graph, self.graph.arrays
        for op in range(min(done + 1, len(graph.ops))):
            reads, makes = self.reads(op), self.makes(op)
            after = max(done, op + 1)
            if reads & ~held or (op < done and not self.may_rerun(op, done)):
                continue
            # A rerun that makes nothing anybody needs leads nowhere.
            if op < done and not makes & self.needed[done] & ~held:
                continue
            stays, there = reads, {self.owner[bit.bit_length() - 1] for bit, _ in self._held(held)}
            if op == done:
                gone = [release for release in arrays.releases[op] if not self.resident[release]]
                if any(
                    storage not in there and storage not in arrays.outputs[op] for storage in gone
                ):
                    continue
                for storage in gone:
                    stays |= held & self._whole(storage)
            written = self._bits(
                (read, version)
                for read, version in zip(arrays.reads[op], arrays.version[op], strict=True)
                if read in arrays.writes[op]
            )
            output_bytes = sum(self.sizes[output] for output in arrays.outputs[op])
            ways = enumerate(arrays.workspace_bytes[op])
            for (way, space), begin in product(ways, self._begins(op, held)):
                for left in self._room_made(begin, stays, self.room - output_bytes - space):
                    live = graph.base_bytes + self.size_of(left) + output_bytes + space
                    kept = left & ~written
                    # What is made a second time beside the first goes at once.
                    fresh = makes & ~self._others(kept)
                    target = (kept | fresh) & self.needed[after]
                    actions = (
                        *self._frees(held & ~left),
                        Action("run", graph.ops[op].name, way),
                        *self._frees((kept | fresh) & ~target),
                    )
                    yield arrays.seconds[op][way], (after, target), actions, live

    def _begins(self, op: int, held: int) -> list[int]:
        """What may be there when an op begins: its outputs in later versions, or not."""
        begins = [held]
        for storage in self.graph.arrays.outputs[op]:
            later = held & self._whole(storage) & ~(1 << self.first[storage])
            if later:
                begins += [begin & ~later for begin in begins]
        return begins

    def _whole(self, storage: int) -> int:
        return ((1 << self.owner.count(storage)) - 1) << self.first[storage]

    def _others(self, kept: int) -> int:
        """All versions of what is there."""
        mask = 0
        for bit, _ in self._held(kept):
            mask |= self._whole(self.owner[bit.bit_length() - 1])
        return mask

    def _frees(self, gone: int) -> Iterator[Action]:
        for bit, _ in self._held(gone):
            yield Action("free", self.graph.storages[self.owner[bit.bit_length() - 1]].name)

    def _room_made(self, held: int, stays: int, room: int) -> Iterator[int]:
        """Yield what can be left so that it fits, giving up no more than that takes."""
        over = self.size_of(held) - room
        if over <= 0:
            yield held
            return
        free = sorted(self._held(held & ~stays), key=lambda pair: -pair[1])
        # What all from each on could still give up.
        rest = [*accumulate((size for _, size in reversed(free)), initial=0)][::-1]
        work = [(0, held, over, 0)]
        while work:
            at, left, lacking, smallest = work.pop()
            if lacking <= 0:
                # Without the smallest of them it would not fit: nothing was given up for nothing.
                if lacking + smallest > 0:
                    yield left
                continue
            if lacking <= rest[at]:
                bit, size = free[at]
                work.append((at + 1, left, lacking, smallest))
                if size:
                    work.append((at + 1, left & ~bit, lacking - size, size))


def _resident_versions(graph: Graph) -> list[list[int]]:
    """Per number of ops done, the version of each resident storage; only first runs change it."""
    versions = [[0] * len(graph.storages)]
    for written in graph.arrays.writes:
        after = list(versions[-1])
        for storage in written:
            after[storage] += 1
        versions.append(after)
    return versions


def _path(
    origin: dict[State, tuple[State, tuple[Action, ...], int]],
    state: State,
    seconds: float,
    base: int,
) -> Exact:
    parts, most = [], base
    while state in origin:
        state, actions, live = origin[state]
        parts.append(actions)
        most = max(most, live)
    return Exact(tuple(action for part in parts[::-1] for action in part), most, seconds)
