"""ResNet-50's gradients at 100x: ratio, collectives, CPU seconds, ops per bucket.

    python -m benchmarks resnet50_step            what is missing, about six minutes
    python -m benchmarks resnet50_step --report   the table of what has been measured

Both layouts: torch's (out, in, kh, kw), and Keras's (kh, kw, in, out) with (in, out) of the dense
layer. A model whose loss is the sum of its parameters times given numbers has those numbers as
gradients: products of factors whose strengths fall as 1, 1/2, 1/3 and so on, the same on all ranks,
and noise of each rank's own. Each layout is run twice through DDP, and twice through Horovod's
torch optimizer (benchmarks/resnet50_horovod.py), which has no PowerSGD:

- 2 ranks, in which plain, ours and torch's powerSGD_hook take turns by rounds. The hook's rank is
  the one whose bytes come nearest to ours, and its gradients are in torch's layout in both, as it
  makes a matrix of a first axis and the rest. What a way adds is the CPU time of its backward pass
  less plain's in the same round, the median.
- 8 ranks, ours only: digits are wider the more ranks are summed, so the ratio is taken there.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from collectives import collectives, sent_bytes
from ddp_ranks import about, as_rank, measured, run_ranks
from ddp_ways import OpCount, wrapped
from resnet50_gradients import (
    DENSE,
    LAYOUTS,
    OURS,
    RATIO,
    SETTLE,
    FixedGradients,
    gradients_of,
    in_layout,
    shapes_of,
)
from resnet50_horovod import run_horovod
from rows_file import flags, load, replaced, save
from timing import interleave

from sn_compress.text_table import text_table

RESULTS = Path(__file__).resolve().parent / "results/resnet50_step.json"
SEAMS = ("ddp", "horovod")
SETTINGS = ("seam", "layout", "ranks", "rounds", "steps", "width", "classes")


def powersgd_bytes(shapes: list[tuple[int, ...]], rank: int) -> int:
    """What torch's hook brings to its collectives: two factors where they halve a tensor."""
    total = 0
    for shape in shapes:
        rows, columns = shape[0], prod(shape[1:])
        factors = (rows + columns) * min(rank, rows, columns)
        total += factors if 2 * factors < rows * columns else rows * columns
    return 4 * total


def rival_of(shapes: list[tuple[int, ...]]) -> str:
    """The way of torch's whose bytes are nearest to ours."""
    aim = 4 * sum(map(prod, shapes)) / RATIO
    ranks = range(1, 33)
    return f"powersgd {min(ranks, key=lambda rank: abs(powersgd_bytes(shapes, rank) - aim))}"


class Way:
    """One way's model in a rank."""

    def __init__(self, name: str, gradients: list[torch.Tensor]) -> None:
        self.name, self.count = name, OpCount()
        self.ddp, _ = wrapped(name, FixedGradients(gradients), dense=DENSE, count=self.count)

    def steps(self, count: int) -> list[float]:
        """So many steps in a row."""
        return [self.step() for _ in range(count)]

    def step(self) -> float:
        """CPU seconds of a backward pass that all ranks begin together."""
        self.ddp.zero_grad()
        loss = self.ddp()
        dist.barrier()
        start = time.process_time()
        loss.backward()
        return time.process_time() - start

    def facts(self) -> dict[str, Any]:
        """What a settled step sends, and what it calls."""
        sent = collectives(self.step)
        self.count.on = True
        self.step()
        self.count.on = False
        is_ours = self.name == OURS
        counts = {"sent": sent, "buckets": self.count.buckets or None}
        return counts | {"ops_a_bucket": self.count.a_bucket() if is_ours else None}


def work(job: dict[str, Any]) -> dict[str, Any]:
    """In a rank: seconds [rounds, steps] by way, and facts by way."""
    gradients = gradients_of(job, dist.get_rank())
    ways = []
    for name in job["ways"]:
        layout = "torch" if name.startswith("powersgd") else job["layout"]
        ways.append(Way(name, [in_layout(gradient, layout) for gradient in gradients]))
    facts = {}
    for way in ways:
        for _ in range(SETTLE):
            way.step()
        facts[way.name] = way.facts()
    steps = {way.name: partial(way.steps, job["steps"]) for way in ways}
    taken = interleave(steps, job["rounds"], rotate=True)
    return {
        "taken": taken,
        "facts": facts,
        "elements": sum(gradient.numel() for gradient in gradients),
    }


