"""A loss of some of the outputs leaves the variables of the others without a gradient.

With a plan they had zeros, so that an optimizer with moments or weight decay changed the head of a
task that was not trained in that step.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_samples import assert_close, normal, values

import sn_memory.tensorflow as rim
from sn_memory.tensorflow.model import uncast
from sn_memory.tensorflow.modules.rerun import run_again

SETTINGS = {"profile": False, "planner": "sqrt_n"}


class Heads(keras.layers.Layer):
    """A layer of two results, which by layers runs again as one."""

    def __init__(self):
        super().__init__()
        self.first, self.second = keras.layers.Dense(3), keras.layers.Dense(5, "tanh")

    def build(self, shape):
        self.first.build(shape)
        self.second.build(shape)

    def call(self, x):
        return self.first(x), self.second(x)

    def compute_output_shape(self, shape):
        return (*shape[:-1], 3), (*shape[:-1], 5)


def tasks(static):
    keras.utils.set_random_seed(0)
    x = keras.Input((8,), batch_size=16 if static else None)
    first, second = Heads()(keras.layers.Dense(8, "tanh")(keras.layers.Dense(64, "tanh")(x)))
    return keras.Model(x, {"first": first, "second": second})


LOSSES = {
    "first": lambda out: tf.reduce_sum(out["first"] ** 2),
    "second": lambda out: tf.reduce_sum(tf.sin(out["second"])),
    "both": lambda out: tf.reduce_sum(out["first"] ** 2) + tf.reduce_sum(tf.sin(out["second"])),
    # A gradient of zeros is one.
    "nothing of second": lambda out: (
        tf.reduce_sum(out["first"] ** 2) + 0.0 * tf.reduce_sum(out["second"])
    ),
}


def trained(model, x, order):
    """Return which gradients there were in each step, and the weights after them."""
    optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.1)
    optimizer.build(model.trainable_variables)
    had = []

    def step_of(task):
        @tf.function
        def step(x):
            with tf.GradientTape() as tape:
                loss = LOSSES[task](model(x, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            had.append([it is not None for it in gradients])
            pairs = zip(gradients, model.trainable_variables, strict=True)
            optimizer.apply_gradients([it for it in pairs if it[0] is not None])
            return loss

        return step

    steps = {task: step_of(task) for task in LOSSES}
    for task in order:
        steps[task](x)
    return had, values(model.trainable_variables)


@pytest.mark.parametrize(("backend", "static"), [("graph", False), ("layers", True)])
def test_optimizers_pass_over_what_has_no_gradient(backend, static):
    x = normal(16, 8)
    order = ("both", "first", "second", "first", "nothing of second")
    theirs = trained(tasks(static), x, order)
    assert not all(map(all, theirs[0]))
    mine = trained(rim.plan(tasks(static), x, "100%", backend=backend, **SETTINGS), x, order)
    assert mine[0] == theirs[0]
    for a, b in zip(mine[1], theirs[1], strict=True):
        assert np.allclose(a, b, rtol=1e-4, atol=1e-5)


class Learned(keras.Model):
    """A model that reads what Keras does not count among its variables."""

    def __init__(self, inner):
        super().__init__()
        self.layer, self.inner = keras.layers.Dense(64, "tanh"), (lambda x: inner(x))
        self.scale, self.unused = tf.Variable(1.5), tf.Variable(2.0)

    def call(self, x):
        return self.scale * self.inner(self.layer(x)) + tf.stop_gradient(self.unused)


@pytest.mark.parametrize("backend", ["graph", "layers"])
def test_variables_that_keras_does_not_know_have_their_gradients(backend):
    """With a plan of ops they had none."""
    inner = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, "tanh")])
    model = Learned(inner)
    x = normal(16, 8)
    model(x)
    sources = [*uncast([*model.trainable_variables, *inner.trainable_variables])]
    sources += [model.scale, model.unused]

    def gradients(model):
        @tf.function
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(x, training=True) ** 2)
            return tape.gradient(loss, sources)

        return step(x)

    theirs = gradients(model)
    mine = gradients(rim.plan(model, x, "100%", backend=backend, **SETTINGS))
    assert [it is None for it in mine] == [it is None for it in theirs] == [*[False] * 5, True]
    assert_close([it.numpy() for it in mine[:5]], [it.numpy() for it in theirs[:5]])


def test_a_layer_that_runs_again_leaves_them_out_as_well():
    heads = Heads()
    heads.build((16, 8))

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            first, _ = run_again(lambda given: list(heads(given[0])), [x], [])
            loss = tf.reduce_sum(first**2)
        had.append([it is not None for it in tape.gradient(loss, heads.trainable_variables)])
        return loss

    had = []
    step(normal(16, 8))
    assert had == [[True, True, False, False]]
