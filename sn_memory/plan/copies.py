"""Copies that start ahead and end late, whether they are actions or ops of the plan.

The search places a copy back right before its first reader, or in a window of just the seconds that
it takes, and gives the memory of what is copied out back as early: then the ops wait, for each copy
or wherever an op was faster than it was said to be. Where live bytes stay within the budget there
is room: a copy back starts earlier, the last one first, and what is copied out is given back later.

A copy is an action `prefetch` or `offload`, or a run of an op that is one: `graph/hosted.py` writes
the copies of parameters and optimizer state as ops of the kinds `fetch` and `store`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..graph.graph import Graph
from .buffers import live_bytes
from .plan import Action

COPIES = ("fetch", "store", "bring")
BY_HOST = "host update"


@dataclass(frozen=True)
class LaneSeconds:
    """What a step takes.

    seconds : when the last op, the last copy and the last update by the host have ended
    ops_s, copies_s, host_s : summed seconds of ops, of copies, and of updates by the host
    """

    seconds: float
    ops_s: float
    copies_s: float
    host_s: float = 0.0

    @property
    def hidden(self) -> float:
        """The share of copies and host updates that overlaps with ops; 1 where there are none."""
        lane_s = self.copies_s + self.host_s
        if not lane_s:
            return 1.0
        return 1.0 - min(1.0, max(0.0, self.seconds - self.ops_s) / lane_s)


def seconds_on_lanes(graph: Graph, actions: Sequence[tuple[str, str, int]]) -> LaneSeconds:
    """Return when these actions (kind, target, way) of a plan end, copies on their lanes.

    `graph/hosted.py` writes a fetch as an op, whose seconds the search counts as if the ops waited
    for it. Carried out it is a copy: it starts where the plan runs it, behind the copies before it
    on its lane, and the first op to read what it brings waits for it. Memory that a store reads is
    given back when the store has ended. The host makes its updates one after the other, each when
    its gradient is there.

    Only the kinds `run` and `free` are known: what else moves is priced by `cost/offload.py`.
    """
    arrays, index, names = graph.arrays, graph.op_index, graph.storage_index
    clock = back = out = host = ops_s = copies_s = host_s = 0.0
    ready: dict[int, float] = {}
    leaving: dict[int, float] = {}
    # When the last write to what is on the host ended, by storage.
    written: dict[int, float] = {}
    for kind, target, way in actions:
        if kind == "free":
            storage = names[target]
            # Memory is given back on the ops' lane, which waits until the copy no longer needs it.
            clock = max(clock, leaving.pop(storage, 0.0), ready.pop(storage, 0.0))
            continue
        op = index[target]
        seconds = arrays.seconds[op][way]
        what = graph.ops[op].kind
        inputs_written = max(
            (written.get(storage, 0.0) for storage in arrays.reads[op]), default=0.0
        )
        arrived = max((ready.get(storage, 0.0) for storage in arrays.reads[op]), default=0.0)
        # Beside the ops: only what reads the result waits for it.
        if what == BY_HOST:
            host_s += seconds
            host = max(host, clock, inputs_written) + seconds
            written.update(dict.fromkeys(arrays.writes[op], host))
            continue
        if what not in COPIES:
            clock = max(clock, arrived) + seconds
            ops_s += seconds
            continue
        copies_s += seconds
        if what == "store":
            out = max(out, clock, arrived) + seconds
            leaving.update(dict.fromkeys(arrays.reads[op], out))
            written.update(dict.fromkeys(arrays.writes[op], out))
        else:
            back = max(back, clock, inputs_written) + seconds
            ready.update(dict.fromkeys((*arrays.outputs[op], *arrays.writes[op]), back))
    end = max([clock, out, host, *ready.values()])
    return LaneSeconds(end, ops_s, copies_s, host_s)


# Windows are so many times what a copy takes, where there is room. Small copies are the many, and a
# lane that is a thread wakes milliseconds late where the machine has other work.
WIDE = 32.0
# A copy back passes no other: those before it have to move first.
_PASSES = 4


def spread_copies(
    graph: Graph, actions: Sequence[Action], room_bytes: int, *, times: float = 1.0
) -> tuple[Action, ...]:
    """Return the actions with copies moved apart from the ops that wait for them.

    graph, actions : a plan of it
    room_bytes : what live bytes stay within. Actions that need more stay as they are.
    times : how many times its own seconds a copy gets, where there is room
    """
    lanes = any(action.kind in ("offload", "prefetch") for action in actions)
    if lanes and not graph.device.can_offload:
        return tuple(actions)
    timeline = _Timeline(graph, list(actions), room_bytes, times)
    # Above the room already: nothing may move.
    if max(timeline.live, default=0) > room_bytes:
        return tuple(actions)
    for _ in range(_PASSES):
        if not timeline.start_earlier():
            break
    # What room copies back leave is for those out.
    timeline.free_later()
    return tuple(timeline.actions)


class _Timeline:
    """The actions of a plan, with the bytes live during each and when it starts if no op waits."""

    def __init__(self, graph: Graph, actions: list[Action], room: int, times: float) -> None:
        self.graph, self.actions, self.room, self.times = graph, actions, room, times
        self.index, self.names = graph.op_index, graph.storage_index
        arrays = graph.arrays
        self.bytes: list[int] = arrays.bytes.tolist()
        self.kinds = [op.kind for op in graph.ops]
        self.touches = [{*arrays.reads[op], *arrays.outputs[op]} for op in range(len(graph.ops))]
        self.live = live_bytes(graph, actions)
        self.clock, now = [], 0.0
        for action in actions:
            self.clock.append(now)
            now += self.op_seconds(action)

    def op_seconds(self, action: Action) -> float:
        """Return the seconds that an action keeps the ops' lane for; none for a copy."""
        if action.kind != "run" or self.kinds[self.index[action.target]] in (*COPIES, BY_HOST):
            return 0.0
        return self.graph.arrays.seconds[self.index[action.target]][action.way]

    def is_copy(self, action: Action, kind: str, op_kind: str) -> bool:
        """Whether an action is such a copy, or a run of an op that is."""
        return action.kind == kind or (
            action.kind == "run" and self.kinds[self.index[action.target]] == op_kind
        )

    def ends(self, action: Action) -> tuple[Sequence[int], Sequence[int]]:
        """Return the storages that a copy reads and those that it makes."""
        if action.kind == "run":
            op = self.index[action.target]
            return self.graph.arrays.reads[op], self.graph.arrays.outputs[op]
        storage = (self.names[action.target],)
        return (storage, ()) if action.kind == "offload" else ((), storage)

    def copy_seconds(self, action: Action) -> float:
        """Return how long a copy takes on its lane."""
        if action.kind == "run":
            return self.graph.arrays.seconds[self.index[action.target]][action.way]
        device = self.graph.device
        size = self.bytes[self.names[action.target]]
        return device.to_host_s(size) if action.kind == "offload" else device.to_device_s(size)

    def start_earlier(self) -> bool:
        """Move each copy back to an earlier action, the last one first; say whether any moved."""
        moved = False
        # From when on a later copy back has the lane: this one has to end before.
        taken = float("inf")
        backs = [
            at
            for at, action in enumerate(self.actions)
            if self.is_copy(action, "prefetch", "fetch")
        ]
        # The last one first, so that it is out of the way of those before it.
        for at in reversed(backs):
            action, seconds = self.actions[at], self.copy_seconds(self.actions[at])
            reads, (storage,) = self.ends(action)
            latest = min(taken, self.needed(storage, at)) - seconds
            # A window of `times` its own seconds, of which `latest` leaves room for one.
            wanted = latest - (self.times - 1) * seconds
            touched, place = {*reads, storage}, at
            while (
                place > 0
                and self.clock[place] > wanted
                and not self.bars(place - 1, touched, ("prefetch", "fetch"))
                and self.live[place - 1] + self.bytes[storage] <= self.room
            ):
                place -= 1
            if place < at:
                moved = True
                self.move(at, place, self.bytes[storage])
            taken = max(latest, self.clock[place])
        return moved

    def free_later(self) -> None:
        """Give what is copied out back later, the last one first."""
        # By storage, when its copy out has ended, with what the window is wider than the copy.
        lane, ends = 0.0, {}
        frees: list[tuple[int, float]] = []
        for at, action in enumerate(self.actions):
            if self.is_copy(action, "offload", "store"):
                seconds = self.copy_seconds(action)
                # One lane: a copy out starts when the one before it has ended.
                lane = max(lane, self.clock[at]) + seconds
                end = lane + (self.times - 1) * seconds
                ends.update(dict.fromkeys(self.ends(action)[0], end))
            elif action.kind == "free" and self.names[action.target] in ends:
                frees.append((at, ends.pop(self.names[action.target])))
        # From the back, so that moving one does not renumber those still to come.
        for at, end in reversed(frees):
            storage, place = self.names[self.actions[at].target], at
            while (
                place + 1 < len(self.actions)
                and self.clock[place + 1] < end
                and not self.bars(place + 1, {storage}, ())
                and self.live[place + 1] + self.bytes[storage] <= self.room
            ):
                place += 1
            if place > at:
                self.move(at, place, self.bytes[storage])

    def needed(self, storage: int, at: int) -> float:
        """Return when what is copied back at an action is used."""
        for later in range(at + 1, len(self.actions)):
            action = self.actions[later]
            if action.kind == "run" and storage in self.touches[self.index[action.target]]:
                return self.clock[later]
        return self.clock[at]

    def bars(self, at: int, storages: set[int], kinds: tuple[str, ...]) -> bool:
        """Whether what touches these storages may not pass an action, nor one of these kinds."""
        kind, target, _ = self.actions[at]
        if kind != "run":
            return self.names[target] in storages or kind in kinds
        op = self.index[target]
        fixed = self.graph.ops[op].fixed or self.kinds[op] in kinds
        return fixed or bool(storages & self.touches[op])

    def move(self, at: int, to: int, size: int) -> None:
        """Move an action; so many bytes more are live during those that it passes."""
        first, last = (to, at) if to < at else (at + 1, to + 1)
        self.live[first:last] = [live + size for live in self.live[first:last]]
        self.actions.insert(to, self.actions.pop(at))
        self.live.insert(to, self.live.pop(at))
        self.clock.insert(to, self.clock.pop(at))
        # It keeps no lane of the ops busy, so it starts when its new neighbour does.
        near = to + 1 if to < at else to - 1
        self.live[to], self.clock[to] = self.live[near], self.clock[near]
