"""Is AutoCompression ever slower than plain Horovod? Paired runs of small nets, no shaped links.

    OMP_NUM_THREADS=1 horovodrun --gloo -np 2 python -m benchmarks tuned [--json FILE]
    OMP_NUM_THREADS=1 horovodrun --gloo -np 2 python -m benchmarks tuned --framework tensorflow

On a link as fast as memory compression loses, and the tuner should detect it. Two optimizers
train the same net in one process and alternate step by step: plain, tuned, tuned, plain, so that
other load on the machine affects both equally. A pair is the medians of --steps steps of each; a
row has the median of the pairs' ratios. The tuner has decided before the first pair; the time until
then is a separate column. `--aa` also measures plain against plain: how far a ratio can be from 1
by chance.

In TensorFlow a step is a `tf.function` of one thread, of dense nets whose step is a few, some 30
and some 100 ms long: what is left of the tuner once it has settled on plain is a few ops a step, so
its share should fall as the step grows.
"""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from machine import origin
from rows_file import flags, save

PAIRS = 9


class Pair(NamedTuple):
    """Two ways of a step, which return its seconds, and the tuner of the second one's compression.

    method : what the tuner has chosen
    """

    plain: Callable[[], float]
    tuned: Callable[[], float]
    tuner: Callable[[], Any]
    method: Callable[[], str]


class Torch:
    """Convolutional nets, a transformer and three dense layers."""

    steps, learn, most = 60, 80, 80
    batch = 32

    def __init__(self) -> None:
        import horovod.torch as hvd
        import torch
        from nets import NETS

        torch.set_num_threads(1)
        self.hvd, self.nets = hvd, {"mlp": self.mlp, **NETS}

    @staticmethod
    def mlp() -> Any:
        """Three dense layers, 535,818 parameters."""
        from torch import nn

        return nn.Sequential(
            nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(),
            nn.Linear(256, 10),
        )  # fmt: skip

    def mean(self, value: float) -> float:
        """The mean over the ranks."""
        import torch

        total = self.hvd.allreduce(torch.tensor([value], dtype=torch.float64), name="bench")
        return float(total[0])

    def trainer(self, name: str, compression: Any, *, rate: float = 0.01) -> Any:
        """A function that does a step and returns its seconds; its optimizer."""
        import torch
        from torch import nn

        torch.manual_seed(0)
        net = self.nets[name]()
        optimizer = self.hvd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=rate),
            named_parameters=net.named_parameters(),
            compression=compression,
        )
        images = torch.randn(self.batch, 1, 28, 28)
        labels = torch.randint(0, 10, (self.batch,))

        def step() -> float:
            start = time.perf_counter()
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(images), labels).backward()
            optimizer.step()
            return time.perf_counter() - start

        return step, optimizer

    def pair(self, name: str, *, aa: bool) -> Pair:
        """Plain, and tuned or plain once more."""
        from sn_compress import AutoCompression
        from sn_compress.torch.under_horovod.memory import memory_of

        none = self.hvd.Compression.none
        plain, _ = self.trainer(name, none)
        tuned, optimizer = self.trainer(name, none if aa else AutoCompression)

        def tuner() -> Any:
            return memory_of(optimizer).engine.tuner

        return Pair(plain, tuned, tuner, lambda: tuner().choice)


class TensorFlow:
    """Matrices with a tanh after each: how many, their side, rows of a batch."""

    steps, learn, most = 40, 12, 400

    def __init__(self) -> None:
        import horovod.tensorflow as hvd
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        self.hvd = hvd
        self.nets = {"20 of 48": (20, 48, 8), "8 of 256": (8, 256, 400), "6 of 512": (6, 512, 480)}

    def mean(self, value: float) -> float:
        """The mean over the ranks."""
        import tensorflow as tf

        return float(self.hvd.allreduce(tf.constant(value, tf.float64), name="bench"))

    def trainer(self, name: str, compression: Any) -> Callable[[], float]:
        """A function that does a step and returns its seconds."""
        import tensorflow as tf

        hvd = self.hvd
        count, side, rows = self.nets[name]
        rng = np.random.default_rng(0)
        start = (rng.standard_normal((side, side)).astype("f4") / side**0.5 for _ in range(count))
        weights = [tf.Variable(value) for value in start]
        x = tf.constant(np.random.default_rng(hvd.rank()).standard_normal((rows, side)), tf.float32)

        @tf.function
        def train() -> Any:
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

    def pair(self, name: str, *, aa: bool) -> Pair:
        """Plain, and tuned or plain once more."""
        from sn_compress import AutoCompression
        from sn_compress.tensorflow.tape import memory_of

        none, auto = self.hvd.Compression.none, AutoCompression.using()
        plain, tuned = self.trainer(name, none), self.trainer(name, none if aa else auto)

        def method() -> str:
            choice: str = memory_of(auto).tuner.choice
            assert (choice == "shared") == (memory_of(auto).report()["tuned_tensors"] > 0)
            return choice

        return Pair(plain, tuned, lambda: memory_of(auto).tuner, method)


