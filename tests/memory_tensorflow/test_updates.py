"""The optimizer's update in the same function, as in `fit`: every read of a rerun comes first.

A read that comes late takes weights that the step has updated already, and the gradients of all
layers before are off in proportion to the learning rate. So the rate is large here.
"""

import contextlib

import keras
import pytest
import tensorflow as tf
from keras_samples import assert_close, normal, step_of

import sn_memory.tensorflow as rim
from sn_memory.tensorflow.model import restore_model
from sn_memory.tensorflow.modules import rerun
from sn_memory.tensorflow.modules.backend import Probe
from sn_memory.tensorflow.modules.rerun import Section, chains_of

ROWS, WIDTH, RATE = 512, 128, 5.0
# A late read loses the race nearly always: of eight runs seven were wrong.
RUNS = 4


def rows():
    return normal(ROWS, WIDTH)


def made(outputs):
    """A residual block between layers, and one to three heads of different kinds.

    TensorFlow merges each product with its bias, and drops control edges of what it merges.
    """
    keras.utils.set_random_seed(1)
    start = keras.Input((WIDTH,))
    x = keras.layers.Dense(WIDTH, "gelu")(keras.layers.Dense(WIDTH, "gelu")(start))
    y = keras.layers.Dense(WIDTH, "relu")(keras.layers.Dense(WIDTH)(x))
    x = keras.layers.Add()([x, y])
    heads = [
        lambda: keras.layers.Dense(WIDTH, "gelu")(x),
        lambda: keras.layers.Dense(4)(x),
        lambda: keras.layers.LayerNormalization()(keras.layers.Dense(8)(y)),
    ]
    return keras.Model(start, {f"head {at}": head() for at, head in enumerate(heads[:outputs])})


def gradients(model, optimizer=None, runs=1):
    """Gradients of a step from the same weights, each time as often as `runs`."""
    optimizer = optimizer or keras.optimizers.SGD(RATE)
    optimizer.build(model.trainable_variables)
    before = [it.numpy() for it in model.trainable_variables]

    @tf.function(autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            outs = model(x, training=True)
            loss = tf.add_n([tf.reduce_mean(it**2) for it in outs.values()])
        found = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(found, model.trainable_variables)
        return found

    results = []
    for _ in range(runs):
        for variable, value in zip(model.trainable_variables, before, strict=True):
            variable.assign(value)
        results.append([it.numpy() for it in step(rows())])
    return results


def check(planned, right, optimizer=None):
    """The differences of merged ops in rounding are 1e-6; of a late read, 0.1 and more."""
    for found in gradients(planned, optimizer, RUNS):
        assert_close(found, right)


def in_section(model, begin, end):
    """A model planned by layers in which these items run again together, and nothing else."""
    planned = rim.plan(model, rows(), "1GiB", backend="layers")
    (chain,) = chains_of(model)
    planned.sn_memory.layers.sections = (Section(chain, chain.items[begin:end]),)
    return planned


@pytest.mark.slow
@pytest.mark.parametrize("outputs", [1, 3])
def test_sections_of_one_item_two_and_all_that_follow(outputs):
    (right,) = gradients(made(outputs))
    count = len(chains_of(made(outputs))[0].items)
    for begin in range(count):
        for end in {begin + 1, min(begin + 2, count), count}:
            check(in_section(made(outputs), begin, end), right)


@pytest.mark.slow
@pytest.mark.parametrize(("outputs", "budget"), [(1, "90%"), (2, "60%"), (3, "75%")])
def test_every_plan_by_graph(outputs, budget):
    (right,) = gradients(made(outputs))
    planned = rim.plan(made(outputs), rows(), budget, backend="graph", profile=False)
    check(planned, right)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Adam", "LossScaleOptimizer"])
def test_other_updates(kind):
    """Adam writes through slots; a scaled loss writes in a branch."""

    def optimizer():
        if kind == "Adam":
            return keras.optimizers.Adam(0.5)
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(RATE))

    (right,) = gradients(made(2), optimizer())
    count = len(chains_of(made(2))[0].items)
    by_graph = rim.plan(made(2), rows(), "75%", backend="graph", profile=False)
    for planned in (in_section(made(2), count - 2, count), by_graph):
        check(planned, right, optimizer())


