"""The command line: `python -m sn_compress predict --model resnet50 --ranks 64 --gbit 10`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from .base.errors import CompressError
from .prediction.cost import Link
from .prediction.layers import MODELS, layers
from .prediction.predict import METHODS, Prediction, predict
from .prediction.rates import FREE, RECORDED, Rates, measure_rates
from .settings import Settings

PLOTTED_RANKS = tuple(2**power for power in range(1, 11))
# Okabe and Ito's palette; grey is plain Horovod.
_COLOURS = {
    "plain": "#5f6368",
    "fp16": "#cc79a7",
    "shared": "#0072b2",
    "gather": "#d55e00",
    "auto": "#009e73",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the status to exit with."""
    args = _parser().parse_args(argv)
    try:
        return _predict(args)
    except CompressError as error:
        sys.stderr.write(f"{error}\n")
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sn_compress", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    flags = commands.add_parser(
        "predict", help="seconds of a step by each method, and the link below which it pays"
    )
    flags.add_argument("--model", required=True, choices=sorted(MODELS))
    flags.add_argument("--ranks", type=int, required=True)
    flags.add_argument("--gbit", type=float, required=True, help="of each rank's link, 1e9 bits/s")
    flags.add_argument("--latency-us", type=float, default=50, help="of one message (default 50)")
    flags.add_argument(
        "--ratio", type=float, default=Settings().ratio, help="of LowRankCompression"
    )
    flags.add_argument(
        "--compute-ms", type=float, default=0, help="forward and backward pass; 0: exchange alone"
    )
    flags.add_argument("--overlap", action="store_true", help="exchange beside the backward pass")
    flags.add_argument(
        "--codec",
        choices=["measure", "free", *RECORDED],
        default="measure",
        help="time the codec on one core here, or take no time for it, as bytes alone would give; "
        "core takes the rates of an AMD EPYC's, the same everywhere",
    )
    flags.add_argument("--plot", type=Path, metavar="FILE", help="a picture up to 1,024 ranks")
    return parser


def _predict(args: argparse.Namespace) -> int:
    settings = Settings(compression="LowRankCompression").changed(ratio=args.ratio)
    rates = RECORDED.get(args.codec, FREE)
    if args.codec == "measure":
        rates = measure_rates(
            settings, clock=time.process_time, say=lambda text: sys.stderr.write(f"{text}\n")
        )

    def at(ranks: int) -> Prediction:
        link = Link.of_gbit(args.gbit, latency_s=args.latency_us * 1e-6)
        return predict(
            layers(args.model),
            ranks=ranks,
            link=link,
            settings=settings,
            rates=rates,
            compute_s=args.compute_ms / 1e3,
            overlap=args.overlap,
        )

    sys.stdout.write(f"{args.model}: {at(args.ranks).table()}\n")
    sys.stdout.write(_codec_line(rates))
    if args.plot:
        _plot(args, [at(ranks) for ranks in PLOTTED_RANKS])
        sys.stdout.write(f"{args.plot}: up to {PLOTTED_RANKS[-1]:,} ranks\n")
    return 0


def _codec_line(rates: Rates) -> str:
    if rates == FREE:
        return "codec: no time is counted for it\n"
    encode, decode = 4e-9 / rates.encode_s, 4e-9 / (rates.decode_s + rates.add_s)
    where = "an AMD EPYC, as recorded" if rates in RECORDED.values() else "this machine"
    return f"codec: one core of {where}, FFT {encode:.2f} GB/s in, {decode:.2f} GB/s out\n"


def _plot(args: argparse.Namespace, found: Sequence[Prediction]) -> None:
    try:
        import matplotlib as mpl
    except ModuleNotFoundError as missing:
        raise CompressError("--plot needs matplotlib: pip install matplotlib") from missing
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    for method in (*METHODS, "auto"):
        seconds = [1e3 * result.row(method).step.seconds for result in found]
        axes.plot(
            PLOTTED_RANKS,
            seconds,
            color=_COLOURS[method],
            linewidth=2,
            linestyle="--" if method == "auto" else "-",
            label=method,
        )
    axes.set(xscale="log", yscale="log", xlabel="ranks", xlim=(2, PLOTTED_RANKS[-1]))
    axes.set_xscale("log", base=2)
    axes.set_xticks(PLOTTED_RANKS, [f"{ranks:,}" for ranks in PLOTTED_RANKS])
    # Where no tick label would show, the axis could not be read.
    axes.yaxis.set_major_formatter("{x:,.5g}")
    axes.yaxis.set_minor_formatter(lambda x, _: f"{x:,.5g}" if f"{x:.0e}"[0] in "25" else "")
    axes.set_title(f"{args.model}, {args.gbit:g} Gbit/s: predicted ms of a step", loc="left")
    axes.legend(frameon=False)
    figure.savefig(args.plot, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    raise SystemExit(main())
