"""What does apoptosis gain on several ranks? A perceptron under the real Horovod.

    horovodrun --gloo -np 4 python -m benchmarks apoptosis_ranks             what is missing
    horovodrun --gloo -np 4 python -m benchmarks apoptosis_ranks --report    print the table
    horovodrun --gloo -np 4 python -m benchmarks apoptosis_ranks --quick     few steps

784, 1024, 1024, 10 with ReLU on Fashion-MNIST, Adam, 16 images a step on each rank, a learning rate
that falls to zero over the last half. Gradients are averaged by horovod.torch, wrapped anew after
each event. After each event and at the end, parameters and Adam's moments of all ranks are compared
bit for bit; tests and comparisons are not timed. Seconds are those that pass on rank 0. Ranks that
share cores wait for each other: these are no times of a cluster. Finished runs are saved at once.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import apoptosis_report as report
import horovod.torch as hvd
import torch
from apoptosis import LOOKS, dense, images, rate, score, widths
from machine import origin
from rows_file import flags, load, matching, path_of, save
from tables import markdown
from torch import nn

from sn_memory.apoptosis.torch import Apoptosis

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results/apoptosis_ranks.json"
METHODS = ("plain", "apoptosis")
BATCH = 16  # of each rank
SETTINGS = ("tolerance", "every", "round_to", "schedule", "more")


def require_same_bits(model: nn.Module, optimizer: Any) -> None:
    """Raise SystemExit on every rank unless all hold the same parameters and moments."""
    held = list(model.parameters())
    for parameter in model.parameters():
        held += [optimizer.state[parameter][key] for key in ("exp_avg", "exp_avg_sq")]
    flat = torch.cat([value.detach().reshape(-1) for value in held]).view(torch.int32)
    every = hvd.allgather(flat[None], name="bits")
    if not (every == every[:1]).all():
        raise SystemExit(f"rank {hvd.rank()}: ranks differ; expected the same bits on all")


def run(method: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Train one net on all ranks and return its row."""
    torch.manual_seed(seed)
    model = dense(784, 10, *args.widths)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    steps, apoptosis = args.steps, None
    if method == "apoptosis":
        steps = round(args.more * args.steps)
        settings = {name: getattr(args, name) for name in SETTINGS if name != "more"}
        apoptosis = Apoptosis(model, optimizer, **settings)

    def wrap() -> Any:
        wrapped = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        wrapped.state = optimizer.state
        return wrapped

    opt = wrap()
    inputs, labels, test_inputs, test_labels = images(seed)
    shuffle = torch.Generator().manual_seed(seed)
    together = BATCH * hvd.size()
    per_epoch = len(inputs) // together
    looks = {round(steps * (i + 1) / LOOKS) for i in range(LOOKS)}
    wall_s = event_s = 0.0
    compared = 0
    curve: list[tuple[int, float, float, list[int]]] = []
    order = torch.empty(0)
    for step in range(steps):
        if step % per_epoch == 0:
            order = torch.randperm(len(inputs), generator=shuffle)
        first = (step % per_epoch) * together + BATCH * hvd.rank()
        rows = order[first : first + BATCH]
        start, event = time.perf_counter(), None
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps)
        opt.zero_grad()
        nn.functional.cross_entropy(model(inputs[rows]), labels[rows]).backward()
        opt.step()
        if apoptosis is not None:
            before = time.perf_counter()
            if event := apoptosis.step():
                opt = wrap()
            event_s += time.perf_counter() - before
        wall_s += time.perf_counter() - start
        if event or step + 1 == steps:
            require_same_bits(model, optimizer)
            compared += 1
        if step + 1 in looks:
            seen = score(model, test_inputs, test_labels) if hvd.rank() == 0 else 0.0
            curve.append((step + 1, round(wall_s, 3), seen, widths(model)))
    return {
        "method": method,
        "seed": seed,
        "ranks": hvd.size(),
        "widths": args.widths,
        "plain_steps": args.steps,
        "steps": steps,
        **({name: getattr(args, name) for name in SETTINGS} if apoptosis else {}),
        "score": curve[-1][2],
        "parameters": sum(p.numel() for p in model.parameters()),
        "wall_s": round(wall_s, 3),
        "apoptosis_s": round(event_s, 3),
        "events": len(apoptosis.events) if apoptosis else 0,
        "compared": compared,
        **report.columns(curve, "wall_s"),
        **origin(),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return markdown: one line for each run."""
    head = ("method", "seed", "score %", "parameters", "seconds", "to target", "events, compared")
    lines = []
    target = report.target_of(rows)
    for row in rows:
        to = report.seconds_to(row, target, "wall_s")
        lines.append(
            [
                row["method"], str(row["seed"]), f"{row['score']:.2f}", f"{row['parameters']:,}",
                f"{row['wall_s']:.1f}", "never" if to is None else f"{to:.1f}",
                f"{row['events']}, {row['compared']}",
            ]
        )  # fmt: skip
    return markdown(head, lines)


def main() -> None:
    """Do the runs that are missing, then print what they say."""
    parser = flags(__doc__)
    parser.add_argument("--quick", action="store_true", help="few steps, a narrower net, one seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--steps", type=int, default=1406, help="steps of plain")
    parser.add_argument("--more", type=float, default=1.25, help="steps of apoptosis over plain's")
    parser.add_argument("--tolerance", type=float, default=0.01)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--round-to", type=int, default=8)
    parser.add_argument("--schedule", default="aggressive")
    parser.add_argument("--report", action="store_true", help="run nothing; print the table")
    args = parser.parse_args()
    args.widths = [1024, 1024]
    if args.quick:
        args.widths, args.steps, args.every, args.tolerance = [64, 64], 60, 20, 0.4
    hvd.init()
    torch.set_num_threads(1)  # ranks share the cores
    path = path_of(args, RESULTS)
    rows = load(path)
    for seed in () if args.report else args.seeds:
        for method in args.methods:
            key = {"method": method, "seed": seed, "ranks": hvd.size(), "widths": args.widths}
            key["plain_steps"] = args.steps
            if method != "plain":
                key |= {name: getattr(args, name) for name in SETTINGS}
            if matching(rows, key):
                continue
            rows.append(run(method, seed, args))
            if hvd.rank() == 0:
                save(path, rows)
    if hvd.rank() == 0:
        print(table(rows))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
