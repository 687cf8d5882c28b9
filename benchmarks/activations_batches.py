"""Images a second under one limit of memory: plain, checkpoints, compressed activations.

    python -m benchmarks activations_batches          about ten minutes
    python -m benchmarks activations_batches --quick  AlexNet, a small limit

The limit is what a plain step takes with --images images of what grows with the batch: the most of
the CPU's allocator, kernels' scratch included and weights' gradients left out. Each way to train
takes the largest batch that keeps it, and steps of the ways take turns, the update of SGD with
momentum included. Seconds are processor time on one thread.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _peaks import ROOT, activation_bytes
from accuracy import load, save
from activations_networks import NETS, losses
from machine import commit, machine
from tables import markdown
from torch import nn

METHODS = ("plain", "checkpoint", "ours")
ROUNDS, MOST = 5, 64


def peak_of(net: nn.Module, method: str, x: torch.Tensor) -> tuple[int, Callable[[], Any]]:
    """The most bytes of a step by a method, and its loss."""
    loss = losses(net, x, (method,))[method]
    for _ in range(2):  # what runs again, and then bits, are chosen
        loss().backward()
    return activation_bytes(loss, [*net.parameters()])[1], loss


def largest(net: nn.Module, method: str, images: torch.Tensor, limit: int) -> tuple[int, int, Any]:
    """Images of the largest batch within the limit, its peak and its loss; 0 if one is too many.

    Peaks are nearly affine in the batch: two of them say where to begin.
    """
    one, three = (peak_of(net, method, images[:count])[0] for count in (1, 3))
    batch = max(1, min(len(images), int(1 + 2 * (limit - one) / (three - one))))
    fits = None
    while 1 <= batch <= len(images):
        peak, loss = peak_of(net, method, images[:batch])
        if peak <= limit:
            fits = batch, peak, loss
            if fits[0] == len(images):
                break
            batch += 1
        elif fits:
            break
        else:
            batch -= 1
    return fits or (0, one, None)


def rows_of(name: str, count: int, most: int, rounds: int) -> list[dict[str, Any]]:
    """One network by all methods."""
    torch.manual_seed(0)
    make, (_, *shape) = NETS[name]
    images = torch.randn(most, *shape)
    limit = peak_of(make(), "plain", images[:count])[0]
    rows, steps = [], {}
    for method in METHODS:
        net = make()
        batch, peak, loss = largest(net, method, images, limit)
        rows.append(
            {
                "net": name,
                "method": method,
                "limit_bytes": limit,
                "images": batch,
                "peak_bytes": peak,
            }
        )
        if batch:
            steps[method] = loss, torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9)
    seconds: dict[str, list[float]] = {method: [] for method in steps}
    for number in range(1 + rounds):
        for method, (loss, optimizer) in steps.items():
            optimizer.zero_grad()
            start = time.process_time()
            loss().backward()
            optimizer.step()
            if number:  # the first one makes the momentum
                seconds[method].append(time.process_time() - start)
    for row in rows:
        if taken := seconds.get(row["method"]):
            row["step_s"] = round(statistics.median(taken), 4)
            row["images_s"] = round(row["images"] / statistics.median(taken), 4)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    plain = {row["net"]: row for row in rows if row["method"] == "plain"}
    head = (
        "net",
        "limit, MiB",
        "way",
        "images",
        "seconds a step",
        "images a second",
        "times plain",
    )
    lines = [
        [
            row["net"] if row["method"] == "plain" else "",
            f"{row['limit_bytes'] / 2**20:.0f}" if row["method"] == "plain" else "",
            row["method"],
            str(row["images"]),
            f"{row['step_s']:.2f}",
            f"{row['images_s']:.2f}",
            f"{row['images_s'] / plain[row['net']]['images_s']:.2f}",
        ]
        for row in rows
    ]
    return markdown(head, lines)


def main() -> None:
    """Make all rows and print the table."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="one net, few images, one round")
    parser.add_argument("--nets", nargs="+", choices=[*NETS], default=["AlexNet", "ResNet-50"])
    parser.add_argument("--images", type=int, default=2, help="of the plain step that is the limit")
    args = parser.parse_args()
    file = "activations_batches.json"
    path = args.json or ROOT / "benchmarks" / ("out" if args.quick else "results") / file
    about = {"commit": commit(), "machine": machine()}
    for net in ["AlexNet"] if args.quick else args.nets:  # saved net by net
        made = rows_of(net, args.images, 6 if args.quick else MOST, 1 if args.quick else ROUNDS)
        rows = [row for row in load(path) if row["net"] != net] + [row | about for row in made]
        rows.sort(key=lambda row: (list(NETS).index(row["net"]), METHODS.index(row["method"])))
        save(path, rows)
    print(f"{table(rows)}\n\nrows: {path}")


if __name__ == "__main__":
    main()
