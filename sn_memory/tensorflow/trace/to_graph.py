"""Conversion of a flat traced step to the graph: buffers, storages, in-place writes, phases, flags.

Thousands of ops of a step work on a few bytes: learning rates, counters, shapes. Planning them
gains nothing. Such an op follows the op traced before it, runs once, and its results are held; all
others are ops of the graph.

A trace has all updates after all gradients, so a graph in its order would hold every gradient to
the end. The executor does not wait: it updates a variable when its gradient is ready. A step is
reordered accordingly before it is planned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from tensorflow.python.framework import ops as framework_ops
from tensorflow.python.util import deprecation

from ...graph.graph import Graph
from ...graph.liveness import peak
from ...graph.records import LOSS, Device, Op, Storage, Workspace, loss_op
from ..errors import TraceError
from . import kernels
from .capture import SHAPE_OF_VALUES, Captured, Node, bodies

# Values up to this size, e.g. learning rates, counters, shapes, are held and not planned.
SMALL_BYTES: Final = 1024
# Seconds of a node (None: a roofline) and bytes of its workspace.
Costs = Callable[[Node], tuple[float | None, int]]


class Buffers:
    """The values of a captured step by the buffers that hold them.

    inside : whether it is the body of a loop or branch, where values of unknown size are not
        counted; in a step, they raise TraceError

    needed : nodes that results or effects depend on; the others are left out.
    root : per value, the value whose buffer it uses: itself, what it is a view of, or the handle of
        the variable it was read from.
    last : per root, the last node that reads it; beyond the last node for results.
    folded : values known without running anything, or computed from such values
    sizes : bytes per root
    uncounted : names of values whose bytes are unknown
    """

    def __init__(self, captured: Captured, *, inside: bool = False) -> None:
        self.captured, self.inside = captured, inside
        self.producer = captured.producer
        self.needed = captured.needed
        self.uncounted: list[str] = []
        self.folded = self._folded()
        self.changes: dict[int, list[int]] = {}
        for at in captured.effects:
            for value in captured.nodes[at].inputs:
                if value in captured.variables:
                    self.changes.setdefault(value, []).append(at)
        self.root = {value: value for value in range(len(captured.tensors))}
        self.last: dict[int, int] = {}
        # Twice: whether a read sees one version depends on the last use of its result.
        self._follow(reads=frozenset())
        reads = frozenset(at for at in sorted(self.needed) if self._sees_one_version(at))
        self._follow(reads=reads)
        self._foreign = self._of_others()
        self.sizes = {value: self._size(value) for value in set(self.root.values())}

    def small(self, value: int) -> bool:
        """Whether a value is too small to be planned."""
        return self.sizes[self.root[value]] <= SMALL_BYTES

    def is_view(self, at: int) -> bool:
        """Whether a node only passes a buffer on, or is constant; it is emitted when needed."""
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
                # Arguments, variables and constants are held by others.
                root in self.producer
                and root not in self.folded
                and self.last[root] == at
                # If one op reads it twice, it is held twice, and not overwritten.
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
        """Values of unknown size that other ranks or Python send, or that depend on such."""
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
        size = captured.nbytes(value)
        if value in captured.shapes:
            # However few elements the sample has, other inputs may have many.
            return max(size or 0, SMALL_BYTES + 1)
        if size is not None:
            return size
        if self.inside or value in self._foreign or tensor.dtype.name in ("variant", "string"):
            self.uncounted.append(tensor.name)
            return 0
        # Values that are left out may have any size.
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
    forward = captured.ancestors(captured.targets)
    backward = captured.ancestors(captured.gradients) - forward
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


def updates_first(captured: Captured) -> Captured:
    """Return a step with its updates moved to where all that they read is ready.

    Only ops after the backward pass are moved that have no effect, or only change variables. A
    variable is still changed after all ops that read it earlier in the trace, and read after all
    ops that changed it earlier. All other ops keep their order.
    """
    nodes, phase, waits = captured.nodes, phases(captured), _waits(captured)
    begin = next((at for at, name in enumerate(phase) if name == "backward"), len(nodes))
    movable = [_may_move(node, captured) for node in nodes]
    early = [name == "update" and movable[at] for at, name in enumerate(phase)]
    # What updates read in addition to gradients (rates, decay) is also traced after the backward.
    fetched = [at > begin and movable[at] and name == "forward" for at, name in enumerate(phase)]
    # In forward order: the node after which all that a node waits for is ready.
    due: list[int] = []
    for at, before in enumerate(waits):
        soonest = max((due[op] for op in before), default=0)
        due.append(soonest if early[at] or fetched[at] else at)
    # In reverse order: no earlier than the first reader needs it, or it would be held in vain.
    wanted = list(range(len(nodes)))
    for at in reversed(range(len(nodes))):
        if fetched[at]:
            due[at] = max(due[at], wanted[at])
        for wait in waits[at]:
            wanted[wait] = min(wanted[wait], due[at])
    # Nodes that are due together keep the order of the trace.
    order = sorted(range(len(nodes)), key=lambda at: (due[at], at))
    return replace(captured, nodes=[nodes[at] for at in order])


def _may_move(node: Node, captured: Captured) -> bool:
    op = node.op
    # Random draws must keep their order, and collectives must run in the same order on all ranks.
    if kernels.is_random(op) or kernels.is_collective(op) or op.type in kernels.LOOPS:
        return False
    return not kernels.has_effect(op) or (
        kernels.changes_variables(op) and any(value in captured.variables for value in node.inputs)
    )


def _waits(captured: Captured) -> list[set[int]]:
    """Return, per node, those that must come before it."""
    producer = captured.producer
    number = {id(node.op): at for at, node in enumerate(captured.nodes)}
    # Per value in a variable's buffer, the handle of that variable.
    lies_in: dict[int, int] = {handle: handle for handle in captured.variables}
    # Per handle, the nodes that have used it since its last change, and the node of that change.
    users: dict[int, list[int]] = {}
    changed: dict[int, int] = {}
    waits: list[set[int]] = []
    for at, node in enumerate(captured.nodes):
        before = {producer[value] for value in node.inputs if value in producer}
        before.update(number[id(value)] for value in node.op.control_inputs if id(value) in number)
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
                # Later ones wait for this change, and thereby for those before it.
                users[handle], changed[handle] = [], at
            users.setdefault(handle, []).append(at)
        # A control input may have been traced later; the order of the trace ignores it.
        waits.append({op for op in before if op < at})
    return waits


@dataclass(frozen=True)
class GraphBinding:
    """The graph of a captured step, and the meaning of its names."""

    graph: Graph
    # Name of an op to the index of its node; the op `loss` has none.
    node_of: dict[str, int]
    # Per op, the small nodes that run right after its first run; under "" those at the start.
    followers: dict[str, list[int]]
    # Per root value, the name of its storage; small values have none.
    storage: dict[int, str]
    buffers: Buffers


def to_graph(
    captured: Captured,
    *,
    name: str,
    device: Device,
    costs: Costs,
    allocator: str = "none",
    extra: Sequence[Storage] = (),
    inside: bool = False,
) -> GraphBinding:
    """Return the graph of a captured step; `extra` are resident storages outside of it."""
    builder = _Builder(captured, costs, Buffers(captured, inside=inside))
    builder.build()
    storages = [*builder.storages.values(), *extra]
    graph = Graph(storages, builder.ops, name=name, device=device, allocator=allocator)
    return GraphBinding(graph, builder.node_of, builder.followers, builder.storage, builder.buffers)


class _Builder:
    """Collects the ops and storages of a graph, node by node."""

    def __init__(self, captured: Captured, costs: Costs, buffers: Buffers) -> None:
        self.captured, self.costs, self.buffers = captured, costs, buffers
        self.phase = phases(captured)
        self.storages: dict[str, Storage] = {}
        self.storage: dict[int, str] = {}
        self.ops: list[Op] = []
        self.node_of: dict[str, int] = {}
        self.followers: dict[str, list[int]] = {"": []}
        # Per pooled value, the storage of the positions of its maxima.
        self.maxima: dict[int, str] = {}

    def build(self) -> None:
        self.add_resident()
        placeholders = {self.buffers.producer[value] for value in self.captured.placeholders}
        previous = ""
        for at in sorted(self.buffers.needed):
            if at in placeholders:
                # One op produces all of them: added at the last one.
                if at == max(placeholders):
                    previous = self.add_loss()
                continue
            if self.buffers.is_view(at):
                node = self.captured.nodes[at]
                for value in node.outputs:
                    if value in self.buffers.folded and self.buffers.root[value] == value:
                        self.add(value, node.name, "constant")
            elif self.is_small(at):
                self.followers[previous].append(at)
            else:
                previous = self.add_op(at)
                self.followers[previous] = []

    def add_resident(self) -> None:
        """Add the storages that exist before the step."""
        captured, small = self.captured, 0
        for place, value in enumerate(captured.arguments):
            self.add(value, f"input {place}", "input")
        for value in captured.captures:
            variable = captured.variables.get(value)
            if self.buffers.small(value):
                small += self.buffers.sizes[value]
            elif variable is None:
                self.add(value, f"constant {value}", "constant")
            else:
                role = "parameter" if variable.trainable else "state"
                self.add(value, getattr(variable, "_name", None) or variable.name, role)
        # Together, as each alone is too small to be planned.
        if small:
            self.storages["small variables"] = Storage("small variables", small, "state")

    def add(self, value: int, wanted: str, role: str) -> str | None:
        """Add the storage of a root and return its name; None if it is small or was added."""
        if self.buffers.small(value) or value in self.storage:
            return None
        name, count = wanted, 1
        while name in self.storages:
            count += 1
            name = f"{wanted} ({count})"
        keep = role in ("activation", "gradient") and self.is_result(value)
        self.storages[name] = Storage(name, self.buffers.sizes[value], role, keep=keep)
        self.storage[value] = name
        return name

    def is_result(self, value: int) -> bool:
        return self.buffers.last.get(value, -1) == len(self.captured.nodes)

    def is_small(self, at: int) -> bool:
        node = self.captured.nodes[at]
        # A loop may hold much inside, and a collective's place in the order matters.
        single = node.op.type not in kernels.LOOPS and not kernels.is_collective(node.op)
        return single and all(self.buffers.small(value) for value in (*node.inputs, *node.outputs))

    def add_op(self, at: int) -> str:
        node, buffers = self.captured.nodes[at], self.buffers
        op, effect = node.op, kernels.has_effect(node.op)
        reads: list[str] = []
        writes: list[str] = []
        makes: list[str] = []
        for value in node.inputs:
            root = buffers.root[value]
            if root in self.storage:
                changes = effect and value in self.captured.variables
                (writes if changes else reads).append(self.storage[root])
        seconds, space = self.costs(node)
        if op.type == "MaxPoolGrad" and node.inputs[1] in self.maxima:
            reads.append(self.maxima[node.inputs[1]])
            # Its measured workspace is for finding the maxima first, as when it runs alone.
            space = 0
        over = buffers.overwritten(at)
        for place, value in enumerate(node.outputs):
            if place == 0 and over is not None:
                name = self.storage[value] = self.storage[over]
                if self.is_result(value):
                    self.storages[name] = replace(self.storages[name], keep=True)
                writes.append(name)
                continue
            role = "gradient" if self.phase[at] == "backward" else "activation"
            suffix = f":{place}" if len(node.outputs) > 1 else ""
            if (storage := self.add(value, node.name + suffix, role)) is not None:
                makes.append(storage)
        if kernels.keeps_maxima(op) and not buffers.small(node.outputs[0]):
            name = self.maxima[node.outputs[0]] = f"{node.name}:maxima"
            # A byte each.
            count = math.prod(self.captured.shape(node.outputs[0]) or ())
            self.storages[name] = Storage(name, count, "activation")
            makes.append(name)
            # When it was measured alone, the positions of the maxima counted as workspace.
            space = 0
        if op.type in kernels.LOOPS:
            space = max([self.inner_bytes(body) for body in bodies(op)], default=0)
        self.node_of[node.name] = at
        self.ops.append(
            Op(
                node.name,
                tuple(dict.fromkeys(reads)),
                tuple(makes),
                tuple(dict.fromkeys(writes)),
                kind=op.type.lower(),
                phase=self.phase[at],
                seconds=seconds,
                flops=flops(node, self.captured) if seconds is None else 0.0,
                random=kernels.is_random(op),
                # Runs once, like an op with an effect: small values are held and need no rerun.
                effect=effect or not (makes or writes) or self.reads_changed(node),
                collective=kernels.is_collective(op),
                workspaces=(Workspace(space),) if space else (),
            )
        )
        return node.name

    def reads_changed(self, node: Node) -> bool:
        """Whether an op reads a variable that is changed later, which a rerun would see.

        In a model's step the update is outside of the plan, and may change any variable.
        """
        if self.captured.placeholders:
            variables = self.captured.variables
            return node.op.type != kernels.READS and any(
                value in variables for value in node.inputs
            )
        return node.op.type in kernels.LOOPS and any(
            value in self.buffers.changes for value in node.inputs
        )

    def inner_bytes(self, body: Captured) -> int:
        """Bytes that a loop's body or a branch holds at its peak, its inputs excluded."""
        inner = to_graph(body, name="body", device=Device(), costs=lambda _: (0.0, 0), inside=True)
        self.buffers.uncounted += inner.buffers.uncounted
        return peak(inner.graph).bytes - inner.graph.base_bytes

    def add_loss(self) -> str:
        """Add the op, outside of the plan, that computes the gradients of the outputs."""
        roots = [self.buffers.root[value] for value in self.captured.targets]
        reads = [self.storage[root] for root in roots if root in self.storage]
        makes = [
            self.add(value, f"gradient of output {place}", "gradient")
            for place, value in enumerate(self.captured.placeholders)
        ]
        self.ops.append(loss_op(reads, (name for name in makes if name is not None)))
        self.followers[LOSS] = []
        return LOSS


def flops(node: Node, captured: Captured) -> float:
    """Floating-point operations by TensorFlow's own registry.

    That has none for batched matrix products and for shapes that depend on values.
    """
    op = node.op
    values = (*node.inputs, *node.outputs)
    shapes = [shape for value in values if (shape := captured.shape(value)) is not None]
    if len(shapes) < len(values):
        return 0.0
    # A multiplication and an addition per element of the result and of the axis summed over.
    if op.type in ("BatchMatMulV2", "BatchMatMul"):
        return 2.0 * math.prod(shapes[2]) * shapes[0][-2 if op.get_attr("adj_x") else -1]
    if not captured.shapes.keys().isdisjoint(values):
        # For other ops, one per element of the result.
        if op.type != "MatMul":
            return float(math.prod(shapes[-1]))
        return 2.0 * math.prod(shapes[2]) * shapes[0][0 if op.get_attr("transpose_a") else 1]
    # TensorFlow's registry calls functions that TensorFlow has deprecated.
    with deprecation.silence():
        count = framework_ops.get_stats_for_node_def(op.graph, op.node_def, "flops").value
    return float(count or 0)