def rows_of(job: dict[str, Any], by_rank: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per way from what the ranks of a run found."""
    rows = []
    for way in job["ways"]:
        facts, elements = by_rank[0]["facts"][way], by_rank[0]["elements"]
        brought = sum(size for _, size in facts["sent"])
        row = {"way": way, **{name: job[name] for name in SETTINGS}, "elements": elements}
        row |= {"ratio": round(4 * elements / brought, 2), "collectives": len(facts["sent"])}
        row["sent_bytes"] = round(sent_bytes(facts["sent"], len(by_rank)))
        row |= {name: facts[name] for name in ("buckets", "ops_a_bucket")}
        own = [statistics.median(steps) for rank in by_rank for steps in rank["taken"][way]]
        row["cpu_s"] = round(statistics.median(own), 4)
        if "plain" in job["ways"]:
            plain = [
                statistics.median(steps) for rank in by_rank for steps in rank["taken"]["plain"]
            ]
            added = [a - b for a, b in zip(own, plain, strict=True)]
            row["added_cpu_s"] = round(statistics.median(added), 4)
        rows.append(row | about(__file__))
    return rows


_SHOWN = (
    "seam", "layout", "ranks", "way", "ratio", "collectives", "buckets", "sent_bytes", "cpu_s",
    "added_cpu_s", "ops_a_bucket",
)  # fmt: skip
_HEAD = (
    "seam", "layout", "ranks", "way", "ratio", "calls", "buckets", "kB sent", "CPU s", "adds",
    "ops a bucket",
)  # fmt: skip
_FORMATS = "", "", "", "", ".1f", "", "", ".1f", ".3f", "+.3f", ".0f"


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as people read them, a table per commit."""
    lines = []
    for key in dict.fromkeys((row["commit"], row["elements"]) for row in rows):
        group = [row for row in rows if (row["commit"], row["elements"]) == key]
        lines += [
            f"\ncommit {key[0]}, {key[1]:,} elements, load {group[-1]['load']:.1f}",
        ]
        cells = [[row.get(name) for name in _SHOWN] for row in group]
        for row, cell in zip(group, cells, strict=True):
            cell[7] = row["sent_bytes"] / 1e3
            cell[10] = cell[10] if cell[10] is not None else "n/a"
        lines.append(text_table(_HEAD, cells, _FORMATS))
    return "\n".join(lines)


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """What tells rows apart; a row replaces that of an equal key."""
    return tuple(row[name] for name in ("way", "commit", *SETTINGS))


def main() -> None:
    """Do the runs that are missing, then print the table."""
    parser = flags(__doc__, RESULTS)
    parser.add_argument("--report", action="store_true", help="only print the table")
    parser.add_argument("--seams", nargs="+", choices=SEAMS, default=list(SEAMS))
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8], help="8 gives the ratio")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="steps per way and round")
    parser.add_argument("--width", type=int, default=64, help="width of the first layer")
    parser.add_argument("--classes", type=int, default=1000)
    args = parser.parse_args()
    rows = load(args.json)
    wanted = [(s, n, lay) for s in args.seams for n in args.ranks for lay in args.layouts]
    for seam, ranks, layout in [] if args.report else wanted:
        timed = ranks == 2
        job: dict[str, Any] = {"seam": seam, "layout": layout, "ranks": ranks}
        job |= {"width": args.width, "classes": args.classes}
        job |= {"rounds": args.rounds if timed else 1, "steps": args.steps if timed else 1}
        job["ways"] = ["plain", OURS] if timed else [OURS]
        if timed and seam == "ddp":
            job["ways"].append(rival_of(shapes_of(args.width, args.classes)))
        key = {name: job[name] for name in SETTINGS}
        if all(measured(rows, key | {"way": way}) for way in job["ways"]):
            continue
        print(f"{seam}, {layout}, {ranks} ranks", flush=True)
        if seam == "ddp":
            by_rank = run_ranks(__file__, job, ranks=ranks, timeout_s=1200)
        else:
            by_rank = run_horovod(job, timeout_s=1200)
        new = rows_of(job, by_rank)
        rows = replaced(rows, new, key_of)
        save(args.json, rows)
    print(table(rows))


if __name__ == "__main__" and not as_rank(work):
    main()
