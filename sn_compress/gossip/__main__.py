"""The command line: `python -m sn_compress.gossip simulate --ranks 128 --png gossip.png`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ..base.errors import CompressError
from .mixing import spectral_gap
from .simulate import Curve, simulate, table
from .topology import NAMES, Topology, topology

# Okabe and Ito's palette; grey is what gossip is compared with.
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the status to exit with."""
    args = _parser().parse_args(argv)
    try:
        graph = topology(args.topology, args.ranks, rotate=args.rotate, seed=args.seed)
        curves = simulate(
            graph,
            steps=args.steps,
            rate=args.rate,
            momentum=args.momentum,
            noise=args.noise,
            seed=args.seed,
            progress=_Progress(args.steps),
        )
    except CompressError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{_headline(graph, args)}\n{table(curves)}\n")
    if args.json:
        rows = [{"ranks": args.ranks, "topology": args.topology, **asdict(c)} for c in curves]
        args.json.write_text(json.dumps(rows))
    if args.png:
        _draw(curves, _headline(graph, args), args.png)
        sys.stdout.write(f"{args.png}\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sn_compress.gossip", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    flags = commands.add_parser("simulate", help="train many simulated ranks under five schemes")
    flags.add_argument("--ranks", type=int, required=True, help="up to 1,024")
    flags.add_argument("--topology", choices=NAMES, default="dissemination")
    flags.add_argument("--rotate", action="store_true", help="new partners after each period")
    flags.add_argument("--steps", type=int, default=2000)
    flags.add_argument("--rate", type=float, default=0.1, help="learning rate")
    flags.add_argument("--momentum", type=float, default=0.0)
    flags.add_argument("--noise", type=float, default=1.0, help="of a gradient entry")
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--json", type=Path, metavar="FILE", help="the curves")
    flags.add_argument("--png", type=Path, metavar="FILE", help="a picture of them")
    return parser


def _headline(graph: Topology, args: argparse.Namespace) -> str:
    gap = "exact" if graph.exact else f"spectral gap {spectral_gap(graph):.2g}"
    rotated = ", rotated" if graph.rotate else ""
    return (
        f"{graph.ranks:,} ranks, {graph.name}{rotated} ({graph.steps} steps a period, {gap}), "
        f"rate {args.rate:g}, momentum {args.momentum:g}"
    )


class _Progress:
    """A line on standard error that says how far it is, about once a second."""

    def __init__(self, steps: int) -> None:
        self.steps, self.start = steps, time.monotonic()
        self.said = self.start

    def __call__(self, step: int) -> None:
        now = time.monotonic()
        if now - self.said < 1 and step < self.steps:
            return
        self.said = now
        left = (now - self.start) / step * (self.steps - step)
        end = "\n" if step == self.steps else ""
        sys.stderr.write(f"\rstep {step:,} of {self.steps:,}, {left:.0f} s left  {end}")
        sys.stderr.flush()


def _draw(curves: Sequence[Curve], headline: str, path: Path) -> None:
    try:
        import matplotlib as mpl
    except ModuleNotFoundError as missing:
        raise CompressError("--png needs matplotlib: pip install matplotlib") from missing
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, panels = plt.subplots(1, 3, figsize=(13, 4.4), layout="constrained")
    for axes, (what, title) in zip(panels, _PANELS.items(), strict=True):
        for curve in curves:
            if what == "distance" and curve.scheme == "all-reduce":
                continue  # zero but for rounding, which a logarithm would blow up
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


if __name__ == "__main__":
    raise SystemExit(main())
