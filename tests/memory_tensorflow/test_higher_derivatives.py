"""Gradients of gradients: right by layers, right or one clear error by graph."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import sn_memory.tensorflow as rim
from sn_memory.tensorflow.modules.rerun import Section, chains_of

WIDTH = 64


def rows():
    return tf.random.stateless_normal((1024, WIDTH), (1, 2))


def made():
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(WIDTH, "tanh") for _ in range(3)]
    return keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(1)])


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

    return [it.numpy() for it in step(rows())]


def check(found, right):
    for one, other in zip(found, right, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(other).max())


@pytest.mark.parametrize(
    ("by", "cut"), [("input", [(0, 2), (2, 4)]), ("weights", [(0, 1)]), ("weights", [(0, 4)])]
)
def test_by_layers(by, cut):
    """The second run took weights from reads that the outer tape had not seen."""
    model = made()
    planned = rim.plan(model, rows(), "1GiB", backend="layers")
    (chain,) = chains_of(model)
    planned.sn_memory.layers.sections = tuple(Section(chain, chain.items[a:b]) for a, b in cut)
    check(penalized(planned, by=by), penalized(made(), by=by))


def test_by_graph():
    planned = rim.plan(made(), rows(), "100%", backend="graph", profile=False)
    with pytest.raises(rim.TraceError, match="gradients of gradients"):
        penalized(planned, by="weights")
    planned = rim.plan(made(), rows(), "100%", backend="graph", profile=False)
    with pytest.warns(rim.PlanWarning, match="gradient of its input"):
        check(penalized(planned, by="input"), penalized(made(), by="input"))


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

    return [it.numpy() for it in step(rows())]


@pytest.mark.parametrize("tapes", [1, 2])
def test_two_gradients_of_one_forward_pass(tapes):
    """As a GAN takes them in the tutorials; by graph it was an error of ours about a tensor."""
    planned = rim.plan(made(), rows(), "100%", backend="graph", profile=False)
    with pytest.raises(rim.TraceError, match="second gradient"):
        taken_twice(planned, tapes=tapes)
    model = made()
    planned = rim.plan(model, rows(), "1GiB", backend="layers")
    (chain,) = chains_of(model)
    planned.sn_memory.layers.sections = (Section(chain, chain.items[0:4]),)
    check(taken_twice(planned, tapes=tapes), taken_twice(made(), tapes=tapes))
