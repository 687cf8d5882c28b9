"""The tables of a report: who owns a peak, what was decided, where a plan stands beside others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ..base.lines import show_seconds
from ..base.sizes import show_bytes
from ..graph.graph import Graph
from ..plan.plan import Decision, Plan

_OWNERS: Final = 6
SECOND: Final = " (second copy)"
# Memory by what it is for, bottom first: what is resident, what a step makes, what kernels take.
LAYERS: Final = ("weights, inputs, state", "activations", "gradients", "scratch")

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """Live bytes over time, and who owns the largest value.

    Parameters
    ----------
    time_s, bytes
        [points] each; between two times the bytes are those of the earlier one.
    layers
        (name, [points] bytes) of each of LAYERS, bottom first; they sum to `bytes`.
    peak_s, peak_bytes, peak_at
        When the peak is reached, what it is, and the op or action that reaches it.
    owners
        (name, bytes) at the peak, largest first; they sum to the peak.
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
    """A plan that was replayed, and what there is to say of it.

    Parameters
    ----------
    graph, plan, others
        What is reported; `others` are plans of the same graph to compare with.
    before, after
        Memory over time without the plan and with it.
    decisions
        Those of the plan that do more than keep, largest first.
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


def comparison(report: Replayed) -> list[tuple[str, ...]]:
    """Return rows of text, the header first: each plan with its peak, time and gap."""
    rows: list[tuple[str, ...]] = [("planner", "budget", "peak", "time", "extra time", "gap")]
    for plan in (report.plan, *report.others):
        budget = "-" if plan.budget_bytes is None else show_bytes(plan.budget_bytes)
        rows.append(
            (
                plan.planner,
                budget,
                show_bytes(plan.peak_bytes),
                show_seconds(plan.seconds),
                f"{plan.overhead:+.1%}",
                f"{plan.gap:.1%}" if plan.lower_bound_seconds else "-",
            )
        )
    return rows


def top_owners(curve: Curve, most: int = _OWNERS) -> list[tuple[str, int]]:
    """Return the largest owners of a peak, the rest summed up in a last entry."""
    shown = list(curve.owners[:most])
    rest = curve.owners[most:]
    if len(rest) == 1:
        return [*shown, rest[0]]
    return [*shown, (f"{len(rest)} others", sum(size for _, size in rest))] if rest else shown


def owner_groups(report: Replayed, curve: Curve, most: int = _OWNERS) -> list[tuple[str, int]]:
    """Return the peak's owners summed by what they are: conv2d outputs, gradients, scratch ..."""
    graph = report.graph
    sums: dict[str, tuple[int, int]] = {}
    for name, size in curve.owners:
        at = graph.storage_index.get(name.removesuffix(SECOND))
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
    # What rounds to 0 % is not worth a line of its own.
    shown = [row for row in rows[:most] if row[1] >= curve.peak_bytes / 200]
    rest = sum(total for _, total in rows[len(shown) :])
    return [*shown, ("all other", rest)] if rest else shown


def _counted(count: int, group: str) -> str:
    if not group.endswith(("outputs", "gradients")):
        return group
    return f"{count} {group}" if count > 1 else f"1 {group.removesuffix('s')}"


def technique_totals(report: Replayed) -> list[tuple[str, int, int, float]]:
    """Return (technique, how many storages, their bytes, their seconds) of the decisions."""
    names = sorted({item.technique for item in report.decisions})
    chosen = [(name, [it for it in report.decisions if it.technique == name]) for name in names]
    return [
        (name, len(items), sum(it.bytes for it in items), sum(it.cost_s for it in items))
        for name, items in chosen
    ]


def facts(report: Replayed) -> list[str]:
    """Return who planned it, in what time, and what its decisions add up to."""
    plan = report.plan
    budget = "none" if plan.budget_bytes is None else show_bytes(plan.budget_bytes)
    sources = ", ".join(f"{count} {name}" for name, count in plan.seconds_sources.items())
    lines = [
        f"planner {plan.planner}, budget {budget}, planned in {show_seconds(plan.solve_s)}",
        f"time {show_seconds(plan.baseline_seconds)} -> {show_seconds(plan.seconds)}, lower bound "
        f"{show_seconds(plan.lower_bound_seconds)}, gap {plan.gap:.1%}",
    ]
    if plan.baseline_peak_bytes != report.before.peak_bytes:
        whole = show_bytes(plan.baseline_peak_bytes)
        lines.append(f"the plain step peaks at {whole}, which percent of a budget are of")
    if reserved := reserved_line(report):
        lines.append(reserved)
    if sources:
        lines.append(f"seconds of ops: {sources}")
    lines += plan.notes
    for technique, count, size, seconds in technique_totals(report):
        lines.append(f"{technique}: {count} storages, {show_bytes(size)}, {show_seconds(seconds)}")
    return lines


def reserved_line(report: Replayed) -> str:
    """Return what an allocator reserves for the plan, and whose settings; empty for none."""
    plan = report.plan
    if plan.reserved_peak_bytes is None:
        return ""
    above = plan.reserved_peak_bytes / max(plan.peak_bytes, 1) - 1
    line = f"reserved {show_bytes(plan.reserved_peak_bytes)}, {above:.0%} above the peak after"
    if plan.allocator:
        line += f", by {plan.allocator}"
    if plan.pool_bytes:
        line += f"; the step's pool begins with {show_bytes(plan.pool_bytes)}"
    return line


def owner_lines(report: Replayed, curve: Curve) -> list[str]:
    """Return the layers of a peak, and its owners by kind and by name."""

    def rows_of(head: str, owners: Iterable[tuple[str, int]]) -> list[str]:
        rows = [
            (name, show_bytes(size), f"{size / max(curve.peak_bytes, 1):.0%}")
            for name, size in owners
        ]
        return table([(head, "bytes", "share"), *rows])

    return [
        *rows_of("layer", curve.peak_layers),
        *rows_of("by kind", owner_groups(report, curve)),
        *rows_of("by name", top_owners(curve)),
    ]


def decision_lines(decisions: Sequence[Decision], rows: int) -> list[str]:
    """Return a row per decision, at most so many."""
    if not decisions:
        return ["  none: every storage is kept to its last use"]
    lines_of: list[tuple[str, ...]] = [("what", "bytes", "technique", "time", "why")]
    lines_of += [
        (it.storage, show_bytes(it.bytes), it.technique, show_seconds(it.cost_s), it.reason)
        for it in decisions[:rows]
    ]
    lines = table(lines_of)
    if hidden := decisions[rows:]:
        total = show_bytes(sum(it.bytes for it in hidden))
        lines.append(f"  and {len(hidden)} smaller ones, {total} together")
    return lines


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return rows of text in columns, two spaces apart."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
