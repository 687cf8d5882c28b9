"""A part of a model that keeps its inputs alone, and runs again when its gradient is wanted.

tf.recompute_grad does the running again. Left to the user are: keyword arguments and masks, which
it does not take, the seeds that a layer has moved on since, statistics that a second run would
update again, and weights' gradients, which may wait while the next part is rebuilt already.

The second run takes variables from the reads of the first. Reads of its own would have to come
before the optimizer's update, which is in the same function where `fit` runs. TensorFlow orders
them by control edges; Grappler drops these as needless where all gradients pass through one
IdentityN, as in Keras' optimizers, and afterwards takes that apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state  # has no public name
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from tensorflow.python.eager import record  # what tf.recompute_grad stops its tape with
from tensorflow.python.ops.handle_data_util import get_resource_handle_data

from ..errors import TraceError, as_it_is
from ..trace.capture import without_made_up_zeros
from ..trace.kernels import READS, variables_read
from .sections import Function

# What Keras has in force around the call of a layer, for those inside.
_SETTINGS = ("current_call_ctx", "autocast_scope")


def run_again(function: Function, inputs: Sequence[Any], changed: Sequence[Any]) -> list[Any]:
    """Run a function of tensors in a graph; in the backward pass, run it again.

    Parameters
    ----------
    function
        From tensors to tensors; masks of Keras may hang on both. It draws from seeds in variables
        only, and changes nothing but `changed`.
    inputs
        What it is given, and what is kept.
    changed
        Keras variables that it changes: the second run sees them as the first did, and does not
        change them.
    """
    inputs = list(inputs)
    reads = _Reads(tf.compat.v1.get_default_graph())
    masks = [get_keras_mask(it) for it in inputs]
    given = [*inputs, *(mask for mask in masks if mask is not None)]
    before = [(it, tf.identity(it._value)) for it in changed]
    settings = {name: global_state.get_global_attribute(name) for name in _SETTINGS}
    masked: list[int] = []

    def once(tensors: Sequence[Any]) -> list[Any]:
        own, rest = list(tensors[: len(inputs)]), iter(tensors[len(inputs) :])
        for tensor, mask in zip(own, masks, strict=True):
            if mask is not None:
                set_keras_mask(tensor, next(rest))
        results = function(own)
        made = [get_keras_mask(result) for result in results]
        masked[:] = [place for place, mask in enumerate(made) if mask is not None]
        return [*results, *(mask for mask in made if mask is not None)]

    @tf.custom_gradient
    def passes(*tensors: Any) -> Any:
        with record.stop_recording(), reads.noted():
            results = once(tensors)

        def gradient(*incoming: Any, variables: Any = None) -> Any:
            scope = _AsRead(before, reads)
            return _backward(once, tensors, incoming, list(variables or ()), scope, settings)

        return results, gradient

    results = passes(*given)
    count = len(results) - len(masked)
    for place, mask in zip(masked, results[count:], strict=True):
        set_keras_mask(results[place], mask)
    return list(results[:count])


def _backward(
    once: Function,
    tensors: Sequence[Any],
    incoming: Sequence[Any],
    weights: list[Any],
    scope: _AsRead,
    settings: dict[str, Any],
) -> Any:
    """Run again, and differentiate; return the gradients of the tensors, and of the weights."""
    incoming = without_made_up_zeros(incoming)
    # Not before it is needed: the executor would run it at once.
    arrived = [it for it in incoming if it is not None]
    with tf.control_dependencies(arrived), scope, _in_force(settings):
        sources = [tf.identity(it) for it in tensors]
        wanted = [it for it in sources if it.dtype.is_floating]
        values = [scope.recorded(it) for it in weights]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([*wanted, *values])
            with _no_reads():
                results = once(sources)
        pairs = [
            pair
            for pair in zip(results, incoming, strict=True)
            if pair[1] is not None and pair[0].dtype.is_floating
        ]
        gradients = tape.gradient(
            [result for result, _ in pairs],
            [*wanted, *values],
            [output_gradient for _, output_gradient in pairs],
        )
    ours, of_weights = gradients[: len(wanted)], gradients[len(wanted) :]
    # What is rebuilt next waits for the weights' gradients, which hold what was rebuilt here.
    with tf.control_dependencies(
        [getattr(it, "values", it) for it in of_weights if it is not None]
    ):
        rest = iter([None if it is None else tf.identity(it) for it in ours])
    of_tensors = [next(rest) if it.dtype.is_floating else None for it in sources]
    return (of_tensors, of_weights) if weights else of_tensors


class _Reads:
    """What the first run, in a graph, read from variables."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        # Per handle of a variable in the graph, the value that was read.
        self.values: dict[int, Any] = {}

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note the variables that ops read meanwhile; those read inside of loops are read once."""
        count = len(self.graph.get_operations())
        yield
        ops = self.graph.get_operations()[count:]
        for op in ops:
            for handle in variables_read(op):
                if op.type == READS:
                    self.values.setdefault(id(handle), op.outputs[0])
        for op in ops:
            for handle in variables_read(op):
                if id(handle) not in self.values:
                    kind = get_resource_handle_data(handle).shape_and_type[0].dtype
                    value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=kind)
                    self.values[id(handle)] = value

    def value(self, variable: Any) -> Any:
        """Return what was read from a variable of TensorFlow; raise TraceError if it was not."""
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
    """Variables of Keras as the first run saw them, whatever has been written since."""

    def __init__(self, before: list[tuple[Any, Any]], reads: _Reads) -> None:
        super().__init__(before)
        self.reads = reads
        # Per variable, what stands for it in a second run that another tape watches.
        self.watched: dict[int, Any] = {}

    def recorded(self, variable: Any) -> Any:
        """Return what was read from a variable of TensorFlow, as a read that tapes see.

        Those around the backward pass, as where a gradient is part of the loss, saw none: the first
        run is hidden from tapes.
        """
        value = self.reads.value(variable)
        if record.could_possibly_record():
            with record.stop_recording():
                value = tf.identity(value)
            record.record_operation(
                READS, [value], [variable.handle], lambda it: [it], lambda it: [it]
            )
            self.watched[id(variable)] = value
        return value

    def get_current_value(self, variable: Any) -> Any:
        value = super().get_current_value(variable)
        if value is None:
            value = self.watched.get(id(variable._value))
        return self.reads.value(variable._value) if value is None else value


@contextmanager
def _no_reads() -> Iterator[None]:
    """Raise TraceError if an op reads a variable meanwhile, which may be another by then."""
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
def _in_force(settings: dict[str, Any]) -> Iterator[None]:
    """Let Keras' settings be those of another time."""
    now = {name: global_state.get_global_attribute(name) for name in settings}
    try:
        for name, value in settings.items():
            global_state.set_global_attribute(name, value)
        yield
    finally:
        for name, value in now.items():
            global_state.set_global_attribute(name, value)
