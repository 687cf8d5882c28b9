"""Is AutoCompression ever slower than plain Horovod in TensorFlow? Paired runs, no shaped links.

    OMP_NUM_THREADS=1 horovodrun --gloo -np 2 python -m benchmarks tuned_tensorflow [--json FILE]

As benchmarks/tuned.py, in a `tf.function` of one thread: dense nets whose step is a few, some 30
and some 100 ms long. What is left of the tuner once it has settled on plain is a few ops a step, so
its share should fall as the step grows. `--aa` measures plain against plain as well.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from machine import origin
from pairs import line_of, paired
from rows_file import flags, save

from sn_compress import AutoCompression
from sn_compress.tensorflow.tape import memory_of

# Matrices, their side, rows of a batch.
NETS = {"20 of 48": (20, 48, 8), "8 of 256": (8, 256, 400), "6 of 512": (6, 512, 480)}
PAIRS, STEPS, LEARN, MOST = 9, 40, 12, 400


def trainer(name: str, compression: Any) -> Any:
    """A function that does a step and returns its seconds."""
    count, side, rows = NETS[name]
    rng = np.random.default_rng(0)
    start = (rng.standard_normal((side, side)).astype("f4") / side**0.5 for _ in range(count))
    weights = [tf.Variable(value) for value in start]
    x = tf.constant(np.random.default_rng(hvd.rank()).standard_normal((rows, side)), tf.float32)

    @tf.function
    def train() -> tf.Tensor:
        with hvd.DistributedGradientTape(tf.GradientTape(), compression=compression) as tape:
            y = x
            for weight in weights:
                y = tf.tanh(y @ weight)
            loss = tf.reduce_mean((y - 0.5) ** 2)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss

    def step() -> float:
        start = time.perf_counter()
        train().numpy()
        return time.perf_counter() - start

    return step


def same(value: float) -> float:
    """The mean over the ranks."""
    return float(hvd.allreduce(tf.constant(value, tf.float64), name="bench"))


def compare(name: str, *, pairs: int, steps: int, aa: bool) -> dict[str, Any]:
    """One row."""
    plain = trainer(name, hvd.Compression.none)
    auto = AutoCompression.using()
    tuned = trainer(name, hvd.Compression.none if aa else auto)
    step_s = statistics.median(plain() for _ in range(LEARN))
    learning_s, learned, methods = 0.0, 0, ["plain"]
    while learned < LEARN or not (aa or memory_of(auto).tuner.settled):
        if learned == MOST:
            raise SystemExit(f"{name}: the tuner has not settled after {MOST} steps")
        learning_s, learned = learning_s + tuned() - step_s, learned + 1
    if not aa:
        report = memory_of(auto).report()
        methods = [memory_of(auto).tuner.choice]
        assert ("shared" in methods) == (report["tuned_tensors"] > 0)
    return {
        "model": name,
        "ranks": hvd.size(),
        "against": "plain" if aa else "tuned",
        **paired(plain, tuned, pairs=pairs, steps=steps, mean=same),
        "methods": methods,
        "learning_s": learning_s,
        "load": os.getloadavg()[0],
        **origin(),
    }


def main() -> None:
    """A row for each net."""
    parser = flags(__doc__)
    parser.add_argument("--quick", action="store_true", help="three short pairs of each")
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS))
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--steps", type=int, default=STEPS, help="of each, in a pair")
    parser.add_argument("--aa", action="store_true", help="plain against plain as well")
    args = parser.parse_args()
    if args.quick:
        args.pairs, args.steps = 3, 8
    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()
    rows = []
    for name in args.nets:
        for aa in (False, True) if args.aa else (False,):
            rows.append(compare(name, pairs=args.pairs, steps=args.steps, aa=aa))
            if hvd.rank() == 0:
                print(line_of(rows[-1]), flush=True)
                save(args.json, rows)
    hvd.shutdown()


if __name__ == "__main__":
    main()
