"""One rank: what may not go wrong in silence in TensorFlow and Keras, one function a case."""

import re
from functools import partial

import cases
import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from sn_compress import CompressError, FFTCompression, LowRankCompression
from sn_compress.tensorflow.keras import DistributedOptimizer
from sn_compress.tensorflow.tape import memory_of

SHARED = LowRankCompression.using(ratio=8, warmup=2, check_every=5)
GATHER = FFTCompression.using(theta=0.9, check_every=5)
QUESTION = 17 * 8  # bytes


def said_by_all(call):
    """The message that every rank was given; it has to be the same one, but for TensorFlow's own.

    An error in the midst of a graph arrives as one of TensorFlow, with ours in its text.
    """
    message = cases.message_of(call, (CompressError, tf.errors.OpError))
    start = message.rindex("ranks have ")
    every = hvd.allgather_object(message[start:].partition("\n")[0])
    assert len(set(every)) == 1, every
    return every[0]


def tape_step(variables, fft, graph=True):
    """A step of training, given its number: the loss differs on every rank."""

    def step(number):
        with hvd.DistributedGradientTape(tf.GradientTape(), compression=fft) as tape:
            far = tf.cast(number + hvd.rank(), tf.float32)
            loss = tf.add_n([tf.reduce_mean((v - far) ** 2) for v in variables])
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.1 * gradient)

    return tf.function(step) if graph else step


def variables_of(*names, shape=(48, 48)):
    rng = np.random.default_rng(0)
    return [tf.Variable(rng.standard_normal(shape).astype("f4"), name=name) for name in names]


def tapes_agree_at_the_start():
    odd = hvd.rank() == 1
    for words, names, fft in (
        (["setting ratio: 8 on rank 0, 4 on rank 1"], "ab", SHARED.using(ratio=4 if odd else 8)),
        (["setting theta"], "ab", FFTCompression.using(theta=0.8 if odd else 0.9)),
        (["variable 0: a#0 (48, 48)", "b#0 (48"], "ba" if odd else "ab", LowRankCompression),
        (["variable 2: nothing on rank 0"], "abc" if odd else "ab", FFTCompression),
    ):
        for graph in (True, False):
            step = tape_step(variables_of(*names), fft.using(), graph)
            said = said_by_all(lambda step=step: step(tf.constant(0)))
            assert all(word in said.replace("'", "") for word in words), (words, said)


def damage_is_found_by_tapes():
    """Of what travels compressed, dense or gathered, and plain; nothing is found before."""

    def train(step, variables):
        for number in range(30):
            step(tf.constant(number))
            if number == 11 and hvd.rank() == 1:  # as one bit in what it received would
                damaged = variables[1].numpy()
                damaged.view(np.uint32).flat[3] ^= 1 << 18
                variables[1].assign(damaged)

    for settings, shape, graph in (
        (SHARED, (48, 48), True), (GATHER, (48, 48), True), (GATHER, (48, 48), False),
        (SHARED, (7,), True),
    ):  # fmt: skip
        variables, fft = variables_of("a", "b", shape=shape), settings.using()
        said = said_by_all(partial(train, tape_step(variables, fft, graph), variables))
        assert "b:0: " in said, said
        assert "after step 15, they were the same after step 10" in said, said
        # At the start, and three times since; then the words of what differs.
        assert memory_of(fft).report()["other_bytes"] >= 4 * QUESTION


def two_tapes_of_one_compression_count_their_own_steps():
    fft = GATHER.using()
    first, second = (tape_step(variables_of(*names), fft) for names in ("ab", "cd"))
    for number in range(16):
        first(tf.constant(number))
        if number % 2:
            second(tf.constant(number))
    # Two to agree; how their graphs decode; 5, 10 and 15 of 16 steps; 5 of 8.
    assert memory_of(fft).report()["other_bytes"] == (2 + 1 + 3 + 1) * QUESTION


def sparse_gradients_of_tapes_are_in_the_report():
    for graph in (True, False):
        table, matrix = tf.Variable(np.ones((2000, 32), "f4")), tf.Variable(np.ones((32, 32), "f4"))
        fft, rows = FFTCompression.using(theta=0.9), 50 + hvd.rank()

        def step(table=table, matrix=matrix, fft=fft, rows=rows):
            with hvd.DistributedGradientTape(tf.GradientTape(), compression=fft) as tape:
                loss = tf.reduce_sum((tf.gather(table, tf.range(rows)) @ matrix) ** 2)
            return tape.gradient(loss, [table, matrix])

        step = tf.function(step) if graph else step
        for _ in range(3):
            assert isinstance(step()[0], tf.IndexedSlices)
        report = memory_of(fft).report()
        sent = rows * (4 + 4 * 32)  # an index of tf.range is of 4 bytes
        payload = memory_of(fft).codec.payload_bytes(1024)
        assert report["payload_bytes"] == sent + payload, report
        assert report["dense_bytes"] == sent + 4096, report
        assert report["steps"] == 3, report


