"""Small Keras models, steps and comparisons that these tests share."""

import keras
import numpy as np
import tensorflow as tf

import sn_memory.tensorflow as rim


def dense(width, depth, activation="gelu", *last, inputs=None, **settings):
    """`depth` dense layers of one width, and what comes after them; the same weights each time."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(width, activation, **settings) for _ in range(depth)]
    return keras.Sequential([keras.Input((inputs or width,)), *layers, *last])


def normal(*shape, seed=2):
    return tf.random.stateless_normal(shape, (1, seed))


def squares(out):
    return tf.reduce_sum(out**2)


def step_of(model, loss_of=squares):
    """A step of a user's own, for each shape anew: its loss and gradients."""

    @tf.function(autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            loss = loss_of(model(x, training=True))
        return loss, tape.gradient(loss, model.trainable_variables)

    return step


def peak_of(step, *args):
    """What a step holds at its peak, once it is traced."""
    step(*args)
    with rim.Allocations() as allocations:
        step(*args)
    return allocations.peak_bytes


def values(variables):
    return [it.numpy() for it in variables]


def assert_equal(got, expected):
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def assert_close(got, expected, rtol=1e-5):
    """Each tensor within `rtol` of its largest element."""
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=rtol * np.abs(other).max())
