"""A plan carried out: the ops of a step put into a graph again, in the order and number planned.

What runs when, and what is given back when, has to hold at run time, where TensorFlow runs ops as
soon as their inputs are there. So each op waits for the one before it in the plan, by a control
dependency; a buffer goes when its last reader has run. An op that runs twice is there twice. The
two have different dependencies, so no pass that merges equal ops merges them. XLA looks at data
only and orders ops by itself; it is refused where a plan is made.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops as framework_ops

from ...base.errors import PlanError
from ...plan.plan import Plan
from ...run.loss import LOSS
from ..model.settings import Settings
from ..trace import kernels
from ..trace.buffers import overwritten
from ..trace.capture import Captured, Node
from ..trace.to_graph import Named

# Of c op (x op y) with a constant c, constant folding makes (c op x) op y, within each of these.
_REORDERED = (frozenset({"Mul", "Div", "RealDiv"}), frozenset({"Add", "AddV2", "Sub"}))


class Program:
    """A plan for a captured step, ready to be put into graphs.

    Parameters
    ----------
    captured
        The step.
    named
        Its graph.
    plan
        A plan of that graph, accepted by check_plan.
    """

    def __init__(self, captured: Captured, named: Named, plan: Plan) -> None:
        self.captured, self.named, self.plan = captured, named, plan
        self.actions = [action for action in plan.actions if action.kind in ("run", "free")]
        if len(self.actions) < len(plan.actions):
            raise PlanError(
                "the plan offloads; here ops are only kept and recomputed. Plan with "
                'techniques=("keep", "recompute").'
            )
        firsts = list(dict.fromkeys(it.target for it in plan.actions if it.kind == "run"))
        if firsts != [op.name for op in named.graph.ops]:
            raise PlanError(
                "the plan changes the order of first runs; the small ops between would be out of "
                "place. Plan with the planner 'auto'."
            )
        parts = [at for at, action in enumerate(self.actions) if action.target == LOSS]
        self.boundary = parts[0] if captured.stand_ins else len(self.actions)
        # Of the sources of a model's gradients, which have one; and what its results look like.
        self.has_gradient: tuple[bool, ...] = ()
        self.results: Any = None
        # Of a model's layers, those that are constants of the step.
        self.settings: Settings = {}
        self.values: dict[str, list[int]] = {}
        for value, root in named.buffers.root.items():
            if root in named.storage:
                self.values.setdefault(named.storage[root], []).append(value)

    @property
    def changed_variables(self) -> list[Any]:
        """The variables that ops of the step change."""
        captured = self.captured
        found = {
            value: captured.variables[value]
            for node in captured.nodes
            if kernels.has_effect(node.op)
            for value in node.inputs
            if value in captured.variables
        }
        return list(found.values())


class Emission:
    """One time a program is put into the graph that is being built.

    Parameters
    ----------
    program
        What is to be put there.
    given
        Tensors for the step's arguments.
    """

    def __init__(self, program: Program, given: list[Any]) -> None:
        self.program = program
        self.captured, self.named = program.captured, program.named
        self.buffers = self.named.buffers
        self.made: dict[int, Any] = dict(zip(self.captured.arguments, given, strict=True))
        self.made.update(self.captured.captures)
        self.ran: set[str] = set()
        self.absent: set[str] = set()
        self.previous: list[Any] = []
        self.changed: dict[int, list[Any]] = {}

    def forward(self) -> None:
        """Put the actions before the loss there; all of them, where the loss is among them."""
        for at in self.named.followers[""]:
            self.emit(at, first=True)
        self.carry_out(self.program.actions[: self.program.boundary])

    def backward(self, incoming: list[Any]) -> None:
        """Put the actions after the loss there, given the gradients of the outputs."""
        for value, tensor in zip(self.captured.stand_ins, incoming, strict=True):
            self.made[value] = tensor
        self.previous = [*self.previous, *(it.op for it in incoming)]
        actions = self.program.actions[self.program.boundary + 1 :]
        for at in self.named.followers[LOSS]:
            self.emit(at, first=True)
        self.carry_out(actions)

    def carry_out(self, actions: Any) -> None:
        for kind, target, _ in actions:
            if kind == "free":
                self.drop(target)
                continue
            first = target not in self.ran
            self.ran.add(target)
            self.emit(self.named.node_of[target], first=first)
            if first:
                for at in self.named.followers[target]:
                    self.emit(at, first=True)

    def drop(self, storage: str) -> None:
        # What a kernel keeps for another beside its results has no value.
        for value in self.program.values.get(storage, ()):
            self.made.pop(value, None)

    def emit(self, at: int, *, first: bool) -> None:
        """Put a node there, after what came before it."""
        node = self.captured.nodes[at]
        inputs = [self.need(value) for value in node.inputs]
        for place in self.fences(node):
            inputs[place] = self.fenced(inputs[place])
        op = put(node, inputs, self.previous)
        if not kernels.is_collective(node.op):
            # Collectives meet their peers in the background; only who reads them waits.
            self.previous = [op]
        over = overwritten(at, node, self.buffers)
        for value, tensor in zip(node.outputs, op.outputs, strict=True):
            name = self.named.storage.get(value)
            if name is None:
                if first:
                    self.made[value] = tensor
                continue
            if over is not None and value == node.outputs[0]:
                self.drop(name)
            if not any(it in self.made for it in self.program.values[name]):
                self.made[value] = tensor
        self.forget_changed(node)

    def fences(self, node: Node) -> list[int]:
        """Which inputs of an op are to be hidden from passes that change what runs when.

        oneDNN's pass merges ops by what they read, blind to what waits between them: the result is
        a cycle. Constant folding makes c * (x * y) into (c * x) * y, and c * x waits for nothing.
        """
        kind = node.op.type
        if kind in ("BiasAdd", "BiasAddGrad"):
            return [0]
        if kind.startswith("Conv"):
            return [0] if self.source(node.inputs[0]) == "Pad" else []
        family = next((it for it in _REORDERED if kind in it), None)
        if family is None or self.buffers.small(node.outputs[0]):
            return []
        known = [value in self.buffers.folded for value in node.inputs]
        return [
            place
            for place, value in enumerate(node.inputs)
            if not known[place] and known[1 - place] and self.source(value) in family
        ]

    def source(self, value: int) -> str:
        """The kind of the op that makes a value; "" for what is given."""
        at = self.buffers.producer.get(value)
        return "" if at is None else str(self.captured.nodes[at].op.type)

    def fenced(self, tensor: Any) -> Any:
        """Return the same buffer under another op, which no pass sees through."""
        graph = framework_ops.get_default_graph()
        with graph.control_dependencies([it for it in self.previous if it.graph is graph]):
            fence = tf.raw_ops.EnsureShape(input=tensor, shape=tensor.shape)
        self.previous = [fence.op]
        return fence

    def forget_changed(self, node: Node) -> None:
        """What was read from a variable before it changed is not read for what comes after."""
        if kernels.has_effect(node.op):
            for handle in node.inputs:
                if handle in self.captured.variables:
                    self.changed[handle] = self.previous
                if handle in self.captured.variables and handle in self.named.storage:
                    for value in self.program.values[self.named.storage[handle]]:
                        if value != handle:
                            self.made.pop(value, None)

    def need(self, value: int) -> Any:
        """Return a value; views and constants are made when first asked for."""
        if value in self.made:
            return self.made[value]
        at = self.buffers.producer.get(value)
        if at is None or not self.buffers.is_view(at):
            name = self.captured.tensors[value].name
            raise PlanError(f"the plan reads {name!r} where it is not. Check it with check_plan.")
        node = self.captured.nodes[at]
        if len(node.outputs) > 1 and node.op.type in kernels.ALIASES:
            # One by one: what the others pass on may be gone, as the input of SiLU is.
            self.made[value] = self.need(node.inputs[node.outputs.index(value)])
            return self.made[value]
        tensor = self.captured.tensors[value]
        known = kernels.constant(tensor) if node.op.type in kernels.SHAPES else None
        if known is not None:
            # What has that shape may be gone.
            self.made[value] = tf.constant(known, tensor.dtype)
            return self.made[value]
        inputs = [self.need(it) for it in node.inputs]
        # A view takes no memory, so it may come at any time; a read, once the last change is done.
        after = self.changed.get(node.inputs[0], []) if node.op.type == kernels.READS else []
        op = put(node, inputs, after)
        self.made.update(zip(node.outputs, op.outputs, strict=True))
        return self.made[value]


def put(node: Node, inputs: list[Any], after: list[Any]) -> Any:
    """Put a copy of an op into the graph that is being built."""
    op, graph = node.op, framework_ops.get_default_graph()
    definition = op.node_def
    attrs = {}
    for key, value in definition.attr.items():
        if key in ("_class", "_gradient_op_type", "_output_shapes"):
            continue
        attrs[key] = value
        for called in (value.func.name, *(it.name for it in value.list.func)):
            if called and not graph._is_function(called):
                graph._add_function_recursive(op.graph._get_function(called))
    waits = [it for it in after if it.graph is graph]
    with tf.device(op.device or None), graph.control_dependencies(waits):
        return graph._create_op_internal(
            op.type,
            inputs,
            [it.dtype for it in op.outputs],
            name=op.name,
            attrs=attrs,
            op_def=op.op_def,
        )
