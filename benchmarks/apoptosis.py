"""What does apoptosis gain? Wide and narrow nets, compared with magnitude pruning.

    python -m benchmarks apoptosis            the missing runs of the study
    python -m benchmarks apoptosis --quick    one short run of each: does it all run?

plain        the net as it is
apoptosis    the same net and data, shrinking while it trains
pruned       trained plainly for two thirds of the steps, then its smallest neurons (by the length
             of their incoming weights) go until its widths are those apoptosis ended with, then
             tuned for the last third; its seed needs the row of apoptosis
small        trained from the start with the widths apoptosis ended with

On most wide nets all but plain take more steps: those of a shrunk net are cheap, and part of the
time they save is spent so. Tolerance and steps were chosen with --held-out.

Nets are trained on Fashion-MNIST (score: test accuracy) or on simulated collisions (score: area
under the ROC curve), both in per cent; the learning rate falls to zero over the last half. Times
are of training alone, events included and tests excluded. CPU seconds of one thread are what a
quiet machine's clock shows; wall seconds are beside them. The target of a net is 0.1 below the
lowest score that a run of `plain` ended with; the time to it is read from the curves in the rows. A
finished run is saved at once and not done again.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import apoptosis_report as report
import numpy as np
import torch
from collider import collisions
from machine import origin
from nets import fashion_mnist
from rows_file import flags, load, matching, path_of, save
from scipy.stats import rankdata
from torch import nn

from sn_memory.apoptosis import Choice
from sn_memory.apoptosis.torch import Apoptosis
from sn_memory.apoptosis.torch.groups import find_groups
from sn_memory.apoptosis.torch.surgery import Pruner, merge_group

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results/apoptosis.json"
BATCH, LOOKS = 64, 12
TEST_BATCH = 500
SAME = ("tolerance", "every")


def dense(inputs: int, outputs: int, *hidden: int) -> nn.Module:
    """Return linear layers with ReLU between."""
    sizes = (inputs, *hidden)
    pairs = zip(sizes, hidden, strict=False)
    layers = [layer for i, o in pairs for layer in (nn.Linear(i, o), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(sizes[-1], outputs))


def convolutional(first: int, second: int, third: int, strided: bool = False) -> nn.Module:
    """Return two convolutions with batch norm, each halving the image, and a hidden layer."""
    stack: list[nn.Module] = []
    for inputs, outputs in ((1, first), (first, second)):
        stack.append(nn.Conv2d(inputs, outputs, 3, stride=2 if strided else 1, padding=1))
        stack += [nn.BatchNorm2d(outputs), nn.ReLU()]
        stack += [] if strided else [nn.MaxPool2d(2)]
    stack += [nn.Flatten(), nn.Linear(49 * second, third), nn.ReLU(), nn.Linear(third, 10)]
    return nn.Sequential(*stack)


@dataclass(frozen=True)
class Task:
    """A net, how long and on what (of a seed) it is trained, and the settings of apoptosis.

    more : steps of all methods but plain, of those that plain takes
    """

    make: Callable[..., nn.Module]
    widths: tuple[int, ...]
    steps: int
    data: Callable[[int], tuple[torch.Tensor, ...]]
    tolerance: float = 0.01
    every: int = 100
    round_to: int = 8
    more: float = 1.0


def images(seed: int) -> tuple[torch.Tensor, ...]:
    """Return training and test images and labels, the same for each seed."""
    return _images()


def held_out(data: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Return the first five sixths of the rows for training as such, and the others as the test."""
    inputs, labels, _, _ = data
    n = 5 * len(inputs) // 6
    return inputs[:n], labels[:n], inputs[n:], labels[n:]


@cache
def _images() -> tuple[torch.Tensor, ...]:
    return (*fashion_mnist("train"), *fashion_mnist("t10k"))


def events(seed: int) -> tuple[torch.Tensor, ...]:
    """Return training and test collisions and labels, the same for each seed."""
    return _events()


@cache
def _events() -> tuple[torch.Tensor, ...]:
    return (*collisions("train"), *collisions("test"))


