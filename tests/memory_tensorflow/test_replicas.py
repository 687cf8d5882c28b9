"""A planned model in replicas of tf.distribute runs as it is, and says so.

Its plan moved one replica's statistics by the batches of all, and those of the others never.
"""

import subprocess
import sys

SCRIPT = """
import warnings
import keras
import numpy as np
import tensorflow as tf

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
import sn_memory.tensorflow as rim

strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
x = tf.random.stateless_normal((16, 8), (1, 2))


def trained(plan):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        norm = keras.layers.BatchNormalization()
        dense = [keras.layers.Dense(64, "tanh"), norm, keras.layers.Dense(8)]
        model = keras.Sequential([keras.Input((8,)), *dense])
        if plan:
            model = rim.plan(model, x[:8], "100%", profile=False, planner="sqrt_n")
        model.compile(keras.optimizers.SGD(0.1), "mse")
    data = tf.data.Dataset.from_tensors((x, x)).unbatch().batch(16, drop_remainder=True)
    model.fit(data, epochs=3, verbose=0)
    return [copy.numpy() for it in model.variables for copy in it._value.values]


theirs = trained(plan=False)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    mine = trained(plan=True)
for one, other in zip(mine, theirs, strict=True):
    np.testing.assert_array_equal(one, other)
print([str(it.message) for it in said if "replicas" in str(it.message)])
"""


def test_statistics_are_those_of_all_replicas():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("runs without its plan: it is one of several replicas") == 1
