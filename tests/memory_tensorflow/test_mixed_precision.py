"""Mixed precision by every door: planned training equals plain training, bit for bit."""

import contextlib
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend import AutocastScope  # has no public name

import sn_memory.tensorflow as rim

ROWS, WIDTH = 2048, 256
# By layers, only sections whole are rebuilt.
BUDGETS = {"graph": "85%", "layers": "95%"}
AVX512 = "avx512" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
DOORS = ("global bfloat16", "global float16", "layers", "model", "scope", "loss scale")


@pytest.fixture(autouse=True)
def _policy():
    before = keras.config.dtype_policy()
    yield
    keras.config.set_dtype_policy(before)


def made(door):
    """A model whose products have no bias: TensorFlow merges these with products as it likes."""
    keras.utils.set_random_seed(1)
    if door.startswith("global"):
        keras.mixed_precision.set_global_policy(f"mixed_{door.split()[1]}")
    policy = {"layers": "mixed_bfloat16", "loss scale": "mixed_float16"}.get(door)
    blocks = [
        keras.layers.Dense(WIDTH, "tanh", use_bias=False, dtype=policy if at % 3 else None)
        for at in range(16 if door == "model" else 8)
    ]
    if door != "model":
        return keras.Sequential([keras.Input((WIDTH,)), *blocks])

    class Parts(keras.Model):
        def __init__(self):
            super().__init__(dtype="mixed_bfloat16")
            # More than two: ops of one step run side by side, as the machine has time for them,
            # and what a few of them hold at once then stays well within what a section frees.
            self.parts = [keras.Sequential(blocks[at : at + 4]) for at in range(0, len(blocks), 4)]

        def call(self, x):
            for part in self.parts:
                x = part(x)
            return x

    model = Parts()
    model(tf.zeros((1, WIDTH)))
    return model


def planned_by(backend, model):
    # Timed, as products of float16 ask for room inside, where the processor has none of its own.
    return rim.plan(model, rows(), BUDGETS[backend], backend=backend)


def rows():
    return tf.random.stateless_normal((ROWS, WIDTH), (1, 2))


def trained(model, door):
    """Weights after two steps in a tf.function, the update inside."""
    optimizer = keras.optimizers.SGD(0.5, momentum=0.9)
    if door in ("loss scale", "global float16"):
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**10)
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(x):
        scope = AutocastScope("bfloat16") if door == "scope" else contextlib.nullcontext()
        with tf.GradientTape() as tape, scope:
            loss = optimizer.scale_loss(tf.reduce_sum(tf.cast(model(x, training=True), x.dtype)))
        gradients = tape.gradient(loss, model.trainable_variables)
        assert all(it is not None for it in gradients)
        optimizer.apply(gradients, model.trainable_variables)

    for _ in range(2):
        step(rows())
    return [it.numpy() for it in model.trainable_variables]


@pytest.mark.parametrize(
    ("door", "backend"),
    [
        (DOORS[0], "graph"),
        (DOORS[0], "layers"),
        *(
            pytest.param(it, ("graph", "layers")[at % 2], marks=pytest.mark.slow)
            for at, it in enumerate(DOORS[1:])
        ),
        pytest.param("scope", "graph", marks=pytest.mark.slow),
        pytest.param("model", "layers", marks=pytest.mark.slow),
    ],
)
def test_trains_as_without_a_plan(door, backend):
    planned = planned_by(backend, made(door))
    assert planned.sn_memory.plan.decided("recompute")
    for one, other in zip(trained(made(door), door), trained(planned, door), strict=True):
        assert one.dtype == np.float32
        np.testing.assert_array_equal(one, other)


@pytest.mark.skipif(not AVX512, reason="without it, products in bfloat16 copy into float32")
@pytest.mark.parametrize("door", ["global bfloat16", "layers", "model"])
def test_estimate_is_what_is_held(door):
    model = made(door)
    estimate = rim.estimate(model, tf.TensorSpec((ROWS, WIDTH)))

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.cast(model(x, training=True), "float32"))
        return tape.gradient(loss, model.trainable_variables)

    x = rows()
    step(x)
    with rim.Allocations() as found:
        step(x)
    resident = estimate.parameters_bytes + estimate.buffers_bytes + estimate.inputs_bytes
    assert found.peak_bytes == pytest.approx(estimate.peak_bytes - resident, rel=0.15)


def test_fit_scales_the_loss_as_without_a_plan():
    """Keras wraps the optimizer in `compile` by itself, where the model's policy is float16."""
    states = []
    for planned in (False, True):
        model = made("global float16")
        if planned:
            model = planned_by("graph", model)
        model.compile("sgd", "mse", jit_compile=False)
        assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        model.fit(rows(), rows(), batch_size=ROWS, epochs=2, verbose=0)
        states.append([it.numpy() for it in model.trainable_variables])
    for one, other in zip(*states, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("kind", "everywhere"), [("bfloat16", True), ("float16", False)])
def test_the_loss_in_chunks_is_that_of_float32_logits(kind, everywhere):
    policy = f"mixed_{kind}"
    if everywhere:
        keras.mixed_precision.set_global_policy(policy)
    keras.utils.set_random_seed(1)
    layers = [
        keras.layers.Dense(64, "tanh", dtype=policy),
        # No bias: TensorFlow adds up its gradient in bfloat16, where one row is soon rounding.
        keras.layers.Dense(500, use_bias=False, dtype=policy),
    ]
    model = keras.Sequential([keras.Input((8,)), *layers])
    x = tf.random.stateless_normal((512, 8), (1, 2))
    labels = tf.random.stateless_uniform((512,), (1, 2), 0, 500, tf.int32)
    plain = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def gradients(loss_of):
        with tf.GradientTape() as tape:
            loss = loss_of()
            scaled = 2.0**15 * loss
        found = tape.gradient(scaled, model.trainable_variables)
        return float(loss), [it.numpy() for it in found]

    body, kernel = keras.Model(model.inputs, model.layers[-1].input), model.layers[-1].kernel

    def chunked():
        return rim.chunked_cross_entropy(body(x, training=True), kernel, labels, chunks=8)

    expected, right = gradients(lambda: plain(labels, model(x, training=True)))
    got, ours = gradients(chunked)
    assert got == pytest.approx(expected, rel=1e-6)
    for one, other in zip(right, ours, strict=True):
        # The types' own rounding, in sums of 512 rows.
        assert np.abs(one - other).max() <= 4 * 2**-8 * np.abs(one).max()
