"""Which values share a buffer, until when each is read, and what is too small to plan."""

from __future__ import annotations

from typing import Any, Final

from ..errors import TraceError
from . import kernels
from .capture import Captured, Node

SMALL_BYTES: Final = 1024


class Buffers:
    """The values of a captured step by the buffers they lie in.

    Parameters
    ----------
    captured
        The step.
    inside
        It is the body of a loop or branch. Values there may have any size: such are not counted,
        where a step would be refused.

    Attributes
    ----------
    needed
        Nodes that results or effects come from; the others are left out.
    root
        Per value, the value whose buffer it is: itself, what it is a view of, or the handle of the
        variable it was read from.
    last
        Per root, the last node that reads it; beyond the last node for results.
    folded
        Values known without running anything, or made from such.
    sizes
        Bytes per root.
    uncounted
        Names of values whose bytes nobody can tell.
    """

    def __init__(self, captured: Captured, *, inside: bool = False) -> None:
        self.captured, self.inside = captured, inside
        self.producer = captured.producer
        self.needed = _needed(captured, self.producer)
        self.uncounted: list[str] = []
        self.folded = self._folded()
        self.changes = self._changes()
        self.root = {value: value for value in range(len(captured.tensors))}
        self.last: dict[int, int] = {}
        self._follow(reads=frozenset())
        reads = frozenset(at for at in sorted(self.needed) if self._sees_one_version(at))
        self._follow(reads=reads)
        self._foreign = self._of_others()
        self.sizes = {value: self._size(value) for value in set(self.root.values())}

    def small(self, value: int) -> bool:
        """Whether a value is too small to be planned."""
        return self.sizes[self.root[value]] <= SMALL_BYTES

    def is_view(self, at: int) -> bool:
        """Whether a node only passes a buffer on, or is known; it is carried out when asked for."""
        node = self.captured.nodes[at]
        return bool(node.outputs) and all(
            self.root[it] != it or it in self.folded for it in node.outputs
        )

    def _follow(self, *, reads: frozenset[int]) -> None:
        """Fill in roots and last reads; `reads` are the reads of variables that are views."""
        for at, node in enumerate(self.captured.nodes):
            if node.op.type == kernels.READS and at in reads:
                self.root[node.outputs[0]] = node.inputs[0]
            elif kernels.passes_on(node.op):
                for source, result in zip(node.inputs, node.outputs, strict=False):
                    self.root[result] = self.root[source]
        self.last = {}
        for at in sorted(self.needed):
            node = self.captured.nodes[at]
            if not (kernels.passes_on(node.op) or at in reads):
                self.last.update((self.root[value], at) for value in node.inputs)
        for value in self.captured.outputs:
            self.last[self.root[value]] = len(self.captured.nodes)

    def _sees_one_version(self, at: int) -> bool:
        """Whether nothing changes a variable between a read of it and the last use of that."""
        node = self.captured.nodes[at]
        if node.op.type != kernels.READS or node.inputs[0] not in self.captured.variables:
            return False
        used = self.last.get(node.outputs[0], at)
        changed = self.changes.get(node.inputs[0], ())
        return not any(at < change < used for change in changed)

    def _changes(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for at in sorted(self.needed):
            node = self.captured.nodes[at]
            if kernels.has_effect(node.op):
                for value in node.inputs:
                    if value in self.captured.variables:
                        found.setdefault(value, []).append(at)
        return found

    def _folded(self) -> set[int]:
        found: set[int] = set()
        for at, node in enumerate(self.captured.nodes):
            if at not in self.needed or node.op.op_def.is_stateful or not node.outputs:
                continue
            by_shape = node.op.type in kernels.SHAPES and all(
                kernels.constant(it) is not None for it in node.op.outputs
            )
            known = node.op.type == "Const" or (
                bool(node.inputs)
                and found.issuperset(node.inputs)
                and node.op.type not in kernels.LOOPS
                and all(_is_small(it) for it in node.op.outputs)
            )
            if by_shape or known:
                found.update(node.outputs)
        return found

    def _of_others(self) -> set[int]:
        """Values of unknown size that other ranks or Python send, or that are made of such."""
        found: set[int] = set()
        for node in self.captured.nodes:
            unknown = [it for it in node.inputs if self._unknown(it)]
            sent = kernels.is_collective(node.op) or node.op.type in kernels.PYTHON
            if sent or (unknown and found.issuperset(unknown)):
                found.update(it for it in node.outputs if self._unknown(it))
        return found

    def _unknown(self, value: int) -> bool:
        return (
            value not in self.captured.variables
            and kernels.nbytes(self.captured.tensors[value]) is None
        )

    def _size(self, value: int) -> int:
        captured, tensor = self.captured, self.captured.tensors[value]
        variable = captured.variables.get(value)
        if variable is not None:
            return int(variable.shape.num_elements() or 0) * int(variable.dtype.size)
        found = kernels.nbytes(tensor)
        if found is not None:
            return found
        foreign = value in self._foreign
        if self.inside or foreign or tensor.dtype.name in ("variant", "string"):
            self.uncounted.append(tensor.name)
            return 0
        at = self.producer.get(value)
        if at is not None and at not in self.needed:
            return 0
        what = (
            f"{tensor.op.type} {tensor.op.name!r}" if at is not None else f"input {tensor.name!r}"
        )
        raise TraceError(
            f"{what} has the shape {tensor.shape}, which depends on values or on an unknown batch. "
            "Give a sample of full shape; ops whose shape depends on values (boolean masks, "
            "tf.unique, tf.where with one argument) cannot be planned."
        )


def _is_small(tensor: Any) -> bool:
    size = kernels.nbytes(tensor)
    return size is not None and size <= SMALL_BYTES


def phases(captured: Captured) -> list[str]:
    """Return the phase of each node, by ancestry of what was differentiated.

    Ancestors of the loss are forward; other ancestors of its gradients backward. Of the rest, what
    depends on a backward node is update, and what does not (moving averages) forward.
    """
    forward = _ancestors(captured, captured.producer, captured.targets)
    backward = _ancestors(captured, captured.producer, captured.gradients) - forward
    result = []
    late: set[int] = set()
    for at, node in enumerate(captured.nodes):
        if at in forward:
            phase = "forward"
        elif at in backward:
            phase = "backward"
        else:
            phase = "update" if late.intersection(node.inputs) else "forward"
        if phase != "forward":
            late.update(node.outputs)
        result.append(phase)
    return result


def _ancestors(captured: Captured, producer: dict[int, int], values: Any) -> set[int]:
    found: set[int] = set()
    stack = [producer[it] for it in values if it in producer]
    while stack:
        at = stack.pop()
        if at not in found:
            found.add(at)
            stack += [producer[it] for it in captured.nodes[at].inputs if it in producer]
    return found


def _needed(captured: Captured, producer: dict[int, int]) -> set[int]:
    effects = [at for at, node in enumerate(captured.nodes) if kernels.has_effect(node.op)]
    inputs = [value for at in effects for value in captured.nodes[at].inputs]
    return _ancestors(captured, producer, [*captured.outputs, *inputs]) | set(effects)


def overwritten(at: int, node: Node, buffers: Buffers) -> int | None:
    """Return the root whose buffer the first result of a node takes over, if one does."""
    if node.op.type not in kernels.OVERWRITES or buffers.small(node.outputs[0]):
        return None
    result = node.outputs[0]
    tensors = buffers.captured.tensors
    roots = [buffers.root[value] for value in node.inputs]
    for root in roots:
        if (
            root in buffers.producer
            and root not in buffers.folded
            and buffers.last[root] == at
            and roots.count(root) == 1
            and tensors[root].dtype == tensors[result].dtype
            and buffers.sizes[root] == buffers.sizes[result]
        ):
            return root
    return None