FRAMEWORKS: dict[str, Any] = {"torch": Torch, "tensorflow": TensorFlow}


def paired(
    plain: Callable[[], float],
    other: Callable[[], float],
    *,
    pairs: int,
    steps: int,
    mean: Callable[[float], float],
) -> dict[str, Any]:
    """The median of the pairs' ratios, and the middle half of them; in seconds, and in CPU seconds.

    A pair is the medians of so many steps of each way. They take turns step by step (plain, other,
    other, plain), so that what else runs on the machine meets both alike.

    plain, other : do a step and return its seconds
    mean : over the ranks
    """
    walls, cpus = [], []
    for _ in range(pairs):
        wall: dict[Any, list[float]] = {plain: [], other: []}
        cpu: dict[Any, list[float]] = {plain: [], other: []}
        for number in range(steps):
            for way in (plain, other) if number % 2 else (other, plain):
                start = time.process_time()
                wall[way].append(way())
                cpu[way].append(time.process_time() - start)
        for medians, seconds in ((walls, wall), (cpus, cpu)):
            medians.append([mean(statistics.median(seconds[way])) for way in (plain, other)])
    ratios = sorted(b / a for a, b in walls)
    cpu_ratios = sorted(b / a for a, b in cpus)
    low, _, high = statistics.quantiles(ratios, n=4) if pairs > 1 else ratios * 3
    cpu_low, _, cpu_high = statistics.quantiles(cpu_ratios, n=4) if pairs > 1 else cpu_ratios * 3
    return {
        "pairs": pairs,
        "steps_per_pair": steps,
        "plain_s": statistics.median(a for a, _ in walls),
        "tuned_s": statistics.median(b for _, b in walls),
        "tuned_over_plain": statistics.median(ratios),
        "lower_quartile": low,
        "upper_quartile": high,
        "least": ratios[0],
        "most": ratios[-1],
        "plain_cpu_s": statistics.median(a for a, _ in cpus),
        "tuned_over_plain_cpu": statistics.median(cpu_ratios),
        "lower_quartile_cpu": cpu_low,
        "upper_quartile_cpu": cpu_high,
    }


def line_of(row: dict[str, Any]) -> str:
    """A row as people read it."""
    return (
        f"{row['model']}: plain {1e3 * row['plain_s']:.2f} ms, {row['against']} "
        f"{1e3 * row['tuned_s']:.2f} ms, ratio {row['tuned_over_plain']:.3f} "
        f"({row['lower_quartile']:.3f} to {row['upper_quartile']:.3f}), of "
        f"{1e3 * row['plain_cpu_s']:.2f} CPU ms {row['tuned_over_plain_cpu']:.3f} "
        f"({row['lower_quartile_cpu']:.3f} to {row['upper_quartile_cpu']:.3f}), "
        f"{', '.join(row['methods'])}"
    )


def compare(framework: Any, name: str, *, pairs: int, steps: int, aa: bool) -> dict[str, Any]:
    """One row: the median of the pairs' ratios, and the middle half of them."""
    pair = framework.pair(name, aa=aa)
    step_s = statistics.median(pair.plain() for _ in range(framework.learn))
    learning_s, learned = 0.0, 0
    while learned < framework.learn or not (aa or pair.tuner().settled):
        if learned == framework.most:
            raise SystemExit(f"{name}: the tuner has not settled after {learned} steps")
        learning_s, learned = learning_s + pair.tuned() - step_s, learned + 1
    return {
        "model": name,
        "ranks": framework.hvd.size(),
        "against": "plain" if aa else "tuned",
        **paired(pair.plain, pair.tuned, pairs=pairs, steps=steps, mean=framework.mean),
        "methods": ["plain" if aa else pair.method()],
        "learning_s": learning_s,
        "load": os.getloadavg()[0],
        **origin(),
    }


def main() -> None:
    """A row for each net."""
    parser = flags(__doc__)
    parser.add_argument("--framework", choices=FRAMEWORKS, default="torch")
    parser.add_argument("--quick", action="store_true", help="three short pairs per net")
    parser.add_argument("--nets", nargs="+", help="nets of the framework; default: all")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--steps", type=int, help="steps per run; default: torch 60, else 40")
    parser.add_argument("--aa", action="store_true", help="also plain against plain")
    args = parser.parse_args()
    framework = FRAMEWORKS[args.framework]()
    pairs, steps = (3, 8) if args.quick else (args.pairs, args.steps or framework.steps)
    framework.hvd.init()
    first = framework.hvd.rank() == 0
    if first:
        logging.basicConfig(format="%(message)s")
        logging.getLogger("sn_compress.prediction.tuning").setLevel(logging.INFO)
    rows = []
    for name in args.nets or framework.nets:
        for aa in (False, True) if args.aa else (False,):
            rows.append(compare(framework, name, pairs=pairs, steps=steps, aa=aa))
            if first:
                print(line_of(rows[-1]), flush=True)
                save(args.json, rows)
    framework.hvd.shutdown()


if __name__ == "__main__":
    main()
