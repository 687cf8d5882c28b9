"""What does apoptosis gain? Wide and narrow nets on Fashion-MNIST, beside magnitude pruning.

    python benchmarks/apoptosis.py            what is missing of the whole study
    python benchmarks/apoptosis.py --quick    one short run of each: does it all run?

plain        the net as it is
apoptosis    the same net and images, shrinking while it trains
pruned       trained plainly for two thirds of the steps, then its smallest neurons (by the length
             of their incoming weights) go until its widths are those apoptosis ended with, then
             tuned for the last third; its seed needs the row of apoptosis
small        trained from the start with the widths apoptosis ended with

Seconds are of training alone, events included and tests excluded. The target of a net is the best
accuracy that every run of `plain` reached, so that there is a time to it; it is found when tables
are made, from the curves in the rows. A finished run is saved at once and not done again.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accuracy import load, save
from machine import commit, machine
from nets import fashion_mnist
from torch import nn

from sn_memory.apoptosis import Choice, Merge
from sn_memory.apoptosis.torch import Apoptosis
from sn_memory.apoptosis.torch.groups import find_groups
from sn_memory.apoptosis.torch.surgery import Patient, operate

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results/apoptosis.json"
METHODS = ("plain", "apoptosis", "pruned", "small")
BATCH, LOOKS = 64, 20
COLOURS = {"plain": "#5f6368", "apoptosis": "#d55e00", "pruned": "#0072b2", "small": "#009e73"}


def dense(first: int, second: int) -> nn.Module:
    """Return two hidden layers."""
    hidden = [nn.Linear(784, first), nn.ReLU(), nn.Linear(first, second), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(second, 10))


def convolutional(first: int, second: int, third: int) -> nn.Module:
    """Return two convolutions with batch norm, and a hidden layer."""
    layers = [nn.Conv2d(1, first, 3, padding=1), nn.BatchNorm2d(first), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(first, second, 3, padding=1), nn.BatchNorm2d(second), nn.ReLU()]
    layers += [nn.MaxPool2d(2), nn.Flatten(), nn.Linear(49 * second, third), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(third, 10))


NETS: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...]]] = {
    "mlp_wide": (dense, (2048, 2048)),
    "mlp_narrow": (dense, (32, 32)),
    "cnn_wide": (convolutional, (64, 128, 512)),
    "cnn_narrow": (convolutional, (8, 16, 32)),
}


def widths(net: nn.Module) -> list[int]:
    """Outputs of each layer with weights, but the last."""
    made = [m.weight.shape[0] for m in net.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    return made[:-1]


def prune(net: nn.Module, optimizer: Any, sample: torch.Tensor, wanted: list[int]) -> None:
    """Take out the neurons with the shortest incoming weights until the widths are as wanted."""
    groups = [g for g in find_groups(torch.export.export(net, (sample,)), net) if not g.reason]
    patient = Patient(net, optimizer)
    for group, left in zip(groups, wanted, strict=True):
        lengths = patient.value(group.slices[0].name).detach().flatten(1).norm(dim=1)
        readers = len(group.sites)
        gone = sorted(lengths.argsort()[: group.width - left].tolist())
        merges = tuple(Merge(j, None, (0.0,) * readers, (0.0,) * readers) for j in gone)
        operate(patient, group, Choice(group.width, merges, (0.0,) * readers))


def accuracy(net: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Of the test images, in per cent."""
    net.eval()
    with torch.inference_mode():
        answers = torch.cat([net(part).argmax(1) for part in images.split(500)])
    net.train()
    return round(100 * (answers == labels).double().mean().item(), 2)


def run(name: str, method: str, seed: int, args: argparse.Namespace, ended: list[int]) -> dict:
    """Train one net and return its row; `ended` is where apoptosis ended (pruned, small)."""
    torch.manual_seed(seed)
    make, wide = NETS[name]
    net = make(*(ended if method == "small" else wide))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    apoptosis = None
    if method == "apoptosis":
        apoptosis = Apoptosis(
            net, optimizer, tolerance=args.tolerance, every=args.every, schedule=args.schedule
        )
    images, labels = fashion_mnist("train")
    test_images, test_labels = fashion_mnist("t10k")
    shuffle = torch.Generator().manual_seed(seed)
    per_epoch = len(images) // BATCH
    looks = {round(args.steps * (i + 1) / LOOKS) for i in range(LOOKS)}
    seconds = event_seconds = 0.0
    curve: list[tuple[int, float, float, list[int]]] = []
    order = torch.empty(0)
    for step in range(args.steps):
        if step % per_epoch == 0:
            order = torch.randperm(len(images), generator=shuffle)
        rows = order[(step % per_epoch) * BATCH :][:BATCH]
        start = time.perf_counter()
        if method == "pruned" and step == 2 * args.steps // 3:
            prune(net, optimizer, images[rows], ended)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(images[rows]), labels[rows]).backward()
        optimizer.step()
        if apoptosis is not None:
            event_seconds += apoptosis.step().seconds
        seconds += time.perf_counter() - start
        if step + 1 in looks:
            seen = accuracy(net, test_images, test_labels)
            curve.append((step + 1, round(seconds, 3), seen, widths(net)))
    return {
        "net": name,
        "method": method,
        "seed": seed,
        "steps": args.steps,
        "tolerance": args.tolerance,
        "every": args.every,
        "schedule": args.schedule,
        "accuracy": curve[-1][2],
        "parameters": sum(p.numel() for p in net.parameters()),
        "seconds": round(seconds, 3),
        "event_seconds": round(event_seconds, 3),
        "curve_step": [point[0] for point in curve],
        "curve_seconds": [point[1] for point in curve],
        "curve_accuracy": [point[2] for point in curve],
        "curve_widths": [point[3] for point in curve],
        "commit": commit(),
        "machine": machine(),
    }


