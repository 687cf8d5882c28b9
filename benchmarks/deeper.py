"""How much deeper may a net be in the memory of torch's own step? Run and measured, on the CPU.

    python benchmarks/deeper.py [--json FILE] [--blocks N ...] [--seconds S]

SuperNeurons reports 3.24 times the depth of the next framework on a card of 12 GB
(benchmarks/planner_deep.py plans nets of that size and runs none). Here a residual net of 16
channels on images of 16 x 16, batch 16, is small enough to be run: the budget is the measured peak
of torch's own step with 8 blocks, and deeper nets are planned into it, run, and compared bit by bit
with their unplanned step. A depth that is refused, or takes longer than S to plan, ends the search.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from machine import commit, machine
from torch import nn
from training_rows import save

import sn_memory.torch
from sn_compress.base.text_table import text_table
from sn_memory import BudgetError

FIRST, DEPTHS, WIDTH, SIDE, BATCH = 8, (16, 24, 32, 48, 64), 16, 16, 16
_HEAD = (
    "blocks", "layers", "budget, MiB", "torch, MiB", "planned, MiB", "predicted", "extra time",
    "bit-equal",
)  # fmt: skip
_FORMATS = ("", "", ".2f", ".2f", ".2f", ".2f", ".0%", "")
_MIB = 2**20


class Block(nn.Module):
    """Two convolutions with batch norm beside an identity (He et al. 2016)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip
        self.last = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output, shaped like x."""
        return self.last(x + self.inner(x))


def net(blocks: int) -> nn.Module:
    """A residual net for images [batch, 3, side, side]."""
    torch.manual_seed(0)
    first, head = nn.Conv2d(3, WIDTH, 3, padding=1), nn.Linear(WIDTH, 10)
    stack = [Block(WIDTH) for _ in range(blocks)]
    return nn.Sequential(first, *stack, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)


def row_of(blocks: int, budget_bytes: int | None) -> dict[str, Any]:
    """Plan, run with and without the plan, compare; None as budget keeps everything."""
    model, sample = net(blocks), torch.randn(BATCH, 3, SIDE, SIDE)
    planned = sn_memory.torch.plan(
        model,
        sample,
        "100%" if budget_bytes is None else budget_bytes,
        techniques=("keep",) if budget_bytes is None else ("keep", "recompute"),
        profile=False,
    )
    found = sn_memory.torch.verify(planned, sample)
    return {
        "blocks": blocks,
        "layers": 2 * blocks + 2,
        "parameters": sum(p.numel() for p in model.parameters()),
        "budget_bytes": budget_bytes,
        "unplanned_peak_bytes": found.unplanned_peak_bytes,
        "measured_peak_bytes": found.measured_peak_bytes,
        "predicted_peak_bytes": found.predicted_peak_bytes,
        "planned_extra": planned.sn_memory.plan.overhead,
        "equal": found.equal,
    }


def main() -> None:
    """Go deeper until it is refused."""
    flags = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    flags.add_argument("--json", type=Path)
    flags.add_argument("--blocks", type=int, nargs="+", default=list(DEPTHS))
    flags.add_argument("--seconds", type=float, default=300, help="for a depth; then it ends")
    args = flags.parse_args()
    about = {"commit": commit(), "machine": machine()}
    rows = [row_of(FIRST, None) | about]
    budget = rows[0]["unplanned_peak_bytes"]
    for blocks in args.blocks:
        start = time.perf_counter()
        try:
            rows.append(row_of(blocks, budget) | about)
        except BudgetError as why:
            print(f"{blocks} blocks: {why}")
            break
        if args.json:
            save(args.json, rows)
        if time.perf_counter() - start > args.seconds:
            break
    sizes = ("budget_bytes", "unplanned_peak_bytes", "measured_peak_bytes", "predicted_peak_bytes")
    print(
        text_table(
            _HEAD,
            [
                [
                    str(row["blocks"]), row["layers"],
                    *(None if row[name] is None else row[name] / _MIB for name in sizes),
                    row["planned_extra"], "yes" if row["equal"] else "no",
                ]
                for row in rows
            ],
            _FORMATS,
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
