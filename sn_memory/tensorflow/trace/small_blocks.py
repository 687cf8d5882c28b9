"""Blocks that the CPU allocator's trace does not show, counted from the graph of a step.

It shows those of 256 KiB and more (`model/allocations.py`). What is smaller is held nevertheless: a
small model's whole step, and what recurrent layers collect in each pass of their loops. Ops are
taken in the order of the trace, lists with as many elements as their loop has passes.
"""

from __future__ import annotations

from typing import Any

from ..errors import TraceError
from ..model.allocations import TRACED_BYTES
from . import kernels
from .buffers import Buffers, overwritten
from .capture import Captured, Node, bodies, undifferentiated

_PUT = {"TensorListPushBack": 1, "TensorListSetItem": 2}  # where the element is among the inputs


def small_bytes(graph: Any, device: str) -> int:
    """Return how much higher a step's peak is by blocks too small for the trace.

    Parameters
    ----------
    graph
        Of a concrete function.
    device
        Whose memory is counted; on a GPU the trace shows all blocks.

    Raises
    ------
    TraceError
        If a loop collects small blocks and its length is not known.
    """
    if "GPU" in device:
        return 0
    captured = undifferentiated(graph)
    return _Steps(captured, 0).most() - _Steps(captured, TRACED_BYTES).most()


class _Steps:
    """The ops of a graph, or of a loop's body, in order.

    least_bytes : of the blocks that count
    """

    def __init__(self, captured: Captured, least_bytes: int) -> None:
        self.captured, self.buffers = captured, Buffers(captured, inside=True)
        self.least_bytes = least_bytes
        # Per list, how many elements it has.
        self.lengths: dict[int, int] = {}

    def most(self) -> int:
        nodes, root, last = self.captured.nodes, self.buffers.root, self.buffers.last
        ending: dict[int, list[int]] = {}
        sizes: dict[int, int] = {}
        live = most = 0
        for at in sorted(self.buffers.needed):
            node, inside = nodes[at], 0
            if self.buffers.is_view(at):
                continue
            made = {it: self.size(it) for it in node.outputs if root[it] == it}
            if node.op.type in kernels.LOOPS:
                parts = [_Steps(it, self.least_bytes) for it in bodies(node.op)]
                inside = max((it.most() for it in parts), default=0)
                if "While" in node.op.type:
                    made |= self.collected(node, parts[0])
            elif node.op.type == "TensorListFromTensor":
                whole = self.captured.tensors[node.inputs[0]]
                length = (whole.shape[0] if whole.shape.rank else None) or 0
                whole_bytes = kernels.nbytes(whole) or 0
                counts = length and whole_bytes // length >= self.least_bytes
                made[node.outputs[0]] = whole_bytes if counts else 0
                self.lengths[node.outputs[0]] = length
            over = overwritten(at, node, self.buffers)
            if over is not None:
                live -= sizes.pop(over, 0)
            sizes |= made
            live += sum(made.values())
            most = max(most, live + inside)
            for it in made:
                ending.setdefault(max(at, last.get(it, at)), []).append(it)
            live -= sum(sizes.pop(it, 0) for it in ending.pop(at, ()))
        return most

    def size(self, value: int) -> int:
        """Return the bytes of a block, if it counts."""
        size = kernels.nbytes(self.captured.tensors[value]) or 0
        return size if size >= self.least_bytes else 0

    def collected(self, node: Node, body: _Steps) -> dict[int, int]:
        """Return the bytes of the lists that a loop fills."""
        made: dict[int, int] = {}
        counted: set[int] = set()
        for value, inner in zip(node.outputs, body.captured.outputs, strict=True):
            element = body.put(inner)
            if element is None:
                continue
            # Lists share elements: what comes in was made, and perhaps put, by the pass before.
            element = body.as_made(element)
            size = 0 if element in counted else body.size(element)
            counted.add(element)
            self.lengths[value] = self.passes(node)
            if body.buffers.producer.get(element) is None or not size:
                continue
            if not self.lengths[value]:
                raise TraceError(
                    f"the loop {node.op.name!r} collects blocks in a list and its length is not "
                    f"known, so those of less than {TRACED_BYTES >> 10} KiB, which no allocator "
                    "counts on a CPU, cannot be counted. Give it maximum_iterations, or plan where "
                    "the model trains on a GPU."
                )
            made[value] = self.lengths[value] * size
        return made

    def put(self, value: int) -> int | None:
        """Return the buffer that is put into a list here; None if that is no list that grows."""
        at = self.buffers.producer.get(self.buffers.root[value])
        node = None if at is None else self.captured.nodes[at]
        if node is None or node.op.type not in _PUT:
            return None
        return self.buffers.root[node.inputs[_PUT[node.op.type]]]

    def as_made(self, value: int) -> int:
        """Return the buffer that a loop hands to its next pass in the place of an argument."""
        if value not in self.captured.arguments:
            return value
        place = self.captured.arguments.index(value)
        return self.buffers.root[self.captured.outputs[place]]

    def passes(self, node: Node) -> int:
        """Return how often the body of a loop runs at most; 0 if that is not known."""
        limit = kernels.constant(node.op.inputs[1])
        if limit is not None and limit.ndim == 0 and limit > 0:
            return int(limit)
        # The gradient of a loop takes from lists what the passes of the loop have put there.
        return max((self.lengths.get(self.buffers.root[it], 0) for it in node.inputs), default=0)
