"""Lifetimes, the live-bytes curve and the true peak of a graph in its own order: no planning yet.

A storage lives from the op that makes it to its last use, half-open `[start, end)` in op numbers.
During an op its inputs, its outputs and its workspace are all there: outputs are allocated before
inputs are freed. SuperNeurons (Wang et al., PPoPP 2018, section 3.2) compares every op with every
later one, O(N^2); one pass that remembers the last use gives the same answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from .graph import Graph, Ints


@dataclass(frozen=True)
class Lifetimes:
    """When each storage lives: [storages] int64 each, half-open, in op numbers.

    Resident and kept storages end at the number of ops; resident ones start at 0.
    """

    start: Ints
    end: Ints


@dataclass(frozen=True)
class Peak:
    """The largest number of live bytes, the op where it is reached, and what is live there.

    `owners` are (storage name or `workspace`, bytes), largest first; resident storages are one
    entry, `resident`. Their bytes sum to `bytes`.
    """

    bytes: int
    op: int
    owners: tuple[tuple[str, int], ...]


def unplanned_bytes(graph: Graph) -> int:
    """Return the peak of the step without a plan: what percent of a budget are of.

    The graph's own may be larger by the random states that are kept for reruns. With all of a
    budget nothing has to run again.
    """
    own = peak(graph).bytes
    return own if graph.unplanned_peak_bytes is None else max(own, graph.unplanned_peak_bytes)


def lifetimes(graph: Graph) -> Lifetimes:
    """Return the lifetimes in the graph's own order, in time linear in its size."""
    arrays = graph.arrays
    end = arrays.producer + 1
    for at, (reads, releases) in enumerate(zip(arrays.reads, arrays.releases, strict=True)):
        for storage in reads:
            end[storage] = at + 1
        for storage in releases:
            end[storage] = at + 1
    end[arrays.keep | arrays.resident] = len(graph.ops)
    return Lifetimes(start=np.maximum(arrays.producer, 0), end=end)


def live_bytes(graph: Graph, spans: Lifetimes | None = None) -> Ints:
    """Return the bytes live during each op, workspace included: [ops] int64."""
    arrays = graph.arrays
    spans = spans or lifetimes(graph)
    change = np.zeros(len(graph.ops) + 1, np.int64)
    np.add.at(change, spans.start, arrays.bytes)
    np.subtract.at(change, spans.end, arrays.bytes)
    space = np.array([ways[0] for ways in arrays.workspace_bytes], np.int64)
    return np.cumsum(change)[:-1] + space


def most_together(rows: Iterable[tuple[int, int, int]]) -> int:
    """Return the largest sum of sizes that are there together, of rows (lower, upper, size).

    What ends at a time is gone for what begins then.
    """
    change: dict[int, int] = {}
    for lower, upper, size in rows:
        change[lower] = change.get(lower, 0) + size
        change[upper] = change.get(upper, 0) - size
    return max(accumulate(change[at] for at in sorted(change)), default=0)


def peak(graph: Graph) -> Peak:
    """Return the peak in the graph's own order and its owners; all zeros for no ops.

    Examples
    --------
    >>> from sn_memory import Graph, Op, Storage
    >>> graph = Graph(
    ...     [Storage("x", 8, "input"), Storage("h", 4), Storage("y", 2, keep=True)],
    ...     [Op("f", ("x",), ("h",)), Op("g", ("h",), ("y",))],
    ... )
    >>> peak(graph)
    Peak(bytes=14, op=1, owners=(('resident', 8), ('h', 4), ('y', 2)))
    """
    if not graph.ops:
        return Peak(graph.base_bytes, 0, (("resident", graph.base_bytes),))
    arrays = graph.arrays
    spans = lifetimes(graph)
    curve = live_bytes(graph, spans)
    at = int(curve.argmax())
    there = (spans.start <= at) & (at < spans.end) & ~arrays.resident
    owners = [
        (graph.storages[storage].name, int(arrays.bytes[storage]))
        for storage in np.flatnonzero(there)
    ]
    owners += [("resident", graph.base_bytes), ("workspace", arrays.workspace_bytes[at][0])]
    ranked = sorted((owner for owner in owners if owner[1]), key=lambda owner: -owner[1])
    return Peak(int(curve[at]), at, tuple(ranked))


def baseline_seconds(graph: Graph) -> float:
    """Return the summed seconds of all ops, each run once in its default way."""
    return sum(ways[0] for ways in graph.arrays.seconds)
