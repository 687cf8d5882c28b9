"""Steps with shapes that depend on values: counted as on the sample, run on whatever comes."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_samples import dense, normal

import sn_memory.tensorflow as rim

ROWS, WIDTH, CLASSES = 256, 64, 10


def body(*last):
    return dense(WIDTH, 4, "gelu", *last)


def masked_step(model):
    """A step whose loss is of some rows only, as of masked language models."""

    @tf.function
    def step(x, labels, mask):
        with tf.GradientTape() as tape:
            rows = tf.boolean_mask(model(x, training=True), mask)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
                tf.boolean_mask(labels, mask), rows
            )
            loss = tf.reduce_mean(losses)
        return loss, tape.gradient(loss, model.trainable_variables)

    return step


def rows(share):
    generator = np.random.default_rng(0)
    x = generator.standard_normal((ROWS, WIDTH)).astype(np.float32)
    labels = generator.integers(CLASSES, size=ROWS).astype(np.int32)
    return tuple(map(tf.constant, (x, labels, generator.random(ROWS) < share)))


class Experts(keras.layers.Layer):
    """The best of three experts for each row; an expert computes its own rows alone."""

    def __init__(self):
        super().__init__()
        self.route = keras.layers.Dense(3)
        self.experts = [keras.layers.Dense(WIDTH, "gelu") for _ in range(3)]

    def build(self, shape):
        for layer in (self.route, *self.experts):
            layer.build(shape)

    def call(self, x):
        weights = tf.nn.softmax(self.route(x))
        chosen, total = tf.argmax(weights, -1), tf.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = tf.where(chosen == number)
            result = expert(tf.gather_nd(x, rows)) * tf.gather_nd(weights[:, number, None], rows)
            total = tf.tensor_scatter_nd_add(total, rows, result)
        return x + total


def same(one, other):
    pairs = zip(tf.nest.flatten(one), tf.nest.flatten(other), strict=True)
    return all(np.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in pairs)


def test_a_loss_of_some_rows_is_planned_and_takes_any_number_of_rows():
    sample = rows(0.4)
    plain = masked_step(body(keras.layers.Dense(CLASSES)))
    planned = rim.plan_step(plain, sample, "75%", profile=False)
    captured = planned.sn_memory.trace.captured
    kept = int(tf.reduce_sum(tf.cast(sample[2], tf.int32)))
    assert (kept, CLASSES) in captured.shapes.values()
    assert planned.sn_memory.plan.decided("recompute")
    for share in (0.4, 0.0, 1.0):
        given = rows(share)
        # Of no rows the mean is NaN, in both.
        assert share == 0 or same(planned(*given), plain(*given))
    assert rim.verify(planned, sample).difference < 1e-5


def test_sizes_of_the_sample_count():
    model = body(keras.layers.Dense(CLASSES * 100))
    for share in (0.1, 0.9):
        graph = rim.trace(masked_step(model), rows(share), profile=False).graph
        masked = {
            it.bytes
            for it in graph.storages
            if "boolean_mask" in it.name and it.role == "activation"
        }
        assert int(np.sum(rows(share)[2])) * CLASSES * 100 * 4 in masked


def test_experts_in_a_loop_are_planned_by_their_ops():
    model = keras.Sequential([keras.Input((WIDTH,)), *[Experts() for _ in range(2)]])
    sample = rows(0)[0]
    planned = rim.plan(model, sample, "70%", profile=False)
    assert planned.sn_memory.backend == "graph"
    assert rim.verify(planned, sample).difference < 1e-5
    # Other routes than the sample's, one expert that gets nothing among them.
    assert rim.verify(planned, tf.ones((ROWS, WIDTH))).difference < 1e-5


def test_a_ctc_loss_is_planned():
    """Its scan is a `Defun`, which keeps no graph."""
    frames, labels, batch = 40, 8, 4
    layers = [*body().layers, keras.layers.Dense(12)]
    model = keras.Sequential([keras.Input((frames, WIDTH)), *layers])

    def step(x, targets):
        with tf.GradientTape() as tape:
            loss = tf.nn.ctc_loss(
                targets, model(x, training=True), tf.fill([batch], labels),
                tf.fill([batch], frames), logits_time_major=False, blank_index=0,
            )  # fmt: skip
            loss = tf.reduce_mean(loss)
        return loss, tape.gradient(loss, model.trainable_variables)

    x = normal(batch, frames, WIDTH)
    targets = tf.random.stateless_uniform((batch, labels), (2, 3), 1, 12, tf.int32)
    with pytest.warns(rim.PlanWarning, match="loops collect"):
        planned = rim.plan_step(step, (x, targets), "80%", profile=False)
    assert same(planned(x, targets), tf.function(step)(x, targets))


def test_without_values_or_with_wrong_ones_the_error_says_why():
    step = masked_step(body(keras.layers.Dense(CLASSES)))
    specs = tuple(tf.TensorSpec(it.shape, it.dtype) for it in rows(0.4))
    with pytest.raises(rim.TraceError, match=r"depends on values.*not a tf\.TensorSpec"):
        rim.trace(step, specs, profile=False)

    def step(x, at):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(tf.boolean_mask(tf.gather(x, at), x[:, 0] > 0))
        return tape.gradient(loss, x)

    with pytest.raises(rim.TraceError, match="did not run on the sample"):
        rim.trace(step, (tf.ones((4, WIDTH)), tf.fill([4], 9)), profile=False)
