"""Steps of every method on published GPUs and links: computed, not run.

    python -m benchmarks links --json FILE          records exchanges and codecs, and computes
    python -m benchmarks links --recorded FOLDER    with the recordings of benchmarks/training.py
    python -m benchmarks links --report FILE        prints the tables of a file, computes nothing
    python -m benchmarks links --page FILE          the same for docs/network.md, in short

For each GPU, model, link and method the recorded exchange goes through the model of costs
(`sn_compress.prediction.cost.step`): once with a codec that takes no time, once with the seconds
of one core of this machine, each behind the backward pass and beside it. benchmarks/training.py
replays some of these steps on real ranks; a test holds the two together. docs/network.md.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before NumPy: a rank has one core

from machine import commit, machine
from published import GPUS, WIRES, Gpu
from rows_file import flags, load, save
from tables import markdown
from training_runs import REPLAYED, recorded, routes_of
from travel import Script
from wire_methods import METHODS

from sn_compress.prediction.cost import Link, layers, step
from sn_compress.text_table import text_table

RANKS, RATIO = 8, 100.0
WAYS = ("free_s", "free_beside_s", "core_s", "core_beside_s")
NAMES = {
    "plain": "plain",
    "fp16": "fp16",
    "qsgd": "QSGD 4 bit",
    "terngrad": "TernGrad",
    "topk": "Top-k 1 %",
    "topk10": "Top-k 10 %",
    "powersgd": "PowerSGD 4",
    "demo": "DeMo-like",
    "paper": "FFTCompression, mode paper",
    "gather": "FFTCompression",
    "shared": "LowRankCompression",
}
OURS = ("paper", "gather", "shared")
_TITLES = {"alexnet": "AlexNet", "resnet50": "ResNet-50"}
_COMMIT, _MACHINE = commit(), machine()
_LEVEL = 1.02  # times the fastest: what is as fast


def row(of: Gpu, gpu: str, wire: str, way: str, scripts: dict[str, list[Script]]) -> dict[str, Any]:
    """One method on one link: seconds of a step in each of WAYS."""
    link = WIRES[wire].link()
    columns: dict[str, Any] = {}
    sent = {}
    for name in WAYS:
        free, overlap = name.startswith("free"), "beside" in name
        predicted = seconds(scripts[way], of.seconds, link, free=free, overlap=overlap)
        columns[name] = round(predicted.seconds, 5)
        sent[name] = predicted.sent_bytes
    elements = sum(layer.elements for layer in layers(of.model))
    return {
        "model": of.model, "gpu": gpu, "images": of.images, "precision": of.precision,
        "link": wire, "ranks": RANKS, "method": way, "compute_s": round(of.seconds, 5), **columns,
        "ratio": round(4 * elements / sent["free_s"], 1),
        "codec_s": round(sum(sum(s.codec_s) for s in scripts[way]), 3),
        "commit": _COMMIT, "machine": _MACHINE,
    }  # fmt: skip


def seconds(
    scripts: list[Script], compute_s: float, link: Link, *, free: bool, overlap: bool
) -> Any:
    """The step of recorded exchanges, as the model of costs has it."""
    routes = routes_of(scripts, free=free)
    return step(routes, ranks=RANKS, link=link, compute_s=compute_s, overlap=overlap)


def tables(rows: list[dict[str, Any]]) -> str:
    """For each model, GPU and way: methods down, links across; then who is fastest."""
    lines = []
    for model, gpu in dict.fromkeys((row["model"], row["gpu"]) for row in rows):
        of = [row for row in rows if (row["model"], row["gpu"]) == (model, gpu)]
        wires = list(dict.fromkeys(row["link"] for row in of))
        cell = {(row["method"], row["link"]): row for row in of}
        head = f"{model}, {of[0]['images']} images on a {gpu}, {of[0]['precision']}"
        for way in WAYS:
            name, _, suffix = way.removesuffix("_s").partition("_")
            codec = {"free": "codec free", "core": "codec on one core"}[name]
            where = "beside" if suffix else "behind"
            lines += [f"\n{head}; {codec}, exchange {where} the backward pass: ms (times plain)"]
            lines += [
                text_table(
                    ["method", *(WIRES[wire].name for wire in wires)],
                    [
                        [NAMES[method], *(_text(cell, method, wire, way) for wire in wires)]
                        for method in dict.fromkeys(row["method"] for row in of)
                    ],
                )
            ]
            lines += [f"{WIRES[wire].name}: {', '.join(best(of, wire, way))}" for wire in wires]
    return "\n".join(lines)


def best(rows: list[dict[str, Any]], wire: str, way: str) -> list[str]:
    """The methods within 2 % of the fastest on a link; plain alone where it is among them."""
    here = {row["method"]: row[way] for row in rows if row["link"] == wire}
    least = min(here.values())
    if here["plain"] <= _LEVEL * least:
        return [NAMES["plain"]]
    return [NAMES[name] for name, value in here.items() if value <= _LEVEL * least]


def page(rows: list[dict[str, Any]]) -> str:
    """What docs/network.md shows of them: times plain on the P100, and who is fastest where.

    In a cell of the first tables the codec takes no time, and that of one core, behind computing.
    """
    parts = []
    for model in REPLAYED:
        of = {
            (r["method"], r["link"]): r for r in rows if (r["model"], r["gpu"]) == (model, "p100")
        }
        first = of["plain", "1gbe"]
        parts.append(
            f"{_TITLES[model]}, {first['images']} images on a P100 ({first['compute_s']:.3f} s):"
        )
        lines = [["*rho*", "", *(f"{_rho(of['plain', wire]):.2f}" for wire in WIRES)]]
        for way in dict.fromkeys(method for method, _ in of):
            cells = [
                " / ".join(
                    f"{of['plain', wire][name] / of[way, wire][name]:.2f}"
                    for name in ("free_s", "core_s")
                )
                for wire in WIRES
            ]
            lines.append([_code(way), f"{of[way, '1gbe']['ratio']:.1f}", *cells])
        head = ["method", "ratio", *(wire.name for wire in WIRES.values())]
        parts.append(markdown(head, lines))
    lines = []
    for model, gpu in dict.fromkeys((row["model"], row["gpu"]) for row in rows):
        for wire in WIRES:
            of = {
                r["method"]: r
                for r in rows
                if (r["model"], r["gpu"], r["link"]) == (model, gpu, wire)
            }
            name = f"{_TITLES[model]}, {of['plain']['images']} on {gpu}"
            cells = [_winner({m: r[way] for m, r in of.items()}) for way in WAYS]
            lines.append([name, WIRES[wire].name, *cells])
    head = ["step", "link", "behind, free", "beside, free", "behind, one core", "beside, one core"]
    return "\n\n".join([*parts, markdown(head, lines)])


def _winner(seconds: dict[str, float]) -> str:
    """The fastest and its times plain, and the best of the others: ours, or rivals."""
    fastest = min(seconds, key=seconds.__getitem__)
    plain = seconds["plain"]
    if plain <= _LEVEL * seconds[fastest]:
        return "plain"
    whose = "rivals" if fastest in OURS else "ours"
    other = min(value for name, value in seconds.items() if (name in OURS) != (fastest in OURS))
    return f"{_code(fastest)} {plain / seconds[fastest]:.2f}, {whose} {plain / other:.2f}"


def _rho(row: dict[str, Any]) -> float:
    return float((row["free_s"] - row["compute_s"]) / row["compute_s"])


def _code(way: str) -> str:
    name, _, mode = NAMES[way].partition(", mode ")
    shown = f"`{name}`" if name.endswith("Compression") else name
    return f'`{name}`, `mode="{mode}"`' if mode else shown


def _text(cell: dict[tuple[str, str], dict[str, Any]], method: str, wire: str, way: str) -> str:
    value, plain = cell[method, wire][way], cell["plain", wire][way]
    return f"{1e3 * value:.1f} ({plain / value:.2f})"


def main() -> None:
    """Compute and print; or print."""
    parser = flags(__doc__)
    parser.add_argument("--recorded", type=Path, help="folder to keep recordings in")
    parser.add_argument("--report", type=Path, help="print the tables of this file")
    parser.add_argument("--page", type=Path, help="print docs/network.md's tables of this file")
    args = parser.parse_args()
    if args.report:
        print(tables(load(args.report)))
        return
    if args.page:
        print(page(load(args.page)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as own:
        folder = args.recorded or Path(own)
        for model in REPLAYED:
            scripts = {way: recorded(folder, model, way, RANKS, RATIO) for way in METHODS}
            for gpu, steps in GPUS.items():
                rows += [
                    row(of, gpu, wire, way, scripts)
                    for of in steps if of.model == model
                    for wire in WIRES
                    for way in METHODS
                ]  # fmt: skip
    print(tables(rows))
    save(args.json, rows)


if __name__ == "__main__":
    main()
