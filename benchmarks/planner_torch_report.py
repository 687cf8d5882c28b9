"""Tables of docs/torch_memory.md, from benchmarks/results/planner_torch.json.

    python -m benchmarks planner_torch_report

Writes between the markers of the page. Nothing is planned or run here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tables import markdown

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "planner_torch.json"
PAGE = ROOT / "docs" / "torch_memory.md"
START, END = "<!-- torch:start -->", "<!-- torch:end -->"
HEAD = (
    *("network, batch", "share", "torch's own, MiB", "budget", "predicted", "measured"),
    *("bit-equal", "op time predicted", "op time measured"),
)
Row = dict[str, Any]


def mib(size: int) -> str:
    """Bytes in MiB."""
    return f"{size / 2**20:.1f}"


def percent(planned: float | None, plain: float | None) -> str:
    """Extra time, where there are figures."""
    return f"{100 * (planned / plain - 1):+.1f} %" if planned and plain else ""


def reached(row: Row) -> float:
    """The share of the activation memory that the smallest plan takes."""
    fixed = row["base_bytes"] + row["gradients_bytes"]
    return (row["smallest_bytes"] - fixed) / (row["baseline_measured_peak_bytes"] - fixed)


def line(row: Row) -> list[str]:
    """One row of the table."""
    own = mib(row["baseline_measured_peak_bytes"])
    first = [f"{row['model']}, {row['batch']}", f"{row['share']:.0%}", own]
    if not row["kept"] and row["share"]:
        return [*first, mib(row["budget_bytes"]), "refused", *[""] * 4]
    if not row["share"]:
        first[1], budget = f"smallest found: {reached(row):.0%}", mib(row["smallest_bytes"])
    else:
        budget = mib(row["budget_bytes"])
    return [
        *first,
        budget,
        mib(row["predicted_peak_bytes"]),
        mib(row["measured_peak_bytes"]),
        "yes" if row["equal"] else "no",
        percent(row["predicted_s"], row["baseline_predicted_s"]),
        percent(row.get("op_s"), row.get("baseline_op_s")),
    ]


def tables(rows: list[Row]) -> str:
    """What stands between the markers."""
    return markdown(HEAD, (line(row) for row in rows if row["share"] is not None))


def main() -> None:
    """Write the page."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(START)
    _, after = rest.split(END)
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))
    PAGE.write_text(f"{before}{START}\n{tables(rows)}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
