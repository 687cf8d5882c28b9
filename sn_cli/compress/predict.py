"""The command `predict`: seconds of a step with each method, and its break-even link.

With --ranks each rank has a link of its own. With --nodes the --gpus of a node share one, and ways
that sum inside a node first are told too, for 8 to 16,384 GPUs, with all-reduces by rings and by
trees; the picture is then a map of which way is fastest where.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from sn_compress import CompressError, Link, measure_rates, predict
from sn_compress.prediction.cost import ALONE, INSIDE, MODELS, Host, Layer, Route, layers, step
from sn_compress.prediction.predict import Prediction, routes_by_method
from sn_compress.prediction.rates import FREE, GLOO, RECORDED, Rates
from sn_compress.settings import Settings
from sn_compress.text_table import text_table

from ..command import Answer, add_command, count, not_negative, picture_file, positive, pyplot

PLOTTED_RANKS = tuple(2**power for power in range(1, 11))
MOST_GPUS = 16_384
MAPPED_GBIT = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 200, 400)
LEAST_GAIN = 1.05  # speedup over plain; below it plain counts as fastest
# Okabe and Ito's palette; grey is plain Horovod.
_COLOURS = {
    "plain": "#5f6368",
    "fp16": "#cc79a7",
    "CastCompression": "#009e73",
    "LowRankCompression": "#0072b2",
    "FFTCompression": "#d55e00",
    "plain by nodes": "#b0b4b8",
    "CastCompression by nodes": "#66c2a5",
    "LowRankCompression by nodes": "#56b4e9",
    "FFTCompression by nodes": "#e69f00",
}


def add_predict(commands: Any) -> None:
    """Add the command to its group."""
    flags = add_command(
        commands,
        "predict",
        _predict,
        help="seconds of a step with each method, and the link rate below which it pays",
        epilog="examples: sn compress predict --model resnet50 --ranks 8 --gbit 1 --overlap; "
        "sn compress predict --nodes 16 --gpus 8 --gbit 25 --inside nvlink",
    )
    flags.add_argument(
        "--model", default="gpt2-small", choices=sorted(MODELS), help="(default gpt2-small)"
    )
    how_many = flags.add_mutually_exclusive_group(required=True)
    how_many.add_argument("--ranks", type=count, help="number of ranks, each with its own link")
    how_many.add_argument(
        "--nodes", type=count, help="number of nodes, of --gpus ranks each, which share a link"
    )
    flags.add_argument("--gpus", type=count, help="GPUs per node (default 8)")
    flags.add_argument(
        "--inside",
        metavar="LINK",
        help=f"link of each GPU to the others of its node: {', '.join(INSIDE)}, or Gbit/s "
        "(default nvlink)",
    )
    flags.add_argument(
        "--cores",
        type=count,
        help="cores of a node that trains on its CPU; its ranks share them, for computing, "
        "encoding, and Gloo's transfers (default: enough for each rank)",
    )
    flags.add_argument(
        "--gbit",
        type=positive,
        required=True,
        help="rate of each rank's or node's link, in 1e9 bits/s",
    )
    flags.add_argument(
        "--latency-us", type=not_negative, default=50, help="latency of one message (default 50)"
    )
    flags.add_argument(
        "--ratio",
        type=float,
        default=Settings().ratio,
        help="ratio of LowRankCompression (default %(default)g)",
    )
    flags.add_argument(
        "--compute-ms",
        type=not_negative,
        default=0,
        help="time of the forward and backward pass (default 0: only the exchange)",
    )
    flags.add_argument(
        "--overlap", action="store_true", help="overlap the exchange with the backward pass"
    )
    flags.add_argument(
        "--codec",
        choices=["measure", "free", *RECORDED],
        default="measure",
        help="time the codec on one core of this machine (default); free: the codec takes no time; "
        "core, h200: recorded rates of a core of an AMD EPYC and of an H200",
    )
    flags.add_argument(
        "--plot",
        type=picture_file,
        metavar="FILE",
        help="write a plot up to 1,024 ranks; with --nodes a map of the fastest method, up to "
        "16,384 GPUs",
    )


def _predict(args: argparse.Namespace) -> Answer:
    settings = Settings(compression="LowRankCompression").changed(ratio=args.ratio)
    # Report wrong flags before timing anything.
    link = _link(args)
    host = ALONE if args.cores is None else Host(args.cores, link.gpus, **GLOO)
    ranks = args.ranks if args.nodes is None else args.nodes * link.gpus
    model = layers(args.model)
    compute_s = args.compute_ms / 1e3
    predict(model[:1], ranks=ranks, link=link, settings=settings, compute_s=compute_s)
    rates = RECORDED.get(args.codec, FREE)
    if args.codec == "measure":
        rates = measure_rates(
            settings, clock=time.process_time, say=lambda text: sys.stderr.write(f"{text}\n")
        )

    def at(ranks: int) -> Prediction:
        return predict(
            model,
            ranks=ranks,
            link=link,
            settings=settings,
            rates=rates,
            compute_s=compute_s,
            overlap=args.overlap,
            host=host,
        )

    prediction = at(ranks)
    text, data = f"{args.model}: {prediction.table()}\n{_codec_line(rates)}", {}
    if args.nodes is not None:
        grown = []
        for many in _sizes(link.gpus):
            routes = routes_by_method(
                model, ranks=many, gpus=link.gpus, settings=settings, rates=rates, host=host
            )  # fmt: skip
            by = {name: replace(link, tree=name == "tree") for name in ("ring", "tree")}
            row = {
                name: _fastest(args, routes, many, through, host) for name, through in by.items()
            }
            grown.append({"gpus": many, **row})
        text += f"\n\n{_grown_table(grown)}"
        data = {"gpus": grown}
    if args.plot and args.nodes is None:
        _plot(args, [at(ranks) for ranks in PLOTTED_RANKS])
        text += f"\n{args.plot}: up to {PLOTTED_RANKS[-1]:,} ranks"
    elif args.plot:
        _map(args, model, link, settings, rates, host)
        text += f"\n{args.plot}: up to {MOST_GPUS:,} GPUs"
    return Answer(text, _data(args.model, prediction, rates) | data)


def _link(args: argparse.Namespace) -> Link:
    latency_s = args.latency_us * 1e-6
    if args.nodes is None:
        if args.gpus is not None or args.inside is not None:
            raise CompressError("--gpus and --inside are of nodes; say --nodes, not --ranks")
        return Link.of_gbit(args.gbit, latency_s=latency_s)
    gpus, name = 8 if args.gpus is None else args.gpus, args.inside or "nvlink"
    if (inside := INSIDE.get(name)) is None:
        try:
            gbit = positive(name)
        except argparse.ArgumentTypeError:
            raise CompressError(
                f"--inside {name}; expected {', '.join(INSIDE)} or Gbit/s above 0"
            ) from None
        inside = Link.of_gbit(gbit, latency_s=INSIDE["pcie"].latency_s)
    # A single GPU has no others in its node.
    several = {"gpus": gpus, "inside": inside} if gpus > 1 else {}
    return Link.of_gbit(args.gbit, latency_s=latency_s, tree=True, **several)


def _sizes(gpus: int) -> list[int]:
    """Return numbers of GPUs: those of one node, doubled each time."""
    return [gpus * 2**power for power in range(1 + int(math.log2(max(1, MOST_GPUS // gpus))))]


def _fastest(
    args: argparse.Namespace,
    routes: Mapping[str, Sequence[Route]],
    ranks: int,
    link: Link,
    host: Host,
) -> dict[str, Any]:
    """Return the seconds of a plain and of the fastest step; plain's where little is gained."""
    seconds = {
        way: step(
            of,
            ranks=ranks,
            link=link,
            compute_s=args.compute_ms / 1e3,
            overlap=args.overlap,
            host=host,
        ).seconds
        for way, of in routes.items()
    }
    best = min(seconds, key=lambda way: seconds[way])
    if seconds["plain"] < LEAST_GAIN * seconds[best]:
        best = "plain"
    return {"plain_s": seconds["plain"], "fastest": best, "step_s": seconds[best]}


