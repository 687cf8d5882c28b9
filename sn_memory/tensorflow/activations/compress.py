"""compress_activations for Keras: inputs of dense and convolution layers, kept in a few bits.

A layer's call is wrapped in a custom gradient that captures the compressed input only, and
differentiates the layer at the decompressed one. A dense or convolution layer is linear in its
input, so the gradient that flows back is exact and that of its weights unbiased; a ReLU, in the
layer or behind it, keeps one bit per element, and max pooling the place of the largest in each
window.

What compresses, and what the controller is told, is in compressor.py. Memory falls in traced steps
(tf.function, fit), where control dependencies keep decompressing until it is needed. Run eagerly,
gradients are the same, but tf.custom_gradient itself holds each result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from ...activations import Controller
from ...base.sizes import parse_bytes
from ..modules.rerun import name_of
from .compressor import Compressor
from .kept import Places, keep, relu_by_signs, restored

_LINEAR = ("Dense", "Conv1D", "Conv2D", "Conv3D")


class CompressedActivations:
    """The layers of a model that are wrapped, until closed; a context manager.

    Attributes
    ----------
    controller
        Chooses the bits; `controller.rows()` has what is known of each layer's input.
    wrapped
        Names of the layers: their paths, where they have one, and no two alike.
    """

    def __init__(self, model: keras.Model, compressor: Compressor) -> None:
        self.model, self.controller = model, compressor.controller
        self._compressor = compressor
        self._changes: list[tuple[Any, str, Any]] = []
        self.wrapped: list[str] = []
        for layer in model._flatten_layers(include_self=False):
            kind, key = type(layer).__name__, self._name(layer)
            signs = relu_by_signs(partial(compressor.noted, f"{key}/signs"))
            if kind in _LINEAR:
                after = layer.activation
                self._set(layer, "activation", keras.activations.linear)
                after = signs if after is keras.activations.relu else after
                self._set(layer, "call", self._linear(layer, key, after))
            elif kind == "ReLU" and not any(
                (layer.negative_slope, layer.threshold, layer.max_value)
            ):
                self._set(layer, "call", signs)
            elif kind == "MaxPooling2D" and (places := Places.of(layer)) is not None:
                noted = partial(compressor.noted, f"{key}/places")
                self._set(layer, "call", places.wrapped(layer.call, noted))
            else:
                continue
            self.wrapped.append(key)

    def __enter__(self) -> CompressedActivations:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the layers their own calls back. Compile the model again: it may hold a trace."""
        for layer, name, own in reversed(self._changes):
            setattr(layer, name, own)
        self._changes = []

    def report(self) -> str:
        """Return a row per layer: elements, bits, predicted error of the weight's gradient."""
        return self.controller.report()

    def refresh(self) -> None:
        """Choose bits now from what the last step gathered; otherwise the next step does."""
        self._compressor.refresh()

    def _set(self, layer: Any, name: str, value: Any) -> None:
        self._changes.append((layer, name, getattr(layer, name)))
        setattr(layer, name, value)

    def _name(self, layer: Any) -> str:
        """What the controller knows a layer by: no two may be alike."""
        name = name_of(layer)
        alike = sum(it == name or it.startswith(f"{name}:") for it in self.wrapped)
        return f"{name}:{alike + 1}" if alike else name

    def _linear(self, layer: Any, key: str, activation: Callable[..., Any]) -> Callable[..., Any]:
        call = layer.call

        @tf.custom_gradient
        def compressed(x: Any) -> Any:
            y, buffer, shape = keep(call, x, partial(self._compressor.compress, key))
            static, dtype = x.shape, x.dtype
            note = self._compressor.arrived(key, layer, x, y)

            def gradient(dy: Any, variables: Any = None) -> Any:
                with tf.control_dependencies([dy]):  # not before it is used
                    values = restored(
                        self._compressor.decompress, [buffer, shape], tf.float32, static
                    )
                values, weights = tf.cast(values, dtype), list(variables or [])
                # One input at a time lies there decompressed, and not while the gradient of another
                # is made. That of this one needs no input.
                with tf.GradientTape(persistent=True) as tape:
                    tape.watch(values)
                    again = call(values)
                found = tape.gradient(again, weights, dy)
                made = [it for it in found if it is not None]
                # Of what arrives NumPy sees the memory itself: nothing is copied.
                made += [
                    restored(note, [tf.cast(of, tf.float32) for of in (dy, it)], tf.int32, [])
                    for it in made
                    if it.shape.rank > 1
                ]
                with tf.control_dependencies(made):
                    dx = tape.gradient(again, values, dy)
                return (dx, found) if weights else dx

            return y, gradient

        def wrapped(inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return activation(compressed(inputs))

        return wrapped


def compress_activations(
    model: keras.Model,
    *,
    error: float | None = None,
    budget: float | str | None = None,
    bits: int | None = None,
    optimizer: Any = None,
    every: int = 200,
    start_bits: int = 8,
    seed: int = 0,
    threads: int = 1,
) -> CompressedActivations:
    """Keep inputs of dense and convolution layers in few bits until closed, and signs of ReLUs.

    Max pooling whose windows do not overlap keeps places in them. What else layers keep stays.
    Without `error`, `budget` and `bits`, inputs get 4 bits.

    Parameters
    ----------
    model
        A Keras model; compile it with jit_compile=False, as compressing runs on the host. Compile
        it, or make its tf.function, after this call: a trace made before goes on as it was. Bits
        may change without a new trace.
    error
        Acceptable deviation of a weight's gradient, as a fraction of its momentum's mean magnitude
        (of the gradient's, without an optimizer). For Adam both are taken in units of its step.
    budget
        Instead: bytes that the wrapped layers may keep, "500 MiB" for example.
    bits
        Instead: 1, 2, 4 or 8, of each element of an input.
    optimizer
        Of Keras, where momentum is read: of SGD, and of Adam and what is made like it.
    every
        Steps from one choice to the next, by what the step before it gathered.
    start_bits
        Until the first choice, which is at the second step.
    seed, threads
        Of the codec.

    Raises
    ------
    ValueError
        If no layer is dense, a convolution, a ReLU or such a pooling layer; or a setting is
        illegal.
    tf.errors.UnknownError
        From the second step on, with the text of a BudgetError, if what is kept does not fit.
    """
    if error is None and budget is None and bits is None:
        bits = 4
    controller = Controller(
        error=error, budget_bytes=None if budget is None else parse_bytes(budget), bits=bits,
        every=every, start_bits=start_bits,
    )  # fmt: skip
    compressor = Compressor(controller, optimizer, seed, threads)
    made = CompressedActivations(model, compressor)
    if not made.wrapped:
        raise ValueError(
            f"compress_activations: {model.name} has no layer of {', '.join(_LINEAR)} or ReLU, so "
            "there is nothing to compress. Pass the model that holds them."
        )
    return made
