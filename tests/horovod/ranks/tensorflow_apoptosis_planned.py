"""Two ranks of Keras: one net shrinks, within a budget of memory, with compressed gradients.

What a rank had yet to send is cut as the variables were, by either exchange; the memory is planned
anew.
"""

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf
from tensors import assert_equal_ranks

import sn_memory.tensorflow
from sn_compress import CompressError, FFTCompression, LowRankCompression
from sn_compress.tensorflow.keras import DistributedOptimizer
from sn_memory.apoptosis.tensorflow import AgreementError, Apoptosis

STEPS, BATCH, WIDTH, INPUTS = 12, 512, 64, 16
EXCHANGES = {
    "gather": FFTCompression.using(theta=0.5, min_elements=700),
    "shared": LowRankCompression.using(ratio=8, warmup=2, min_elements=700),
}


def network():
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(WIDTH, "gelu", name=name) for name in ("one", "two")]
    last = keras.layers.Dense(1)
    model = keras.Sequential([keras.Input((INPUTS,)), *layers, last], name="net")
    kernel = model.layers[0].get_weights()[0]  # the upper half of its neurons repeats the lower
    model.layers[0].set_weights([np.tile(kernel[:, : WIDTH // 2], 2), np.zeros(WIDTH)])
    return model


def wrap(model, optimizer):
    """Return the planned model, and a step of training with it."""
    sample = tf.TensorSpec((BATCH, INPUTS))
    planned = sn_memory.tensorflow.plan(model, sample, "85%", profile=False, time_limit_s=2)

    @tf.function
    def train(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(planned(x, training=True) - y))
        held = [one.value for one in model.trainable_variables]
        optimizer.apply(tape.gradient(loss, held), model.trainable_variables)
        return loss

    return planned, train


def batch(step):
    random = np.random.default_rng(1000 * step + hvd.rank())
    x = random.standard_normal((BATCH, INPUTS)).astype("f4")
    return tf.constant(x), tf.constant(x[:, :1] * x[:, 1:2])


def shrink(exchange):
    model = network()
    optimizer = DistributedOptimizer(
        keras.optimizers.Adam(1e-3), compression=EXCHANGES[exchange], groups=2
    )
    optimizer.build(model.trainable_variables)
    settings = {"tolerance": 0.1, "every": 4, "round_to": 4, "schedule": "aggressive"}
    apoptosis = Apoptosis(model, optimizer, overhead=None, **settings)
    planned, train = wrap(model, optimizer)
    peaks, events = [planned.sn_memory.plan.peak_bytes], 0
    for step in range(STEPS):
        x, y = batch(step)
        apoptosis.observe(x)
        train(x, y)
        before = FFTCompression.residuals(optimizer)
        if event := apoptosis.step():
            events += 1
            after = FFTCompression.residuals(optimizer)
            assert set(after) == set(before)
            assert "net/one/kernel" in after or events > 1
            for held in model.trainable_variables:
                assert after.get(held.path, held).shape == tuple(held.shape)
            for one in event.merged:
                check_cut(one, before, after)
            planned, train = wrap(model, optimizer)
            peaks.append(planned.sn_memory.plan.peak_bytes)
            assert_equal_ranks([*model.variables, *optimizer.variables])
    assert events > 1
    assert model.layers[0].units <= WIDTH // 2
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < peaks[0]
    assert_equal_ranks([*model.variables, *optimizer.variables])
    assert FFTCompression.report(optimizer)["ratio"] > 1
    for path in ("net/one/kernel", "nowhere"):
        with pytest.raises(CompressError, match=path):
            FFTCompression.restart(optimizer, {path: np.zeros(3, "f4")})


def check_cut(one, before, after):
    """Who took in nobody, and was not merged, has still to send what it had."""
    (name,) = [path for path in before if path.endswith(one.group)]
    survivors = {survivor for _, survivor in one.pairs}
    gone = {neuron for neuron, _ in one.pairs}
    kept = [i for i in range(one.before) if i not in gone]
    alone = [i for i in kept if i not in survivors]
    places = [kept.index(i) for i in alone]
    assert np.abs(after[name]).sum() > 0
    # Another layer may have shrunk in the same event: then rows went as well.
    if after[name].shape[0] == before[name].shape[0]:
        # The memory is kept as a spectrum: there and back in float32.
        np.testing.assert_allclose(
            after[name][:, places], before[name][:, alone], atol=1e-6 * np.abs(before[name]).max()
        )


def ranks_that_differ_all_stop():
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(24, "relu")])
    model.add(keras.layers.Dense(3))
    settings = {"tolerance": 0.05, "every": 2, "min_width": 4, "round_to": 4, "overhead": None}
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    apoptosis = Apoptosis(model, optimizer, schedule="aggressive", **settings)
    apoptosis.observe(np.random.default_rng(hvd.rank()).standard_normal((64, 6)).astype("f4"))
    apoptosis.step()
    with pytest.raises(AgreementError):
        apoptosis.step()


def nets_shrink_by_either_exchange():
    sn_memory.settings.deterministic = True
    for exchange in EXCHANGES:
        shrink(exchange)


CASES = [nets_shrink_by_either_exchange, ranks_that_differ_all_stop]
