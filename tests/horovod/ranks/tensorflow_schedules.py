"""One rank: theta follows every kind of schedule in TensorFlow's tapes and in Keras's fit."""

import tempfile

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from schedule_kinds import KINDS, Watch, check

from sn_compress import FFTCompression
from sn_compress.tensorflow.graph_buckets import GatheredBucket
from sn_compress.tensorflow.keras import DistributedOptimizer, memory_of
from sn_compress.tensorflow.tape import memory_of as memory_of_tape

STEPS, HALF = 14, 7
WATCH = None
BUCKET_STEP = GatheredBucket.step


def watched_step(bucket, number, vectors, by, dropped=None):
    """A step of the nodes of a graph, which no codec sees, noted whenever it runs."""
    means, told = BUCKET_STEP(bucket, number, vectors, by, dropped)

    def note(told):
        WATCH.see(bucket.codec.theta)
        return np.int64(0)

    with tf.control_dependencies([tf.numpy_function(note, [told], tf.int64)]):
        return [tf.identity(mean) for mean in means], told


def noise(step, *shape):
    return np.random.default_rng([hvd.rank(), step]).standard_normal(shape).astype(np.float32)


def train(variables, fft, steps, graph):
    def step(x):
        with hvd.DistributedGradientTape(tf.GradientTape(), compression=fft) as tape:
            loss = tf.reduce_mean((tf.tanh(x @ variables[0]) @ variables[1]) ** 2)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.1 * gradient)

    run = tf.function(step) if graph else step
    for number in steps:
        run(tf.constant(noise(number, 8, 64)))
        WATCH.end_step()


def weights():
    rng = np.random.default_rng(0)
    shapes = ("first", (64, 48)), ("second", (48, 32))
    return [tf.Variable(rng.standard_normal(s).astype("f4") / 8, name=n) for n, s in shapes]


def tapes(kind):
    whole, fft = weights(), FFTCompression.using(theta=KINDS[kind])
    train(whole, fft, range(STEPS), graph=True)
    check(kind, hvd.allgather_object(WATCH.taken()))
    # The same in two halves; not in a tf.function, each step is traced anew: slow, and once enough.
    half, fft = weights(), FFTCompression.using(theta=KINDS[kind])
    train(half, fft, range(HALF), graph=True)
    again = FFTCompression.using(theta=KINDS[kind])
    with tempfile.TemporaryDirectory() as folder:
        path = tf.train.Checkpoint(memory=memory_of_tape(fft)).save(f"{folder}/rank{hvd.rank()}")
        restored = tf.train.Checkpoint(memory=memory_of_tape(again)).restore(path)
        restored.assert_existing_objects_matched()
    train(half, again, range(HALF, STEPS), graph=kind != "cosine")
    check(kind, hvd.allgather_object(WATCH.taken()))
    for a, b in zip(whole, half, strict=True):
        assert np.array_equal(a.numpy(), b.numpy()), f"{kind}: the resumed run differs"
    # A rank that comes anew is where the others are.
    late, fft = weights(), FFTCompression.using(theta=KINDS[kind])
    if hvd.rank() == 0:
        memory_of_tape(fft).load_state_dict(memory_of_tape(again).state_dict())
    memory_of_tape(fft).synchronize()
    train(late, fft, range(STEPS, STEPS + 4), graph=True)
    thetas = WATCH.taken()
    assert hvd.allgather_object(thetas) == [thetas] * hvd.size(), f"{kind}: a rank is elsewhere"
    assert thetas == [KINDS[kind].theta(step) for step in range(STEPS, STEPS + 4)], kind


class EndOfStep(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        WATCH.end_step()


def keras_fit(kind, **options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(48, activation="tanh"), keras.layers.Dense(32)]
    )
    fft = FFTCompression.using(theta=KINDS[kind])
    model.compile(
        DistributedOptimizer(keras.optimizers.SGD(0.1), compression=fft, **options), "mse"
    )
    x, y = noise(0, 8 * STEPS, 64), noise(1, 8 * STEPS, 32)
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[EndOfStep()])
    check(kind, hvd.allgather_object(WATCH.taken()))
    assert memory_of(model.optimizer).report()["steps"] == STEPS
    flat = np.concatenate([weight.reshape(-1) for weight in model.get_weights()])
    assert np.array_equal(*hvd.allgather_object(flat)), f"{kind}: ranks have other weights"


def outside_of_a_graph():
    """A name that comes again begins the next step there."""
    fft = FFTCompression.using(theta=KINDS["warm-up"])
    for number in range(STEPS):
        for name in ("first", "second"):
            hvd.allreduce(tf.constant(noise(number, 64, 64)), name=name, compression=fft)
        WATCH.end_step()
    check("warm-up", hvd.allgather_object(WATCH.taken()))


def every_kind_of_schedule():
    """One that ends and one that never rests: tracing takes long.

    What theta the steps of the others have, for how long, is in tests/compress/test_schedule.py.
    """
    global WATCH
    WATCH, GatheredBucket.step = Watch(), watched_step
    outside_of_a_graph()
    for kind, options in (("warm-up", {}), ("cosine", {"groups": 1})):
        tapes(kind)
        keras_fit(kind, **options)


CASES = [every_kind_of_schedule]
