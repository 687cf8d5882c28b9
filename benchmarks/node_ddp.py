"""DDP over nodes of several ranks: seconds of a step, bytes that leave a node, by nodes and flat.

    python -m benchmarks node_ddp [--nodes 2 4] [--gbit 0.1 1] [--json FILE]      as root
    python -m benchmarks node_ddp --report

Each node is a namespace behind a link of --gbit (benchmarks/shaped_links.py); its --per-node ranks
meet at its own address, so that traffic inside a node never reaches the link. Gradients have
AlexNet's shapes and are made without a network: 64 directions of decreasing strength, which ranks
share, plus noise of each rank. For pure noise low rank would send rows, and twice as much.
The timed part is a backward pass of one product per parameter, and the exchange. Bytes are those
that the node's interface counts in a step, headers included; CPU seconds those of all ranks
together, which other programs hardly change. "plain by nodes" sums everything inside a node and
sends it uncompressed between owners: no tensor is large enough for LowRankCompression.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ddp_ranks import about, as_rank, measured, run_ranks
from resnet50_gradients import gradient
from rows_file import flags, load, save
from shaped_links import NoLinksError, ShapedLinks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sn_compress import FFTCompression, LowRankCompression
from sn_compress.text_table import text_table
from sn_compress.torch.ddp import CompressionState, compression_hook

RESULTS = Path(__file__).resolve().parent / "results/node_ddp.json"
COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")
SETTINGS = ("nodes", "per_node", "gbit", "scale")
# Steps before those that are timed: of low rank the dense one, and that which chooses sizes.
SETTLE, SETTLE_WHOLE = 2, 1
# AlexNet (Krizhevsky 2012, as torchvision has it): weights and biases of its layers.
SHAPES = [
    (64, 3, 11, 11), (192, 64, 5, 5), (384, 192, 3, 3), (256, 384, 3, 3), (256, 256, 3, 3),
    (4096, 9216), (4096, 4096), (1000, 4096), (64,), (192,), (384,), (256,), (256,), (4096,),
    (4096,), (1000,),
]  # fmt: skip
HEAD = ("way", "s/step", "x plain", "CPU s", "MB a node")
WAYS: dict[str, Any] = {
    "plain": None,
    "plain by nodes": LowRankCompression.using(min_elements=2**40),
    "low rank 50": LowRankCompression.using(ratio=50, warmup=1, hierarchy=None),
    "low rank 50 by nodes": LowRankCompression.using(ratio=50, warmup=1),
    "FFT": FFTCompression.using(hierarchy=None),
    "FFT by nodes": FFTCompression,
}


class Shapes(nn.Module):
    """Parameters whose gradients are what it is called with, times a number."""

    def __init__(self, scale: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        # Sides of matrices divided by a scale, where a machine has no room for all of them.
        shapes = [tuple(n // scale if n >= 1000 else n for n in shape) for shape in SHAPES]
        self.tensors = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)

    def gradients(self, rank: int) -> list[torch.Tensor]:
        """A rank's, of unit scale; the same in every run."""
        return [gradient(tuple(tensor.shape), at, rank) for at, tensor in enumerate(self.tensors)]

    def forward(self, gradients: list[torch.Tensor], factor: float) -> torch.Tensor:
        """The sum of products."""
        pairs = zip(self.tensors, gradients, strict=True)
        return torch.stack([torch.dot(p.flatten(), g.flatten()) for p, g in pairs]).sum() * factor


def now() -> dict[str, float]:
    """Clocks and the counter of this rank's node, before a step."""
    clocks = {"seconds": time.perf_counter(), "cpu": time.process_time()}
    return clocks | {"sent": int(COUNTER.read_text())}


def note(taken: dict[str, list[float]], before: dict[str, float], seconds: float) -> None:
    """Add what a step took to what steps have taken."""
    for name, value in now().items():
        taken[name].append(seconds if name == "seconds" else value - before[name])


def alone(model: Shapes, gradients: list[torch.Tensor], meet: Callable[[], object]) -> float:
    """CPU seconds of this rank's backward pass without an exchange, while all do one."""
    taken = []
    for step in range(SETTLE + 3):
        model.zero_grad()
        meet()
        start = time.process_time()
        model(gradients, 1.0 + step / 10).backward()
        taken.append(time.process_time() - start)
    return statistics.median(taken[SETTLE:])


