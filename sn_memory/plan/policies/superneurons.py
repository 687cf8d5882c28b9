"""SuperNeurons' policies (Wang et al., PPoPP 2018, sections 3.2 to 3.4).

Outputs of checkpoint layers (CONV, FC, JOIN, FORK, CONCAT) stay, those between two of them are
dropped in the forward pass and rebuilt from the checkpoint in the backward pass:

- `superneurons_speed` rebuilds a segment once and keeps what it rebuilt;
- `superneurons_memory` lets what is in between go at once and starts again for the next layer;
- `superneurons` takes the first where the segment stays below l_peak = max_i(l_i), the largest
  working set of any one op, and the second elsewhere.

Outputs of convolutions go to the host while memory is short (the tensor cache): without a budget
all of them, with one only as many, oldest first, as the budget asks. Convolutions take the fastest
algorithm whose workspace fits then. A storage read by two forward ops counts as a FORK.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from ...graph.graph import Graph
from ..emit import plan_from_decisions
from ..plan import Plan
from ..walk import Origins, carry_out, choose, follow, is_checkpoint, is_conv, offloadable, origins

# How many sizes of the tensor cache are tried between "nothing leaves" and "all convolutions".
_CACHE_SIZES = 8


def liveness(graph: Graph, *, budget_bytes: int | None) -> Plan:
    """Keep each storage to its last use, as their first stage does, and reference counts do."""
    return plan_from_decisions(graph, {}, planner="liveness")


def speed_centric(graph: Graph, *, budget_bytes: int | None) -> Plan:
    """Rebuild each segment once, and keep it."""
    return _plan(graph, budget_bytes, "superneurons_speed", set())


def memory_centric(graph: Graph, *, budget_bytes: int | None) -> Plan:
    """Rebuild for each backward layer anew."""
    every = set(range(len(graph.storages)))
    return _plan(graph, budget_bytes, "superneurons_memory", every)


def cost_aware(graph: Graph, *, budget_bytes: int | None) -> Plan:
    """Choose between the two by l_peak, segment by segment."""
    origin = origins(graph)
    kept = checkpoints(graph, origin)
    limit = max(_working_sets(graph), default=0)
    each: set[int] = set()
    for segment in segments(graph, origin, kept):
        if _held_by_speed(graph, origin, segment) > limit:
            each.update(segment)
    return _plan(graph, budget_bytes, "superneurons", each)


def checkpoints(graph: Graph, origin: Origins) -> set[int]:
    """Return the storages that checkpoint layers make, and those with two forward readers."""
    readers = [0] * len(graph.storages)
    for op, record in enumerate(graph.ops):
        if record.phase == "forward":
            for storage in graph.arrays.reads[op]:
                # Who changes it in place passes it on; only the others share it.
                readers[storage] += storage not in graph.arrays.writes[op]
    own = [
        inside and is_checkpoint(graph, makers[0])
        for inside, makers in zip(origin.forward, origin.makers, strict=True)
    ]
    # Behind the last checkpoint comes the loss: the backward pass starts there, nothing can go.
    last = max((m[0] for m, is_own in zip(origin.makers, own, strict=True) if is_own), default=0)
    return {
        storage
        for storage, makers in enumerate(origin.makers)
        if origin.forward[storage] and (own[storage] or readers[storage] >= 2 or makers[0] > last)
    }


def segments(graph: Graph, origin: Origins, kept: set[int]) -> list[set[int]]:
    """Group what is dropped: storages made from each other without a checkpoint between."""
    group: dict[int, set[int]] = {}
    for storage, makers in enumerate(origin.makers):
        if not origin.forward[storage] or storage in kept or not origin.droppable[storage]:
            continue
        sources = [s for op in makers for s in graph.arrays.reads[op] if s in group]
        home = group[sources[0]] if sources else set()
        home.add(storage)
        group[storage] = home
    return list({id(members): members for members in group.values()}.values())


def _working_sets(graph: Graph) -> Iterable[int]:
    # l_i: everything that op i touches or makes, weights aside, and its scratch memory.
    arrays = graph.arrays
    for op, reads in enumerate(arrays.reads):
        used = {s for s in (*reads, *arrays.outputs[op]) if not arrays.resident[s]}
        yield int(sum(arrays.bytes[s] for s in used)) + min(arrays.workspace_bytes[op])


def _held_by_speed(graph: Graph, origin: Origins, segment: set[int]) -> int:
    # The largest sum of what is left of a rebuilt segment and the backward op at work.
    arrays, most = graph.arrays, 0
    readers = {origin.first_backward[s] for s in segment} | {origin.last_use[s] for s in segment}
    for op in readers:
        if op < len(graph.ops) and graph.ops[op].phase != "forward":
            there = {s for s in segment if origin.last_use[s] >= op}
            there.update(s for s in (*arrays.reads[op], *arrays.outputs[op]))
            most = max(most, int(sum(arrays.bytes[s] for s in there if not arrays.resident[s])))
    return most


def _plan(graph: Graph, budget_bytes: int | None, planner: str, each: set[int]) -> Plan:
    origin = origins(graph)
    kept = checkpoints(graph, origin)
    keeps = partial(is_checkpoint, graph)
    reasons = {
        storage: "between checkpoint layers; rebuilt "
        + ("for each backward layer" if storage in each else "once")
        for storage in range(len(graph.storages))
    }

    def draft(offloaded: list[int]) -> Plan:
        reasons.update(dict.fromkeys(offloaded, "output of a convolution; waits on the host"))
        events = follow(graph, kept=kept, each=each, offloaded=offloaded, checkpoint=keeps)
        return carry_out(graph, events, planner=planner, reasons=reasons, within_bytes=budget_bytes)

    convolutions = {s for s in kept if is_conv(graph, origin.makers[s][0])}
    movable = offloadable(graph, follow(graph, kept=kept, each=each), convolutions)
    if budget_bytes is None:
        return choose([draft([]), draft(movable)], None)
    drafts = []
    for size in range(_CACHE_SIZES + 1):
        drafts.append(draft(movable[: len(movable) * size // _CACHE_SIZES]))
        # Transfers only cost: the smallest cache that does is the fastest.
        if drafts[-1].peak_bytes <= budget_bytes or not movable:
            break
    return choose(drafts, budget_bytes)
