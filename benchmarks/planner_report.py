"""Tables of docs/planner.md and its picture, from the files in benchmarks/results.

    python -m benchmarks planner_report

Writes between the markers of the page, and docs/planner.png. Nothing is planned here.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from pictures import pyplot
from rows_file import load
from tables import between_markers, markdown

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "planner.md"
Row = dict[str, Any]

# One look per planner, the same in every panel; auto on top.
LOOKS = {
    "liveness": ("#777777", "s"),
    "superneurons_speed": ("#e6a000", "<"),
    "superneurons_memory": ("#c46a00", ">"),
    "superneurons": ("#d62728", "o"),
    "sqrt_n": ("#9467bd", "^"),
    "greedy": ("#1f77b4", "v"),
    "offload_conv": ("#8c564b", "P"),
    "dtr": ("#2ca02c", "D"),
    "knapsack": ("#e377c2", "X"),
    "auto_recompute": ("black", "*"),
    "auto": ("black", "."),
}
# Percent of extra time shown; what is slower is left out of the picture, not of the file.
CEILING = 60.0


def extra(row: Row) -> str:
    """Extra time in percent."""
    return f"{100 * (row['predicted_s'] / row['baseline_s'] - 1):+.1f}"


def cell(rows: list[Row], budget: int | None) -> list[str]:
    """Extra time and gap of `auto` at a budget, and the best named planner there."""
    at = [row for row in rows if row["budget_bytes"] == budget and row["kept"]]
    own = [row for row in at if row["planner"] == "auto"]
    if not own:
        return ["not reached", ""]
    named = [row for row in at if not row["planner"].startswith("auto")]
    best = min(named, key=lambda row: row["predicted_s"], default=None)
    gap = f"{extra(own[0])} (gap {100 * own[0]['gap']:.1f})"
    alone = [row for row in own_actions(rows, budget) if row["kept"]]
    if alone:
        gap += f"; {extra(alone[0])} without transfers"
    return [gap, f"{extra(best)} {best['planner']}" if best else "none"]


def own_actions(rows: list[Row], budget: int | None) -> list[Row]:
    """Rows of `auto` with rebuilds alone, at a budget."""
    return [r for r in rows if r["budget_bytes"] == budget and r["planner"] == "auto_recompute"]


def networks(rows: list[Row]) -> str:
    """One line per network: what `auto` pays at a half, a third, and the least memory."""
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        first = mine[0]
        top, base = first["baseline_peak_bytes"], first["base_bytes"]
        budgets = {row["budget_bytes"] for row in mine}
        least = min(row["predicted_peak_bytes"] for row in mine if row["planner"] == "auto")
        cells = [cell(mine, base + (top - base) // part) for part in (2, 3)]
        last = cell(mine, min(budgets))
        share = f"{100 * (least - base) / (top - base):.0f}"
        seconds = max(row["solve_s"] for row in mine if row["planner"] == "auto")
        lines.append(
            [model, first.get("granularity", "op"), str(first["batch"]), str(first["ops"]),
             f"{base / 2**30:.2f}", f"{(top - base) / 2**30:.2f}", *cells[0], *cells[1], share,
             last[0], f"{seconds:.1f}"]
        )  # fmt: skip
    head = ["network", "by", "batch", "ops", "resident, GiB", "beside it, GiB", "auto at 1/2, %",
            "best other", "auto at 1/3, %", "best other", "least, %", "auto there, %",
            "most planning, s"]  # fmt: skip
    return markdown(head, lines)


def deep(rows: list[Row]) -> str:
    """Deep ResNets, one line each."""
    head = ["planner", "depth", "ops", "batch", "update", "weights, GiB", "unplanned peak, GiB",
            "peak, GiB", "extra time, %", "gap, %", "planning, min"]  # fmt: skip
    return markdown(
        head,
        (
            [row["planner"], str(row["depth"]), str(row["ops"]), str(row["batch"]),
             "layer by layer" if row["early_update"] else "at the end",
             f"{row['base_bytes'] / 2**30:.2f}", f"{row['baseline_peak_bytes'] / 2**30:.2f}",
             f"{row['predicted_peak_bytes'] / 2**30:.2f}" + ("" if row["fits"] else " (too much)"),
             extra(row), "" if row["gap"] is None else f"{100 * row['gap']:.1f}",
             f"{row['solve_s'] / 60:.1f}"]
            for row in rows
        ),
    )  # fmt: skip


def stages(rows: list[Row]) -> str:
    """SuperNeurons' stages, for both kinds of layers."""
    head = ["stage", "paper, MB", "layers as in the paper, MiB", "layers as in torch, MiB",
            "extra layer runs", "paper"]  # fmt: skip
    lines = []
    for stage in dict.fromkeys(row["stage"] for row in rows):
        own = {row["layers"]: row for row in rows if row["stage"] == stage}
        first = own["paper"]
        lines.append(
            [stage, *("" if value is None else str(value) for value in
             (first["paper_mb_recalled"], f"{first['peak_bytes'] / 2**20:.1f}",
              f"{own['torch']['peak_bytes'] / 2**20:.1f}", first["reruns"],
              first["paper_reruns_recalled"]))]
        )  # fmt: skip
    return markdown(head, lines)


