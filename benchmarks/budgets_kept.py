"""Twenty budgets from 5 to 100 %: what was asked for and what a step then held.

    python benchmarks/budgets_kept.py [--json FILE] [--picture FILE] [--quick] [--ways NAME ...]

After pytorch issue 197838: a llama-like model, compiled with `activation_memory_budget`, whose peak
rises from 275 MB to 1,145 as the budget falls from 0.15 to 0.05. The issue scales layers and length
together (16/512, 24/768, 32/1024; batch 2, random weights); its widths are not in its text. Here it
is cut down for two cores: 8 layers, length 128, batch 4, width 64 (`llama/32` of planner_torch.py).
As in the issue a peak is what a step holds beyond what was there before it; 100 % is that of the
plain eager step.

Ways: torch's budget with each of its solvers under aot_eager, our plan of ops (`backend="graph"`),
our checkpoint policy in eager torch, and, with `--ways ours:compile`, our plan under torch.compile.
Where ours refuses, the row has the smallest peak that BudgetError names. Op seconds are CPU seconds
of the calls of a step, each at the least its signature took in any run. Rows in FILE are kept, so a
run that was cut off goes on.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import commit, machine
from planner_torch import QUICK
from planner_torch_rivals import measured
from torch import nn

import sn_memory.torch
from sn_memory import BudgetError

SHARES = tuple(round(0.05 * number, 2) for number in range(1, 21))
SOLVERS = ("dp", "greedy", "ilp", "dp_knapsack_sliding_hirschberg")
OURS = ("ours:graph", "ours:policy")
WAYS = (*(f"torch:{it}" for it in SOLVERS), *OURS)
MODEL = "llama/32"
COLOURS = {
    "torch:dp": "#d95f02", "torch:greedy": "#e7298a", "torch:ilp": "#e6ab02",
    "torch:dp_knapsack_sliding_hirschberg": "#a6761d", "ours:graph": "#1b6ca8",
    "ours:policy": "#1b9e77", "ours:compile": "#6a51a3",
}  # fmt: skip


class Bench:
    """The model, what is there before a step, and the plain step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model, self.sample = QUICK[MODEL][0](), QUICK[MODEL][1]()
        held = (*self.model.parameters(), *self.model.buffers(), self.sample)
        self.base_bytes = sum(it.nbytes for it in held)
        self.least: dict[str, float] = {}
        peak, self.calls = self.measured(self.model, self.model)
        self.plain_bytes = peak - self.base_bytes

    def measured(self, forward: Callable[..., Any], model: nn.Module) -> tuple[int, list[str]]:
        """Peak and calls of a step."""
        return measured(forward, model, self.sample, self.least)

    def step(self, way: str, share: float) -> tuple[int, list[str]]:
        """Peak and calls with a budget; raises BudgetError."""
        torch._dynamo.reset()
        whose, _, how = way.partition(":")
        if whose == "torch":
            with torch._functorch.config.patch(
                activation_memory_budget=share, activation_memory_budget_solver=how
            ):
                compiled = torch.compile(
                    self.model, backend="aot_eager", fullgraph=True, dynamic=False
                )
                return self.measured(compiled, self.model)
        budget = self.base_bytes + int(share * self.plain_bytes)
        model = copy.deepcopy(self.model)
        if how == "policy":
            policy = sn_memory.torch.checkpoint_policy(model, self.sample, budget)
            return self.measured(policy.wrap(model), model)
        planned = sn_memory.torch.plan(
            model, self.sample, budget, backend=how, time_limit_s=5, trial=False
        )
        return self.measured(planned, planned)

    def row(self, way: str, share: float) -> dict[str, Any]:
        """What was asked for, held, and took."""
        row: dict[str, Any] = {
            "model": MODEL, "way": way, "share": share, "plain_bytes": self.plain_bytes,
            "asked_bytes": int(share * self.plain_bytes), "commit": commit(), "machine": machine(),
        }  # fmt: skip
        try:
            peak, calls = self.step(way, share)
        except BudgetError as error:
            return row | {"refused": True, "smallest_bytes": error.peak_bytes - self.base_bytes}
        except Exception as error:
            if not way.startswith("torch:"):
                raise
            return row | {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
        return row | {
            "peak_bytes": peak - self.base_bytes,
            "op_s": sum(self.least[it] for it in calls),
            "plain_op_s": sum(self.least[it] for it in self.calls),
            "calls": len(calls),
        }


def picture(rows: list[dict[str, Any]], path: Path) -> None:
    """Measured over asked for, with the diagonal; op seconds over measured."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 5), layout="constrained")
    whole = rows[0]["plain_bytes"] / 2**20
    left.plot([0, whole], [0, whole], color="#777777", lw=1, label="what was asked for")
    for way, colour in COLOURS.items():
        mine = sorted((it for it in rows if it["way"] == way), key=lambda it: it["share"])
        ran = [it for it in mine if "peak_bytes" in it]
        if not mine:
            continue
        asked = [it["asked_bytes"] / 2**20 for it in ran]
        peaks = [it["peak_bytes"] / 2**20 for it in ran]
        left.plot(asked, peaks, "o-", ms=4, color=colour, label=way.replace("ours", "sn_memory"))
        right.plot(
            peaks,
            [100 * (it["op_s"] / it["plain_op_s"] - 1) for it in ran],
            "o", ms=5, color=colour, alpha=0.8,
        )  # fmt: skip
        refused = [it for it in mine if it.get("refused")]
        if refused:
            least = min(it["smallest_bytes"] for it in refused) / 2**20
            left.axhline(least, color=colour, lw=0.8, ls=":")
            left.plot(
                [it["asked_bytes"] / 2**20 for it in refused], [least] * len(refused),
                "x", ms=5, color=colour,
            )  # fmt: skip
    left.set(xlabel="asked for, MiB", ylabel="held beyond parameters and input, MiB",
             title="x: refused, with the smallest peak that can be had")  # fmt: skip
    right.set(xlabel="held, MiB", ylabel="op seconds over the plain step, %")
    left.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)


def main(argv: list[str]) -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--quick", action="store_true", help="two budgets")
    parser.add_argument("--ways", nargs="+", choices=COLOURS, default=WAYS)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    if args.json and args.json.exists():
        rows = json.loads(args.json.read_text())
    there = {(it["way"], it["share"]) for it in rows}
    todo = [
        (way, share)
        for share in ((0.1, 0.6) if args.quick else SHARES)
        for way in args.ways
        if (way, share) not in there
    ]
    bench = Bench() if todo else None
    for way, share in todo:
        assert bench is not None
        rows.append(bench.row(way, share))
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1) + "\n")
        last = rows[-1]
        said = last.get("peak_bytes", last.get("failed", f"refused: {last.get('smallest_bytes')}"))
        print(f"{way:40} {share:4.2f} {last['asked_bytes']:>10} {said}", flush=True)
    if args.picture:
        picture(rows, args.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
