"""Validity of a plan of ops: the arguments of the model's call, and settings of its layers.

A plan is valid for the arguments it was traced with: the same names, the same structure, tensors of
the same shapes and dtypes, and equal values of everything else. An additional flag or mask makes a
different call. A dropout rate or a factor is a constant of the trace, and is compared whenever a
planned model is traced into a function.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import BuiltinFunctionType, FunctionType
from typing import Any, Final

import keras
import tensorflow as tf

from .errors import TraceError

# Immutable values: a changed one is another object.
SIMPLE: Final = (
    bool, int, float, complex, str, bytes, type(None), type, tf.DType, FunctionType,
    BuiltinFunctionType,
)  # fmt: skip
Settings = dict[tuple[str, str], Any]
# Attributes of a model set by `compile` and `fit`; no result of a step depends on them.
_TRAINING = frozenset({"stop_training", "history", "optimizer", "compiled", "loss", "metrics"})
# Prefixes of attributes that TensorFlow and Keras keep on objects for themselves.
_THEIRS = ("_self_", "_compile", "_keras", "_tf_", "_obj_")
# Lists and dicts in attributes are searched to this depth: they may contain themselves.
_DEPTH = 3
_NOT_PLAIN = object()


@dataclass
class Call:
    """A call of a model: its arguments, the key that identifies it, and its tensors.

    training : True; or None if a gradient is taken of a call without the flag
    why : reason for which it has no key
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    training: bool | None = True
    key: Hashable = None
    tensors: list[Any] = field(default_factory=list)
    why: str = ""

    def __str__(self) -> str:
        return self.why or describe(self.key)


def call_of(
    signature: inspect.Signature,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    training: bool | None = True,
) -> tuple[Hashable, list[Any]]:
    """Return the key of a call, under which its plan is stored, and its tensors in a fixed order.

    An argument by position or by name makes the same call; defaults do not count.
    Raises TraceError for arguments that are neither tensors nor plain values: a RaggedTensor, say.

    signature : signature of the model's `call`
    training : as in Call, whether or not `call` takes it
    """
    bound = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            bound.update(bound.pop(name, {}))
        elif name in bound and _is_default(bound[name], parameter.default):
            del bound[name]
    bound.pop("training", None)
    key: list[Hashable] = [] if training else [(("training",), type(training), training)]
    tensors = []
    for path, leaf in _leaves(dict(sorted(bound.items())), ()):
        if isinstance(leaf, tf.Tensor):
            shape = leaf.shape.as_list() if leaf.shape.rank is not None else [None]
            key.append((path, tuple(shape), leaf.dtype.name))
            tensors.append(leaf)
        elif isinstance(leaf, SIMPLE):
            # With its type, as 1 == True == 1.0.
            key.append((path, type(leaf), leaf))
        else:
            raise TraceError(
                f"the argument {'.'.join(map(str, path[:1]))!r} holds a {type(leaf).__name__}; a "
                "plan of ops takes tensors and plain values (numbers, text, None), in lists, "
                "tuples and dicts."
            )
    return tuple(key), tensors


def describe(key: Hashable) -> str:
    """Return a key as text for a message."""
    parts = []
    for path, kind, value in key:  # type: ignore[attr-defined]
        what = f"{value}{list(kind)}" if isinstance(kind, tuple) else repr(value)
        parts.append(f"{'.'.join(map(str, path))}={what}")
    return ", ".join(parts) or "nothing"


def is_open(key: Hashable) -> bool:
    """Whether a tensor of a call has an unknown size."""
    return any(
        isinstance(kind, tuple) and None in kind
        for _, kind, _ in key  # type: ignore[attr-defined]
    )


def signature_of(call: Hashable, variables: Sequence[Any]) -> Hashable:
    """Return what a plan of a model depends on: the key of its call, and the trained variables."""
    # By id: freezing a layer removes its variables, which shapes might not show.
    return call, tuple(id(variable) for variable in variables)


def opaque(values: Any) -> Any:
    """Return a leaf that may hide tensors (an object, a RaggedTensor), or None."""
    leaves = tf.nest.flatten(values)
    return next((leaf for leaf in leaves if not isinstance(leaf, (tf.Tensor, *SIMPLE))), None)


def tensors_in(values: Any) -> list[Any]:
    """Return the tensors of a structure, in order."""
    leaves = tf.nest.flatten(values, expand_composites=True)
    return [leaf for leaf in leaves if isinstance(leaf, tf.Tensor)]


