"""Small Keras architectures of all kinds, for a table and for its test.

Weights are random, images small, classes few; what matters is which ops and layers there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

CLASSES = 5


@dataclass(frozen=True)
class Case:
    """A built model and a sample for it."""

    model: Any
    sample: Any


def _images(batch: int, side: int) -> Any:
    return tf.random.stateless_normal((batch, side, side, 3), (1, 2))


def _tokens(batch: int, length: int) -> Any:
    return tf.random.stateless_uniform((batch, length), (1, 2), 1, 100, tf.int32)


def _application(name: str) -> Callable[[int], Case]:
    def make(scale: int) -> Case:
        side = 64
        build = getattr(keras.applications, name)
        settings = {"include_preprocessing": False} if name.startswith("MobileNetV3") else {}
        model = build(weights=None, input_shape=(side, side, 3), classes=CLASSES, **settings)
        return Case(model, _images(8 * scale, side))

    return make


def _recurrent(
    kind: str, *, both_ways: bool = False, masked: bool = False
) -> Callable[[int], Case]:
    def make(scale: int) -> Case:
        # A state is 256 KiB: the allocator's trace tells nothing of smaller blocks.
        batch, units, length = 512 * scale, 128 // scale, 8 * scale
        layers: list[Any] = [keras.Input((length, 64))]
        if masked:
            layers = [keras.Input((length,), dtype="int32")]
            layers += [keras.layers.Embedding(100, 64, mask_zero=True)]
        for last in (False, False, True):
            cell = getattr(keras.layers, kind)(units, return_sequences=not last)
            layers.append(keras.layers.Bidirectional(cell) if both_ways else cell)
        model = keras.Sequential([*layers, keras.layers.Dense(CLASSES)])
        vectors = tf.random.stateless_normal((batch, length, 64), (1, 2))
        return Case(model, _tokens(batch, length) if masked else vectors)

    return make


def conv_lstm(scale: int) -> Case:
    """Return two recurrent layers whose cells are convolutions."""
    layers = [
        keras.layers.ConvLSTM2D(16, 3, padding="same", return_sequences=not last)
        for last in (False, True)
    ]
    ends = [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(CLASSES)]
    model = keras.Sequential([keras.Input((4, 16 * scale, 16 * scale, 3)), *layers, *ends])
    shape = (16, 4, 16 * scale, 16 * scale, 3)
    return Case(model, tf.random.stateless_normal(shape, (1, 2)))


def stateful(scale: int) -> Case:
    """Return recurrent layers whose last states are the first of the next step."""
    batch, units, length = 512 * scale, 128 // scale, 8 * scale
    layers = [
        keras.layers.GRU(units, return_sequences=not last, stateful=True)
        for last in (False, False, True)
    ]
    start = keras.Input(batch_shape=(batch, length, 64))
    model = keras.Sequential([start, *layers, keras.layers.Dense(CLASSES)])
    return Case(model, tf.random.stateless_normal((batch, length, 64), (1, 2)))


def mixed(scale: int) -> Case:
    """Return a convolutional network that computes in bfloat16."""
    before = keras.mixed_precision.global_policy()
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        x = start = keras.Input((32 * scale, 32 * scale, 3))
        for width in (32, 32, 64, 64):
            x = keras.layers.Conv2D(width, 3, padding="same")(x)
            x = keras.layers.Activation("relu")(keras.layers.BatchNormalization()(x))
        x = keras.layers.Dense(CLASSES, dtype="float32")(keras.layers.GlobalAveragePooling2D()(x))
    finally:
        keras.mixed_precision.set_global_policy(before)
    return Case(keras.Model(start, x), _images(16, 32 * scale))


def several_outputs(scale: int) -> Case:
    """Return dense layers with three heads, two at the end and one in the middle."""
    x = start = keras.Input((128,))
    middle = None
    for place in range(6):
        x = keras.layers.Dense(128 * scale, "gelu")(x)
        middle = x if place == 2 else middle
    heads = {"a": keras.layers.Dense(128, "gelu")(x), "b": keras.layers.Dense(CLASSES)(x)}
    heads["c"] = keras.layers.Dense(CLASSES)(middle)
    sample = tf.random.stateless_normal((1024, 128), (1, 2))
    return Case(keras.Model(start, heads), sample)


def _block(x: Any, width: int, place: int) -> Any:
    normal = keras.layers.LayerNormalization()(x)
    attend = keras.layers.MultiHeadAttention(4, width // 4, dropout=0.1, seed=place)
    x = x + attend(normal, normal)
    normal = keras.layers.LayerNormalization()(x)
    inner = keras.layers.Dense(4 * width, "gelu")(normal)
    return x + keras.layers.Dropout(0.1, seed=place)(keras.layers.Dense(width)(inner))


def transformer(scale: int, *, masked: bool = False) -> Case:
    """Return an encoder with an embedding of tokens."""
    width, length = 64, 32 * scale
    start = keras.Input((length,), dtype="int32")
    x = keras.layers.Embedding(100, width, mask_zero=masked)(start)
    for place in range(4):
        x = _block(x, width, place)
    x = keras.layers.GlobalAveragePooling1D()(x)
    return Case(keras.Model(start, keras.layers.Dense(CLASSES)(x)), _tokens(32 * scale, length))


class Subclassed(keras.Model):
    """A residual network by code, with statistics, dropout and one block called twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = keras.layers.Conv2D(width, 3, padding="same")
        self.convolutions = [keras.layers.Conv2D(width, 3, padding="same") for _ in range(4)]
        self.norms = [keras.layers.BatchNormalization() for _ in range(4)]
        self.drop = keras.layers.Dropout(0.2, seed=1)
        self.head = keras.layers.Dense(CLASSES)

    def call(self, x: Any, training: Any = None) -> Any:
        """Return what the classes get."""
        x = self.stem(x)
        for place in (0, 1, 2, 3, 3):
            inner = self.norms[place](self.convolutions[place](x), training=training)
            x = x + self.drop(tf.nn.silu(inner), training=training)
        return self.head(tf.reduce_mean(x, (1, 2)))


