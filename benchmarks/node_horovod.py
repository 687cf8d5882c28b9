"""Horovod over nodes of several ranks: bytes that leave a node in a step, by nodes and flat.

    python -m benchmarks node_horovod [--nodes 2] [--gbit 0.1] [--json FILE]      as root
    python -m benchmarks node_horovod --report

As node_ddp does it for DDP: a namespace for each node, gradients of AlexNet's shapes.
Bytes are those that the interface of the first node counts in a step, which has the rank that
coordinates Horovod: what Horovod's ranks tell each other in every cycle is among them, and grows
with the seconds of a step. "idle" is what it sends in a second in which nothing is exchanged.
Ranks ask each other every --cycle-ms what to exchange (HOROVOD_CYCLE_TIME; Horovod's own default is
a millisecond): threads of four ranks that share two cores take 1.2 of them when nothing else runs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from ddp_ranks import about, follow, measured
from node_ddp import SETTINGS, SETTLE, SETTLE_WHOLE, WAYS, Shapes, alone, note, now, row_of
from rows_file import flags, load, save
from shaped_links import NoLinksError, ShapedLinks

from sn_compress.text_table import text_table

IDLE_S = 2
RESULTS = Path(__file__).resolve().parent / "results/node_horovod.json"


def work(job: dict[str, Any]) -> dict[str, Any]:
    """In a rank: steps of all ways."""
    import horovod.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    model = Shapes(job["scale"])
    gradients = model.gradients(hvd.rank())
    result: dict[str, Any] = {"alone": alone(model, gradients, hvd.barrier)}
    for way in job["ways"]:
        model = Shapes(job["scale"])  # Horovod's hooks stay on the last one
        options = {} if WAYS[way] is None else {"compression": WAYS[way]}
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.0),
            named_parameters=model.named_parameters(), **options,
        )  # fmt: skip
        taken: dict[str, list[float]] = {"seconds": [], "cpu": [], "sent": []}
        settle = SETTLE_WHOLE if way.startswith("plain") else SETTLE
        for step in range(settle + job["steps"]):
            optimizer.zero_grad()
            hvd.barrier()
            before = now()
            model(gradients, 1.0 + step / 10).backward()
            optimizer.synchronize()
            seconds = time.perf_counter() - before["seconds"]
            hvd.barrier()  # what a rank has sent is counted when the others have it
            note(taken, before, seconds)
            with optimizer.skip_synchronize():
                optimizer.step()
        report = {} if WAYS[way] is None else WAYS[way].report(optimizer)
        result[way] = {name: values[settle:] for name, values in taken.items()}
        result[way]["nodes"] = report.get("nodes", 0)
        del optimizer, model
    hvd.barrier()
    before = now()
    time.sleep(IDLE_S)
    after = now()
    result["idle"] = {name: (after[name] - before[name]) / IDLE_S for name in ("sent", "cpu")}
    hvd.barrier()
    return result


def run_ranks(job: dict[str, Any], links: ShapedLinks, folder: Path) -> list[dict[str, Any]]:
    """What all ranks have found; RuntimeError with what they said if one fails."""
    from rank_jobs import started

    (folder / "job.json").write_text(json.dumps(job))
    command = [sys.executable, __file__, "--rank", str(folder)]
    env = {"HOROVOD_CYCLE_TIME": f"{job['cycle_ms']:g}"}
    with started(links, folder, command, per_node=job["per_node"], env=env) as (processes, logs):
        follow(processes, logs, time.monotonic() + 3600)
    return [json.loads((folder / f"rank{rank}").read_text()) for rank in range(len(logs))]


def rows_of(job: dict[str, Any], by_rank: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a way; idle bytes are of a second of the first node, CPU seconds of all ranks."""
    idle = {
        "cycle_ms": job["cycle_ms"],
        "idle_bytes_s": round(by_rank[0]["idle"]["sent"]),
        "idle_cpu": round(sum(rank["idle"]["cpu"] for rank in by_rank), 3),
    }
    return [
        row_of(way, job, by_rank) | {"by_nodes": by_rank[0][way]["nodes"]} | idle | about(__file__)
        for way in job["ways"]
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as people read them."""
    cells = [
        [row["way"], *(row[name] for name in SETTINGS), row["cycle_ms"], row["node_bytes"] / 1e6,
         row["idle_bytes_s"] / 1e6, row["step_s"], row["cpu_s"], row["load"]]
        for row in rows
    ]  # fmt: skip
    names = ("way", "nodes", "ranks each", "Gbit/s", "scale", "cycle ms", "MB a node")
    names += ("MB/s idle", "s/step", "CPU s", "load")
    return text_table(names, cells, ("", "", "", "g", "", "g", ".2f", ".3f", ".2f", ".2f", ".1f"))


def main() -> None:
    """Do the runs that are missing, then print the table."""
    parser = flags(__doc__, RESULTS)
    parser.add_argument("--report", action="store_true", help="only print the table")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--per-node", type=int, default=2)
    parser.add_argument("--gbit", type=float, default=0.1)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--steps", type=int, default=3, help="counted steps of each way")
    parser.add_argument("--scale", type=int, default=1, help="divides the sides of large matrices")
    parser.add_argument(
        "--cycle-ms", type=float, default=1.0, help="cycle of Horovod's negotiation"
    )
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        result = work(json.loads((args.rank / "job.json").read_text()))
        (args.rank / f"rank{os.environ['HOROVOD_RANK']}").write_text(json.dumps(result))
        return
    rows = load(args.json)
    job = {name: getattr(args, name) for name in (*SETTINGS, "cycle_ms")}
    if not args.report and not all(measured(rows, job | {"way": way}) for way in args.ways):
        job |= {"ways": args.ways, "steps": args.steps}
        try:
            with ShapedLinks(args.nodes, args.gbit) as links, tempfile.TemporaryDirectory() as into:
                rows += rows_of(job, run_ranks(job, links, Path(into)))
        except NoLinksError as why:
            raise SystemExit(str(why)) from None
        save(args.json, rows)
    print(table(rows))


if __name__ == "__main__":
    main()
