"""SuperNeurons' planners, the liveness it starts from, and sqrt(n), by name.

    (graph: Graph, *, budget_bytes: int | None) -> Plan

It may ignore the budget, must not raise where its method simply finds nothing (then it returns
the plan of least peak it has), and its plans pass `check_plan`.
`plan_graph(..., planner="auto")` begins from the plan of `sqrt_n`. Other planners of the literature
are in `benchmarks/rivals/planners`, which compares with them. What they share is in `walk.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

import numpy as np

from ..graph.graph import Graph, Ints
from ..graph.liveness import holes
from .plan import Plan
from .simulate import emit, simulate
from .walk import Origins, carry_out, choose, follow, is_checkpoint, is_conv, offloadable, origins

Policy = Callable[..., Plan]
# How many sizes of the tensor cache are tried between "nothing leaves" and "all convolutions".
_CACHE_SIZES = 8


def liveness(graph: Graph, *, budget_bytes: int | None) -> Plan:
    """Keep each storage to its last use, as their first stage does, and reference counts do."""
    shape = holes(graph)
    return emit(shape, simulate(shape, shape.natural()), planner="liveness")


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


def sqrt_n(graph: Graph, *, budget_bytes: int | None) -> Plan:
    """Cut into sqrt(n) segments of as many forward ops each; of as many bytes if that is too much.

    Where layers differ, the largest of the equal numbers sets the peak. Segments of `s` bytes each
    hold `total / s` cuts and one segment, which is least at the root of total times a cut's bytes.
    """
    origin = origins(graph)
    forward = [op for op, record in enumerate(graph.ops) if record.phase == "forward"]
    crossing = crossing_bytes(graph, origin)
    width = max(1, math.isqrt(len(forward)))
    cuts = [
        narrowest(crossing, forward[start : start + width])
        for start in range(0, max(0, len(forward) - width), width)
    ]
    plans = [plan_of_cuts(graph, origin, cuts, "sqrt_n")]
    if budget_bytes is not None and plans[0].peak_bytes > budget_bytes:
        total = sum(
            int(graph.arrays.bytes[storage])
            for storage, is_forward in enumerate(origin.forward)
            if is_forward
        )
        size = math.sqrt(total * float(crossing[forward].mean())) if forward else 0.0
        cuts = cuts_by_bytes(graph, forward, crossing, size)
        plans.append(plan_of_cuts(graph, origin, cuts, "sqrt_n"))
    return choose(plans, budget_bytes)


def crossing_bytes(graph: Graph, origin: Origins) -> Ints:
    """Return what a cut right after each op would keep: bytes [ops] int64."""
    change = np.zeros(len(graph.ops) + 1, np.int64)
    for storage, is_forward in enumerate(origin.forward):
        if is_forward:
            change[origin.makers[storage][0]] += graph.arrays.bytes[storage]
            change[origin.last_forward[storage]] -= graph.arrays.bytes[storage]
    return np.cumsum(change)[:-1]


def narrowest(crossing: Ints, window: Sequence[int]) -> int:
    """Return the op of a window after which a cut keeps the fewest bytes."""
    # The last of equals, so that segments do not shrink.
    return min(reversed(window), key=lambda op: int(crossing[op]))


def cuts_by_bytes(graph: Graph, forward: Sequence[int], crossing: Ints, size: float) -> list[int]:
    """Return where to cut so that each segment makes so many bytes: algorithm 3 of the paper."""
    cuts, window, held = list[int](), list[int](), 0
    for op in forward:
        held += sum(int(graph.arrays.bytes[output]) for output in graph.arrays.outputs[op])
        # The cut may fall anywhere in the second half of the segment.
        if held > size / 2:
            window.append(op)
        if held > size:
            cuts.append(narrowest(crossing, window))
            window, held = [], 0
    return cuts


def plan_of_cuts(graph: Graph, origin: Origins, cuts: Sequence[int], planner: str) -> Plan:
    """Return the plan that keeps what crosses a cut and rebuilds each segment once.

    cuts : ops, each the last of a segment
    """
    borders = np.array(sorted(cuts), np.int64)
    kept = set()
    for storage, is_forward in enumerate(origin.forward):
        if not is_forward:
            continue
        start = int(np.searchsorted(borders, origin.makers[storage][0]))
        # The last segment is used at once: dropping it would only cost.
        if start == len(borders) or borders[start] < origin.last_forward[storage]:
            kept.add(storage)
    events = follow(graph, kept=kept)
    reason = f"inside one of {len(borders) + 1} segments; rebuilt when the backward pass enters it"
    reasons = dict.fromkeys(range(len(graph.storages)), reason)
    return carry_out(graph, events, planner=planner, reasons=reasons)


_POLICIES: Final[dict[str, Policy]] = {
    "liveness": liveness,
    "superneurons_speed": speed_centric,
    "superneurons_memory": memory_centric,
    "superneurons": cost_aware,
    "sqrt_n": sqrt_n,
}


def names() -> tuple[str, ...]:
    """Return the names of all policies, in the order of the table."""
    return tuple(_POLICIES)


def policy(name: str) -> Policy:
    """Return the policy of this name; raises KeyError for a name there is not."""
    return _POLICIES[name]
