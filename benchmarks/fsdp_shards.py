"""FSDP2 in fewer bytes: loss of a small GPT-2 by seed, and bytes, alone and with a plan.

    python -m benchmarks fsdp_shards [--ways NAME ...] [--seeds 0 1 2] [--steps 200] [--json FILE]
    python -m benchmarks fsdp_shards --report

Four ranks over Gloo on this machine train Transformers' GPT-2 (4 layers of width 128) on the text
of language.py, of which the last tenth is held out. The seed draws weights and batches. "planned"
is `sn_memory.torch.plan` at --budget of the unplanned peak, sharded behind the plan. Rows are kept,
so that a stopped run goes on.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ddp_ranks import about, as_rank, measured, run_ranks
from language import VOCABULARY, batch
from rows_file import flags, load, save
from torch import nn
from torch.distributed.fsdp import fully_shard

import sn_memory.torch
from sn_compress.text_table import text_table
from sn_compress.torch.fsdp_shards import compress_shards

RESULTS = Path(__file__).resolve().parent / "results/fsdp_shards.json"
RANKS = 4
BATCH, CONTEXT = 4, 96  # sequences of a rank, tokens of each
HELD_OUT_BATCHES = 16  # of each rank
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "4 and 8 bits": {"gradients": 4, "parameters": 8},
    "8 and 8 bits": {"gradients": 8, "parameters": 8},
    "planned": {"planned": True},
    "planned, 4 and 8 bits": {"planned": True, "gradients": 4, "parameters": 8},
}


class Gpt2(nn.Module):
    """GPT-2 that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=VOCABULARY, n_positions=CONTEXT, n_embd=128, n_layer=4, n_head=4,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        )  # fmt: skip
        self.gpt = GPT2LMHeadModel(config)

    def forward(self, tokens: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """The mean loss of the tokens [batch, length] that follow, in nats."""
        logits = self.gpt(tokens).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten())


def train(model: nn.Module, seed: int, steps: int) -> float:
    """Train on a rank's own batches; the loss of all ranks on what was held out."""
    rank = dist.get_rank()
    draws = torch.Generator().manual_seed(1000 * seed + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        model(*batch(BATCH, CONTEXT, draws)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if rank == 0 and step % 100 == 99:
            print(f"{step + 1} of {steps} steps", flush=True)
    draws.manual_seed(rank)  # the same batches for all seeds and ways
    with torch.no_grad():
        losses = [
            model(*batch(BATCH, CONTEXT, draws, held_out=True)) for _ in range(HELD_OUT_BATCHES)
        ]
    total = torch.stack(losses).mean()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def work(job: dict[str, Any]) -> dict[str, Any]:
    """In a rank: train one way, and return its loss on what was held out."""
    warnings.simplefilter("ignore")
    way = WAYS[job["way"]]
    torch.manual_seed(job["seed"])
    model: nn.Module = Gpt2()
    if way.get("planned"):
        sample = batch(BATCH, CONTEXT, torch.Generator().manual_seed(0))
        model = sn_memory.torch.plan(model, sample, job["budget"], profile=False)
    else:
        for block in model.gpt.transformer.h:  # type: ignore[union-attr]
            fully_shard(block)
    model = fully_shard(model)
    bits = {name: way[name] for name in ("gradients", "parameters") if name in way}
    shards = compress_shards(model, **bits) if bits else None
    loss = train(model, job["seed"], job["steps"])
    return {"loss": loss, **(shards.report() if shards else {})}


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each way: loss of each seed, and how far from plain's of the same seed."""
    cells = []
    for way in WAYS:
        own = {row["seed"]: row for row in rows if row["way"] == way}
        if not own:
            continue
        first = next(iter(own.values()))
        losses = [own[seed]["loss"] for seed in sorted(own)]
        spread = max(losses) - min(losses)
        cells.append(
            [
                way,
                " ".join(f"{loss:.4f}" for loss in losses),
                statistics.mean(losses),
                spread,
                first.get("gradient_ratio", 1.0),
                first.get("parameter_ratio", 1.0),
            ]
        )
    head = ("way", "loss of each seed", "mean", "spread", "gradients /", "parameters /")
    return text_table(head, cells, ("", "", ".4f", ".4f", ".2f", ".2f"))


def parser_of(doc: str | None, results: Path, ways: Iterable[str]) -> argparse.ArgumentParser:
    """The arguments of a bench that trains each way with each seed."""
    parser = flags(doc, results)
    parser.add_argument("--report", action="store_true", help="only print the table")
    parser.add_argument("--ways", nargs="+", choices=ways, default=list(ways))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=200)
    return parser


def rows_by_seed(
    script: str,
    args: argparse.Namespace,
    more: Callable[[str], dict[str, Any]] = lambda way: {},
) -> list[dict[str, Any]]:
    """Do the runs that are missing; all rows, which are kept after each.

    more : of a way, what its job has beside way, seed and steps
    """
    rows = load(args.json)
    for seed in [] if args.report else args.seeds:
        for way in args.ways:
            job = {"way": way, "seed": seed, "steps": args.steps} | more(way)
            if measured(rows, job):
                continue
            print(f"{way}, seed {seed}", file=sys.stderr, flush=True)
            by_rank = run_ranks(script, job, ranks=RANKS, timeout_s=3600)
            rows.append(job | by_rank[0] | about(script))
            save(args.json, rows)
    return rows


def main() -> None:
    """Do the runs that are missing, then print the table."""
    parser = parser_of(__doc__, RESULTS, WAYS)
    parser.add_argument("--budget", default="60%", help="budget of the planned ways")
    args = parser.parse_args()
    budgets = {way: args.budget if WAYS[way].get("planned") else None for way in WAYS}
    print(table(rows_by_seed(__file__, args, lambda way: {"budget": budgets[way]})))


if __name__ == "__main__" and not as_rank(work):
    main()
