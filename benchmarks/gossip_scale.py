"""Seconds of a step on up to 1,024 ranks, simulated from the measured link and codec.

    python -m benchmarks gossip_scale [--measure] [--steps N] [--json FILE] [--png FILE]

Three rows of benchmarks/results/gossip_links.json, 4 ranks and none of them slow, say how fast the
link is under an all-reduce, and how long a step of gossip takes beside computing, without a codec
and with one. The other measured rows are predicted, and the error printed. What is simulated:

all-reduce  begins behind the slowest forward pass, takes 2 (p - 1) / p models and 2 (p - 1)
            messages for each of OPERATIONS collectives, and nobody goes on before all
gossip      each rank waits for its source's last message; a message leaves when its rank has ended
            a step, the one before has left, and the target has the one before
every=10    as gossip, and every tenth step waits for the sum by which the spread is measured

`--measure` times a message between two shaped links (root and iproute2); it is kept in the JSON.
The tables are written into docs/gossip.md.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gossip_report import PAGE
from machine import origin
from pictures import pyplot
from rows_file import flags, load, save
from tables import markdown, put_into

from sn_compress.gossip import topology
from sn_compress.prediction.cost import BACKWARD, layers, wire_bytes

Row = dict[str, Any]
# Okabe and Ito's palette, as in the other pictures of gossip.
LOOKS = {
    "all-reduce": "#d55e00",
    "gossip": "#009e73",
    "gossip, top-k": "#cc79a7",
}
SHOWN = (4, 8, 128, 1024)


def circumstance(row: Row) -> str:
    """What holds ranks up."""
    if row.get("jitter"):
        return f"all vary by {row['jitter']:.0%}"
    return "no rank slow" if row["slow"] == 1 else f"one {row['slow']:g}x"


def errors(rows: list[Row], measured: list[Row]) -> str:
    """Measured rows beside the simulation's, in Markdown; what was fitted has no error."""
    keys = ("method", "ranks", "compute_s", "slow")
    predicted = {tuple(row[key] for key in keys): row for row in rows if not row["jitter"]}
    longest = max(row["compute_s"] for row in measured)
    lines = []
    for row in measured:
        predicted_s = predicted[tuple(row[key] for key in keys)]["step_s"]
        fitted = row["slow"] == 1 and row["compute_s"] == longest
        error = "fitted" if fitted else f"{100 * (predicted_s / row['step_s'] - 1):+.1f} %"
        slow = "none" if row["slow"] == 1 else f"{row['slow']:g}x"
        seconds = f"{row['step_s']:.2f}", f"{predicted_s:.2f}"
        lines.append((row["method"], f"{row['compute_s']:.2f}", slow, *seconds, error))
    head = ("method", "computing, s", "slow rank", "measured, s", "simulated, s", "error")
    return markdown(head, lines)


def table(rows: list[Row]) -> str:
    """Seconds and efficiency by the number of ranks, in Markdown."""
    lines = []
    groups: dict[tuple[Any, ...], dict[int, Row]] = {}
    for row in rows:
        key = row["compute_s"], circumstance(row), row["method"]
        if row["method"] in LOOKS:
            groups.setdefault(key, {})[row["ranks"]] = row
    for (compute_s, what, method), group in groups.items():
        cells = [f"{group[r]['step_s']:.2f} ({100 * group[r]['efficiency']:.0f} %)" for r in SHOWN]
        lines.append((f"{compute_s:.2f}", what, method, *cells))
    return markdown(("computing, s", "ranks", "method", *(f"{r:,}" for r in SHOWN)), lines)


def spread_costs(rows: list[Row]) -> float:
    """The largest share by which measuring the spread every tenth step makes steps longer."""
    keys = ("ranks", "compute_s", "slow", "jitter")
    plain = {
        tuple(row[key] for key in keys): row["step_s"] for row in rows if row["method"] == "gossip"
    }
    summed = [row for row in rows if row["method"] == "gossip, every=10"]
    return float(max(row["step_s"] / plain[tuple(row[key] for key in keys)] - 1 for row in summed))


