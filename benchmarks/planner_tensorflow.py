"""Predicted against measured: planned Keras models at two budgets, run on this machine's CPU.

    python -m benchmarks planner_tensorflow [--quick] [--json FILE] [--models NAME ...]
                                            [--side PIXELS] [--batch N] [--time-limit SECONDS]

For each network a training step (loss, gradients, plain SGD) is run as it is, and planned at 60 %
and 35 % of its activation memory. Three peaks are measured, each on top of what is resident:

- `measured`: bytes that ops asked the allocator for and had not given back, by its step trace;
- `allocated`: the same in blocks as handed out, which may be larger;
- `resident`: what the system gave, in a fresh process (`--resident`) with the system's allocator
  below TensorFlow, which hands out and takes back just what is asked for.

Seconds are medians of seven steps on one thread: the process's CPU seconds (`_cpu_s`), which other
work on the machine hardly changes, and wall seconds. Plain and planned steps take turns. Where a
budget cannot be kept (`kept` is false), the smallest plan found stands in. A row `graph` has the
graph's own peak. Rows already in FILE are kept. `--quick` takes small images.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import keras
import tensorflow as tf
from machine import origin
from rows_file import flags, load, save
from timing import interleave
from trials import restart_high_water

import sn_memory.tensorflow
from sn_memory import BudgetError, Plan, check_plan, plan_graph
from sn_memory.graph.liveness import peak
from sn_memory.tensorflow.planned import PlannedStep

SHARES = (0.6, 0.35)


def transformer(layers: int = 12, width: int = 256, heads: int = 4) -> keras.Model:
    """Encoder blocks on vectors, with norm first."""
    x = start = keras.Input((128, width))
    for _ in range(layers):
        normal = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(heads, width // heads)(normal, normal)
        normal = keras.layers.LayerNormalization()(x)
        inner = keras.layers.Dense(4 * width, "gelu")(normal)
        x = x + keras.layers.Dense(width)(inner)
    return keras.Model(start, keras.layers.Dense(10)(x[:, 0]))


def network(name: str, side: int, batch: int) -> tuple[keras.Model, Any]:
    """Return a network and its input."""
    keras.utils.set_random_seed(0)
    if name == "transformer12":
        return transformer(), tf.random.stateless_normal((batch, 128, 256), (0, 0))
    make = {
        "resnet50": keras.applications.ResNet50,
        "vgg16": keras.applications.VGG16,
        "densenet121": keras.applications.DenseNet121,
    }[name]
    model = make(weights=None, input_shape=(side, side, 3), classes=10, classifier_activation=None)
    return model, tf.random.stateless_normal((batch, side, side, 3), (0, 0))


def training_step(model: keras.Model) -> Any:
    """Forward, loss, backward and a plain update."""

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            labels = tf.range(tf.shape(x)[0]) % 10
            entropies = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_mean(entropies)
        gradients = tape.gradient(loss, model.trainable_variables)
        for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
            variable.value.assign_sub(1e-4 * gradient)
        return loss

    return step


def measured(run: Any, x: Any) -> sn_memory.tensorflow.Allocations:
    """What a warm step asks for."""
    float(run(x))
    with sn_memory.tensorflow.Allocations() as allocations:
        float(run(x))
    return allocations


def one_thread() -> None:
    """Let TensorFlow compute on one thread, so that a step's CPU seconds are its work alone."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)


def seconds_of(runs: list[Any], x: Any, rounds: int = 7) -> list[tuple[float, float]]:
    """Medians of some steps each: CPU seconds of this process, and wall seconds.

    The steps take turns, so that a busy machine is busy for all.
    """

    def seconds(run: Any) -> tuple[float, float]:
        began, worked = time.perf_counter(), time.process_time()
        float(run(x))
        return time.process_time() - worked, time.perf_counter() - began

    taken = interleave({number: partial(seconds, run) for number, run in enumerate(runs)}, rounds)
    return [
        (median(cpu for cpu, _ in steps), median(wall for _, wall in steps))
        for steps in taken.values()
    ]


