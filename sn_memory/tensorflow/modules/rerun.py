"""A part of a model that keeps its inputs alone, and runs again when its gradient is wanted.

tf.recompute_grad does the running again. Left to the user are: keyword arguments and masks, which
it does not take, the seeds that a layer has moved on since, statistics that a second run would
update again, and weights' gradients, which may wait while the next part is rebuilt already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state  # has no public name
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from tensorflow.python.eager import record  # what tf.recompute_grad stops its tape with

from ..trace.reached import those_there

# What Keras has in force around the call of a layer, for those inside.
_SETTINGS = ("current_call_ctx", "autocast_scope")
Function = Callable[[list[Any]], list[Any]]


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
    masks = [get_keras_mask(it) for it in inputs]
    given = [*inputs, *(it for it in masks if it is not None)]
    before = [(it, tf.identity(it._value)) for it in changed]
    settings = {name: global_state.get_global_attribute(name) for name in _SETTINGS}
    masked: list[int] = []

    def once(tensors: Sequence[Any]) -> list[Any]:
        own, rest = list(tensors[: len(inputs)]), iter(tensors[len(inputs) :])
        for tensor, mask in zip(own, masks, strict=True):
            if mask is not None:
                set_keras_mask(tensor, next(rest))
        results = function(own)
        found = [get_keras_mask(it) for it in results]
        masked[:] = [place for place, it in enumerate(found) if it is not None]
        return [*results, *(it for it in found if it is not None)]

    @tf.custom_gradient
    def passes(*tensors: Any) -> Any:
        with record.stop_recording():
            results = once(tensors)

        def gradient(*incoming: Any, variables: Any = None) -> Any:
            return _backward(once, tensors, incoming, list(variables or ()), before, settings)

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
    before: list[tuple[Any, Any]],
    settings: dict[str, Any],
) -> Any:
    """Run again, and differentiate; return the gradients of the tensors, and of the weights."""
    incoming = those_there(incoming)
    arrived = [it for it in incoming if it is not None]
    # Not before it is needed: the executor would run it at once.
    with tf.control_dependencies(arrived), keras.StatelessScope(before), _in_force(settings):
        sources = [tf.identity(it) for it in tensors]
        wanted = [it for it in sources if it.dtype.is_floating]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([*wanted, *weights])
            results = once(sources)
        pairs = [
            (result, output_gradient)
            for result, output_gradient in zip(results, incoming, strict=True)
            if output_gradient is not None and result.dtype.is_floating
        ]
        found = tape.gradient(
            [it for it, _ in pairs],
            [*wanted, *weights],
            [output_gradient for _, output_gradient in pairs],
        )
    ours, theirs = found[: len(wanted)], found[len(wanted) :]
    # What is rebuilt next waits for the weights' gradients, which hold what was rebuilt here.
    with tf.control_dependencies([_values(it) for it in theirs if it is not None]):
        rest = iter(None if it is None else tf.identity(it) for it in ours)
    gradients = [next(rest) if it.dtype.is_floating else None for it in sources]
    return (gradients, theirs) if weights else gradients


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


def _values(gradient: Any) -> Any:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
