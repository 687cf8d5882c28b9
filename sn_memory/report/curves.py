"""What a report is made of: memory over time before and after a plan, and who owns the peaks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ..base.sizes import show_bytes
from ..check.replay import Replay
from ..graph.graph import Graph
from ..graph.liveness import lifetimes
from ..graph.rewrite import SMALL
from ..plan.buffers import plan_buffers
from ..plan.plan import Decision, Plan

# Memory by what it is for, bottom first: what is resident, what a step makes, what kernels take.
LAYERS: Final = ("weights, inputs, state", "activations", "gradients", "scratch")
# Columns of pixels in a picture are fewer; a longer curve is drawn by the largest of each interval.
_POINTS: Final = 2000
# What plan_buffers names scratch, and the second copy of a storage.
_SCRATCH: Final = "workspace of "
_SECOND: Final = " (second copy)"

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


def top_owners(curve: Curve, most: int) -> list[tuple[str, int]]:
    """Return the largest owners of a peak, the rest summed up in a last entry."""
    rest = curve.owners[most:]
    if len(rest) < 2:
        return list(curve.owners)
    return [*curve.owners[:most], (f"{len(rest)} others", sum(size for _, size in rest))]


def owner_groups(report: Replayed, curve: Curve, most: int = 6) -> list[tuple[str, int]]:
    """Return the peak's owners summed by what they are: conv2d outputs, gradients, scratch ..."""
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
    # What rounds to 0 % is not worth a line of its own.
    shown = [row for row in rows[:most] if row[1] >= curve.peak_bytes / 200]
    rest = sum(total for _, total in rows[len(shown) :])
    return [*shown, ("all other", rest)] if rest else shown


def _counted(count: int, group: str) -> str:
    if not group.endswith(("outputs", "gradients")):
        return group
    return f"{count} {group}" if count > 1 else f"1 {group.removesuffix('s')}"


def unplanned_curve(graph: Graph) -> Curve:
    """Return the memory of the ops as they stand, each run once."""
    spans, arrays = lifetimes(graph), graph.arrays
    names = [storage.name for storage in graph.storages]
    ends = np.maximum(spans.end, 1)
    rows = list(zip(names, spans.start, ends, arrays.bytes.tolist(), strict=True))
    rows += [
        (f"{_SCRATCH}{op.name}", at, at + 1, arrays.workspace_bytes[at][0])
        for at, op in enumerate(graph.ops)
    ]
    seconds = np.array([ways[0] for ways in arrays.seconds], float)
    start = np.cumsum(seconds) - seconds
    ops = [op.name for op in graph.ops] or ["no op"]
    return _curve(graph, rows, np.append(start, seconds.sum()), ops)


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
    """Return the storage that a buffer of this name is of; None for scratch and residents."""
    return graph.storage_index.get(name.removesuffix(_SECOND).removesuffix(SMALL))


def _layer(graph: Graph, name: str) -> int:
    """Return which of LAYERS a buffer of this name is part of."""
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
    """Stack what is there during each action.

    rows : (name, lower, upper, bytes), half-open in numbers of actions
    time_s, names : when each action starts, and the last ends; what each is
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
        if lower <= top < upper and _layer(graph, name)
    ]
    ranked = sorted((row for row in owners if row[1]), key=lambda row: (-row[1], row[0]))
    # After the last action nothing changes. Where there is none, the step is one moment.
    layers = np.append(layers, layers[:, -1:], axis=1)
    time_s = np.append(np.zeros(len(names) + 1 - len(time_s)), time_s)
    total, peak_s = layers.sum(0), float(time_s[top])
    if len(time_s) > _POINTS:
        starts = np.unique(np.linspace(0, len(time_s) - 1, _POINTS).astype(int))
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
