"""What a plan does and why: tables, pictures, one HTML page that needs nothing else.

A plan that only says "peak 5.8 GiB" has to be believed. The report shows what is live when, before
and after; who owns the peak; what was decided for each storage, with the reason; and where the plan
stands, in time and memory, beside others. All of it comes from a replay by `check_plan`, not from
what the planner says of itself.
Longer than most files: all tables are views of the one record that is made here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from .check import Replay, check_plan
from .graph import Graph
from .liveness import live_bytes, peak
from .plan import Decision, Plan
from .sizes import show_bytes

# Columns of pixels in a picture are fewer; a longer curve is drawn by the largest of each interval.
_POINTS: Final = 2000
_OWNERS: Final = 6
_SECOND: Final = " (second copy)"
_SMALL: Final = " (compressed)"

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """Live bytes over time, and who owns the largest value.

    Parameters
    ----------
    time_s, bytes
        [points] each; between two times the bytes are those of the earlier one.
    peak_s, peak_bytes, peak_at
        When the peak is reached, what it is, and the op or step that reaches it.
    owners
        (name, bytes) at the peak, largest first; they sum to the peak.
    """

    time_s: Floats
    bytes: Floats
    peak_s: float
    peak_bytes: int
    peak_at: str
    owners: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Report:
    """The report of one plan; `str` gives the tables.

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

    def __str__(self) -> str:
        return self.text()

    @property
    def headline(self) -> str:
        """The message in one line."""
        cut = 1 - self.after.peak_bytes / self.before.peak_bytes if self.before.peak_bytes else 0.0
        name = self.graph.name or "graph"
        return (
            f"{name}: {show_bytes(self.before.peak_bytes)} → {show_bytes(self.after.peak_bytes)} "
            f"({cut:.0%} less memory) for {self.plan.overhead:+.1%} time"
        )

    def text(self, *, rows: int = 40) -> str:
        """Return the tables as text, with at most `rows` decisions."""
        lines = [self.headline, "", *_facts(self), ""]
        for word, curve in (("before", self.before), ("after", self.after)):
            lines += [f"peak {word}, at {curve.peak_at}", *_owner_lines(self, curve), ""]
        lines += ["decisions", *_decision_lines(self.decisions, rows)]
        if self.others:
            lines += ["", "beside other plans", *_table(comparison(self))]
        return "\n".join(lines) + "\n"

    def write_png(self, path: str | os.PathLike[str]) -> None:
        """Draw memory over time, the peak's owners and the comparison; needs matplotlib."""
        from .report_figure import figure

        figure(self).savefig(path, format="png", dpi=130)

    def write_html(self, path: str | os.PathLike[str]) -> None:
        """Write one page with pictures and tables; it loads nothing. Needs matplotlib."""
        from .report_html import page

        with open(path, "w", encoding="utf-8") as file:
            file.write(page(self))


def report(graph: Graph, plan: Plan, *, others: Iterable[Plan] = ()) -> Report:
    """Replay a plan and report on it.

    Parameters
    ----------
    graph, plan
        What was planned, and how.
    others
        Plans of the same graph, by other planners or for other budgets, to compare with.

    Raises
    ------
    PlanError
        The plan cannot be carried out on the graph; see `check_plan`.

    Examples
    --------
    >>> from sn_memory import Graph, Op, Storage
    >>> from sn_memory.policies import policy
    >>> graph = Graph(
    ...     [Storage("x", 8, "input"), Storage("h", 4), Storage("y", 2, keep=True)],
    ...     [Op("f", ("x",), ("h",), seconds=1.0), Op("g", ("h",), ("y",), seconds=1.0)],
    ...     name="two ops",
    ... )
    >>> print(report(graph, policy("liveness")(graph, budget_bytes=None)).headline)
    two ops: 14 B → 14 B (0% less memory) for +0.0% time
    """
    replay = check_plan(graph, plan)
    graph = graph.as_run(step.target for step in plan.steps if step.action == "run")
    moved = [item for item in plan.decisions if item.action != "keep"]
    ranked = sorted(moved, key=lambda item: (-item.bytes, item.storage))
    return Report(
        graph, plan, tuple(others), _before(graph), _after(graph, plan, replay), tuple(ranked)
    )


