"""Report of benchmarks/study.py's rows: tables and pictures, written into the docs."""

from __future__ import annotations

import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from pictures import pyplot
from tables import markdown

Row = dict[str, Any]
Panel = tuple[str, str, int]

COLUMNS = (
    "method",
    "exchange",
    "ratio received",
    "with small tensors",
    "test accuracy, %",
    "against plain, points",
    "loss, last tenth",
    "seconds of a core",
    "seeds",
)
TITLES = {
    ("cnn", "sgd"): "Convolutional net, SGD with momentum",
    ("cnn", "adam"): "Convolutional net, Adam",
    ("transformer", "adam"): "Transformer, Adam",
    ("residual", "sgd"): "Residual net with batch norm, SGD with momentum",
    ("wide", "sgd"): "Net of a million parameters, SGD with momentum",
}
RANKS = 8  # of rows that do not say
LOWEST = -3.5  # points; what lost more is drawn at the edge, with its number
AIMS = {50: -0.3, 150: -0.7}
TICKS = (2, 5, 10, 20, 50, 100, 200)
# Okabe and Ito's palette; ours is vermilion and drawn last.
LOOKS = {
    "auto": ("#d55e00", "o"),
    "fft": ("#8e3b8e", "p"),
    "fft gathered": ("#a865a8", "p"),
    "fft of blocks": ("#c9a3c9", "p"),
    "fft by shape": ("#b580b5", "H"),
    "dct of spans": ("#d9b8d9", "8"),
    "auto frequencies": ("#a03000", "d"),
    "auto gather": ("#e69f00", "s"),
    "powersgd": ("#0072b2", "D"),
    "top-k": ("#009e73", "^"),
    "sparseloco": ("#56b4e9", "v"),
    "demo": ("#cc79a7", "P"),
    "dgc": ("#7f6000", "X"),
    "qsgd": ("#5f6368", "<"),
    "terngrad": ("#5f6368", ">"),
    "paper": ("#000000", "*"),
    "fp16": ("#5f6368", "h"),
}


def label(method: str) -> str:
    """How a row's method is called; the oldest rows say "auto" of what has another name now."""
    if method == "auto gather":
        return "codec auto, gathered"
    if method == "auto frequencies":
        return "AutoCompression"  # where every tensor is found worth it
    for name, called in (("auto", "LowRankCompression"), ("fft", "FFTCompression")):
        if method.startswith(name):
            return called + method[len(name) :]
    return method


def panels(rows: list[Row]) -> dict[Panel, list[Row]]:
    """Rows by net, optimizer and ranks, in that order, where there is more than plain."""
    numbers = sorted({row.get("ranks", RANKS) for row in rows})
    by_panel = {
        (*title, ranks): [
            row
            for row in rows
            if (row["net"], row["optimizer"], row.get("ranks", RANKS)) == (*title, ranks)
        ]
        for title in TITLES
        for ranks in numbers
    }
    return {p: group for p, group in by_panel.items() if {r["method"] for r in group} - {"plain"}}


def groups(rows: list[Row]) -> list[list[Row]]:
    """Rows of one panel by method and ratio, least compressed first."""
    by_setting = defaultdict(list)
    for row in sorted(rows, key=lambda r: r["seed"]):
        by_setting[row["method"], row["ratio_asked"]].append(row)
    return sorted(by_setting.values(), key=lambda group: (_ratio(group), group[0]["method"]))


def _ratio(group: list[Row]) -> float:
    """Of the ratio received, the mean; seeds differ a little where ranks are chosen by gradient."""
    return statistics.fmean(row["ratio_received"] for row in group)


def gaps(rows: list[Row], all_rows: list[Row]) -> list[float]:
    """Accuracy minus that of plain with the same seed: weights and order of images are the same."""
    plain = {r["seed"]: r["accuracy"] for r in all_rows if r["method"] == "plain"}
    return [r["accuracy"] - plain[r["seed"]] for r in rows if r["seed"] in plain]


def _mean(values: list[float], form: str = ".2f") -> str:
    """The mean, with the standard deviation of several."""
    if not values:
        return ""
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{form}}{spread}"


def _loss(rows: list[Row]) -> str:
    losses = [row["train_loss"] for row in rows]
    return "diverged" if None in losses else f"{statistics.fmean(losses):.3f}"


def table(rows: list[Row]) -> str:
    """One panel's rows as a Markdown table; ours at their defaults are bold."""
    lines = []
    for group in groups(rows):
        method = group[0]["method"]
        lines.append((
            f"**{label(method)}**" if method in ("auto", "fft") else label(method),
            group[0]["exchange"],
            f"{_ratio(group):.1f}",
            f"{statistics.fmean(r['ratio_with_small'] for r in group):.1f}",
            _mean([r["accuracy"] for r in group]),
            "" if method == "plain" else _mean(gaps(group, rows), "+.2f"),
            _loss(group),
            f"{statistics.fmean(r['seconds'] for r in group):.0f}",
            str(len(group)),
        ))  # fmt: skip
    return markdown(COLUMNS, lines)