@pytest.mark.slow
def test_verify_runs_a_whole_step(monkeypatch):
    """With reruns that read for themselves, as they did, it shows the difference."""
    count = len(chains_of(made(2))[0].items)
    planned = in_section(made(2), count - 2, count)
    assert rim.verify(planned, rows()).difference < 1e-5
    read = {}

    def late(_, variable):
        key = id(tf.compat.v1.get_default_graph()), id(variable)
        if key not in read:
            read[key] = variable.read_value()
        return read[key]

    monkeypatch.setattr(rerun._Reads, "value", late)
    monkeypatch.setattr(rerun, "_no_reads", contextlib.nullcontext)
    for _ in range(RUNS):
        read.clear()
        if rim.verify(planned, rows()).difference > 1e-3:
            return
    pytest.fail("verify sees no difference")


class Own(keras.layers.Layer):
    """Reads a variable so that Keras does not see it."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.inner = keras.layers.Dense(WIDTH, "gelu")
        self.factor = tf.Variable(2.0)

    def build(self, shape):
        self.inner.build(shape)

    @tf.function
    def traced(self, x):
        return self.inner(x)

    def call(self, x):
        return self.traced(x) if self.kind == "function" else self.inner(x) * self.factor


@pytest.mark.parametrize("kind", ["function", "variable"])
def test_what_reads_for_itself_is_not_run_again(kind):
    layers = [it for _ in range(3) for it in (keras.layers.Dense(WIDTH, "gelu"), Own(kind))]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers])
    model(rows())
    with restore_model(model):
        found = Probe(model, (rows(),), "CPU:0")
    (chain,) = found.chains[model]
    assert [found.behaviour[it].repeatable for it in chain.items] == [True, False] * 3
    planned = in_section(model, 1, 2)
    with pytest.raises(rim.TraceError, match=r"reads .* tf\.Variable"):
        step_of(planned)(rows())


def test_a_weight_that_two_sections_read():
    """Tied weights, read by a layer that does not own them, updated once both have run again."""

    class Tied(keras.layers.Layer):
        def __init__(self, other):
            super().__init__()
            self.reads = lambda: other.kernel

        def call(self, x):
            return tf.nn.gelu(tf.matmul(x, self.reads(), transpose_b=True))

    def tied():
        keras.utils.set_random_seed(1)
        start = keras.Input((WIDTH,))
        first = keras.layers.Dense(WIDTH, "gelu")
        x = keras.layers.Dense(WIDTH, "gelu")(first(start))
        return keras.Model(start, {"": Tied(first)(x)})

    (right,) = gradients(tied())
    for begin, end in ((0, 1), (2, 3), (0, 3), (1, 3)):
        check(in_section(tied(), begin, end), right)


class Looping(keras.layers.Layer):
    """A loop that reads a weight in its body, by the handle that it is given."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]))

    def call(self, x):
        def body(at, x):
            return at + 1, tf.tanh(tf.matmul(x, self.kernel))

        return tf.while_loop(lambda at, _: at < 3, body, (0, x), maximum_iterations=3)[1]


@pytest.mark.parametrize("backend", ["graph", pytest.param("layers", marks=pytest.mark.slow)])
def test_loops_that_read_weights(backend):
    def looping():
        keras.utils.set_random_seed(1)
        start = keras.Input((WIDTH,))
        x = keras.layers.Dense(WIDTH)(Looping()(keras.layers.Dense(WIDTH, "gelu")(start)))
        return keras.Model(start, {"a": Looping()(x), "b": keras.layers.Dense(4)(x)})

    (right,) = gradients(looping())
    if backend == "layers":
        count = len(chains_of(looping())[0].items)
        for begin in range(count):
            check(in_section(looping(), begin, count), right)
        return
    with pytest.warns(rim.PlanWarning, match="collect in lists"):
        planned = rim.plan(looping(), rows(), "100%", backend="graph", profile=False)
    graph = planned.sn_memory.trace.graph
    loops = [op for op in graph.ops if "while" in op.kind]
    assert loops
    assert all(op.effect for op in loops if op.phase == "forward")
    check(planned, right)
