"""From a flat traced step to the graph: storages, writes in place, phases, flags.

Thousands of ops of a step work on a few bytes: learning rates, counters, shapes. They are no
business of a planner. Such an op follows the op traced before it, runs once, and what it makes is
held; all else is an op of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tensorflow.python.framework import ops as framework_ops

from ...graph.graph import Graph
from ...graph.liveness import peak
from ...graph.records import Device, Op, Storage, Workspace
from ...run.loss import LOSS, loss_op
from . import kernels
from .buffers import Buffers, phases
from .capture import Captured, Node, bodies

# Seconds of a node (None: a roofline) and bytes of its workspace.
Costs = Callable[[Node], tuple[float | None, int]]


@dataclass(frozen=True)
class GraphBinding:
    """The graph of a captured step, and what its names stand for.

    Parameters
    ----------
    graph
        The graph.
    node_of
        Name of an op to the number of its node; the op `loss` has none.
    followers
        Per op, the small nodes that run right after its first run; under "" those at the start.
    storage
        Per root value, the name of the storage it lies in; small values have none.
    buffers
        Which values share a buffer.
    """

    graph: Graph
    node_of: dict[str, int]
    followers: dict[str, list[int]]
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
    """Return the graph of a captured step.

    Parameters
    ----------
    extra
        Resident storages that are no part of the step.
    inside
        As in `Buffers`.
    """
    builder = _Builder(captured, costs, Buffers(captured, inside=inside))
    builder.build()
    storages = [*builder.storages.values(), *extra]
    graph = Graph(storages, builder.ops, name=name, device=device, allocator=allocator)
    return GraphBinding(graph, builder.node_of, builder.followers, builder.storage, builder.buffers)


class _Builder:
    def __init__(self, captured: Captured, costs: Costs, buffers: Buffers) -> None:
        self.captured, self.costs, self.buffers = captured, costs, buffers
        self.phase = phases(captured)
        self.storages: dict[str, Storage] = {}
        self.storage: dict[int, str] = {}
        self.ops: list[Op] = []
        self.node_of: dict[str, int] = {}
        self.followers: dict[str, list[int]] = {"": []}
        # Per pooled value, where its maxima were.
        self.maxima: dict[int, str] = {}

    def build(self) -> None:
        self.add_given()
        handed_back = {self.buffers.producer[value] for value in self.captured.stand_ins}
        previous = ""
        for at in sorted(self.buffers.needed):
            if at in handed_back:
                if at == max(handed_back):
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

    def add_given(self) -> None:
        """Storages that are there before the step."""
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
        if small:
            self.storages["small variables"] = Storage("small variables", small, "state")

    def add(self, value: int, wanted: str, role: str) -> str | None:
        """Make the storage of a root, unless it is small or there."""
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
        alone = node.op.type not in kernels.LOOPS and not kernels.is_collective(node.op)
        return alone and all(self.buffers.small(value) for value in (*node.inputs, *node.outputs))

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
            # Run alone, it has to find them first.
            space = 0
        over = buffers.overwritten(at)
        for place, value in enumerate(node.outputs):
            if place == 0 and over is not None:
                self.take_over(over, value)
                writes.append(self.storage[value])
                continue
            role = "gradient" if self.phase[at] == "backward" else "activation"
            suffix = f":{place}" if len(node.outputs) > 1 else ""
            if (made := self.add(value, node.name + suffix, role)) is not None:
                makes.append(made)
        if kernels.keeps_maxima(op) and not buffers.small(node.outputs[0]):
            makes.append(self.add_maxima(node))
            # Run alone, it drops them at once.
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
                flops=flops(op) if seconds is None else 0.0,
                random=kernels.is_random(op),
                # What makes small values only is not run again: they are held.
                effect=effect or not (makes or writes) or self.reads_changed(node),
                collective=kernels.is_collective(op),
                workspaces=(Workspace(space),) if space else (),
            )
        )
        return node.name

    def reads_changed(self, node: Node) -> bool:
        """Whether an op reads a variable by itself that is changed later: it would see that.

        Of a model's step, the update is outside of the plan, and may change any.
        """
        if self.captured.stand_ins:
            variables = self.captured.variables
            return node.op.type != kernels.READS and any(it in variables for it in node.inputs)
        return node.op.type in kernels.LOOPS and any(
            value in self.buffers.changes for value in node.inputs
        )

    def add_maxima(self, node: Node) -> str:
        name = f"{node.name}:maxima"
        count = self.captured.tensors[node.outputs[0]].shape.num_elements()
        self.storages[name] = Storage(name, int(count), "activation")
        self.maxima[node.outputs[0]] = name
        return name

    def inner_bytes(self, body: Captured) -> int:
        """Bytes that a loop's body or a branch holds at its peak beside what it is given."""
        inner = to_graph(body, name="body", device=Device(), costs=lambda _: (0.0, 0), inside=True)
        self.buffers.uncounted += inner.buffers.uncounted
        return peak(inner.graph).bytes - inner.graph.base_bytes

    def take_over(self, over: int, value: int) -> None:
        name = self.storage[over]
        self.storage[value] = name
        if self.is_result(value):
            old = self.storages[name]
            self.storages[name] = Storage(name, old.bytes, old.role, keep=True)

    def add_loss(self) -> str:
        """The op outside of the plan that makes the gradients of the outputs from the outputs."""
        roots = [self.buffers.root[value] for value in self.captured.targets]
        reads = [self.storage[root] for root in roots if root in self.storage]
        makes = [
            self.add(value, f"gradient of output {place}", "gradient")
            for place, value in enumerate(self.captured.stand_ins)
        ]
        self.ops.append(loss_op(reads, (name for name in makes if name is not None)))
        self.followers[LOSS] = []
        return LOSS


def flops(op: Any) -> float:
    """Arithmetic of an op, as TensorFlow's own registry has it; products of batches are added."""
    if op.type in ("BatchMatMulV2", "BatchMatMul"):
        left = op.inputs[0].shape.as_list()
        inner = left[-2] if op.get_attr("adj_x") else left[-1]
        return 2.0 * float(op.outputs[0].shape.num_elements()) * float(inner)
    count = framework_ops.get_stats_for_node_def(op.graph, op.node_def, "flops").value
    return float(count or 0)
