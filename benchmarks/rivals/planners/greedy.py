"""Chen et al., "Training deep nets with sublinear memory cost" (2016), algorithm 3.

As `sn_memory.plan.policies`, which is of the same paper, but a segment is cut whenever it
has made so many bytes, and how many is searched.
"""

from __future__ import annotations

from sn_memory import Graph, Plan
from sn_memory.graph.liveness import holes
from sn_memory.plan.policies import crossing_bytes, cuts_by_bytes, of_cuts, origins
from sn_memory.plan.simulate import emit, simulate

from .sweep import best_of_sweep

# The one free number is the bytes of a segment; this many are tried, each half the last.
_SIZES = 14


def greedy(graph: Graph, *, budget_bytes: int | None) -> Plan:
    """Cut whenever a segment has made so many bytes; the size is searched."""
    origin = origins(holes(graph))
    crossing = crossing_bytes(origin)
    forward = [op for op, record in enumerate(graph.ops) if record.phase == "forward"]
    total = sum(int(graph.arrays.bytes[s]) for s, forward in enumerate(origin.forward) if forward)
    return best_of_sweep(
        graph,
        "greedy",
        lambda: (
            tuple(cuts_by_bytes(graph, forward, crossing, total / 2**n)) for n in range(_SIZES)
        ),
        lambda cuts: emit(
            origin.shape, simulate(origin.shape, of_cuts(origin, cuts)), planner="greedy"
        ),
        budget_bytes,
    )
