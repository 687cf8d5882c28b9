"""The report of a plan: what it does and why, as tables, figures and a self-contained HTML page.

A plan that only says "peak 5.8 GiB" cannot be verified by its reader. The report shows memory over
time, before and after, with kernels' scratch as a separate layer; the owners of the peak; the
decision for each storage, with its reason; and a comparison with other plans in time and memory.
The plan is replayed by `check_plan` first, so that nothing rests on the planner's own claims. Text
and page show the same facts and tables.
"""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Final, NamedTuple

from ..base.sizes import show_bytes, show_seconds, table
from ..check import check_plan
from ..graph.graph import Graph
from ..plan.plan import Plan
from ..plan.policies import policy
from .figure import Replayed, figure, owner_groups, planned_curve, top_owners

# A browser can show a few thousand rows; nobody reads more.
_ROWS: Final = 2000
_OWNERS, _OWNERS_OF_PAGE = 6, 10
# Headers of columns that the page right-aligns.
_NUMBERS: Final = (
    "bytes", "share", "storages", "time", "budget", "peak", "extra time", "gap"
)  # fmt: skip
_PAGE: Final = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem;
       padding: 0 1rem; color: #1f2933; background: #fff; }}
h1 {{ font-size: 1.35rem; }} h2 {{ font-size: 1.05rem; margin-top: 2rem; }}
img {{ width: 100%; height: auto; }}
table {{ margin-bottom: 1rem; border-collapse: collapse; font-size: 0.88rem; }}
th, td {{ text-align: left; padding: 0.25rem 0.9rem 0.25rem 0; border-bottom: 1px solid #e5e8eb;
         vertical-align: top; }}
td.number, th.number {{ text-align: right; white-space: nowrap; }}
</style>
</head>
<body>
{body}
</body>
</html>
"""

Row = tuple[str, ...]


class _Section(NamedTuple):
    """A title, tables whose first rows are headers, and a line after them."""

    title: str
    tables: list[list[Row]]
    after: str = ""


class Report(Replayed):
    """The report of one plan; `str` gives the tables. See Replayed for what it holds."""

    def __str__(self) -> str:
        return self.text()

    def text(self, *, rows: int = 40) -> str:
        """Return the tables as text, with at most `rows` decisions."""
        lines = [self.headline, "", *_facts(self)]
        for section in _sections(self, rows, _OWNERS):
            lines += ["", section.title]
            lines += [line for one in section.tables for line in table(one, indent="  ")]
            lines += [f"  {section.after}"] if section.after else []
        return "\n".join(lines) + "\n"

    def write_png(self, path: str | os.PathLike[str]) -> None:
        """Draw memory over time, the peak's owners and the comparison; needs matplotlib."""
        figure(self).savefig(path, format="png", dpi=130)

    def html(self) -> str:
        """Return the page that `write_html` writes."""
        parts = [f"<h1>{escape(self.headline)}</h1>"]
        parts += [f"<p>{escape(line[:1].upper() + line[1:])}</p>" for line in _facts(self)]
        parts.append(self._repr_html_())
        for section in _sections(self, _ROWS, _OWNERS_OF_PAGE):
            parts.append(f"<h2>{escape(section.title)}</h2>")
            parts += [_html_table(rows) for rows in section.tables]
            parts += [f"<p>{escape(section.after)}</p>"] if section.after else []
        return _PAGE.format(title=escape(self.headline), body="\n".join(parts))

    def _repr_html_(self) -> str:
        """For a notebook: the figure, embedded in an element."""
        drawn = io.BytesIO()
        figure(self).savefig(drawn, format="png", dpi=150)
        source = base64.b64encode(drawn.getvalue()).decode("ascii")
        return f'<img alt="{escape(self.headline)}" src="data:image/png;base64,{source}">'

    def write_html(self, path: str | os.PathLike[str]) -> None:
        """Write one self-contained page with figures and tables. Needs matplotlib."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.html())


def report(graph: Graph, plan: Plan, *, others: Iterable[Plan] = ()) -> Report:
    """Replay a plan and report on it.

    graph, plan : what was planned, and how
    others : plans of the same graph, by other planners or for other budgets, to compare with

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
    # First, because an invalid plan has no curve.
    replay = check_plan(graph, plan)
    moved = [item for item in plan.decisions if item.technique != "keep"]
    # Names break ties, so that the same plan has the same page.
    ranked = sorted(moved, key=lambda item: (-item.bytes, item.storage))
    after = planned_curve(graph, plan, replay)
    plain = policy("liveness")(graph, budget_bytes=None)
    before = planned_curve(graph, plain, check_plan(graph, plain))
    return Report(graph, plan, tuple(others), before, after, tuple(ranked))