def resident_of(arguments: list[str], plan: Plan | None) -> int:
    """Run a step in a process of its own; return the bytes that its resident memory rises by."""
    settings = {
        "TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "1",
        # Each block a mapping of its own, which goes when it is freed.
        "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=65536",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        if plan is not None:
            plan.to_json(path)
        done = subprocess.run(
            [sys.executable, __file__, "--resident", str(path), *arguments],
            env=os.environ | settings,
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        )
    return int(done.stdout.split()[-1])


def resident(path: Path, name: str, side: int, batch: int) -> int:
    """The child's part of `resident_of`."""
    model, x = network(name, side, batch)
    run = training_step(model)
    if path.exists():
        traced = sn_memory.tensorflow.trace(run, x, profile=False)
        run = PlannedStep(run, traced, Plan.from_json(path))
    float(run(x))
    rises = []
    for _ in range(2):
        gc.collect()
        before = status_kib("VmRSS")
        restart_high_water()
        float(run(x))
        rises.append(status_kib("VmHWM") - before)
    return 1024 * max(rises)


def status_kib(key: str) -> int:
    """A line of the system's account of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1])


def rows_of(name: str, side: int, batch: int, limit: float) -> list[dict[str, Any]]:
    """Rows of one network: the graph, and two budgets."""
    model, x = network(name, side, batch)
    step = training_step(model)
    traced = sn_memory.tensorflow.trace(step, x)
    graph = traced.graph
    top, base = peak(graph).bytes, graph.base_bytes
    arguments = ["--models", name, "--side", str(side), "--batch", str(batch)]
    plain = measured(step, x)
    head = {
        "model": name,
        "framework": "tensorflow",
        "batch": batch,
        "side": side,
        "ops": len(graph.ops),
        "base_bytes": base,
        "baseline_peak_bytes": top,
        "unplanned_measured_bytes": base + plain.peak_bytes,
        "unplanned_allocated_bytes": base + plain.allocated_peak_bytes,
        "unplanned_resident_bytes": base + resident_of(arguments, None),
    }
    rows = [{**head, "kind": "graph"}]
    runs = [step]
    for share in SHARES:
        budget, kept = base + int(share * (top - base)), True
        try:
            plan = plan_graph(graph, budget, techniques=("keep", "recompute"), time_limit_s=limit)
        except BudgetError as error:
            kept, plan = False, error.plan
        replay = check_plan(graph, plan)
        runs.append(PlannedStep(step, traced, plan))
        planned = measured(runs[-1], x)
        rows.append(
            {
                **head,
                "kind": "plan",
                "share": share,
                "kept": kept,
                "budget_bytes": budget,
                "predicted_peak_bytes": plan.peak_bytes,
                "measured_peak_bytes": base + planned.peak_bytes,
                "allocated_peak_bytes": base + planned.allocated_peak_bytes,
                "resident_peak_bytes": base + resident_of(arguments, plan),
                "predicted_overhead": plan.overhead,
                "reruns": replay.reruns,
                "solve_s": plan.solve_s,
            }
        )
    taken = seconds_of(runs, x)
    for row, (cpu_s, wall_s) in zip(rows, taken, strict=True):
        row |= {"unplanned_cpu_s": taken[0][0], "unplanned_s": taken[0][1]}
        row |= {"measured_cpu_s": cpu_s, "measured_s": wall_s}
        shown = {
            key: f"{row[f'{key}_peak_bytes'] / 2**20:.1f}"
            for key in ("predicted", "measured", "resident", "allocated")
            if f"{key}_peak_bytes" in row
        }
        print(
            f"{name} {row['kind']} {row.get('share', '')} kept {row.get('kept')}: {shown} MiB; "
            f"unplanned {top / 2**20:.1f} predicted, {row['unplanned_measured_bytes'] / 2**20:.1f} "
            f"measured; {taken[0][0]:.2f} -> {cpu_s:.2f} CPU s",
            flush=True,
        )
    return rows


def renew(
    path: Path | None, wanted: list[str], measure: Callable[[str], Iterable[dict[str, Any]]]
) -> None:
    """Put new rows of the wanted models in the place of the file's; a stop keeps what is done."""
    rows = [row for row in load(path) if row["model"] not in wanted]
    state = origin()
    for row in (row for name in wanted for row in measure(name)):
        rows.append({**row, **state})
        save(path, rows)


def main(argv: list[str]) -> int:
    """Run, print, write."""
    names = ["resnet50", "vgg16", "densenet121", "transformer12"]
    parser = flags(__doc__)
    parser.add_argument("--quick", action="store_true", help="images of 32 pixels, one network")
    parser.add_argument("--models", nargs="+", choices=names)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--time-limit", type=float, default=8.0, help="seconds of auto per budget")
    parser.add_argument("--resident", type=Path, help="measure a step with this plan")
    args = parser.parse_args(argv)
    one_thread()
    side = 32 if args.quick else args.side
    wanted = args.models or (["vgg16"] if args.quick else names)
    if args.resident:
        print(resident(args.resident, wanted[0], side, args.batch))
        return 0
    renew(args.json, wanted, lambda name: rows_of(name, side, args.batch, args.time_limit))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
