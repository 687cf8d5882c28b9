"""States on their way to a file and back, from one codec to another if need be.

A saved state names the class and the settings that give it its meaning. A codec of the same takes
it as it is and goes on bit by bit; for another one it becomes the vector it stands for, and
whatever else was remembered (momentum, factors, counted steps) starts anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..base.errors import CompressError
from .base import MAX_ELEMENTS, Codec, Floats, saved_item
from .registry import by_class


def save(codec: Codec, state: Any, n: int) -> dict[str, Any]:
    """A state of n elements as arrays, numbers and strings."""
    return {
        "n": n,
        "codec": type(codec).__name__,
        "basis": codec.basis,
        "state": codec.dump_state(state, n),
    }


def load(codec: Codec, entry: dict[str, Any]) -> Any:
    """The state, for this codec; CompressError if it is damaged or cannot be carried over.

    None if nothing is remembered in it that this codec could go on with.
    """
    n = elements(entry)
    own = saved_item(entry, "codec") == type(codec).__name__
    if own and _plain(saved_item(entry, "basis")) == _plain(codec.basis):
        return codec.load_state(saved_item(entry, "state"), n)
    values = load_values(entry)
    return None if values is None else codec.values_to_state(values)


def load_values(entry: dict[str, Any]) -> Floats | None:
    """The vector that a saved state stands for, [n] float32; None for codecs without memory."""
    n, basis = elements(entry), saved_item(entry, "basis")
    try:
        settings = {k: tuple(v) if isinstance(v, list) else v for k, v in basis.items()}
        saved = by_class(saved_item(entry, "codec"), settings)
    except (TypeError, AttributeError, ArithmeticError) as error:
        raise CompressError(
            f"it was saved with settings {basis!r}, which make no codec: {error}"
        ) from error
    state = saved.load_state(saved_item(entry, "state"), n)
    if not saved.remembers:
        return None
    return np.asarray(saved.state_to_values(state, n), np.float32)


def elements(entry: dict[str, Any]) -> int:
    """How many elements a saved state is of."""
    n = saved_item(entry, "n")
    if not isinstance(n, int) or isinstance(n, bool) or not 0 <= n <= MAX_ELEMENTS:
        raise CompressError(f"it is of {n!r} elements; expected 0 to {MAX_ELEMENTS}")
    return n


def _plain(basis: Any) -> Any:
    """Settings with tuples as lists, which files make of them."""
    if isinstance(basis, dict):
        return {key: _plain(value) for key, value in basis.items()}
    return [_plain(item) for item in basis] if isinstance(basis, (list, tuple)) else basis


def each(kind: type, change: Callable[[Any], Any], node: Any) -> Any:
    """Dicts and lists with everything of one kind changed: arrays to a framework's, and back."""
    if isinstance(node, kind):
        return change(node)
    if isinstance(node, dict):
        return {key: each(kind, change, value) for key, value in node.items()}
    return [each(kind, change, item) for item in node] if isinstance(node, list) else node
