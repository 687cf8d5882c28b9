"""Predicted against measured: planned torch models at several budgets, run on this machine.

    python benchmarks/planner_torch.py [--quick] [--json FILE] [--models NAME ...]
                                       [--time-limit SECONDS] [--planner NAME]

For each network and budget the model is planned, then run with the plan and without: peaks of live
storages counted by StorageTracker, outputs, gradients and buffers compared bit by bit, seconds of
the step. Budgets are shares of what is not resident. Where `auto` keeps one not (`kept` is false),
the smallest plan that a planner of the literature gives at once stands in. Rows already in FILE are
kept, so a run that was cut off goes on. `--quick` takes narrow networks. `estimate` rows tell how
long a definition on the meta device takes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import commit, machine
from models import Bert, Gpt2, InceptionV3, Llama, UNet, densenet121, resnet, vgg16

import sn_memory.torch
from sn_memory import BudgetError
from sn_memory.liveness import peak
from sn_memory.policies import policy

SHARES = (1.0, 0.6, 0.3, 0.0)
# Planners of the literature that answer at once and move nothing to the host.
REBUILDING = ("sqrt_n", "greedy", "superneurons_memory", "knapsack")


def tokens(batch: int, length: int) -> torch.Tensor:
    """Random token numbers [batch, length] int64."""
    return torch.randint(0, 1000, (batch, length))


Make = tuple[Callable[[], torch.nn.Module], Callable[[], torch.Tensor]]
FULL: dict[str, Make] = {
    "resnet50": (lambda: resnet(50), lambda: torch.randn(4, 3, 224, 224)),
    "vgg16": (vgg16, lambda: torch.randn(4, 3, 224, 224)),
    "densenet121": (densenet121, lambda: torch.randn(4, 3, 224, 224)),
    "unet": (UNet, lambda: torch.randn(1, 1, 256, 256)),
    "inception_v3": (InceptionV3, lambda: torch.randn(4, 3, 299, 299)),
    "gpt2": (Gpt2, lambda: tokens(1, 256)),
    "bert": (Bert, lambda: tokens(2, 256)),
    "llama32": (
        lambda: Llama(vocabulary=8000, width=256, layers=32, heads=8, groups=4, hidden=704),
        lambda: tokens(1, 256),
    ),
}
QUICK: dict[str, Make] = {
    "resnet50/8": (lambda: resnet(50, width=8), lambda: torch.randn(4, 3, 64, 64)),
    "vgg16/8": (
        lambda: vgg16(size=64, shrink=8, hidden=64, classes=10),
        lambda: torch.randn(16, 3, 64, 64),
    ),
    "densenet121/4": (lambda: densenet121(growth=8), lambda: torch.randn(4, 3, 64, 64)),
    "unet/8": (lambda: UNet(width=8), lambda: torch.randn(4, 1, 64, 64)),
    "gpt2/12": (
        lambda: Gpt2(vocabulary=1000, length=128, width=64, layers=4, heads=4),
        lambda: tokens(4, 128),
    ),
    "bert/12": (
        lambda: Bert(vocabulary=1000, length=128, width=64, layers=4, heads=4),
        lambda: tokens(4, 128),
    ),
    "llama/32": (
        lambda: Llama(vocabulary=1000, width=64, layers=8, heads=4, groups=2, hidden=176),
        lambda: tokens(4, 128),
    ),
}
META: dict[str, Make] = {
    "llama2_70b": (
        lambda: Llama(width=8192, layers=80, heads=64, groups=8, hidden=28672),
        lambda: torch.zeros(1, 4096, dtype=torch.long),
    ),
    "resnet2501": (lambda: resnet(2500), lambda: torch.empty(1, 3, 224, 224)),
}


def planned(
    model: torch.nn.Module, sample: torch.Tensor, share: float, planner: str, time_limit_s: float
) -> torch.nn.Module:
    """The model within a share of what is not resident, or with the least that is found at once."""
    graph = sn_memory.torch.trace(model, sample).graph
    budget = graph.base_bytes + int(share * (peak(graph).bytes - graph.base_bytes))
    try:
        return sn_memory.torch.plan(
            model, sample, budget, planner=planner, time_limit_s=time_limit_s
        )
    except BudgetError as refusal:
        least = {name: policy(name)(graph, budget_bytes=None).peak_bytes for name in REBUILDING}
        name = min(least, key=lambda it: least[it])
        if least[name] < refusal.peak_bytes:
            return sn_memory.torch.plan(model, sample, least[name], planner=name)
        return sn_memory.torch.plan(
            model, sample, refusal.peak_bytes, planner=planner, time_limit_s=time_limit_s
        )


def row(name: str, make: Make, share: float, planner: str, time_limit_s: float) -> dict[str, Any]:
    """One network at one budget."""
    torch.manual_seed(0)
    model, sample = make[0](), make[1]()
    began = time.perf_counter()
    made = planned(model, sample, share, planner, time_limit_s)
    spent = time.perf_counter() - began
    found = sn_memory.torch.verify(made, sample)
    plan, graph = made.sn_memory.plan, made.sn_memory.trace.graph
    movable = plan.baseline_peak_bytes - graph.base_bytes
    print(f"{name:14} {share:4.0%} {found.error:+.3%} {'equal' if found.equal else 'DIFFERENT'}")
    print(f"    {str(found).splitlines()[0]}", flush=True)
    return {
        "model": name,
        "framework": "torch",
        "planner": planner,
        "made_by": plan.planner,
        "share": share,
        "batch": int(sample.shape[0]),
        "ops": len(graph.ops),
        "kept": plan.peak_bytes <= graph.base_bytes + share * movable,
        "budget_bytes": plan.budget_bytes,
        "base_bytes": graph.base_bytes,
        "predicted_peak_bytes": found.predicted_peak_bytes,
        "measured_peak_bytes": found.measured_peak_bytes,
        "baseline_peak_bytes": plan.baseline_peak_bytes,
        "baseline_measured_peak_bytes": found.unplanned_peak_bytes,
        "predicted_s": found.predicted_s,
        "measured_s": found.measured_s,
        "baseline_s": found.unplanned_s,
        "baseline_predicted_s": plan.baseline_seconds,
        "solve_s": plan.solve_s,
        "wall_s": spent,
        "gap": plan.gap,
        "equal": found.equal,
        "seconds_sources": dict(plan.seconds_sources),
    }


def estimated(name: str, make: Make) -> dict[str, Any]:
    """How long an estimate of a definition takes."""
    with torch.device("meta"):
        model, sample = make[0](), make[1]()
    began, cpu = time.perf_counter(), time.process_time()
    found = sn_memory.torch.estimate(model, sample, optimizer=torch.optim.AdamW)
    spent, cpu = time.perf_counter() - began, time.process_time() - cpu
    print(f"{name:14} estimated in {spent:.1f} s, {cpu:.1f} s of a core\n{found}", flush=True)
    return {
        "model": name,
        "framework": "torch",
        "planner": "estimate",
        "share": None,
        "parameters_bytes": found.parameters_bytes,
        "activations_bytes": found.activations_bytes,
        "peak_bytes": found.peak_bytes,
        "wall_s": spent,
        "cpu_s": cpu,
    }


def main(argv: list[str]) -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--models", nargs="+", choices=[*FULL, *QUICK, *META])
    parser.add_argument("--planner", default="auto")
    parser.add_argument("--time-limit", type=float, default=60.0)
    args = parser.parse_args(argv)
    networks = {**FULL, **QUICK, **META}
    chosen = args.models or (QUICK if args.quick else [*FULL, *META])
    rows: list[dict[str, Any]] = []
    if args.json and args.json.exists():
        rows = json.loads(args.json.read_text())
    there = {(it["model"], it["planner"], it["share"]) for it in rows}
    for name in chosen:
        meta = name in META
        for share in (None,) if meta else SHARES:
            if (name, "estimate" if meta else args.planner, share) in there:
                continue
            make = networks[name]
            made = (
                estimated(name, make)
                if share is None
                else row(name, make, share, args.planner, args.time_limit)
            )
            rows.append({**made, "commit": commit(), "machine": machine()})
            if args.json:
                args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
