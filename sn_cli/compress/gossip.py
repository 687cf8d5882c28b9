"""The command `gossip`: many simulated ranks under all-reduce, gossip, and training alone."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from sn_compress.gossip.simulate import Curve, simulate, table
from sn_compress.gossip.topology import NAMES, Topology, spectral_gap, topology
from sn_memory.base.progress import progress_output, report_progress

from ..command import Answer, add_command, picture_file, pyplot

# Okabe and Ito's palette; grey is for the baselines.
_LOOKS = {
    "all-reduce": ("#5f6368", "--"),
    "alone": ("#cc79a7", "-"),
    "gradients": ("#d55e00", "-"),
    "weights": ("#0072b2", "-"),
    "overlapped": ("#009e73", "-"),
}
_PANELS = {
    "distance": "Consensus distance",
    "mean_loss": "Loss of the mean model",
    "worker_loss": "Loss of a worker",
}


def add_gossip(commands: Any) -> None:
    """Add the command to its group."""
    flags = add_command(
        commands, "gossip", _gossip, help="train simulated ranks by gossip and by all-reduce"
    )
    flags.add_argument("--ranks", type=int, required=True, help="number of ranks, up to 1,024")
    flags.add_argument("--topology", choices=NAMES, default="dissemination")
    flags.add_argument("--rotate", action="store_true", help="shuffle ranks after each period")
    flags.add_argument("--steps", type=int, default=2000)
    flags.add_argument("--rate", type=float, default=0.1, help="learning rate")
    flags.add_argument("--momentum", type=float, default=0.0)
    flags.add_argument("--noise", type=float, default=1.0, help="noise of a gradient entry")
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--png", type=picture_file, metavar="FILE", help="plot the curves")
    flags.add_argument("--quiet", action="store_true", help="no progress on standard error")


def _gossip(args: argparse.Namespace) -> Answer:
    graph = topology(args.topology, args.ranks, rotate=args.rotate, seed=args.seed)
    with progress_output(not args.quiet):
        curves = simulate(
            graph,
            steps=args.steps,
            rate=args.rate,
            momentum=args.momentum,
            noise=args.noise,
            seed=args.seed,
            progress=lambda step: report_progress("steps", step, args.steps),
        )
    text = f"{_headline(graph, args)}\n{table(curves)}"
    if args.png:
        _draw(curves, _headline(graph, args), args.png)
        text += f"\n{args.png}"
    data = {"ranks": args.ranks, "topology": args.topology, "curves": [asdict(c) for c in curves]}
    return Answer(text, data)


def _headline(graph: Topology, args: argparse.Namespace) -> str:
    gap = "exact" if graph.exact else f"spectral gap {spectral_gap(graph):.2g}"
    rotated = ", rotated" if graph.rotate else ""
    return (
        f"{graph.ranks:,} ranks, {graph.name}{rotated} ({graph.steps} steps a period, {gap}), "
        f"rate {args.rate:g}, momentum {args.momentum:g}"
    )


def _draw(curves: Sequence[Curve], headline: str, path: str) -> None:
    plt = pyplot(font_size=10)
    figure, panels = plt.subplots(1, 3, figsize=(13, 4.4), layout="constrained")
    for axes, (what, title) in zip(panels, _PANELS.items(), strict=True):
        for curve in curves:
            if what == "distance" and curve.scheme == "all-reduce":
                continue  # zero except for rounding, which a log axis would magnify
            colour, line = _LOOKS[curve.scheme]
            axes.plot(
                curve.steps, getattr(curve, what), color=colour, linestyle=line, linewidth=1.6,
                label=curve.scheme,
            )  # fmt: skip
        axes.set(yscale="log", xlabel="step", xlim=(0, curves[0].steps[-1]))
        axes.set_title(title, loc="left", fontsize=11)
    handles, labels = panels[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle(headline, x=0.01, ha="left", fontsize=11)
    figure.savefig(path, dpi=110)
    plt.close(figure)
