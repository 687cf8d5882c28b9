"""The tables of state on the host and of copies behind ops, written into docs/torch_memory.md.

python -m benchmarks state_report
"""

from __future__ import annotations

import json
from typing import Any

from machine import ROOT
from tables import between_markers, markdown

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "torch_memory.md"
SAYS = {
    "plain": "plain torch",
    "memmap": "by hand: memory maps, updates in hooks",
    "step": '`state=folder` (`update="step"`)',
    "backward": '`update="backward"`',
    "copied": '`update="backward"`, `in_place=False`',
    "disk": '`update="backward"`, page cache dropped',
}


def load(name: str) -> list[dict[str, Any]]:
    """Return the rows of a result."""
    rows: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text())
    return rows


def state_table(rows: list[dict[str, Any]]) -> str:
    """Ways to train under the limit."""
    lines = []
    for row in rows:
        limit = f"{row['limit_mib']} MiB" if row["limited"] else "none"
        if "step_s" not in row:
            lines.append([SAYS[row["way"]], limit, "refused memory", "", "", "", ""])
            continue
        lines.append(
            [
                SAYS[row["way"]], limit, "equal" if row["equal"] else "differ",
                f"{row['step_s']:.1f}", f"{row['of_plain']:.2f}",
                f"{row['anonymous_mib']:.0f}", f"{row['mapped_mib']:.0f}",
            ]
        )  # fmt: skip
    head = ("way", "limit", "losses", "s/step", "x plain", "anonymous, MiB", "mapped, MiB")
    return markdown(head, lines)


def hidden_table(rows: list[dict[str, Any]]) -> str:
    """What of the copies passed beside ops."""
    lines = []
    for row in rows:
        moved = "hidden" in row
        lines.append(
            [
                row["model"], f"{row['rate']:g}", f"{row['mib_per_s']:.1f}",
                f"{row['whole_mib']:.0f}", f"{row['budget_mib']:.0f}", f"{row['peak_mib']:.0f}",
                str(row["offloaded"]), str(row["recomputed"]),
                f"{row['moved_mib']:.0f}" if moved else "0",
                f"{row['copies_s']:.2f}" if moved else "",
                f"{100 * row['hidden']:.0f}" if moved else "",
                f"{row['step_s'] / row['plain_s']:.2f}" if moved else "",
            ]
        )  # fmt: skip
    head = ("network", "rate", "link, MiB/s", "unplanned, MiB", "budget", "peak", "offloaded",
            "recomputed", "moved, MiB", "copies, s", "hidden, %",
            "step, x plain")  # fmt: skip
    return markdown(head, lines)


def main() -> None:
    """Write both tables."""
    text = PAGE.read_text()
    for name, result, table in (
        ("state", "state_offload", state_table),
        ("hidden", "offload_hidden", hidden_table),
    ):
        rows = load(result)
        foot = f"`{rows[0]['command']}`. Commit {rows[0]['commit']}; {rows[0]['machine']}."
        text = between_markers(text, name, f"{table(rows)}\n\n{foot}")
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