def picture(rows: list[Row], measured: list[Row], path: Path) -> None:
    """Compute efficiency over the number of ranks; what was measured as rings."""
    plt = pyplot(10)
    computing = sorted({row["compute_s"] for row in rows}, reverse=True)
    kinds = list(dict.fromkeys(circumstance(row) for row in rows))
    figure, panels = plt.subplots(
        len(computing), len(kinds), figsize=(4 * len(kinds), 3.2 * len(computing)),
        layout="constrained", sharex=True, sharey=True, squeeze=False,
    )  # fmt: skip
    for line, compute_s in zip(panels, computing, strict=True):
        for axes, kind in zip(line, kinds, strict=True):
            for method, color in LOOKS.items():
                here = [
                    (row["ranks"], 100 * row["efficiency"])
                    for row in rows
                    if (row["compute_s"], circumstance(row), row["method"])
                    == (compute_s, kind, method)
                ]
                axes.plot(*zip(*here, strict=True), color=color, label=method)
                seen = [
                    (row["ranks"], 100 * row["efficiency"])
                    for row in measured
                    if (row["compute_s"], circumstance(row), row["method"])
                    == (compute_s, kind, method)
                ]
                if seen:
                    axes.plot(*zip(*seen, strict=True), "o", color=color, fillstyle="none")
            axes.set_xscale("log", base=2)
            axes.set(ylim=(0, 104))
            axes.set_xticks([4, 8, 32, 128, 512, 1024], ["4", "8", "32", "128", "512", "1024"])
            axes.set_title(f"{kind}, computing {compute_s:.1f} s", loc="left", fontsize=10)
    for axes in panels[-1]:
        axes.set_xlabel("ranks")
    for axes in panels[:, 0]:
        axes.set_ylabel("compute efficiency, %")
    panels[0, 0].legend(frameon=False, loc="lower left")
    figure.savefig(path, dpi=110)
    plt.close(figure)


ROOT = Path(__file__).resolve().parent.parent
MEASURED = ROOT / "benchmarks/results/gossip_links.json"
RESULTS = ROOT / "benchmarks/results/gossip_scale.json"
METHODS = ("all-reduce", "gossip", "gossip, every=10", "gossip, top-k")
RANKS = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
JITTER = 0.1  # deviation of the logarithm of a rank's computing, drawn anew each step
# While one collective fills the link, all that becomes ready waits and is fused into the next: the
# first few layers, most of the rest, the last ones.
OPERATIONS = 3


@dataclass(frozen=True)
class Setting:
    """What was measured.

    Attributes
    ----------
    model_bytes, coded_bytes : of a message without and with a codec
    bytes_per_s : of the link in an all-reduce, headers and all
    latency_s : of a message
    beside_s : seconds of a step of each gossip method beside computing
    """

    model_bytes: float
    coded_bytes: float
    bytes_per_s: float
    latency_s: float
    beside_s: dict[str, float]


def setting_of(rows: list[dict[str, Any]], latency_s: float) -> Setting:
    """From the rows at the longest computing, no rank slow."""
    compute_s = max(row["compute_s"] for row in rows)
    base = {r["method"]: r for r in rows if r["slow"] == 1 and r["compute_s"] == compute_s}
    reduced, ranks = base.pop("all-reduce"), rows[0]["ranks"]
    size = 4 * sum(layer.elements for layer in layers(reduced["model"]))
    link_s = reduced["step_s"] - (1 - BACKWARD) * compute_s
    link_s -= OPERATIONS * 2 * (ranks - 1) * latency_s
    beside_s = {name: row["step_s"] - compute_s for name, row in base.items()}
    return Setting(
        size,
        base["gossip, top-k"]["sent_bytes"],
        wire_bytes("allreduce", size, ranks) / link_s,
        latency_s,
        beside_s,
    )


def computing(ranks: int, steps: int, compute_s: float, slow: float, jitter: float) -> Any:
    """Seconds each rank computes in each step, [steps, ranks]; rank 1 is the slow one."""
    noise = np.random.default_rng(0).standard_normal((steps, ranks))
    seconds = compute_s * np.exp(jitter * noise - jitter**2 / 2)  # its mean is compute_s
    seconds[:, 1] *= slow
    return seconds


def all_reduce_s(seconds: Any, setting: Setting) -> float:
    """Mean seconds of a step; `seconds` [steps, ranks] of computing."""
    ranks = seconds.shape[1]
    link_s = wire_bytes("allreduce", setting.model_bytes, ranks) / setting.bytes_per_s
    link_s += OPERATIONS * 2 * (ranks - 1) * setting.latency_s
    slowest = seconds.max(1)
    return float(np.maximum((1 - BACKWARD) * slowest + link_s, slowest).mean())


