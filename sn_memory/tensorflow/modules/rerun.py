"""Parts of a Keras model that keep only their inputs, and are recomputed for their gradients.

A functional model is a list of calls in a fixed order. Any stretch of it can be recomputed from the
tensors that enter it; tensors inside need not be kept. In other models it is unknown what happens
between the calls of two layers, so there a part is one call.

tf.recompute_grad recomputes a function as well, but it takes neither keyword arguments nor masks,
draws from seeds that have advanced since, updates statistics a second time, and may start to
recompute the next part before the weights' gradients are computed. None of that happens here.

The second run uses the values of variables that the first one read. Reads of its own would have to
come before the optimizer's update, which under `fit` is in the same function. TensorFlow orders
them by control edges; Grappler drops these as redundant if all gradients pass through one
IdentityN, as in Keras' optimizers, and then removes the IdentityN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state  # has no public name
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.models.functional import Functional  # made by keras.Model; has no public name
from tensorflow.python.eager import record  # tf.recompute_grad stops its tape with this
from tensorflow.python.ops.handle_data_util import get_resource_handle_data

from ..errors import TraceError, as_it_is
from ..guards import opaque, refilled, tensors_in
from ..trace.capture import without_filled_in_zeros
from ..trace.kernels import READS, variables_read


@dataclass(frozen=True, eq=False)
class Item:
    """A call that may be in a part: of one node in a functional model, or any call of a layer."""

    name: str
    operation: Any
    node: Any = None

    @property
    def items(self) -> tuple[Item, ...]:
        """The item itself: same interface as a section."""
        return (self,)


@dataclass(frozen=True, eq=False)
class Chain:
    """Items that run one after the other, and the functional model that runs them.

    Without a functional model, there is one item.
    """

    items: tuple[Item, ...]
    functional: Any = None


@dataclass(frozen=True, eq=False)
class Section:
    """Adjacent items of a chain, to be recomputed together.

    changed : Keras variables that they change
    saved_bytes, seconds : bytes they leave for the backward pass, and time of their forward pass
    """

    chain: Chain
    items: tuple[Item, ...]
    changed: tuple[Any, ...] = field(default=(), repr=False)
    saved_bytes: int = 0
    seconds: float = 0.0

    @property
    def name(self) -> str:
        """Name of its item, or names of the first and the last."""
        first, last = self.items[0].name, self.items[-1].name
        return first if len(self.items) == 1 else f"{first} to {last}"


Function = Callable[[list[Any]], list[Any]]
# Wraps the call of an item: gets the call, with its arguments bound.
Around = Callable[[Item, Callable[[], Any]], Any]
# Runs a section in place of its items: gets a function of tensors, and the tensors.
Rerun = Callable[[Section, Function, list[Any]], list[Any]]


def functional_of(layer: Any) -> Any:
    """Return the functional model that a layer's call runs; None if its call is other code."""
    if type(layer).call is keras.Sequential.call:
        layer = layer._functional
    return layer if layer is not None and type(layer).call is Functional.call else None


def name_of(operation: Any) -> str:
    """Return a layer's path, else its name: without weights, or if not built, it has no path."""
    return str(getattr(operation, "path", None) or operation.name)


def chains_of(layer: Any) -> list[Chain]:
    """Return the chains directly below a layer."""
    functional = functional_of(layer)
    if functional is None:
        return [Chain((Item(name_of(inner), inner),)) for inner in layer._layers]
    items = tuple(
        Item(name_of(node.operation), node.operation, node)
        for depth in sorted(functional._nodes_by_depth, reverse=True)
        for node in functional._nodes_by_depth[depth]
        if node.operation and not node.is_input
    )
    return [Chain(items, functional)]


def crossing(chain: Chain) -> list[set[int]]:
    """Return, per item, the ids of the tensors computed by then and needed later."""
    outputs: set[int] = set()
    crossings = []
    for item, later in zip(chain.items, _needed_after(chain, chain.items), strict=True):
        outputs |= {id(output) for output in item.node.outputs}
        crossings.append(outputs & later)
    return crossings


def _needed_after(chain: Chain, groups: Sequence[Item | Section]) -> list[set[int]]:
    """Return, per group of a functional model's items, the ids of the tensors needed after it."""
    needed = [{id(output) for output in chain.functional.outputs}]
    for group in reversed(groups[1:]):
        inputs = {id(tensor) for item in group.items for tensor in item.node.input_tensors}
        needed.append(needed[-1] | inputs)
    return needed[::-1]


