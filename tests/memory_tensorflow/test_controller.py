"""Bits that a controller chooses under Keras: from an error, or from a budget, while it trains."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_samples import normal

from sn_memory.tensorflow import compress_activations


def network():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((12, 12, 4)),
            keras.layers.Conv2D(8, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(8, 3, strides=2, padding="same"),
            keras.layers.Flatten(),
            keras.layers.Dense(24, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def data(n=128):
    labels = np.random.default_rng(0).integers(0, 10, n)
    return normal(n, 12, 12, 4), tf.constant(labels)


def step_of(model):
    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
            loss = tf.reduce_mean(loss)
        return tape.gradient(loss, [it.value for it in model.trainable_variables])

    return step


def slope(model, x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(x))
    tape.gradient(loss, model.trainable_variables)


def kernels(found):
    return [it.numpy() for it in found if it.shape.rank > 1]


def test_predicted_errors_are_those_measured():
    """Within 10 %: 60 steps of 288 entries and more, at 2 bits."""
    model, (x, y), rng = network(), data(), np.random.default_rng(0)
    exact = kernels(step_of(model)(x, y))
    with compress_activations(model, bits=2, every=1) as compressed:
        step = step_of(model)
        found = [kernels(step(x, y)) for _ in range(60)]
        compressed.refresh()
    rows = [row for row in compressed.controller.rows() if row.n > 1024]
    assert [row.key for row in rows] == [layer.path for layer in model.layers if layer.weights]
    for place, row in enumerate(rows):
        off = np.stack([it[place] - exact[place] for it in found])
        # The last layer's input varies with what came before it: nothing, as forward is exact.
        assert off.std() == pytest.approx(row.predicted_sd(), rel=0.1), row.key
        # Unbiased: six deviations of the mean, of repeats that are independent.
        along = (off * rng.standard_normal(exact[place].shape)).reshape(60, -1).sum(1)
        assert abs(along.mean()) < 6 * along.std(ddof=1) / np.sqrt(60), row.key
    assert "conv2d" in compressed.report()


def test_a_kernel_under_lora_is_no_variable_with_a_momentum():
    """`Dense.kernel` is a sum of tensors then, of which an optimizer knows nothing."""
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64)])
    model.layers[0].enable_lora(4)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    with compress_activations(model, error=0.1, optimizer=optimizer, every=1) as compressed:
        model.compile(optimizer, "mse", jit_compile=False)
        model.fit(normal(96, 64), normal(96, 64), batch_size=32, verbose=0)
        compressed.refresh()
    (row,) = compressed.controller.rows()
    assert row.yardstick > 0


@pytest.mark.parametrize("way", ["fit", "function"])
def test_bits_follow_the_error_without_a_new_trace(way):
    model, (x, y) = network(), data()
    seen, middle = [], 0.0
    for error in (1e-4, None, 1e3):
        error = error or middle
        with compress_activations(model, error=error, every=2) as compressed:
            if way == "fit":
                loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
                model.compile(keras.optimizers.SGD(0.01), loss, jit_compile=False)
                model.fit(x, y, batch_size=64, epochs=2, verbose=0)
            else:
                step = step_of(model)
                for _ in range(4):
                    step(x, y)
                assert step.experimental_get_tracing_count() == 1
        rows = compressed.controller.rows()
        middle = float(np.median([row.predicted_sd(4) / row.yardstick for row in rows]))
        seen.append([compressed.controller.bits(row.key) for row in rows])
        for row, bits in zip(rows, seen[-1], strict=True):
            assert bits == 8 or row.predicted_sd(bits) <= error * row.yardstick
    assert seen[0] == [8] * 4
    assert seen[2] == [1] * 4
    assert len(set(seen[1])) > 1


def test_a_budget_is_kept():
    model, (x, y) = network(), data()
    with compress_activations(model, bits=8) as compressed:
        step_of(model)(x, y)
    eight = compressed.controller.total_bytes
    with compress_activations(model, budget=eight // 2, every=1) as compressed:
        step = step_of(model)
        step(x, y)
        step(x, y)
    assert compressed.controller.total_bytes <= eight // 2
    assert len({compressed.controller.bits(row.key) for row in compressed.controller.rows()}) > 1
    with compress_activations(model, budget=1000, every=1):
        step = step_of(model)
        step(x, y)
        with pytest.raises(tf.errors.UnknownError, match="Raise the budget"):
            step(x, y)


@pytest.mark.parametrize("built", [True, False])
def test_each_layer_counts(built):
    """Layers without weights have no path in Keras, and none has one before it is built."""
    relu, pool = keras.layers.ReLU, keras.layers.MaxPooling2D
    layers = [
        keras.layers.Conv2D(8, 3, padding="same"), relu(), pool(),
        keras.layers.Conv2D(12, 3, padding="same"), relu(), pool(),
    ]  # fmt: skip
    model = keras.Sequential(([keras.Input((12, 12, 4))] if built else []) + layers)
    x = tf.random.normal((64, 12, 12, 4))
    with compress_activations(model, bits=8, every=1) as compressed:
        assert len(set(compressed.wrapped)) == len(compressed.wrapped) == 6
        slope(model, x)
        compressed.refresh()
    controller = compressed.controller
    rows = controller.rows()
    assert [row.n for row in rows] == [64 * 144 * 4, 64 * 36 * 8]
    assert all(row.gradient_energy > 0 for row in rows)
    assert len({row.key for row in rows}) == 2
    # A bit for each element of a ReLU, two for each window of four; inputs besides.
    signs, places = 64 * (144 * 8 + 36 * 12) / 8, 64 * (36 * 8 + 9 * 12) / 4
    inputs = sum(row.n * (1 + 6 / 256) for row in rows)
    # Signs and places are kept in whole bytes.
    assert controller.total_bytes == pytest.approx(signs + places + inputs, abs=8)


def test_what_was_kept_exactly_counts_no_longer():
    """One bit has no place for zeros between both signs: most escape, and two bits come next."""
    model = keras.Sequential([keras.Input((63,)), keras.layers.Dense(4)])
    x = tf.tile(tf.constant([[-1.0, 0.0, 1.0]]), (32, 21))
    n, counted = 32 * 63, []
    with compress_activations(model, bits=1, every=1) as compressed:
        for _ in range(3):
            slope(model, x)
            counted.append(compressed.controller.total_bytes)
    # At the bits that are chosen: after the first step those of the second.
    assert counted == [pytest.approx(n * (2 / 8 + 6 / 256), abs=1)] * 3
    (row,) = compressed.controller.rows()
    assert (row.n, row.bits, row.overflows) == (n, 2, 1)


@pytest.mark.parametrize("kind", ["sgd", "adam", "plain"])
def test_the_yardstick_is_the_momentum(kind):
    model, (x, y) = network(), data()
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9 if kind == "sgd" else 0.0)
    if kind == "adam":
        optimizer = keras.optimizers.Adam(0.01)
    kernel = model.layers[0].kernel
    with compress_activations(model, bits=8, every=1, optimizer=optimizer) as compressed:
        step = step_of(model)
        optimizer.apply(step(x, y), model.trainable_variables)
        gradient = kernels(step(x, y))[0]
        compressed.refresh()
    row = next(row for row in compressed.controller.rows() if row.key == model.layers[0].path)
    place = optimizer._get_variable_index(kernel)
    if kind == "sgd":
        expected = np.abs(optimizer.momentums[place].numpy()).mean()
    elif kind == "adam":
        # After one step m / sqrt(v) is 0.1 / sqrt(0.001) wherever there was a gradient.
        v = optimizer._velocities[place].numpy()
        expected = 0.1 / np.sqrt(0.001) * np.sqrt(v.mean())
    else:
        expected = np.abs(gradient).mean()
    assert row.yardstick == pytest.approx(expected, rel=1e-3)
