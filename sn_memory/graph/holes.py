"""What a planner decides about: the holes between two uses of a storage.

A storage that is used at ops 3, 4 and 90 need not be there between 4 and 90. Each such *hole* is
one decision, so a storage with a skip connection in the forward pass and a use in the backward pass
is two. Hole k of a storage follows its k-th use (use 0 makes it); the last hole follows its last
use and matters only to rebuilds that start from it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Final

from .graph import Graph

KEEP: Final = -1


@dataclass(frozen=True)
class Holes:
    """The holes of a graph and what may be done in them. Built once per graph by `holes`.

    Parameters
    ----------
    graph
        The graph.
    first
        Per storage, the number of its hole 0; its holes are numbered in a row from there. One more
        entry at the end: the number of holes.
    storage, start, end
        Per hole: its storage, the op before it and the op after it (the number of ops for the
        last).
    rebuildable
        Per storage: its maker and writers may run twice, so it can be made again.
    chain
        Per storage: its maker and then its writers, by op number; empty for resident ones.
    expires
        Per op: it cannot run again once this op has run, because that one changes an input of it.
    bytes, seconds, workspace
        Per storage; per op, in the way it is priced; likewise.
    held
        Per storage: somebody outside holds it too, so it does not leave for the host.
    stays
        Per hole: it is the last one of a storage that must be there at the end.
    needs, touched
        Per op, the storages that must be there before it; those of them and of its outputs that
        are not resident.
    memo
        What algorithms have made of it once, by name.
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
    needs: list[tuple[int, ...]] = field(repr=False)
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

        Last holes let go where something could be rebuilt from elsewhere, so that a storage is not
        held, after its last use, for the sake of rebuilds.
        """
        last = {first - 1 for first in self.first}
        return [
            KEEP if self.stays[hole] or hole not in last or not self.rebuildable[storage] else 0
            for hole, storage in enumerate(self.storage)
        ]

    def is_free(self, hole: int) -> bool:
        """Whether a hole is between two uses, and long and large enough to be worth anything."""
        storage = self.storage[hole]
        inner = hole + 1 < self.first[storage + 1]
        return inner and self.end[hole] - self.start[hole] > 1 and self.bytes[storage] > 0

    def may_leave(self, hole: int) -> bool:
        """Whether a storage could spend this hole on the host."""
        return self.is_free(hole) and not self.held[self.storage[hole]]

    def main(self, storage: int) -> int:
        """The longest hole between two uses; the last hole where there is only one use."""
        inner = self.of(storage)[:-1]
        if not inner:
            return self.first[storage + 1] - 1
        return max(inner, key=lambda hole: self.end[hole] - self.start[hole])


def holes(graph: Graph, *, lean: bool = False) -> Holes:
    """List the holes of a graph.

    Ops are priced in their default way; with `lean`, at the smallest workspace and the fewest
    seconds of all their ways, for searches that choose the ways afterwards (`schedule.equip`).
    """
    arrays = graph.arrays
    count = len(graph.storages)
    uses: list[list[int]] = [[] for _ in range(count)]
    chain: list[list[int]] = [[] for _ in range(count)]
    resident, kept = arrays.resident.tolist(), arrays.keep.tolist()
    needs, touched = [], []
    for at in range(len(graph.ops)):
        made = arrays.outputs[at]
        here = dict.fromkeys((*arrays.reads[at], *arrays.releases[at]))
        needs.append(tuple(storage for storage in here if storage not in made))
        here.update(dict.fromkeys(made))
        mine = tuple(storage for storage in here if not resident[storage])
        touched.append(mine)
        for storage in mine:
            uses[storage].append(at)
        for storage in (*arrays.outputs[at], *arrays.writes[at]):
            if not arrays.resident[storage]:
                chain[storage].append(at)
    first, storages, start, end = [0], [], [], []
    total = len(graph.ops)
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
        needs=needs,
        touched=touched,
        stays=[
            kept[storage] and hole == first[storage + 1] - 1
            for hole, storage in enumerate(storages)
        ],
    )


def _repeatable(graph: Graph, storage: int, chain: tuple[int, ...]) -> bool:
    """Whether maker and writers may run twice and change nothing else in place."""
    return all(
        graph.ops[op].repeatable and set(graph.arrays.writes[op]) <= {storage} for op in chain
    )


def _expiries(graph: Graph) -> list[float]:
    """Per op, the first later op that changes one of its inputs; infinity if none does."""
    arrays = graph.arrays
    next_write: dict[int, int] = {}
    expires = [math.inf] * len(graph.ops)
    for op in range(len(graph.ops) - 1, -1, -1):
        for storage in arrays.reads[op]:
            # A writer in the chain of a storage runs again together with the whole chain.
            if storage in next_write and storage not in arrays.writes[op]:
                expires[op] = min(expires[op], next_write[storage])
        for storage in arrays.writes[op]:
            next_write[storage] = op
    return expires
