"""The fronts of benchmarks/planner.py as small multiples.

python benchmarks/planner_picture.py benchmarks/results/planner.json docs/planner.png
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

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


def fronts(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw one panel per network: memory across, extra time up, a line per planner."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

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


if __name__ == "__main__":
    fronts(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
