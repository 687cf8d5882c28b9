"""Updates come as soon as what they read is there, and never before what must come first."""

import keras
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from keras_samples import assert_equal, values

import sn_memory.tensorflow as rim
from sn_memory.graph.liveness import peak
from sn_memory.tensorflow.trace import kernels
from sn_memory.tensorflow.trace.capture import capture_step, flat
from sn_memory.tensorflow.trace.to_graph import updates_first


def captured(step, *args):
    concrete, log = capture_step(step, args)
    return flat(concrete.graph, log)


def chain(weights, update):
    def step(x):
        with tf.GradientTape() as tape:
            h = x
            for weight in weights:
                h = tf.tanh(h @ weight)
            loss = tf.reduce_sum(h)
        update(tape.gradient(loss, weights), weights)
        return loss

    return step


def plain(gradients, weights):
    for gradient, weight in zip(gradients, weights, strict=True):
        weight.assign_sub(0.1 * gradient)


def clipped(gradients, weights):
    plain(tf.clip_by_global_norm(gradients, 1.0)[0], weights)


def matrices(count=6, side=64):
    return [tf.Variable(tf.eye(side)) for _ in range(count)]


def test_a_gradient_is_held_only_until_its_update():
    weights = matrices()
    x = tf.ones((8, 64))
    early, late = (
        rim.trace(chain(weights, update), x, profile=False).graph for update in (plain, clipped)
    )
    # Six gradients of 16 KiB; one at a time, or all, as the norm of all has to be known first.
    assert peak(early).bytes - early.base_bytes < 3 * 64 * 64 * 4
    assert peak(late).bytes - late.base_bytes >= 6 * 64 * 64 * 4


def test_what_changes_a_variable_stays_between_its_neighbours():
    weights = matrices(2)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.tanh(x @ weights[0]) @ weights[1])
        gradients = tape.gradient(loss, weights)
        before = tf.identity(weights[1] * 2.0)
        weights[1].assign_sub(gradients[1])
        after = weights[1] * 3.0
        weights[1].assign_add(before + after)
        return after

    x = tf.ones((8, 64))
    moved = updates_first(captured(step, x))
    changes = [at for at, node in enumerate(moved.nodes) if kernels.changes_variables(node.op)]
    types = [moved.nodes[at].op.type for at in changes]
    assert types == ["AssignSubVariableOp", "AssignAddVariableOp"]
    copies = [tf.Variable(it) for it in weights]
    expected = tf.function(step)(x)
    results = values(weights)
    for weight, copy in zip(weights, copies, strict=True):
        weight.assign(copy)
    got = rim.plan_step(step, x, "100%", profile=False)(x)
    assert_equal([got, *values(weights)], [expected, *results])


@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.sampled_from([16, 32, 48]), min_size=2, max_size=5),
    st.sampled_from(["sgd", "adam", "rmsprop"]),
    st.booleans(),
)
def test_every_op_comes_after_what_it_reads(widths, name, decay):
    sizes = [16, *widths]
    layers = [keras.layers.Dense(width, "relu") for width in sizes[1:]]
    model = keras.Sequential([keras.Input((16,)), *layers])
    optimizer = keras.optimizers.get(name)
    optimizer.weight_decay = 0.01 if decay else None
    optimizer.build(model.trainable_variables)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x, training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    before = captured(step, tf.ones((4, 16)))
    after = updates_first(before)
    assert sorted(it.name for it in after.nodes) == sorted(it.name for it in before.nodes)
    seen = set(before.arguments) | set(before.captures)
    for node in after.nodes:
        assert seen.issuperset(node.inputs), node.name
        seen.update(node.outputs)
    for handle in before.variables:
        # Reads and changes of a variable keep their order among each other.
        assert touching(after, handle) == touching(before, handle)


def touching(step, handle):
    """Names of changes of a variable, each with the reads before it as a set."""
    found, reads = [], set()
    for node in step.nodes:
        if handle in node.inputs:
            if kernels.has_effect(node.op):
                found.append((node.name, frozenset(reads)))
                reads = set()
            else:
                reads.add(node.name)
    return found, frozenset(reads)
