"""Compare shared supports at equal words, with low-rank factors and with gathered top-k.

    python benchmarks/supports.py --follow   what each method catches of each tensor's gradients,
                                             on the path of plain training
    python benchmarks/supports.py            training with each method

Eight simulated ranks, as in benchmarks/study.py, in short runs.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import _study_methods as methods
import numpy as np
import study
import torch
from _supports import Candidate
from nets import NETS, Transformer, fashion_mnist
from simulated import (
    Exchange,
    Floats,
    Plain,
    exchange_gradients,
    rank_gradients,
    sum_in_order,
)

from sn_compress.exchange.factors import Factors
from sn_compress.exchange.shared import Summable

RANKS = study.RANKS
SETTLED = 20  # steps until memories have their usual size
SUPPORTS: dict[str, dict[str, Any]] = {
    "E1 past": {"named": 0.0},
    "E2 leader": {"named": 1.0, "by": "leader"},
    "E12 half": {"named": 0.5, "by": "leader"},
    "E2s union": {"named": 1.0, "by": "all"},
    "half union": {"named": 0.5, "by": "all"},
    "fresh leader": {"named": 1.0, "by": "leader", "fresh": True},
    "fresh union": {"named": 1.0, "by": "all", "fresh": True},
    "fresh half": {"named": 0.5, "by": "all", "fresh": True},
    "rows ahead": {"rows": True},
    "rows fresh": {"rows": True, "fresh": True},
}
# Of a vocabulary of 2**14 a batch has a small part, as with words.
NETS["wide"] = partial(Transformer, bits=14)
study.RATES["wide", "adam"] = study.RATES["transformer", "adam"]

Make = Callable[[Floats], Summable]  # from a mean gradient to begin with


class Summed(Exchange):
    """One tensor of a Summable, dense at first; counts like benchmarks/simulated.py."""

    def __init__(self, make: Make, dense: int = methods.DENSE) -> None:
        self.make, self.left = make, dense
        self.parts: list[Summable] = []

    def mean(self, vectors: Sequence[Floats]) -> Floats:
        ranks = len(vectors)
        if self.left:
            self.left -= 1
            total = sum_in_order(vectors)
            self._reduced(total.nbytes, ranks)
            mean: Floats = total / np.float32(ranks)
            if not self.left:
                self.parts = [self.make(mean) for _ in vectors]
            return mean
        pairs = enumerate(zip(self.parts, vectors, strict=True))
        running = [part.exchange(v, ranks=ranks, rank=r) for r, (part, v) in pairs]
        words = [next(rounds) for rounds in running]
        while True:
            total = sum_in_order(words)
            self._reduced(total.nbytes, ranks)
            words, means = [], []
            for rounds in running:
                try:
                    words.append(rounds.send(total))
                except StopIteration as end:
                    means.append(end.value)
            if means:
                return means[0]


def most(make: Callable[[int], Summable], top: int, words: float) -> int:
    """The largest setting, 1 to top, that fits the words; 1 if none does."""
    low, high = 1, top + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if sum(make(middle).words(RANKS)) <= words else (low, middle)
    return low


def sparse(
    shape: tuple[int, ...], words: float, *, rows: bool = False, **options: Any
) -> Make:  # fmt: skip
    """A Candidate with as many values, or rows of the matrix, as fit the words."""
    n, unit = math.prod(shape), math.prod(shape[1:]) if rows else 1
    count = most(lambda k: Candidate(n, count=k, unit=unit, **options), n // unit, words)
    return lambda start: Candidate(n, count=count, unit=unit, start=start, **options)


def low_rank(shape: tuple[int, ...], words: float) -> Make:
    """Factors of the largest rank that fits the words."""
    sides = methods.matrix(shape)
    rank = most(lambda r: Factors(shape=shape, rank=r), min(sides), words)
    return lambda start: Factors(shape=shape, rank=rank, start=start)


def follow(job: tuple[str, str, float, int, list[str], str]) -> list[dict[str, Any]]:
    """Plain training, its gradients given to every method; rows by tensor and method."""
    net_name, optimizer_name, ratio, steps, wanted, only = job
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = NETS[net_name]().to(memory_format=torch.channels_last)
    rate = study.RATES[net_name, optimizer_name]
    optimizer: torch.optim.Optimizer
    if optimizer_name == "sgd":
        optimizer = torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9)
    else:
        optimizer = torch.optim.Adam(net.parameters(), lr=rate)
    shapes = study.compressed(net)
    plain: dict[str, Exchange] = {name: Plain() for name, _ in net.named_parameters()}
    order = [name for name, _ in net.named_parameters()]
    tried: dict[tuple[str, str], Summed] = {}
    for name, shape in shapes.items():
        if only not in name:
            continue
        words = math.prod(shape) / ratio
        for label in wanted:
            make = (
                low_rank(shape, words)
                if label == "factors"
                else sparse(shape, words, **SUPPORTS[label])
            )
            tried[name, label] = Summed(make)
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    images, labels = fashion_mnist("train")
    rows = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    each = RANKS * study.BATCH
    for step in range(steps):
        mine = rows[step * each % 59904 :][:each]
        x = images[mine].view(RANKS, study.BATCH, *images.shape[1:])
        gradients, _ = rank_gradients(net, x, labels[mine].view(RANKS, study.BATCH))
        for (name, label), exchange in tried.items():
            vectors = [g[order.index(name)] for g in gradients]
            before = np.mean([p.memory for p in exchange.parts], axis=0) if exchange.parts else 0
            result = exchange.mean(vectors)
            if step >= methods.DENSE + SETTLED:
                fresh = np.mean(vectors, axis=0)
                whole = fresh + before
                missed = float(np.square(whole - result).sum())
                found = sums[name, label]
                found[0] += 1 - missed / max(float(np.square(whole).sum()), 1e-30)
                found[1] += missed
                found[2] += float(np.square(fresh).sum())
        exchange_gradients(net, gradients, plain)
        for group in optimizer.param_groups:
            group["lr"] = rate * study.learning_rate(step, steps)
        optimizer.step()
    count = steps - methods.DENSE - SETTLED
    return [
        {
            "net": net_name, "optimizer": optimizer_name, "ratio": ratio, "steps": steps,
            "tensor": name, "shape": shapes[name], "method": label,
            "words": sum(exchange.parts[0].words(RANKS)),
            "size": getattr(exchange.parts[0], "count", None) or exchange.parts[0].rank,
            "caught": round(sums[name, label][0] / count, 4),
            "owed": round(math.sqrt(sums[name, label][1] / max(sums[name, label][2], 1e-30)), 3),
        }
        for (name, label), exchange in tried.items()
    ]  # fmt: skip


def _build(
    options: dict[str, Any], shapes: methods.Shapes, ranks: int, ratio: float
) -> methods.Exchanges:
    found: methods.Exchanges = {}
    for name, shape in shapes.items():
        found[name] = Summed(sparse(shape, math.prod(shape) / ratio, **options))
    return found


for _label, _options in SUPPORTS.items():
    methods.BUILD[_label] = ("shared", partial(_build, _options))


def main() -> None:
    """Follow, or train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--follow", action="store_true")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--ratios", type=float, nargs="+", default=[50.0, 150.0])
    parser.add_argument("--methods", nargs="+", help="auto and all supports")
    parser.add_argument("--tensor", default="", help="follow those with this in their names")
    parser.add_argument("--nets", nargs="+", default=["cnn", "transformer"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    pairs = [(net, "sgd" if net == "cnn" else "adam") for net in args.nets]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        if args.follow:
            wanted = args.methods or ["factors", *SUPPORTS]
            jobs = [
                (*pair, ratio, args.steps, wanted, args.tensor)
                for ratio in args.ratios
                for pair in pairs
            ]
            for rows in pool.imap(follow, jobs):
                _save(args.json, rows)
        else:
            runs = [
                study.Run(net, kind, method, ratio, 0, args.steps, study.RATES[net, kind])
                for net, kind in pairs
                for method in args.methods or ["auto", *SUPPORTS]
                for ratio in args.ratios
            ]
            for row in pool.imap(study.train, runs):
                _save(args.json, [row])


def _save(path: Path | None, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        print(*row.values(), flush=True)
        if path:
            with path.open("a") as out:
                out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
