"""The last product and its loss in chunks, in TensorFlow: the same numbers, fewer bytes."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from sn_memory import BudgetError
from sn_memory.graph.liveness import peak
from sn_memory.tensorflow import chunked_cross_entropy, plan_step, trace

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


@pytest.mark.parametrize(
    ("chunks", "ignored", "reduction"),
    [(1, None, "mean"), (3, 3, "sum"), (64, 3, "mean"), (3, None, "sum")],
)
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


def test_without_rows_the_sum_is_zero():
    hidden, kernel = tf.ones((0, HIDDEN)), tf.ones((HIDDEN, VOCABULARY))
    with tf.GradientTape() as tape:
        tape.watch(kernel)
        loss = chunked_cross_entropy(hidden, kernel, tf.ones((0,), tf.int32), reduction="sum")
    assert float(loss) == 0
    assert not np.any(tape.gradient(loss, kernel))


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
    tokens = keras.Input((32,), dtype="int32")
    hidden = keras.layers.Embedding(VOCABULARY, HIDDEN)(tokens)
    body = keras.Model(tokens, keras.layers.Dense(HIDDEN, "gelu")(hidden))
    head = keras.layers.Dense(VOCABULARY)
    head.build((None, 32, HIDDEN))
    return body, head, tf.random.uniform((4, 32), 0, VOCABULARY, tf.int32)


def chunked(body, head, tokens):
    hidden = body(tokens, training=True)
    return chunked_cross_entropy(hidden, head.kernel, tokens, bias=head.bias, chunks=8)


def whole(body, head, tokens):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return loss(tokens, head(body(tokens, training=True)))


def step(loss_of, body, head):
    variables = [*body.trainable_variables, *head.trainable_variables]

    @tf.function
    def run(tokens):
        with tf.GradientTape() as tape:
            loss = loss_of(body, head, tokens)
        for variable, slope in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.1 * tf.convert_to_tensor(slope))
        return loss

    return run


def test_a_step_of_it_is_planned_and_holds_less_than_a_plan_of_the_whole_loss():
    body, head, tokens = language()
    least = {}
    for loss_of in (whole, chunked):
        with pytest.raises(BudgetError) as error:
            plan_step(step(loss_of, body, head), tokens, 1000, profile=False, time_limit_s=2.0)
        least[loss_of] = error.value.peak_bytes
    assert least[chunked] < 0.6 * least[whole]
    run = step(chunked, body, head)
    planned = plan_step(run, tokens, "100%", profile=False, planner="sqrt_n")
    losses = [float(planned(tokens)) for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]


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
