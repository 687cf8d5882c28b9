"""Mixed precision in every form: planned training equals plain training, bit for bit."""

import contextlib
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend import AutocastScope  # has no public name
from keras_samples import assert_equal, dense, normal, peak_of, step_of, values

import sn_memory.tensorflow as rim

ROWS, WIDTH = 2048, 256
# By layers, only sections whole are rebuilt.
BUDGETS = {"graph": "85%", "layers": "95%"}
AVX512 = "avx512" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
SLOW = pytest.mark.slow


@pytest.fixture(autouse=True)
def _policy():
    before = keras.config.dtype_policy()
    yield
    keras.config.set_dtype_policy(before)


def network(policy):
    """A model whose products have no bias: TensorFlow merges these with products as it likes."""
    keras.utils.set_random_seed(1)
    if policy.startswith("global"):
        keras.mixed_precision.set_global_policy(f"mixed_{policy.split()[1]}")
    own = {"layers": "mixed_bfloat16", "loss scale": "mixed_float16"}.get(policy)
    blocks = [
        keras.layers.Dense(WIDTH, "tanh", use_bias=False, dtype=own if at % 3 else None)
        for at in range(16 if policy == "model" else 8)
    ]
    if policy != "model":
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
    return normal(ROWS, WIDTH)


def trained(model, policy):
    """Weights after two steps in a tf.function, the update inside."""
    optimizer = keras.optimizers.SGD(0.5, momentum=0.9)
    if policy in ("loss scale", "global float16"):
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**10)
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(x):
        scope = AutocastScope("bfloat16") if policy == "scope" else contextlib.nullcontext()
        with tf.GradientTape() as tape, scope:
            loss = optimizer.scale_loss(tf.reduce_sum(tf.cast(model(x, training=True), x.dtype)))
        gradients = tape.gradient(loss, model.trainable_variables)
        assert all(it is not None for it in gradients)
        optimizer.apply(gradients, model.trainable_variables)

    for _ in range(2):
        step(rows())
    return values(model.trainable_variables)


@pytest.mark.parametrize(
    ("policy", "backend"),
    [
        ("global bfloat16", "graph"),
        ("global bfloat16", "layers"),
        pytest.param("global float16", "graph", marks=SLOW),
        pytest.param("layers", "layers", marks=SLOW),
        pytest.param("model", "graph", marks=SLOW),
        pytest.param("model", "layers", marks=SLOW),
        pytest.param("scope", "graph", marks=SLOW),
        pytest.param("scope", "layers", marks=SLOW),
        pytest.param("loss scale", "graph", marks=SLOW),
    ],
)
def test_trains_as_without_a_plan(policy, backend):
    planned = planned_by(backend, network(policy))
    assert planned.sn_memory.plan.decided("recompute")
    plain = trained(network(policy), policy)
    assert {it.dtype for it in plain} == {np.dtype("float32")}
    assert_equal(trained(planned, policy), plain)


@pytest.mark.skipif(not AVX512, reason="without it, products in bfloat16 copy into float32")
@pytest.mark.parametrize("policy", ["global bfloat16", "model"])
def test_estimate_is_what_is_held(policy):
    model = network(policy)
    estimate = rim.estimate(model, tf.TensorSpec((ROWS, WIDTH)))
    step = step_of(model, lambda out: tf.reduce_sum(tf.cast(out, "float32")))
    resident = estimate.parameters_bytes + estimate.buffers_bytes + estimate.inputs_bytes
    assert peak_of(step, rows()) == pytest.approx(estimate.peak_bytes - resident, rel=0.15)


def test_fit_scales_the_loss_as_without_a_plan():
    """Keras wraps the optimizer in `compile` by itself, where the model's policy is float16."""
    states = []
    for planned in (False, True):
        model = network("global float16")
        if planned:
            model = planned_by("graph", model)
        model.compile("sgd", "mse", jit_compile=False)
        assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        model.fit(rows(), rows(), batch_size=ROWS, epochs=2, verbose=0)
        states.append(values(model.trainable_variables))
    assert_equal(*states)


@pytest.mark.parametrize(("kind", "everywhere"), [("bfloat16", True), ("float16", False)])
def test_the_loss_in_chunks_is_that_of_float32_logits(kind, everywhere):
    policy = f"mixed_{kind}"
    if everywhere:
        keras.mixed_precision.set_global_policy(policy)
    # No bias: TensorFlow adds up its gradient in bfloat16, where one row is soon rounding.
    last = keras.layers.Dense(500, use_bias=False, dtype=policy)
    model = dense(64, 1, "tanh", last, inputs=8, dtype=policy)
    x = normal(512, 8)
    labels = tf.random.stateless_uniform((512,), (1, 2), 0, 500, tf.int32)
    plain = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def gradients(loss_of):
        with tf.GradientTape() as tape:
            loss = loss_of()
            scaled = 2.0**15 * loss
        found = tape.gradient(scaled, model.trainable_variables)
        return float(loss), values(found)

    body, kernel = keras.Model(model.inputs, model.layers[-1].input), model.layers[-1].kernel

    def chunked():
        return rim.chunked_cross_entropy(body(x, training=True), kernel, labels, chunks=8)

    expected, right = gradients(lambda: plain(labels, model(x, training=True)))
    got, ours = gradients(chunked)
    assert got == pytest.approx(expected, rel=1e-6)
    for one, other in zip(right, ours, strict=True):
        # The types' own rounding, in sums of 512 rows.
        assert np.abs(one - other).max() <= 4 * 2**-8 * np.abs(one).max()
