"""Fashion-MNIST with Keras 3 `fit` on any number of ranks, our lines marked `# <- sn`.

horovodrun -np 2 python examples/keras_fashion_mnist.py --compression fft
"""

import argparse
import gzip
import json
import os
from pathlib import Path

import horovod.tensorflow as hvd
import keras
import numpy as np

from sn_compress import FFTCompression, LowRankCompression  # <- sn
from sn_compress.tensorflow import keras as together  # <- sn

DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # of `apt-get install dataset-fashion-mnist`
CACHE = Path(__file__).resolve().parent.parent / ".cache/fashion-mnist"
HELP = "run scripts/fetch_fashion_mnist.py, or give a folder that holds it with --data"

flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
flags.add_argument("--compression", choices=["none", "fp16", "fft", "lowrank"], default="none")
flags.add_argument("--theta", type=float, default=0.9, help="fft: share of the spectrum dropped")
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
y, test_y = (read(f"{part}-labels-idx1") for part in ("train", "t10k"))
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
cosine = keras.optimizers.schedules.CosineDecay(0.05, args.epochs * steps)
optimizer = keras.optimizers.SGD(cosine, momentum=0.9)
ours = {"fft": FFTCompression.using(theta=args.theta), "lowrank": LowRankCompression}  # <- sn
codec = {"none": None, "fp16": hvd.Compression.fp16, **ours}[args.compression]
optimizer = together.DistributedOptimizer(optimizer, compression=codec)  # <- sn
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)
callbacks = [together.BroadcastVariables(), together.AverageMetrics()]  # <- sn
show = 2 if hvd.rank() == 0 else 0
seen = model.fit(x[mine], y[mine], 64, args.epochs, show, callbacks).history
accuracy = model.evaluate(test_x, test_y, 500, verbose=0, return_dict=True)["accuracy"]
if hvd.rank() == 0:
    print(f"test accuracy {100 * accuracy:.2f} %")
    sent = codec.report(optimizer) if args.compression in ours else {}  # <- sn
    if args.history:
        Path(args.history).write_text(json.dumps(vars(args) | seen | sent | {"test": accuracy}))
