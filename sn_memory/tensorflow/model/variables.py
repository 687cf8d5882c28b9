"""The variables of a model: those that Keras leaves out of its list, and what lies behind them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf


def variables_of(model: Any) -> list[Any]:
    """Return a model's variables, and the states of recurrent layers with `stateful=True`.

    Keras 3 does not count these among a model's variables, but its steps move them.
    """
    found = {id(it): it for it in model.variables}
    for layer in model._flatten_layers():
        if getattr(layer, "stateful", False):
            states = tf.nest.flatten(getattr(layer, "states", None))
            found |= {id(it): it for it in states if hasattr(it, "assign")}
    return list(found.values())


def uncast(variables: Iterable[Any]) -> list[Any]:
    """Return TensorFlow's variables behind those of Keras.

    Under a policy of mixed precision, `value` within the call of a model is a cast of the variable,
    whose gradient no layer's weight gets.
    """
    return [it._value for it in variables]
