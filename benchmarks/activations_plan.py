"""What the planner gains from `compress`: three nets at equal budgets, with it and without.

    python benchmarks/activations_plan.py            rows that are missing, minutes
    python benchmarks/activations_plan.py --quick    one net, one budget

Budgets are shares of what a step without a plan needs beyond parameters and input ("activation
memory"). For each: the plan by recomputation, and the one that may compress too (8 bits). Predicted
and measured are peaks of a step; extra time is predicted from ops timed one by one, and measured on
whole steps (processor time on one thread, the best of ten). A last row per net, "all", compresses
whatever can be and runs nothing again, whatever that costs.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from accuracy import load, save
from activations import resnet
from machine import commit, machine
from nets import NETS
from tables import markdown
from torch.nn.functional import cross_entropy

import sn_memory.graph.liveness
import sn_memory.torch
from sn_memory import BudgetError
from sn_memory.graph.rewrite import with_compressed
from sn_memory.plan.policies import policy
from sn_memory.torch import trace, verify

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results/activations_plan.json"
TECHNIQUES = {
    "recompute": ("keep", "recompute"),
    "compress": ("keep", "recompute", "compress"),
}
SHARES = {
    "cnn": (0.9, 0.75, 0.62),
    "transformer": (0.7, 0.5, 0.4),
    "resnet": (0.5, 0.3, 0.2),
}
BATCH = 64


def step_seconds(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """Processor time of a step, the best of ten after one."""
    best = float("inf")
    for _ in range(11):
        start = time.process_time()
        cross_entropy(model(x), y).backward()
        best = min(best, time.process_time() - start)
    return best


def row_of(net: str, techniques: str, share: float, limit_s: float) -> dict[str, Any]:
    """Plan, verify and time; one flat row."""
    torch.manual_seed(0)
    model = (NETS | {"resnet": resnet})[net]()
    x, y = torch.rand(BATCH, 1, 28, 28) * 2 - 1, torch.randint(10, (BATCH,))
    graph = trace(model, x).graph
    base = graph.base_bytes
    whole = sn_memory.graph.liveness.peak(graph).bytes
    row: dict[str, Any] = {"net": net, "techniques": techniques, "share": share, "batch": BATCH}
    row |= {"base_bytes": base, "plain_peak_bytes": whole}
    budget = base + int((whole - base) * share)
    options: dict[str, Any] = {"time_limit_s": limit_s, "backend": "graph"}
    if techniques == "all":
        traced = trace(model, x, bits=8)
        compressed_graph = with_compressed(traced.graph, traced.forms)
        options["planner"] = policy("liveness")(compressed_graph, budget_bytes=None)
        row["forms"] = len(traced.forms)
    try:
        allowed = TECHNIQUES.get(techniques, TECHNIQUES["compress"])
        planned = sn_memory.torch.plan(model, x, budget, techniques=allowed, **options)
    except BudgetError as error:
        return row | {"smallest_bytes": error.peak_bytes}
    plan, found = planned.sn_memory.plan, verify(planned, x)
    plain_s = step_seconds(model, x, y)
    return row | {
        "predicted_bytes": found.predicted_peak_bytes,
        "measured_bytes": found.measured_peak_bytes,
        "unplanned_bytes": found.unplanned_peak_bytes,
        "predicted_overhead": round(plan.overhead, 4),
        "measured_overhead": round(step_seconds(planned, x, y) / plain_s - 1, 4),
        "compressed": len(plan.decided("compress")),
        "solve_s": round(plan.solve_s, 2),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown, both plans of a budget beside each other."""
    head = (
        "net", "budget", "by recomputation: extra time, measured",
        "with compress: extra time, measured", "compressed",
        "peak, MiB: plain, predicted, measured",
    )  # fmt: skip
    lines = []
    pairs: dict[tuple[str, float], dict[str, dict[str, Any]]] = {}
    for row in rows:
        pairs.setdefault((row["net"], row["share"]), {})[row["techniques"]] = row
    for (net, share), pair in pairs.items():
        if "all" in pair:
            row = pair["all"]
            extra = f"{row['predicted_overhead']:+.1%}, {row['measured_overhead']:+.1%}"
            lines.append([net, "all compressed", "-", extra, str(row["forms"]), _peaks(row)])
            continue
        cells = []
        for techniques in TECHNIQUES:
            row = pair.get(techniques, {})
            if "smallest_bytes" in row:
                cells.append("not reached")
            elif row:
                cells.append(f"{row['predicted_overhead']:+.1%}, {row['measured_overhead']:+.1%}")
            else:
                cells.append("-")
        last = pair.get("compress", {})
        compressed = str(last.get("compressed", "-"))
        lines.append([net, f"{share:.0%}", *cells, compressed, _peaks(last)])
    return markdown(head, lines)


def _peaks(row: dict[str, Any]) -> str:
    if "measured_bytes" not in row:
        return "-"
    fields = ("unplanned_bytes", "predicted_bytes", "measured_bytes")
    return ", ".join(f"{row[field] / 2**20:.2f}" for field in fields)


def main() -> None:
    """Make the rows that are missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="one net, one budget")
    parser.add_argument("--nets", nargs="+", default=list(SHARES), choices=list(SHARES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    default = ROOT / "benchmarks/out/activations_plan.json" if args.quick else RESULTS
    path, limit_s = args.json or default, 1.0 if args.quick else 4.0
    wanted = {"cnn": (0.65,)} if args.quick else {net: SHARES[net] for net in args.nets}
    rows = [] if args.quick else load(path)
    done = {(row["net"], row["techniques"], row["share"]) for row in rows}
    about = {"commit": commit(), "machine": machine()}
    for net, shares in wanted.items():
        for share in (*shares, 1.0):
            for techniques in TECHNIQUES if share < 1 else ("all",):
                if (net, techniques, share) not in done:
                    rows.append(row_of(net, techniques, share, limit_s) | about)
                    save(path, rows)
                    print(rows[-1], flush=True)
    print(f"\n{table(rows)}\n\nrows: {path}")


if __name__ == "__main__":
    main()