def gossip_s(seconds: Any, setting: Setting, method: str) -> float:
    """The same for a method of gossip; the first fifth of the steps is not counted."""
    steps, ranks = seconds.shape
    coded = "top-k" in method
    link_s = (setting.coded_bytes if coded else setting.model_bytes) / setting.bytes_per_s
    beside_s = setting.beside_s["gossip, top-k" if coded else "gossip"]
    graph = topology("dissemination", ranks)
    ended, sent, received = np.zeros(ranks), np.zeros(ranks), np.zeros(ranks)
    counted = 0.0
    for step in range(steps):
        if step == steps // 5:
            counted = float(ended.mean())
        # What was sent behind the last step is mixed behind this one.
        sources = np.asarray(graph.at(step).sources)
        leaves = np.maximum(np.maximum(ended, sent)[sources], received)
        received = leaves + link_s
        sent[sources] = received
        started = ended
        ended = np.maximum(started + seconds[step], received + setting.latency_s)
        if "every" in method and step % 10 == 1:
            # Begun at the end of the step before; a tree of small messages there and back.
            ended = np.maximum(ended, started.max() + 2 * np.log2(ranks) * setting.latency_s)
        ended = ended + beside_s
    return (float(ended.mean()) - counted) / (steps - steps // 5)


def simulate(
    ranks: int, method: str, compute_s: float, slow: float, jitter: float, setting: Setting,
    steps: int,
) -> dict[str, Any]:  # fmt: skip
    """A flat row; efficiency as in benchmarks/gossip_links.py, of the slow rank if there is one."""
    seconds = computing(ranks, steps, compute_s, slow, jitter)
    if method == "all-reduce":
        step_s = all_reduce_s(seconds, setting)
    else:
        step_s = gossip_s(seconds, setting, method)
    return {
        "method": method, "ranks": ranks, "compute_s": compute_s, "slow": slow, "jitter": jitter,
        "step_s": round(step_s, 4), "efficiency": round(compute_s * slow / step_s, 4),
    }  # fmt: skip


_ANSWER = "import socket; s = socket.create_server(('0.0.0.0', 29718)); c = s.accept()[0]\n"
_ANSWER += "while (d := c.recv(4096)): c.sendall(d)"
_ASK = """import socket, sys, time
for _ in range(100):
    try:
        c = socket.create_connection((sys.argv[1], 29718)); break
    except OSError: time.sleep(0.1)
c.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
for _ in range(500):
    start = time.perf_counter(); c.sendall(bytes(1024)); left = 1024
    while left: left -= len(c.recv(left))
    print((time.perf_counter() - start) / 2)
"""


def measure(gbit: float) -> float:
    """Seconds of 1 KiB from one shaped link to another: half of the median there and back."""
    from shaped_links import ShapedLinks

    with ShapedLinks(2, gbit) as links:
        answer = subprocess.Popen(links.command(1, sys.executable, "-c", _ANSWER))
        try:
            ask = links.command(0, sys.executable, "-c", _ASK, links.address(1))
            run = subprocess.run(ask, capture_output=True, text=True, timeout=60, check=True)
        finally:
            answer.kill()
            answer.wait()
    return statistics.median(map(float, run.stdout.split()))


def main() -> None:
    """Predict what was measured, then what was not."""
    parser = flags(__doc__, RESULTS)
    parser.add_argument("--measure", action="store_true", help="measure the time of a message")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--png", type=Path)
    args = parser.parse_args()
    measured = load(MEASURED)
    if args.measure:
        latency_s = measure(measured[0]["gbit"])
    else:
        latency_s = load(RESULTS)[0]["latency_s"]
    setting = setting_of(measured, latency_s)
    about = {"latency_s": latency_s, "steps": args.steps, **origin()}
    start = time.perf_counter()
    rows = [
        simulate(ranks, method, compute_s, slow, jitter, setting, args.steps) | about
        for compute_s in sorted({row["compute_s"] for row in measured}, reverse=True)
        for slow, jitter in ((1.0, 0.0), (1.5, 0.0), (1.0, JITTER))
        for ranks in RANKS
        for method in METHODS
    ]
    save(args.json, rows)
    print(f"{setting}\n\n{errors(rows, measured)}\n\n{table(rows)}\n")
    print(f"the spread, measured every tenth step: at most {100 * spread_costs(rows):.2f} % more")
    print(f"{len(rows)} runs in {time.perf_counter() - start:.1f} s, rows: {args.json}")
    if args.json == RESULTS:
        put_into(PAGE, "gossip-predicted", errors(rows, measured))
        put_into(PAGE, "gossip-scale", table(rows))
    if args.png or args.json == RESULTS:
        picture(rows, measured, args.png or ROOT / "docs/gossip_scale.png")


if __name__ == "__main__":
    main()