def argument_tensors(args: Any) -> list[Any]:
    """Return tensors, arrays and handles of variables, in the order of a step's inputs."""
    leaves = tf.nest.flatten(args, expand_composites=True)
    arrays = [leaf for leaf in leaves if hasattr(leaf, "shape") and hasattr(leaf, "dtype")]
    return [array.handle if isinstance(array, tf.Variable) else array for array in arrays]


def constants_of(arguments: tuple[Any, ...]) -> dict[tuple[Hashable, ...], Any]:
    """Return the leaves of a step's arguments that are not tensors, by path: its trace's constants.

    Variables are among them: a trace reads those it was given.
    """
    return {path: leaf for path, leaf in _leaves(arguments, ()) if not _is_tensor(leaf)}


def check_constants(planned: Mapping[Any, Any], arguments: tuple[Any, ...]) -> None:
    """Raise ValueError if arguments hold other constants than those a step was planned with."""
    now = constants_of(arguments)
    for path in {**planned, **now}:
        one, other = (values.get(path, _NOT_PLAIN) for values in (planned, now))
        if not (one is other or (isinstance(one, SIMPLE) and _is_default(one, other))):
            got, expected = (
                "a tensor, or nothing" if value is _NOT_PLAIN else f"{value!r:.200}"
                for value in (other, one)
            )
            raise ValueError(
                f"got {got} as argument {'.'.join(map(str, path))} (the first is 0), expected "
                f"{expected}, with which the step was planned: what is no tensor is a constant of "
                "its plan. Pass a tensor there, or plan the step for each value."
            )


def _is_tensor(leaf: Any) -> bool:
    """Whether a leaf is passed to a trace as tensors: an array, a ragged tensor, an iterator."""
    if isinstance(leaf, tf.Variable):
        return False
    kinds = tf.TypeSpec, tf.__internal__.CompositeTensor
    return isinstance(leaf, kinds) or (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))


def refilled(results: Any, tensors: Sequence[Any]) -> Any:
    """Return a structure with its tensors replaced, in order."""
    rest = iter(tensors)
    return tf.nest.map_structure(
        lambda leaf: next(rest) if isinstance(leaf, tf.Tensor) else leaf,
        results,
        expand_composites=True,
    )


def settings_of(model: Any) -> Settings:
    """Return the plain values (numbers, text, functions) in attributes of a model and its layers.

    A key is a layer's name with its position, and the attribute.
    """
    settings: Settings = {}
    for place, layer in enumerate(model._flatten_layers()):
        # Layers may have equal names.
        name = f"{layer.name} #{place}"
        settings[name, "trainable"] = layer.trainable
        settings[name, "dtype policy"] = layer.dtype_policy.name
        for key, value in layer.__dict__.items():
            if not (key in _keras_own() or key in _TRAINING or key.startswith(_THEIRS)):
                plain = _plain(value, _DEPTH)
                if plain is not _NOT_PLAIN:
                    settings[name, key] = plain
    return settings


def steady(before: Settings, after: Settings) -> Settings:
    """Return the settings that a trace left unchanged; this excludes a counter of calls."""
    return {key: value for key, value in after.items() if key in before and before[key] == value}


def changed(then: Settings, now: Settings) -> bool:
    """Whether a setting has changed."""
    return any(key in now and now[key] != value for key, value in then.items())


def _is_default(value: Any, default: Any) -> bool:
    return value is default or (
        isinstance(value, SIMPLE) and type(value) is type(default) and value == default
    )


def _leaves(value: Any, path: tuple[Hashable, ...]) -> Iterator[tuple[tuple[Hashable, ...], Any]]:
    """Yield the leaves of dicts, lists and tuples, with their paths."""
    # Sorted: dicts that differ only in their order are the same argument.
    if isinstance(value, Mapping):
        for name, item in sorted(value.items(), key=lambda pair: repr(pair[0])):
            yield from _leaves(item, (*path, name))
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            yield from _leaves(item, (*path, place))
    else:
        yield path, value


def _plain(value: Any, depth: int) -> Any:
    if isinstance(value, SIMPLE):
        return value
    if depth and isinstance(value, Mapping):
        items = {
            key: _plain(item, depth - 1) for key, item in value.items() if isinstance(key, SIMPLE)
        }
        return {key: item for key, item in items.items() if item is not _NOT_PLAIN}
    if depth and isinstance(value, list | tuple):
        return [
            item for item in (_plain(item, depth - 1) for item in value) if item is not _NOT_PLAIN
        ]
    return _NOT_PLAIN


@cache
def _keras_own() -> frozenset[str]:
    """Attributes that every layer and model of Keras has."""
    bare = keras.layers.Layer(name="bare"), keras.Model(name="bare")
    return frozenset(key for holder in bare for key in holder.__dict__)
