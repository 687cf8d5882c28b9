"""What does apoptosis gain in Keras? The wide perceptron of benchmarks/apoptosis.py.

    python -m benchmarks apoptosis_tensorflow             the missing runs of the study
    python -m benchmarks apoptosis_tensorflow --report    print the table
    python -m benchmarks apoptosis_tensorflow --quick     few steps, one seed: does it all run?

784, 1024, 1024, 10 with ReLU on Fashion-MNIST, Keras's Adam, 64 images a step, a learning rate that
falls to zero over the last half. Steps run in a tf.function of one thread; after an event it is
recorded anew, and the time of that counts, as that of looks does. `apoptosis` takes more steps than
`plain` (--more), as its late steps are cheap. Tests are not timed. CPU seconds are what a quiet
machine's clock shows. Finished runs are saved at once and not repeated.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import apoptosis_report as report
import keras
import numpy as np
import tensorflow as tf
from apoptosis import BATCH, LOOKS, TEST_BATCH, images, rate
from apoptosis import held_out as without_test
from machine import origin
from rows_file import flags, load, matching, path_of, save
from tables import markdown

from sn_memory.apoptosis.tensorflow import Apoptosis

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results/apoptosis_tensorflow.json"
METHODS = ("plain", "apoptosis")
WIDTHS, STEPS = (1024, 1024), 2811  # three times all training images
SETTINGS = ("tolerance", "every", "overhead", "round_to", "schedule", "more")


def network(*hidden: int) -> Any:
    """Return a perceptron of images [n, 784]."""
    layers = [keras.layers.Dense(width, "relu") for width in hidden]
    return keras.Sequential([keras.Input((784,)), *layers, keras.layers.Dense(10)])


def recorded(model: Any, optimizer: Any) -> Any:
    """Return a step of training as a function of images and labels."""

    @tf.function(autograph=False)
    def train(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
            loss = tf.reduce_mean(losses)
        held = [variable.value for variable in model.trainable_variables]
        optimizer.apply(tape.gradient(loss, held), model.trainable_variables)

    return train


def data(*, held_out: bool) -> tuple[np.ndarray, ...]:
    """Return training and test images [n, 784] and labels; of training images alone if held out."""
    own = images(0)
    x, y, test_x, test_y = map(np.asarray, without_test(own) if held_out else own)
    return x.reshape(len(x), -1), y, test_x.reshape(len(test_x), -1), test_y


def score(model: Any, inputs: np.ndarray, labels: np.ndarray) -> float:
    """Accuracy in per cent."""
    places = range(0, len(inputs), TEST_BATCH)
    predicted = [model(inputs[place : place + TEST_BATCH]).numpy().argmax(1) for place in places]
    return round(100 * float(np.mean(np.concatenate(predicted) == labels)), 2)


def widths(model: Any) -> list[int]:
    """Return the neurons of the hidden layers."""
    return [layer.units for layer in model.layers[:-1]]


def run(method: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Train one net and return its row."""
    keras.utils.set_random_seed(seed)
    model = network(*args.widths)
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)
    train = recorded(model, optimizer)
    steps, apoptosis = args.steps, None
    if method == "apoptosis":
        steps = round(args.more * args.steps)
        settings = {name: getattr(args, name) for name in SETTINGS if name != "more"}
        apoptosis = Apoptosis(model, optimizer, **settings)
    inputs, labels, test_inputs, test_labels = data(held_out=args.held_out)
    shuffle = np.random.default_rng(seed)
    per_epoch = len(inputs) // BATCH
    looks = {round(steps * (i + 1) / LOOKS) for i in range(LOOKS)}
    cpu_s = wall_s = event_cpu_s = 0.0
    curve: list[tuple[int, float, float, list[int]]] = []
    order = np.empty(0)
    for step in range(steps):
        if step % per_epoch == 0:
            order = shuffle.permutation(len(inputs))
        rows = order[(step % per_epoch) * BATCH :][:BATCH]
        start = time.process_time(), time.perf_counter()
        optimizer.learning_rate = rate(step, steps)
        x, y = tf.constant(inputs[rows]), tf.constant(labels[rows])
        train(x, y)
        if apoptosis is not None:
            before = time.process_time()
            apoptosis.observe(x)
            if apoptosis.step():
                train = recorded(model, optimizer)
            event_cpu_s += time.process_time() - before
        cpu_s += time.process_time() - start[0]
        wall_s += time.perf_counter() - start[1]
        if step + 1 in looks:
            seen = score(model, test_inputs, test_labels)
            curve.append((step + 1, round(cpu_s, 3), seen, widths(model)))
    return {
        "method": method,
        "seed": seed,
        "held_out": args.held_out,
        "widths": args.widths,
        "plain_steps": args.steps,
        "steps": steps,
        **({name: getattr(args, name) for name in SETTINGS} if apoptosis else {}),
        "score": curve[-1][2],
        "parameters": model.count_params(),
        "cpu_s": round(cpu_s, 3),
        "wall_s": round(wall_s, 3),
        "apoptosis_cpu_s": round(event_cpu_s, 3),
        "events": len(apoptosis.events) if apoptosis else 0,
        **report.columns(curve),
        **origin(),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return markdown: one line for each method, means over seeds."""
    head = ("method", "seeds", "score %", "parameters", "CPU s", "seconds", "CPU s to target")
    lines = []
    target = report.target_of(rows)
    kinds: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        kinds.setdefault((row["method"], *(row.get(name) for name in SETTINGS)), []).append(row)
    for (method, *values), mine in kinds.items():
        own = dict(zip(SETTINGS, values, strict=True))
        label = method if method == "plain" else f"{method}, {own['tolerance']}, {own['overhead']}"
        n, keys = len(mine), ("score", "parameters", "cpu_s", "wall_s")
        mean = {key: sum(row[key] for row in mine) / n for key in keys}
        lines.append(
            [
                label, str(n), f"{mean['score']:.2f}", f"{mean['parameters']:,.0f}",
                f"{mean['cpu_s']:.1f}", f"{mean['wall_s']:.1f}", report.mean_to(mine, target),
            ]
        )  # fmt: skip
    return markdown(head, lines)


def main() -> None:
    """Do the runs that are missing, then print what they say."""
    parser = flags(__doc__)
    parser.add_argument("--quick", action="store_true", help="few steps, a narrower net, one seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of plain")
    parser.add_argument("--more", type=float, default=1.5, help="steps of apoptosis over plain's")
    parser.add_argument("--tolerance", type=float, default=0.015)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--overhead", type=float, default=0.05)
    parser.add_argument("--round-to", type=int, default=8)
    parser.add_argument("--schedule", default="aggressive")
    parser.add_argument("--held-out", action="store_true", help="test on 10,000 training images")
    parser.add_argument("--report", action="store_true", help="run nothing; print the table")
    args = parser.parse_args()
    args.widths = list(WIDTHS)
    if args.quick:
        args.widths, args.steps, args.every, args.tolerance = [64, 64], 60, 20, 0.4
        args.seeds, args.overhead = [0], None  # a look, however little there is to gain
    # CPU seconds of several threads would be no time that passes.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    path = path_of(args, RESULTS)
    rows = load(path)
    for seed in () if args.report else args.seeds:
        for method in args.methods:
            key = {"method": method, "seed": seed, "held_out": args.held_out}
            key |= {"widths": args.widths, "plain_steps": args.steps}
            if method != "plain":
                key |= {name: getattr(args, name) for name in SETTINGS}
            if matching(rows, key):
                continue
            rows.append(run(method, seed, args))
            save(path, rows)
            one = rows[-1]
            print(f"{method} {seed}: {one['score']} %, {one['cpu_s']} s, "
                  f"{one['parameters']:,} parameters", flush=True)  # fmt: skip
    print(table(rows))


if __name__ == "__main__":
    main()
