"""One rank of benchmarks/gossip_tensorflow.py: trains the runs of a job file; rank 0 saves rows.

horovodrun -np 4 python benchmarks/gossip_tensorflow_rank.py JOB.json
"""

from __future__ import annotations

import gzip
import json
import sys
import time
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from rows_file import load, save

from sn_compress.gossip import consensus_distance
from sn_compress.tensorflow import keras as together
from sn_compress.tensorflow.gossip import GossipOptimizer

GOSSIP: dict[str, dict[str, Any]] = {
    "weights": {},
    "weights, not overlapped": {"overlap": False},
}


class Rates(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
    """A learning rate for each step, from a table."""

    def __init__(self, rates: list[float]) -> None:
        self.table = tf.constant(rates, tf.float32)

    def __call__(self, step: Any) -> Any:
        """Called by Keras."""
        return tf.gather(self.table, tf.cast(step, tf.int32))


def network() -> Any:
    """The net of benchmarks/nets.py: three convolutions, two dense layers, 170,858 parameters."""
    layers, same = keras.layers, {"padding": "same", "activation": "relu"}
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(24, 3, **same), layers.MaxPool2D(),
            layers.Conv2D(48, 3, **same), layers.MaxPool2D(),
            layers.Conv2D(64, 3, strides=2, **same), layers.Flatten(),
            layers.Dense(128, activation="relu"), layers.Dense(10),
        ]
    )  # fmt: skip


def fashion_mnist(folder: Path, part: str) -> tuple[Any, Any]:
    """Images [n, 28, 28, 1] and labels [n] of "train" or "t10k", uint8."""
    raw = [gzip.decompress((folder / f"{part}-{name}-ubyte.gz").read_bytes())
           for name in ("images-idx3", "labels-idx1")]  # fmt: skip
    images = np.frombuffer(raw[0], np.uint8, offset=16).reshape(-1, 28, 28, 1)
    return tf.constant(images), tf.constant(np.frombuffer(raw[1], np.uint8, offset=8))


def scaled(images: Any) -> Any:
    """As float32 in [-1, 1]."""
    return tf.cast(images, tf.float32) / 127.5 - 1


def train(run: dict[str, Any], job: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """Do one run and return it as a flat row."""
    steps, share = run["steps"], job["batch"] // hvd.size()
    images, labels = data["train"]
    shuffle = np.random.default_rng(run["seed"])
    passes = -(-steps * job["batch"] // len(images))
    order = np.concatenate([shuffle.permutation(len(images)) for _ in range(passes)])
    mine = order[: steps * job["batch"]].reshape(steps, hvd.size(), share)[:, hvd.rank()]
    rows = tf.constant(mine.astype(np.int32))
    keras.utils.set_random_seed(run["seed"])
    net = network()
    variables = net.trainable_variables
    optimizer = keras.optimizers.SGD(Rates(job["rates"]), momentum=0.9)
    gossip = run["method"] != "all-reduce"
    if gossip:
        GossipOptimizer(optimizer, **GOSSIP[run["method"]])
    else:
        together.DistributedOptimizer(optimizer, groups=1)
        hvd.broadcast_variables([v.value for v in variables], 0)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function(jit_compile=False)
    def train_step(step: Any) -> None:
        own = tf.gather(rows, step)
        with tf.GradientTape() as tape:
            answers = net(scaled(tf.gather(images, own)), training=True)
            loss = loss_of(tf.gather(labels, own), answers)
        values = [v.value for v in variables]
        optimizer.apply(tape.gradient(loss, values), variables)

    optimizer.build(variables)
    looks, curve = set(job["looks"]), []
    start = time.process_time()
    for step in range(steps):
        train_step(tf.constant(step))
        if step + 1 in looks:
            flat = tf.concat([tf.reshape(v.value, [-1]) for v in variables], 0)
            replicas = hvd.allgather(flat[None], name="look").numpy()
            norm = float(np.linalg.norm(replicas.mean(0, np.float64)))
            curve.append((step + 1, consensus_distance(list(replicas)), norm))
    seconds = time.process_time() - start
    dense = 4 * net.count_params()
    worker = accuracy(net, data["t10k"]) if hvd.rank() == 0 else 0.0
    sent = 2 * (hvd.size() - 1) / hvd.size() * dense
    if gossip:
        sent = optimizer.report()["bytes_per_step"]
        optimizer.consensus()
    return run | {
        "accuracy": accuracy(net, data["t10k"]) if hvd.rank() == 0 else 0.0,
        "worker_accuracy": worker,
        "bytes_per_step": sent,
        "ratio": round(dense / sent, 2),
        "steps_seen": [step for step, _, _ in curve],
        "distance": [round(distance, 6) for _, distance, _ in curve],
        "norm": [round(norm, 4) for _, _, norm in curve],
        "seconds": round(seconds, 1),  # of one rank's core
    }


def accuracy(net: Any, data: tuple[Any, Any]) -> float:
    """Of the test images, in per cent."""
    images, labels = data

    @tf.function(jit_compile=False)
    def right(part: Any, own: Any) -> Any:
        answers = tf.argmax(net(scaled(part), training=False), 1)
        return tf.reduce_sum(tf.cast(answers == tf.cast(own, tf.int64), tf.int32))

    parts = [slice(start, start + 500) for start in range(0, len(images), 500)]
    correct = sum(int(right(images[part], labels[part])) for part in parts)
    return round(100 * correct / len(images), 2)


def main() -> None:
    """Do all runs of the job."""
    job = json.loads(Path(sys.argv[1]).read_text())
    # More ranks than cores would otherwise spend their time waiting for each other's threads.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    hvd.init()
    data = {part: fashion_mnist(Path(job["data"]), part) for part in ("train", "t10k")}
    rows = Path(job["rows"])
    for run in job["runs"]:
        start = time.perf_counter()
        row = train(run, job, data)
        if hvd.rank() == 0:
            save(rows, [*load(rows), row | job["about"]])
            cells = [str(row[key]) for key in (*run, "ratio", "accuracy", "worker_accuracy")]
            seconds = time.perf_counter() - start
            print(" ".join(cells), f"{row['distance'][-1]:.4f} ({seconds:.0f} s)", flush=True)
        hvd.allreduce(tf.zeros(1), name="together")
    hvd.shutdown()


if __name__ == "__main__":
    main()
