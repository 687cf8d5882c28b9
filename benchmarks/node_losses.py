"""Does summing inside a node first change what a model learns? Losses of a small GPT-2 by seed.

    python -m benchmarks node_losses [--ways NAME ...] [--seeds 0 1 2] [--steps 200] [--json FILE]
    python -m benchmarks node_losses --report

The model, text and held-out loss of fsdp_shards, in DDP: four ranks on this machine, which call
themselves two nodes of two. The seed draws weights and batches. Rows are kept, so that a stopped
run goes on.
"""

from __future__ import annotations

import os
import statistics
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ddp_ranks import as_rank
from fsdp_shards import Gpt2, parser_of, rows_by_seed, train
from torch.nn.parallel import DistributedDataParallel

from sn_compress import FFTCompression, LowRankCompression
from sn_compress.text_table import text_table
from sn_compress.torch.ddp import CompressionState, compression_hook

RESULTS = Path(__file__).resolve().parent / "results/node_losses.json"
PER_NODE = 2
WARMUP = 10  # steps of low rank that travel dense
WAYS: dict[str, Any] = {
    "plain": None,
    "low rank 50": LowRankCompression.using(ratio=50, warmup=WARMUP, hierarchy=None),
    "low rank 50 by nodes": LowRankCompression.using(ratio=50, warmup=WARMUP),
    "FFT": FFTCompression.using(hierarchy=None),
    "FFT by nodes": FFTCompression,
}


def work(job: dict[str, Any]) -> dict[str, Any]:
    """In a rank: train one way; its loss on what was held out, and how many nodes exchanged."""
    warnings.simplefilter("ignore")
    os.environ["GROUP_RANK"] = str(dist.get_rank() // PER_NODE)
    torch.manual_seed(job["seed"])
    model = DistributedDataParallel(Gpt2())
    if (compression := WAYS[job["way"]]) is None:
        return {"loss": train(model, job["seed"], job["steps"]), "by_nodes": 0}
    state = CompressionState(compression, named_parameters=model.module.named_parameters())
    model.register_comm_hook(state, compression_hook)
    loss, report = train(model, job["seed"], job["steps"]), state.report()
    return {"loss": loss, "by_nodes": report.get("nodes", 0), "ratio": round(report["ratio"], 2)}


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each way: loss of each seed, and the mean of how far it is from plain's."""
    loss = {(row["way"], row["seed"]): row["loss"] for row in rows}
    cells = []
    for way in WAYS:
        own = [row for row in rows if row["way"] == way]
        if own:
            own.sort(key=lambda row: row["seed"])
            over = [row["loss"] - loss.get(("plain", row["seed"]), row["loss"]) for row in own]
            losses = " ".join(f"{row['loss']:.4f}" for row in own)
            mean = statistics.mean(row["loss"] for row in own)
            cells.append([way, losses, mean, statistics.mean(over), own[0].get("ratio", 1.0)])
    head = ("way", "loss of each seed", "mean", "over plain", "x fewer bytes")
    return text_table(head, cells, ("", "", ".4f", "+.4f", ".2f"))


def main() -> None:
    """Do the runs that are missing, then print the table."""
    print(table(rows_by_seed(__file__, parser_of(__doc__, RESULTS, WAYS).parse_args())))


if __name__ == "__main__" and not as_rank(work):
    main()
