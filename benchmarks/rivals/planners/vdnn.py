"""`offload_conv`, after vDNN (Rhu et al., MICRO 2016): offloads inputs of convolutions.

The input of a convolution is copied out while the convolution runs, which waits for the copy before
the next layer starts, and comes back one convolution ahead of its use. Nothing is recomputed. With
a budget only as many leave as it takes, oldest first, which vDNN leaves to a choice of layers.
"""

from __future__ import annotations

from collections.abc import Iterable

from sn_memory import Graph, Plan
from sn_memory.plan.policies import is_conv

from .sweep import best_of_sweep
from .walk import Event, Origins, Walk, carry_out, fetch_ahead, follow, offloadable, origins

_SHARES = 8


def offload_conv(graph: Graph, *, budget_bytes: int | None) -> Plan:
    """Copy inputs of convolutions out in the forward pass, back ahead of the backward pass."""
    origin = origins(graph)
    kept = {s for s, forward in enumerate(origin.forward) if forward}
    inputs = {
        storage
        for op, record in enumerate(graph.ops)
        if record.phase == "forward" and is_conv(graph, op)
        for storage in graph.arrays.reads[op]
        if storage in kept
    }
    movable = offloadable(graph, follow(graph, kept=kept), inputs)

    def draft(count: int) -> Plan:
        chosen = movable[:count]
        events = _events(graph, origin, chosen)
        return carry_out(graph, events, planner="offload_conv")

    if budget_bytes is None:
        return draft(len(movable))
    counts = [len(movable) * share // _SHARES for share in range(_SHARES + 1)]
    return best_of_sweep(graph, "offload_conv", lambda: counts, draft, budget_bytes)


def _events(graph: Graph, origin: Origins, chosen: Iterable[int]) -> list[Event]:
    """Copy storages out only while their last forward reader runs, which waits for the copy."""
    walk, arrays = Walk(graph), graph.arrays
    leaving: dict[int, list[int]] = {}
    for storage in chosen:
        leaving.setdefault(origin.last_forward[storage], []).append(storage)
    for op in range(len(graph.ops)):
        walk.bring(arrays.reads[op])
        mine = leaving.get(op, [])
        # What it makes itself is there only when it has run.
        own = [storage for storage in mine if op in origin.makers[storage]]
        for storage in mine:
            if storage not in own:
                walk.offload(storage)
        walk.run(op)
        for storage in own:
            walk.offload(storage)
        for storage in mine:
            walk.leave(storage)
            walk.settle(storage)
    return fetch_ahead(graph, walk.events, lambda op: is_conv(graph, op))
