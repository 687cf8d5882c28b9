"""Apoptosis, a memory plan and compressed gradients together: a Keras net on any number of ranks.

horovodrun -np 2 python examples/keras_together.py

The net shrinks while it trains, within a memory budget, and its gradients are sent compressed.
When neurons have merged, the memory plan and the traced step are made again; the optimizer
continues, and residuals are cut like the variables. Our lines are marked `# <- sn`.
"""

import argparse
import gzip
import os
from pathlib import Path

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import sn_memory.tensorflow  # <- sn
from sn_compress import LowRankCompression  # <- sn
from sn_compress.tensorflow.keras import DistributedOptimizer  # <- sn
from sn_memory.apoptosis.tensorflow import Apoptosis  # <- sn

CACHE = Path(__file__).resolve().parent.parent / ".cache/fashion-mnist"

flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
flags.add_argument("--width", type=int, default=512, help="neurons in the hidden layer")
flags.add_argument("--tolerance", type=float, default=0.02, help="change allowed per event")
flags.add_argument("--every", type=int, default=50, help="steps between examinations")
flags.add_argument("--budget", default="80%", help="memory of a step, such as 80%% or 20MiB")
flags.add_argument("--ratio", type=float, default=10, help="how many times fewer bytes to send")
flags.add_argument("--epochs", type=int, default=2)
flags.add_argument("--limit", type=int, help="use the first LIMIT images, at least 64 per rank")
flags.add_argument("--steady", action="store_true", help="examine by steps, not by the clock")
flags.add_argument("--data", help="folder of the four .gz files; or set FASHION_MNIST_DIR")
args = flags.parse_args()


def read(name):
    """Return a file of the data set, [n, 28, 28] or [n] uint8."""
    path = Path(args.data or os.environ.get("FASHION_MNIST_DIR", CACHE)) / f"{name}-ubyte.gz"
    try:
        raw = gzip.decompress(path.read_bytes())
    except (OSError, EOFError) as error:
        raise SystemExit(f"{path}: {error}; run scripts/fetch_fashion_mnist.py first") from None
    shape = [int.from_bytes(raw[i : i + 4], "big") for i in range(4, 4 + 4 * raw[3], 4)]
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)[: args.limit]


def wrap(budget):
    """Make what depends on shapes: the memory plan and the traced step."""
    planned = sn_memory.tensorflow.plan(  # <- sn
        model, tf.TensorSpec((64, 28, 28, 1)), budget, profile=False
    )

    @tf.function
    def train(images, labels):
        with tf.GradientTape() as tape:
            loss = loss_of(labels, planned(images, training=True))
        held = [variable.value for variable in model.trainable_variables]
        optimizer.apply(tape.gradient(loss, held), model.trainable_variables)

    return planned, train


hvd.init()
tf.config.threading.set_intra_op_parallelism_threads(1)
keras.utils.set_random_seed(0)  # the same net on all ranks
x, test_x = (read(f"{part}-images-idx3")[..., None] / np.float32(127.5) - 1
             for part in ("train", "t10k"))  # fmt: skip
y, test_y = (read(f"{part}-labels-idx1") for part in ("train", "t10k"))
layers = [keras.layers.Conv2D(n, 3, s, "same", activation="gelu") for n, s in ((16, 1), (32, 2))]
layers += [
    keras.layers.MaxPooling2D(),
    keras.layers.Flatten(),
    keras.layers.Dense(args.width, "relu", name="hidden"),
]
model = keras.Sequential([keras.Input((28, 28, 1)), *layers, keras.layers.Dense(10)])
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = keras.optimizers.Adam(1e-3)
compression = LowRankCompression.using(ratio=args.ratio)  # <- sn
optimizer = DistributedOptimizer(optimizer, compression=compression)  # <- sn
optimizer.build(model.trainable_variables)
looks = {"tolerance": args.tolerance, "every": args.every}
if args.steady:
    looks["overhead"] = None  # the same intervals on every machine
apoptosis = Apoptosis(model, optimizer, **looks)  # <- sn
planned, train = wrap(args.budget)
steps = len(x) // (64 * hvd.size())
for epoch in range(args.epochs):
    shuffle = np.random.default_rng(epoch)  # the same order on all ranks
    order = shuffle.permutation(len(x))[: steps * hvd.size() * 64]
    for rows in order.reshape(steps, hvd.size(), 64)[:, hvd.rank()]:
        images = tf.constant(x[rows])
        train(images, tf.constant(y[rows]))
        apoptosis.observe(images)  # <- sn
        if event := apoptosis.step():  # <- sn
            planned, train = wrap(planned.sn_memory.plan.peak_bytes)  # <- sn
            widths = ", ".join(f"{one.group} {one.before} -> {one.after}" for one in event.merged)
            if hvd.rank() == 0:
                peak = planned.sn_memory.plan.peak_bytes  # <- sn
                print(f"step {event.step}: {widths}; at most {peak / 1e6:.1f} MB a step")
    if hvd.rank() == 0:
        accuracy = 100 * np.mean(model.predict(test_x, 500, verbose=0).argmax(1) == test_y)
        sent = LowRankCompression.report(optimizer)["payload_bytes"]  # <- sn
        print(f"epoch {epoch + 1}: {accuracy:.2f} %, {model.count_params():,} parameters, "
              f"{sent / 1e3:.0f} kB sent a step")  # fmt: skip
