"""`liveness`: every storage leaves after its last use, and nothing else happens.

SuperNeurons' first stage (Wang et al., PPoPP 2018, section 3.2), and what a framework that frees
by reference counts does by itself.
"""

from __future__ import annotations

from ...graph.graph import Graph
from ..emit import plan_from_decisions
from ..plan import Plan


def plan(graph: Graph, *, budget_bytes: int | None) -> Plan:
    """Return the plan that keeps each storage to its last use; the budget changes nothing."""
    return plan_from_decisions(graph, {}, planner="liveness")