def comparison(report: Report) -> list[tuple[str, ...]]:
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


def show_seconds(seconds: float) -> str:
    """Return a time for people.

    >>> show_seconds(0.0123), show_seconds(0)
    ('12.3 ms', '0 s')
    """
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.2g} us" if seconds else "0 s"


def top_owners(curve: Curve, most: int = _OWNERS) -> list[tuple[str, int]]:
    """Return the largest owners of a peak, the rest summed up in a last entry."""
    shown = list(curve.owners[:most])
    rest = curve.owners[most:]
    if len(rest) == 1:
        return [*shown, rest[0]]
    return [*shown, (f"{len(rest)} others", sum(size for _, size in rest))] if rest else shown


def owner_groups(report: Report, curve: Curve, most: int = _OWNERS) -> list[tuple[str, int]]:
    """Return the peak's owners summed by what they are: conv2d outputs, gradients, workspace ..."""
    graph = report.graph
    sums: dict[str, tuple[int, int]] = {}
    for name, size in curve.owners:
        at = graph.storage_index.get(name.removesuffix(_SECOND).removesuffix(_SMALL))
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


def action_totals(report: Report) -> list[tuple[str, int, int, float]]:
    """Return (action, how many storages, their bytes, their seconds) of the decisions."""
    names = sorted({item.action for item in report.decisions})
    chosen = [(name, [it for it in report.decisions if it.action == name]) for name in names]
    return [
        (name, len(items), sum(it.bytes for it in items), sum(it.cost_s for it in items))
        for name, items in chosen
    ]


def _before(graph: Graph) -> Curve:
    top = peak(graph)
    seconds = np.array([ways[0] for ways in graph.arrays.seconds], float)
    start = np.cumsum(seconds) - seconds
    live = live_bytes(graph).astype(float)
    at = graph.ops[top.op].name if graph.ops else "no op"
    return _curve(
        np.append(start, seconds.sum()),
        np.append(live, live[-1:]) if len(live) else np.array([float(graph.base_bytes)]),
        float(start[top.op]) if len(start) else 0.0,
        at,
        top.owners,
    )


def _after(graph: Graph, plan: Plan, replay: Replay) -> Curve:
    if not plan.steps:
        nothing = np.array([float(graph.base_bytes)])
        owners = (("resident", graph.base_bytes),) if graph.base_bytes else ()
        return _curve(np.zeros(1), nothing, 0.0, "no step", owners)
    # Copies start on their own lanes, perhaps late; memory changes in the order of the steps.
    moment = np.maximum.accumulate(np.where(_on_compute(plan), replay.start_s, 0.0))
    step = plan.steps[replay.peak_step]
    return _curve(
        np.append(moment, replay.seconds),
        np.append(replay.live_bytes, replay.live_bytes[-1]).astype(float),
        float(moment[replay.peak_step]),
        f"{step.action} {step.target}",
        _owners_at(graph, plan, replay),
    )


def _on_compute(plan: Plan) -> npt.NDArray[np.bool_]:
    return np.array([step.action not in ("offload", "prefetch") for step in plan.steps])


