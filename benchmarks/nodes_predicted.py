"""Measured steps of ranks in nodes, compared with `sn_compress.predict`.

    python -m benchmarks nodes_predicted                a table in Markdown, from kept rows
    python -m benchmarks nodes_predicted --measure      rates of this machine, a minute

Rows are those of node_ddp, node_horovod and shaped_ddp. Nodes of the first two are namespaces of
one machine, whose cores all ranks share: predict is told of a `Host`. Rates of the codec, and CPU
seconds of a byte that Gloo moves, are measured by themselves, in four ranks at once that have no
link, in CPU seconds of each: nothing is fitted to a step. Computing is a backward pass without an
exchange, of the same ranks, of which rows have the CPU seconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ddp_ranks import about, as_rank, run_ranks
from node_ddp import SHAPES
from pays import shapes_of
from rows_file import flags, load, save
from tables import markdown

from sn_compress import FFTCompression, LowRankCompression
from sn_compress.prediction.cost import ALONE, FASTEST, Host, Layer, Link, Step
from sn_compress.prediction.predict import predict
from sn_compress.prediction.rates import RECORDED, Rates, measure_rates

RESULTS = Path(__file__).resolve().parent / "results"
RATES = RESULTS / "nodes_predicted.json"
CORES, RANKS = 2, 4
ELEMENTS, REPEAT = 2**23, 5
SIDE = 3072  # of the codec's matrix: beyond 32 MB memory comes from the kernel each time
METHODS = {
    "plain": "plain", "fp16": "fp16", "plain by nodes": "plain by nodes",
    "low rank 50": "LowRankCompression", "low rank 150": "LowRankCompression",
    "low rank 50 by nodes": "LowRankCompression by nodes", "FFT": "FFTCompression",
    "FFT by nodes": "FFTCompression by nodes",
}  # fmt: skip


def shapes(scale: int) -> list[Layer]:
    """What node_ddp exchanges."""
    sides = [tuple(n // scale if n >= 1000 else n for n in shape) for shape in SHAPES]
    return [Layer(f"w{number}", shape) for number, shape in enumerate(sides)]


def trained(row: dict[str, Any]) -> bool:
    """Whether a row is of shaped_ddp, a rank a node, with no other on its core."""
    return "nodes" not in row


def predicted_step(row: dict[str, Any], here: dict[str, Any]) -> Step:
    """What predict says of a row, by the rates of a machine."""
    nodes, gpus = row.get("nodes", row.get("ranks")), row.get("per_node", 1)
    link = Link.of_gbit(row["gbit"])
    if "cycle_ms" in row:  # what Horovod agrees on begins in its next cycle
        link = replace(link, operation_s=1e-3 * row["cycle_ms"])
    if trained(row):  # a core a rank, and seconds of its computing are in pays.json
        every = load(RESULTS / "pays.json")
        alone = [row["compute_s"] for row in every if row["model"] == "transformer"]
        rates, host, compute_s = RECORDED["core"], ALONE, statistics.median(alone)
    else:
        rates, compute_s = Rates(**here["rates"]), row.get("compute_cpu_s", 0.0) / CORES
        host = Host(CORES, nodes * gpus, here["move_s"], here["sum_s"])
    if gpus > 1:
        # Inside a node there is no link: the cores carry what passes there.
        link = replace(link, gpus=gpus, inside=replace(link, bytes_per_s=FASTEST))
    low_rank = row["way"].startswith("low rank")
    ratio = float(row["way"].split()[2]) if low_rank else 50.0
    chosen = LowRankCompression.using(ratio=ratio) if low_rank else FFTCompression
    prediction = predict(
        shapes_of("transformer") if trained(row) else shapes(row["scale"]),
        ranks=nodes * gpus, link=link, settings=chosen.settings, rates=rates, host=host,
        compute_s=compute_s,
    )  # fmt: skip
    return prediction.row(METHODS[row["way"]]).step


def tables(here: dict[str, Any]) -> str:
    """Seconds and bytes, measured and predicted by the rates of a machine."""
    cells = []
    for source in ("node_ddp", "node_horovod", "shaped_ddp"):
        for row in load(RESULTS / f"{source}.json"):
            if row["way"] not in METHODS:
                continue
            of, scale = predicted_step(row, here), row.get("scale", 1)
            sent = row.get("node_bytes", row.get("bytes_per_step"))
            cells.append([
                {"node_ddp": "DDP", "node_horovod": "Horovod", "shaped_ddp": "DDP, trained"}[source]
                + (f", sides / {scale}" if scale > 1 else ""),
                f"{row.get('nodes', row.get('ranks'))} x {row.get('per_node', 1)}",
                f"{row['gbit']:g}", row["way"], f"{row['step_s']:.2f}", f"{of.seconds:.2f}",
                f"{of.seconds / row['step_s']:.2f}",
                f"{row['cpu_s']:.2f}" if "cpu_s" in row else "",
                "" if trained(row) else f"{CORES * of.cores_s:.2f}", f"{sent / 1e6:.2f}",
                f"{of.wire_bytes / 1e6:.2f}", f"{of.wire_bytes / sent:.2f}",
            ])  # fmt: skip
    head = (
        "rows", "nodes", "Gbit/s", "way", "s a step", "predicted", "ratio", "CPU s", "predicted",
        "MB a node", "predicted", "ratio",
    )  # fmt: skip
    return markdown(head, cells)


def cpu_of_byte(run: Callable[[], object], sent: float) -> float:
    """CPU seconds of this rank for each byte it sends, and for one it receives."""
    taken = []
    for _ in range(REPEAT):
        dist.barrier()
        start = time.process_time()
        run()
        taken.append(time.process_time() - start)
    return statistics.median(taken) / sent


def work(job: dict[str, Any]) -> dict[str, Any]:
    """In a rank, while all others do the same: CPU seconds of the codec, and of moving bytes."""
    dist.barrier()
    rates = measure_rates(FFTCompression.settings, side=SIDE, repeat=2, clock=time.process_time)
    ranks, nbytes = dist.get_world_size(), 4 * ELEMENTS
    sent = torch.ones(ELEMENTS)
    others = (ranks - 1) / ranks
    return {
        "rates": vars(rates),
        # What comes is received in new memory, a sum in its own.
        "move_s": cpu_of_byte(
            lambda: dist.all_to_all_single(torch.empty(ELEMENTS), sent), others * nbytes
        ),
        "sum_s": cpu_of_byte(lambda: dist.all_reduce(sent), 2 * others * nbytes),
    }


def mean_of(by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """The rates of a machine, from those of its ranks."""
    names = by_rank[0]["rates"]
    return {
        "ranks": len(by_rank),
        "rates": {
            name: statistics.fmean(rank["rates"][name] for rank in by_rank) for name in names
        },
        **{name: statistics.fmean(rank[name] for rank in by_rank) for name in ("move_s", "sum_s")},
    }


def main() -> None:
    """Print the table, or measure."""
    parser = flags(__doc__, RATES)
    parser.add_argument("--measure", action="store_true", help="measure this machine's rates")
    args = parser.parse_args()
    if args.measure:
        mean = mean_of(run_ranks(__file__, {}, ranks=RANKS, timeout_s=300))
        save(args.json, [mean | about(__file__)])
    print(tables(load(args.json)[-1]))


if __name__ == "__main__" and not as_rank(work):
    main()
