"""Chen et al., "Training deep nets with sublinear memory cost" (2016), section 4.1.

Cuts the forward pass into segments, keeps what crosses a cut, drops the rest and rebuilds each
segment once when the backward pass enters it. That was written for chains; on other graphs we cut
where the fewest bytes cross, as later work does with articulation points (Jain et al., 2020).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ...graph.graph import Graph, Ints
from ..plan import Plan
from ..walk.carry import carry_out, choose
from ..walk.follow import follow
from ..walk.origins import Origins, origins


def sqrt_n(graph: Graph, *, budget_bytes: int | None) -> Plan:
    """Cut into sqrt(n) segments of equal numbers of forward ops."""
    origin = origins(graph)
    forward = [op for op, record in enumerate(graph.ops) if record.phase == "forward"]
    crossing = crossing_bytes(graph, origin)
    width = max(1, math.isqrt(len(forward)))
    cuts = [
        narrowest(crossing, forward[start : start + width])
        for start in range(0, max(0, len(forward) - width), width)
    ]
    return choose([plan_of_cuts(graph, origin, cuts, "sqrt_n")], budget_bytes)


def crossing_bytes(graph: Graph, origin: Origins) -> Ints:
    """Return what a cut right after each op would keep: bytes [ops] int64."""
    change = np.zeros(len(graph.ops) + 1, np.int64)
    for storage, made in enumerate(origin.forward):
        if made:
            change[origin.makers[storage][0]] += graph.arrays.bytes[storage]
            change[origin.last_forward[storage]] -= graph.arrays.bytes[storage]
    return np.cumsum(change)[:-1]


def narrowest(crossing: Ints, window: Sequence[int]) -> int:
    """Return the op of a window after which a cut keeps the fewest bytes."""
    # The last of equals, so that segments do not shrink.
    return min(reversed(window), key=lambda op: int(crossing[op]))


def plan_of_cuts(graph: Graph, origin: Origins, cuts: Sequence[int], planner: str) -> Plan:
    """Return the plan that keeps what crosses a cut and rebuilds each segment once.

    cuts : ops, each the last of a segment
    """
    borders = np.array(sorted(cuts), np.int64)
    kept = set()
    for storage, made in enumerate(origin.forward):
        if not made:
            continue
        start = int(np.searchsorted(borders, origin.makers[storage][0]))
        # The last segment is used at once: dropping it would only cost.
        if start == len(borders) or borders[start] < origin.last_forward[storage]:
            kept.add(storage)
    events = follow(graph, kept=kept)
    reason = f"inside one of {len(borders) + 1} segments; rebuilt when the backward pass enters it"
    reasons = dict.fromkeys(range(len(graph.storages)), reason)
    return carry_out(graph, events, planner=planner, reasons=reasons)