def tumours(seed: int) -> tuple[torch.Tensor, ...]:
    """Return a fold of the 569 rows of breast-cancer Wisconsin: a fifth of them are for the test.

    Seeds 0 to 4 are the five folds. Features are standardised by the rows for training.
    """
    from sklearn.datasets import load_breast_cancer  # of all panels, one needs it

    table, labels = load_breast_cancer(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(table))
    test, train = order[seed % 5 :: 5], np.delete(order, np.s_[seed % 5 :: 5])
    mean, spread = table[train].mean(axis=0), table[train].std(axis=0)
    features = torch.from_numpy((table - mean) / spread).float()
    labels = torch.from_numpy(labels).long()
    return features[train], labels[train], features[test], labels[test]


# 937 steps are all training images once. A CPU's vectors take 16 channels of a convolution at once:
# one with 24 is as slow as one with 32.
TASKS = {
    "mlp_wide": Task(partial(dense, 784, 10), (1024, 1024), 2811, images, more=1.6),
    "mlp_narrow": Task(partial(dense, 784, 10), (32, 32), 2811, images),
    "cnn_wide": Task(
        partial(convolutional, strided=True), (64, 128, 512), 937, images, 0.04, 50, 16, 1.4
    ),
    "cnn_narrow": Task(convolutional, (8, 16, 32), 1874, images, 0.02, 50, 16),
    "table_wide": Task(partial(dense, 14, 2), (512, 512, 512), 2811, events, more=1.25),
    "tumours_wide": Task(partial(dense, 30, 2), (512, 512), 1400, tumours),
}


def widths(net: nn.Module) -> list[int]:
    """Outputs of each layer with weights, but the last."""
    outputs = [m.weight.shape[0] for m in net.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    return outputs[:-1]


def prune(net: nn.Module, optimizer: Any, sample: torch.Tensor, wanted: list[int]) -> None:
    """Take out the neurons with the shortest incoming weights until the widths are as wanted."""
    groups = [g for g in find_groups(torch.export.export(net, (sample,)), net) if not g.reason]
    pruner = Pruner(net, optimizer)
    for group, left in zip(groups, wanted, strict=True):
        lengths = pruner.value(group.slices[0].name).detach().flatten(1).norm(dim=1)
        readers = len(group.sites)
        gone = sorted(lengths.argsort()[: group.width - left].tolist())
        merges = tuple((j, None) for j in gone)
        nothing = np.zeros((len(gone), left + 1))
        merge_group(
            pruner, group, Choice(group.width, merges, (0.0,) * readers, (nothing,) * readers)
        )


def score(net: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> float:
    """Accuracy, or of two classes the area under the ROC curve, in per cent."""
    net.eval()
    with torch.inference_mode():
        logits = torch.cat([net(part) for part in inputs.split(TEST_BATCH)])
    net.train()
    if logits.shape[1] > 2:
        return round(100 * (logits.argmax(1) == labels).double().mean().item(), 2)
    signal = labels.bool().numpy()
    ranks = rankdata((logits[:, 1] - logits[:, 0]).double().numpy())[signal]
    below = ranks.sum() - len(ranks) * (len(ranks) + 1) / 2
    return round(100 * float(below) / (len(ranks) * (len(signal) - len(ranks))), 2)


def rate(step: int, steps: int) -> float:
    """Learning rate: constant, then falling to zero over the last half."""
    return 1e-3 * min(1.0, 2 * (1 - step / steps))


def steps_of(name: str, method: str, args: argparse.Namespace) -> int:
    """How long a method trains a net."""
    more = 1.0 if method == "plain" else args.more or TASKS[name].more
    return round(more * (args.steps or TASKS[name].steps))


def run(name: str, method: str, seed: int, args: argparse.Namespace, ended: list[int]) -> dict:
    """Train one net and return its row; `ended` is where apoptosis ended (pruned, small)."""
    torch.manual_seed(seed)
    task = TASKS[name]
    steps = steps_of(name, method, args)
    net = task.make(*(ended if method == "small" else task.widths))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    apoptosis = None
    if method == "apoptosis":
        apoptosis = Apoptosis(
            net,
            optimizer,
            tolerance=args.tolerance or task.tolerance,
            every=args.every or task.every,
            schedule=args.schedule,
            round_to=task.round_to,
        )
    data = task.data(seed)
    inputs, labels, test_inputs, test_labels = held_out(data) if args.held_out else data
    shuffle = torch.Generator().manual_seed(seed)
    per_epoch = len(inputs) // BATCH
    looks = {round(steps * (i + 1) / LOOKS) for i in range(LOOKS)}
    cpu_s = wall_s = event_cpu_s = 0.0
    curve: list[tuple[int, float, float, list[int]]] = []
    order = torch.empty(0)
    for step in range(steps):
        if step % per_epoch == 0:
            order = torch.randperm(len(inputs), generator=shuffle)
        rows = order[(step % per_epoch) * BATCH :][:BATCH]
        start = time.process_time(), time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps)
        if method == "pruned" and step == 2 * steps // 3:
            prune(net, optimizer, inputs[rows], ended)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs[rows]), labels[rows]).backward()
        optimizer.step()
        if apoptosis is not None:
            before = time.process_time()
            apoptosis.step()
            event_cpu_s += time.process_time() - before
        cpu_s += time.process_time() - start[0]
        wall_s += time.perf_counter() - start[1]
        if step + 1 in looks:
            seen = score(net, test_inputs, test_labels)
            curve.append((step + 1, round(cpu_s, 3), seen, widths(net)))
    return {
        "net": name,
        "method": method,
        "seed": seed,
        "steps": steps,
        "tolerance": args.tolerance or task.tolerance,
        "every": args.every or task.every,
        "round_to": task.round_to,
        "schedule": args.schedule,
        "held_out": args.held_out,
        "score": curve[-1][2],
        "parameters": sum(p.numel() for p in net.parameters()),
        "cpu_s": round(cpu_s, 3),
        "wall_s": round(wall_s, 3),
        "apoptosis_cpu_s": round(event_cpu_s, 3),
        "events": 0 if apoptosis is None else len(apoptosis.events),
        **report.columns(curve),
        **origin(),
    }


