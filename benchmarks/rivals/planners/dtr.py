"""`dtr`: dynamic tensor rematerialisation (Kirisame et al., ICLR 2021), simulated.

Nothing is decided in advance. Ops run in order; when an allocation would pass the budget, the
storage of least h = (c + n) / (m * s) goes: c the seconds of its makers, n the seconds of the
evicted storages it hangs together with, m its bytes, s the seconds since its last access. What is
missing is rebuilt when an op asks for it. The neighbourhood is kept by union-find, and a rebuilt
storage only takes its own seconds out of it, as the paper has it. Bookkeeping costs no time here.

What counts as an access is open: the program's own only, as in the authors' simulator, so that what
is rebuilt on the way to something else stays as stale as it was; or rebuilds as well. Now one, now
the other is faster, by up to a sixth. Both are tried, and the faster plan is taken.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from sn_memory import Graph, Plan
from sn_memory.plan.policies import choose

from .union_find import Groups
from .walk import Event, Origins, Walk, carry_out

# Candidates whose neighbourhood is looked at afresh; the others, if there are more, are ranked by
# what it last was.
_EXACT = 2000
# Beyond this many runs per op DTR thrashes, and the budget counts as too small for it.
_MOST_RUNS = 10


def dtr(graph: Graph, *, budget_bytes: int | None) -> Plan:
    """Evict by h under a budget; without one, or where it cannot be kept, nothing is evicted."""
    traces: list[list[Event]] = []
    for own_only in (True, False) if budget_bytes is not None else ():
        with suppress(_OutOfMemory):
            traces.append(_Online(graph, budget_bytes or 0, own_only=own_only).events())
    if not traces:
        walk = Walk(graph)
        for op in range(len(graph.ops)):
            walk.run(op)
        traces.append(walk.events)
    plans = [carry_out(graph, events, planner="dtr") for events in traces]
    return choose(plans, budget_bytes)


class _OutOfMemory(Exception):  # noqa: N818 - what happens to the program that is simulated
    """Nothing is left to evict, or rebuilding goes on without end."""


class _Online:
    """The runtime: what is there, what it would cost to lose it, and when it was last used."""

    def __init__(self, graph: Graph, budget_bytes: int, *, own_only: bool) -> None:
        self.graph, self.budget, self.own_only = graph, budget_bytes, own_only
        self.walk = Walk(graph)
        origin, arrays, count = self.walk.origin, graph.arrays, len(graph.storages)
        self.makers = origin.makers
        self.clock = 0.0
        self.live = graph.base_bytes
        self.at = self.runs = 0
        self.held = np.zeros(count, bool)
        self.pins = np.zeros(count, np.int64)
        self.accessed, self.near = np.zeros(count), np.zeros(count)
        self.sizes: list[int] = arrays.bytes.tolist()
        self.weight = np.maximum(arrays.bytes, 1).astype(float)
        self.droppable = np.array(origin.droppable, bool)
        self.complete_after = np.array([m[-1] if m else -1 for m in origin.makers])
        self.cost = np.array([sum(arrays.seconds[op][0] for op in m) for m in origin.makers])
        self.neighbours = _neighbours(graph, origin)
        self.released = _released(graph, origin)
        self.evicted = Groups(count)

    def events(self) -> list[Event]:
        arrays = self.graph.arrays
        for op in range(len(self.graph.ops)):
            self.at = op
            self.perform(op, arrays.reads[op])
            for storage in self.released[op]:
                if self.held[storage]:
                    self.evict(storage)
        return self.walk.events

    def perform(self, op: int, needs: tuple[int, ...]) -> None:
        """Run an op, rebuilding first what it needs; a stack, because chains are deep."""
        # What to run, what that rebuilds, and what it needs: locked at once, also what is not there
        # yet, or the rebuild of one input would evict another.
        stack: list[tuple[int, int | None, list[int]]] = [(op, None, self.lock(needs, None))]
        while stack:
            op, target, locked = stack[-1]
            missing = next((storage for storage in locked if not self.held[storage]), None)
            if missing is None:
                stack.pop()
                self.execute(op, target)
                self.pins[locked] -= 1
                continue
            stack.extend(
                (maker, missing, self.lock(self.graph.arrays.reads[maker], missing))
                for maker in reversed(self.makers[missing])
            )

    def lock(self, needs: tuple[int, ...], target: int | None) -> list[int]:
        """Keep what an op reads from being evicted; return it, without what is always there."""
        resident = self.graph.arrays.resident
        locked = [storage for storage in needs if not resident[storage] and storage != target]
        self.pins[locked] += 1
        return locked

    def execute(self, op: int, target: int | None) -> None:
        """Make room and run."""
        arrays = self.graph.arrays
        self.runs += 1
        fresh = tuple(s for s in arrays.outputs[op] if not self.held[s])
        wanted = sum(self.sizes[s] for s in arrays.outputs[op]) + arrays.workspace_bytes[op][0]
        if self.runs > _MOST_RUNS * len(self.graph.ops):
            raise _OutOfMemory
        while self.live + wanted > self.budget:
            self.evict(self.least())
        self.walk.events.append(Event("run", op, fresh))
        self.clock += arrays.seconds[op][0]
        for storage in fresh:
            # In a rebuild, what another op has yet to change is of no use to anyone.
            if target is None or storage == target or self.makers[storage] == (op,):
                self.hold(storage)
        if target is None or not self.own_only:
            for storage in (*arrays.reads[op], *arrays.outputs[op]):
                self.accessed[storage] = self.clock
        if target is not None and len(self.makers[target]) > 1:
            # Between its makers a storage is no candidate.
            first, last = self.makers[target][0], self.makers[target][-1]
            self.pins[target] += (op == first) - (op == last)

    def least(self) -> int:
        """Return the candidate of least h."""
        ready = self.held & self.droppable & (self.pins == 0) & (self.complete_after < self.at)
        free = np.flatnonzero(ready)
        if not free.size:
            raise _OutOfMemory
        size = self.weight[free] * np.maximum(self.clock - self.accessed[free], 1e-12)
        rank = (self.cost[free] + self.near[free]) / size
        few = np.argpartition(rank, min(_EXACT, free.size) - 1)[:_EXACT]
        for at in few.tolist():
            storage = int(free[at])
            self.near[storage] = self.neighbourhood(storage)
            rank[at] = (self.cost[storage] + self.near[storage]) / size[at]
        return int(free[few[rank[few].argmin()]])

    def hold(self, storage: int) -> None:
        self.held[storage] = True
        self.live += self.sizes[storage]
        if storage in self.evicted:
            self.evicted.remove(storage)
            self.refresh(storage)

    def evict(self, storage: int) -> None:
        self.held[storage] = False
        self.live -= self.sizes[storage]
        if self.droppable[storage]:
            self.evicted.add(storage, float(self.cost[storage]), self.neighbours[storage])
            self.refresh(storage)

    def refresh(self, storage: int) -> None:
        for other in self.neighbours[storage]:
            if self.held[other]:
                self.near[other] = self.neighbourhood(other)

    def neighbourhood(self, storage: int) -> float:
        return self.evicted.cost_of(self.neighbours[storage])


def _neighbours(graph: Graph, origin: Origins) -> list[list[int]]:
    """Per storage, those it can be rebuilt from and those that can be rebuilt from it."""
    neighbours: list[set[int]] = [set() for _ in origin.makers]
    for storage, makers in enumerate(origin.makers):
        for op in makers if origin.droppable[storage] else ():
            for source in graph.arrays.reads[op]:
                if origin.droppable[source] and source != storage:
                    neighbours[storage].add(source)
                    neighbours[source].add(storage)
    return [sorted(others) for others in neighbours]


def _released(graph: Graph, origin: Origins) -> list[list[int]]:
    """Per op, the storages whose owner lets go after it.

    One that cannot be rebuilt is held for all that may be rebuilt from it.
    """
    until = origin.last_use.copy()
    order = [s for s, makers in enumerate(origin.makers) if makers]
    for storage in sorted(order, key=lambda s: -origin.makers[s][-1]):
        for op in origin.makers[storage] if origin.droppable[storage] else ():
            for source in graph.arrays.reads[op]:
                until[source] = max(until[source], until[storage])
    released: list[list[int]] = [[] for _ in graph.ops]
    for storage in order:
        if not graph.arrays.keep[storage]:
            droppable = origin.droppable[storage]
            released[origin.last_use[storage] if droppable else until[storage]].append(storage)
    return released
