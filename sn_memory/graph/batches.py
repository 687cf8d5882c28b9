"""A graph at another batch, from the same step traced at two.

Sizes of storages and workspaces, and arithmetic, grow in a straight line with the batch, as long as
the step makes the same calls. So a step need not be traced again for each batch that is asked for.
"""

from __future__ import annotations

from dataclasses import replace

from ..base.errors import GraphError
from .graph import Graph
from .records import Op, Storage, Workspace


class Batches:
    """The graphs of a step at any batch.

    Parameters
    ----------
    first, second
        A batch and the graph there, of the same ops and storages by name; the second batch is the
        larger one, and its order of ops is taken.

    Raises
    ------
    GraphError
        If the two are not the same step.
    """

    def __init__(self, first: tuple[int, Graph], second: tuple[int, Graph]) -> None:
        (self._few, small), (self._many, self._graph) = first, second
        if self._few >= self._many:
            raise GraphError(f"got batches {self._few} and {self._many}, expected a larger second.")
        self._ops = {op.name: op for op in small.ops}
        self._storages = {storage.name: storage for storage in small.storages}
        other = {op.name: op for op in self._graph.ops}
        differing = self._ops.keys() ^ other.keys() or [
            name
            for name, op in other.items()
            if (op.inputs, op.outputs) != (self._ops[name].inputs, self._ops[name].outputs)
        ]
        if differing or self._storages.keys() != {storage.name for storage in self._graph.storages}:
            raise GraphError(
                f"the step at a batch of {self._few} is another than at {self._many}"
                + (f": it differs in {min(differing)}." if differing else ".")
            )

    def at(self, batch: int) -> Graph:
        """Return the graph at a batch of 1 or more."""

        def between(few: float, many: float) -> float:
            return few + (many - few) * (batch - self._few) / (self._many - self._few)

        def size(few: int, many: int) -> int:
            return max(0, round(between(few, many)))

        def op_at(op: Op) -> Op:
            few = self._ops[op.name]
            ways = tuple(
                Workspace(size(a.bytes, b.bytes), b.seconds, b.name)
                for a, b in zip(few.workspaces, op.workspaces, strict=False)
            )
            return replace(op, flops=max(0.0, between(few.flops, op.flops)), workspaces=ways)

        def storage_at(storage: Storage) -> Storage:
            return replace(storage, bytes=size(self._storages[storage.name].bytes, storage.bytes))

        return replace(
            self._graph,
            storages=tuple(storage_at(storage) for storage in self._graph.storages),
            ops=tuple(op_at(op) for op in self._graph.ops),
        )
