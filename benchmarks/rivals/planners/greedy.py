"""Chen et al., "Training deep nets with sublinear memory cost" (2016), algorithm 3.

As `sn_memory.plan.policies`, which is of the same paper, but a segment is cut whenever it
has made so many bytes, and how many is searched.
"""

from __future__ import annotations

from sn_memory import Graph, Plan
from sn_memory.plan.policies import crossing_bytes, cuts_by_bytes, plan_of_cuts
from sn_memory.plan.walk import origins

from .sweep import best_of_sweep

# The one free number is the bytes of a segment; this many are tried, each half the last.
_SIZES = 14


def greedy(graph: Graph, *, budget_bytes: int | None) -> Plan:
    """Cut whenever a segment has made so many bytes; the size is searched."""
    origin = origins(graph)
    crossing = crossing_bytes(graph, origin)
    forward = [op for op, record in enumerate(graph.ops) if record.phase == "forward"]
    total = sum(int(graph.arrays.bytes[s]) for s, made in enumerate(origin.forward) if made)
    return best_of_sweep(
        graph,
        "greedy",
        lambda: (
            tuple(cuts_by_bytes(graph, forward, crossing, total / 2**n)) for n in range(_SIZES)
        ),
        lambda cuts: plan_of_cuts(graph, origin, cuts, "greedy"),
        budget_bytes,
    )
