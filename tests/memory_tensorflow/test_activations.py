"""Compressed activations under Keras: exact where they must be, predicted elsewhere, smaller."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_samples import dense, normal, peak_of, step_of

from sn_memory.tensorflow import compress_activations
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


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "graph"])
def test_what_flows_back_is_exact_and_weights_have_small_errors(traced):
    model, labels = network(), np.random.default_rng(0).integers(0, 10, 64)
    x = normal(64, 16, 16, 3)

    def step():
        return (tf.function(gradients) if traced else gradients)(model, x, labels)

    plain = step()
    with compress_activations(model, bits=8) as compressed:
        assert len(compressed.wrapped) == 6
        found = step()
    for got, expected in zip(found, plain, strict=True):
        scale = float(tf.reduce_max(tf.abs(expected)))
        off = float(tf.reduce_max(tf.abs(got - expected)))
        # Gradients of the input and of biases do not depend on what was kept of the inputs; those
        # of weights are off by steps of 1/255 of a group's range.
        kernel = got.shape.rank > 1 and got.shape != x.shape
        assert off <= 0.02 * scale if kernel else off <= 1e-6 * scale
        assert off > 0 or not kernel
    assert all(map(np.array_equal, step(), plain)), "closed, it is as it was"


# Of Keras, which reads HDF5.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_what_is_saved_or_cloned_meanwhile_has_its_activations(tmp_path):
    model, x = network(), normal(8, 16, 16, 3)
    with compress_activations(model):
        model.save(tmp_path / "model.keras")
        cloned = keras.models.clone_model(model)
    cloned.set_weights(model.get_weights())
    for other in (cloned, keras.models.load_model(tmp_path / "model.keras")):
        assert np.array_equal(other(x), model(x))


def test_xla_is_refused():
    model, x = network(), normal(8, 16, 16, 3)
    labels = np.zeros(8, np.int64)
    with compress_activations(model), pytest.raises(ValueError, match="jit_compile=False"):
        tf.function(gradients, jit_compile=True)(model, x, labels)


def test_an_activation_that_is_a_layer_is_put_back():
    bent = keras.layers.Dense(8, activation=keras.layers.LeakyReLU())
    model, x = keras.Sequential([keras.Input((32,)), bent]), normal(64, 32)
    plain = model(x)
    with compress_activations(model):
        assert np.array_equal(model(x), plain)
    assert np.array_equal(model(x), plain)


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


def test_memory_of_a_traced_step_really_falls():
    """Of a step's peak, nearly all of what is saved for the backward pass."""
    if not has_statistics("CPU:0"):
        pytest.skip("TensorFlow's allocator keeps no statistics here")
    model, x = dense(256, 10, "relu"), normal(2048, 256)
    plain = peak_of(step_of(model), x)
    with compress_activations(model, bits=2):
        compressed = min(peak_of(step_of(model), x) for _ in range(3))
    # Nine inputs of 2 MiB, which are the ReLUs' outputs as well, become a tenth of that. Threads
    # run ops in an order of their own: one tensor of 2 MiB more or less is there at the peak.
    assert plain - compressed >= (9 * 0.9 - 1.5) * 2**21


def norm():
    return keras.Sequential([keras.Input((64,)), keras.layers.LayerNormalization()])


@pytest.mark.parametrize(
    ("model", "settings", "error", "match"),
    [
        (norm, {}, ValueError, "nothing to compress"),
        (norm, {"bits": 4, "sample": tf.ones((64, 64))}, ValueError, "nothing to compress"),
        (network, {"bits": 3}, ValueError, "bits=3"),
        (network, {"bits": 4, "error": 0.1}, ValueError, "exactly one"),
        (
            network,
            {"bits": 4, "sample": tf.TensorSpec((16, 16, 16, 3))},
            TypeError,
            "TensorSpec",
        ),
    ],
)
def test_what_is_refused(model, settings, error, match):
    with pytest.raises(error, match=match):
        compress_activations(model(), **settings)
