"""What the rows of benchmarks/gossip_scale.py say: errors, a table and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tables import markdown

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
    found = {tuple(row[key] for key in keys): row for row in rows if not row["jitter"]}
    longest = max(row["compute_s"] for row in measured)
    lines = []
    for row in measured:
        told = found[tuple(row[key] for key in keys)]["step_s"]
        fitted = row["slow"] == 1 and row["compute_s"] == longest
        error = "fitted" if fitted else f"{100 * (told / row['step_s'] - 1):+.1f} %"
        slow = "none" if row["slow"] == 1 else f"{row['slow']:g}x"
        seconds = f"{row['step_s']:.2f}", f"{told:.2f}"
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
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
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
