"""What compression adds to a DDP step: CPU and wall milliseconds of every way, alternating.

    python -m benchmarks ddp_step            three runs of two ranks, about two minutes each
    python -m benchmarks ddp_step --report   the table of what has been measured

A transformer of 7.4 million parameters, two Gloo ranks of one thread each, a batch so small that a
plain step takes some 60 ms of a core. In a run all ways live in the same two processes and
alternate in rounds, whose order rotates; what a way adds is the median over the rounds of its
median less plain's in the same round. CPU time is of the whole process, with Gloo's threads; a
step is the forward and backward pass and SGD. Finished runs are saved at once and not repeated
on the same commit.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from collectives import collectives, sent_bytes
from ddp_ranks import about, as_rank, measured, run_ranks
from ddp_ways import wrapped
from language import Language, batch, loss_of
from rows_file import flags, load, replaced, save
from timing import interleave

from sn_compress.text_table import text_table

RESULTS = Path(__file__).resolve().parent / "results/ddp_step.json"
WAYS = (
    "plain", "fp16", "powersgd 4", "powersgd 16", "low rank 50", "low rank 150", "gather",
)  # fmt: skip
LIMIT = "powersgd 4"  # what ours is to add no more than
DENSE = 2  # uncompressed steps at first
SETTINGS = ("rounds", "steps", "ranks", "batch", "length", "width", "layers")
SETTLE = DENSE + 4  # DDP makes new buckets, sizes are chosen, memories made


class Way:
    """One way's net, optimizer and batches in a rank."""

    def __init__(self, way: str, job: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.name, self.shape = way, (job["batch"], job["length"])
        net = Language(job["width"], job["layers"])
        self.parameters = sum(p.numel() for p in net.parameters())
        self.ddp, _ = wrapped(way, net, dense=DENSE)
        self.optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
        self.generator = torch.Generator().manual_seed(dist.get_rank())

    def steps(self, count: int) -> list[tuple[float, float]]:
        """So many steps in a row."""
        return [self.step() for _ in range(count)]

    def step(self) -> tuple[float, float]:
        """CPU and wall milliseconds of a step that all ranks begin together."""
        tokens, following = batch(*self.shape, self.generator)
        dist.barrier()
        cpu, wall = time.process_time(), time.perf_counter()
        self.optimizer.zero_grad()
        loss_of(self.ddp, tokens, following).backward()
        self.optimizer.step()
        return 1e3 * (time.process_time() - cpu), 1e3 * (time.perf_counter() - wall)


def work(job: dict[str, Any]) -> dict[str, Any]:
    """In a rank: the steps' milliseconds [rounds, steps, 2] by way, and what a step sends."""
    ways = [Way(name, job) for name in job["ways"]]
    sent = {}
    for way in ways:
        for _ in range(SETTLE):
            way.step()
        sent[way.name] = collectives(way.step)
    steps = {way.name: partial(way.steps, job["steps"]) for way in ways}
    taken = interleave(steps, job["rounds"], rotate=True)
    return {"taken": taken, "sent": sent, "parameters": ways[0].parameters}


def rows_of(job: dict[str, Any], by_rank: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per way from what the ranks of a run found."""

    def medians(way: str, what: int) -> list[float]:
        rounds = [rank["taken"][way] for rank in by_rank]
        return [statistics.median(step[what] for step in r) for rank in rounds for r in rank]

    rows = []
    for way in job["ways"]:
        row = {"way": way, **job}
        del row["ways"]
        for what, name in enumerate(("cpu_ms", "wall_ms")):
            own, plain = medians(way, what), medians("plain", what)
            added = [a - b for a, b in zip(own, plain, strict=True)]
            row[name] = round(statistics.median(own), 2)
            row[f"added_{name}"] = round(statistics.median(added), 2)
        sent = by_rank[0]["sent"][way]
        row["sent_bytes"] = round(sent_bytes(sent, len(by_rank)))
        row |= {"collectives": len(sent), "parameters": by_rank[0]["parameters"]}
        rows.append(row | about(__file__))
    return rows


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """What tells rows apart; a row replaces that of an equal key."""
    return tuple(row[name] for name in ("way", "commit", "run", *SETTINGS))


_HEAD = "way", "CPU ms", "adds", "(runs)", "wall ms", "adds", "kB sent", "ratio", "calls"
_FORMATS = "", ".1f", "+.1f", "", ".1f", "+.1f", ".1f", ".1f", ""


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as people read them, a table per commit and net: medians over runs."""
    lines = []
    keys = ("commit", "parameters", "batch", "length", "ranks")
    for key in dict.fromkeys(tuple(row[k] for k in keys) for row in rows):
        group = [row for row in rows if tuple(row[k] for k in keys) == key]
        runs = sorted({row["run"] for row in group})
        lines += [
            f"\ncommit {key[0]}, {key[1]:,} parameters, batch {key[2]} x {key[3]}, {key[4]} ranks, "
            f"runs {', '.join(map(str, runs))}, load {group[-1]['load']:.1f}",
        ]
        plain = next(row for row in group if row["way"] == "plain")["sent_bytes"]
        added, cells = {}, []
        for way in dict.fromkeys(row["way"] for row in group):
            of_way = [row for row in group if row["way"] == way]
            cpu, more, wall, more_wall = (
                statistics.median(row[name] for row in of_way)
                for name in ("cpu_ms", "added_cpu_ms", "wall_ms", "added_wall_ms")
            )
            every = [row["added_cpu_ms"] for row in of_way]
            added[way] = more
            sent, calls = of_way[-1]["sent_bytes"], of_way[-1]["collectives"]
            spread = f"{min(every):+.1f} to {max(every):+.1f}"
            sizes = sent / 1e3, plain / sent, calls
            cells.append([way, cpu, more, spread, wall, more_wall, *sizes])
        lines.append(text_table(_HEAD, cells, _FORMATS))
        for way, more in added.items():
            if LIMIT in added and way.startswith(("low rank", "gather")):
                kept = "yes" if more <= added[LIMIT] else "no"
                lines.append(
                    f"{way} adds no more than {LIMIT}: {kept}, {more:.1f} of {added[LIMIT]:.1f} ms"
                )
    return "\n".join(lines)


def main() -> None:
    """Do the runs that are missing, then print the table."""
    parser = flags(__doc__, RESULTS)
    parser.add_argument("--report", action="store_true", help="only print the table")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), help="must include plain")
    parser.add_argument("--runs", type=int, default=3, help="runs, each with new processes")
    parser.add_argument("--rounds", type=int, default=14)
    parser.add_argument("--steps", type=int, default=5, help="steps per way and round")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=2, help="sequences per rank")
    parser.add_argument("--length", type=int, default=16, help="tokens per sequence")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    args = parser.parse_args()
    if "plain" not in args.ways:
        parser.error("--ways without plain, which the others are compared with; add it")
    rows = load(args.json)
    for run in range(0 if args.report else args.runs):
        job = {name: getattr(args, name) for name in SETTINGS} | {"run": run}
        missing = [way for way in args.ways if not measured(rows, job | {"way": way})]
        if not missing:
            continue
        job["ways"] = list(dict.fromkeys(["plain", *args.ways]))
        print(f"run {run + 1}/{args.runs}", flush=True)
        new = rows_of(job, run_ranks(__file__, job, ranks=args.ranks, timeout_s=900))
        rows = replaced(rows, new, key_of)
        save(args.json, rows)
    print(table(rows))


if __name__ == "__main__" and not as_rank(work):
    main()
