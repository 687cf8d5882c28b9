"""Steps of ranks in nodes, measured, beside what `sn_compress.predict` says of them.

    python -m benchmarks nodes_predicted                two tables in Markdown, from kept rows
    python -m benchmarks nodes_predicted --measure      what Gloo moves inside a node here

Rows are those of node_ddp, node_horovod and shaped_ddp. They have no rates of the codec beside
them, so those recorded of one core are taken, times the ranks that share a core: nothing is fitted.
Computing is not counted but for the transformer of shaped_ddp, of which pays.json has it. What
moves inside a node goes through the same cores; it was measured as `--measure` does it: four ranks
in pairs, each pair with an all-to-all of 32 MB at once.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ddp_ranks import as_rank, run_ranks
from node_ddp import SHAPES
from pays import shapes_of
from tables import markdown
from training_rows import load

from sn_compress import FFTCompression, LowRankCompression
from sn_compress.prediction.cost import Layer, Link, Step
from sn_compress.prediction.predict import predict
from sn_compress.prediction.rates import RECORDED, Rates

RESULTS = Path(__file__).resolve().parent / "results"
CORES = 2
INSIDE_GBIT = 0.86  # of each rank, by --measure: median of three runs, load 11 to 21
ELEMENTS, REPEAT = 2**23, 5
METHODS = {
    "plain": "plain", "fp16": "fp16", "plain by nodes": "plain by nodes", "low rank 50": "shared",
    "low rank 150": "shared", "low rank 50 by nodes": "shared by nodes", "FFT": "gather",
    "FFT by nodes": "gather by nodes",
}  # fmt: skip


def shapes(scale: int) -> list[Layer]:
    """What node_ddp exchanges."""
    sides = [tuple(n // scale if n >= 1000 else n for n in shape) for shape in SHAPES]
    return [Layer(f"w{number}", shape) for number, shape in enumerate(sides)]


def said(row: dict[str, Any]) -> Step:
    """What predict says of a row."""
    nodes, gpus = row.get("nodes", row.get("ranks")), row.get("per_node", 1)
    link = Link.of_gbit(row["gbit"])
    if gpus > 1:
        link = replace(link, gpus=gpus, inside=Link.of_gbit(INSIDE_GBIT))
    of_each = max(1.0, nodes * gpus / CORES)
    rates = Rates(**{name: of_each * value for name, value in vars(RECORDED["core"]).items()})
    low_rank = row["way"].startswith("low rank")
    ratio = float(row["way"].split()[2]) if low_rank else 50.0
    chosen = LowRankCompression.using(ratio=ratio) if low_rank else FFTCompression
    trained = "nodes" not in row
    alone = [it["compute_s"] for it in load(RESULTS / "pays.json") if it["model"] == "transformer"]
    found = predict(
        shapes_of("transformer") if trained else shapes(row["scale"]),
        ranks=nodes * gpus, link=link, settings=chosen.settings, rates=rates,
        compute_s=statistics.median(alone) if trained else 0.0,
    )  # fmt: skip
    return found.row(METHODS[row["way"]]).step


def tables() -> str:
    """Seconds and bytes, measured and predicted."""
    cells = []
    for source in ("node_ddp", "node_horovod", "shaped_ddp"):
        for row in load(RESULTS / f"{source}.json"):
            if row["way"] not in METHODS:
                continue
            of, scale = said(row), row.get("scale", 1)
            sent = row.get("node_bytes", row.get("bytes_per_step"))
            cells.append([
                {"node_ddp": "DDP", "node_horovod": "Horovod", "shaped_ddp": "DDP, trained"}[source]
                + (f", sides / {scale}" if scale > 1 else ""),
                f"{row.get('nodes', row.get('ranks'))} x {row.get('per_node', 1)}",
                f"{row['gbit']:g}", row["way"], f"{row['step_s']:.2f}", f"{of.seconds:.2f}",
                f"{of.seconds / row['step_s']:.2f}", f"{sent / 1e6:.2f}",
                f"{of.wire_bytes / 1e6:.2f}", f"{of.wire_bytes / sent:.2f}",
            ])  # fmt: skip
    head = (
        "rows", "nodes", "Gbit/s", "way", "s a step", "predicted", "ratio", "MB a node",
        "predicted", "ratio",
    )  # fmt: skip
    return markdown(head, cells)


def work(job: dict[str, Any]) -> dict[str, Any]:
    """In a rank: seconds of all-to-alls inside its pair."""
    pairs = [dist.new_group(pair) for pair in ([0, 1], [2, 3])]
    group = pairs[dist.get_rank() // 2]
    sent, came, seconds = torch.ones(ELEMENTS), torch.empty(ELEMENTS), []
    for _ in range(REPEAT):
        dist.barrier()
        start = time.perf_counter()
        dist.all_to_all_single(came, sent, group=group)
        seconds.append(time.perf_counter() - start)
    return {"seconds": statistics.median(seconds)}


def main() -> None:
    """Print the table, or measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--measure", action="store_true", help="Gbit/s of each rank inside a node")
    if parser.parse_args().measure:
        found = run_ranks(__file__, {}, ranks=4, timeout_s=300)
        slowest = max(rank["seconds"] for rank in found)
        print(f"{2 * ELEMENTS * 8e-9 / slowest:.2f} Gbit/s of each of four ranks")  # half leaves it
        return
    print(tables())


if __name__ == "__main__" and not as_rank(work):
    main()
