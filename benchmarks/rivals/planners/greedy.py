"""Chen et al., "Training deep nets with sublinear memory cost" (2016), algorithm 3.

As `sn_memory.plan.policies.sqrt_n`, which is of the same paper, but a segment is cut whenever it
has made so many bytes.
"""

from __future__ import annotations

from sn_memory import Graph, Plan
from sn_memory.graph.graph import Ints
from sn_memory.plan.policies.sqrt_n import crossing_bytes, narrowest, plan_of_cuts
from sn_memory.plan.walk.origins import origins

from .sweep import best_of_sweep

# The one free number is the bytes of a segment; this many are tried, each half the last.
_SIZES = 14


def greedy(graph: Graph, *, budget_bytes: int | None) -> Plan:
    """Cut whenever a segment has made so many bytes; the size is searched."""
    origin = origins(graph)
    crossing = crossing_bytes(graph, origin)
    total = sum(int(graph.arrays.bytes[s]) for s, made in enumerate(origin.forward) if made)
    return best_of_sweep(
        graph,
        "greedy",
        lambda: (_cuts_by_bytes(graph, crossing, total / 2**n) for n in range(_SIZES)),
        lambda cuts: plan_of_cuts(graph, origin, cuts, "greedy"),
        budget_bytes,
    )


def _cuts_by_bytes(graph: Graph, crossing: Ints, size: float) -> tuple[int, ...]:
    cuts: list[int] = []
    window: list[int] = []
    held = 0
    for op, record in enumerate(graph.ops):
        if record.phase != "forward":
            continue
        held += sum(int(graph.arrays.bytes[s]) for s in graph.arrays.outputs[op])
        # The cut may fall anywhere in the second half of the segment.
        if held > size / 2:
            window.append(op)
        if held > size:
            cuts.append(narrowest(crossing, window))
            window, held = [], 0
    return tuple(cuts)
