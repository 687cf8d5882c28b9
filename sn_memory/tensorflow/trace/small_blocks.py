"""Blocks that the CPU allocator's trace does not show, counted from the graph of a step.

It shows blocks of 256 KiB and more (`memory.py`). Smaller ones take memory as well: a small model's
whole step, and what recurrent layers collect in each iteration of their loops. Ops are assumed to
run in the order of the trace, and lists to have as many elements as their loop has iterations.
"""

from __future__ import annotations

from typing import Any

from ..errors import TraceError
from ..memory import TRACED_BYTES
from . import kernels
from .capture import Captured, Node, bodies, undifferentiated
from .to_graph import Buffers

_PUT = {"TensorListPushBack": 1, "TensorListSetItem": 2}  # position of the element among the inputs


def small_bytes(graph: Any, device: str) -> int:
    """Return how much blocks too small for the trace add to a step's peak.

    On a GPU the trace shows all blocks. Raises TraceError if a loop collects small blocks and its
    length is not known.

    graph : of a concrete function
    """
    if "GPU" in device:
        return 0
    captured = undifferentiated(graph)
    # Not the peak of small blocks alone, which may be at another time than that of all blocks.
    return _Steps(captured, 0).peak_bytes() - _Steps(captured, TRACED_BYTES).peak_bytes()


class _Steps:
    """The ops of a graph, or of a loop's body, in order.

    least_bytes : size from which blocks count
    """

    def __init__(self, captured: Captured, least_bytes: int) -> None:
        self.captured, self.buffers = captured, Buffers(captured, inside=True)
        self.least_bytes = least_bytes
        # Number of elements per list.
        self.lengths: dict[int, int] = {}

    def peak_bytes(self) -> int:
        root, last = self.buffers.root, self.buffers.last
        # Per node, the values that it reads last; per value held, its bytes.
        ending: dict[int, list[int]] = {}
        sizes: dict[int, int] = {}
        live = most = 0
        for at in sorted(self.buffers.needed):
            if self.buffers.is_view(at):
                continue
            node = self.captured.nodes[at]
            allocated = {value: self.size(value) for value in node.outputs if root[value] == value}
            inside = 0
            if node.op.type in kernels.LOOPS:
                parts = [_Steps(body, self.least_bytes) for body in bodies(node.op)]
                inside = max((part.peak_bytes() for part in parts), default=0)
                if "While" in node.op.type:
                    allocated |= self.collected(node, parts[0])
            elif node.op.type == "TensorListFromTensor":
                allocated[node.outputs[0]] = self.unstacked(node)
            # Before adding the result, which uses the same block.
            over = self.buffers.overwritten(at)
            if over is not None:
                live -= sizes.pop(over, 0)
            sizes |= allocated
            live += sum(allocated.values())
            most = max(most, live + inside)
            for value in allocated:
                ending.setdefault(max(at, last.get(value, at)), []).append(value)
            live -= sum(sizes.pop(value, 0) for value in ending.pop(at, ()))
        return most

    def size(self, value: int) -> int:
        """Return the bytes of a block, if it counts."""
        size = kernels.nbytes(self.captured.tensors[value]) or 0
        return size if size >= self.least_bytes else 0

    def unstacked(self, node: Node) -> int:
        """Return the bytes of a list into which a tensor is split, row by row."""
        tensor = self.captured.tensors[node.inputs[0]]
        length = self.lengths[node.outputs[0]] = (tensor.shape[0] if tensor.shape.rank else 0) or 0
        size = kernels.nbytes(tensor) or 0
        return size if length and size // length >= self.least_bytes else 0

    def collected(self, node: Node, body: _Steps) -> dict[int, int]:
        """Return the bytes of the lists that a loop fills."""
        sizes: dict[int, int] = {}
        counted: set[int] = set()
        for value, inner in zip(node.outputs, body.captured.outputs, strict=True):
            element = body.put(inner)
            if element is None:
                continue
            size = 0 if element in counted else body.size(element)
            counted.add(element)
            self.lengths[value] = self.iterations(node)
            # An argument of the body is a single block, however often it is in the list.
            if body.buffers.producer.get(element) is None or not size:
                continue
            if not self.lengths[value]:
                raise TraceError(
                    f"the loop {node.op.name!r} collects blocks in a list and its length is not "
                    f"known, so those of less than {TRACED_BYTES >> 10} KiB, which no allocator "
                    "counts on a CPU, cannot be counted. Give it maximum_iterations, or plan where "
                    "the model trains on a GPU."
                )
            sizes[value] = self.lengths[value] * size
        return sizes

    def put(self, value: int) -> int | None:
        """Return the buffer that is put into a list here; None if no list grows here."""
        root = self.buffers.root
        at = self.buffers.producer.get(root[value])
        node = None if at is None else self.captured.nodes[at]
        if node is None or node.op.type not in _PUT:
            return None
        element = root[node.inputs[_PUT[node.op.type]]]
        if element in self.captured.arguments:
            # Lists share elements: an argument was made, and perhaps put, by the last iteration.
            place = self.captured.arguments.index(element)
            element = root[self.captured.outputs[place]]
        return element

    def iterations(self, node: Node) -> int:
        """Return the most iterations that a loop may run; 0 if unknown."""
        # The second input of a While is its `maximum_iterations`.
        limit = kernels.constant(node.op.inputs[1])
        if limit is not None and limit.ndim == 0 and limit > 0:
            return int(limit)
        # The gradient of a loop has as many iterations, and reads the lists that the loop filled.
        roots = (self.buffers.root[value] for value in node.inputs)
        return max((self.lengths.get(root, 0) for root in roots), default=0)
