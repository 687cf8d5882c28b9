"""The figure of a report: memory over time, the peak's owners, time against memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..base.errors import MissingExtra
from ..base.sizes import show_bytes, show_seconds
from ..check import Replay
from ..graph.graph import Graph
from ..plan.buffers import plan_buffers
from ..plan.plan import Decision, Plan

# Memory by purpose, bottom first: resident storages, what a step allocates, kernels' scratch.
LAYERS: Final = ("weights, inputs, state", "activations", "gradients", "scratch")
# A figure has fewer pixel columns; a longer curve is reduced to the maximum of each interval.
_POINTS: Final = 2000
# Names in plan_buffers of scratch, and of the second copy of a storage.
_SCRATCH: Final = "workspace of "
_SECOND: Final = " (second copy)"

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """Live bytes over time, and the owners of the peak.

    time_s, bytes : [points] each; between two times the bytes are those of the earlier one.
    layers : (name, [points] bytes) of each of LAYERS, bottom first; they sum to `bytes`.
    peak_s, peak_bytes, peak_at : time and size of the peak, and the op or action that reaches it
    owners : (name, bytes) at the peak, largest first; they sum to the peak.
    """

    time_s: Floats
    bytes: Floats
    layers: tuple[tuple[str, Floats], ...]
    peak_s: float
    peak_bytes: int
    peak_at: str
    owners: tuple[tuple[str, int], ...]

    @property
    def peak_layers(self) -> tuple[tuple[str, int], ...]:
        """(name, bytes) of the layers at the peak, without empty ones; scratch names its op."""
        at = int(self.bytes.argmax())
        op = self.peak_at.removeprefix("run ")
        named = (
            (f"scratch of {op}" if name == "scratch" else name, int(size[at]))
            for name, size in self.layers
        )
        return tuple((name, size) for name, size in named if size)


@dataclass(frozen=True)
class Replayed:
    """A replayed plan, with its memory curves and decisions.

    graph, plan, others : what is reported; `others` are plans of the same graph to compare with
    before, after : memory over time without the plan and with it
    decisions : the plan's decisions other than keep, largest first
    """

    graph: Graph
    plan: Plan
    others: tuple[Plan, ...]
    before: Curve
    after: Curve
    decisions: tuple[Decision, ...]

    @property
    def headline(self) -> str:
        """The message in one line."""
        cut = 1 - self.after.peak_bytes / self.before.peak_bytes if self.before.peak_bytes else 0.0
        name = self.graph.name or "graph"
        return (
            f"{name}: {show_bytes(self.before.peak_bytes)} → {show_bytes(self.after.peak_bytes)} "
            f"({cut:.0%} less memory) for {self.plan.overhead:+.1%} time"
        )


def top_owners(curve: Curve, most: int) -> list[tuple[str, int]]:
    """Return the largest owners of a peak, the rest summed in a last entry."""
    rest = curve.owners[most:]
    # A line for a single other takes as much room as its name.
    if len(rest) < 2:
        return list(curve.owners)
    return [*curve.owners[:most], (f"{len(rest)} others", sum(size for _, size in rest))]


def owner_groups(report: Replayed, curve: Curve, most: int = 6) -> list[tuple[str, int]]:
    """Return the peak's owners summed by kind: conv2d outputs, gradients, scratch ..."""
    graph = report.graph
    sums: dict[str, tuple[int, int]] = {}
    for name, size in curve.owners:
        at = _storage(graph, name)
        if at is None:
            group = name
        elif graph.storages[at].role == "gradient":
            group = "gradients"
        else:
            op = graph.ops[int(graph.arrays.producer[at])]
            group = f"{op.kind or op.phase} outputs"
        count, total = sums.get(group, (0, 0))
        sums[group] = count + 1, total + size
    ranked = sorted(sums.items(), key=lambda item: (-item[1][1], item[0]))
    rows = [(_counted(count, group), total) for group, (count, total) in ranked]
    # Entries that round to 0 % are not worth a line of their own.
    shown = [row for row in rows[:most] if row[1] >= curve.peak_bytes / 200]
    rest = sum(total for _, total in rows[len(shown) :])
    return [*shown, ("all other", rest)] if rest else shown


def _counted(count: int, group: str) -> str:
    if not group.endswith(("outputs", "gradients")):
        return group
    return f"{count} {group}" if count > 1 else f"1 {group.removesuffix('s')}"


def planned_curve(graph: Graph, plan: Plan, replay: Replay) -> Curve:
    """Return the memory of a plan's actions."""
    stays = plan_buffers(graph, plan)
    rows = [(name, *row) for name, row in zip(stays.names, stays.buffers, strict=True)]
    # Copies start on their own lanes, perhaps late; memory changes in the order of the actions.
    compute = np.array([action.kind not in ("offload", "prefetch") for action in plan.actions])
    moment = np.maximum.accumulate(np.where(compute, replay.start_s, 0.0))
    names = [f"{action.kind} {action.target}" for action in plan.actions] or ["no action"]
    return _curve(graph, rows, np.append(moment, replay.seconds), names)


