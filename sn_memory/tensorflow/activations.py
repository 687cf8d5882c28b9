"""compress_activations for Keras: inputs of dense and convolution layers, kept in a few bits.

TensorFlow has no hook for what a tape saves. A layer's call is therefore wrapped in a custom
gradient that captures the packed input only, and differentiates the layer at the unpacked one. A
dense or convolution layer is linear in its input, so the gradient that flows back is exact and that
of its weights unbiased; a ReLU, in the layer or behind it, keeps one bit per element, and max
pooling the place of the largest in each window.

Memory falls in traced steps (tf.function, fit), where control dependencies keep unpacking until it
is needed. Run eagerly, gradients are the same, but tf.custom_gradient itself holds each result.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import record  # what tf.recompute_grad stops its tape with

import sn_compress

from .pooling import Places

MIN_ELEMENTS = 1024
"""Smaller tensors are kept as they are."""
_LINEAR = ("Dense", "Conv1D", "Conv2D", "Conv3D")


class CompressedActivations:
    """The layers of a model that are wrapped, until closed; a context manager."""

    def __init__(self, model: keras.Model, bits: int, seed: int, threads: int) -> None:
        self._codec: Any = sn_compress.codec(
            "bounded", bound=float("inf"), bits=bits, seed=seed, threads=threads, measure=False
        )
        self._steps = count()
        self._undo: list[tuple[Any, str, Any]] = []
        self.wrapped: list[str] = []
        relu = keras.activations.relu
        for layer in model._flatten_layers(include_self=False):
            kind = type(layer).__name__
            if kind in _LINEAR:
                after = layer.activation
                self._set(layer, "activation", keras.activations.linear)
                after = _relu if after is relu else after
                self._set(layer, "call", self._linear(layer.call, after))
                self.wrapped.append(layer.path)
            elif kind == "ReLU" and not any(
                (layer.negative_slope, layer.threshold, layer.max_value)
            ):
                self._set(layer, "call", _relu)
                self.wrapped.append(layer.path)
            elif kind == "MaxPooling2D" and (places := Places.of(layer)) is not None:
                self._set(layer, "call", places.wrapped(layer.call))
                self.wrapped.append(layer.path)

    def __enter__(self) -> CompressedActivations:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the layers their own calls back. Compile the model again: it may hold a trace."""
        for layer, name, value in reversed(self._undo):
            setattr(layer, name, value)
        self._undo = []

    def _set(self, layer: Any, name: str, value: Any) -> None:
        self._undo.append((layer, name, getattr(layer, name)))
        setattr(layer, name, value)

    def _linear(
        self, call: Callable[..., Any], activation: Callable[..., Any]
    ) -> Callable[..., Any]:
        @tf.custom_gradient
        def packed(x: Any) -> Any:
            with record.stop_recording():
                y = call(x)
                buffer = tf.numpy_function(self._pack, [tf.cast(x, tf.float32)], tf.uint8)
                shape = tf.shape(x)
                with tf.control_dependencies([buffer]):  # before anything else needs memory
                    y = tf.identity(y)
            static, dtype = x.shape, x.dtype

            def gradient(dy: Any, variables: Any = None) -> Any:
                with tf.control_dependencies([dy]):  # not before it is used
                    values = tf.numpy_function(self._unpack, [buffer, shape], tf.float32)
                restored = tf.ensure_shape(tf.cast(values, dtype), static)
                weights = list(variables or [])
                with tf.GradientTape() as tape:
                    tape.watch(restored)
                    again = call(restored)
                found = tape.gradient(again, [restored, *weights], dy)
                return (found[0], found[1:]) if weights else found[0]

            return y, gradient

        def wrapped(inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return activation(packed(inputs))

        return wrapped

    def _pack(self, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """A payload; or plain float32 where that is smaller, or too many elements escape."""
        flat = np.ascontiguousarray(x, np.float32).reshape(-1)
        if flat.size < MIN_ELEMENTS:
            return flat.view(np.uint8)
        state = [np.array([next(self._steps)], np.int64)]
        payload = self._codec.encode(flat, state=state)
        return flat.view(np.uint8) if payload.saturated else payload.buffer

    def _unpack(self, buffer: Any, shape: Any) -> np.ndarray[Any, Any]:
        n = int(np.prod(shape))
        if buffer.size == 4 * n:
            return buffer.view(np.float32).reshape(shape)
        return np.asarray(self._codec.decode(sn_compress.Payload.from_bytes(buffer)).reshape(shape))


@tf.custom_gradient
def _relu(x: Any, *_: Any, **__: Any) -> Any:
    with record.stop_recording():
        y = tf.nn.relu(x)
        mask = tf.numpy_function(_signs, [y > 0], tf.uint8)
        shape = tf.shape(x)
        with tf.control_dependencies([mask]):
            y = tf.identity(y)
    static, dtype = x.shape, x.dtype

    def gradient(dy: Any) -> Any:
        with tf.control_dependencies([dy]):
            on = tf.numpy_function(_from_signs, [mask, shape], tf.bool)
        return tf.where(tf.ensure_shape(on, static), dy, tf.zeros((), dtype))

    return y, gradient


def _signs(on: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.packbits(on.reshape(-1), bitorder="little")


def _from_signs(mask: Any, shape: Any) -> np.ndarray[Any, Any]:
    n = int(np.prod(shape))
    return np.unpackbits(mask, count=n, bitorder="little").view(np.bool_).reshape(shape)


def compress_activations(
    model: keras.Model, *, bits: int = 4, seed: int = 0, threads: int = 1
) -> CompressedActivations:
    """Keep inputs of dense and convolution layers in few bits until closed, and signs of ReLUs.

    Max pooling whose windows do not overlap keeps places in them. What else layers keep stays.

    Parameters
    ----------
    model
        A Keras model; compile it with jit_compile=False, as packing runs on the host. Compile it,
        or make its tf.function, after this call: a trace made before goes on as it was.
    bits
        1, 2, 4 or 8, of each element of an input.
    seed, threads
        Of the codec.

    Raises
    ------
    ValueError
        If no layer is dense, a convolution, a ReLU or such a pooling layer.
    sn_compress.CompressError
        If a setting is illegal.
    """
    made = CompressedActivations(model, bits, seed, threads)
    if not made.wrapped:
        raise ValueError(
            f"compress_activations: {model.name} has no layer of {', '.join(_LINEAR)} or ReLU, so "
            "there is nothing to compress. Pass the model that holds them."
        )
    return made
