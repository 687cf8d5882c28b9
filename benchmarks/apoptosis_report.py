"""Report of the apoptosis studies' rows: time to a target, a table, a picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pictures import pyplot
from tables import markdown

METHODS = ("plain", "apoptosis", "pruned", "small")
COLOURS = {"plain": "#5f6368", "apoptosis": "#d55e00", "pruned": "#0072b2", "small": "#009e73"}
Row = dict[str, Any]
# Steps done, seconds they took, score and widths.
Curve = Sequence[tuple[int, float, float, list[int]]]


def columns(curve: Curve, clock: str = "cpu_s") -> Row:
    """What was seen at each look, as columns of a row."""
    names = ("step", clock, "score", "widths")
    return {f"curve_{name}": [point[i] for point in curve] for i, name in enumerate(names)}


def target_of(rows: Iterable[Row]) -> float:
    """0.1 below the lowest score that a run of `plain` ended with."""
    return min((r["score"] for r in rows if r["method"] == "plain"), default=100.0) - 0.1


def seconds_to(row: Row, target: float, clock: str = "cpu_s") -> float | None:
    """Seconds of training until the score was first at the target; None if it never was."""
    points = zip(row[f"curve_{clock}"], row["curve_score"], strict=True)
    return next((seconds for seconds, seen in points if seen >= target), None)


def mean_to(rows: Sequence[Row], target: float) -> str:
    """CPU seconds to the target, a mean over rows; or how many of them reached it."""
    reached = [one for one in (seconds_to(row, target) for row in rows) if one is not None]
    if len(reached) < len(rows):
        return f"{len(reached)} of {len(rows)} did"
    return f"{sum(reached) / len(rows):.1f}"


def table(rows: list[Row], nets: Iterable[str]) -> str:
    """Return markdown: one line for each net and method, means over seeds."""
    head = (
        "net", "method", "steps", "seeds", "score %", "parameters", "CPU s", "CPU s to target",
        "target %",
    )  # fmt: skip
    lines = []
    for net in nets:
        own = [r for r in rows if r["net"] == net]
        target = target_of(own)
        kinds: dict[tuple[str, int, float], list[Row]] = {}
        for row in own:
            tolerance = 0.0 if row["method"] == "plain" else row["tolerance"]
            kinds.setdefault((row["method"], row["steps"], tolerance), []).append(row)
        for kind in sorted(kinds, key=lambda kind: (METHODS.index(kind[0]), *kind[1:])):
            (method, steps, tolerance), mine = kind, kinds[kind]
            label = f"{method}, tolerance {tolerance}" if tolerance else method
            n = len(mine)
            mean = {k: sum(r[k] for r in mine) / n for k in ("score", "parameters", "cpu_s")}
            lines.append(
                [
                    net, label, f"{steps:,}", str(n), f"{mean['score']:.2f}",
                    f"{mean['parameters']:,.0f}", f"{mean['cpu_s']:.1f}", mean_to(mine, target),
                    f"{target:.2f}",
                ]
            )  # fmt: skip
    return markdown(head, lines)


def picture(rows: list[Row], net: str, widths: Sequence[int], path: Path) -> None:
    """Draw widths and milliseconds a step over steps, and score over seconds, of one seed.

    widths : before the first step
    """
    plt = pyplot(11)
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    seen = {row["method"]: row for row in reversed(rows) if row["net"] == net}
    if "apoptosis" in seen:
        row = seen["apoptosis"]
        for layer, first in enumerate(widths):
            sizes = [first] + [point[layer] for point in row["curve_widths"]]
            style = ("-", "--", ":")[layer]
            steps = [0, *row["curve_step"]]
            label = f"layer {layer + 1}"
            left.plot(steps, sizes, style, color=COLOURS["apoptosis"], label=label)
    left.set(title="neurons left", xlabel="step", ylim=(0, None))
    left.legend(frameon=False)
    for method, row in seen.items():
        colour = COLOURS[method]
        middle.plot(row["curve_cpu_s"], row["curve_score"], color=colour, label=method)
        seconds, steps = [0, *row["curve_cpu_s"]], [0, *row["curve_step"]]
        pace = [1e3 * (b - a) / (d - c) for a, b, c, d in
                zip(seconds, seconds[1:], steps, steps[1:], strict=False)]  # fmt: skip
        right.plot(steps[1:], pace, color=colour, label=method)
    middle.set(title="test score, %", xlabel="CPU seconds of training")
    right.set(title="milliseconds a step, looks included", xlabel="step", ylim=(0, None))
    middle.legend(frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