def _grown_table(grown: Sequence[dict[str, Any]]) -> str:
    head = ["GPUs"]
    for name in ("rings", "trees"):
        head += [f"{name}: plain ms", "fastest ms", "times plain", "by"]
    cells = []
    for row in grown:
        cells.append([f"{row['gpus']:,}"])
        for of in (row["ring"], row["tree"]):
            times = of["plain_s"] / of["step_s"]
            cells[-1] += [f"{1e3 * of['plain_s']:.1f}", f"{1e3 * of['step_s']:.1f}"]
            cells[-1] += [f"{times:.2f}", of["fastest"]]
    return text_table(head, cells)


def _data(model: str, prediction: Prediction, rates: Rates) -> dict[str, Any]:
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
        for row in prediction.rows
    ]
    return {
        "model": model,
        "elements": prediction.elements,
        "ranks": prediction.ranks,
        "link": asdict(prediction.link),
        "rates": asdict(rates),
        "methods": rows,
        "auto": prediction.auto,
    }


def _codec_line(rates: Rates) -> str:
    if rates == FREE:
        return "codec: no time is counted for it"
    encode, decode = 4e-9 / rates.encode_s, 4e-9 / (rates.decode_s + rates.add_s)
    where = {RECORDED["core"]: "one core of an AMD EPYC", RECORDED["h200"]: "an H200"}.get(rates)
    where = f"{where}, as recorded" if where else "one core of this machine"
    return f"codec: {where}, FFT {encode:.2f} GB/s in, {decode:.2f} GB/s out"


