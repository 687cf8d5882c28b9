"""Table and picture of docs/planner.md for training under a hard limit.

    python -m benchmarks under_limit_report [--check]

Writes between the markers of the page, and draws docs/under_limit.png, from
benchmarks/results/under_limit.json; `--check` says whether the page is as the rows are. Nothing is
planned or run here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pictures import pyplot
from rows_file import load
from tables import between_markers, markdown

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "under_limit.json"
PAGE = ROOT / "docs" / "planner.md"
PICTURE = ROOT / "docs" / "under_limit.png"
Row = dict[str, Any]
NAMES = {
    "plain": "plain",
    "checkpoint": "checkpoint per block",
    "checkpoint_sqrt": "checkpoint per sqrt(n) blocks",
    "ours": "ours",
    "ours_state": "ours, parameters on disk",
}
WHAT = {
    "resnet": ("ResNet, torch", "layers"),
    "gpt2": ("GPT-2, torch", "tokens"),
    "resnet_tensorflow": ("ResNet, TensorFlow", "layers"),
}
COLOURS = {
    "plain": "#8a8f98",
    "checkpoint": "#c9a227",
    "checkpoint_sqrt": "#b5651d",
    "ours": "#2f6fb0",
    "ours_state": "#17406d",
}


def reach(row: Row) -> int:
    """Layers or tokens of a row."""
    return int(row["size"] if row["task"] == "gpt2" else 3 * (44 + row["size"]) + 2)


def resident(row: Row) -> int:
    """The most bytes that were resident and that the limit is on: no pages of a file."""
    return int(row.get("anonymous_bytes", row["resident_bytes"]))


def seconds(row: Row) -> float:
    """CPU seconds for an image, or for a thousand tokens, in the quickest step."""
    of = row["tokens"] / 1000 if row["task"] == "gpt2" else row["images"]
    return float(min(row["steps_cpu_s"]) / of)


def searches(rows: list[Row]) -> Iterator[tuple[str, int, dict[str, list[Row]]]]:
    """Task, limit in bytes, and the rows of each way, plain first."""
    for task in WHAT:
        limits = sorted({row["limit_bytes"] for row in rows if row["task"] == task})
        for limit in limits:
            of = [row for row in rows if (row["task"], row["limit_bytes"]) == (task, limit)]
            yield task, limit, {way: [row for row in of if row["way"] == way] for way in NAMES}


def largest(rows: list[Row]) -> Row | None:
    """The row of the largest size that trained."""
    return max((row for row in rows if row["trained"]), key=lambda row: row["size"], default=None)


def table(rows: list[Row]) -> str:
    """The largest of each way, and what it took."""
    lines = []
    for task, limit, ways in searches(rows):
        plain = largest(ways["plain"])
        for way, runs in ways.items():
            best = largest(runs)
            if best is None or plain is None:
                continue
            failed = [row for row in runs if not row["trained"] and row["size"] > best["size"]]
            beyond = min(failed, key=lambda row: row["size"], default=None)
            same = next(
                (row for row in runs if row["size"] == plain["size"] and row["trained"]), None
            )
            what, unit = WHAT[task]
            lines.append([
                f"{what}, {limit >> 20} MiB" if way == "plain" else "",
                NAMES[way],
                f"{reach(best):,} {unit}",
                f"{reach(beyond):,}" if beyond else "not tried",
                f"{reach(best) / reach(plain):.2f}",
                f"{resident(best) / 2**20:.0f}",
                f"{seconds(best):.3f}",
                f"{seconds(same):.3f}" if same else "",
                f"{best['planning_cpu_s']:.0f}" if "planning_cpu_s" in best else "",
            ])  # fmt: skip
    return markdown(
        (
            "", "way", "largest that trained", "smallest that did not", "times plain",
            "resident, MiB", "CPU s", "CPU s at plain's largest", "planning, CPU s",
        ),
        lines,
    )  # fmt: skip


def picture(rows: list[Row], path: Path) -> None:
    """Bars of the largest, ways below one another, a panel for each search."""
    plt = pyplot()

    panels = [panel for panel in searches(rows) if largest(panel[2]["plain"])]
    heights = [sum(bool(largest(runs)) for runs in ways.values()) for _, _, ways in panels]
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(8, 0.9 + 0.52 * sum(heights) + 0.7 * len(panels)),
        gridspec_kw={"height_ratios": heights}, squeeze=False,
    )  # fmt: skip
    for axis, (task, limit, ways) in zip(axes[:, 0], panels, strict=True):
        best = {way: row for way, runs in ways.items() if (row := largest(runs))}
        most = max(map(reach, best.values()))
        what, unit = WHAT[task]
        per = "1,000 tokens" if task == "gpt2" else "image"
        for place, (way, row) in enumerate(best.items()):
            axis.barh(place, reach(row), color=COLOURS[way], height=0.72)
            times = reach(row) / reach(best["plain"])
            text = f"{reach(row):,} ({times:.1f}x), {seconds(row):.2g} s"
            axis.text(reach(row) + 0.01 * most, place, text, va="center", fontsize=11)
        names = [
            NAMES[way].replace("checkpoint per", "checkpoint\nper").replace(", p", ",\np")
            for way in best
        ]
        axis.set_yticks(range(len(best)), names, fontsize=11)
        axis.invert_yaxis()
        axis.set_xlim(0, 1.42 * most)
        axis.set_title(
            f"{what}: {unit} within {limit >> 20} MiB, CPU seconds per {per}",
            fontsize=12, loc="left",
        )  # fmt: skip
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(axis="x", labelsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main(argv: list[str]) -> int:
    """Write the page, or say whether it is written."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(argv)
    rows = load(RESULTS)
    text = PAGE.read_text(encoding="utf-8")
    new_text = between_markers(text, "limit", table(rows))
    if args.check:
        return int(new_text != text)
    PAGE.write_text(new_text, encoding="utf-8")
    picture(rows, PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
