"""Gradients of gradients: right by layers, right or one clear error by graph."""

import keras
import pytest
import tensorflow as tf
from keras_samples import assert_close, dense, normal, values

import sn_memory.tensorflow as rim
from sn_memory.tensorflow.modules.rerun import Section, chains_of

WIDTH = 64


def rows():
    return normal(1024, WIDTH)


def made():
    return dense(WIDTH, 3, "tanh", keras.layers.Dense(1))


def in_sections(*cut):
    model = made()
    planned = rim.plan(model, rows(), "1GiB", backend="layers")
    (chain,) = chains_of(model)
    planned.sn_memory.layers.sections = tuple(Section(chain, chain.items[a:b]) for a, b in cut)
    return planned


def penalized(model, *, by):
    """Gradients of a loss that has the norm of a gradient in it: by the input, or by weights."""

    @tf.function(autograph=False)
    def step(x):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                if by == "input":
                    inner.watch(x)
                y = model(x, training=True)
                first = tf.reduce_mean(y**2)
            sources = [x] if by == "input" else model.trainable_variables
            found = inner.gradient(first, sources)
            loss = first + tf.add_n([tf.reduce_sum(it**2) for it in found])
        return outer.gradient(loss, model.trainable_variables)

    return values(step(rows()))


@pytest.mark.parametrize(
    ("by", "cut"), [("input", [(0, 2), (2, 4)]), ("weights", [(0, 1)]), ("weights", [(0, 4)])]
)
def test_by_layers(by, cut):
    """The second run took weights from reads that the outer tape had not seen."""
    assert_close(penalized(in_sections(*cut), by=by), penalized(made(), by=by))


def test_by_graph():
    planned = rim.plan(made(), rows(), "100%", backend="graph", profile=False)
    with pytest.raises(rim.TraceError, match="gradients of gradients"):
        penalized(planned, by="weights")
    planned = rim.plan(made(), rows(), "100%", backend="graph", profile=False)
    with pytest.warns(rim.PlanWarning, match="gradient of its input"):
        assert_close(penalized(planned, by="input"), penalized(made(), by="input"))


def test_a_tape_around_that_asks_for_no_second_derivative():
    """One error only where one is asked for: a gradient may be taken inside of another tape."""
    planned = rim.plan(made(), rows(), "100%", backend="graph", profile=False)

    @tf.function(autograph=False)
    def step(x):
        factor = tf.constant(2.0)
        with tf.GradientTape() as outer:
            outer.watch(factor)
            with tf.GradientTape() as inner:
                loss = tf.reduce_mean(planned(x, training=True) ** 2)
            found = inner.gradient(loss, planned.trainable_variables)
            whole = factor**2
        return found, outer.gradient(whole, factor)

    found, slope = step(rows())
    assert float(slope) == 4.0
    assert all(it is not None for it in found)


def taken_twice(model, *, tapes):
    """Gradients of two losses of one forward pass, by a persistent tape or one tape for each."""
    whole = model.trainable_variables

    @tf.function(autograph=False)
    def step(x):
        with tf.GradientTape(persistent=tapes == 1) as one, tf.GradientTape() as other:
            y = model(x, training=True)
            first, second = tf.reduce_mean(y**2), tf.reduce_mean(tf.abs(y))
        twice = one if tapes == 1 else other
        return one.gradient(first, whole[:2]) + twice.gradient(second, whole[2:])

    return values(step(rows()))


@pytest.mark.parametrize("tapes", [1, 2])
def test_two_gradients_of_one_forward_pass(tapes):
    """As a GAN takes them in the tutorials; by graph it was an error of ours about a tensor."""
    planned = rim.plan(made(), rows(), "100%", backend="graph", profile=False)
    with pytest.raises(rim.TraceError, match="second gradient"):
        taken_twice(planned, tapes=tapes)
    expected = taken_twice(made(), tapes=tapes)
    assert_close(taken_twice(in_sections((0, 4)), tapes=tapes), expected)