def _owners_at(graph: Graph, plan: Plan, replay: Replay) -> tuple[tuple[str, int], ...]:
    """Who is on the device at the peak: a walk over the steps that lead there."""
    sizes = {it.name: int(graph.arrays.bytes[at]) for at, it in enumerate(graph.storages)}
    name = {alias: graph.storages[at].name for alias, at in graph.storage_index.items()}
    there: dict[str, int] = {}
    for step in plan.steps[: replay.peak_step]:
        if step.action == "run":
            for output in graph.ops[graph.op_index[step.target]].outputs:
                there[name[output]] = sizes[name[output]]
        elif step.action in ("free", "compress", "decompress"):
            there.pop(name[step.target], None)
            there.pop(_compressed(name[step.target]), None)
        _arrive(graph, there, step.action, name.get(step.target, ""), sizes)
    last = plan.steps[replay.peak_step]
    held = dict(there)
    if last.action == "run":
        for output in graph.ops[graph.op_index[last.target]].outputs:
            label = name[output] if name[output] not in held else f"{name[output]}{_SECOND}"
            held[label] = sizes[name[output]]
    else:
        _arrive(graph, held, last.action, name[last.target], sizes)
    held["resident"] = graph.base_bytes
    # What is left has no storage: the workspace of the op.
    held["workspace"] = replay.peak_bytes - sum(held.values())
    return tuple(sorted(((k, v) for k, v in held.items() if v), key=lambda it: (-it[1], it[0])))


def _compressed(storage: str) -> str:
    return f"{storage}{_SMALL}"


def _arrive(
    graph: Graph, there: dict[str, int], action: str, storage: str, sizes: dict[str, int]
) -> None:
    if action in ("prefetch", "decompress"):
        there[storage] = sizes[storage]
    if action == "compress":
        small = graph.storages[graph.storage_index[storage]].compressed
        there[_compressed(storage)] = small.bytes if small else 0


def _curve(
    time_s: Floats,
    size: Floats,
    peak_s: float,
    peak_at: str,
    owners: Sequence[tuple[str, int]],
) -> Curve:
    top = int(size.max())
    if len(time_s) > _POINTS:
        starts = np.unique(np.linspace(0, len(time_s) - 1, _POINTS).astype(int))
        time_s, size = time_s[starts], np.maximum.reduceat(size, starts)
    return Curve(time_s, size, peak_s, top, peak_at, tuple(owners))


def _facts(report: Report) -> list[str]:
    plan = report.plan
    budget = "none" if plan.budget_bytes is None else show_bytes(plan.budget_bytes)
    sources = ", ".join(f"{count} {name}" for name, count in plan.seconds_sources.items())
    lines = [
        f"planner {plan.planner}, budget {budget}, planned in {show_seconds(plan.solve_s)}",
        f"time {show_seconds(plan.baseline_seconds)} -> {show_seconds(plan.seconds)}, lower bound "
        f"{show_seconds(plan.lower_bound_seconds)}, gap {plan.gap:.1%}",
    ]
    if sources:
        lines.append(f"seconds of ops: {sources}")
    for action, count, size, seconds in action_totals(report):
        lines.append(f"{action}: {count} storages, {show_bytes(size)}, {show_seconds(seconds)}")
    return lines


def _owner_lines(report: Report, curve: Curve) -> list[str]:
    def table(head: str, owners: Iterable[tuple[str, int]]) -> list[str]:
        rows = [
            (name, show_bytes(size), f"{size / max(curve.peak_bytes, 1):.0%}")
            for name, size in owners
        ]
        return _table([(head, "bytes", "share"), *rows])

    return table("by kind", owner_groups(report, curve)) + table("by name", top_owners(curve))


def _decision_lines(decisions: Sequence[Decision], rows: int) -> list[str]:
    if not decisions:
        return ["  none: every storage is kept to its last use"]
    table: list[tuple[str, ...]] = [("what", "bytes", "action", "time", "why")]
    table += [
        (it.storage, show_bytes(it.bytes), it.action, show_seconds(it.cost_s), it.reason)
        for it in decisions[:rows]
    ]
    lines = _table(table)
    if hidden := decisions[rows:]:
        total = show_bytes(sum(it.bytes for it in hidden))
        lines.append(f"  and {len(hidden)} smaller ones, {total} together")
    return lines


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
