"""Chen et al., "Training deep nets with sublinear memory cost" (2016): `sqrt_n` and `greedy`.

Both cut the forward pass into segments, keep what crosses a cut, drop the rest and rebuild each
segment once when the backward pass enters it. They were written for chains; on other graphs we cut
where the fewest bytes cross, as later work does with articulation points (Jain et al., 2020).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ...graph.graph import Graph
from ...graph.numbers import Ints
from ..plan import Plan
from ..walk.carry import carry_out, choose
from ..walk.follow import follow
from ..walk.menu import from_menu
from ..walk.origins import Origins, origins

# Greedy has one free number, the bytes of a segment; this many are tried, each half the last.
_GREEDY_SIZES = 14


def sqrt_n(graph: Graph, *, budget_bytes: int | None) -> Plan:
    """Cut into sqrt(n) segments of equal numbers of forward ops (section 4.1)."""
    origin = origins(graph)
    forward = [op for op, record in enumerate(graph.ops) if record.phase == "forward"]
    crossing = _crossing_bytes(graph, origin)
    width = max(1, math.isqrt(len(forward)))
    cuts = [
        _narrowest(crossing, forward[start : start + width])
        for start in range(0, max(0, len(forward) - width), width)
    ]
    return choose([_draft(graph, origin, cuts, "sqrt_n")], budget_bytes)


def greedy(graph: Graph, *, budget_bytes: int | None) -> Plan:
    """Cut whenever a segment has made so many bytes; the size is searched (algorithm 3)."""
    origin = origins(graph)
    crossing = _crossing_bytes(graph, origin)
    total = sum(int(graph.arrays.bytes[s]) for s, made in enumerate(origin.forward) if made)
    return from_menu(
        graph,
        "greedy",
        lambda: (_cuts_by_bytes(graph, crossing, total / 2**n) for n in range(_GREEDY_SIZES)),
        lambda cuts: _draft(graph, origin, cuts, "greedy"),
        budget_bytes,
    )


def _crossing_bytes(graph: Graph, origin: Origins) -> Ints:
    """Return what a cut right after each op would keep: bytes [ops] int64."""
    change = np.zeros(len(graph.ops) + 1, np.int64)
    for storage, made in enumerate(origin.forward):
        if made:
            change[origin.makers[storage][0]] += graph.arrays.bytes[storage]
            change[origin.last_forward[storage]] -= graph.arrays.bytes[storage]
    return np.cumsum(change)[:-1]


def _narrowest(crossing: Ints, window: list[int]) -> int:
    # The last of equals, so that segments do not shrink.
    return min(reversed(window), key=lambda op: int(crossing[op]))


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
            cuts.append(_narrowest(crossing, window))
            window, held = [], 0
    return tuple(cuts)


def _draft(graph: Graph, origin: Origins, cuts: Sequence[int], planner: str) -> Plan:
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
