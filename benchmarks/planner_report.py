"""Tables of docs/planner.md and its picture, from the files in benchmarks/results.

    python benchmarks/planner_report.py

Writes between the markers of the page, and docs/planner.png. Nothing is planned here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from planner_picture import fronts
from tables import markdown

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "planner.md"
Row = dict[str, Any]


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


def put(text: str, name: str, body: str) -> str:
    """The page with what is between the markers of `name` replaced."""
    start, end = f"<!-- {name}:start -->", f"<!-- {name}:end -->"
    before, _, rest = text.partition(start)
    _, _, after = rest.partition(end)
    if not rest or not after:
        raise SystemExit(f"{PAGE.name} has no markers {start} ... {end}")
    return f"{before}{start}\n{body}\n{end}{after}"


def main() -> None:
    """Rewrite the page and the picture."""
    text = PAGE.read_text()
    for name, stem, show in (
        ("fronts", "planner", networks),
        ("deep", "planner_deep", deep),
        ("alexnet", "planner_alexnet", stages),
    ):
        rows = json.loads((RESULTS / f"{stem}.json").read_text())
        body = f"{show(rows)}\n\n{source(rows, f'python benchmarks/{stem}.py')}"
        text = put(text, name, body)
        if stem == "planner":
            fronts(rows, ROOT / "docs" / "planner.png")
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
