"""Does a Keras net train as well with compressed activations? One net, plain and four ways.

    python -m benchmarks activations_tensorflow            the missing runs of the study
    python -m benchmarks activations_tensorflow --quick    few steps, one seed

Three convolutions and two dense layers on Fashion-MNIST, batch 64, SGD with momentum 0.9, a rate of
0.05 that falls to 0 as a cosine. Inputs of convolutions and dense layers have 8 bits or 4, or a
controller chooses them every 200 steps, from a budget (what plain saves over 13.5, images counted)
or from an error (1 % of the momentum); ReLUs keep signs and pooling layers places. What is saved is
counted layer by layer at the end of training: TensorFlow holds a layer's input, a ReLU's output and
both of pooling, each tensor once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from machine import origin
from nets import fashion_mnist
from rows_file import flags, load, missing, path_of, save
from tables import markdown

import sn_memory.tensorflow
from sn_memory.tensorflow import Allocations
from sn_memory.tensorflow.memory import has_statistics

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results/activations_tensorflow.json"
BATCH, RATE = 64, 0.05
LINEAR = ("Conv2D", "Dense")
KEPT = ("plain", "8 bits", "4 bits", "budget", "error")
TIMES_LESS, ERROR = 13.5, 0.01


@dataclass(frozen=True)
class Run:
    """What one run is; `kept` is one of KEPT."""

    kept: str
    seed: int
    steps: int


def network(seed: int) -> keras.Model:
    """The convolutional net of the torch study."""
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(24, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(48, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, strides=2, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10),
        ]
    )


def saved_bytes(model: keras.Model, bits: Mapping[str, int] | None) -> int:
    """Bytes saved of a batch: float32, or bits by layer and a grid of 6 bytes for each 256."""
    total = 0.0
    for layer in model.layers:
        inputs, outputs = (int(np.prod(tensor.shape[1:])) for tensor in (layer.input, layer.output))
        kind = type(layer).__name__
        if kind == "MaxPooling2D":
            # Its output is the next layer's input; its input is a ReLU's output.
            total += 0 if bits is None else outputs / 4
        elif kind in LINEAR:
            first = layer is model.layers[0]  # the images are the user's
            rectified = layer.activation is keras.activations.relu
            if bits is None:
                total += 0 if first else 4 * inputs
                # A ReLU's output is the next layer's input, or is read by pooling.
                total += 4 * outputs if rectified and _feeds_pooling(model, layer) else 0
            else:
                total += 0 if first else inputs * (bits[layer.path] / 8 + 6 / 256)
                total += outputs / 8 if rectified else 0
    return int(BATCH * total)


def _feeds_pooling(model: keras.Model, layer: Any) -> bool:
    after = model.layers[model.layers.index(layer) + 1 :]
    return bool(after) and type(after[0]).__name__ == "MaxPooling2D"


def compressing(run: Run, model: keras.Model, optimizer: Any) -> Any:
    """The context in which a run trains."""
    settings: dict[str, Any] = {
        "plain": None,
        "8 bits": {"bits": 8},
        "4 bits": {"bits": 4},
        "budget": {"budget": int(saved_bytes(model, None) / TIMES_LESS)},
        "error": {"error": ERROR, "optimizer": optimizer},
    }[run.kept]
    if settings is None:
        return nullcontext()
    return sn_memory.tensorflow.compress_activations(model, seed=run.seed, **settings)


def train(run: Run, data: dict[str, Any]) -> dict[str, Any]:
    """Do one run and return it as a flat row."""
    model = network(run.seed)
    rates = keras.optimizers.schedules.CosineDecay(RATE, run.steps)
    optimizer = keras.optimizers.SGD(rates, momentum=0.9)
    images, labels = data["train"]
    rng = np.random.default_rng(run.seed)
    order = np.empty(0, np.int64)
    losses, seconds, peak = [], [], None
    with compressing(run, model, optimizer) as compressed:

        @tf.function
        def step(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                logits = model(x, training=True)
                loss = tf.reduce_mean(
                    tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
                )
            weights = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            return loss

        for _ in range(run.steps):
            if len(order) < BATCH:
                order = rng.permutation(len(images))
            rows, order = order[:BATCH], order[BATCH:]
            x, y = tf.constant(images[rows]), tf.constant(labels[rows])
            start = time.process_time()
            losses.append(float(step(x, y)))
            seconds.append(time.process_time() - start)
        if has_statistics("CPU:0"):
            with Allocations() as allocations:
                step(x, y)
            peak = allocations.peak_bytes
    test_images, test_labels = data["t10k"]
    answers = np.argmax(model.predict(test_images, batch_size=500, verbose=0), axis=1)
    linear = [layer.path for layer in model.layers if type(layer).__name__ in LINEAR]
    bits = (
        None
        if compressed is None
        else {layer: compressed.controller.bits(layer) or 32 for layer in linear}
    )
    plain, held = saved_bytes(model, None), saved_bytes(model, bits)
    return asdict(run) | {
        "bits": [] if bits is None else [*bits.values()],
        "accuracy": round(100 * float(np.mean(answers == test_labels)), 2),
        "train_loss": round(float(np.mean(losses[-(run.steps // 10 + 1) :])), 4),
        "ratio": round(plain / held, 2),
        "plain_bytes": plain,
        "compressed_bytes": held,
        "peak_bytes": peak,
        "step_s": round(float(np.median(seconds)), 5),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown, seeds together."""
    head = (
        "kept", "bits by layer", "saved bytes, times less", "accuracy, by seed",
        "points below plain", "peak, MiB", "step, ms",
    )  # fmt: skip
    lines = []
    plain = {row["seed"]: row["accuracy"] for row in rows if row["kept"] == "plain"}
    for kept in KEPT:
        group = [row for row in rows if row["kept"] == kept]
        if not group:
            continue
        bits = {" ".join(map(str, row["bits"])) for row in group}
        least, most = (f"{pick(row['ratio'] for row in group):.1f}" for pick in (min, max))
        lost = [f"{plain[row['seed']] - row['accuracy']:.2f}" for row in group]
        peaks = [row["peak_bytes"] for row in group if row["peak_bytes"] is not None]
        lines.append(
            [
                kept,
                ", ".join(sorted(bits)),
                least if least == most else f"{least} to {most}",
                ", ".join(str(row["accuracy"]) for row in group),
                ", ".join(lost),
                f"{max(peaks) / 2**20:.1f}" if peaks else "-",
                f"{1e3 * float(np.median([row['step_s'] for row in group])):.0f}",
            ]
        )
    return markdown(head, lines)


def main() -> None:
    """Do the runs that are missing, then print what they say."""
    parser = flags(__doc__)
    parser.add_argument("--quick", action="store_true", help="one seed, few steps")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    path = path_of(args, RESULTS)
    runs = [
        Run(kept, seed, 12 if args.quick else 1500)
        for seed in (args.seeds[:1] if args.quick else args.seeds)
        for kept in KEPT
    ]
    rows = [] if args.quick else load(path)
    data = {
        part: (images.permute(0, 2, 3, 1).numpy(), labels.numpy())
        for part, (images, labels) in ((split, fashion_mnist(split)) for split in ("train", "t10k"))
    }
    if args.quick:
        data["t10k"] = tuple(part[:500] for part in data["t10k"])
    about = origin()
    for run in missing(runs, rows):
        rows.append(train(run, data) | about)
        save(path, rows)
        print(rows[-1], flush=True)
    print(f"\n{table(rows)}\n\nrows: {path}")


if __name__ == "__main__":
    main()
