"""Follow fixed decisions through a graph: drop after the forward pass, rebuild or fetch on demand.

The policies of the literature differ in which storages they drop and whether a rebuilt storage
stays; this walk is common to all that decide before they run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container

from ...graph.graph import Graph
from .walk import Event, Walk

Rule = Callable[[int], bool]


def follow(
    graph: Graph,
    *,
    kept: Container[int],
    each: Container[int] = (),
    offloaded: Collection[int] = (),
    eager: Container[int] = (),
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
    eager
        Those of them that are copied out only while their last forward reader runs, and that it
        waits for, as vDNN does.
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
            last = origin.last_forward[storage]
            leaves.setdefault(last, []).append(storage)
            starts.setdefault(last if storage in eager else makers[-1], []).append(storage)
        elif storage not in kept and origin.droppable[storage]:
            leaves.setdefault(origin.last_forward[storage], []).append(storage)
    under_way: list[int] = []
    for op in range(len(graph.ops)):
        if checkpoint is not None and under_way and checkpoint(op):
            for storage in under_way:
                walk.settle(storage)
            under_way.clear()
        made = walk.bring(
            s for s in (*arrays.reads[op], *arrays.releases[op]) if s not in arrays.outputs[op]
        )
        for storage in starts.get(op, ()):
            if storage in eager and op not in origin.makers[storage]:
                walk.offload(storage)
        for storage in _forget(walk, made, each, offloaded, op):
            walk.offload(storage)
            walk.leave(storage)
            walk.settle(storage)
        walk.run(op)
        for storage in starts.get(op, ()):
            if storage not in eager or op in origin.makers[storage]:
                walk.offload(storage)
        for storage in leaves.get(op, ()):
            if storage not in offloaded:
                walk.there.discard(storage)
                continue
            walk.leave(storage)
            if storage in eager:
                walk.settle(storage)
            else:
                under_way.append(storage)
    return walk.events if checkpoint is None else _ahead(graph, walk.events, checkpoint)


def offloadable(graph: Graph, events: list[Event], among: Collection[int]) -> list[int]:
    """Which storages somebody reads, or rebuilds from, after the forward pass; oldest first.

    Only those are worth a copy. None, if the device of the graph states no transfer speeds.
    """
    if not graph.device.can_offload:
        return []
    backward = False
    found: dict[int, None] = {}
    for kind, number, _ in events:
        if kind == "run":
            backward = backward or graph.ops[number].phase != "forward"
            if backward:
                found.update(dict.fromkeys(s for s in graph.arrays.reads[number] if s in among))
    room = graph.device.pinned_bytes
    chosen, held = [], 0
    for storage in sorted(found):
        held += int(graph.arrays.bytes[storage])
        held_outside = graph.arrays.keep[storage] or graph.arrays.held[storage]
        if held_outside or (room is not None and held > room):
            held -= int(graph.arrays.bytes[storage])
        else:
            chosen.append(storage)
    return chosen


def _forget(
    walk: Walk, made: list[int], each: Container[int], offloaded: Container[int], op: int
) -> list[int]:
    """Drop what was rebuilt and used to rebuild more; return what can wait on the host again.

    What nothing was rebuilt from stays: it is what the op asked for.
    """
    origin, reads = walk.origin, walk.graph.arrays.reads
    sources = {s: {x for m in origin.makers[s] for x in reads[m]} - {s} for s in made}
    stepping = set().union(*sources.values())
    waiting: dict[int, None] = {}
    for storage in made:
        if storage in each and storage in stepping:
            walk.there.discard(storage)
            if origin.last_use[storage] > op:
                waiting.update(dict.fromkeys(x for x in sources[storage] if x in offloaded))
    return [storage for storage in waiting if storage in walk.there]


def _ahead(graph: Graph, events: list[Event], checkpoint: Rule) -> list[Event]:
    """Start each copy back before the checkpoint op that precedes its reader, if it has left."""
    result: list[Event] = []
    left: dict[int, int] = {}
    for event in events:
        if event.kind == "prefetch":
            place = len(result)
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
                place = len(result)
            result.insert(place, event)
            left = {s: at + (at > place) for s, at in left.items()}
            continue
        result.append(event)
        if event.kind == "offload":
            left[event.number] = len(result)
    return result