def source(rows: list[Row], command: str) -> str:
    """Which command, commit and machine a table is from."""
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    limits = dict.fromkeys(f"{row['time_limit_s']:g}" for row in rows if "time_limit_s" in row)
    spent = f" (`--time-limit` {', '.join(limits)})" if limits else ""
    return f"From `{command}`{spent}. Commit {commits}; {rows[0]['machine']}; {rows[0]['device']}."


def fronts(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw one panel per network: memory across, extra time up, a line per planner."""
    plt = pyplot()

    models = list(dict.fromkeys(row["model"] for row in rows))
    columns = min(4, len(models))
    lines = math.ceil((len(models) + 1) / columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(3.4 * columns, 2.9 * lines), squeeze=False, layout="constrained"
    )
    panels = list(axes.flat)
    for axis, model in zip(panels, models, strict=False):
        mine = [row for row in rows if row["model"] == model]
        first = mine[0]
        span = first["baseline_peak_bytes"] - first["base_bytes"]
        for planner, (colour, marker) in LOOKS.items():
            points = sorted(
                {
                    (
                        100 * (row["predicted_peak_bytes"] - row["base_bytes"]) / span,
                        100 * (row["predicted_s"] / row["baseline_s"] - 1),
                    )
                    for row in mine
                    if row["planner"] == planner
                }
            )
            shown = [(x, y) for x, y in points if y <= CEILING and x <= 102]
            bold = planner == "auto"
            axis.plot(
                [x for x, _ in shown], [y for _, y in shown], color=colour, marker=marker,
                lw=2 if bold else 0.8, ms=6 if bold else 4, alpha=1 if bold else 0.8,
                zorder=3 if bold else 2, label=planner,
            )  # fmt: skip
        bound = sorted(
            (
                100 * (row["budget_bytes"] - row["base_bytes"]) / span,
                100 * (row["lower_bound_s"] / row["baseline_s"] - 1),
            )
            for row in mine
            if row["planner"] == "auto"
        )
        axis.plot(*zip(*bound, strict=True), color="black", ls=":", lw=1, label="lower bound")
        axis.set_title(f"{model}, batch {first['batch']}, {first['ops']} ops", fontsize=9)
        axis.set_xlim(0, 103)
        axis.set_ylim(-2, CEILING)
        axis.grid(alpha=0.25)
        axis.tick_params(labelsize=8)
    for axis in panels[len(models) :]:
        axis.axis("off")
    handles, labels = panels[0].get_legend_handles_labels()
    panels[len(models)].legend(handles, labels, loc="center", fontsize=9, frameon=False)
    figure.supxlabel("peak memory beside what is resident, % of the unplanned step", fontsize=10)
    figure.supylabel(f"extra time, % (above {CEILING:.0f} not shown)", fontsize=10)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Rewrite the page and the picture."""
    text = PAGE.read_text()
    for name, stem, show in (
        ("fronts", "planner", networks),
        ("deep", "planner_deep", deep),
        ("alexnet", "planner_alexnet", stages),
    ):
        rows = load(RESULTS / f"{stem}.json")
        body = f"{show(rows)}\n\n{source(rows, f'python -m benchmarks {stem}')}"
        text = between_markers(text, name, body)
        if stem == "planner":
            fronts(rows, ROOT / "docs" / "planner.png")
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
