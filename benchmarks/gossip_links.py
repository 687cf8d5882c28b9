"""Seconds of a step with gossip and all-reduce, over shaped links, with and without a slow rank.

    python -m benchmarks gossip_links [--model NAME] [--ranks N] [--gbit RATE] [--rho R ...]
                                      [--slow FACTOR ...] [--steps N] [--json FILE]

Parameters, sizes and optimizers are real, gradients and computing are replayed: each layer sleeps
its share. Computing is the seconds of a plain exchange without overlap over rho. Compute
efficiency is the share of a step in which the rank computes, as GossipGraD (arXiv 1803.05880,
section 7) reports it. All-reduce is Horovod's own, layer by layer in the backward pass; gossip is
GossipOptimizer over torch.distributed, overlapped with the next step. Needs root and iproute2.
Rows that go to benchmarks/results/gossip_links.json are written into docs/gossip.md as well.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gossip_report import PAGE
from machine import origin
from rows_file import flags, load, save
from shaped_links import NoLinksError, ShapedLinks
from tables import markdown, put_into
from training_runs import plain_s, say

from sn_compress.prediction.cost import layers

RESULTS = Path(__file__).resolve().parent / "results/gossip_links.json"
METHODS = ("all-reduce", "gossip", "gossip, top-k")
KEYS = ("model", "method", "ranks", "gbit", "rho", "slow", "steps")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags."""
    parser = flags(__doc__)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--gbit", type=float, default=0.1)
    parser.add_argument("--rho", type=float, nargs="+", default=[1.0, 2.56])
    parser.add_argument("--slow", type=float, nargs="+", default=[1.0, 1.5])
    parser.add_argument("--steps", type=int, default=4, help="timed steps, after two untimed")
    parser.add_argument("--timeout", type=float, default=3600)
    return parser.parse_args(argv)


def runs_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    """What to run."""
    plain = plain_s(layers(args.model), args.ranks, args.gbit)
    return [
        {
            "gossip": True, "model": args.model, "method": method, "ranks": args.ranks,
            "gbit": args.gbit, "rho": rho, "slow": slow, "steps": args.steps, "warm": 2,
            "compute_s": plain / rho,
        }
        for rho in args.rho
        for slow in args.slow
        for method in METHODS
    ]  # fmt: skip


def row_of(run: dict[str, Any], results: list[dict[str, Any]]) -> dict[str, Any]:
    """A flat row from what all ranks found; efficiency is that of the ranks that are not slow."""
    step_s = max(result["step_s"] for result in results)
    return {
        **{key: run[key] for key in KEYS},
        "compute_s": run["compute_s"],
        "step_s": step_s,
        "efficiency": run["compute_s"] * run["slow"] / step_s,
        "sent_bytes": results[0]["sent_bytes"],
        **origin(),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    head = ("rho", "slow rank", "method", "s a step", "compute efficiency", "MB a rank sends")
    lines = []
    for row in rows:
        sent = "" if row["sent_bytes"] is None else f"{row['sent_bytes'] / 1e6:.1f}"
        slow = "none" if row["slow"] == 1 else f"{row['slow']:g}x"
        efficiency = f"{100 * row['efficiency']:.0f} %"
        step_s = f"{row['step_s']:.2f}"
        lines.append([f"{row['rho']:g}", slow, row["method"], step_s, efficiency, sent])
    return markdown(head, lines)


def main(argv: list[str] | None = None) -> None:
    """Do the runs that are missing."""
    from rank_jobs import run_ranks

    args = parse(argv)
    rows = load(args.json)
    existing = {tuple(row[key] for key in KEYS) for row in rows}
    runs = [run for run in runs_of(args) if tuple(run[key] for key in KEYS) not in existing]
    say(f"{len(runs)} runs to do")

    def done(number: int, results: list[dict[str, Any]]) -> None:
        rows.append(row_of(runs[number], results))
        say(table(rows[-1:]).splitlines()[-1])
        save(args.json, rows)

    if runs:
        try:
            with ShapedLinks(args.ranks, args.gbit) as links:
                run_ranks(runs, links, timeout_s=args.timeout, done=done)
        except NoLinksError as why:
            raise SystemExit(str(why)) from None
    print(table(rows))
    if args.json and args.json.resolve() == RESULTS:
        put_into(PAGE, "gossip-links", table(rows))


if __name__ == "__main__":
    main()