def _storage(graph: Graph, name: str) -> int | None:
    """Return the storage of a buffer by its name; None for scratch and resident ones."""
    return graph.storage_index.get(name.removesuffix(_SECOND))


def _layer(graph: Graph, name: str) -> int:
    """Return which of LAYERS a buffer belongs to, by its name."""
    at = _storage(graph, name)
    if at is None:
        return LAYERS.index("scratch")
    storage = graph.storages[at]
    if storage.resident:
        return 0
    return LAYERS.index("gradients" if storage.role == "gradient" else "activations")


def _curve(
    graph: Graph,
    rows: Sequence[tuple[str, int, int, int]],
    time_s: Floats,
    names: Sequence[str],
) -> Curve:
    """Stack the live bytes during each action.

    rows : (name, lower, upper, bytes), half-open in action numbers
    time_s, names : when each action starts, and the last one ends; a label for each
    """
    change = np.zeros((len(LAYERS), len(names) + 1))
    for name, lower, upper, size in rows:
        layer = _layer(graph, name)
        change[layer, lower] += size
        change[layer, upper] -= size
    layers = np.cumsum(change, axis=1)[:, :-1]
    top = int(layers.sum(0).argmax())
    owners = [("resident", graph.base_bytes)]
    owners += [
        (name.replace(_SCRATCH, "scratch of ", 1), size)
        for name, lower, upper, size in rows
        # Not resident ones, which share one entry.
        if lower <= top < upper and _layer(graph, name)
    ]
    ranked = sorted((row for row in owners if row[1]), key=lambda row: (-row[1], row[0]))
    # After the last action nothing changes. Without actions, the step is one moment.
    layers = np.append(layers, layers[:, -1:], axis=1)
    time_s = np.append(np.zeros(len(names) + 1 - len(time_s)), time_s)
    total, peak_s = layers.sum(0), float(time_s[top])
    if len(time_s) > _POINTS:
        starts = np.unique(np.linspace(0, len(time_s) - 1, _POINTS).astype(int))
        # The maximum of each interval, so that no peak is lost.
        highest = [
            first + int(total[first:last].argmax())
            for first, last in zip(starts, (*starts[1:], len(time_s)), strict=True)
        ]
        time_s, layers, total = time_s[starts], layers[:, highest], total[highest]
    return Curve(
        time_s,
        total,
        tuple(zip(LAYERS, layers, strict=True)),
        peak_s,
        int(total.max()),
        names[top],
        tuple(ranked),
    )


BEFORE: Final = "#9aa5b1"
AFTER: Final = "#0b6e99"
BUDGET: Final = "#c0392b"
RESERVED: Final = "#6a3d9a"
# Of LAYERS, bottom first.
_LAYERS: Final = ("#5d6d7e", "#5dade2", "#82c46c", "#f0a500")
_OTHERS: Final = ("#e08e0b", "#5b8c2a", "#8e5ea2", "#a0522d", "#3b7dd8", "#7f8c8d", "#d35d9e")
_MARKS: Final = "sD^vPX<>ph"


