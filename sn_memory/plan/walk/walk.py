"""From decisions to a sequence of runs: the graph is walked once, what is missing is rebuilt.

A policy says when a storage is dropped and what happens after a rebuild; this file finds the runs
that follow from it, `carry.py` finds where memory can be given back. Kept apart, a policy cannot
forget a free, and a checkpoint lives exactly as long as somebody may be rebuilt from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from ...base.clock import spend
from ...graph.graph import Graph
from .origins import Origins, origins

# Units of work to note a run.
RUN = 100


class Event(NamedTuple):
    """One entry of a sequence.

    `run` an op, making the storages in `fresh` anew (its other outputs are there already);
    `offload`, `prefetch` a storage; `settle`: its device copy must be gone now.
    """

    kind: str
    number: int
    fresh: tuple[int, ...] = ()


@dataclass
class Walk:
    """A walk over a graph that notes events.

    Attributes
    ----------
    there
        Storages that can be read: on the device, as far as the policy knows.
    host
        Storages whose only copy is on the host.
    """

    graph: Graph
    origin: Origins = field(init=False)
    events: list[Event] = field(default_factory=list)
    there: set[int] = field(default_factory=set)
    host: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.origin = origins(self.graph)
        self.there.update(s for s, resident in enumerate(self.graph.arrays.resident) if resident)

    def run(self, op: int) -> None:
        """Run an op of the graph for the first time; what it reads must be there."""
        spend(RUN)
        outputs = self.graph.arrays.outputs[op]
        self.events.append(Event("run", op, outputs))
        self.there.update(outputs)

    def bring(self, storages: Iterable[int]) -> list[int]:
        """Make storages readable by prefetching or rebuilding; return what was rebuilt on the way.

        Recursion would break on deep nets, so what is left to do is a stack of tasks: `(storage,
        None)` asks for a storage, `(storage, op)` runs one of its makers.
        """
        arrays, made = self.graph.arrays, []
        tasks: list[tuple[int, int | None]] = [(s, None) for s in reversed(list(storages))]
        while tasks:
            storage, op = tasks.pop()
            if storage in self.there:
                continue
            if storage in self.host:
                self.prefetch(storage)
            elif op is None:
                for maker in reversed(self.origin.makers[storage]):
                    tasks.append((storage, maker))
                    tasks.extend((s, None) for s in reversed(arrays.reads[maker]) if s != storage)
            else:
                made += self._again(storage, op)
        return made

    def offload(self, storage: int) -> None:
        """Start copying a storage out; it stays readable until `leave`."""
        self.events.append(Event("offload", storage))

    def leave(self, storage: int) -> None:
        """Read an offloaded storage no more before it is prefetched."""
        self.there.discard(storage)
        self.host.add(storage)

    def prefetch(self, storage: int) -> None:
        """Start copying a storage back."""
        self.events.append(Event("prefetch", storage))
        self.host.discard(storage)
        self.there.add(storage)

    def settle(self, storage: int) -> None:
        """Wait here, at the latest, until an offloaded storage has left."""
        self.events.append(Event("settle", storage))

    def _again(self, storage: int, op: int) -> list[int]:
        spend(RUN)
        outputs = self.graph.arrays.outputs[op]
        for other in outputs:
            # Making what is on the host a second time would leave two versions of the truth.
            if other in self.host:
                self.prefetch(other)
        fresh = tuple(s for s in outputs if s not in self.there)
        self.events.append(Event("run", op, fresh))
        makers = self.origin.makers
        # A storage is there once the last op that changes it has run.
        complete = [s for s in fresh if makers[s] == (op,)]
        if op == makers[storage][-1] and storage not in complete:
            complete.append(storage)
        self.there.update(complete)
        return complete
