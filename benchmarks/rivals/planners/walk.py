"""Shared by these planners: follow decisions through a graph, and make its plan.

sn_memory's own planners are choices that its simulator carries out. Here a policy says which
storages are dropped, and what happens after a rebuild. `origins` says until when each storage can
be made again; `follow` walks the graph once and finds the runs that follow from the decisions;
`carry_out` finds where memory can be given back, and keeps the clocks of ops and copies as
`docs/graph_format.md` has them. Kept apart, a policy cannot forget a free, and a checkpoint lives
exactly as long as somebody may be rebuilt from it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from sn_memory import Action, Graph, Plan
from sn_memory.base.progress import spend
from sn_memory.plan.simulate import finished_plan

# Units of work to note a run, and to carry an event out.
RUN = EVENT = 100


Rule = Callable[[int], bool]


@dataclass(frozen=True)
class Origins:
    """Per storage, by number; the number of ops stands for "not within the graph".

    Attributes
    ----------
    makers
        The ops that rebuild it, in order: its producer, then those that changed it in place.
    last_use
        Its last use by any op; its producer where nobody reads it.
    last_forward, first_backward
        Its last use by a forward op, its producer included; its first use by any other.
    expiry
        It can be rebuilt just before op t for every t <= expiry; -1 is never.
    droppable
        Whether it may be dropped whenever it is complete and rebuilt for every later use.
    forward
        Whether forward ops make and complete it.
    """

    makers: list[tuple[int, ...]]
    last_use: list[int]
    last_forward: list[int]
    first_backward: list[int]
    expiry: list[int]
    droppable: list[bool]
    forward: list[bool]


def origins(graph: Graph) -> Origins:
    """Find them all, in time linear in the size of the graph (sorting aside)."""
    arrays, count, end = graph.arrays, len(graph.storages), len(graph.ops)
    producer: list[int] = arrays.producer.tolist()
    forward_op = [op.phase == "forward" for op in graph.ops]
    writers: list[list[int]] = [[] for _ in range(count)]
    for op, written in enumerate(arrays.writes):
        for storage in written:
            writers[storage].append(op)
    last_use, last_forward, first_backward = producer.copy(), producer.copy(), [end] * count
    settled = [True] * count
    for op, reads in enumerate(arrays.reads):
        for storage, version in zip(reads, arrays.version[op], strict=True):
            # Somebody else saw an earlier version: rebuilding the last one would not serve them.
            if version < len(writers[storage]) and storage not in arrays.writes[op]:
                settled[storage] = False
        for storage in reads:
            last_use[storage] = op
            if forward_op[op]:
                last_forward[storage] = op
            else:
                first_backward[storage] = min(first_backward[storage], op)
    makers = [
        () if arrays.resident[storage] else (producer[storage], *writers[storage])
        for storage in range(count)
    ]
    expiry, droppable = [-1] * count, [False] * count
    # Whatever the makers of a storage read is settled, and so complete, before the last of them.
    for storage in sorted(range(count), key=lambda s: makers[s][-1] if makers[s] else -1):
        if not makers[storage] or not settled[storage]:
            continue
        until = end
        for op in makers[storage]:
            alone = all(written == storage for written in arrays.writes[op])
            if not (alone and graph.ops[op].repeatable):
                until = -1
                break
            for source, version in zip(arrays.reads[op], arrays.version[op], strict=True):
                if source == storage:
                    continue
                if version < len(writers[source]):
                    until = min(until, writers[source][version])
                if droppable[source]:
                    until = min(until, expiry[source])
        expiry[storage] = until
        droppable[storage] = until >= last_use[storage] and not bool(arrays.keep[storage])
    # What a backward op still changes is not ours to move between the two passes.
    forward = [
        bool(makers_of) and forward_op[makers_of[0]] and makers_of[-1] <= last_forward[storage]
        for storage, makers_of in enumerate(makers)
    ]
    return Origins(makers, last_use, last_forward, first_backward, expiry, droppable, forward)


class Event(NamedTuple):
    """One entry of a sequence.

    `run` an op, making the storages in `fresh` anew (its other outputs are there already);
    `offload`, `prefetch` a storage; `settle`: its device copy must be gone now.
    """

    kind: str
    number: int
    fresh: tuple[int, ...] = ()


@dataclass
class Walk:
    """A walk over a graph that notes events.

    present : storages that can be read: on the device, as far as the policy knows
    host : storages whose only copy is on the host
    """

    graph: Graph
    origin: Origins = field(init=False)
    events: list[Event] = field(default_factory=list)
    present: set[int] = field(default_factory=set)
    host: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.origin = origins(self.graph)
        self.present.update(s for s, resident in enumerate(self.graph.arrays.resident) if resident)

    def run(self, op: int) -> None:
        """Run an op of the graph for the first time; what it reads must be there."""
        spend(RUN)
        outputs = self.graph.arrays.outputs[op]
        self.events.append(Event("run", op, outputs))
        self.present.update(outputs)

    def bring(self, storages: Iterable[int]) -> list[int]:
        """Make storages readable by prefetching or rebuilding; return what was rebuilt on the way.

        Recursion would break on deep nets, so what is left to do is a stack of tasks: `(storage,
        None)` asks for a storage, `(storage, op)` runs one of its makers.
        """
        arrays, rebuilt = self.graph.arrays, []
        tasks: list[tuple[int, int | None]] = [(s, None) for s in reversed(list(storages))]
        while tasks:
            storage, op = tasks.pop()
            if storage in self.present:
                continue
            if storage in self.host:
                self.prefetch(storage)
            elif op is None:
                for maker in reversed(self.origin.makers[storage]):
                    tasks.append((storage, maker))
                    tasks.extend((s, None) for s in reversed(arrays.reads[maker]) if s != storage)
            else:
                rebuilt += self._rerun(storage, op)
        return rebuilt

    def offload(self, storage: int) -> None:
        """Start copying a storage out; it stays readable until `leave`."""
        self.events.append(Event("offload", storage))

    def leave(self, storage: int) -> None:
        """Read an offloaded storage no more before it is prefetched."""
        self.present.discard(storage)
        self.host.add(storage)

    def prefetch(self, storage: int) -> None:
        """Start copying a storage back."""
        self.events.append(Event("prefetch", storage))
        self.host.discard(storage)
        self.present.add(storage)

    def settle(self, storage: int) -> None:
        """Wait here, at the latest, until an offloaded storage has left."""
        self.events.append(Event("settle", storage))

    def _rerun(self, storage: int, op: int) -> list[int]:
        spend(RUN)
        outputs = self.graph.arrays.outputs[op]
        for other in outputs:
            # Making what is on the host a second time would leave two versions of the truth.
            if other in self.host:
                self.prefetch(other)
        fresh = tuple(s for s in outputs if s not in self.present)
        self.events.append(Event("run", op, fresh))
        makers = self.origin.makers
        # A storage is there once the last op that changes it has run.
        complete = [s for s in fresh if makers[s] == (op,)]
        if op == makers[storage][-1] and storage not in complete:
            complete.append(storage)
        self.present.update(complete)
        return complete


def follow(
    graph: Graph,
    *,
    kept: Container[int],
    every_use: Container[int] = (),
    offloaded: Collection[int] = (),
    checkpoint: Rule | None = None,
) -> list[Event]:
    """Walk the graph; return its events.

    Parameters
    ----------
    kept
        Storages made by the forward pass that stay; all others are dropped after their last
        forward use, where that is possible.
    each
        Rebuilt storages that go again once something has been rebuilt from them, the
        memory-centric way; others stay once rebuilt.
    offloaded
        Kept storages that wait on the host: copied out as soon as they are complete.
    checkpoint
        Says of an op whether transfers keep step with it: a copy out is waited for before the
        next such forward op, a copy back starts before the last such op ahead of its reader.
    """
    walk = Walk(graph)
    origin, arrays = walk.origin, graph.arrays
    leaves: dict[int, list[int]] = {}
    starts: dict[int, list[int]] = {}
    for storage, makers in enumerate(origin.makers):
        if not origin.forward[storage]:
            continue
        if storage in offloaded:
            leaves.setdefault(origin.last_forward[storage], []).append(storage)
            # Copied out as soon as it is complete, read until its last forward use.
            starts.setdefault(makers[-1], []).append(storage)
        elif storage not in kept and origin.droppable[storage]:
            leaves.setdefault(origin.last_forward[storage], []).append(storage)
    pending_copies: list[int] = []
    for op in range(len(graph.ops)):
        if checkpoint is not None and pending_copies and checkpoint(op):
            for storage in pending_copies:
                walk.settle(storage)
            pending_copies.clear()
        rebuilt = walk.bring(arrays.reads[op])
        for storage in _forget(walk, rebuilt, every_use, offloaded, op):
            walk.offload(storage)
            walk.leave(storage)
            walk.settle(storage)
        walk.run(op)
        for storage in starts.get(op, ()):
            walk.offload(storage)
        for storage in leaves.get(op, ()):
            if storage in offloaded:
                walk.leave(storage)
                pending_copies.append(storage)
            else:
                walk.present.discard(storage)
    return walk.events if checkpoint is None else fetch_ahead(graph, walk.events, checkpoint)


def _forget(
    walk: Walk, rebuilt: list[int], every_use: Container[int], offloaded: Container[int], op: int
) -> list[int]:
    """Drop what was rebuilt and used to rebuild more; return what can wait on the host again.

    What nothing was rebuilt from stays: it is what the op asked for.
    """
    origin, reads = walk.origin, walk.graph.arrays.reads
    sources = {s: {x for m in origin.makers[s] for x in reads[m]} - {s} for s in rebuilt}
    stepping = set().union(*sources.values())
    waiting: dict[int, None] = {}
    for storage in rebuilt:
        if storage in every_use and storage in stepping:
            walk.present.discard(storage)
            if origin.last_use[storage] > op:
                waiting.update(dict.fromkeys(x for x in sources[storage] if x in offloaded))
    return [storage for storage in waiting if storage in walk.present]


def fetch_ahead(graph: Graph, events: list[Event], checkpoint: Rule) -> list[Event]:
    """Start each copy back before the checkpoint op that precedes its reader, if it has left."""
    result: list[Event] = []
    left: dict[int, int] = {}
    for event in events:
        if event.kind == "prefetch":
            place = len(result)
            # It cannot start before its own copy out.
            while place > left[event.number]:
                place -= 1
                before = result[place]
                if (
                    before.kind == "run"
                    and graph.ops[before.number].phase != "forward"
                    and checkpoint(before.number)
                ):
                    break
            else:
                # No checkpoint in between: right before its reader.
                place = len(result)
            result.insert(place, event)
            left = {s: at + (at > place) for s, at in left.items()}
            continue
        result.append(event)
        if event.kind == "offload":
            left[event.number] = len(result)
    return result


class Meter:
    """What is on the device, and when each lane is free.

    graph : what is carried out
    within_bytes : take the fastest way of each op that fits into this; None takes the default way

    dead : storages that nobody reads any more, but whose copy to the host is not complete
    """

    def __init__(self, graph: Graph, within_bytes: int | None = None) -> None:
        self.graph, self.within_bytes = graph, within_bytes
        self.sizes: list[int] = graph.arrays.bytes.tolist()
        self.actions: list[Action] = []
        self.present: set[int] = set()
        self.dead: set[int] = set()
        # When a storage can be read; when its copy on the host is, or will be, complete.
        self.ready: dict[int, float] = {}
        self.copied: dict[int, float] = {}
        self.leaving: dict[int, float] = {}
        self.compute = self.up = self.down = 0.0
        self.live = self.peak = graph.base_bytes

    def run(self, op: int) -> list[int]:
        """Run an op; return the outputs that had to be allocated."""
        arrays = self.graph.arrays
        allocated = [s for s in arrays.outputs[op] if s not in self.present]
        twice = sum(self.sizes[s] for s in arrays.outputs[op] if s in self.present)
        self.present.update(allocated)
        self.live += sum(self.sizes[s] for s in allocated)
        way = self._way(op, twice)
        self.actions.append(Action("run", self.graph.ops[op].name, way))
        self._reach(self.live + twice + arrays.workspace_bytes[op][way])
        start = max([self.compute, *(self.ready.get(s, 0.0) for s in arrays.reads[op])])
        self.compute = start + arrays.seconds[op][way]
        for storage in (*arrays.outputs[op], *arrays.writes[op]):
            self.ready[storage] = self.compute
        return allocated

    def _way(self, op: int, twice: int) -> int:
        spaces, seconds = self.graph.arrays.workspace_bytes[op], self.graph.arrays.seconds[op]
        if self.within_bytes is None or len(spaces) == 1:
            return 0
        left = self.within_bytes - self.live - twice
        fitting = [way for way, space in enumerate(spaces) if space <= left]
        # Over the limit in any way: the least scratch memory breaks it least.
        if not fitting:
            return min(range(len(spaces)), key=lambda way: (spaces[way], seconds[way]))
        return min(fitting, key=lambda way: (seconds[way], spaces[way]))

    def free(self, storage: int) -> None:
        """Give the memory back; waits for a copy under way."""
        self._note("free", storage)
        self.present.discard(storage)
        self.dead.discard(storage)
        self.live -= self.sizes[storage]
        copied, ready = self.leaving.pop(storage, 0.0), self.ready.pop(storage, 0.0)
        self.compute = max(self.compute, copied, ready)

    def die(self, storage: int) -> None:
        """Free a storage, or mark it for `collect` while its copy is under way."""
        if self.leaving.get(storage, 0.0) > self.compute:
            self.dead.add(storage)
        else:
            self.free(storage)

    def collect(self) -> None:
        """Free the dead whose copies are complete."""
        for storage in sorted(self.dead):
            if self.leaving[storage] <= self.compute:
                self.free(storage)

    def offload(self, storage: int) -> None:
        """Start copying to the host."""
        self._note("offload", storage)
        start = max(self.down, self.ready.get(storage, 0.0), self.compute)
        self.down = self.graph.device.to_host_s(self.sizes[storage], start)
        self.copied[storage] = self.leaving[storage] = self.down

    def prefetch(self, storage: int) -> None:
        """Start copying back, into memory that is allocated now."""
        if storage in self.present:
            self.free(storage)
        self._note("prefetch", storage)
        self.present.add(storage)
        self.live += self.sizes[storage]
        self._reach(self.live)
        start = max(self.up, self.copied.pop(storage), self.compute)
        self.up = self.graph.device.to_device_s(self.sizes[storage], start)
        self.ready[storage] = self.up

    def _note(self, kind: str, storage: int) -> None:
        self.actions.append(Action(kind, self.graph.storages[storage].name))

    def _reach(self, live: int) -> None:
        self.peak = max(self.peak, live)


def carry_out(
    graph: Graph,
    events: list[Event],
    *,
    planner: str,
    within_bytes: int | None = None,
) -> Plan:
    """Turn a sequence into a plan.

    events : what a Walk noted; every op of the graph runs at least once
    within_bytes : take the fastest way that fits into this at each op; None takes the default way
    """
    meter = Meter(graph, within_bytes)
    for (kind, number, fresh), dying in zip(events, _deaths(graph, events), strict=True):
        spend(EVENT)
        meter.collect()
        if kind == "run":
            allocated = meter.run(number)
            # What came out again and nobody asked for: its last reader has gone before.
            dying += [storage for storage in allocated if storage not in fresh]
        elif kind == "offload":
            meter.offload(number)
        elif kind == "prefetch":
            meter.prefetch(number)
        elif number in meter.dead:
            meter.free(number)
        for storage in dying:
            meter.die(storage)
    for storage in list(meter.dead):
        meter.free(storage)
    return finished_plan(
        graph,
        meter.actions,
        planner=planner,
        peak_bytes=meter.peak,
        seconds=max([meter.compute, *meter.ready.values()]),
    )


def _deaths(graph: Graph, events: list[Event]) -> list[list[int]]:
    """Per event, the storages that nobody reads after it before they are made again."""
    arrays = graph.arrays
    needed = {s for s, held in enumerate((arrays.keep | arrays.resident).tolist()) if held}
    deaths: list[list[int]] = [[] for _ in events]
    for at in range(len(events) - 1, -1, -1):
        kind, number, fresh = events[at]
        if kind == "run":
            used = set(arrays.reads[number])
            deaths[at] = [s for s in sorted(used | set(fresh)) if s not in needed]
            needed |= used
            needed.difference_update(fresh)
        elif kind == "offload":
            deaths[at] = [] if number in needed else [number]
            # Up to here it is needed: the copy reads it.
            needed.add(number)
        elif kind == "prefetch":
            # Nobody reads the memory of the device between the copies out and back.
            needed.discard(number)
    return deaths


def offloadable(graph: Graph, events: list[Event], among: Collection[int]) -> list[int]:
    """Which storages somebody reads, or rebuilds from, after the forward pass; oldest first.

    Only those are worth a copy. None, if the device of the graph states no transfer speeds.
    """
    if not graph.device.can_offload:
        return []
    backward = False
    readers: dict[int, None] = {}
    for kind, number, _ in events:
        if kind == "run":
            backward = backward or graph.ops[number].phase != "forward"
            if backward:
                readers.update(dict.fromkeys(s for s in graph.arrays.reads[number] if s in among))
    room = graph.device.pinned_bytes
    chosen, held = [], 0
    for storage in sorted(readers):
        held += int(graph.arrays.bytes[storage])
        held_outside = graph.arrays.keep[storage] or graph.arrays.held[storage]
        if held_outside or (room is not None and held > room):
            # Passed over, and not the end: a smaller one may still have room.
            held -= int(graph.arrays.bytes[storage])
        else:
            chosen.append(storage)
    return chosen
