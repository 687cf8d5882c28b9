"""A training step as one flat list of ops in the order they were traced.

A traced function is a graph of graphs: calls hide their bodies. Here calls are replaced by what
they call; bodies of loops and branches stay what they are, one op. Names say nothing about what
belongs to the forward pass, so the tape is asked while tracing: ancestors of what it was given to
differentiate are forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from ..errors import TraceError
from .kernels import CALLS


@dataclass(frozen=True, slots=True)
class Node:
    """One op: what it is, under which name, and the numbers of the values it reads and makes."""

    op: Any
    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass
class Captured:
    """A flat traced step.

    Parameters
    ----------
    nodes
        In the order of the trace.
    tensors
        Per value, a symbolic tensor of its shape and type.
    arguments, outputs
        Values of the flat arguments and results.
    captures
        Values that come from outside, with what they are there: handles of variables, constants.
    variables
        The variable behind a captured handle.
    targets, gradients
        What was differentiated, and what came of it.
    stand_ins
        Of a model without its loss: values in place of the gradients of its outputs.
    graph
        Kept alive: functions that ops refer to belong to it.
    """

    nodes: list[Node]
    tensors: list[Any]
    arguments: tuple[int, ...]
    outputs: tuple[int, ...]
    captures: dict[int, Any]
    variables: dict[int, Any]
    targets: tuple[int, ...]
    gradients: tuple[int, ...]
    stand_ins: tuple[int, ...]
    graph: Any = field(repr=False)

    @property
    def producer(self) -> dict[int, int]:
        """The node that makes each value; captured and given values have none."""
        return {value: at for at, node in enumerate(self.nodes) for value in node.outputs}


class TapeLog:
    """What gradient tapes were asked while the log was open."""

    def __init__(self) -> None:
        self.targets: list[Any] = []
        self.results: list[Any] = []

    @contextmanager
    def listening(self) -> Iterator[TapeLog]:
        """Note each call of GradientTape.gradient; the method is put back afterwards."""
        plain = tf.GradientTape.gradient

        def gradient(tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
            results = plain(tape, target, sources, *args, **kwargs)
            self.targets += _tensors(target)
            self.results += _tensors(results)
            return results

        tf.GradientTape.gradient = gradient
        try:
            yield self
        finally:
            tf.GradientTape.gradient = plain


def capture_step(step: Any, args: tuple[Any, ...]) -> tuple[Any, TapeLog]:
    """Trace a training step; returns its concrete function and what its tapes were asked.

    A tf.function is traced anew, as its earlier trace kept no log. Nothing is run but the
    initializers of variables that the step makes.
    """
    plain = getattr(step, "python_function", step)
    log = TapeLog()
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


def flat(
    graph: Any,
    log: TapeLog,
    *,
    given: Sequence[Any] | None = None,
    results: Sequence[Any] | None = None,
    stand_ins: Sequence[Any] = (),
) -> Captured:
    """Return the ops of a traced graph as one list.

    Parameters
    ----------
    given, results
        Tensors that count as arguments and results, in place of those of the graph.
    stand_ins
        Tensors in place of the gradients of a model's outputs.

    Raises
    ------
    TraceError
        If nothing is differentiated.
    """
    flattened = _Flattening()
    variables = {id(it.handle): it for it in graph.variables}
    captures, known = {}, {}
    inside = {id(inner): outer for outer, inner in graph.captures}
    arguments = [it for it in graph.inputs if id(it) not in inside]
    for tensor in graph.inputs:
        value = flattened.new(tensor)
        if id(tensor) in inside:
            outer = inside[id(tensor)]
            captures[value] = outer
            if id(outer) in variables:
                known[value] = variables[id(outer)]
    if given is not None:
        arguments = list(given)
        for tensor in arguments:
            flattened.new(tensor)
    flattened.ops(graph, "")
    numbers = flattened.numbers
    targets = [numbers[id(it)] for it in log.targets if id(it) in numbers]
    gradients = [numbers[id(it)] for it in log.results if id(it) in numbers]
    if not targets:
        raise TraceError(
            "the step differentiates nothing: no GradientTape.gradient was seen in its trace. Give "
            "the step that holds the tape, with no tf.function around the part inside."
        )
    return Captured(
        flattened.nodes,
        flattened.tensors,
        tuple(numbers[id(it)] for it in arguments),
        tuple(numbers[id(it)] for it in (graph.outputs if results is None else results)),
        captures,
        known,
        tuple(targets),
        tuple(gradients),
        tuple(numbers[id(it)] for it in stand_ins),
        graph,
    )


class _Flattening:
    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.tensors: list[Any] = []
        self.numbers: dict[int, int] = {}

    def new(self, tensor: Any) -> int:
        self.numbers[id(tensor)] = number = len(self.tensors)
        self.tensors.append(tensor)
        return number

    def ops(self, graph: Any, prefix: str) -> None:
        for op in _readers_last(graph):
            if op.outputs and id(op.outputs[0]) in self.numbers:
                continue
            inputs = tuple(self.numbers[id(it)] for it in op.inputs)
            body = _body(op)
            if body is None:
                outputs = tuple(self.new(it) for it in op.outputs)
                self.nodes.append(Node(op, prefix + op.name, inputs, outputs))
                continue
            for inner, value in zip(body.inputs, inputs, strict=True):
                self.numbers[id(inner)] = value
            self.ops(body, f"{prefix}{op.name}/")
            for outer, inner in zip(op.outputs, body.outputs, strict=True):
                self.numbers[id(outer)] = self.numbers[id(inner)]


def _readers_last(graph: Any) -> list[Any]:
    """Return the ops of a graph in the order of the trace, but each after what it reads.

    The gradient of a loop gives the loop further inputs, lists of what its passes leave, made
    after it.
    """
    found: dict[Any, None] = {}
    for op in graph.get_operations():
        stack: list[Any] = [op]
        waiting: set[Any] = set()
        while stack:
            missing = [it.op for it in stack[-1].inputs if it.op not in found]
            if not waiting.isdisjoint(missing):
                raise TraceError(
                    f"op {stack[-1].name!r} reads what it makes: a loop of TensorFlow 1. Make it "
                    "one of tf.while_loop under tf.function."
                )
            if missing:
                waiting.add(stack[-1])
                stack += missing
            else:
                found[stack.pop()] = None
    return list(found)


def bodies(op: Any) -> list[Captured]:
    """Return what a loop or branch may run, each as a step of its own."""
    found = []
    for key in ("body", "cond", "then_branch", "else_branch"):
        if key not in op.node_def.attr:
            continue
        # As it was traced: made anew from its definition, it would know no shapes of variables.
        found.append(undifferentiated(op.graph._get_function(op.get_attr(key).name).graph))
    return found


def undifferentiated(graph: Any) -> Captured:
    """Return the ops of a graph of which nobody asks what was differentiated, as one list."""
    flattened = _Flattening()
    arguments = tuple(flattened.new(it) for it in graph.inputs)
    flattened.ops(graph, "")
    outputs = tuple(flattened.numbers[id(it)] for it in graph.outputs)
    nodes, tensors = flattened.nodes, flattened.tensors
    return Captured(nodes, tensors, arguments, outputs, {}, {}, (), (), (), graph)


def _body(op: Any) -> Any:
    """Return the graph a call runs, copied so that two calls do not share tensors; else None."""
    from tensorflow.python.framework import function_def_to_graph

    if op.type not in CALLS or "_XlaMustCompile" in op.node_def.attr:
        return None
    called = op.graph._get_function(op.get_attr("f").name)
    with op.graph.as_default():
        return function_def_to_graph.function_def_to_graph(
            called.cached_definition, [it.shape for it in op.inputs]
        )


def _tensors(nested: Any) -> list[Any]:
    flat_values = tf.nest.flatten(nested, expand_composites=True)
    return [it for it in flat_values if isinstance(it, tf.Tensor)]