class Selecting(Subclassed):
    """The same, but the rows that come out depend on values: no trace of it has all shapes."""

    def call(self, x: Any, training: Any = None) -> Any:
        """Return the rows whose first class is likely."""
        outputs = super().call(x, training=training)
        return tf.boolean_mask(outputs, outputs[:, 0] > 0)


def _subclassed(kind: type[Subclassed]) -> Callable[[int], Case]:
    def make(scale: int) -> Case:
        model = kind(16 * scale)
        sample = _images(16 * scale, 16 * scale)
        model(sample)
        return Case(model, sample)

    return make


BUILDERS: dict[str, Callable[[int], Case]] = {
    "ResNet50": _application("ResNet50"),
    "EfficientNetB0": _application("EfficientNetB0"),
    "MobileNetV3Small": _application("MobileNetV3Small"),
    "DenseNet121": _application("DenseNet121"),
    "transformer": transformer,
    "transformer, masked": lambda scale: transformer(scale, masked=True),
    "LSTM": _recurrent("LSTM"),
    "LSTM, masked": _recurrent("LSTM", masked=True),
    "GRU": _recurrent("GRU"),
    "SimpleRNN": _recurrent("SimpleRNN"),
    "Bidirectional LSTM": _recurrent("LSTM", both_ways=True),
    "ConvLSTM": conv_lstm,
    "GRU, stateful": stateful,
    "mixed precision": mixed,
    "several outputs": several_outputs,
    "subclassed": _subclassed(Subclassed),
    "subclassed, rows by value": _subclassed(Selecting),
}


def build(name: str, scale: int = 2) -> Case:
    """Return one of BUILDERS; all sizes go with the scale."""
    keras.utils.set_random_seed(1)
    return BUILDERS[name](scale)
