"""A training step as one flat list of ops in the order they were traced.

A traced function is a graph of graphs: calls hide their bodies. Here calls are replaced by the ops
of the functions they call; a loop or branch stays one op. Op names do not tell which ops belong to
the forward pass: these are the ancestors of the differentiated tensors. In a step function, the
tensors that its tapes differentiate are recorded during tracing.

A Keras model is called as in training, on symbolic inputs. A tape is opened inside, at `call`: what
Keras does around it (casts, checks) stays outside of the plan. Placeholders stand in for the
gradients of the outputs, which the loss will compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record  # tf.custom_gradient finds variables with this
from tensorflow.python.framework import function_def_to_graph
from tensorflow.python.framework import ops as framework_ops

from ..errors import TraceError, first_line
from ..guards import argument_tensors, call_of, opaque, tensors_in
from ..model import as_tensors, check_model, twin_of, uncast
from . import kernels

_WHOLE_STEP = "Plan the whole training step: sn_memory.tensorflow.plan_step."
SHAPE_OF_VALUES = (
    "Give a sample of full shape, and not a tf.TensorSpec where shapes depend on values (boolean "
    "masks, tf.unique, tf.where with one argument): they are counted as on the sample."
)


@dataclass(frozen=True, slots=True)
class Node:
    """One op, its name, and the numbers of the values it reads and produces."""

    op: Any
    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass
class Captured:
    """A traced step as a flat list of ops.

    nodes : in the order of the trace
    tensors : per value, a symbolic tensor of its shape and dtype
    arguments, outputs : values of the flat arguments and results
    captures : values captured from outside the graph (handles of variables, constants), with the
        outer tensors
    variables : the variable behind a captured handle
    targets, gradients : values that were differentiated, and the resulting gradients
    placeholders : for a model without its loss: values in place of the gradients of its outputs
    graph : kept alive because it owns the functions that ops refer to
    shapes : shapes on the sample, of values whose shape depends on values
    """

    nodes: list[Node]
    tensors: list[Any]
    arguments: tuple[int, ...]
    outputs: tuple[int, ...]
    captures: dict[int, Any]
    variables: dict[int, Any]
    targets: tuple[int, ...]
    gradients: tuple[int, ...]
    placeholders: tuple[int, ...]
    graph: Any = field(repr=False)
    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def shape(self, value: int) -> tuple[int, ...] | None:
        """Return the shape of a value, or None if unknown."""
        shape = self.tensors[value].shape
        return tuple(shape) if shape.is_fully_defined() else self.shapes.get(value)

    def nbytes(self, value: int) -> int | None:
        """Return the bytes of a value; None if known neither from the trace nor the sample."""
        tensor, shape = self.tensors[value], self.shapes.get(value)
        return kernels.nbytes(tensor) if shape is None else math.prod(shape) * tensor.dtype.size

    def ancestors(self, values: Iterable[int]) -> set[int]:
        """Return the nodes that values depend on."""
        producer = self.producer
        ancestors: set[int] = set()
        stack = [producer[value] for value in values if value in producer]
        while stack:
            at = stack.pop()
            if at not in ancestors:
                ancestors.add(at)
                stack += [producer[value] for value in self.nodes[at].inputs if value in producer]
        return ancestors

    @property
    def effects(self) -> list[int]:
        """The nodes with side effects."""
        return [at for at, node in enumerate(self.nodes) if kernels.has_effect(node.op)]

    @property
    def needed(self) -> set[int]:
        """The nodes that results or side effects depend on; the others are left out."""
        effects = self.effects
        read = [value for at in effects for value in self.nodes[at].inputs]
        return self.ancestors([*self.outputs, *read]) | set(effects)

    @property
    def producer(self) -> dict[int, int]:
        """The node that produces each value; captures and arguments have none."""
        return {value: at for at, node in enumerate(self.nodes) for value in node.outputs}


@dataclass
class TapeLog:
    """Targets and results of GradientTape.gradient while the log was open."""

    targets: list[Any] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Record each call of GradientTape.gradient; restore the method afterwards."""
        plain = tf.GradientTape.gradient

        # TensorFlow has no hook for it. Wrappers of a tape, e.g. Horovod's, also call this method.
        def gradient(tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
            results = plain(tape, target, sources, *args, **kwargs)
            self.targets += tensors_in(target)
            self.results += tensors_in(results)
            return results

        tf.GradientTape.gradient = gradient
        try:
            yield
        finally:
            tf.GradientTape.gradient = plain


def capture_step(step: Any, args: tuple[Any, ...]) -> tuple[Any, TapeLog]:
    """Trace a training step; return its concrete function and the log of its tapes.

    A tf.function is traced again, as its earlier trace kept no log. Only the initializers of
    variables that the step creates are run.
    """
    plain = getattr(step, "python_function", step)
    log = TapeLog()
    # With the user's autograph setting: without, a Python `if` on a tensor is an error.
    fresh = tf.function(plain, autograph=bool(getattr(step, "_autograph", True)))
    with log.listening():
        try:
            concrete = fresh.get_concrete_function(*args)
        except TraceError:
            raise
        except Exception as error:  # whatever the step's own code raises
            raise TraceError(
                f"the step could not be traced: {error} Make it run under tf.function first."
            ) from error
    return concrete, log


class _Taped:
    """Mixin for a model whose `call` is recorded on a tape."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        seen: dict[str, Any] = self.__dict__["_sn_memory_seen"]
        signature, training = self._call_signature, seen["training"]  # type: ignore[attr-defined]
        key, inputs = call_of(signature, args, kwargs, training)
        others = seen.get("others", [])
        variables = [*uncast(self.trainable_variables), *others]  # type: ignore[attr-defined]
        with (
            record.VariableWatcher() as accessed,
            tf.GradientTape(watch_accessed_variables=False) as tape,
        ):
            tape.watch(variables)
            results = super().call(*args, **kwargs)  # type: ignore[misc]
        hidden = opaque(results)
        if hidden is not None:  # every call would return the traced one
            raise TraceError(
                f"the model returns a {type(hidden).__name__}; a plan of ops knows only the "
                "tensors in lists, tuples and dicts. Return those."
            )
        outs = tensors_in(results)
        ends = [out for out in outs if out.dtype.is_floating]
        for end in ends:
            if not end.shape.is_fully_defined():
                raise TraceError(
                    f"an output of the model, {end.name!r}, has the shape {end.shape}, which "
                    f"depends on values or on an unknown batch. {SHAPE_OF_VALUES}"
                )
        # `Empty` is stateful, so it is not folded into a constant.
        placeholders = [
            tf.raw_ops.Empty(shape=end.shape.as_list(), dtype=end.dtype) for end in ends
        ]
        gradients = tape.gradient(ends, variables, output_gradients=placeholders)
        # Variables unknown to Keras: plain TensorFlow variables, and those of layers in closures.
        known = {id(variable) for variable in uncast(self.variables)}  # type: ignore[attr-defined]
        seen.update(
            key=key, inputs=inputs, results=results, outs=outs, ends=ends, gradients=gradients,
            placeholders=placeholders, variables=self.trainable_variables,  # type: ignore[attr-defined]
            others=others or [v for v in accessed.watched_variables() if id(v) not in known],
        )  # fmt: skip
        return results


def capture_model(
    model: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    training: bool | None = True,
) -> tuple[Captured, dict[str, Any]]:
    """Trace a Keras model in training; return the step and what was seen at its `call`.

    A tape around the model watches all variables that the call reads, not only those of the model.
    So does this: if the first trace read others, a second one computes their gradients as well.
    """
    check_model(model, args)
    twin = twin_of(model, _Taped)
    seen: dict[str, Any] = {"training": training}
    twin.__dict__["_sn_memory_seen"] = seen

    def called(*inputs: Any, **named: Any) -> Any:
        return twin(*inputs, **named, training=training)

    def traced() -> Any:
        function = tf.function(called, autograph=False)
        return function.get_concrete_function(*args, **(kwargs or {}))

    try:
        concrete = traced()
        if seen["others"]:
            concrete = traced()
    except TraceError as error:
        raise TraceError(first_line(error)) from error
    except Exception as error:  # whatever the model's own code raises
        message = f"{type(model).__name__} could not be traced: {first_line(error)}"
        raise TraceError(message) from error
    _check_losses_and_gradients(model, seen)
    gradients = [gradient for gradient in seen["gradients"] if gradient is not None]
    captured = flat(
        concrete.graph,
        TapeLog(seen["ends"], gradients),
        arguments=seen["inputs"],
        results=[*seen["outs"], *gradients],
        placeholders=seen["placeholders"],
    )
    return captured, seen


def values_at_call(model: Any, sample: Any) -> list[Any]:
    """Return the tensors that a model's `call` gets for a sample."""
    inputs: list[Any] = []

    # At `call`, like the arguments of the trace: after Keras has cast them.
    class Called:
        def call(self, *args: Any, **kwargs: Any) -> Any:
            inputs.extend(call_of(self._call_signature, args, kwargs)[1])  # type: ignore[attr-defined]
            raise _CalledError

    with suppress(_CalledError):
        twin_of(model, Called)(*as_tensors(sample), training=True)
    return inputs


class _CalledError(Exception):
    """Ends a model's call before it runs, once its inputs are known."""


def values_of_step(sample: Any) -> list[Any]:
    """Return the tensors among a step's arguments."""
    return argument_tensors(as_tensors(sample))


def _check_losses_and_gradients(model: Any, seen: dict[str, Any]) -> None:
    """Raise TraceError for losses and masks a plan would lose, and for sparse gradients."""
    if any(layer._losses for layer in model._flatten_layers()):
        # They are tensors of the trace's graph, unusable in any later call.
        for layer in model._flatten_layers():
            layer._clear_losses()
        raise TraceError(
            "a layer adds a loss while it is called (add_loss, activity regularizers), which would "
            f"be lost. {_WHOLE_STEP}"
        )
    if any(hasattr(out, "_keras_mask") for out in seen["outs"]):
        raise TraceError(
            f"the model's output carries a mask for the loss, which would be lost. {_WHOLE_STEP}"
        )
    names = [variable.path for variable in seen["variables"]]
    names += [variable.name for variable in seen["others"]]
    for gradient, name in zip(seen["gradients"], names, strict=True):
        if isinstance(gradient, tf.IndexedSlices):
            raise TraceError(f"the gradient of {name} is sparse (an embedding). {_WHOLE_STEP}")


def flat(
    graph: Any,
    log: TapeLog,
    *,
    arguments: Sequence[Any] | None = None,
    results: Sequence[Any] | None = None,
    placeholders: Sequence[Any] = (),
) -> Captured:
    """Return the ops of a traced graph as one list; raise TraceError if nothing is differentiated.

    arguments, results : tensors to use as arguments and results instead of the graph's own
    placeholders : tensors in place of the gradients of a model's outputs
    """
    flattened = _Flattening()
    # By id: tensors of a graph are not hashable, and variables compare by value.
    variables = {id(variable.handle): variable for variable in graph.variables}
    outer = {id(inner): outer for outer, inner in graph.captures}
    inputs = [(flattened.new(value), value) for value in graph.inputs]
    captures = {value: outer[id(tensor)] for value, tensor in inputs if id(tensor) in outer}
    if arguments is None:
        arguments = [value for value in graph.inputs if id(value) not in outer]
    else:
        # Numbered before any op, so that the ops producing them (Keras' casts) are left out.
        for tensor in arguments:
            flattened.new(tensor)
    flattened.ops(graph, "")
    targets = flattened.values(target for target in log.targets if id(target) in flattened.numbers)
    if not targets:
        raise TraceError(
            "the step differentiates nothing: no GradientTape.gradient was seen in its trace. Give "
            "the step that holds the tape, with no tf.function around the part inside."
        )
    return Captured(
        flattened.nodes,
        flattened.tensors,
        flattened.values(arguments),
        flattened.values(graph.outputs if results is None else results),
        captures,
        {
            value: variables[id(capture)]
            for value, capture in captures.items()
            if id(capture) in variables
        },
        targets,
        flattened.values(result for result in log.results if id(result) in flattened.numbers),
        flattened.values(placeholders),
        graph,
    )


def undifferentiated(graph: Any) -> Captured:
    """Return the ops of a graph as one list, without gradient targets and results."""
    flattened = _Flattening()
    arguments = tuple(flattened.new(value) for value in graph.inputs)
    flattened.ops(graph, "")
    outputs = flattened.values(graph.outputs)
    nodes, tensors = flattened.nodes, flattened.tensors
    return Captured(nodes, tensors, arguments, outputs, {}, {}, (), (), (), graph)


def bodies(op: Any) -> list[Captured]:
    """Return the functions a loop or branch may run, as separate steps; a loop's body first."""
    return [
        undifferentiated(kernels.body_of(op, op.get_attr(key).name))
        for key in ("body", "cond", "then_branch", "else_branch")
        if key in op.node_def.attr
    ]


class _Flattening:
    """Numbers values and nodes, across the bodies of calls."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.tensors: list[Any] = []
        self.numbers: dict[int, int] = {}

    def new(self, tensor: Any) -> int:
        self.numbers[id(tensor)] = number = len(self.tensors)
        self.tensors.append(tensor)
        return number

    def values(self, tensors: Any) -> tuple[int, ...]:
        return tuple(self.numbers[id(tensor)] for tensor in tensors)

    def ops(self, graph: Any, prefix: str) -> None:
        for op in _readers_last(graph):
            if op.outputs and id(op.outputs[0]) in self.numbers:
                continue
            inputs = self.values(op.inputs)
            body = _body(op)
            if body is None:
                outputs = tuple(self.new(output) for output in op.outputs)
                self.nodes.append(Node(op, prefix + op.name, inputs, outputs))
                continue
            # A call becomes its body's ops on the caller's values; it has no values of its own.
            for inner, value in zip(body.inputs, inputs, strict=True):
                self.numbers[id(inner)] = value
            self.ops(body, f"{prefix}{op.name}/")
            for outer, inner in zip(op.outputs, body.outputs, strict=True):
                self.numbers[id(outer)] = self.numbers[id(inner)]


def _readers_last(graph: Any) -> list[Any]:
    """Return the ops of a graph in the order of the trace, but each after its inputs.

    The gradient of a loop adds inputs to the loop that are created after it: lists that its
    iterations append saved values to.
    """
    ordered: dict[Any, None] = {}
    for op in graph.get_operations():
        stack: list[Any] = [op]
        # Ops on the current path: one that is reached again depends on its own result.
        waiting: set[Any] = set()
        while stack:
            missing = [value.op for value in stack[-1].inputs if value.op not in ordered]
            if not waiting.isdisjoint(missing):
                raise TraceError(
                    f"op {stack[-1].name!r} depends on its own result, as in a loop of TensorFlow "
                    "1. Write the loop with tf.while_loop under tf.function."
                )
            if missing:
                waiting.add(stack[-1])
                stack += missing
            else:
                ordered[stack.pop()] = None
    return list(ordered)


def _body(op: Any) -> Any:
    """Return a copy of the graph a call runs, as calls must not share tensors; else None."""
    # A call that XLA compiles stays one op: the body's ops are fused, and none runs alone.
    if op.type not in kernels.CALLS or "_XlaMustCompile" in op.node_def.attr:
        return None
    called = op.graph._get_function(op.get_attr("f").name)
    with op.graph.as_default():
        return function_def_to_graph.function_def_to_graph(
            called.cached_definition, [value.shape for value in op.inputs]
        )


def put(node: Node, inputs: list[Any], after: list[Any]) -> Any:
    """Put a copy of an op into the graph being built."""
    op, graph = node.op, framework_ops.get_default_graph()
    attrs = {}
    for key, value in op.node_def.attr.items():
        # These name ops and gradients of the graph it was traced in.
        if key in ("_class", "_gradient_op_type", "_output_shapes"):
            continue
        attrs[key] = value
        # A loop names the functions of its body; a graph must contain those its ops name.
        for called in (value.func.name, *(function.name for function in value.list.func)):
            if called and not graph._is_function(called):
                graph._add_function_recursive(op.graph._get_function(called))
    # Control edges stay within one graph, and a gradient may be requested in an inner one.
    waits = [op for op in after if op.graph is graph]
    with tf.device(op.device or None), graph.control_dependencies(waits):
        return graph._create_op_internal(
            op.type,
            inputs,
            [output.dtype for output in op.outputs],
            name=op.name,
            attrs=attrs,
            op_def=op.op_def,
        )


def with_sample_shapes(captured: Captured, inputs: Callable[[], Sequence[Any]]) -> Captured:
    """Return a captured step with the shapes that its trace left open, if there are any.

    Boolean masks, `tf.where` with one argument, `tf.unique` and everything computed from them have
    shapes that depend on values. A plan's ops take any size, so a plan needs these shapes only to
    count bytes: the step's ops run once on the sample, unplanned and without side effects.
    Raises TraceError if the ops do not run on the sample, for lack of memory, say.

    inputs : returns the sample's tensors for the arguments; called only if needed
    """
    # Results of ops with side effects (other ranks, Python functions) are unknown and not counted.
    known = {*captured.arguments, *captured.captures}
    wanted = []
    for at in sorted(captured.needed.difference(captured.effects)):
        node = captured.nodes[at]
        if known.issuperset(node.inputs):
            known.update(node.outputs)
            wanted += [value for value in node.outputs if _is_open(captured.tensors[value])]
    if not wanted:
        return captured
    tensors = inputs()

    @tf.function(autograph=False)
    def shapes(*tensors: Any) -> dict[str, Any]:
        values = dict(zip(captured.arguments, tensors, strict=True)) | captured.captures
        for at in sorted(captured.ancestors(wanted)):
            node = captured.nodes[at]
            outputs = put(node, [values[value] for value in node.inputs], []).outputs
            values.update(zip(node.outputs, outputs, strict=True))
        return {str(value): tf.shape(values[value]) for value in wanted}

    try:
        sizes = shapes(*tensors)
    except Exception as error:  # whatever TensorFlow raises, out of memory included
        raise TraceError(
            "shapes that depend on values are unknown, as the step did not run on the sample: "
            f"{first_line(error)}"
        ) from error
    return replace(
        captured, shapes={int(at): tuple(size.numpy().tolist()) for at, size in sizes.items()}
    )


def _is_open(tensor: Any) -> bool:
    """Whether a trace leaves the bytes of a plain tensor unknown."""
    plain = tensor.dtype not in (tf.resource, tf.variant, tf.string)
    return plain and kernels.nbytes(tensor) is None


def left_out(captured: Captured, incoming: Sequence[Any]) -> frozenset[int]:
    """Return the places of gradients that depend only on outputs that the loss does not use.

    If a loss uses only some of a model's outputs, the tape returns None for the variables of the
    rest, and an optimizer skips them. Zeros would still update moments and decay weights.

    incoming : the gradients of the outputs, in the order of `captured.placeholders`
    """
    arrived = [gradient is not None for gradient in without_filled_in_zeros(incoming)]
    if all(arrived):
        return frozenset()
    # Per value that depends on a placeholder: whether it depends on one with a gradient.
    reached = dict(zip(captured.placeholders, arrived, strict=True))
    for node in captured.nodes:
        known = [reached[value] for value in node.inputs if value in reached]
        if known:
            reached.update(dict.fromkeys(node.outputs, any(known)))
    # A gradient that depends on no output's gradient is a constant of the step, and stays.
    return frozenset(
        place for place, value in enumerate(captured.gradients) if not reached.get(value, True)
    )


def without_filled_in_zeros(incoming: Sequence[Any]) -> list[Any]:
    """Return the incoming gradients of a custom gradient, with None for zeros from the tape.

    The tape fills in zeros for results without a gradient. A loss's gradients are not constants,
    and zeros like a result itself come from the tape. If all are zeros, the caller passed them.
    """
    real = [None if grad is None or _is_filled_in(grad) else grad for grad in incoming]
    return real if any(grad is not None for grad in real) else list(incoming)


def _is_filled_in(gradient: Any) -> bool:
    # tf.custom_gradient returns its results through an IdentityN. If a shape is unknown, the tape
    # uses zeros like an output of it, else a constant.
    if gradient.op.type == "ZerosLike":
        return bool(gradient.op.inputs[0].op.type == "IdentityN")
    return gradient.op.type == "Const" and not kernels.constant(gradient).any()
