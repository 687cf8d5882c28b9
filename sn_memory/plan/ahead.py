"""Copies that start ahead: fetches moved before, and the ends of stores moved behind, other ops.

The search places a fetch right before its first reader and gives the memory of what was stored back
at once: then the ops wait for every copy. Here each fetch starts as much earlier as its copy takes,
and what is being written is given back as much later, as far as the budget has room for its bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..cost.state_lanes import BY_HOST, COPIES
from ..graph.graph import Graph
from .plan import Action

_PASSES = 4


def ahead(graph: Graph, actions: Sequence[Action], budget_bytes: int) -> tuple[Action, ...]:
    """Return the actions with copies moved apart from the ops that wait for them.

    Parameters
    ----------
    graph
        One of `with_state`.
    actions
        Of a plan of it with the kinds `run` and `free`, live bytes within the budget.
    budget_bytes
        What stays the most that is live.
    """
    mover = _Mover(graph, list(actions), budget_bytes)
    # A fetch passes no other: those before it have to move first.
    for _ in range(_PASSES):
        if not mover.fetch_earlier():
            break
    mover.free_later()
    return tuple(mover.actions)


def live_bytes(graph: Graph, actions: Sequence[Action]) -> list[int]:
    """Return the bytes live during each action, of a plan with the kinds `run` and `free`."""
    arrays, index, names = graph.arrays, graph.op_index, graph.storage_index
    size = arrays.bytes.tolist()
    there = {at for at, it in enumerate(graph.storages) if it.resident}
    live, curve = graph.base_bytes, []
    for kind, target, way in actions:
        if kind == "free":
            curve.append(live)
            there.discard(names[target])
            live -= size[names[target]]
            continue
        op = index[target]
        beside = arrays.workspace_bytes[op][way]
        for storage in arrays.outputs[op]:
            if storage in there:
                beside += size[storage]
            else:
                there.add(storage)
                live += size[storage]
        curve.append(live + beside)
    return curve


class _Mover:
    def __init__(self, graph: Graph, actions: list[Action], budget_bytes: int) -> None:
        self.graph, self.actions, self.budget = graph, actions, budget_bytes
        arrays = graph.arrays
        self.bytes = arrays.bytes.tolist()
        self.index, self.names = graph.op_index, graph.storage_index
        self.reads, self.outputs, self.writes = arrays.reads, arrays.outputs, arrays.writes
        self.kinds = [op.kind for op in graph.ops]
        self.fixed = [op.fixed for op in graph.ops]

    def seconds(self, action: Action) -> float:
        """Return the seconds that an action keeps the ops' lane for; none for a copy."""
        if action.kind != "run" or self.is_copy(action):
            return 0.0
        return self.graph.arrays.seconds[self.index[action.target]][action.way]

    def is_copy(self, action: Action, kind: str = "") -> bool:
        """Whether an action is a copy, or such a one; or an update by the host."""
        if action.kind != "run":
            return False
        found = self.kinds[self.index[action.target]]
        return found == kind if kind else found in (*COPIES, BY_HOST)

    def fetch_earlier(self) -> bool:
        """Move each fetch to where its copy ends when it is needed, the last one first."""
        live, clock, moved = live_bytes(self.graph, self.actions), self.clock(), False
        taken = float("inf")  # from when on a later fetch has the lane
        fetches = [at for at, it in enumerate(self.actions) if self.is_copy(it, "fetch")]
        for at in reversed(fetches):
            action = self.actions[at]
            op = self.index[action.target]
            (storage,) = self.outputs[op]
            begin = min(taken, self.needed(storage, at, clock))
            begin -= self.graph.arrays.seconds[op][action.way]
            place = at
            while place > 0 and clock[place] > begin and self.may_pass(place - 1, op, storage):
                if live[place - 1] + self.bytes[storage] > self.budget:
                    break
                place -= 1
            if place < at:
                moved = True
                self.actions.insert(place, self.actions.pop(at))
                live.pop(at)
                live[place:at] = [it + self.bytes[storage] for it in live[place:at]]
                live.insert(place, live[place])
                clock.pop(at)
                clock.insert(place, clock[place])
            taken = max(begin, clock[place])
        return moved

    def clock(self) -> list[float]:
        """Return when each action starts, if no op waits for a copy."""
        found, now = [], 0.0
        for action in self.actions:
            found.append(now)
            now += self.seconds(action)
        return found

    def needed(self, storage: int, at: int, clock: list[float]) -> float:
        """Return when what is fetched at an action is read."""
        for later in range(at + 1, len(self.actions)):
            action = self.actions[later]
            if action.kind == "run" and storage in self.reads[self.index[action.target]]:
                return clock[later]
        return clock[at]

    def may_pass(self, at: int, op: int, storage: int) -> bool:
        """Whether a fetch may come before this action."""
        action = self.actions[at]
        if action.kind == "free":
            return self.names[action.target] != storage
        other = self.index[action.target]
        if self.fixed[other] or self.kinds[other] == "fetch":
            return False
        touched = {*self.reads[other], *self.outputs[other], *self.writes[other]}
        return storage not in touched and not touched & set(self.reads[op])

    def free_later(self) -> None:
        """Let what is being stored be given back when that has ended, where there is room."""
        live, clock = live_bytes(self.graph, self.actions), self.clock()
        lane = 0.0
        ends: dict[int, float] = {}
        waiting: list[tuple[Action, float]] = []
        result: list[Action] = []
        for at, action in enumerate(self.actions):
            size = sum(self.bytes[self.names[it.target]] for it, _ in waiting)
            # The oldest go first, until there is room for what comes next.
            while waiting and (clock[at] >= waiting[0][1] or live[at] + size > self.budget):
                early, _ = waiting.pop(0)
                size -= self.bytes[self.names[early.target]]
                result.append(early)
            if self.is_copy(action, "store"):
                op = self.index[action.target]
                lane = max(lane, clock[at]) + self.graph.arrays.seconds[op][action.way]
                ends.update(dict.fromkeys(self.reads[op], lane))
            if action.kind == "free" and self.names[action.target] in ends:
                waiting.append((action, ends[self.names[action.target]]))
                continue
            result.append(action)
        self.actions = [*result, *(it for it, _ in waiting)]
