"""`knapsack`: the rule of torch.compile's `activation_memory_budget`.

Items are the storages saved for the backward pass; saving one costs its bytes and is worth the
seconds of making it. Two things are left out, as they are there: rebuilding one may need others to
be rebuilt as well, and what is rebuilt takes memory while it is used. So the capacity says little
about the peak; with a budget we try many capacities and measure, which torch leaves to its user.
"""

from __future__ import annotations

import math

import numpy as np

from sn_memory import Graph, Plan

from .sweep import best_of_sweep
from .walk import Origins, carry_out, follow, origins

# Capacities tried with a budget, as shares of all that is saved; and the grain of the knapsack.
_SHARES = 16
_GRAINS = 1000


def knapsack(graph: Graph, *, budget_bytes: int | None) -> Plan:
    """Save the set worth most within a capacity; search the capacity against the true peak."""
    return best_of_sweep(
        graph,
        "knapsack",
        lambda: _best_sets(graph, origins(graph)),
        lambda kept: _draft(graph, kept),
        budget_bytes,
    )


def saved_within(graph: Graph, share: float) -> Plan:
    """Return torch's plan for a capacity of `share` in [0, 1] of what is saved, whatever its peak.

    The share is rounded up to a sixteenth.
    """
    sets = _best_sets(graph, origins(graph))
    return _draft(graph, sets[_SHARES - math.ceil(share * _SHARES)])


def _best_sets(graph: Graph, origin: Origins) -> list[frozenset[int]]:
    """Per capacity, from all down to nothing, the storages to save: a 0/1 knapsack by table."""
    arrays = graph.arrays
    items = [
        storage
        for storage, forward in enumerate(origin.forward)
        if forward
        and origin.droppable[storage]
        and origin.first_backward[storage] < len(graph.ops)  # the backward pass reads it
    ]
    worth = [sum(arrays.seconds[op][0] for op in origin.makers[s]) for s in items]
    total = int(sum(arrays.bytes[s] for s in items))
    # Rounded up, so that no set is heavier than it seems.
    weight = [-(-int(arrays.bytes[s]) * _GRAINS // max(total, 1)) for s in items]
    capacity = _GRAINS + len(items)
    best = np.zeros(capacity + 1)
    taken = np.zeros((len(items), capacity + 1), bool)
    for row, (grains, seconds) in enumerate(zip(weight, worth, strict=True)):
        with_it = best[: capacity + 1 - grains] + seconds
        taken[row, grains:] = with_it > best[grains:]
        best[grains:] = np.maximum(best[grains:], with_it)
    sets = []
    for share in range(_SHARES, -1, -1):
        # The full capacity has room for what rounding added; the others count it, as torch does.
        left = capacity if share == _SHARES else _GRAINS * share // _SHARES
        kept = set()
        for row in range(len(items) - 1, -1, -1):
            if taken[row, left]:
                kept.add(items[row])
                left -= weight[row]
        sets.append(frozenset(kept))
    return sets


def _draft(graph: Graph, kept: frozenset[int]) -> Plan:
    events = follow(graph, kept=kept)
    return carry_out(graph, events, planner="knapsack")
