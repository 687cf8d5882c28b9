"""Compressed activations under Keras: exact where they must be, predicted elsewhere, smaller."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import sn_compress
from sn_memory.activations import gradient_sd
from sn_memory.tensorflow import Allocations, compress_activations
from sn_memory.tensorflow.memory import has_statistics


def network():
    return keras.Sequential(
        [
            keras.Input((16, 16, 3)),
            keras.layers.Conv2D(8, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(8, 3, strides=2, activation="gelu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(32),
            keras.layers.ReLU(),
            keras.layers.Dense(10),
        ]
    )


def gradients(model, x, y):
    with tf.GradientTape() as tape:
        tape.watch(x)
        logits = model(x, training=True)
        loss = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
        loss = tf.reduce_sum(loss)
    return tape.gradient(loss, [x, *model.trainable_variables])


def data(n=64):
    rng = np.random.default_rng(0)
    return tf.constant(rng.standard_normal((n, 16, 16, 3)), tf.float32), rng.integers(0, 10, n)


@pytest.mark.parametrize("way", ["eager", "graph"])
def test_what_flows_back_is_exact_and_weights_have_small_errors(way):
    model, (x, y) = network(), data()
    step = tf.function(gradients) if way == "graph" else gradients
    plain = step(model, x, y)
    with compress_activations(model, bits=8) as compressed:
        assert len(compressed.wrapped) == 6
        found = (tf.function(gradients) if way == "graph" else gradients)(model, x, y)
    for got, expected in zip(found, plain, strict=True):
        scale = float(tf.reduce_max(tf.abs(expected)))
        off = float(tf.reduce_max(tf.abs(got - expected)))
        # Gradients of the input and of biases do not depend on what was kept of the inputs; those
        # of weights are off by steps of 1/255 of a group's range.
        kernel = got.shape.rank > 1 and got.shape != x.shape
        assert off <= 0.02 * scale if kernel else off <= 1e-6 * scale
        assert off > 0 or not kernel
    again = (tf.function(gradients) if way == "graph" else gradients)(model, x, y)
    assert all(map(np.array_equal, again, plain)), "closed, it is as it was"


@pytest.mark.parametrize(
    ("settings", "fits"),
    [
        ({"pool_size": 2}, True),
        ({"pool_size": (1, 2)}, True),
        ({"pool_size": 3, "strides": 3}, True),
        ({"pool_size": 5}, False),  # 25 places
        ({"pool_size": 3, "strides": 2}, False),
        ({"pool_size": 2, "padding": "same"}, False),
    ],
)
def test_gradients_go_to_the_places_that_pooling_took(settings, fits):
    """Bit-equal to TensorFlow's, ties included: of equal ones the first."""
    layer = keras.layers.MaxPooling2D(**settings)
    model = keras.Sequential([keras.Input((11, 16, 5)), layer, keras.layers.ReLU()])
    rng = np.random.default_rng(0)
    x = tf.constant(rng.integers(-2, 3, (7, 11, 16, 5)), tf.float32)
    weight = tf.constant(rng.standard_normal(model(x).shape), tf.float32)

    def gradient():
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(weight * model(x))
        return tape.gradient(loss, x)

    plain = gradient()
    with compress_activations(model) as compressed:
        assert len(compressed.wrapped) == 1 + fits
        found = gradient()
    assert np.array_equal(found, plain)


def test_error_of_a_dense_layers_gradient_is_the_predicted_one():
    """Within 10 %: 40 steps of 96 x 48 entries."""
    rng = np.random.default_rng(0)
    x = tf.constant(np.maximum(rng.standard_normal((256, 96)), 0), tf.float32)
    dy = tf.constant(rng.laplace(size=(256, 48)), tf.float32)
    model = keras.Sequential([keras.Input((96,)), keras.layers.Dense(48)])

    def gradient():
        with tf.GradientTape() as tape:
            y = model(x)
        return tape.gradient(y, model.trainable_variables[0], output_gradients=dy).numpy()

    exact = gradient()
    kept = sn_compress.codec("bounded", bound=float("inf"), bits=2).quantise(x.numpy().reshape(-1))
    with compress_activations(model, bits=2):
        errors = np.stack([gradient() - exact for _ in range(40)])
    energy = float(tf.reduce_sum(tf.square(dy)))
    sd = gradient_sd(kept.variance(256 * 96), energy, outputs=48)
    assert errors.std() == pytest.approx(sd, rel=0.1)
    # Unbiased: six deviations of the mean, of repeats that are independent.
    along = (errors * rng.standard_normal(exact.shape)).sum((1, 2))
    assert abs(along.mean()) < 6 * along.std(ddof=1) / np.sqrt(40)


def test_memory_of_a_traced_step_really_falls():
    """Of a step's peak, nearly all of what is saved for the backward pass."""
    if not has_statistics("CPU:0"):
        pytest.skip("TensorFlow's allocator keeps no statistics here")
    model = keras.Sequential(
        [keras.Input((256,)), *(keras.layers.Dense(256, activation="relu") for _ in range(10))]
    )
    x = tf.random.stateless_normal((2048, 256), (1, 2))

    def peak():
        @tf.function
        def step(x):
            with tf.GradientTape() as tape:
                y = tf.reduce_sum(tf.square(model(x)))
            return tape.gradient(y, model.trainable_variables)

        step(x)
        with Allocations() as found:
            step(x)
        return found.peak_bytes

    plain = peak()
    with compress_activations(model, bits=2):
        compressed = min(peak() for _ in range(3))
    # Nine inputs of 2 MiB, which are the ReLUs' outputs as well, become a tenth of that. Threads
    # run ops in an order of their own: one tensor of 2 MiB more or less is there at the peak.
    assert plain - compressed >= (9 * 0.9 - 1.5) * 2**21


def test_it_trains_under_fit_and_takes_half_precision():
    x, y = data(128)
    model = network()
    with compress_activations(model, bits=4):
        model.compile(
            keras.optimizers.SGD(0.01),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=False,
        )
        losses = model.fit(x, y, epochs=4, batch_size=32, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    half = keras.Sequential([keras.Input((96,)), keras.layers.Dense(48, dtype="bfloat16")])
    with compress_activations(half, bits=8), tf.GradientTape() as tape:
        y = half(tf.ones((64, 96), tf.bfloat16))
    assert tape.gradient(y, half.trainable_variables)[0].shape == (96, 48)


def test_a_model_without_such_layers_is_refused():
    model = keras.Sequential([keras.Input((4,)), keras.layers.LayerNormalization()])
    with pytest.raises(ValueError, match="nothing to compress"):
        compress_activations(model)
    with pytest.raises(ValueError, match="bits=3"):
        compress_activations(network(), bits=3)