@contextmanager
def watched(chains: Sequence[Chain], around: Around) -> Iterator[None]:
    """Route each item's call through `around`."""
    with ExitStack() as undo:
        for chain in chains:
            if chain.functional is not None:
                run = _runner(
                    chain, chain.items, around, lambda _, function, inputs: function(inputs)
                )
                undo.enter_context(_replaced(chain.functional, "_run_through_graph", run))
            else:
                (item,) = chain.items
                call = _around_call(item, around)
                undo.enter_context(_replaced(item.operation, "call", call))
        yield


def _around_call(item: Item, around: Around) -> Any:
    plain = item.operation.call

    def call(*args: Any, **kwargs: Any) -> Any:
        return around(item, lambda: plain(*args, **kwargs))

    return call


@contextmanager
def run_in_sections(
    sections: Sequence[Section], model: Any, rerun: Rerun | None = None
) -> Iterator[None]:
    """Recompute each section in the backward pass, or run it by `rerun`.

    model : a twin of the model that the sections belong to, to be patched in its place
    """
    rerun = rerun or _again
    with ExitStack() as undo:
        for section in sections:
            if section.chain.functional is None:
                call = _around_section(section, rerun)
                undo.enter_context(_replaced(section.items[0].operation, "call", call))
        for chain in dict.fromkeys(
            section.chain for section in sections if section.chain.functional is not None
        ):
            of = {
                item: section
                for section in sections
                if section.chain is chain
                for item in section.items
            }
            groups = list(dict.fromkeys(of.get(item, item) for item in chain.items))
            run = _runner(chain, groups, lambda _, call: call(), rerun)
            functional = chain.functional
            # A twin of the model has the same nodes, and the twin is what is called.
            if functional._nodes_by_depth is model.__dict__.get("_nodes_by_depth"):
                functional = model
            undo.enter_context(_replaced(functional, "_run_through_graph", run))
        yield


@contextmanager
def _replaced(thing: Any, name: str, value: Any) -> Iterator[None]:
    """Replace a method of one object temporarily, without Keras' tracking of attributes."""
    before = thing.__dict__.get(name)
    thing.__dict__[name] = value
    try:
        yield
    finally:
        # Removed, not set to the class's method: `check_model` rejects a call on the instance.
        if before is None:
            thing.__dict__.pop(name, None)
        else:
            thing.__dict__[name] = before


def _runner(chain: Chain, groups: Sequence[Item | Section], around: Around, rerun: Rerun) -> Any:
    """Return a function that runs a functional model's calls, in place of Keras' own."""
    functional = chain.functional
    plain = functional._run_through_graph
    needed_after = _needed_after(chain, groups)

    def call(operation_fn: Any, item: Item, tensors: dict[int, Any]) -> None:
        args, kwargs = item.node.arguments.fill_in(tensors)
        operation = operation_fn(item.operation)
        results = around(item, lambda: operation(*args, **kwargs))
        pairs = zip(item.node.outputs, keras.tree.flatten(results), strict=True)
        tensors.update((id(tensor), value) for tensor, value in pairs)

    def run(inputs: Any, operation_fn: Any = lambda value: value, call_fn: Any = None) -> Any:
        # Keras passes a `call_fn` when it clones or checks a model, not in training.
        if call_fn is not None:
            return plain(inputs, operation_fn, call_fn)
        values = keras.tree.flatten(inputs)
        tensors = {
            id(tensor): value for tensor, value in zip(functional.inputs, values, strict=True)
        }
        for group, wanted in zip(groups, needed_after, strict=True):
            if isinstance(group, Item):
                call(operation_fn, group, tensors)
            else:
                _run_section(group, rerun, tensors, wanted, partial(call, operation_fn))
            # Keras holds all tensors to the end: eagerly, nothing would be freed during the pass.
            tensors = {key: value for key, value in tensors.items() if key in wanted}
        outputs = [tensors[id(output)] for output in functional.outputs]
        return keras.tree.pack_sequence_as(functional._outputs_struct, outputs)

    return run


def _run_section(
    section: Section, rerun: Rerun, tensors: dict[int, Any], wanted: set[int], call: Any
) -> None:
    """Run items of a functional model as one function of the tensors entering them."""
    outputs = [id(output) for item in section.items for output in item.node.outputs]
    used = [id(tensor) for item in section.items for tensor in item.node.input_tensors]
    entering = [tensor for tensor in dict.fromkeys(used) if tensor not in outputs]
    leaving = [tensor for tensor in outputs if tensor in wanted]

    def function(inputs: list[Any]) -> list[Any]:
        inside = dict(zip(entering, inputs, strict=True))
        for item in section.items:
            call(item, inside)
        return [inside[tensor] for tensor in leaving]

    results = rerun(section, function, [tensors[tensor] for tensor in entering])
    tensors.update(zip(leaving, results, strict=True))


