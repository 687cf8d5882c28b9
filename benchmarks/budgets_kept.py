"""Twenty budgets from 5 to 100 %: the requested bytes, and what a step then held.

    python -m benchmarks budgets_kept [--json FILE] [--picture FILE] [--quick] [--ways NAME ...]

After pytorch issue 197838: a llama-like model, compiled with `activation_memory_budget`, whose peak
rises from 275 MB to 1,145 as the budget falls from 0.15 to 0.05. The issue scales layers and length
together (16/512, 24/768, 32/1024; batch 2, random weights); its widths are not in its text. Here it
is cut down for two cores: 8 layers, length 128, batch 4, width 64 (`llama/32` of planner_torch.py).
As in the issue a peak is what a step holds beyond what was there before it; 100 % is that of the
step without a budget: the eager one, or the one that Inductor compiled.

Ways of eager ops: torch's budget with each of its solvers under aot_eager (`aot_eager:`), our plan
of ops (`ours:graph`), our checkpoint policy (`ours:policy`). Ways that Inductor compiles: torch's
budget with its solvers (`inductor:`), our plan (`ours:compile`), our policy under torch.compile
(`ours:policy, compiled`). Where ours refuses, the row has the smallest peak that BudgetError names,
and what it says no plan goes below.

Peaks of eager ops are counted by StorageTracker, of compiled steps by what torch's CPU allocator
gave out. Seconds of eager ops are CPU seconds of the calls of a step, each at the least its
signature took in any run; of compiled steps, CPU seconds of steps that alternate with the plain
compiled one, medians. Rows in FILE are kept, so a run that was cut off goes on.
"""

from __future__ import annotations

import copy
import statistics
import sys
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from compiled_peaks import Step, by_inductor, ours, plain, rival
from machine import origin
from pictures import pyplot
from planner_torch import QUICK
from planner_torch_rivals import measured
from rows_file import flags, load, save

import sn_memory.torch
from sn_memory import BudgetError

SHARES = tuple(round(0.05 * number, 2) for number in range(1, 21))
SOLVERS = ("dp", "greedy", "ilp", "dp_knapsack_sliding_hirschberg")
EAGER = (*(f"aot_eager:{solver}" for solver in SOLVERS), "ours:graph", "ours:policy")
COMPILED = (*(f"inductor:{solver}" for solver in SOLVERS), "ours:compile", "ours:policy, compiled")
WAYS = (*EAGER, *COMPILED)
MODEL = "llama/32"
# Of a solver, and of ours.
COLOURS = {
    "dp": "#d95f02", "greedy": "#e7298a", "ilp": "#e6ab02",
    "dp_knapsack_sliding_hirschberg": "#a6761d", "graph": "#1b6ca8", "policy": "#1b9e77",
    "compile": "#1b6ca8", "policy, compiled": "#1b9e77",
}  # fmt: skip
STEPS = 9


