"""Lifetimes in a graph's own order, live bytes and true peak, and the holes between uses.

A storage is live from the op that makes it to its last use, half-open `[start, end)` in op numbers.
During an op its inputs, outputs and workspace are all live: outputs are allocated before inputs are
freed. SuperNeurons (Wang et al., PPoPP 2018, section 3.2) compares every op with every later one,
O(N^2); a single pass that records the last use gives the same result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final

import numpy as np

from .graph import Graph, Ints


@dataclass(frozen=True)
class Lifetimes:
    """When each storage is live: [storages] int64 each, half-open, in op numbers.

    Resident and kept storages end at the number of ops; resident ones start at 0.
    """

    start: Ints
    end: Ints


@dataclass(frozen=True)
class Peak:
    """The most live bytes, the op where they are reached, and the storages live there.

    `owners` are (storage name or `workspace`, bytes), largest first; resident storages are one
    entry, `resident`. Their bytes sum to `bytes`.
    """

    bytes: int
    op: int
    owners: tuple[tuple[str, int], ...]


def unplanned_bytes(graph: Graph) -> int:
    """Return the peak of the step without a plan, to which percentages of a budget refer.

    The graph's own peak may be larger, by the random states kept for reruns; then it is used, so
    that with 100 % nothing has to be recomputed.
    """
    own = peak(graph).bytes
    return own if graph.unplanned_peak_bytes is None else max(own, graph.unplanned_peak_bytes)


def lifetimes(graph: Graph) -> Lifetimes:
    """Return the lifetimes in the graph's own order, in time linear in its size."""
    arrays = graph.arrays
    # A storage that no op reads is still live while its own op runs.
    end = arrays.producer + 1
    for at, reads in enumerate(arrays.reads):
        for storage in reads:
            end[storage] = at + 1
    end[arrays.keep | arrays.resident] = len(graph.ops)
    return Lifetimes(start=np.maximum(arrays.producer, 0), end=end)


def live_bytes(graph: Graph, spans: Lifetimes | None = None) -> Ints:
    """Return the bytes live during each op, workspace included: [ops] int64."""
    arrays = graph.arrays
    spans = spans or lifetimes(graph)
    change = np.zeros(len(graph.ops) + 1, np.int64)
    # Not `change[...] +=`, which counts only one of several storages that start at the same op.
    np.add.at(change, spans.start, arrays.bytes)
    np.subtract.at(change, spans.end, arrays.bytes)
    space = np.array([ways[0] for ways in arrays.workspace_bytes], np.int64)
    return np.cumsum(change)[:-1] + space


def most_together(rows: Iterable[tuple[int, int, int]]) -> int:
    """Return the largest sum of simultaneously live sizes, of rows (lower, upper, size).

    Rows that end at a time do not overlap with those that begin then.
    """
    # Sums per time, so that frees and allocations of one time cancel before the maximum is taken.
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
    live = (spans.start <= at) & (at < spans.end) & ~arrays.resident
    owners = [
        (graph.storages[storage].name, int(arrays.bytes[storage]))
        for storage in np.flatnonzero(live).tolist()
    ]
    owners += [("resident", graph.base_bytes), ("workspace", arrays.workspace_bytes[at][0])]
    ranked = sorted((owner for owner in owners if owner[1]), key=lambda owner: -owner[1])
    return Peak(int(curve[at]), at, tuple(ranked))


def baseline_seconds(graph: Graph) -> float:
    """Return the summed seconds of all ops, each run once in its default way."""
    return sum(ways[0] for ways in graph.arrays.seconds)


KEEP: Final = -1


