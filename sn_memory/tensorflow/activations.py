"""compress_activations for Keras: inputs of dense and convolution layers, kept in a few bits.

A layer's call is wrapped in a custom gradient that captures the packed input only, and
differentiates the layer at the unpacked one. A dense or convolution layer is linear in its input,
so the gradient that flows back is exact and that of its weights unbiased; a ReLU, in the layer or
behind it, keeps one bit per element, and max pooling the place of the largest in each window.

Memory falls in traced steps (tf.function, fit), where control dependencies keep unpacking until it
is needed. Run eagerly, gradients are the same, but tf.custom_gradient itself holds each result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import sn_compress

from ..activations import Peaks
from .forecast import peaks, predicted_peak
from .packing import keep, relu, restored
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
        self.model = model
        self._steps = count()
        self._sizes_known = False
        self._changes: list[tuple[Any, str, Any, Any]] = []
        self.wrapped: list[str] = []
        for layer in model._flatten_layers(include_self=False):
            kind = type(layer).__name__
            if kind in _LINEAR:
                after = layer.activation
                self._set(layer, "activation", keras.activations.linear)
                after = relu if after is keras.activations.relu else after
                self._set(layer, "call", self._linear(layer.call, after))
                self.wrapped.append(layer.path)
            elif kind == "ReLU" and not any(
                (layer.negative_slope, layer.threshold, layer.max_value)
            ):
                self._set(layer, "call", relu)
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
        self._put_back()
        self._changes = []

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let the layers have their own calls for a while."""
        self._put_back()
        try:
            yield
        finally:
            for layer, name, _, ours in self._changes:
                setattr(layer, name, ours)

    @contextmanager
    def sizes_known(self) -> Iterator[None]:
        """Let traces that are made meanwhile have packed inputs of fixed size. Not to be run.

        A run may not rely on it: where too many elements escape, an input is kept as it is.
        """
        self._sizes_known = True
        try:
            yield
        finally:
            self._sizes_known = False

    def predict(self, sample: Any) -> int:
        """Return the peak of a step on a sample, in bytes, as it is packed. Nothing is run.

        The step is traced: forward and backward pass without a loss. All counts: variables, input,
        gradients, outputs, what is unpacked for the op at work. A tf.TensorSpec will do as sample.

        Raises
        ------
        TraceError
            If the model cannot be traced, or shapes depend on values.
        """
        return predicted_peak(self, sample)

    def verify(self, sample: Any) -> Peaks:
        """Run a step with and without compression, and compare the peaks with the predicted one.

        Measured is what ops ask for in blocks of 256 KiB and more (`Allocations`). The outputs'
        gradients are random. Variables are put back.

        Raises
        ------
        TraceError
            As `predict`; or if the device's allocator does not count.
        """
        return peaks(self, sample)

    def _set(self, layer: Any, name: str, value: Any) -> None:
        self._changes.append((layer, name, getattr(layer, name), value))
        setattr(layer, name, value)

    def _put_back(self) -> None:
        for layer, name, own, _ in reversed(self._changes):
            setattr(layer, name, own)

    def _linear(
        self, call: Callable[..., Any], activation: Callable[..., Any]
    ) -> Callable[..., Any]:
        @tf.custom_gradient
        def packed(x: Any) -> Any:
            y, buffer, shape = keep(call, x, self._pack, self._packed_bytes(x))
            static, dtype = x.shape, x.dtype

            def gradient(dy: Any, variables: Any = None) -> Any:
                with tf.control_dependencies([dy]):  # not before it is used
                    values = restored(self._unpack, [buffer, shape], tf.float32, static)
                values, weights = tf.cast(values, dtype), list(variables or [])
                # One input at a time lies there unpacked, and not while the gradient of another is
                # made. That of this one needs no input.
                with tf.GradientTape(persistent=True) as tape:
                    tape.watch(values)
                    again = call(values)
                found = tape.gradient(again, weights, dy)
                with tf.control_dependencies([it for it in found if it is not None]):
                    dx = tape.gradient(again, values, dy)
                return (dx, found) if weights else dx

            return y, gradient

        def wrapped(inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return activation(packed(inputs))

        return wrapped

    def _packed_bytes(self, x: Any) -> int | None:
        n = x.shape.num_elements()
        if n is None or not self._sizes_known:
            return None
        return int(4 * n if n < MIN_ELEMENTS else self._codec.payload_bytes(n))

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
