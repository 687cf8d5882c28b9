"""Room that a plan leaves, given to its copies: they start sooner, and end later, than they must.

A plan gives each copy to the host and back a window of just the seconds that it takes, by the
seconds of the ops beside it. On a machine an op is sometimes faster than that, and then the ops
wait. Where live bytes stay below the budget there is room: a copy back starts many times its own
seconds earlier than it has to, and what is copied out is given back as much later.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..graph.graph import Graph
from .plan import Action

# Windows are so many times what a copy takes, where there is room. Small copies are the many, and a
# lane that is a thread wakes milliseconds late where the machine has other work.
TIMES = 32.0
_PASSES = 3


def with_slack(graph: Graph, actions: Sequence[Action], room_bytes: int) -> tuple[Action, ...]:
    """Return the actions with wider windows for copies, live bytes within `room_bytes`.

    Actions of other kinds than run, free, offload and prefetch: returned as they are.
    """
    device = graph.device
    if not device.can_offload:
        return tuple(actions)
    row = _Row(graph, list(actions), room_bytes)
    if row.most > room_bytes:
        return tuple(actions)
    row.free_later()
    for _ in range(_PASSES):
        if not row.fetch_sooner():
            break
    return tuple(row.actions)


class _Row:
    def __init__(self, graph: Graph, actions: list[Action], room_bytes: int) -> None:
        self.graph, self.actions, self.room = graph, actions, room_bytes
        arrays, device = graph.arrays, graph.device
        self.index, self.names = graph.op_index, graph.storage_index
        self.bytes = arrays.bytes.tolist()
        assert device.to_host_bytes_per_s is not None
        assert device.to_device_bytes_per_s is not None
        self.out_s = [it / device.to_host_bytes_per_s + device.transfer_latency_s
                      for it in self.bytes]  # fmt: skip
        self.back_s = [it / device.to_device_bytes_per_s + device.transfer_latency_s
                       for it in self.bytes]  # fmt: skip
        self.touches = [
            {*arrays.reads[op], *arrays.outputs[op], *arrays.writes[op], *arrays.releases[op]}
            for op in range(len(graph.ops))
        ]
        self.live, self.clock = self.curves()
        self.most = max(self.live, default=0)

    def curves(self) -> tuple[list[int], list[float]]:
        """Return live bytes during each action, and when it starts if ops wait for nothing."""
        arrays = self.graph.arrays
        there = {at for at, it in enumerate(self.graph.storages) if it.resident}
        live, now = self.graph.base_bytes, 0.0
        curve: list[int] = []
        clock: list[float] = []
        for kind, target, way in self.actions:
            clock.append(now)
            beside = 0
            if kind == "run":
                op = self.index[target]
                new = set(arrays.outputs[op]) - there
                beside = arrays.workspace_bytes[op][way]
                beside += sum(self.bytes[it] for it in set(arrays.outputs[op]) & there)
                now += arrays.seconds[op][way]
            else:
                new = {self.names[target]} - there if kind == "prefetch" else set()
            live += sum(self.bytes[it] for it in new)
            there |= new
            curve.append(live + beside)
            if kind == "free":
                there.discard(self.names[target])
                live -= self.bytes[self.names[target]]
        return curve, clock

    def bars(self, at: int, storage: int, kinds: tuple[str, ...]) -> bool:
        """Whether a copy of a storage may not pass an action."""
        kind, target, _ = self.actions[at]
        if kind == "run":
            op = self.index[target]
            return self.graph.ops[op].fixed or storage in self.touches[op]
        return self.names[target] == storage or kind in kinds

    def fetch_sooner(self) -> bool:
        """Move copies back to an earlier action, the last one first; say whether any moved."""
        moved = False
        for at in reversed([i for i, it in enumerate(self.actions) if it.kind == "prefetch"]):
            storage = self.names[self.actions[at].target]
            begin = self.needed(storage, at) - TIMES * self.back_s[storage]
            place = at
            while (
                place > 0
                and self.clock[place] > begin
                and not self.bars(place - 1, storage, ("prefetch",))
                and self.live[place - 1] + self.bytes[storage] <= self.room
            ):
                place -= 1
            if place < at:
                moved = True
                self.actions.insert(place, self.actions.pop(at))
                self.held(place, at, self.bytes[storage])
                self.live.insert(place, self.live[place])
                self.live.pop(at + 1)
                self.clock.insert(place, self.clock[place])
                self.clock.pop(at + 1)
        return moved

    def held(self, first: int, last: int, size: int) -> None:
        """Count so many bytes more during actions from `first` to before `last`."""
        self.live[first:last] = [it + size for it in self.live[first:last]]

    def needed(self, storage: int, at: int) -> float:
        """Return when what is copied back at an action is used."""
        for later in range(at + 1, len(self.actions)):
            action = self.actions[later]
            if action.kind == "run" and storage in self.touches[self.index[action.target]]:
                return self.clock[later]
        return self.clock[at]

    def free_later(self) -> None:
        """Move the ends of copies out behind later actions, the last one first."""
        away = {it.target for it in self.actions if it.kind == "offload"}
        began: dict[str, int] = {}
        for at, (kind, target, _) in enumerate(self.actions):
            if kind == "offload":
                began[target] = at
        ends = [
            at
            for at, (kind, target, _) in enumerate(self.actions)
            if kind == "free" and target in away and began[target] < at
        ]
        for at in reversed(ends):
            storage = self.names[self.actions[at].target]
            start = self.clock[began[self.actions[at].target]]
            end = start + TIMES * self.out_s[storage]
            place = at
            while (
                place + 1 < len(self.actions)
                and self.clock[place + 1] < end
                and not self.bars(place + 1, storage, ())
                and self.live[place + 1] + self.bytes[storage] <= self.room
            ):
                place += 1
            if place > at:
                self.held(at + 1, place + 1, self.bytes[storage])
                self.actions.insert(place, self.actions.pop(at))
                self.live.insert(place, self.live[place])
                self.live.pop(at)
                self.clock.insert(place, self.clock[place])
                self.clock.pop(at)