def blank(size: tuple[float, float], without: str) -> Any:
    """Return an empty matplotlib figure; raise MissingExtra with the text `without`."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise MissingExtra(
            f"{without} Install it with: pip install 'superneurons[report]'"
        ) from missing
    # Not pyplot, which needs a window system and holds the state of the user's own figures.
    chart = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(chart)
    return chart


def figure(report: Replayed) -> Any:
    """Return a matplotlib figure; raise MissingExtra without matplotlib."""
    chart = blank(
        (11, 8.2),
        "the picture of a report needs matplotlib, which is not installed; the tables do not.",
    )
    grid = chart.add_gridspec(2, 2, height_ratios=(1.15, 1))
    scale, unit = _byte_unit(max(report.before.peak_bytes, report.after.peak_bytes))
    _over_time(chart.add_subplot(grid[0, :]), report, scale, unit)
    _owners(chart.add_subplot(grid[1, 0]), report, scale, unit)
    _against_others(chart.add_subplot(grid[1, 1]), report, scale, unit)
    chart.suptitle(report.headline, fontsize=13, fontweight="bold")
    return chart


def _byte_unit(largest: int) -> tuple[float, str]:
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if largest >= 1024**power:
            return 1024.0**power, unit
    return 1.0, "B"


def _plain(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, color="#e5e8eb", linewidth=0.7)
    axes.set_axisbelow(True)


def _over_time(axes: Any, report: Replayed, scale: float, unit: str) -> None:
    plan, before, after = report.plan, report.before, report.after
    end = max(before.time_s[-1], after.time_s[-1])
    axes.stairs(before.bytes[:-1] / scale, before.time_s, color=BEFORE, alpha=0.2, fill=True)
    below = np.zeros(len(after.bytes) - 1)
    for (name, size), colour in zip(after.layers, _LAYERS, strict=True):
        above = below + size[:-1] / scale
        if size.any():
            # With an edge, as scratch of a microsecond's op would be invisible; above the curve.
            edge = {"linewidth": 1, "zorder": 2.5} if name == "scratch" else {"linewidth": 0}
            shown = np.where(size[:-1] > 0, above, np.nan)
            axes.stairs(shown, after.time_s, baseline=below, color=colour, fill=True, label=name,
                        **edge)  # fmt: skip
        below = above
    for curve, colour, label in ((before, BEFORE, "before"), (after, AFTER, "after")):
        axes.step(curve.time_s, curve.bytes / scale, where="post", color=colour, linewidth=1.2,
                  label=label)  # fmt: skip
        axes.plot(curve.peak_s, curve.peak_bytes / scale, "o", color=colour, markersize=6)
    for word, held, colour, style in (
        ("budget", plan.budget_bytes, BUDGET, (0, (5, 3))),
        ("reserved", plan.reserved_peak_bytes, RESERVED, "-."),
    ):
        if held is not None:
            label = f"{word} {show_bytes(held)}"
            axes.axhline(held / scale, color=colour, linewidth=1.4, linestyle=style, label=label)
    highest = max(before.peak_bytes, after.peak_bytes, plan.reserved_peak_bytes or 0)
    # Room above the curves for the legend, so that it covers no line.
    axes.set_ylim(0, highest / scale * 1.3 or 1)
    axes.set_xlim(0, end or 1)
    axes.xaxis.set_major_formatter(lambda seconds, _: show_seconds(seconds))
    axes.set_xlabel("time in the step")
    axes.set_ylabel(f"memory ({unit})")
    title = "Memory over time, after in layers; dots mark the peaks"
    axes.set_title(title, loc="left", fontsize=11)
    axes.legend(loc="upper left", ncols=4, frameon=False, fontsize=9)
    _plain(axes)


def _owners(axes: Any, report: Replayed, scale: float, unit: str) -> None:
    place, names, places = 0.0, [], []
    largest = 1.0
    for word, curve, colour in (
        ("before", report.before, BEFORE), ("after", report.after, AFTER),
    ):  # fmt: skip
        op = _short(curve.peak_at.removeprefix("run "))
        title = f"peak {word}: {show_bytes(curve.peak_bytes)}, at {op}"
        axes.text(0, place, title, va="center", fontsize=8.5, fontweight="bold")
        for name, size in owner_groups(report, curve):
            place += 1
            names.append(_short(name))
            places.append(place)
            largest = max(largest, size)
            axes.barh(place, size / scale, color=colour, height=0.72)
            axes.text(size / scale, place, f" {show_bytes(size)}", va="center", fontsize=8)
        place += 1.4  # a gap between the two groups
    axes.set_yticks(places, names, fontsize=8)
    axes.set_xlim(0, largest / scale * 1.25)
    # Inverted, so that the first is on top.
    axes.set_ylim(place - 0.6, -0.8)
    axes.set_xlabel(f"memory ({unit})")
    axes.set_title("Who owns the peak", loc="left", fontsize=11)
    _plain(axes)
    axes.grid(False, axis="y")


def _short(name: str) -> str:
    # The end of a path says more than its middle; 26 characters in total.
    return name if len(name) <= 26 else f"{name[:12]}…{name[-13:]}"


def _against_others(axes: Any, report: Replayed, scale: float, unit: str) -> None:
    plan = report.plan
    fronts: dict[str, list[Plan]] = {}
    for other in report.others:
        fronts.setdefault(other.planner, []).append(other)
    # The largest mark first, so that it hides no other at its place.
    axes.plot(plan.baseline_peak_bytes / scale, 0, "o", color=BEFORE, markersize=10,
              label="no plan")  # fmt: skip
    for number, (name, plans) in enumerate(fronts.items()):
        front = sorted(plans, key=lambda other: other.peak_bytes)
        axes.plot(
            [other.peak_bytes / scale for other in front],
            [other.overhead * 100 for other in front],
            marker=_MARKS[number % len(_MARKS)],
            color=AFTER if name == plan.planner else _OTHERS[number % len(_OTHERS)],
            linewidth=1.2 if len(front) > 1 else 0,
            markersize=7,
            label=name,
        )
    axes.plot(
        plan.peak_bytes / scale,
        plan.overhead * 100,
        "*",
        color=AFTER,
        markersize=17,
        markeredgecolor="white",
        label=f"this plan ({plan.planner})",
        zorder=4,
    )
    if plan.budget_bytes is not None:
        axes.axvline(plan.budget_bytes / scale, color=BUDGET, linewidth=1.2, linestyle=(0, (5, 3)))
    axes.set_xlabel(f"peak ({unit})")
    axes.set_ylabel("extra time (%)")
    axes.set_title("Time against memory: lower left is better", loc="left", fontsize=11)
    axes.margins(0.12)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3, frameon=False, fontsize=8)
    _plain(axes)