def main() -> None:
    """Do the runs that are missing, then print what they say."""
    parser = flags(__doc__)
    parser.add_argument("--quick", action="store_true", help="few steps, narrow nets, one seed")
    parser.add_argument("--nets", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="instead of each net's own number")
    parser.add_argument("--more", type=float, help="instead of each net's factor of plain's steps")
    parser.add_argument(
        "--held-out", action="store_true", help="test on training rows; needs --json"
    )
    parser.add_argument("--tolerance", type=float, help="instead of each net's own")
    parser.add_argument("--every", type=int, help="instead of each net's own")
    parser.add_argument("--schedule", default="aggressive")
    parser.add_argument(
        "--methods", nargs="+", choices=report.METHODS, default=list(report.METHODS)
    )
    parser.add_argument("--report", action="store_true", help="run nothing; print the table")
    parser.add_argument("--png", type=Path, help="plot the first of --nets and --seeds")
    args = parser.parse_args()
    torch.set_num_threads(1)  # CPU seconds of several threads would be no time that passes
    if args.held_out and not args.json:
        parser.error("--held-out without --json; expected a file of its own for what is tried")
    if args.quick:
        args.nets, args.seeds, args.steps, args.every = ["mlp_narrow", "cnn_narrow"], [0], 60, 20
        args.tolerance = 0.4
    path = path_of(args, RESULTS)
    rows = load(path)
    for seed in () if args.report else args.seeds:
        for net in args.nets:
            ended: list[int] = []
            for method in args.methods:
                key = {"net": net, "method": method, "seed": seed, "held_out": args.held_out}
                if method != "plain":
                    own = {name: getattr(args, name) or getattr(TASKS[net], name) for name in SAME}
                    key |= {**own, "schedule": args.schedule}
                key["steps"] = steps_of(net, method, args)
                done = matching(rows, key)
                if done is None:
                    done = run(net, method, seed, args, ended)
                    rows.append(done)
                    save(path, rows)
                    print(
                        f"{net} {method} {seed}: {done['score']} %, {done['cpu_s']} s", flush=True
                    )
                if method == "apoptosis":
                    ended = done["curve_widths"][-1]
    print(report.table(rows, TASKS))
    if args.png:
        net, drawn = args.nets[0], [r for r in rows if r["seed"] == args.seeds[0]]
        report.picture(drawn, net, TASKS[net].widths, args.png)


if __name__ == "__main__":
    main()
