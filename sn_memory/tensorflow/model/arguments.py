"""What a call was given and what it returned, as far as a plan depends on it.

A plan holds for the arguments it was traced with: the same names, the same structure, tensors of
the same shapes and types, and the same values of all else. A flag or a mask more is another call.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType
from typing import Any, Final

import tensorflow as tf

from ..errors import TraceError

# Values that cannot change without being others.
SIMPLE: Final = (
    bool, int, float, complex, str, bytes, type(None), type, tf.DType, FunctionType,
    BuiltinFunctionType,
)  # fmt: skip


@dataclass
class Call:
    """A call of a model: its arguments, what tells it from others, and its tensors.

    `why` says why it has no key.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    key: Hashable = None
    tensors: list[Any] = field(default_factory=list)
    why: str = ""

    def __str__(self) -> str:
        return self.why or describe(self.key)


def call_of(
    signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Hashable, list[Any]]:
    """Return what tells a call from others, and its tensors in an order of their own.

    Parameters
    ----------
    signature
        Of the model's `call`. The same argument by place and by name is the same call; `training`
        and what is as by default do not count.

    Raises
    ------
    TraceError
        For an argument that is neither a tensor nor a plain value, such as a RaggedTensor.
    """
    bound = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            bound.update(bound.pop(name, {}))
        elif name in bound and _is_default(bound[name], parameter.default):
            del bound[name]
    bound.pop("training", None)
    key: list[Hashable] = []
    tensors = []
    for path, leaf in _leaves(dict(sorted(bound.items())), ()):
        if isinstance(leaf, tf.Tensor):
            shape = leaf.shape.as_list() if leaf.shape.rank is not None else [None]
            key.append((path, tuple(shape), leaf.dtype.name))
            tensors.append(leaf)
        elif isinstance(leaf, SIMPLE):
            key.append((path, type(leaf), leaf))
        else:
            raise TraceError(
                f"the argument {'.'.join(map(str, path[:1]))!r} holds a {type(leaf).__name__}; a "
                "plan of ops takes tensors and plain values (numbers, text, None), in lists, "
                "tuples and dicts."
            )
    return tuple(key), tensors


def closed(values: Any) -> Any:
    """Return what holds tensors that nobody can reach, or None: objects, RaggedTensors."""
    leaves = tf.nest.flatten(values)
    return next((it for it in leaves if not isinstance(it, (tf.Tensor, *SIMPLE))), None)


def check_results(results: Any) -> None:
    """Raise TraceError if a model's results hold what would come back as it was in the trace."""
    found = closed(results)
    if found is not None:
        raise TraceError(
            f"the model returns a {type(found).__name__}; a plan of ops knows only the tensors in "
            "lists, tuples and dicts. Return those."
        )


def refilled(results: Any, tensors: Sequence[Any]) -> Any:
    """Return a structure of results with other tensors in the place of those in it."""
    rest = iter(tensors)
    return tf.nest.map_structure(
        lambda it: next(rest) if isinstance(it, tf.Tensor) else it, results
    )


def describe(key: Hashable) -> str:
    """Return a key as text for a message."""
    parts = []
    for path, kind, value in key:  # type: ignore[attr-defined]
        what = f"{value}{list(kind)}" if isinstance(kind, tuple) else repr(value)
        parts.append(f"{'.'.join(map(str, path))}={what}")
    return ", ".join(parts) or "nothing"


def is_open(key: Hashable) -> bool:
    """Whether a tensor of a call has a size that is not known yet."""
    return any(
        isinstance(kind, tuple) and None in kind
        for _, kind, _ in key  # type: ignore[attr-defined]
    )


def _is_default(value: Any, default: Any) -> bool:
    return value is default or (
        isinstance(value, SIMPLE) and type(value) is type(default) and value == default
    )


def _leaves(value: Any, path: tuple[Hashable, ...]) -> Iterator[tuple[tuple[Hashable, ...], Any]]:
    """Yield what is in dicts, lists and tuples, with the way to it."""
    if isinstance(value, Mapping):
        items = sorted(value.items(), key=lambda it: repr(it[0]))
        for name, item in items:
            yield from _leaves(item, (*path, name))
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            yield from _leaves(item, (*path, place))
    else:
        yield path, value
