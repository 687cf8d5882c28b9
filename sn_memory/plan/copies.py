"""Give copies more time: start copies back earlier, free what is copied out later.

The search places a copy back right before its first reader, or in a window of exactly its predicted
seconds, and frees what is copied out as early as possible: then ops wait for each copy, or wherever
an op is faster than predicted. Where live bytes stay within the budget, a copy back starts earlier,
the last one first, and what is copied out is freed later.

A copy is an action `prefetch` or `offload`, or a run of a copy op: `graph/hosted.py` represents the
copies of parameters and optimizer state as ops of the kinds `fetch` and `store`.
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
    """The time of a step.

    seconds : when the last op, the last copy and the last update by the host have ended
    ops_s, copies_s, host_s : summed seconds of ops, of copies, and of updates by the host
    """

    seconds: float
    ops_s: float
    copies_s: float
    host_s: float = 0.0

    @property
    def hidden(self) -> float:
        """The share of copies and host updates that overlaps with ops; 1 if there are none."""
        lane_s = self.copies_s + self.host_s
        if not lane_s:
            return 1.0
        return 1.0 - min(1.0, max(0.0, self.seconds - self.ops_s) / lane_s)


def seconds_on_lanes(graph: Graph, actions: Sequence[tuple[str, str, int]]) -> LaneSeconds:
    """Return when these actions (kind, target, way) of a plan end, with copies on their lanes.

    `graph/hosted.py` represents a fetch as an op, whose seconds the search counts as if ops waited
    for it. When it runs it is a copy: it starts where the plan runs it, after the earlier copies on
    its lane, and the first op that reads its result waits for it. Memory that a store reads is
    freed when the store has ended. The host makes its updates one after the other, each when its
    gradient has arrived.

    Only the kinds `run` and `free` are supported: other copies are priced by `cost/offload.py`.
    """
    arrays, index, names = graph.arrays, graph.op_index, graph.storage_index
    clock = back = out = host = ops_s = copies_s = host_s = 0.0
    ready: dict[int, float] = {}
    leaving: dict[int, float] = {}
    # When the last write to host memory ended, by storage.
    written: dict[int, float] = {}
    for kind, target, way in actions:
        if kind == "free":
            storage = names[target]
            # Memory is freed on the ops' lane, which waits until the copy no longer needs it.
            clock = max(clock, leaving.pop(storage, 0.0), ready.pop(storage, 0.0))
            continue
        op = index[target]
        seconds = arrays.seconds[op][way]
        what = graph.ops[op].kind
        inputs_written = max(
            (written.get(storage, 0.0) for storage in arrays.reads[op]), default=0.0
        )
        arrived = max((ready.get(storage, 0.0) for storage in arrays.reads[op]), default=0.0)
        # Parallel to the ops: only readers of the result wait for it.
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


# Where there is room, windows are this many times as long as the copy. Most copies are small, and a
# lane that is a thread wakes up milliseconds late on a busy machine.
WIDE = 32.0
# A copy back overtakes no other: those before it have to move first.
_PASSES = 4


def spread_copies(
    graph: Graph, actions: Sequence[Action], room_bytes: int, *, times: float = 1.0
) -> tuple[Action, ...]:
    """Return the actions with copies moved away from the ops that wait for them.

    graph, actions : a graph and a plan's actions
    room_bytes : the limit of live bytes. Actions that exceed it are returned unchanged.
    times : how many times its own seconds a copy gets where there is room
    """
    lanes = any(action.kind in ("offload", "prefetch") for action in actions)
    if lanes and not graph.device.can_offload:
        return tuple(actions)
    timeline = _Timeline(graph, list(actions), room_bytes, times)
    # Already above the limit: nothing may move.
    if max(timeline.live, default=0) > room_bytes:
        return tuple(actions)
    for _ in range(_PASSES):
        if not timeline.start_earlier():
            break
    # Room left by copies back is used for copies out.
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
        """Return the seconds that an action occupies the ops' lane; 0 for a copy."""
        if action.kind != "run" or self.kinds[self.index[action.target]] in (*COPIES, BY_HOST):
            return 0.0
        return self.graph.arrays.seconds[self.index[action.target]][action.way]

    def is_copy(self, action: Action, kind: str, op_kind: str) -> bool:
        """Whether an action is a copy of this kind, or runs a copy op of this kind."""
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
        """Move each copy back to an earlier action, the last first; return whether any moved."""
        moved = False
        # When the next copy back occupies the lane: this one has to end before.
        taken = float("inf")
        backs = [
            at
            for at, action in enumerate(self.actions)
            if self.is_copy(action, "prefetch", "fetch")
        ]
        # The last one first, so that it makes room for those before it.
        for at in reversed(backs):
            action, seconds = self.actions[at], self.copy_seconds(self.actions[at])
            reads, (storage,) = self.ends(action)
            latest = min(taken, self.needed(storage, at)) - seconds
            # A window of `times` its own seconds; `latest` already leaves room for one.
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
        """Free what is copied out later, the last one first."""
        # By storage, when its copy out ends, plus the time by which the window exceeds the copy.
        lane, ends = 0.0, {}
        frees: list[tuple[int, float]] = []
        for at, action in enumerate(self.actions):
            if self.is_copy(action, "offload", "store"):
                seconds = self.copy_seconds(action)
                # On one lane a copy out starts when the previous one has ended.
                lane = max(lane, self.clock[at]) + seconds
                end = lane + (self.times - 1) * seconds
                ends.update(dict.fromkeys(self.ends(action)[0], end))
            elif action.kind == "free" and self.names[action.target] in ends:
                frees.append((at, ends.pop(self.names[action.target])))
        # From the back, so that a move does not renumber the remaining ones.
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
        """Return when the storage copied back at an action is first used."""
        for later in range(at + 1, len(self.actions)):
            action = self.actions[later]
            if action.kind == "run" and storage in self.touches[self.index[action.target]]:
                return self.clock[later]
        return self.clock[at]

    def bars(self, at: int, storages: set[int], kinds: tuple[str, ...]) -> bool:
        """Whether an action blocks a move: it touches these storages, or is of these kinds."""
        kind, target, _ = self.actions[at]
        if kind != "run":
            return self.names[target] in storages or kind in kinds
        op = self.index[target]
        fixed = self.graph.ops[op].fixed or self.kinds[op] in kinds
        return fixed or bool(storages & self.touches[op])

    def move(self, at: int, to: int, size: int) -> None:
        """Move an action; `size` more bytes are live during those that it passes."""
        first, last = (to, at) if to < at else (at + 1, to + 1)
        self.live[first:last] = [live + size for live in self.live[first:last]]
        self.actions.insert(to, self.actions.pop(at))
        self.live.insert(to, self.live.pop(at))
        self.clock.insert(to, self.clock.pop(at))
        # It does not occupy the ops' lane, so it starts when its new neighbour does.
        near = to + 1 if to < at else to - 1
        self.live[to], self.clock[to] = self.live[near], self.clock[near]
