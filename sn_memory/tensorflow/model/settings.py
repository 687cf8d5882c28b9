"""Settings of layers that a plan of ops holds as they were when it was made.

A rate of dropout or a factor is a constant of the traced step. One that is changed afterwards
would be ignored, so settings are compared whenever a planned model is put into a function.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import keras

from .arguments import SIMPLE

Settings = dict[tuple[str, str], Any]
# Of a model: what training sets, and no result of a step depends on.
_TRAINING = frozenset({"stop_training", "history", "optimizer", "compiled", "loss", "metrics"})
# What TensorFlow and Keras keep for themselves on any object.
_THEIRS = ("_self_", "_compile", "_keras", "_tf_", "_obj_")
_DEPTH = 3


def settings_of(model: Any) -> Settings:
    """Return plain values (numbers, text, functions) among attributes of a model and its layers.

    Keys are a layer's name with its place, and the attribute. Lists and dicts are opened.
    """
    found: Settings = {}
    for place, layer in enumerate(model._flatten_layers()):
        name = f"{layer.name} #{place}"
        found[name, "trainable"] = layer.trainable
        found[name, "dtype policy"] = layer.dtype_policy.name
        for key, value in layer.__dict__.items():
            if not (key in _keras_own() or key in _TRAINING or key.startswith(_THEIRS)):
                plain = _plain(value, _DEPTH)
                if plain is not _OTHER:
                    found[name, key] = plain
    return found


def steady(before: Settings, after: Settings) -> Settings:
    """Return the settings that were the same before and after: counters are none."""
    return {key: it for key, it in after.items() if key in before and before[key] == it}


def changed(then: Settings, now: Settings) -> str | None:
    """Say which setting is another than it was; None if all are the same."""
    for (layer, name), value in then.items():
        if (layer, name) in now and now[layer, name] != value:
            return f"{name} of {layer.partition(' #')[0]} is {now[layer, name]}, it was {value}"
    return None


_OTHER = object()


def _plain(value: Any, depth: int) -> Any:
    if isinstance(value, SIMPLE):
        return value
    if depth and isinstance(value, Mapping):
        named = {key: it for key, it in value.items() if isinstance(key, SIMPLE)}
        items = {key: _plain(it, depth - 1) for key, it in named.items()}
        return {key: it for key, it in items.items() if it is not _OTHER}
    if depth and isinstance(value, list | tuple):
        return [it for it in (_plain(it, depth - 1) for it in value) if it is not _OTHER]
    return _OTHER


@cache
def _keras_own() -> frozenset[str]:
    """Attributes that every layer and model of Keras has."""
    bare = keras.layers.Layer(name="bare"), keras.Model(name="bare")
    return frozenset(key for it in bare for key in it.__dict__)
