"""What the rows of benchmarks/study.py say: tables, a picture, and their place in the docs."""

from __future__ import annotations

import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Panel = tuple[str, str]

CAPTION = "Accuracy lost against received bytes, for each method on three trainings"
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
    ("cnn", "sgd"): "convolutional net, SGD with momentum",
    ("cnn", "adam"): "convolutional net, Adam",
    ("transformer", "adam"): "transformer, Adam",
}
# Okabe and Ito's palette; ours is vermilion and drawn last.
LOOKS = {
    "auto": ("#d55e00", "o"),
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


def panels(rows: list[Row]) -> dict[Panel, list[Row]]:
    """Rows by net and optimizer, in the order of TITLES."""
    found = {p: [r for r in rows if (r["net"], r["optimizer"]) == p] for p in TITLES}
    return {panel: group for panel, group in found.items() if group}


def groups(rows: list[Row]) -> dict[tuple[str, float], list[Row]]:
    """Rows of one panel by method and ratio, least compressed first."""
    found = defaultdict(list)
    for row in sorted(rows, key=lambda r: (r["ratio_received"], r["method"], r["seed"])):
        found[row["method"], row["ratio_received"]].append(row)
    return dict(found)


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


def table(rows: list[Row]) -> str:
    """One panel's rows as a Markdown table."""
    lines = [COLUMNS, ("---",) * len(COLUMNS)]
    for (method, ratio), group in groups(rows).items():
        lines.append((
            f"**{method}**" if method.startswith("auto") else method,
            group[0]["exchange"],
            f"{ratio:.1f}",
            f"{group[0]['ratio_with_small']:.1f}",
            _mean([r["accuracy"] for r in group]),
            "" if method == "plain" else _mean(gaps(group, rows), "+.2f"),
            _mean([r["train_loss"] for r in group], ".3f").partition(" ±")[0],
            f"{statistics.fmean(r['seconds'] for r in group):.0f}",
            str(len(group)),
        ))  # fmt: skip
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def source(rows: list[Row]) -> str:
    """Where the numbers come from, in one paragraph."""
    commits, machines = (", ".join(sorted({r[f] for r in rows})) for f in ("commit", "machine"))
    return (
        "From `python benchmarks/study.py`: mean ± standard deviation over seeds, differences taken"
        f" seed by seed. Commit {commits}; {machines}."
    )


def text(rows: list[Row]) -> str:
    """All tables, and where they come from."""
    parts = []
    for panel, group in panels(rows).items():
        steps = ", ".join(str(s) for s in sorted({r["steps"] for r in group}))
        rate = ", ".join(str(s) for s in sorted({r["rate"] for r in group}))
        parts += [f"### {TITLES[panel].capitalize()}", f"{steps} steps, learning rate {rate}."]
        parts.append(table(group))
    return "\n\n".join([*parts, source(rows)])


def put_into(page: Path, new: str) -> None:
    """Replace what stands between the two markers of a page."""
    start, end = "<!-- study:start -->", "<!-- study:end -->"
    before, has_start, rest = page.read_text(encoding="utf-8").partition(start)
    _, has_end, after = rest.partition(end)
    if not (has_start and has_end):
        raise SystemExit(f"{page} lacks {start} or {end}; put both where the tables belong")
    page.write_text(f"{before}{start}\n{new}\n{end}{after}", encoding="utf-8")


def picture(rows: list[Row], path: Path) -> None:
    """Difference to plain against the ratio, a line per method with the range over seeds."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False})
    by_panel = panels(rows)
    figure, axes = plt.subplots(
        1, len(by_panel), figsize=(6.2 * len(by_panel), 5.4), squeeze=False, layout="constrained"
    )
    handles: dict[str, Any] = {}
    for place, (panel, group) in enumerate(by_panel.items()):
        ax = axes[0, place]
        points = defaultdict(list)
        for (method, ratio), some in groups(group).items():
            if method != "plain" and (found := gaps(some, group)):
                points[method.split()[0] if "powersgd" in method else method].append(
                    (ratio, statistics.fmean(found), min(found), max(found))
                )
        order = sorted(points, key=list(LOOKS).index, reverse=True)
        for method in order:
            colour, mark = LOOKS[method]
            ratio, mean, low, high = zip(*points[method], strict=True)
            bars = ([m - v for m, v in zip(mean, low, strict=True)],
                    [v - m for m, v in zip(mean, high, strict=True)])  # fmt: skip
            ours = method == "auto"
            handles[method] = ax.errorbar(
                ratio, mean, yerr=bars, color=colour, marker=mark, ms=9 if ours else 7, capsize=3,
                lw=2.5 if ours else 1.3, elinewidth=1, mec="white", zorder=3 if ours else 2,
            )  # fmt: skip
        ax.axhline(0, color="#5f6368", lw=1)
        for ratio, points_lost in ((50, -0.3), (150, -0.7)):
            ax.plot([ratio / 1.25, ratio * 1.25], [points_lost] * 2, color="black", lw=1, ls=":")
        ax.set(xscale="log", title=TITLES[panel], xlabel="received bytes: plain / method")
        ax.set_xticks([2, 5, 10, 20, 50, 100, 200], ["2", "5", "10", "20", "50", "100", "200"])
        ax.minorticks_off()
        ax.set_yscale("symlog", linthresh=1, linscale=2)
        ticks = [0.5, 0, -0.3, -0.7, -1, -2, -5, -10]
        ax.set_yticks(ticks, [f"{tick:+g}" if tick else "0" for tick in ticks])
        ax.grid(alpha=0.25)
    axes[0, 0].set_ylabel("test accuracy against plain, points")
    names = [name for name in LOOKS if name in handles]
    figure.legend([handles[n] for n in names], names, loc="outside right center", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
