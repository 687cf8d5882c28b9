"""What a wrapped layer keeps for its gradient: made at once, in the memory of a numpy function.

TensorFlow has no hook for what a tape saves. A layer's call is therefore wrapped in a custom
gradient that captures what is compressed and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import record  # what tf.recompute_grad stops its tape with

Array = np.ndarray[Any, Any]


class Kept(NamedTuple):
    """A layer's result; what is kept for its gradient, [bytes] uint8; the shape of its input."""

    y: Any
    buffer: Any
    shape: Any


def keep(
    call: Callable[[Any], Any],
    x: Any,
    compress: Callable[[Array], Array],
    size: int | None,
    of: Callable[[Any, Any], Any] = lambda x, y: tf.cast(x, tf.float32),
) -> Kept:
    """Run a call that no tape sees, and compress `of` its input and result.

    `size` is that of the compressed form in bytes, where it is known before: what follows is
    predicted by it.
    """
    with record.stop_recording():
        y = call(x)
        buffer = tf.numpy_function(_handing_over(compress), [of(x, y)], tf.uint8)
        buffer.set_shape([size])
        shape = tf.shape(x)
        with tf.control_dependencies([buffer]):  # before anything else needs memory
            y = tf.identity(y)
    return Kept(y, buffer, shape)


def restored(decompress: Callable[..., Array], given: list[Any], dtype: Any, like: Any) -> Any:
    """Return what a numpy function makes of what is kept, in the type and shape of an input."""
    values = tf.numpy_function(_handing_over(decompress), given, dtype)
    values.set_shape(like)
    return values


@contextmanager
def all_counted() -> Iterator[None]:
    """Let the allocator's statistics have all that is handed over meanwhile, each block once.

    TensorFlow takes a NumPy array as it is where it happens to be aligned, and then counts nothing;
    else it makes a copy, which it counts.
    """
    global _copied
    _copied = True
    try:
        yield
    finally:
        _copied = False


_copied = False


def _handing_over(function: Callable[..., Array]) -> Callable[..., Array]:
    def handing_over(*given: Any) -> Array:
        array = function(*given)
        return _unaligned(array) if _copied else array

    return handing_over


def _unaligned(array: Array) -> Array:
    """A copy at an address that no kernel takes as it is: 4 bytes behind one it would."""
    room = np.empty(array.nbytes + 64, np.uint8)
    begin = (4 - room.ctypes.data) % 64
    copy = room[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def relu_by_signs(noted: Callable[[Array], Array]) -> Callable[..., Any]:
    """Return a ReLU that keeps signs, and hands them through `noted` as it does."""

    @tf.custom_gradient
    def relu(x: Any, *_: Any, **__: Any) -> Any:
        n = x.shape.num_elements()
        size = None if n is None else -(-n // 8)
        y, mask, shape = keep(
            tf.nn.relu, x, lambda on: noted(_signs(on)), size, of=lambda x, y: y > 0
        )
        static, dtype = x.shape, x.dtype

        def gradient(dy: Any) -> Any:
            with tf.control_dependencies([dy]):
                on = restored(_from_signs, [mask, shape], tf.bool, static)
            return tf.where(on, dy, tf.zeros((), dtype))

        return y, gradient

    return relu  # type: ignore[no-any-return]


def _signs(on: Array) -> Array:
    return np.packbits(on.reshape(-1), bitorder="little")


def _from_signs(mask: Any, shape: Any) -> Array:
    n = int(np.prod(shape))
    return np.unpackbits(mask, count=n, bitorder="little").view(np.bool_).reshape(shape)
