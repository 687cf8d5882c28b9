"""Images per second under one memory limit: plain, checkpoints, compressed activations.

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
from functools import partial
from typing import Any

import torch
from _peaks import activation_bytes, make_nets
from activations_networks import NETS, losses
from rows_file import flags
from tables import markdown
from timing import interleave
from torch import nn

from sn_memory.run.estimate import largest

METHODS = ("plain", "checkpoint", "ours")
ROUNDS, MOST = 5, 64


def peak_of(name: str, method: str, x: torch.Tensor) -> tuple[int, nn.Module, Callable[[], Any]]:
    """The most bytes of a step by a method, the net that made it, and its loss."""
    torch.manual_seed(0)
    net = NETS[name][0]()
    loss = losses(net, x, (method,))[method]
    for _ in range(2):  # what runs again, and then bits, are chosen
        loss().backward()
    return activation_bytes(loss, [*net.parameters()])[1], net, loss


def step_seconds(loss: Callable[[], Any], optimizer: torch.optim.Optimizer) -> float:
    """CPU seconds of a step and its update."""
    optimizer.zero_grad()
    start = time.process_time()
    loss().backward()
    optimizer.step()
    return time.process_time() - start


def rows_of(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One network by all methods."""
    most, rounds = (6, 1) if args.quick else (MOST, ROUNDS)
    torch.manual_seed(0)
    images = torch.randn(most, *NETS[name][1][1:])
    limit = peak_of(name, "plain", images[: args.images])[0]
    rows, steps = [], {}
    for method in METHODS:

        def fits(batch: int, method: str = method) -> bool:
            return peak_of(name, method, images[:batch])[0] <= limit

        row = {
            "net": name,
            "method": method,
            "limit_bytes": limit,
            "images": largest(fits, 1, most),
        }
        if row["images"]:
            row["peak_bytes"], net, loss = peak_of(name, method, images[: row["images"]])
            optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9)
            steps[method] = partial(step_seconds, loss, optimizer)
        rows.append(row)
    seconds = interleave(steps, rounds, settle=1)  # the first round makes the momentum
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
        if row["images"]
    ]
    return markdown(head, lines)


def main() -> None:
    """Make all rows and print the table."""
    torch.set_num_threads(1)
    parser = flags(__doc__)
    parser.add_argument(
        "--images", type=int, default=2, help="of the plain step that sets the limit"
    )
    chosen = ["AlexNet", "ResNet-50"]
    make_nets(parser, "activations_batches.json", NETS, METHODS, rows_of, table, chosen)


if __name__ == "__main__":
    main()
