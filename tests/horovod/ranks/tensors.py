"""What scripts of ranks of TensorFlow share: data, a step, and what all ranks have alike."""

import tempfile

import cases
import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from sn_compress.tensorflow.keras import DistributedOptimizer, memory_of
from sn_compress.tensorflow.tape import memory_of as memory_of_tape

SIDE = 48


def noise(*shape, seed=0):
    return np.random.default_rng([hvd.rank(), seed]).standard_normal(shape).astype(np.float32)


def mean_of(values):
    return np.mean(hvd.allgather_object(values), axis=0)


def variables_of(count=3, side=SIDE):
    rng = np.random.default_rng(0)
    return [
        tf.Variable(rng.standard_normal((side, side)).astype("f4") / side**0.5, name=f"w{i}")
        for i in range(count)
    ]


def step_of(variables, compression, **options):
    """A step of training in a tf.function, given inputs."""

    @tf.function
    def step(x):
        with hvd.DistributedGradientTape(
            tf.GradientTape(), compression=compression, **options
        ) as tape:
            y = x
            for variable in variables:
                y = tf.tanh(y @ variable)
            loss = tf.reduce_mean((y - 0.5) ** 2)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.5 * gradient)
        return loss

    return step


def means_of(variables, compression, *, graph=True, **options):
    """From what the variables' gradients are to be, one of each or one for all, to their means."""

    def step(*wanted):
        with hvd.DistributedGradientTape(
            tf.GradientTape(), compression=compression, **options
        ) as tape:
            every = wanted if len(wanted) > 1 else wanted * len(variables)
            pairs = zip(variables, every, strict=True)
            loss = tf.add_n([tf.reduce_sum(v * gradient) for v, gradient in pairs])
        return tape.gradient(loss, variables)

    return tf.function(step) if graph else step


def flat_of(variables):
    return tf.concat([tf.reshape(tf.cast(v, tf.float32), [-1]) for v in variables], 0)


def assert_equal_ranks(variables, **where):
    """Returns them as one vector."""
    every = hvd.allgather(flat_of(variables)[None], name="parameters", **where).numpy()
    assert np.isfinite(every).all()
    assert (every == every[:1]).all(), "ranks differ"
    return every[0]


def fitted(compression, steps, *, per_call=1, passes=1, layers=2):
    """The memory of an optimizer of Keras after so many steps; all ranks are alike."""
    keras.utils.set_random_seed(0)
    dense = [keras.layers.Dense(SIDE) for _ in range(layers)]
    model = keras.Sequential([keras.Input((SIDE,)), *dense])
    optimizer = DistributedOptimizer(
        keras.optimizers.SGD(0.5), compression=compression, backward_passes_per_step=passes
    )
    model.compile(optimizer, "mse", jit_compile=False, steps_per_execution=per_call)
    x = noise(8 * steps * passes, SIDE)
    model.fit(x, x, 8, verbose=0, shuffle=False)
    assert_equal_ranks(model.trainable_variables)
    memory = memory_of(optimizer)
    assert memory.report()["steps"] == steps, memory.report()
    return memory


def goes_on_where_it_was_saved(compression, before, after):
    """A report, a state or a checkpoint changes nothing, and what was saved goes on alike."""
    inputs = [tf.constant(noise(8, SIDE, seed=t)) for t in range(before + after)]
    own, variables = compression.using(), variables_of()
    step = step_of(variables, own)
    for x in inputs[:before]:
        step(x)
    saved = [v.numpy() for v in variables]
    with tempfile.TemporaryDirectory() as folder:
        memory = memory_of_tape(own)
        path = tf.train.Checkpoint(memory=memory).save(f"{folder}/rank{hvd.rank()}")
        again = compression.using()
        tf.train.Checkpoint(memory=memory_of_tape(again)).restore(path)
    traces = step.experimental_get_tracing_count()
    assert memory.residual("0:w0").any()
    for x in inputs[before:]:
        step(x)
    assert memory.report()["steps"] == before + after
    assert step.experimental_get_tracing_count() == traces, "asking was to trace nothing"
    whole = assert_equal_ranks(variables)
    resumed = [tf.Variable(value, name=f"w{i}") for i, value in enumerate(saved)]
    step = step_of(resumed, again)
    for x in inputs[before:]:
        step(x)
    assert np.array_equal(assert_equal_ranks(resumed), whole)
    # A concrete function of before would go on with memories that nobody has any more.
    held = step.get_concrete_function(inputs[0])
    memory_of_tape(again).synchronize()
    said = cases.message_of(lambda: held(inputs[0]), tf.errors.InvalidArgumentError)
    assert "this graph is out of date" in said, said
    step(inputs[0])
    assert_equal_ranks(resumed)
