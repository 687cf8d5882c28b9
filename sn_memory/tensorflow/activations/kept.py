"""What a wrapped layer keeps for its gradient: made at once, in the memory of a numpy function.

TensorFlow has no hook for what a tape saves. A layer's call is therefore wrapped in a custom
gradient that captures what is compressed and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
    of: Callable[[Any, Any], Any] = lambda x, y: tf.cast(x, tf.float32),
) -> Kept:
    """Run a call that no tape sees, and compress `of` its input and result."""
    with record.stop_recording():
        y = call(x)
        buffer = tf.numpy_function(compress, [of(x, y)], tf.uint8)
        buffer.set_shape([None])
        shape = tf.shape(x)
        with tf.control_dependencies([buffer]):  # before anything else needs memory
            y = tf.identity(y)
    return Kept(y, buffer, shape)


def restored(decompress: Callable[..., Array], given: list[Any], dtype: Any, like: Any) -> Any:
    """Return what a numpy function makes of what is kept, in the type and shape of an input."""
    values = tf.numpy_function(decompress, given, dtype)
    values.set_shape(like)
    return values


def relu_by_signs(noted: Callable[[Array], Array]) -> Callable[..., Any]:
    """Return a ReLU that keeps signs, and hands them through `noted` as it does."""

    @tf.custom_gradient
    def relu(x: Any, *_: Any, **__: Any) -> Any:
        y, mask, shape = keep(tf.nn.relu, x, lambda on: noted(_signs(on)), lambda x, y: y > 0)
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


@dataclass(frozen=True)
class Places:
    """Max pooling by windows of a size, side by side; `bits` hold a place in one.

    TensorFlow keeps the layer's input and its output whole. Where windows do not overlap, a
    gradient goes to one place of its window and to nowhere else, the first of the largest, and that
    place is all that must be known: 2 bits for four places.
    """

    height: int
    width: int
    bits: int

    @classmethod
    def of(cls, layer: Any) -> Places | None:
        """Return those of a Keras layer; None if they overlap, are padded or have many places."""
        height, width = layer.pool_size
        apart = tuple(layer.strides) == (height, width) and layer.padding == "valid"
        bits = next((bits for bits in (1, 2, 4) if height * width <= 1 << bits), None)
        if not apart or bits is None or layer.data_format != "channels_last":
            return None
        return cls(height, width, bits)

    def wrapped(
        self, call: Callable[..., Any], noted: Callable[[Array], Array]
    ) -> Callable[..., Any]:
        """Return the layer's call, with a gradient that reads places; they pass through `noted`."""

        @tf.custom_gradient
        def pooled(x: Any) -> Any:
            y, kept, shape = keep(call, x, lambda x: noted(self.compress(x)))
            static, dtype = x.shape, x.dtype

            def gradient(dy: Any) -> Any:
                given = [kept, tf.cast(dy, tf.float32), shape]
                return tf.cast(restored(self.spread, given, tf.float32, static), dtype)

            return y, gradient

        def wrapped(inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return pooled(inputs)

        return wrapped

    def _views(self, x: Array) -> Iterator[Array]:
        """Per place in a window, a view of what lies there: [n, rows, columns, channels]."""
        rows, columns = x.shape[1] // self.height, x.shape[2] // self.width
        for i in range(self.height):
            for j in range(self.width):
                yield x[:, i :: self.height, j :: self.width][:, :rows, :columns]

    def compress(self, x: Array) -> Array:
        """Return places of [n, height, width, channels], compressed into uint8."""
        first, *others = self._views(x)
        best, place = first.copy(), np.zeros(first.shape, np.uint8)
        for number, other in enumerate(others, start=1):
            np.copyto(place, number, where=other > best)
            np.maximum(best, other, out=best)
        per = 8 // self.bits
        flat = np.pad(place.reshape(-1), (0, -place.size % per)).reshape(-1, per)
        made = np.zeros(len(flat), np.uint8)
        for i in range(per):
            made |= flat[:, i] << np.uint8(i * self.bits)
        return made

    def spread(self, kept: Any, dy: Any, shape: Any) -> Array:
        """Return a gradient of this shape: dy, each at its place."""
        per, mask = 8 // self.bits, np.uint8((1 << self.bits) - 1)
        shifts = np.arange(per, dtype=np.uint8) * np.uint8(self.bits)
        place = ((kept[:, None] >> shifts) & mask).reshape(-1)[: dy.size].reshape(dy.shape)
        made = np.zeros(tuple(shape), np.float32)
        for number, view in enumerate(self._views(made)):
            np.copyto(view, dy, where=place == number)
        return made
