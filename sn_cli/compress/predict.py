"""The command `predict`: seconds of a step by each method, and the link below which it pays."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from sn_compress import Link, measure_rates, predict
from sn_compress.prediction.cost import MODELS, layers
from sn_compress.prediction.predict import FREE, METHODS, RECORDED, Prediction, Rates
from sn_compress.settings import Settings

from ..command import Answer, add_command, picture_file

PLOTTED_RANKS = tuple(2**power for power in range(1, 11))
# Okabe and Ito's palette; grey is plain Horovod.
_COLOURS = {
    "plain": "#5f6368",
    "fp16": "#cc79a7",
    "shared": "#0072b2",
    "gather": "#d55e00",
    "auto": "#009e73",
}


def add_predict(commands: Any) -> None:
    """Add the command to its group."""
    flags = add_command(
        commands,
        "predict",
        _predict,
        help="seconds of a step by each method, and the link below which it pays",
        epilog="example: sn compress predict --model resnet50 --ranks 8 --gbit 1 --overlap",
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
    flags.add_argument(
        "--plot", type=picture_file, metavar="FILE", help="a picture up to 1,024 ranks"
    )


def _predict(args: argparse.Namespace) -> Answer:
    settings = Settings(compression="LowRankCompression").changed(ratio=args.ratio)
    # What is wrong is said before anything is timed.
    link = Link.of_gbit(args.gbit, latency_s=args.latency_us * 1e-6)
    predict(layers(args.model), ranks=args.ranks, link=link, settings=settings)
    rates = RECORDED.get(args.codec, FREE)
    if args.codec == "measure":
        rates = measure_rates(
            settings, clock=time.process_time, say=lambda text: sys.stderr.write(f"{text}\n")
        )

    def at(ranks: int) -> Prediction:
        return predict(
            layers(args.model),
            ranks=ranks,
            link=link,
            settings=settings,
            rates=rates,
            compute_s=args.compute_ms / 1e3,
            overlap=args.overlap,
        )

    found = at(args.ranks)
    text = f"{args.model}: {found.table()}\n{_codec_line(rates)}"
    if args.plot:
        _plot(args, [at(ranks) for ranks in PLOTTED_RANKS])
        text += f"\n{args.plot}: up to {PLOTTED_RANKS[-1]:,} ranks"
    return Answer(text, _data(args.model, found, rates))


def _data(model: str, found: Prediction, rates: Rates) -> dict[str, Any]:
    rows = [
        {
            "method": row.method,
            "step_s": row.step.seconds,
            "speedup": row.speedup,
            "codec_s": row.step.codec_s,
            "exchange_s": row.step.exchange_s,
            "wire_bytes": row.step.wire_bytes,
            "ratio": row.ratio,
            "break_even_gbit": row.break_even_gbit,
            "break_even_fp16_gbit": row.break_even_fp16_gbit,
            "tensors": row.tensors,
        }
        for row in found.rows
    ]
    return {
        "model": model,
        "elements": found.elements,
        "ranks": found.ranks,
        "link": asdict(found.link),
        "rates": asdict(rates),
        "methods": rows,
    }


def _codec_line(rates: Rates) -> str:
    if rates == FREE:
        return "codec: no time is counted for it"
    encode, decode = 4e-9 / rates.encode_s, 4e-9 / (rates.decode_s + rates.add_s)
    where = "an AMD EPYC, as recorded" if rates in RECORDED.values() else "this machine"
    return f"codec: one core of {where}, FFT {encode:.2f} GB/s in, {decode:.2f} GB/s out"


def _plot(args: argparse.Namespace, found: Sequence[Prediction]) -> None:
    import matplotlib as mpl

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