def _map(
    args: argparse.Namespace,
    model: Sequence[Layer],
    link: Link,
    settings: Settings,
    rates: Rates,
    host: Host,
) -> None:
    """Draw the fastest method with trees, by GPUs and link; and the same for a free codec."""
    plt = pyplot(font_size=11)
    from matplotlib.patches import Patch

    sizes = _sizes(link.gpus)[1:]
    codecs = {"measure": "on a core here", "core": "on a core", "h200": "on an H200"}
    panels = {"free": FREE} if rates == FREE else {codecs[args.codec]: rates, "free": FREE}
    figure, axes = plt.subplots(
        len(panels), figsize=(9, 1 + 4.2 * len(panels)), layout="constrained", squeeze=False
    )
    seen: set[str] = set()
    for (name, of_panel), panel in zip(panels.items(), axes[:, 0], strict=True):
        for x, ranks in enumerate(sizes):
            routes = routes_by_method(
                model, ranks=ranks, gpus=link.gpus, settings=settings, rates=of_panel, host=host
            )  # fmt: skip
            for y, gbit in enumerate(MAPPED_GBIT):
                through = replace(link, bytes_per_s=gbit * 1e9 / 8)
                fastest = _fastest(args, routes, ranks, through, host)
                best = fastest["fastest"]
                seen.add(best)
                box = plt.Rectangle((x - 0.5, y - 0.5), 1, 1, color=_COLOURS[best], linewidth=0)
                panel.add_patch(box)
                times = fastest["plain_s"] / fastest["step_s"]
                panel.text(x, y, f"{times:.3g}", ha="center", va="center", size=9, color="white")
        panel.set(xlim=(-0.5, len(sizes) - 0.5), ylim=(-0.5, len(MAPPED_GBIT) - 0.5))
        panel.set_xticks(range(len(sizes)), [f"{ranks:,}" for ranks in sizes])
        panel.set_yticks(range(len(MAPPED_GBIT)), [f"{gbit:g}" for gbit in MAPPED_GBIT])
        panel.set(ylabel="Gbit/s between nodes")
        panel.set_title(f"{args.model}, codec {name}: the fastest, and times plain", loc="left")
    axes[-1, 0].set(xlabel=f"GPUs, {link.gpus} a node")
    figure.legend(
        handles=[Patch(color=_COLOURS[way], label=way) for way in _COLOURS if way in seen],
        loc="outside lower center", ncols=3, frameon=False,
    )  # fmt: skip
    figure.savefig(args.plot, dpi=110)
    plt.close(figure)


def _plot(args: argparse.Namespace, predictions: Sequence[Prediction]) -> None:
    plt = pyplot(font_size=11)
    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    for method in (row.method for row in predictions[0].rows):
        seconds = [1e3 * result.row(method).step.seconds for result in predictions]
        axes.plot(PLOTTED_RANKS, seconds, color=_COLOURS[method], linewidth=2, label=method)
    axes.set(xscale="log", yscale="log", xlabel="ranks", xlim=(2, PLOTTED_RANKS[-1]))
    axes.set_xscale("log", base=2)
    axes.set_xticks(PLOTTED_RANKS, [f"{ranks:,}" for ranks in PLOTTED_RANKS])
    # Without any tick label the axis would be unreadable.
    axes.yaxis.set_major_formatter("{x:,.5g}")
    axes.yaxis.set_minor_formatter(lambda x, _: f"{x:,.5g}" if f"{x:.0e}"[0] in "25" else "")
    axes.set_title(f"{args.model}, {args.gbit:g} Gbit/s: predicted ms of a step", loc="left")
    axes.legend(frameon=False)
    figure.savefig(args.plot, dpi=110)
    plt.close(figure)