def row_of(way: str, job: dict[str, Any], by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """Seconds are those of the slowest rank, CPU seconds of all, bytes those of the first node."""
    of_way = [rank[way] for rank in by_rank]
    steps = [max(of) for of in zip(*(rank["seconds"] for rank in of_way), strict=True)]
    cpu = [sum(of) for of in zip(*(rank["cpu"] for rank in of_way), strict=True)]
    return {
        "way": way, **{name: job[name] for name in SETTINGS}, "steps": job["steps"],
        "step_s": round(statistics.median(steps), 3), "cpu_s": round(statistics.median(cpu), 3),
        "compute_cpu_s": round(sum(rank["alone"] for rank in by_rank), 3),
        "node_bytes": round(statistics.median(of_way[0]["sent"])),
    }  # fmt: skip


def work(job: dict[str, Any]) -> dict[str, Any]:
    """In a rank: steps of all ways, in turn."""
    os.environ["GROUP_RANK"] = str(dist.get_rank() // job["per_node"])
    model = Shapes(job["scale"])
    gradients = model.gradients(dist.get_rank())
    result: dict[str, Any] = {"alone": alone(model, gradients, dist.barrier)}
    for way in job["ways"]:
        # One after the other: eight ranks with six models each would not fit.
        model.zero_grad()
        # Every rank made the same model: to send it once more would take minutes on a slow link.
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, init_sync=False)
        if (compression := WAYS[way]) is not None:
            state = CompressionState(compression, named_parameters=model.named_parameters())
            ddp.register_comm_hook(state, compression_hook)
        taken: dict[str, list[float]] = {"seconds": [], "cpu": [], "sent": []}
        settle = SETTLE_WHOLE if way.startswith("plain") else SETTLE
        for step in range(settle + job["steps"]):
            model.zero_grad()
            dist.barrier()
            before = now()
            ddp(gradients, 1.0 + step / 10).backward()
            seconds = time.perf_counter() - before["seconds"]
            dist.barrier()  # what a rank has sent is counted when the others have it
            note(taken, before, seconds)
        result[way] = {name: values[settle:] for name, values in taken.items()}
        del ddp
    return result


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as people read them, a table for each set of nodes."""
    lines = []
    for key in dict.fromkeys(tuple(row[k] for k in ("commit", *SETTINGS)) for row in rows):
        group = [row for row in rows if tuple(row[k] for k in ("commit", *SETTINGS)) == key]
        commit, nodes, per_node, gbit, _ = key
        lines.append(
            f"\ncommit {commit}: {nodes} nodes of {per_node} ranks, {gbit:g} Gbit/s between, "
            f"load {group[-1]['load']:.1f}"
        )
        plain = next((row["step_s"] for row in group if row["way"] == "plain"), None)
        cells = [
            [
                row["way"],
                row["step_s"],
                plain and plain / row["step_s"],
                row["cpu_s"],
                row["node_bytes"] / 1e6,
            ]
            for row in group
        ]
        lines.append(text_table(HEAD, cells, ("", ".2f", ".2f", ".2f", ".2f")))
    return "\n".join(lines)


def main() -> None:
    """Do the runs that are missing, then print the tables."""
    parser = flags(__doc__, RESULTS)
    parser.add_argument("--report", action="store_true", help="only print the table")
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--per-node", type=int, default=2)
    parser.add_argument("--gbit", type=float, nargs="+", default=[0.1, 1.0])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each way")
    parser.add_argument("--scale", type=int, default=1, help="divides the sides of large matrices")
    args = parser.parse_args()
    rows = load(args.json)
    for nodes in [] if args.report else args.nodes:
        for gbit in args.gbit:
            job = {"nodes": nodes, "per_node": args.per_node, "gbit": gbit, "scale": args.scale}
            if all(measured(rows, job | {"way": way}) for way in args.ways):
                continue
            print(f"{nodes} nodes, {gbit:g} Gbit/s", file=sys.stderr, flush=True)
            job |= {"ways": args.ways, "steps": args.steps}
            try:
                with ShapedLinks(nodes, gbit) as links:
                    by_rank = run_ranks(
                        __file__, job, ranks=nodes * args.per_node, timeout_s=3600, links=links,
                        per_node=args.per_node,
                    )  # fmt: skip
            except NoLinksError as why:
                raise SystemExit(str(why)) from None
            rows += [row_of(way, job, by_rank) | about(__file__) for way in args.ways]
            save(args.json, rows)
    print(table(rows))


if __name__ == "__main__" and not as_rank(work):
    main()