def _around_section(section: Section, rerun: Rerun) -> Any:
    """Return a layer's call, run as a function of the tensors among its arguments."""
    plain = section.items[0].operation.call

    def call(*args: Any, **kwargs: Any) -> Any:
        if opaque((args, kwargs)) is not None:
            # Tensors inside the opaque object would have no gradient.
            return plain(*args, **kwargs)
        structure: Any = None

        def function(tensors: list[Any]) -> list[Any]:
            nonlocal structure
            own_args, own_kwargs = refilled((args, kwargs), tensors)
            structure = plain(*own_args, **own_kwargs)
            return tensors_in(structure)

        results = rerun(section, function, tensors_in((args, kwargs)))
        return refilled(structure, results)

    return call


# Keras' state around a layer's call, for layers inside: `training`, and mixed precision.
_SETTINGS = ("current_call_ctx", "autocast_scope")


def settings_now() -> dict[str, Any]:
    """Return Keras' settings around the current call, for `in_force`."""
    return {name: global_state.get_global_attribute(name) for name in _SETTINGS}


# Graphs in which our custom gradient could not read variables.
_LOOPS = ("WhileCondFuncGraph", "WhileBodyFuncGraph", "CondBranchFuncGraph")


def _again(section: Section, function: Function, inputs: list[Any]) -> list[Any]:
    graph = tf.compat.v1.get_default_graph()
    symbolic = all(isinstance(value, tf.Tensor) for value in inputs)
    # Eagerly, tf.custom_gradient holds its results: nothing would be saved.
    if not symbolic or tf.executing_eagerly() or type(graph).__name__ in _LOOPS:
        return function(inputs)
    return run_again(function, inputs, section.changed)


def run_again(function: Function, inputs: Sequence[Any], changed: Sequence[Any]) -> list[Any]:
    """Run a function of tensors in a graph, and recompute it in the backward pass.

    function : from tensors to tensors; both may have Keras masks. It draws random numbers only from
        seeds in variables, and changes nothing but `changed`.
    inputs : its arguments, which are kept
    changed : Keras variables that it changes: the second run sees their values before the first,
        and does not change them.
    """
    inputs = list(inputs)
    reads = _Reads(tf.compat.v1.get_default_graph())
    # A mask is an attribute of a tensor, which tf.custom_gradient drops: masks are passed as
    # arguments and results of their own.
    masks = [get_keras_mask(value) for value in inputs]
    tensors = [*inputs, *(mask for mask in masks if mask is not None)]
    # Copied before the first run changes them: seeds, and statistics of batch norms.
    before = [(v, tf.identity(v._value)) for v in changed]
    settings = settings_now()
    masked: list[int] = []

    def once(tensors: Sequence[Any]) -> list[Any]:
        own, rest = list(tensors[: len(inputs)]), iter(tensors[len(inputs) :])
        for tensor, mask in zip(own, masks, strict=True):
            if mask is not None:
                set_keras_mask(tensor, next(rest))
        results = function(own)
        new_masks = [get_keras_mask(result) for result in results]
        masked[:] = [place for place, mask in enumerate(new_masks) if mask is not None]
        return [*results, *(mask for mask in new_masks if mask is not None)]

    @tf.custom_gradient
    def passes(*tensors: Any) -> Any:
        with record.stop_recording(), reads.noted():
            results = once(tensors)

        def gradient(*incoming: Any, variables: Any = None) -> Any:
            weights, scope = list(variables or ()), _AsRead(before, reads)
            incoming = tuple(without_filled_in_zeros(incoming))
            # Its inputs are ready, so the executor would run it at once: its ops have to wait for
            # the gradients.
            arrived = [grad for grad in incoming if grad is not None]
            with tf.control_dependencies(arrived), scope, in_force(settings):
                sources = [tf.identity(tensor) for tensor in tensors]
                wanted = [source for source in sources if source.dtype.is_floating]
                values = [scope.recorded(weight) for weight in weights]
                with tf.GradientTape(watch_accessed_variables=False) as tape:
                    tape.watch([*wanted, *values])
                    with _no_reads():
                        again = once(sources)
                pairs = [
                    pair
                    for pair in zip(again, incoming, strict=True)
                    if pair[1] is not None and pair[0].dtype.is_floating
                ]
                gradients = tape.gradient(
                    [result for result, _ in pairs],
                    [*wanted, *values],
                    [output_gradient for _, output_gradient in pairs],
                )
            of_inputs, of_weights = gradients[: len(wanted)], gradients[len(wanted) :]
            # The next recomputation waits for the weights' gradients, whose ops hold the tensors
            # recomputed here; for the values of a sparse gradient (an embedding's).
            with tf.control_dependencies(
                [getattr(weight, "values", weight) for weight in of_weights if weight is not None]
            ):
                rest = iter([None if of is None else tf.identity(of) for of in of_inputs])
            of_tensors = [next(rest) if source.dtype.is_floating else None for source in sources]
            return (of_tensors, of_weights) if weights else of_tensors

        return results, gradient

    results = passes(*tensors)
    count = len(results) - len(masked)
    for place, mask in zip(masked, results[count:], strict=True):
        set_keras_mask(results[place], mask)
    return list(results[:count])


