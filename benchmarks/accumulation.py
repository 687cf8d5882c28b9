"""Micro-batches whose gradients are summed: peaks with the plan and without, and seconds.

    python benchmarks/accumulation.py [--json FILE]

Each network runs three micro-batches without setting gradients to None in between; the first has
none of an earlier one beside it, as the plan counts. Peaks are of live storages (StorageTracker),
and seconds the least of 20 steps, in seconds of the process; all on one thread.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import commit, machine
from planner_torch import QUICK
from torch import nn

from sn_memory.torch import StorageTracker, plan

STEPS = 20


def wide() -> nn.Module:
    """Six layers whose weights are all there is to them."""
    return nn.Sequential(*(it for _ in range(6) for it in (nn.Linear(512, 512), nn.GELU())))


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "6 x linear 512, 16": (wide, lambda: torch.randn(16, 512)),
    **{name: QUICK[name] for name in ("resnet50/8", "vgg16/8", "unet/8")},
}


def peaks(model: nn.Module, sample: torch.Tensor, known: list[torch.Tensor]) -> tuple[int, int]:
    """The peak of the first micro-batch, and the highest of two more."""
    found = []
    for parameter in model.parameters():
        parameter.grad = None
    for _ in range(3):
        held = [it.grad for it in model.parameters() if it.grad is not None]
        tracker = StorageTracker(
            [*model.parameters(), *model.buffers(), sample, *known, *held], allocator="none"
        )
        with tracker:
            out = model(sample)
        output_gradient = torch.ones_like(out)
        tracker.meet(output_gradient)
        with tracker:
            out.backward(output_gradient)
        del out, output_gradient, held
        found.append(tracker.peak_bytes)
    return found[0], max(found[1:])


def seconds(model: nn.Module, sample: torch.Tensor) -> float:
    """The least of some steps."""
    least = float("inf")
    for _ in range(STEPS):
        for parameter in model.parameters():
            parameter.grad = None
        began = time.process_time()
        model(sample).sum().backward()
        least = min(least, time.process_time() - began)
    return least


def rows(name: str) -> list[dict[str, Any]]:
    """Plain, planned, and planned with `overlap`."""
    make, sample_of = NETS[name]
    model, sample = make(), sample_of()
    gradients = sum(it.nbytes for it in model.parameters())
    found: list[dict[str, Any]] = []
    for way, settings in (("plain", None), ("plan", {}), ("plan, overlap", {"overlap": True})):
        planned, known, predicted = model, [], None
        if settings is not None:
            planned = plan(model, sample, "100%", profile=False, planner="greedy", **settings)
            step = planned.sn_memory.latest
            known, predicted = step.known, step.plan.peak_bytes
        first, later = peaks(planned, sample, known)
        found.append(
            {
                "network": name,
                "way": way,
                "gradients": gradients,
                "predicted": predicted,
                "first": first,
                "later": later,
                "seconds": seconds(planned, sample),
            }
        )
    return found


def main() -> None:
    """Print the table, and write it to a file if asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    table = [row for name in NETS for row in rows(name)]
    for row in table:
        predicted = "" if row["predicted"] is None else f"{row['predicted'] / 1024:.0f}"
        print(
            f"| {row['network']} | {row['way']} | {row['gradients'] / 1024:.0f} | {predicted} "
            f"| {row['first'] / 1024:.0f} | {row['later'] / 1024:.0f} "
            f"| {row['seconds'] * 1000:.1f} |"
        )
    if args.json:
        found = {"commit": commit(), "machine": machine(), "rows": table}
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
