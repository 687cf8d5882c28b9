"""Fashion-MNIST in a custom training loop on any number of ranks, our lines marked `# <- sn`.

horovodrun -np 2 python examples/tensorflow_fashion_mnist.py --compression fft --budget 95%

The same with Keras' `fit` is keras_fashion_mnist.py.
"""

import argparse
import gzip
import json
import os
from pathlib import Path

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import sn_memory.tensorflow  # <- sn
from sn_compress import FFTCompression  # <- sn
from sn_compress.tensorflow.tape import memory_of  # <- sn

DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # of `apt-get install dataset-fashion-mnist`
CACHE = Path(__file__).resolve().parent.parent / ".cache/fashion-mnist"
HELP = "run scripts/fetch_fashion_mnist.py, or give a folder that holds it with --data"

flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
flags.add_argument("--compression", choices=["none", "fp16", "fft"], default="none")
flags.add_argument("--theta", type=float, default=0.9, help="fraction of the spectrum dropped")
flags.add_argument("--budget", help="memory of a step, such as 80%% or 20MiB; default: no plan")
flags.add_argument("--epochs", type=int, default=4)
flags.add_argument("--seed", type=int, default=0)
flags.add_argument("--limit", type=int, help="use the first LIMIT images, at least 64 per rank")
flags.add_argument("--data", help="folder of the four .gz files; or set FASHION_MNIST_DIR")
flags.add_argument("--history", help="JSON file to which rank 0 writes the history")
args = flags.parse_args()


def read(name):
    """Return a file of the data set, [n, 28, 28] or [n] uint8."""
    folder = args.data or os.environ.get("FASHION_MNIST_DIR")
    path = Path(folder or (DEBIAN if DEBIAN.is_dir() else CACHE)) / f"{name}-ubyte.gz"
    try:
        raw = gzip.decompress(path.read_bytes())
    except (OSError, EOFError) as error:
        raise SystemExit(f"cannot read {path}: {error}; {HELP}") from None
    shape = [int.from_bytes(raw[i : i + 4], "big") for i in range(4, 4 + 4 * raw[3], 4)]
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)[: args.limit]


hvd.init()
keras.utils.set_random_seed(1000 * args.seed + hvd.rank())  # each rank has its own dropout
x, test_x = (read(f"{part}-images-idx3")[..., None] / 127.5 - 1 for part in ("train", "t10k"))
y, test_y = (read(f"{part}-labels-idx1").astype(np.int32) for part in ("train", "t10k"))
steps = len(x) // (64 * hvd.size())  # 64 images per rank and step; the remainder is dropped
mine = slice(hvd.rank(), steps * 64 * hvd.size(), hvd.size())

model = keras.Sequential(
    [
        keras.Input((28, 28, 1)),
        keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
        keras.layers.MaxPool2D(),
        keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
        keras.layers.MaxPool2D(),
        keras.layers.Flatten(),
        keras.layers.Dense(512, activation="relu"),
        keras.layers.Dropout(0.5),
        keras.layers.Dense(10),
    ]
)
weights = [variable.value for variable in model.trainable_variables]
optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
optimizer.build(model.trainable_variables)
fft = FFTCompression.using(theta=args.theta)  # <- sn
codec = {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16, "fft": fft}[args.compression]


@tf.function
def step(images, labels):
    with hvd.DistributedGradientTape(tf.GradientTape(), compression=codec) as tape:
        logits = model(images, training=True)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        loss = tf.reduce_mean(losses)
    optimizer.apply(tape.gradient(loss, weights), model.trainable_variables)
    return loss


hvd.broadcast_variables(weights, root_rank=0)
if args.budget:
    sample = (tf.TensorSpec((64, 28, 28, 1)), tf.TensorSpec((64,), tf.int32))
    # Times differ between ranks; without them, all ranks make the same plan.
    step = sn_memory.tensorflow.plan_step(step, sample, args.budget, profile=False)  # <- sn
random, history = np.random.default_rng(args.seed), []
for epoch in range(args.epochs):
    order = random.permutation(len(x[mine])).reshape(steps, 64)
    for chosen in order:
        images = tf.constant(x[mine][chosen], tf.float32)
        history.append(float(step(images, tf.constant(y[mine][chosen]))))
    if hvd.rank() == 0:
        print(f"epoch {epoch + 1}: loss {np.mean(history[-steps:]):.3f}")
guesses = model.predict(test_x, 500, verbose=0).argmax(1)
if hvd.rank() == 0:
    print(f"test accuracy {100 * np.mean(guesses == test_y):.2f} %")
    sent = memory_of(fft).report() if args.compression == "fft" else {}  # <- sn
    if args.history:
        seen = {"loss": history, "test": float(np.mean(guesses == test_y))}
        Path(args.history).write_text(json.dumps(vars(args) | seen | sent))