class _Reads:
    """Values that the first run, in a graph, read from variables."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        # By id of a variable's handle in the graph, the value that was read.
        self.values: dict[int, Any] = {}

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Record the values that ops in this context read; read variables of loops once more."""
        count = len(self.graph.get_operations())
        yield
        handles = [
            (op, handle)
            for op in self.graph.get_operations()[count:]
            for handle in variables_read(op)
        ]
        for op, handle in handles:
            if op.type == READS:
                self.values.setdefault(id(handle), op.outputs[0])
        # A loop reads a handle inside its body, which is not accessible: read it here once more.
        for _, handle in handles:
            if id(handle) not in self.values:
                dtype = get_resource_handle_data(handle).shape_and_type[0].dtype
                value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
                self.values[id(handle)] = value

    def value(self, variable: Any) -> Any:
        """Return the value read from a TensorFlow variable; raise TraceError if there is none."""
        value = self.values.get(id(self.graph.capture(variable.handle)))
        if value is None:
            raise as_it_is(
                TraceError(
                    f"a layer that runs again reads {variable.name!r}, which it did not read in "
                    "the forward pass. Plan the model with backend='graph', or let the layer read "
                    "the same variables each time."
                )
            )
        return value


class _AsRead(keras.StatelessScope):  # type: ignore[misc]
    """A scope in which Keras variables have the values that the first run saw."""

    def __init__(self, before: list[tuple[Any, Any]], reads: _Reads) -> None:
        super().__init__(before)
        self.reads = reads
        # By id of a TensorFlow variable, its value in a second run that an outer tape watches.
        self.watched: dict[int, Any] = {}

    def recorded(self, variable: Any) -> Any:
        """Return the value read from a TensorFlow variable, recorded as a read on outer tapes.

        Tapes around the backward pass, e.g. if a gradient is part of the loss, saw no read: the
        first run is hidden from tapes. They would silently find no path to the weights.
        """
        value = self.reads.value(variable)
        if record.could_possibly_record():
            with record.stop_recording():
                value = tf.identity(value)
            record.record_operation(
                READS, [value], [variable.handle], lambda value: [value], lambda value: [value]
            )
            self.watched[id(variable)] = value
        return value

    def get_current_value(self, variable: Any) -> Any:
        # First the run's own writes, or the old values of `changed`; then reads of the first run.
        value = super().get_current_value(variable)
        if value is None:
            value = self.watched.get(id(variable._value))
        return self.reads.value(variable._value) if value is None else value


@contextmanager
def _no_reads() -> Iterator[None]:
    """Raise TraceError if an op in this context reads a variable: it may have been updated."""
    graph = tf.compat.v1.get_default_graph()
    count = len(graph.get_operations())
    yield
    for op in graph.get_operations()[count:]:
        for handle in variables_read(op):
            raise TraceError(
                f"op {op.name!r} of a layer that runs again reads {handle.name!r}, a tf.Variable "
                "that is not Keras', or through a tf.function of the layer's own. Use variables "
                "of Keras (add_weight), leave the tf.function out, or plan with backend='graph'."
            )


@contextmanager
def in_force(settings: dict[str, Any]) -> Iterator[None]:
    """Apply Keras' settings that `settings_now` returned."""
    now = settings_now()
    try:
        for name, value in settings.items():
            global_state.set_global_attribute(name, value)
        yield
    finally:
        for name, value in now.items():
            global_state.set_global_attribute(name, value)
