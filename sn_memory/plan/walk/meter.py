"""Clocks and bytes of a plan while its actions are noted, one after the other."""

from __future__ import annotations

from ...graph.graph import Graph
from ..plan import Action


class Meter:
    """What is on the device, and when each lane is free.

    Parameters
    ----------
    graph
        What is carried out.
    within_bytes
        Take the fastest way of each op that fits into this; None takes the default way.

    Attributes
    ----------
    dead
        Storages that nobody reads any more, but whose copy to the host is not complete.
    """

    def __init__(self, graph: Graph, within_bytes: int | None = None) -> None:
        self.graph, self.within_bytes = graph, within_bytes
        self.sizes: list[int] = graph.arrays.bytes.tolist()
        self.actions: list[Action] = []
        self.there: set[int] = set()
        self.dead: set[int] = set()
        # When a storage can be read; when its copy on the host is, or will be, complete.
        self.ready: dict[int, float] = {}
        self.copied: dict[int, float] = {}
        self.leaving: dict[int, float] = {}
        self.compute = self.up = self.down = 0.0
        self.live = self.peak = graph.base_bytes

    def run(self, op: int) -> list[int]:
        """Run an op; return the outputs that had to be allocated."""
        arrays = self.graph.arrays
        made = [s for s in arrays.outputs[op] if s not in self.there]
        twice = sum(self.sizes[s] for s in arrays.outputs[op] if s in self.there)
        self.there.update(made)
        self.live += sum(self.sizes[s] for s in made)
        way = self._way(op, twice)
        self.actions.append(Action("run", self.graph.ops[op].name, way))
        self._reach(self.live + twice + arrays.workspace_bytes[op][way])
        start = max([self.compute, *(self.ready.get(s, 0.0) for s in arrays.reads[op])])
        self.compute = start + arrays.seconds[op][way]
        for storage in (*arrays.outputs[op], *arrays.writes[op]):
            self.ready[storage] = self.compute
        return made

    def _way(self, op: int, twice: int) -> int:
        spaces, seconds = self.graph.arrays.workspace_bytes[op], self.graph.arrays.seconds[op]
        if self.within_bytes is None or len(spaces) == 1:
            return 0
        left = self.within_bytes - self.live - twice
        fitting = [way for way, space in enumerate(spaces) if space <= left]
        if not fitting:
            return min(range(len(spaces)), key=lambda way: (spaces[way], seconds[way]))
        return min(fitting, key=lambda way: (seconds[way], spaces[way]))

    def free(self, storage: int) -> None:
        """Give the memory back; waits for a copy under way."""
        self._note("free", storage)
        self.there.discard(storage)
        self.dead.discard(storage)
        self.live -= self.sizes[storage]
        copied, ready = self.leaving.pop(storage, 0.0), self.ready.pop(storage, 0.0)
        self.compute = max(self.compute, copied, ready)

    def die(self, storage: int) -> None:
        """Free a storage, or mark it for `collect` while its copy is under way."""
        if self.leaving.get(storage, 0.0) > self.compute:
            self.dead.add(storage)
        else:
            self.free(storage)

    def collect(self) -> None:
        """Free the dead whose copies are complete."""
        for storage in sorted(self.dead):
            if self.leaving[storage] <= self.compute:
                self.free(storage)

    def offload(self, storage: int) -> None:
        """Start copying to the host."""
        device = self.graph.device
        assert device.to_host_bytes_per_s is not None
        self._note("offload", storage)
        start = max(self.down, self.ready.get(storage, 0.0), self.compute)
        wire = self.sizes[storage] / device.to_host_bytes_per_s
        self.down = start + device.transfer_latency_s + wire
        self.copied[storage] = self.leaving[storage] = self.down

    def prefetch(self, storage: int) -> None:
        """Start copying back, into memory that is allocated now."""
        device = self.graph.device
        assert device.to_device_bytes_per_s is not None
        if storage in self.there:
            self.free(storage)
        self._note("prefetch", storage)
        self.there.add(storage)
        self.live += self.sizes[storage]
        self._reach(self.live)
        start = max(self.up, self.copied.pop(storage), self.compute)
        wire = self.sizes[storage] / device.to_device_bytes_per_s
        self.ready[storage] = self.up = start + device.transfer_latency_s + wire

    def _note(self, kind: str, storage: int) -> None:
        self.actions.append(Action(kind, self.graph.storages[storage].name))

    def _reach(self, live: int) -> None:
        self.peak = max(self.peak, live)
