"""Fashion-MNIST with Keras 3 `fit` by gossip: one partner per step, samples passed on.

horovodrun -np 2 python examples/keras_gossip.py --codec
"""

import argparse
import gzip
import os
from pathlib import Path

import horovod.tensorflow as hvd
import keras
import numpy as np

from sn_compress import codec
from sn_compress.tensorflow import keras as together
from sn_compress.tensorflow.gossip import Consensus, GossipOptimizer, ring_shuffle

CACHE = Path(__file__).resolve().parent.parent / ".cache/fashion-mnist"

flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
flags.add_argument("--topology", default="dissemination")
flags.add_argument("--codec", action="store_true", help="send differences, 2 % of the values")
flags.add_argument("--all-reduce", action="store_true", help="use Horovod's, for comparison")
flags.add_argument("--batch", type=int, default=64, help="images per rank and step")
flags.add_argument("--epochs", type=int, default=4)
flags.add_argument("--limit", type=int, help="use the first LIMIT images")
flags.add_argument("--seed", type=int, default=0)
flags.add_argument("--data", help="folder of the four .gz files; scripts/fetch_fashion_mnist.py")
args = flags.parse_args()


def read(name):
    """Return a file of the data set, [n, 28, 28] or [n] uint8."""
    folder = Path(args.data or os.environ.get("FASHION_MNIST_DIR") or CACHE)
    raw = gzip.decompress((folder / f"{name}-ubyte.gz").read_bytes())
    shape = [int.from_bytes(raw[i : i + 4], "big") for i in range(4, 4 + 4 * raw[3], 4)]
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)[: args.limit]


hvd.init()
keras.utils.set_random_seed(args.seed)
x, test_x = (read(f"{part}-images-idx3")[..., None] for part in ("train", "t10k"))
y, test_y = (read(f"{part}-labels-idx1") for part in ("train", "t10k"))
mine = slice(hvd.rank(), None, hvd.size())  # this rank's shard; batches move around the ring
batches = ring_shuffle(x[mine], y[mine], batch_size=args.batch, seed=args.seed)

model = keras.Sequential(
    [
        keras.Input((28, 28, 1)),
        keras.layers.Rescaling(1 / 127.5, -1),
        keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
        keras.layers.MaxPool2D(),
        keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
        keras.layers.MaxPool2D(),
        keras.layers.Flatten(),
        keras.layers.Dense(128, activation="relu"),
        keras.layers.Dense(10),
    ]
)
cosine = keras.optimizers.schedules.CosineDecay(0.05, args.epochs * batches.ring.steps)
optimizer = keras.optimizers.SGD(cosine, momentum=0.9)
if args.all_reduce:
    optimizer = together.DistributedOptimizer(optimizer)
    callbacks = [together.BroadcastVariables()]
else:
    topk = codec("topk", theta=0.98) if args.codec else None
    optimizer = GossipOptimizer(optimizer, topology=args.topology, codec=topk)
    callbacks = [Consensus()]  # validate the mean of all ranks
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)
test = {"validation_data": (test_x, test_y), "validation_batch_size": 500}
seen = model.fit(
    batches, epochs=args.epochs, callbacks=callbacks, verbose=0, shuffle=False, **test
).history
if hvd.rank() == 0:
    for epoch, accuracy in enumerate(seen["val_accuracy"], 1):
        print(f"epoch {epoch}: test accuracy {100 * accuracy:.2f} %")
    if hvd.size() > 1 and not args.all_reduce:
        sent, dense = optimizer.report()["bytes_per_step"], 4 * model.count_params()
        print(f"{sent / 1e6:.3f} MB a step, {dense / sent:.1f} times fewer than the model has")
        print(f"spread before the last consensus {optimizer.spread:.4f}")
