"""Ranks: a Keras model shrinks under Horovod, alike; ranks that differ all stop."""

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from sn_memory.apoptosis.tensorflow import AgreementError, Apoptosis

hvd.init()
tf.config.threading.set_intra_op_parallelism_threads(1)


def setup(seed=0):
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(24, "relu"), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((6,)), *layers])
    kernel = model.layers[0].get_weights()[0]
    model.layers[0].set_weights([np.tile(kernel[:, :8], 3), np.zeros(24)])
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    settings = {"tolerance": 0.05, "every": 2, "min_width": 4, "round_to": 4, "overhead": None}
    return model, optimizer, Apoptosis(model, optimizer, schedule="aggressive", **settings)


def batch(step):
    return np.random.default_rng(1000 * step + hvd.rank()).standard_normal((64, 6)).astype("f4")


def recorded():
    @tf.function
    def train(x):
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True)))
        gradients = tape.gradient(loss, [held.value for held in model.trainable_variables])
        optimizer.apply(gradients, model.trainable_variables)

    optimizer.build(model.trainable_variables)
    return train


model, optimizer, apoptosis = setup()
train, changed = recorded(), 0
for step in range(6):
    apoptosis.observe(batch(step))
    train(tf.constant(batch(step)))
    if apoptosis.step():
        train, changed = recorded(), changed + 1
        for index, held in enumerate([*model.variables, *optimizer.variables]):
            if held.dtype == "float32":
                every = hvd.allgather(held.value[None], name=f"held.{step}.{index}").numpy()
                assert (every == every[:1]).all()
assert changed
assert model.layers[0].units < 24

model, optimizer, apoptosis = setup(seed=hvd.rank())
apoptosis.observe(batch(0))
apoptosis.step()
try:
    apoptosis.step()
except AgreementError:
    print("all stopped")
else:
    raise AssertionError("ranks differ, and none said so")
