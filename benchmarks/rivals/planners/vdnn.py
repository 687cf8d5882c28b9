"""`offload_conv`, after vDNN (Rhu et al., MICRO 2016): inputs of convolutions leave.

The input of a convolution is copied out while the convolution runs, which waits for the copy before
the next layer starts, and comes back one convolution ahead of its use. Nothing is recomputed. With
a budget only as many leave as it takes, oldest first, which vDNN leaves to a choice of layers.
"""

from __future__ import annotations

from sn_memory import Graph, Plan
from sn_memory.plan.walk.carry import carry_out
from sn_memory.plan.walk.follow import follow, offloadable
from sn_memory.plan.walk.kinds import is_conv
from sn_memory.plan.walk.origins import origins

from .sweep import best_of_sweep

_SHARES = 8


def offload_conv(graph: Graph, *, budget_bytes: int | None) -> Plan:
    """Copy inputs of convolutions out in the forward pass, back ahead of the backward pass."""
    origin = origins(graph)
    kept = {s for s, made in enumerate(origin.forward) if made}
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
        events = follow(
            graph,
            kept=kept,
            offloaded=chosen,
            eager=set(chosen),
            checkpoint=lambda op: is_conv(graph, op),
        )
        reasons = dict.fromkeys(chosen, "input of a convolution; waits on the host")
        return carry_out(graph, events, planner="offload_conv", reasons=reasons)

    if budget_bytes is None:
        return draft(len(movable))
    counts = [len(movable) * share // _SHARES for share in range(_SHARES + 1)]
    return best_of_sweep(graph, "offload_conv", lambda: counts, draft, budget_bytes)
