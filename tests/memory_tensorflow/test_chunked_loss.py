"""The last product and its loss in chunks, in TensorFlow: the same numbers, fewer bytes."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from sn_memory.graph.liveness import peak
from sn_memory.tensorflow import (
    TraceError,
    chunk_loss,
    chunked_cross_entropy,
    plan_step,
    trace,
)

ROWS, HIDDEN, VOCABULARY = 50, 16, 400
# Sums of float32 in another order.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


def given():
    made = np.random.default_rng(0)
    hidden = tf.constant(made.normal(size=(2, ROWS // 2, HIDDEN)), tf.float32)
    kernel = tf.constant(made.normal(size=(HIDDEN, VOCABULARY)), tf.float32)
    bias = tf.constant(made.normal(size=VOCABULARY), tf.float32)
    labels = np.array(made.integers(0, VOCABULARY, (2, ROWS // 2)))
    labels[0, :5] = 3
    return hidden, kernel, bias, tf.constant(labels)


@pytest.mark.parametrize("chunks", [1, 3, 64])
@pytest.mark.parametrize("ignored", [None, 3])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_it_is_cross_entropy_of_the_product(chunks, ignored, reduction):
    hidden, kernel, bias, labels = given()
    found = []
    for chunked in (False, True):
        with tf.GradientTape() as tape:
            tape.watch([hidden, kernel, bias])
            if chunked:
                loss = chunked_cross_entropy(
                    hidden, kernel, labels, bias=bias, chunks=chunks, ignore_class=ignored,
                    reduction=reduction,
                )  # fmt: skip
            else:
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
                    labels, hidden @ kernel + bias
                )
                counted = (
                    tf.ones_like(losses)
                    if ignored is None
                    else tf.cast(labels != ignored, tf.float32)
                )
                loss = tf.reduce_sum(losses * counted)
                if reduction == "mean":
                    loss /= tf.reduce_sum(counted)
            loss = 0.7 * loss
        found.append([loss, *tape.gradient(loss, [hidden, kernel, bias])])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, **TOLERANCE)


def test_only_the_logits_of_a_chunk_are_held():
    hidden, kernel = tf.random.normal((256, 8)), tf.random.normal((8, 20000))
    labels = tf.random.uniform((256,), 0, 20000, tf.int32)

    def step(chunks):
        @tf.function
        def run(hidden, kernel):
            with tf.GradientTape() as tape:
                tape.watch([hidden, kernel])
                if chunks:
                    loss = chunked_cross_entropy(hidden, kernel, labels, chunks=chunks)
                else:
                    loss = tf.reduce_mean(
                        tf.nn.sparse_softmax_cross_entropy_with_logits(labels, hidden @ kernel)
                    )
            return tape.gradient(loss, [hidden, kernel])

        return peak(trace(run, (hidden, kernel), profile=False).graph).bytes

    assert step(16) < step(None) / 3


def language():
    model = keras.Sequential(
        [
            keras.Input((32,), dtype="int32"),
            keras.layers.Embedding(VOCABULARY, HIDDEN),
            keras.layers.Dense(HIDDEN, "gelu"),
            keras.layers.Dense(VOCABULARY),
        ]
    )
    return model, tf.random.uniform((4, 32), 0, VOCABULARY, tf.int32)


def test_a_keras_model_and_its_loss():
    model, tokens = language()
    plain = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    found = []
    for with_loss in (None, chunk_loss(model, 8)):
        with tf.GradientTape() as tape:
            loss = with_loss((tokens, tokens)) if with_loss else plain(tokens, model(tokens))
        found.append(
            [loss, *map(tf.convert_to_tensor, tape.gradient(loss, model.trainable_variables))]
        )
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, **TOLERANCE)


def test_a_step_of_it_is_planned():
    model, tokens = language()
    with_loss = chunk_loss(model, 8)

    @tf.function
    def step(tokens):
        with tf.GradientTape() as tape:
            loss = with_loss((tokens, tokens), training=True)
        for variable, slope in zip(
            model.trainable_variables, tape.gradient(loss, model.trainable_variables), strict=True
        ):
            variable.assign_sub(0.1 * tf.convert_to_tensor(slope))
        return loss

    planned = plan_step(step, tokens, "100%", profile=False, planner="sqrt_n")
    losses = [float(planned(tokens)) for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]


def test_what_ends_otherwise_is_refused():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(5, "softmax")])
    with pytest.raises(TraceError, match="expected logits"):
        chunk_loss(model, 4)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(5), keras.layers.Dropout(0.1)])
    with pytest.raises(TraceError, match="expected a Dense"):
        chunk_loss(model, 4)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"chunks": 0}, "got chunks 0"),
        ({"reduction": "none"}, "got reduction 'none'"),
        ({"kernel": tf.zeros((3, 5))}, "expected"),
        ({"labels": tf.zeros((3,), tf.int32)}, "as many labels as rows"),
    ],
)
def test_bad_input_is_refused(change, match):
    hidden, kernel, _, labels = given()
    with pytest.raises(ValueError, match=match):
        chunked_cross_entropy(**{"hidden": hidden, "kernel": kernel, "labels": labels, **change})