def tensors_without_a_shape_are_in_the_report():
    fft = FFTCompression.using(theta=0.9)

    @tf.function(input_signature=[tf.TensorSpec([None])])
    def reduce(values):
        return hvd.allreduce(values, name="unknown", compression=fft)

    for n in (100, 200):
        reduce(tf.ones(n))
    assert memory_of(fft).report()["payload_bytes"] == 4 * 150


def model_of(embedding=False):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(48, activation="tanh") for _ in range(2)]
    first = [keras.layers.Embedding(200, 48), keras.layers.Flatten()] if embedding else []
    return keras.Sequential([keras.Input((1,) if embedding else (48,)), *first, *layers])


def fit(model, compression, steps=1, callbacks=(), name="sgd", **options):
    sgd = keras.optimizers.SGD(0.1, name=name)
    optimizer = DistributedOptimizer(sgd, compression=compression, **options)
    model.compile(optimizer, "mse", jit_compile=False)
    rng = np.random.default_rng(hvd.rank())
    x = rng.standard_normal((4 * steps, 48)).astype("f4")
    model.fit(x, x, 4, verbose=0, shuffle=False, callbacks=list(callbacks))
    return optimizer


def keras_agrees_at_the_start():
    odd = hvd.rank() == 1
    if odd:
        keras.layers.Dense(1)  # from here on this rank's layers have other numbers, which is right
    fit(model_of(), SHARED, 2)
    extra = []
    for word, fft, groups in (
        ("setting ratio: 8 on rank 0, 4 on rank 1", SHARED.using(ratio=4 if odd else 8), None),
        ("groups: 1 on rank 0, 2 on rank 1", SHARED, 1 + odd),
        ("number of optimizers: ", SHARED, None),
    ):
        keras.backend.clear_session()
        if word.startswith("number") and odd:
            extra.append(DistributedOptimizer(keras.optimizers.SGD(0.1)))
        said = said_by_all(partial(fit, model_of(), fft, groups=groups))
        assert word in said, said
    # Those of the cases before have failed, and the errors hold them.
    first, second = re.findall(r"(\d+) on rank", said)
    assert int(second) == int(first) + 1, said
    said = said_by_all(lambda: fit(model_of(), None, name=f"sgd_{hvd.rank()}"))
    assert "name of the optimizer: sgd_0 on rank 0, sgd_1 on rank 1" in said, said


class Damage(keras.callbacks.Callback):
    """At the end of one step, on one rank."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 6 and hvd.rank() == 1:
            variable = self.model.trainable_variables[1]
            variable.assign(variable + 1e-6)


def damage_is_found_in_keras():
    for settings in (SHARED, GATHER):
        said = said_by_all(partial(fit, model_of(), settings.using(), 30, callbacks=[Damage()]))
        assert "after step 10, they were the same after step 5" in said, said


def sparse_gradients_of_keras_are_in_the_report():
    fft = GATHER.using()
    model = model_of(embedding=True)
    optimizer = DistributedOptimizer(keras.optimizers.SGD(0.1, name="s"), compression=fft)
    model.compile(optimizer, "mse", jit_compile=False)
    x = np.arange(3 * 8)[:, None] % 200
    model.fit(x, np.ones((len(x), 48), "f4"), 8, verbose=0, shuffle=False)
    report = FFTCompression.report(optimizer)
    index = 8 if x.dtype == np.int64 else 4
    codec = memory_of(fft).codec
    plain, compressed = 2 * 4 * 48, 2 * codec.payload_bytes(48 * 48)
    found = report["payload_bytes"] - plain - compressed
    assert found in (8 * (4 * 48 + index), 8 * (4 * 48 + 4)), (found, report)
    assert report["steps"] == 3, report


CASES = [
    tapes_agree_at_the_start, damage_is_found_by_tapes,
    two_tapes_of_one_compression_count_their_own_steps,
    sparse_gradients_of_tapes_are_in_the_report, tensors_without_a_shape_are_in_the_report,
    keras_agrees_at_the_start, damage_is_found_in_keras,
    sparse_gradients_of_keras_are_in_the_report,
]  # fmt: skip