def compared(rows: list[Row], earlier: list[Row]) -> str:
    """Accuracies of rows less those of earlier ones of the same net, method, ratio and seed.

    "no worse" where the mean of the differences is above minus the deviation between the earlier
    runs' seeds.
    """
    cell = ("net", "optimizer", "method", "ratio_asked", "steps", "ranks")
    old: dict[tuple[Any, ...], dict[int, float]] = defaultdict(dict)
    new: dict[tuple[Any, ...], dict[int, float]] = defaultdict(dict)
    for accuracies, some in ((old, earlier), (new, rows)):
        for row in some:
            values = {"ranks": RANKS} | row
            accuracies[tuple(values[name] for name in cell)][row["seed"]] = row["accuracy"]
    lines = ["net optimizer method ratio steps ranks: earlier, now, difference by seed"]
    for key, by_seed in new.items():
        seeds = sorted(set(by_seed) & set(old[key]))
        label = " ".join(str(part) for part in key if part is not None)
        if not seeds:
            lines.append(f"{label}: no earlier run of these seeds")
            continue
        before, now = ([some[seed] for seed in seeds] for some in (old[key], by_seed))
        differences = [b - a for a, b in zip(before, now, strict=True)]
        spread = statistics.stdev(old[key].values()) if len(old[key]) > 1 else 0.0
        verdict = "no worse" if statistics.fmean(differences) >= -spread else "WORSE"
        lines.append(
            f"{label}: {_mean(before)}, {_mean(now)}, "
            f"{' '.join(f'{value:+.2f}' for value in differences)}: {verdict}"
        )
    return "\n".join(lines)


def source(rows: list[Row], flags: str) -> str:
    """Where the numbers come from, in one paragraph."""
    commits, machines = (", ".join(sorted({r[f] for r in rows})) for f in ("commit", "machine"))
    rows_in = f"benchmarks/results/study{flags.replace(' --', '_')}.json"
    return (
        f"From `python -m benchmarks study{flags}`, rows in `{rows_in}`: mean ± standard "
        f"deviation over seeds, differences taken seed by seed. Commit {commits}; {machines}."
    )


def text(rows: list[Row], flags: str = "") -> str:
    """All tables, and where they come from; `flags` of the command, behind a blank."""
    parts = []
    for panel, group in panels(rows).items():
        steps = ", ".join(str(s) for s in sorted({r["steps"] for r in group}))
        rate = ", ".join(str(s) for s in sorted({r["rate"] for r in group}))
        ranks = "" if panel[2] == RANKS else f", {panel[2]} ranks"
        parts += [f"### {TITLES[panel[:2]]}{ranks}", f"{steps} steps, learning rate {rate}."]
        parts.append(table(group))
    return "\n\n".join([*parts, source(rows, flags)])


def _draw(ax: Any, rows: list[Row]) -> dict[str, Any]:
    """One panel; returns what the legend shows, by method."""
    points = defaultdict(list)
    for group in groups(rows):
        method = group[0]["method"]
        shown = method != "plain" and "," not in method  # of variants tells the table
        if shown and (accuracy_gaps := gaps(group, rows)):
            points[method.split()[0] if "powersgd" in method else method].append(
                (
                    _ratio(group),
                    statistics.fmean(accuracy_gaps),
                    min(accuracy_gaps),
                    max(accuracy_gaps),
                )
            )
    handles = {}
    for method in sorted(points, key=list(LOOKS).index, reverse=True):
        colour, mark = LOOKS[method]
        inside = [point for point in points[method] if point[1] >= LOWEST]
        ours = method in ("auto", "fft")
        ratio, mean, low, high = zip(*inside, strict=True) if inside else ((), (), (), ())
        bars = [[m - v for m, v in zip(mean, low, strict=True)],
                [v - m for m, v in zip(mean, high, strict=True)]]  # fmt: skip
        handles[method] = ax.errorbar(
            ratio, mean, yerr=bars if inside else None, color=colour, marker=mark,
            ms=9 if ours else 7, capsize=3, lw=2.5 if ours else 1.3, elinewidth=1, mec="white",
            zorder=3 if ours else 2,
        )  # fmt: skip
        for ratio, mean, *_ in points[method]:
            if mean < LOWEST:
                ax.annotate(
                    f"{mean:.0f}", (ratio, LOWEST), xytext=(0, 9), textcoords="offset points",
                    ha="center", color=colour, fontsize=9,
                )  # fmt: skip
                ax.plot(ratio, LOWEST, marker="v", color=colour, clip_on=False)
    return handles


def picture(rows: list[Row], path: Path) -> None:
    """Difference to plain against the ratio, a line per method with the range over seeds."""
    plt = pyplot(11)
    by_panel = panels(rows)
    figure, axes = plt.subplots(
        1, len(by_panel), figsize=(5 * len(by_panel) + 2, 5), squeeze=False, sharey=True,
        layout="constrained",
    )  # fmt: skip
    handles: dict[str, Any] = {}
    for ax, (panel, group) in zip(axes[0], by_panel.items(), strict=True):
        handles |= _draw(ax, group)
        ax.axhline(0, color="#5f6368", lw=1)
        for ratio, aim in AIMS.items():
            ax.plot([ratio / 1.3, ratio * 1.3], [aim] * 2, color="black", lw=1.2, ls=":")
            ax.annotate(
                f"aim {aim}", (ratio, aim), xytext=(0, -3), textcoords="offset points",
                ha="center", va="top", fontsize=8,
            )  # fmt: skip
        ax.set(xscale="log", title=TITLES[panel[:2]], xlabel="received bytes: plain / method")
        ax.set(xlim=(1.6, 260), ylim=(LOWEST, 0.7))
        ax.set_xticks(TICKS, [str(tick) for tick in TICKS])
        ax.minorticks_off()
        ax.grid(alpha=0.25)
    axes[0, 0].set_ylabel("test accuracy against plain, points")
    names = [name for name in LOOKS if name in handles]
    figure.legend(
        [handles[n] for n in names], map(label, names), loc="outside right center", frameon=False
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
