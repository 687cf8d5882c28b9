"""How much of an offloading plan's copies overlaps with ops, over a modelled link.

    python -m benchmarks offload_hidden [--json FILE] [--models NAME ...] [--steps 5]

The link is modelled: a thread each way that copies at a set rate
(`tests/memory_torch/modelled_link.py`). Its rate is a multiple of what would move all activations
once each way in the time of a step. Plans may keep
and offload, not recompute; budgets are shares of what a step without a plan takes. Where more has
to leave than fits beside the ops they wait: the last budget is such a one. Seconds of copies are
those of the model; the steps themselves run. Measured are the spans of all copies and of all waits
for one; hidden is the share of the copies' seconds in which ops did not wait. A link of a
thousandth is asked for as well, with plans that may recompute: nothing hides behind it.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from machine import command, origin
from planner_torch import UNet, vgg16
from rows_file import flags, save

from sn_memory.graph.liveness import peak
from sn_memory.torch import plan, trace
from sn_memory.torch.host import copies as host_copies

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "memory_torch"))
from modelled_link import LinkLanes

MIB = 1 << 20


class Squares(torch.nn.Module):
    """A network and its loss: what it returns is one number, which stays where it is."""

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.net(x).square().mean()
        return loss


NETS: dict[str, tuple[Callable[[], torch.nn.Module], Callable[[], torch.Tensor]]] = {
    "vgg16": (
        lambda: Squares(vgg16(size=96, shrink=2, hidden=256, classes=100)),
        lambda: torch.randn(8, 3, 96, 96),
    ),
    "unet": (lambda: Squares(UNet(width=24)), lambda: torch.randn(2, 1, 192, 192)),
}
RATES = (1.0, 2.0)
SHARES = (0.9, 0.85, 0.65)
SLOW = 0.001
LIMIT_S = 8.0


def measured(model: Any, sample: torch.Tensor, lanes: LinkLanes, steps: int) -> dict[str, Any]:
    """Run steps, and return what the link saw of each but the first."""
    hidden, seconds, copies = [], [], []
    for at in range(steps + 1):
        lanes.link.copies.clear()
        lanes.link.waits.clear()
        lanes.link.nbytes = 0
        model.zero_grad()
        began = time.perf_counter()
        model(sample).backward()
        if at:
            seconds.append(time.perf_counter() - began)
            hidden.append(lanes.link.hidden)
            copies.append(lanes.link.copies_s)
    return {
        "hidden": statistics.median(hidden),
        "hidden_least": min(hidden),
        "step_s": statistics.median(seconds),
        "copies_s": statistics.median(copies),
        "moved_mib": lanes.link.nbytes / MIB,
    }


def plain_seconds(model: Any, sample: torch.Tensor, steps: int) -> float:
    """Seconds of a step without a plan."""
    seconds = []
    for _ in range(steps + 1):
        model.zero_grad()
        began = time.perf_counter()
        model(sample).backward()
        seconds.append(time.perf_counter() - began)
    model.zero_grad()
    return statistics.median(seconds[1:])


def rows_of(name: str, steps: int, common: dict[str, Any]) -> list[dict[str, Any]]:
    """Measure a network at all rates and budgets."""
    make, make_sample = NETS[name]
    torch.manual_seed(0)
    model, sample = make(), make_sample()
    graph = trace(model, sample).graph
    activations = sum(storage.bytes for storage in graph.storages if storage.role == "activation")
    ops_s = sum(seconds[0] for seconds in graph.arrays.seconds)
    plain_peak = peak(graph).bytes
    rows = []
    for rate in (*RATES, SLOW):
        speed = rate * 2 * activations / ops_s
        device = replace(
            graph.device, name="modelled link", to_host_bytes_per_s=speed,
            to_device_bytes_per_s=speed, transfer_latency_s=0.0,
        )  # fmt: skip
        techniques = ("keep", "offload") if rate != SLOW else ("keep", "recompute", "offload")
        for share in SHARES:
            # Ops take longer here than alone, by so much the link is slower than planned with.
            plain_s = plain_seconds(model, sample, steps)
            lanes: list[LinkLanes] = []
            actual = speed * ops_s / plain_s

            def lanes_for(_: Any, lanes: Any = lanes, actual: float = actual) -> LinkLanes:
                lanes.append(LinkLanes(actual))
                return lanes[-1]

            host_copies.lanes_for = lanes_for
            budget = int(share * plain_peak)
            planned = plan(
                model, sample, budget, techniques=techniques, device=device,
                time_limit_s=LIMIT_S, backend="graph",
            )  # fmt: skip
            made_plan = planned.sn_memory.plan
            row = common | {
                "model": name, "rate": rate, "mib_per_s": actual / MIB, "plain_s": plain_s,
                "whole_mib": plain_peak / MIB, "budget_mib": budget / MIB,
                "share": share,
                "peak_mib": made_plan.peak_bytes / MIB,
                "predicted_extra": made_plan.overhead,
                "offloaded": len(made_plan.decided("offload")),
                "recomputed": sum(
                    len(made_plan.decided(how)) for how in ("recompute", "recompute_each")
                ),
            }  # fmt: skip
            if lanes:
                row |= measured(planned, sample, lanes[-1], steps)
            rows.append(row)
            print(row, flush=True)
    return rows


def main() -> None:
    """Measure, and write the rows."""
    parser = flags(__doc__)
    parser.add_argument("--models", nargs="+", choices=NETS, default=list(NETS))
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    common = {"command": command(__file__), **origin(),
              "link": "modelled: a thread each way that copies at a set rate"}  # fmt: skip
    rows: list[dict[str, Any]] = []
    for name in args.models:
        rows += rows_of(name, args.steps, common)
        save(args.json, rows)


if __name__ == "__main__":
    main()
