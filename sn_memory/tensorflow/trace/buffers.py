"""Which values share a buffer, until when each is read, and in which order a step's ops come.

A trace has all updates after all gradients, so that a graph in its order holds every gradient to
the end. The executor does not wait: a variable is updated when its gradient is there. A step is put
into that order before anything is planned.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from ..errors import TraceError
from . import kernels
from .capture import SHAPE_OF_VALUES, Captured, Node

# Learning rates, counters, shapes: what is as small is held and not planned.
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
        effects = [at for at, node in enumerate(captured.nodes) if kernels.has_effect(node.op)]
        read = [value for at in effects for value in captured.nodes[at].inputs]
        self.needed = _ancestors(captured, [*captured.outputs, *read]) | set(effects)
        self.uncounted: list[str] = []
        self.folded = self._folded()
        self.changes: dict[int, list[int]] = {}
        for at in effects:
            for value in captured.nodes[at].inputs:
                if value in captured.variables:
                    self.changes.setdefault(value, []).append(at)
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
            self.root[value] != value or value in self.folded for value in node.outputs
        )

    def overwritten(self, at: int) -> int | None:
        """Return the root whose buffer the first result of a node takes over, if one does."""
        node = self.captured.nodes[at]
        if node.op.type not in kernels.OVERWRITES or self.small(node.outputs[0]):
            return None
        result, tensors = node.outputs[0], self.captured.tensors
        roots = [self.root[value] for value in node.inputs]
        for root in roots:
            if (
                root in self.producer
                and root not in self.folded
                and self.last[root] == at
                and roots.count(root) == 1
                and tensors[root].dtype == tensors[result].dtype
                and self.sizes[root] == self.sizes[result]
            ):
                return root
        return None

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
        return not any(at < change < used for change in self.changes.get(node.inputs[0], ()))

    def _folded(self) -> set[int]:
        folded: set[int] = set()
        for at, node in enumerate(self.captured.nodes):
            if at not in self.needed or node.op.op_def.is_stateful or not node.outputs:
                continue
            by_shape = node.op.type in kernels.SHAPES and all(
                kernels.constant(tensor) is not None for tensor in node.op.outputs
            )
            known = node.op.type == "Const" or (
                bool(node.inputs)
                and folded.issuperset(node.inputs)
                and node.op.type not in kernels.LOOPS
                and all(
                    (size := kernels.nbytes(tensor)) is not None and size <= SMALL_BYTES
                    for tensor in node.op.outputs
                )
            )
            if by_shape or known:
                folded.update(node.outputs)
        return folded

    def _of_others(self) -> set[int]:
        """Values of unknown size that other ranks or Python send, or that are made of such."""
        foreign: set[int] = set()
        for node in self.captured.nodes:
            unknown = [value for value in node.inputs if self._unknown(value)]
            sent = kernels.is_collective(node.op) or node.op.type in kernels.PYTHON
            if sent or (unknown and foreign.issuperset(unknown)):
                foreign.update(value for value in node.outputs if self._unknown(value))
        return foreign

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
        size = kernels.nbytes(tensor)
        if size is not None:
            return size
        if self.inside or value in self._foreign or tensor.dtype.name in ("variant", "string"):
            self.uncounted.append(tensor.name)
            return 0
        at = self.producer.get(value)
        if at is not None and at not in self.needed:
            return 0
        what = f"input {tensor.name!r}" if at is None else f"{tensor.op.type} {tensor.op.name!r}"
        raise TraceError(
            f"{what} has the shape {tensor.shape}, which depends on values or on an unknown batch. "
            f"{SHAPE_OF_VALUES}"
        )


def phases(captured: Captured) -> list[str]:
    """Return the phase of each node, by ancestry of what was differentiated.

    Ancestors of the loss are forward; other ancestors of its gradients backward. Of the rest, what
    depends on a backward node is update, and what does not (moving averages) forward.
    """
    forward = _ancestors(captured, captured.targets)
    backward = _ancestors(captured, captured.gradients) - forward
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


def _ancestors(captured: Captured, values: Iterable[int]) -> set[int]:
    producer = captured.producer
    ancestors: set[int] = set()
    stack = [producer[value] for value in values if value in producer]
    while stack:
        at = stack.pop()
        if at not in ancestors:
            ancestors.add(at)
            stack += [producer[value] for value in captured.nodes[at].inputs if value in producer]
    return ancestors


def updates_first(captured: Captured) -> Captured:
    """Return a step with its updates moved to where all that they read is there.

    Moved are ops after the backward pass without effect, and those that only change variables. A
    variable is changed after all that read it before in the trace, and read after all that changed
    it before. All else keeps its order.
    """
    nodes, phase, waits = captured.nodes, phases(captured), _waits(captured)
    begin = next((at for at, it in enumerate(phase) if it == "backward"), len(nodes))
    movable = [_may_move(node, captured) for node in nodes]
    early = [it == "update" and movable[at] for at, it in enumerate(phase)]
    # What updates read beside gradients (rates, decay) is traced after the backward pass as well.
    fetched = [at > begin and movable[at] and it == "forward" for at, it in enumerate(phase)]
    due: list[int] = []
    for at, before in enumerate(waits):
        soonest = max((due[it] for it in before), default=0)
        due.append(soonest if early[at] or fetched[at] else at)
    wanted = list(range(len(nodes)))
    for at in reversed(range(len(nodes))):
        if fetched[at]:
            due[at] = max(due[at], wanted[at])
        for it in waits[at]:
            wanted[it] = min(wanted[it], due[at])
    order = sorted(range(len(nodes)), key=lambda at: (due[at], at))
    return replace(captured, nodes=[nodes[at] for at in order])


def _may_move(node: Node, captured: Captured) -> bool:
    op = node.op
    if kernels.is_random(op) or kernels.is_collective(op) or op.type in kernels.LOOPS:
        return False
    return not kernels.has_effect(op) or (
        kernels.changes_variables(op) and any(value in captured.variables for value in node.inputs)
    )


def _waits(captured: Captured) -> list[set[int]]:
    """Return, per node, those that must come before it."""
    producer = captured.producer
    number = {id(node.op): at for at, node in enumerate(captured.nodes)}
    # Of a value that lies in a variable's buffer, the handle of that variable.
    lies_in: dict[int, int] = {handle: handle for handle in captured.variables}
    users: dict[int, list[int]] = {}
    changed: dict[int, int] = {}
    waits: list[set[int]] = []
    for at, node in enumerate(captured.nodes):
        before = {producer[value] for value in node.inputs if value in producer}
        before.update(number[id(it)] for it in node.op.control_inputs if id(it) in number)
        effect = kernels.has_effect(node.op)
        if node.op.type == kernels.READS or kernels.passes_on(node.op):
            for source, result in zip(node.inputs, node.outputs, strict=False):
                if source in lies_in:
                    lies_in[result] = lies_in[source]
        for handle in {lies_in[value] for value in node.inputs if value in lies_in}:
            if handle in changed:
                before.add(changed[handle])
            if effect:
                before.update(users.get(handle, ()))
                users[handle], changed[handle] = [], at
            users.setdefault(handle, []).append(at)
        # A control input may have been traced later; the trace's own order did without it.
        waits.append({it for it in before if it < at})
    return waits