def seconds_to(row: dict, target: float) -> float | None:
    """Seconds of training until the accuracy was first at the target; None if it never was."""
    points = zip(row["curve_seconds"], row["curve_accuracy"], strict=True)
    return next((seconds for seconds, seen in points if seen >= target), None)


def table(rows: list[dict]) -> str:
    """Return markdown: one line for each net and method, means over seeds."""
    lines = ["| net | method | accuracy % | parameters | s | s to target | target % |"]
    lines.append("|---|---|---|---|---|---|---|")
    for net in NETS:
        plain = [
            max(r["curve_accuracy"]) for r in rows if (r["net"], r["method"]) == (net, "plain")
        ]
        target = min(plain) if plain else 100.0
        for method in METHODS:
            mine = [r for r in rows if (r["net"], r["method"]) == (net, method)]
            if not mine:
                continue
            n = len(mine)
            mean = {k: sum(r[k] for r in mine) / n for k in ("accuracy", "parameters", "seconds")}
            times = [seconds_to(row, target) for row in mine]
            reached = [one for one in times if one is not None]
            to = f"{sum(reached) / n:.1f}" if len(reached) == n else f"{len(reached)} of {n} did"
            lines.append(
                f"| {net} | {method} | {mean['accuracy']:.2f} | {mean['parameters']:,.0f} | "
                f"{mean['seconds']:.1f} | {to} | {target:.2f} |"
            )
    return "\n".join(lines)


def picture(rows: list[dict], net: str, path: Path) -> None:
    """Draw widths over steps, and accuracy and steps over seconds, of the first seed of a net."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    seen = {row["method"]: row for row in reversed(rows) if row["net"] == net}
    if "apoptosis" in seen:
        row = seen["apoptosis"]
        wide = NETS[net][1]
        for layer, first in enumerate(wide):
            sizes = [first] + [point[layer] for point in row["curve_widths"]]
            style = ("-", "--", ":")[layer]
            steps = [0, *row["curve_step"]]
            label = f"layer {layer + 1}"
            left.plot(steps, sizes, style, color=COLOURS["apoptosis"], drawstyle="steps-post",
                      label=label)  # fmt: skip
    left.set(title="neurons left", xlabel="step", ylim=(0, None))
    left.legend(frameon=False)
    for method, row in seen.items():
        colour = COLOURS[method]
        middle.plot(row["curve_seconds"], row["curve_accuracy"], color=colour, label=method)
        right.plot(row["curve_seconds"], row["curve_step"], color=colour, label=method)
    middle.set(title="test accuracy, %", xlabel="seconds of training")
    right.set(title="steps done", xlabel="seconds of training")
    middle.legend(frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    """Do the runs that are missing, then print what they say."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="rows go there and are continued there")
    parser.add_argument("--quick", action="store_true", help="few steps, narrow nets, one seed")
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=9370, help="ten times all images by default")
    parser.add_argument("--tolerance", type=float, default=0.1)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--schedule", default="adaptive")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--png", type=Path, help="picture of the first of --nets")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.quick:
        args.nets, args.seeds, args.steps, args.every = ["mlp_narrow", "cnn_narrow"], [0], 60, 20
        args.tolerance = 0.4
    path = args.json or (ROOT / "benchmarks/out/apoptosis.json" if args.quick else RESULTS)
    rows = load(path)
    same = ("steps", "tolerance", "every", "schedule")
    for seed in args.seeds:
        for net in args.nets:
            ended: list[int] = []
            for method in METHODS:
                key = {"net": net, "method": method, "seed": seed}
                key |= {name: getattr(args, name) for name in same}
                done = next((row for row in rows if key.items() <= row.items()), None)
                if done is None:
                    done = run(net, method, seed, args, ended)
                    rows.append(done)
                    save(path, rows)
                    print(f"{net} {method} {seed}: {done['accuracy']} %, {done['seconds']} s")
                if method == "apoptosis":
                    ended = done["curve_widths"][-1]
    print(table(rows))
    if args.png:
        picture(rows, args.nets[0], args.png)


if __name__ == "__main__":
    main()