def _facts(report: Report) -> Iterator[str]:
    """Yield planner, planning time, and reserved memory."""
    plan = report.plan
    yield f"planner {plan.planner}, budget {_budget(plan)}, planned in {show_seconds(plan.solve_s)}"
    yield (
        f"time {show_seconds(plan.baseline_seconds)} -> {show_seconds(plan.seconds)}, lower bound "
        f"{show_seconds(plan.lower_bound_seconds)}, gap {plan.gap:.1%}"
    )
    # The plain step may hold more than its graph says: see `unplanned_bytes`.
    if plan.baseline_peak_bytes != report.before.peak_bytes:
        baseline = show_bytes(plan.baseline_peak_bytes)
        yield f"the plain step peaks at {baseline}, to which percentages of a budget refer"
    if plan.reserved_peak_bytes is not None:
        # What the allocator's segments take beyond the live tensors.
        above = plan.reserved_peak_bytes / max(plan.peak_bytes, 1) - 1
        line = f"reserved {show_bytes(plan.reserved_peak_bytes)}, {above:.0%} above the peak after"
        line += f", by {plan.allocator}" if plan.allocator else ""
        if plan.pool_bytes:
            line += f"; the step's pool begins with {show_bytes(plan.pool_bytes)}"
        yield line
    if plan.seconds_sources:
        sources = ", ".join(f"{count} {name}" for name, count in plan.seconds_sources.items())
        yield f"seconds of ops: {sources}"
    yield from plan.notes


def _budget(plan: Plan) -> str:
    return "none" if plan.budget_bytes is None else show_bytes(plan.budget_bytes)


def _sections(report: Report, rows: int, owners: int) -> Iterator[_Section]:
    """Yield the tables, with at most `rows` decisions and `owners` owners of a peak."""
    for word, curve in (("before", report.before), ("after", report.after)):
        tables: list[list[Row]] = []
        for first, sizes in (
            ("layer", curve.peak_layers),
            ("by kind", owner_groups(report, curve, owners)),
            ("by name", top_owners(curve, owners)),
        ):
            body = [
                (name, show_bytes(size), f"{size / max(curve.peak_bytes, 1):.0%}")
                for name, size in sizes
            ]
            tables.append([(first, "bytes", "share"), *body])
        title = f"peak {word}: {show_bytes(curve.peak_bytes)}, at {curve.peak_at}"
        yield _Section(title, tables)
    if not report.decisions:
        yield _Section("decisions", [], "none: every storage is kept to its last use")
    else:
        yield _decisions(report, rows)
    if report.others:
        plans = (report.plan, *report.others)
        head = ("planner", "budget", "peak", "time", "extra time", "gap")
        yield _Section("compared with other plans", [[head, *map(_compared, plans)]])


def _decisions(report: Report, rows: int) -> _Section:
    kinds: list[Row] = [("technique", "storages", "bytes", "time")]
    for technique in sorted({decision.technique for decision in report.decisions}):
        chosen = [decision for decision in report.decisions if decision.technique == technique]
        size = show_bytes(sum(decision.bytes for decision in chosen))
        cost = show_seconds(sum(decision.cost_s for decision in chosen))
        kinds.append((technique, str(len(chosen)), size, cost))
    largest: list[Row] = [("what", "bytes", "technique", "time", "why")]
    for decision in report.decisions[:rows]:
        size, cost = show_bytes(decision.bytes), show_seconds(decision.cost_s)
        largest.append((decision.storage, size, decision.technique, cost, decision.reason))
    hidden = report.decisions[rows:]
    total = show_bytes(sum(decision.bytes for decision in hidden))
    after = f"and {len(hidden)} smaller ones, {total} together" if hidden else ""
    return _Section("decisions", [kinds, largest], after)


def _compared(plan: Plan) -> Row:
    return (
        plan.planner,
        _budget(plan) if plan.budget_bytes is not None else "-",
        show_bytes(plan.peak_bytes),
        show_seconds(plan.seconds),
        f"{plan.overhead:+.1%}",
        f"{plan.gap:.1%}" if plan.lower_bound_seconds else "-",
    )


def _html_table(rows: Sequence[Row]) -> str:
    marks = [' class="number"' if name in _NUMBERS else "" for name in rows[0]]

    def line(row: Row, tag: str) -> str:
        cells = zip(marks, row, strict=True)
        return "".join(f"<{tag}{mark}>{escape(cell)}</{tag}>" for mark, cell in cells)

    body = "\n".join(f"<tr>{line(row, 'td')}</tr>" for row in rows[1:])
    return f"<table><thead><tr>{line(rows[0], 'th')}</tr></thead><tbody>\n{body}\n</tbody></table>"
