"""The page of a report: one HTML file with its picture inside, readable without a network."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

from ..base.lines import show_seconds
from ..base.sizes import show_bytes
from .figure import figure
from .tables import (
    Replayed,
    comparison,
    owner_groups,
    reserved_line,
    technique_totals,
    top_owners,
)

# A browser draws a few thousand rows; nobody reads more.
_ROWS: Final = 2000
_NUMBER: Final = ' class="number"'

_STYLE: Final = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem;
       color: #1f2933; background: #fff; }
h1 { font-size: 1.35rem; } h2 { font-size: 1.05rem; margin-top: 2rem; }
img { width: 100%; height: auto; }
table { margin-bottom: 1rem; border-collapse: collapse; font-size: 0.88rem; }
th, td { text-align: left; padding: 0.25rem 0.9rem 0.25rem 0; border-bottom: 1px solid #e5e8eb;
         vertical-align: top; }
td.number, th.number { text-align: right; white-space: nowrap; }
.pair { display: flex; flex-wrap: wrap; gap: 3rem; }
"""


def page(report: Replayed) -> str:
    """Return the page; raises MissingExtra without matplotlib."""
    plan = report.plan
    budget = "no budget" if plan.budget_bytes is None else f"budget {show_bytes(plan.budget_bytes)}"
    facts = (
        f"Planner {plan.planner}, {budget}. Time {show_seconds(plan.baseline_seconds)} → "
        f"{show_seconds(plan.seconds)}; no plan within the budget is faster than "
        f"{show_seconds(plan.lower_bound_seconds)} (gap {plan.gap:.1%}). "
        f"Planned in {show_seconds(plan.solve_s)}."
    )
    if reserved := reserved_line(report):
        facts += f" {reserved[0].upper()}{reserved[1:]}."
    parts = [
        f"<h1>{escape(report.headline)}</h1>",
        f"<p>{escape(facts)}</p>",
        *(f"<p>{escape(note)}</p>" for note in plan.notes),
        picture(report),
        '<div class="pair">',
        *(_owners(report, word) for word in ("before", "after")),
        "</div>",
    ]
    if report.decisions:
        totals = [
            (technique, str(count), show_bytes(size), show_seconds(seconds))
            for technique, count, size, seconds in technique_totals(report)
        ]
        parts += [
            "<h2>Decisions by technique</h2>",
            _table(("technique", "storages", "bytes", "time"), totals, numbers=(1, 2, 3)),
        ]
    if report.others:
        head, *rows = comparison(report)
        parts += ["<h2>Beside other plans</h2>", _table(head, rows, numbers=(1, 2, 3, 4, 5))]
    parts += ["<h2>Decisions</h2>", _decisions(report)]
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{escape(report.headline)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def picture(report: Replayed) -> str:
    """Return the picture as an element of HTML that holds it; raises MissingExtra."""
    drawn = io.BytesIO()
    figure(report).savefig(drawn, format="png", dpi=150)
    source = base64.b64encode(drawn.getvalue()).decode("ascii")
    return f'<img alt="{escape(report.headline)}" src="data:image/png;base64,{source}">'


def _owners(report: Replayed, word: str) -> str:
    curve = report.before if word == "before" else report.after
    layers, kinds, names = (
        [
            (name, show_bytes(size), f"{size / max(curve.peak_bytes, 1):.0%}")
            for name, size in owners
        ]
        for owners in (curve.peak_layers, owner_groups(report, curve, 10), top_owners(curve, 10))
    )
    title = f"Peak {word}: {show_bytes(curve.peak_bytes)} at {curve.peak_at}"
    tables = "".join(
        _table((head, "bytes", "share"), rows, numbers=(1, 2))
        for head, rows in (("layer", layers), ("by kind", kinds), ("by name", names))
    )
    return f"<div><h2>{escape(title)}</h2>{tables}</div>"


def _decisions(report: Replayed) -> str:
    if not report.decisions:
        return "<p>None: every storage is kept to its last use.</p>"
    rows = [
        (it.storage, show_bytes(it.bytes), it.technique, show_seconds(it.cost_s), it.reason)
        for it in report.decisions[:_ROWS]
    ]
    table = _table(("what", "bytes", "technique", "time", "why"), rows, numbers=(1, 3))
    hidden = report.decisions[_ROWS:]
    more = show_bytes(sum(it.bytes for it in hidden))
    return table + (f"<p>And {len(hidden)} smaller ones, {more} together.</p>" if hidden else "")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{_NUMBER if at in numbers else ''}>{escape(cell)}</{tag}>"
            for at, cell in enumerate(cells)
        )

    body = "\n".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f"<table><thead><tr>{line(head, 'th')}</tr></thead><tbody>\n{body}\n</tbody></table>"
