"""What a plan does and why: tables, pictures, one HTML page that needs nothing else.

A plan that only says "peak 5.8 GiB" has to be believed. The report shows what is live when, before
and after; who owns the peak; what was decided for each storage, with the reason; and where the plan
stands, in time and memory, beside others. All of it comes from a replay by `check_plan`, not from
what the planner says of itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from ..check.replay import Replay, check_plan
from ..graph.graph import Graph
from ..graph.liveness import live_bytes, peak
from ..graph.rewrite import as_run
from ..plan.plan import Plan
from .figure import figure
from .page import page, picture
from .tables import (
    SECOND,
    SMALL,
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
    graph = as_run(graph, (action.target for action in plan.actions if action.kind == "run"))
    moved = [item for item in plan.decisions if item.technique != "keep"]
    ranked = sorted(moved, key=lambda item: (-item.bytes, item.storage))
    return Report(
        graph, plan, tuple(others), _before(graph), _after(graph, plan, replay), tuple(ranked)
    )


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
    if not plan.actions:
        nothing = np.array([float(graph.base_bytes)])
        owners = (("resident", graph.base_bytes),) if graph.base_bytes else ()
        return _curve(np.zeros(1), nothing, 0.0, "no action", owners)
    # Copies start on their own lanes, perhaps late; memory changes in the order of the actions.
    moment = np.maximum.accumulate(np.where(_on_compute(plan), replay.start_s, 0.0))
    action = plan.actions[replay.peak_action]
    return _curve(
        np.append(moment, replay.seconds),
        np.append(replay.live_bytes, replay.live_bytes[-1]).astype(float),
        float(moment[replay.peak_action]),
        f"{action.kind} {action.target}",
        _owners_at(graph, plan, replay),
    )


def _on_compute(plan: Plan) -> npt.NDArray[np.bool_]:
    return np.array([action.kind not in ("offload", "prefetch") for action in plan.actions])


def _owners_at(graph: Graph, plan: Plan, replay: Replay) -> tuple[tuple[str, int], ...]:
    """Who is on the device at the peak: a walk over the actions that lead there."""
    sizes = {it.name: int(graph.arrays.bytes[at]) for at, it in enumerate(graph.storages)}
    name = {alias: graph.storages[at].name for alias, at in graph.storage_index.items()}
    there: dict[str, int] = {}
    for action in plan.actions[: replay.peak_action]:
        if action.kind == "run":
            for output in graph.ops[graph.op_index[action.target]].outputs:
                there[name[output]] = sizes[name[output]]
        elif action.kind in ("free", "compress", "decompress"):
            there.pop(name[action.target], None)
            there.pop(_compressed(name[action.target]), None)
        _arrive(graph, there, action.kind, name.get(action.target, ""), sizes)
    last = plan.actions[replay.peak_action]
    held = dict(there)
    if last.kind == "run":
        for output in graph.ops[graph.op_index[last.target]].outputs:
            label = name[output] if name[output] not in held else f"{name[output]}{SECOND}"
            held[label] = sizes[name[output]]
    else:
        _arrive(graph, held, last.kind, name[last.target], sizes)
    held["resident"] = graph.base_bytes
    # What is left has no storage: the workspace of the op.
    held["workspace"] = replay.peak_bytes - sum(held.values())
    return tuple(sorted(((k, v) for k, v in held.items() if v), key=lambda it: (-it[1], it[0])))


def _compressed(storage: str) -> str:
    return f"{storage}{SMALL}"


def _arrive(
    graph: Graph, there: dict[str, int], kind: str, storage: str, sizes: dict[str, int]
) -> None:
    if kind in ("prefetch", "decompress"):
        there[storage] = sizes[storage]
    if kind == "compress":
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
