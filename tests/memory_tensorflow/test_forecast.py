"""The peak of a compressed step before it runs: by hand where it can be done, else measured."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import sn_compress
from sn_memory.tensorflow import TraceError, compress_activations
from sn_memory.tensorflow.activations.forecast import _constants_pushed_down
from sn_memory.tensorflow.memory import has_statistics
from sn_memory.tensorflow.model import call_arguments
from sn_memory.tensorflow.trace.capture import capture_model


def dense(count=6, width=256, activation="relu"):
    made = [layers.Dense(width, activation=activation) for _ in range(count)]
    return keras.Sequential([keras.Input((width,)), *made])


def convolutions(norm=False):
    """With pooling, and perhaps batch norm, which is not compressed."""
    made = [keras.Input((32, 32, 3))]
    for width in (16, 32):
        made.append(layers.Conv2D(width, 3, padding="same", activation="relu"))
        made.append(layers.Conv2D(width, 3, padding="same"))
        made += [layers.BatchNormalization()] if norm else []
        made += [layers.ReLU(), layers.MaxPooling2D()]
    return keras.Sequential([*made, layers.Flatten(), layers.Dense(10)])


def attention():
    given = x = keras.Input((64, 128))
    for _ in range(4):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(4, 32)(y, y)])
        y = layers.Dense(512, activation="relu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(128)(y)])
    return keras.Model(given, x)


@pytest.mark.parametrize("bits", [2, 8])
def test_two_dense_layers_by_hand(bits):
    """Three tensors of a layer's size are there at the peak: the result, two of the backward pass.

    Those are a gradient and a decompressed input. Beside them lie both inputs compressed while the
    second layer's is decompressed, then the gradient of a kernel in place of each.
    """
    n, width = 2048, 256
    model = dense(2, width, activation=None)
    kernel = 4 * width * width
    base = 2 * (kernel + 4 * width) + 4 * n * width
    payload = sn_compress.codec("bounded", bound=float("inf"), bits=bits).payload_bytes(n * width)
    with compress_activations(model, bits=bits) as compressed:
        found = compressed.predict(tf.TensorSpec((n, width)))
    expected = base + 3 * 4 * n * width + 2 * max(payload, kernel)
    # Biases, and blocks of the allocator rounded up to 64 bytes.
    assert found == pytest.approx(expected, abs=4096)


def checked(make, shape, bits):
    """A net's peaks, after they were found to be near each other and nothing else to have changed.

    The acceptance of the feature asks for 85 % of the predicted saving. Blocks under 256 KiB are
    predicted and in no count, so that somewhat more is saved in small nets.
    """
    keras.utils.set_random_seed(0)
    model = make()
    before = [it.numpy() for it in model.variables]
    with compress_activations(model, bits=bits) as compressed:
        found = compressed.verify(tf.random.stateless_normal(shape, (1, 2)))
    assert found.kept_to >= 0.85, (make, found)
    # Not of the saving: what is plain varies by a tensor or two, as its branches change places. Of
    # the small blocks that are not measured there are 4 % at most.
    assert found.measured_bytes == pytest.approx(found.predicted_bytes, rel=0.05), (make, found)
    assert found.base_bytes < found.measured_bytes < found.plain_bytes
    assert all(map(np.array_equal, (it.numpy() for it in model.variables), before))
    return found


def one_of_three(*net):
    """Where branches change places even on one thread, on a busy machine: one tensor is 6 %."""
    for _ in range(2):
        with suppress(AssertionError):
            return checked(*net)
    return checked(*net)


@pytest.mark.parametrize(
    ("make", "shape", "bits"),
    [
        (dense, (2048, 256), 8),
        (dense, (2048, 256), 2),
        (convolutions, (64, 32, 32, 3), 4),
    ],
)
def test_what_is_measured_is_what_was_predicted(make, shape, bits):
    if not has_statistics("CPU:0"):
        pytest.skip("TensorFlow's allocator keeps no statistics here")
    assert "of the predicted saving" in str(checked(make, shape, bits))


@pytest.mark.slow
def test_and_so_it_is_with_layers_that_are_not_packed():
    """Norms and attention: on one thread, as several run branches of their gradients at once."""
    if not has_statistics("CPU:0"):
        pytest.skip("TensorFlow's allocator keeps no statistics here")
    program = """
import tensorflow as tf
tf.config.threading.set_inter_op_parallelism_threads(1)
import test_forecast as it
it.one_of_three(lambda: it.convolutions(norm=True), (64, 32, 32, 3), 4)
it.one_of_three(it.attention, (32, 64, 128), 4)
"""
    here = str(Path(__file__).parent)
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=here, capture_output=True, text=True, timeout=300,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([here, *filter(None, sys.path)])},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr


def test_nothing_is_run_for_a_prediction(monkeypatch):
    model = convolutions(norm=True)
    before = [it.numpy() for it in model.variables]
    with compress_activations(model, bits=4) as compressed:

        def fail(*_):
            raise AssertionError("it was run")

        monkeypatch.setattr(compressed._compressor, "compress", fail)
        monkeypatch.setattr(compressed._compressor, "decompress", fail)
        small, large = (compressed.predict(tf.TensorSpec((n, 32, 32, 3))) for n in (16, 64))
    held = sum(it.numpy().nbytes for it in model.trainable_variables)
    # Variables and their gradients are there for any batch; all else grows with it.
    assert large - 2 * held == pytest.approx(4 * (small - 2 * held), rel=0.05)
    assert all(map(np.array_equal, (it.numpy() for it in model.variables), before))


def test_after_a_prediction_it_packs_as_before():
    """What a trace assumed of sizes is no promise: here all elements escape."""
    model = dense(2)
    with compress_activations(model, bits=4) as compressed:
        compressed.predict(tf.TensorSpec((64, 256)))
        x = tf.fill((64, 256), float("nan"))

        @tf.function
        def step(x):
            with tf.GradientTape() as tape:
                y = tf.reduce_sum(model(x))
            return tape.gradient(y, model.trainable_variables)

        assert [it.shape for it in step(x)] == [it.shape for it in model.trainable_variables]


def test_shapes_that_depend_on_values_are_refused():
    class Positive(layers.Layer):
        def call(self, x):
            return tf.boolean_mask(x, x[:, 0] > 0)

    model = keras.Sequential([keras.Input((64,)), layers.Dense(64), Positive()])
    with compress_activations(model) as compressed, pytest.raises(TraceError, match="depends on"):
        compressed.predict(tf.TensorSpec((32, 64)))
    with (
        compress_activations(dense(2)) as compressed,
        pytest.raises(TraceError, match="unknown batch"),
    ):
        compressed.predict(tf.TensorSpec((None, 256)))


def test_a_constant_goes_to_the_second_factor():
    """As TensorFlow does it: of 3 * (x * y), the product 3 * y is made where y is."""

    class Scaled(layers.Layer):
        def call(self, x):
            y = tf.exp(x)
            return 3.0 * (tf.sin(x) * y)

    model = keras.Sequential([keras.Input((64,)), Scaled(), layers.Dense(8)])
    captured, _ = capture_model(model, call_arguments(tf.TensorSpec((32, 64))))
    plain = [it.op.type for it in captured.nodes]
    pushed = [it.op.type for it in _constants_pushed_down(captured).nodes]
    assert [it for it in plain if it != "Const"][:4] == ["Exp", "Sin", "Mul", "Mul"]
    assert [it for it in pushed if it != "Const"][:4] == ["Exp", "Mul", "Sin", "Mul"]
    assert sorted(pushed) == sorted(plain)
