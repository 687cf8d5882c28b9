"""Report of benchmarks/gossip.py's rows: a table and a picture."""

from __future__ import annotations

import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from pictures import pyplot
from tables import markdown, put_into

PAGE = Path(__file__).resolve().parent.parent / "docs/gossip.md"
Row = dict[str, Any]
COLUMNS = (
    "method",
    "ranks",
    "steps",
    "accuracy of the consensus model, %",
    "against all-reduce, points",
    "one worker, %",
    "distance, relative",
    "growth",
    "times fewer bytes than a model",
    "seeds",
)
# Okabe and Ito's palette, as in the simulator.
LOOKS = {
    "all-reduce": "#000000",
    "weights": "#009e73",
    "weights, not overlapped": "#0072b2",
    "weights, top-k": "#cc79a7",
    "weights, onebit": "#f0e442",
    "weights, fft": "#e69f00",
    "weights, auto": "#56b4e9",
    "gradients": "#d55e00",
}


def _groups(rows: list[Row]) -> dict[tuple[int, int, str], list[Row]]:
    """Rows that differ in their seed only, by steps, ranks and name."""
    groups = defaultdict(list)
    order = list(LOOKS)
    for row in sorted(
        rows,
        key=lambda r: (
            -r["steps"], r["ranks"], order.index(r["method"]), r["pull"], r["seed"],
        ),
    ):  # fmt: skip
        groups[row["steps"], row["ranks"], _name(row)].append(row)
    return groups


def _name(row: Row) -> str:
    return row["method"] + (f", pull {row['pull']:g}" if row["pull"] < 1 else "")


def relative(row: Row) -> list[float]:
    """Consensus distance over the norm of the mean model, look by look."""
    return [d / n for d, n in zip(row["distance"], row["norm"], strict=True)]


def growth(row: Row) -> float:
    """Mean relative distance over the last quarter of the run, over that of the quarter before."""
    values = relative(row)
    quarter = max(1, len(values) // 4)
    before = statistics.fmean(values[-2 * quarter : -quarter] or values)
    return statistics.fmean(values[-quarter:]) / before if before else 1.0


def _mean(values: list[float], form: str) -> str:
    spread = f" ± {statistics.stdev(values):{form}}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{form}}{spread}"


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table, a line for each method, number of ranks and of steps."""
    keys = ("steps", "ranks", "seed")
    plain = {
        tuple(r[key] for key in keys): r["accuracy"] for r in rows if r["method"] == "all-reduce"
    }
    lines = []
    for (steps, ranks, name), group in _groups(rows).items():
        at = [(r["accuracy"], tuple(r[key] for key in keys)) for r in group]
        gaps = [accuracy - plain[key] for accuracy, key in at if key in plain]
        talks = name != "all-reduce"
        lines.append(
            (
                name,
                str(ranks),
                f"{steps:,}",
                _mean([r["accuracy"] for r in group], ".2f"),
                _mean(gaps, "+.2f").replace("± +", "± ") if talks and gaps else "",
                _mean([r["worker_accuracy"] for r in group], ".2f") if talks else "",
                _mean([relative(r)[-1] for r in group], ".3f") if talks else "0",
                _mean([growth(r) for r in group], ".2f") if talks else "",
                f"{statistics.fmean(r['ratio'] for r in group):.1f}",
                str(len(group)),
            )
        )
    return markdown(COLUMNS, lines)


def picture(rows: list[Row], path: Path) -> None:
    """Consensus distance over the longest runs, a panel for each number of ranks."""
    plt = pyplot(10)
    rows = [row for row in rows if row["steps"] == max(r["steps"] for r in rows)]
    counts = sorted({row["ranks"] for row in rows})
    figure, panels = plt.subplots(
        1, len(counts), figsize=(6 * len(counts), 4.2), layout="constrained", sharey=True,
        squeeze=False,
    )  # fmt: skip
    for axes, ranks in zip(panels[0], counts, strict=True):
        for (_, count, name), group in _groups(rows).items():
            if count != ranks or name == "all-reduce":
                continue
            for number, row in enumerate(group):
                axes.plot(
                    row["steps_seen"], relative(row), color=LOOKS[row["method"]], linewidth=1.5,
                    label=None if number else name,
                )  # fmt: skip
        axes.set(yscale="log", xlabel="step", xlim=(0, None), ylim=(1e-5, 2))
        axes.set_title(f"{ranks} ranks: consensus distance over the norm of the model", loc="left")
        axes.legend(frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def publish(rows: list[Row], path: Path, results: Path, png: Path | None) -> None:
    """Print the table; put it and the picture where they are read, if these rows are the results.

    results : benchmarks/results/NAME.json, of which docs have a part and a picture of that name
    """
    print(f"\n{table(rows)}\n\nrows: {path}")
    if path == results:
        put_into(PAGE, results.stem.replace("_", "-"), table(rows))
    if png or path == results:
        picture(rows, png or PAGE.with_name(f"{results.stem}.png"))