@dataclass(frozen=True)
class Holes:
    """The holes of a graph, and what is possible in them. Built once per graph by `holes`.

    A storage that is used at ops 3, 4 and 90 need not be live between 4 and 90. Each such *hole* is
    one decision, so a storage with a skip connection in the forward pass and a use in the backward
    pass has two. Hole k of a storage follows its k-th use (use 0 makes it); the last hole follows
    its last use and matters only to rebuilds that read the storage.

    graph : the graph
    first : per storage, the number of its hole 0; its holes are numbered consecutively. One more
        entry at the end: the number of holes.
    storage, start, end : per hole: its storage, the op before it and the op after it (the number of
        ops for the last).
    rebuildable : per storage: its maker and writers may run twice, so it can be rebuilt.
    chain : per storage: its maker and then its writers, by op number; empty for resident ones.
    expires : per op: the op after which it cannot be rerun, because that op changes one of its
        inputs.
    bytes, seconds, workspace : per storage; per op, in the way it is priced; likewise.
    held : per storage: the caller holds it too, so moving it to the host would free nothing.
    stays : per hole: it is the last one of a storage that must be live at the end.
    touched : per op, its inputs and outputs that are not resident
    memo : data derived from these holes once, by name, such as the tables of the extension
    """

    graph: Graph
    first: list[int]
    storage: list[int]
    start: list[int]
    end: list[int]
    rebuildable: list[bool]
    chain: list[tuple[int, ...]]
    expires: list[float]
    bytes: list[int]
    seconds: list[float]
    workspace: list[int]
    held: list[bool]
    stays: list[bool] = field(repr=False)
    touched: list[tuple[int, ...]] = field(repr=False)
    memo: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def count(self) -> int:
        return len(self.storage)

    def of(self, storage: int) -> range:
        """The numbers of a storage's holes; empty for resident ones."""
        return range(self.first[storage], self.first[storage + 1])

    def natural(self) -> list[int]:
        """The choice that rebuilds nothing.

        Last holes drop what could be rebuilt, so that no storage is held after its last use for the
        sake of rebuilds.
        """
        last = {first - 1 for first in self.first}
        return [
            KEEP if self.stays[hole] or hole not in last or not self.rebuildable[storage] else 0
            for hole, storage in enumerate(self.storage)
        ]

    def is_free(self, hole: int) -> bool:
        """Whether a hole is between two uses, and long and large enough to be useful."""
        storage = self.storage[hole]
        inner = hole + 1 < self.first[storage + 1]
        return inner and self.end[hole] - self.start[hole] > 1 and self.bytes[storage] > 0

    def may_leave(self, hole: int) -> bool:
        """Whether a storage could spend this hole on the host."""
        return self.is_free(hole) and not self.held[self.storage[hole]]


def holes(graph: Graph, *, lean: bool = False) -> Holes:
    """List the holes of a graph.

    Ops are priced in their default way; with `lean`, with the smallest workspace and the fewest
    seconds of all their ways, for searches that choose the ways afterwards (`equip`).
    """
    arrays = graph.arrays
    count = len(graph.storages)
    uses: list[list[int]] = [[] for _ in range(count)]
    chain: list[list[int]] = [[] for _ in range(count)]
    resident, kept = arrays.resident.tolist(), arrays.keep.tolist()
    touched = []
    for at, (reads, outputs) in enumerate(zip(arrays.reads, arrays.outputs, strict=True)):
        # Resident storages never leave, so they have no holes.
        mine = tuple(storage for storage in (*reads, *outputs) if not resident[storage])
        touched.append(mine)
        for storage in mine:
            uses[storage].append(at)
        for storage in (*outputs, *arrays.writes[at]):
            if not resident[storage]:
                chain[storage].append(at)
    first, storages, start, end = [0], [], [], []
    total = len(graph.ops)
    # Number the holes of a storage consecutively, as `first` requires.
    for storage, places in enumerate(uses):
        storages += [storage] * len(places)
        start += places
        end += [*places[1:], total] if places else []
        first.append(len(storages))
    return Holes(
        graph=graph,
        first=first,
        storage=storages,
        start=start,
        end=end,
        rebuildable=[
            not resident[storage] and _repeatable(graph, storage, tuple(chain[storage]))
            for storage in range(count)
        ],
        chain=[tuple(ops) for ops in chain],
        expires=_expiries(graph),
        bytes=arrays.bytes.tolist(),
        seconds=[min(ways) if lean else ways[0] for ways in arrays.seconds],
        workspace=[min(ways) if lean else ways[0] for ways in arrays.workspace_bytes],
        held=arrays.held.tolist(),
        touched=touched,
        stays=[
            kept[storage] and hole == first[storage + 1] - 1
            for hole, storage in enumerate(storages)
        ],
    )


def _repeatable(graph: Graph, storage: int, chain: tuple[int, ...]) -> bool:
    """Whether maker and writers may run twice, and change nothing else in place."""
    return all(
        graph.ops[op].repeatable and set(graph.arrays.writes[op]) <= {storage} for op in chain
    )


def _expiries(graph: Graph) -> list[float]:
    """Per op, the first later op that changes one of its inputs; infinity if none does."""
    arrays = graph.arrays
    next_write: dict[int, int] = {}
    expires = [math.inf] * len(graph.ops)
    # From the back, so that the next write is known at its readers.
    for op in range(len(graph.ops) - 1, -1, -1):
        for storage in arrays.reads[op]:
            # A writer in the chain of a storage is rerun together with the whole chain.
            if storage in next_write and storage not in arrays.writes[op]:
                expires[op] = min(expires[op], next_write[storage])
        for storage in arrays.writes[op]:
            next_write[storage] = op
    return expires
