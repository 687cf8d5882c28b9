"""The policy `liveness`: keep everything, free at the last use."""

from __future__ import annotations

from ..graph import Graph
from ..plan import Plan
from .carry import carry_out, choose
from .walk import Walk


def liveness(graph: Graph, budget_bytes: int | None) -> Plan:
    """Run every op once and free each storage at its last use: what a framework does by itself."""
    walk = Walk(graph)
    for op in range(len(graph.ops)):
        walk.run(op)
    return choose([carry_out(graph, walk.events, planner="liveness", reasons={})], budget_bytes)
