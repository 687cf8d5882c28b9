"""Max pooling that keeps, of each window, which place was the largest: 2 bits for four places.

TensorFlow keeps the layer's input and its output whole. Where windows do not overlap, a gradient
goes to one place of its window and to nowhere else, the first of the largest, and that place is all
that must be known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from .kept import Array, keep, restored


@dataclass(frozen=True)
class Places:
    """Windows of a size, side by side; `bits` hold a place in one."""

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
            y, kept, shape = keep(call, x, lambda x: noted(self.compress(x)), self._bytes(x.shape))
            static, dtype = x.shape, x.dtype

            def gradient(dy: Any) -> Any:
                given = [kept, tf.cast(dy, tf.float32), shape]
                return tf.cast(restored(self.spread, given, tf.float32, static), dtype)

            return y, gradient

        def wrapped(inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return pooled(inputs)

        return wrapped

    def _bytes(self, shape: Any) -> int | None:
        """What places of an input take, if its shape is known."""
        if not shape.is_fully_defined():
            return None
        n, rows, columns, channels = shape.as_list()
        places = n * (rows // self.height) * (columns // self.width) * channels
        return int(-(-places * self.bits // 8))

    def _views(self, x: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
        """Per place in a window, a view of what lies there: [n, rows, columns, channels]."""
        rows, columns = x.shape[1] // self.height, x.shape[2] // self.width
        for i in range(self.height):
            for j in range(self.width):
                yield x[:, i :: self.height, j :: self.width][:, :rows, :columns]

    def compress(self, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
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

    def spread(self, kept: Any, dy: Any, shape: Any) -> np.ndarray[Any, Any]:
        """Return a gradient of this shape: dy, each at its place."""
        per, mask = 8 // self.bits, np.uint8((1 << self.bits) - 1)
        shifts = np.arange(per, dtype=np.uint8) * np.uint8(self.bits)
        place = ((kept[:, None] >> shifts) & mask).reshape(-1)[: dy.size].reshape(dy.shape)
        made = np.zeros(tuple(shape), np.float32)
        for number, view in enumerate(self._views(made)):
            np.copyto(view, dy, where=place == number)
        return made