class Bench:
    """The model, what is there before a step, and the plain steps."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model, self.sample = QUICK[MODEL][0](), QUICK[MODEL][1]()
        held = (*self.model.parameters(), *self.model.buffers(), self.sample)
        self.base_bytes = sum(tensor.nbytes for tensor in held)
        self.least: dict[str, float] = {}

    @cached_property
    def eager(self) -> tuple[int, list[str]]:
        """Peak and calls of the plain step."""
        return measured(self.model, self.model, self.sample, self.least)

    @cached_property
    def compiled(self) -> Step:
        """The plain step that Inductor compiled."""
        return plain(copy.deepcopy(self.model), self.sample)

    def plain_bytes(self, way: str) -> int:
        """What the step without a budget holds."""
        peak = self.compiled.peak_bytes if way in COMPILED else self.eager[0]
        return peak - self.base_bytes

    def of_ops(self, how: str, share: float, budget: int) -> tuple[int, float, float]:
        """Peak and seconds of a step of eager ops, and of the plain one; raises BudgetError."""
        model = copy.deepcopy(self.model)
        run: Callable[..., Any]
        if how == "graph":
            run = model = sn_memory.torch.plan(model, self.sample, budget, backend=how)
        elif how == "policy":
            run = sn_memory.torch.checkpoint_policy(model, self.sample, budget).wrap(model)
        else:
            torch._dynamo.reset()
            with torch._functorch.config.patch(
                activation_memory_budget=share, activation_memory_budget_solver=how
            ):
                run = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
                peak, calls = measured(run, model, self.sample, self.least)
                return peak, self.seconds(calls), self.seconds(self.eager[1])
        peak, calls = measured(run, model, self.sample, self.least)
        return peak, self.seconds(calls), self.seconds(self.eager[1])

    def seconds(self, calls: list[str]) -> float:
        """Seconds of calls, each at the least that it took."""
        return sum(self.least[call] for call in calls)

    def of_inductor(self, how: str, share: float, budget: int) -> tuple[int, float, float]:
        """The same of steps that Inductor compiled."""
        model = copy.deepcopy(self.model)
        if how == "compile":
            step, _ = ours(model, self.sample, budget)
        elif how == "policy, compiled":
            policy = sn_memory.torch.checkpoint_policy(model, self.sample, budget, compiled=True)
            step = Step(by_inductor(policy.wrap(model)), model, self.sample)
        else:
            step = rival(model, self.sample, share, how)
        for _ in range(STEPS):
            self.compiled.once()
            step.once()
        theirs = statistics.median(self.compiled.seconds[-STEPS:])
        return step.peak_bytes, statistics.median(step.seconds[-STEPS:]), theirs

    def row(self, way: str, share: float) -> dict[str, Any]:
        """What was asked for, held, and took."""
        asked = int(share * self.plain_bytes(way))
        row: dict[str, Any] = {
            "model": MODEL, "way": way, "share": share, "plain_bytes": self.plain_bytes(way),
            "asked_bytes": asked, **origin(),
        }  # fmt: skip
        how = way.partition(":")[2]
        run = self.of_inductor if way in COMPILED else self.of_ops
        try:
            peak, seconds, plain_seconds = run(how, share, self.base_bytes + asked)
        except BudgetError as error:
            refusal = {"refused": True, "smallest_bytes": error.peak_bytes - self.base_bytes}
            if error.floor_bytes is not None:
                refusal["floor_bytes"] = error.floor_bytes - self.base_bytes
            return row | refusal
        except Exception as error:
            if way.startswith("ours:"):
                raise
            return row | {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
        return row | {
            "peak_bytes": peak - self.base_bytes, "step_s": seconds, "plain_step_s": plain_seconds,
        }  # fmt: skip


def panel(rows: list[dict[str, Any]], ways: tuple[str, ...], left: Any, right: Any) -> None:
    """Measured over asked for, with the diagonal; seconds over measured."""
    mine = [row for row in rows if row["way"] in ways]
    plain_mib = mine[0]["plain_bytes"] / 2**20
    left.plot([0, plain_mib], [0, plain_mib], color="#777777", lw=1, label="what was asked for")
    for way in ways:
        of_way = sorted((row for row in mine if row["way"] == way), key=lambda row: row["share"])
        ran = [row for row in of_way if "peak_bytes" in row]
        colour = COLOURS[way.partition(":")[2]]
        own = way.startswith("ours:")
        peaks = [row["peak_bytes"] / 2**20 for row in ran]
        left.plot(
            [row["asked_bytes"] / 2**20 for row in ran], peaks, "o-" if own else "s--",
            ms=4 if own else 3, lw=1.5 if own else 1, color=colour,
            label=way.replace("ours:", "sn_memory:").replace(":", ": "),
        )  # fmt: skip
        longer = [100 * (row["step_s"] / row["plain_step_s"] - 1) for row in ran]
        right.plot(peaks, longer, "o" if own else "s", ms=5 if own else 4, color=colour, alpha=0.8)
        refused = [row for row in of_way if row.get("refused")]
        if refused:
            asked = [row["asked_bytes"] / 2**20 for row in refused]
            least = [row["smallest_bytes"] / 2**20 for row in refused]
            left.plot(asked, least, "x", ms=5, color=colour)
    left.set(xlabel="asked for, MiB", ylabel="held beyond parameters and input, MiB")
    right.set(xlabel="held, MiB", ylabel="seconds over the plain step, %")
    left.legend(frameon=False, fontsize=7)


def picture(rows: list[dict[str, Any]], path: Path) -> None:
    """A row of two panels for eager ops, and one for what Inductor compiles if that was run."""
    plt = pyplot()

    titles = {"ops as torch runs them": EAGER, "compiled by Inductor": COMPILED}
    run = {row["way"] for row in rows}
    titles = {title: ways for title, ways in titles.items() if run & set(ways)}
    figure, axes = plt.subplots(
        len(titles), 2, figsize=(11, 4.5 * len(titles)), layout="constrained", squeeze=False
    )
    for row, (title, ways) in zip(axes, titles.items(), strict=True):
        panel(rows, ways, *row)
        row[0].set_title(f"{title} (x: refused, at the smallest peak found)", fontsize=9)
        row[1].set_title(title, fontsize=9)
    figure.savefig(path, dpi=110)


def main(argv: list[str]) -> int:
    """Run, print, write."""
    parser = flags(__doc__)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--quick", action="store_true", help="two budgets")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    # Each way is one more compilation of the same forward.
    torch._dynamo.config.recompile_limit = 1000
    rows = load(args.json)
    done = {(row["way"], row["share"]) for row in rows}
    todo = [
        (way, share)
        for share in ((0.1, 0.6) if args.quick else SHARES)
        for way in args.ways
        if (way, share) not in done
    ]
    bench = Bench() if todo else None
    for way, share in todo:
        assert bench is not None
        rows.append(bench.row(way, share))
        save(args.json, rows)
        last = rows[-1]
        outcome = last.get(
            "peak_bytes", last.get("failed", f"refused: {last.get('smallest_bytes')}")
        )
        print(f"{way:40} {share:4.2f} {last['asked_bytes']:>10} {outcome}", flush=True)
    if args.picture:
        picture(rows, args.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
