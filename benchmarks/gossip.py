"""What does gossip cost in accuracy? A convolutional net on Fashion-MNIST, 4 and 8 ranks, 3 seeds.

    python -m benchmarks gossip            the missing runs of the whole study
    python -m benchmarks gossip --quick    one short run of each method: does it all run?
    python -m benchmarks gossip --steps 600 --seeds 0 --methods "weights, top-k" --pull 0.5

Ranks are threads of one process with the optimizer's own code (benchmarks/local_peers.py); every
message is real. All methods see the same images in the same order, 64 a step, shared among the
ranks. The consensus model is tested, the mean of all replicas, and one worker beside it. Finished
runs are saved at once and not repeated. The whole study also writes its table into docs/gossip.md
and draws docs/gossip.png.
"""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gossip_report as report
import numpy as np
import torch
from local_peers import Hall, LocalPeers
from machine import origin
from nets import NETS, fashion_mnist
from rivals.codecs import codec
from rows_file import flags, interruptible, load, missing, path_of, save
from study import learning_rate

import sn_compress
from sn_compress.gossip import consensus_distance
from sn_compress.gossip.differences import PULL
from sn_compress.torch.gossip import GossipOptimizer

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results/gossip.json"
BATCH = 64  # images per step, of all ranks together
# The rate that benchmarks/study.py found for this net; two passes over 60,000 images.
RATE, STEPS, LOOKS = 0.05, 1875, 50


def _topk(shape: tuple[int, ...]) -> sn_compress.Codec:
    return sn_compress.codec("topk", theta=0.98)


def _onebit(shape: tuple[int, ...]) -> sn_compress.Codec:
    return sn_compress.codec("onebit")


def _fft(shape: tuple[int, ...]) -> sn_compress.Codec:
    return sn_compress.codec("fft", theta=0.9, bits=4)


def _auto(shape: tuple[int, ...]) -> sn_compress.Codec:
    return codec("auto", ratio=22, shape=shape)


METHODS: dict[str, dict[str, Any]] = {
    "all-reduce": {},
    "weights": {},
    "weights, top-k": {"codec": _topk},
    "weights, onebit": {"codec": _onebit},
    "weights, fft": {"codec": _fft},
    "weights, auto": {"codec": _auto},
    "weights, not overlapped": {"overlap": False},
}
STUDIED = ("all-reduce", "weights", "weights, top-k")


@dataclass(frozen=True)
class Run:
    """What one run is; two runs with equal fields give equal results."""

    method: str
    ranks: int
    seed: int
    steps: int
    pull: float = 1.0


def train(run: Run) -> dict[str, Any]:
    """Do one run and return it as a flat row."""
    torch.set_num_threads(1)
    images, labels = fashion_mnist("train")
    shuffle = torch.Generator().manual_seed(run.seed)
    passes = -(-run.steps * BATCH // len(images))
    order = torch.cat([torch.randperm(len(images), generator=shuffle) for _ in range(passes)])
    share = BATCH // run.ranks
    torch.manual_seed(run.seed)
    first = NETS["cnn"]()
    hall = Hall(run.ranks)
    looks = set(np.linspace(1, run.steps, min(LOOKS, run.steps)).astype(int).tolist())
    curve: list[tuple[int, float, float]] = []

    def work(peers: LocalPeers) -> tuple[Any, float]:
        net = NETS["cnn"]()
        net.load_state_dict(first.state_dict())
        net.to(memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.9)
        gossip = run.method != "all-reduce"
        if gossip:
            settings = METHODS[run.method]
            GossipOptimizer(optimizer, group=peers, pull=run.pull, **settings)
        parameters = list(net.parameters())
        for step in range(run.steps):
            rows = order[(step * run.ranks + peers.rank) * share :][:share]
            for group in optimizer.param_groups:
                group["lr"] = RATE * learning_rate(step, run.steps)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(images[rows]), labels[rows]).backward()
            if not gossip:
                flat = torch.cat([p.grad.reshape(-1) for p in parameters])
                mean = peers.sum("gradients", flat)() / run.ranks
                sizes = [p.numel() for p in parameters]
                for p, part in zip(parameters, mean.split(sizes), strict=True):
                    p.grad = part.view_as(p)
            optimizer.step()
            if step + 1 in looks:
                own = torch.cat([p.detach().reshape(-1) for p in parameters])
                replicas = peers.gather(own.numpy())
                if peers.rank == 0:
                    norm = float(np.linalg.norm(np.mean(replicas, 0, np.float64)))
                    curve.append((step + 1, consensus_distance(replicas), norm))
        worker = accuracy(net) if peers.rank == 0 else 0.0
        sent = optimizer.report()["bytes_per_step"] if gossip else math.nan
        if gossip:
            optimizer.consensus()
        return net, worker, sent

    start = time.process_time()
    results = hall.run(work)
    net, worker, sent = results[0]
    dense = 4 * sum(p.numel() for p in net.parameters())
    if run.method == "all-reduce":
        sent = 2 * (run.ranks - 1) / run.ranks * dense
    return asdict(run) | {
        "accuracy": accuracy(net),
        "worker_accuracy": worker,
        "bytes_per_step": sent,
        "ratio": round(dense / sent, 2),
        "steps_seen": [step for step, _, _ in curve],
        "distance": [round(distance, 6) for _, distance, _ in curve],
        "norm": [round(norm, 4) for _, _, norm in curve],
        "seconds": round(time.process_time() - start, 1),  # of one core
    }


def accuracy(net: torch.nn.Module) -> float:
    """Of the test images, in per cent."""
    images, labels = fashion_mnist("t10k")
    with torch.inference_mode():
        answers = torch.cat([net(part).argmax(1) for part in images.split(500)])
    return round(100 * (answers == labels).double().mean().item(), 2)


def plan(
    methods: Sequence[str],
    seeds: Sequence[int],
    ranks: Sequence[int],
    steps: int,
    pull: float = PULL,
) -> list[Run]:
    """All runs, seed by seed."""
    return [
        Run(method, r, seed, steps, pull=pull if "codec" in METHODS[method] else 1.0)
        for seed in seeds
        for r in ranks
        for method in methods
    ]


def main() -> None:
    """Do the runs that are missing, then write what they say."""
    parser = flags(__doc__)
    parser.add_argument("--quick", action="store_true", help="few steps, 4 ranks, one seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 4])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(STUDIED))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--pull", type=float, default=PULL, help="pull of methods with a codec")
    parser.add_argument("--workers", type=int, default=2, help="parallel processes")
    parser.add_argument("--png", type=Path, help="plot all rows")
    args = parser.parse_args()
    path = path_of(args, RESULTS)
    runs = plan(args.methods, args.seeds, args.ranks, args.steps, args.pull)
    if args.quick:
        runs = plan(list(METHODS), [0], [4], 20)
    rows = [] if args.quick else load(path)
    fields = tuple(asdict(runs[0]))
    about = origin()
    with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
        for row in pool.imap_unordered(train, missing(runs, rows)):
            rows.append(row | about)
            save(path, rows)
            cells = [str(row[f]) for f in (*fields, "ratio", "accuracy", "worker_accuracy")]
            print(" ".join(cells), f"{row['distance'][-1]:.4f} ({row['seconds']} s)", flush=True)
    report.publish(rows, path, RESULTS, args.png)


if __name__ == "__main__":
    interruptible(main)
