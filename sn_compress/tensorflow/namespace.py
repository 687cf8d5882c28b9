"""TensorFlow's functions under their array API names, as far as the core uses them.

This lets the core's functions run while a graph is traced, and become part of it. TensorFlow has
most of them under other names. Its tensors are immutable, and it places results by itself, so
`device` and `copy` are ignored. Importing this file registers it with `arrays`.

A constant is created once per graph, as a step uses the same tables many times.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from ..arrays import register

Array = Any  # tf.Tensor, eager or of a graph
Shape = int | Sequence[int]

# ruff: noqa: A001 - the standard's names
bool = tf.bool
int32, int64 = tf.int32, tf.int64
float16, float32, float64 = tf.float16, tf.float32, tf.float64

abs, sqrt, round, minimum = tf.abs, tf.sqrt, tf.round, tf.minimum
isfinite, where = tf.math.is_finite, tf.where
broadcast_to, permute_dims, reshape = tf.broadcast_to, tf.transpose, tf.reshape
matmul, maximum, bitwise_left_shift = tf.matmul, tf.maximum, tf.bitwise.left_shift
sum, max, all, any = tf.reduce_sum, tf.reduce_max, tf.reduce_all, tf.reduce_any
cumulative_sum, clip, take, stack = tf.cumsum, tf.clip_by_value, tf.gather, tf.stack
sort, searchsorted = tf.sort, tf.searchsorted

_CONSTANTS = "_sn_compress_constants"  # of a graph, kept with it


def asarray(values: Any, *, dtype: Any = None, device: Any = None, copy: Any = None) -> Array:
    """Convert to a tensor, which is a constant inside a graph."""
    return tf.convert_to_tensor(values, dtype)


def astype(values: Array, dtype: Any, *, copy: Any = True) -> Array:
    """Cast to another dtype; float to int32 rounds towards zero."""
    return tf.cast(values, dtype)


def zeros(shape: Shape, *, dtype: Any = tf.float32, device: Any = None) -> Array:
    """Return zeros."""
    return tf.zeros(_shape(shape), dtype)


def ones(shape: Shape, *, dtype: Any = tf.float32, device: Any = None) -> Array:
    """Return ones."""
    return tf.ones(_shape(shape), dtype)


def arange(stop: int, *, dtype: Any = tf.int64, device: Any = None) -> Array:
    """Return 0, 1, 2, ..., [stop]."""
    return tf.constant(np.arange(stop), dtype)


def zeros_like(values: Array, *, dtype: Any = None) -> Array:
    """Return zeros of the same shape."""
    return tf.zeros(values.shape, dtype or values.dtype)


empty_like = zeros_like


def ones_like(values: Array, *, dtype: Any = None) -> Array:
    """Return ones of the same shape."""
    return tf.ones(values.shape, dtype or values.dtype)


def full_like(values: Array, value: float) -> Array:
    """Fill the same shape with one value."""
    return tf.fill(values.shape, tf.constant(value, values.dtype))


def multiply(left: Array, right: Array) -> Array:
    """Multiply in the wider of the two dtypes: TensorFlow does not promote."""
    wide = left.dtype if left.dtype.size >= right.dtype.size else right.dtype
    return tf.cast(left, wide) * tf.cast(right, wide)


def concat(arrays: Sequence[Array], *, axis: int = 0) -> Array:
    """Concatenate."""
    return tf.concat(arrays, axis)


def vecdot(left: Array, right: Array) -> Array:
    """Return the dot products over the last axis."""
    if left.shape.rank == 1:
        return tf.reshape(left[None, :] @ right[:, None], ())
    return tf.reduce_sum(left * right, -1)


def bitwise_right_shift(values: Array, places: Array | int) -> Array:
    """Divide by powers of two, rounding down, keeping the sign."""
    return tf.bitwise.right_shift(values, tf.cast(places, values.dtype))


# Not in the standard: see the functions of the same names in `arrays`.


def constant(of: Any, host: npt.NDArray[Any]) -> Array:
    """Return the values of the Constant `of` in the graph being traced."""
    if tf.executing_eagerly():
        return tf.constant(host)
    graph = tf.compat.v1.get_default_graph()
    if not hasattr(graph, _CONSTANTS):
        setattr(graph, _CONSTANTS, {})
    known = getattr(graph, _CONSTANTS)
    if of not in known:
        # Must not depend on what its first user waits for, as later users may run before that.
        with tf.control_dependencies(None):
            known[of] = tf.constant(host)
    return known[of]


def split(values: Array, sizes: Sequence[int], *, axis: int = 0) -> list[Array]:
    """Split along an axis."""
    return list(tf.split(values, list(sizes), axis))


def bits_of(values: Array) -> Array:
    """Return the bits of float32 as int32."""
    return tf.bitcast(values, tf.int32)


def floats_of(bits: Array) -> Array:
    """Return the float32 with these int32 bits."""
    return tf.bitcast(bits, tf.float32)


def top(values: Array, count: int) -> Array:
    """Return the largest values of each row, in descending order."""
    return tf.math.top_k(values, count).values


def add_at(target: Array, index: Array, values: Array) -> Array:
    """Return the target with values added at some positions of its first axis."""
    return tf.tensor_scatter_nd_add(target, index[:, None], values)


def rfft(blocks: Array) -> Array:
    """Return the orthonormal real FFT of each row, real and imaginary parts interleaved."""
    spectrum = tf.signal.rfft(blocks) * blocks.shape[1] ** -0.5
    pairs = tf.stack([tf.math.real(spectrum), tf.math.imag(spectrum)], 2)
    return tf.reshape(pairs, (blocks.shape[0], -1))


def irfft(parts: Array, block: int) -> Array:
    """Invert `rfft`."""
    pairs = tf.reshape(parts, (parts.shape[0], -1, 2))
    values = tf.signal.irfft(tf.complex(pairs[:, :, 0], pairs[:, :, 1]), [block])
    return values * block**0.5


def put(target: Array, index: Array, values: Array) -> Array:
    """Return the target with values replaced at some positions of its first axis."""
    return tf.tensor_scatter_nd_update(target, index[:, None], values)


def where_all(flag: Array, these: Sequence[Array], otherwise: Sequence[Array]) -> list[Array]:
    """Return all of `these` if the flag is set, else all of `otherwise`, without copies."""
    return list(tf.cond(flag, lambda: list(these), lambda: list(otherwise)))


def _shape(shape: Shape) -> Sequence[int]:
    return [shape] if isinstance(shape, int) else list(shape)


register(tf.Tensor, sys.modules[__name__])
