"""What a plan does and why: tables, pictures, one HTML page that needs nothing else.

A plan that only says "peak 5.8 GiB" has to be believed. The report shows what is there when, before
and after, kernels' scratch as a layer of its own; who owns the peak; what was decided for each
storage, with the reason; and where the plan stands, in time and memory, beside others. The plan is
replayed by `check_plan` first, so that nothing here is only what the planner says of itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from ..check.replay import Replay, check_plan
from ..graph.graph import Graph
from ..graph.liveness import lifetimes
from ..plan.buffers import plan_buffers
from ..plan.plan import Plan
from .figure import figure
from .page import page, picture
from .tables import (
    LAYERS,
    SECOND,
    Curve,
    Floats,
    Replayed,
    comparison,
    decision_lines,
    facts,
    owner_lines,
    table,
)

# Columns of pixels in a picture are fewer; a longer curve is drawn by the largest of each interval.
_POINTS: Final = 2000
# What plan_buffers names scratch.
_SCRATCH: Final = "workspace of "


class Report(Replayed):
    """The report of one plan; `str` gives the tables. See Replayed for what it holds."""

    def __str__(self) -> str:
        return self.text()

    def text(self, *, rows: int = 40) -> str:
        """Return the tables as text, with at most `rows` decisions."""
        lines = [self.headline, "", *facts(self), ""]
        for word, curve in (("before", self.before), ("after", self.after)):
            lines += [f"peak {word}, at {curve.peak_at}", *owner_lines(self, curve), ""]
        lines += ["decisions", *decision_lines(self.decisions, rows)]
        if self.others:
            lines += ["", "beside other plans", *table(comparison(self))]
        return "\n".join(lines) + "\n"

    def write_png(self, path: str | os.PathLike[str]) -> None:
        """Draw memory over time, the peak's owners and the comparison; needs matplotlib."""
        figure(self).savefig(path, format="png", dpi=130)

    def html(self) -> str:
        """Return what `write_html` writes."""
        return page(self)

    def _repr_html_(self) -> str:
        """What a notebook shows: the picture."""
        return picture(self)

    def write_html(self, path: str | os.PathLike[str]) -> None:
        """Write one page with pictures and tables; it loads nothing. Needs matplotlib."""
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
    >>> from sn_memory.plan.policies import policy
    >>> graph = Graph(
    ...     [Storage("x", 8, "input"), Storage("h", 4), Storage("y", 2, keep=True)],
    ...     [Op("f", ("x",), ("h",), seconds=1.0), Op("g", ("h",), ("y",), seconds=1.0)],
    ...     name="two ops",
    ... )
    >>> print(report(graph, policy("liveness")(graph, budget_bytes=None)).headline)
    two ops: 14 B → 14 B (0% less memory) for +0.0% time
    """
    replay = check_plan(graph, plan)
    moved = [item for item in plan.decisions if item.technique != "keep"]
    ranked = sorted(moved, key=lambda item: (-item.bytes, item.storage))
    return Report(
        graph, plan, tuple(others), _before(graph), _after(graph, plan, replay), tuple(ranked)
    )


def _before(graph: Graph) -> Curve:
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


def _after(graph: Graph, plan: Plan, replay: Replay) -> Curve:
    stays = plan_buffers(graph, plan)
    rows = [(name, *row) for name, row in zip(stays.names, stays.buffers, strict=True)]
    # Copies start on their own lanes, perhaps late; memory changes in the order of the actions.
    moment = np.maximum.accumulate(np.where(_on_compute(plan), replay.start_s, 0.0))
    names = [f"{action.kind} {action.target}" for action in plan.actions] or ["no action"]
    return _curve(graph, rows, np.append(moment, replay.seconds), names)


def _on_compute(plan: Plan) -> npt.NDArray[np.bool_]:
    return np.array([action.kind not in ("offload", "prefetch") for action in plan.actions])


def _layer(graph: Graph, name: str) -> int:
    """Return which of LAYERS a buffer of this name is part of."""
    at = graph.storage_index.get(name.removesuffix(SECOND))
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
    # After the last action nothing changes.
    layers = np.append(layers, layers[:, -1:], axis=1)[:, : len(time_s)]
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
