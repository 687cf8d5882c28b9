"""Tables of the benchmarks' rows: Markdown and its place in a page, aligned text for a terminal.

tabulate draws them. It is imported where a table is made: a machine that only measures, as those
of gpu/ do, may be without it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def markdown(head: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """A Markdown table, its cells as they are given: no column is filled up."""
    from tabulate import DataRow, TableFormat, tabulate

    row = DataRow("|", "|", "|")
    bare = TableFormat(
        lineabove=None,
        linebelowheader=lambda widths, _: f"| {' | '.join(['---'] * len(widths))} |",
        linebetweenrows=None,
        linebelow=None,
        headerrow=row,
        datarow=row,
        padding=1,
        with_header_hide=None,
    )
    cells = [list(line) for line in lines]
    table: str = tabulate(cells, list(head), bare, disable_numparse=True, stralign=None)
    return table


def between_markers(text: str, name: str, new: str) -> str:
    """A page with what stands between the two markers of that name replaced.

    Raises ValueError where it lacks one.
    """
    start, end = f"<!-- {name}:start -->", f"<!-- {name}:end -->"
    before, has_start, rest = text.partition(start)
    _, has_end, after = rest.partition(end)
    if not (has_start and has_end):
        raise ValueError(f"{start} or {end} is missing; put both where the tables belong")
    return f"{before}{start}\n{new}\n{end}{after}"


def put_into(page: Path, name: str, new: str) -> None:
    """Replace what stands between the two markers of that name in a page."""
    try:
        text = between_markers(page.read_text(encoding="utf-8"), name, new)
    except ValueError as error:
        raise SystemExit(f"{page}: {error}") from None
    page.write_text(text, encoding="utf-8")


def columns(head: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """Lines for a terminal: the first column is a name, the others are aligned at the right."""
    from tabulate import tabulate

    heads = list(head)
    sides = ["left", *["right"] * (len(heads) - 1)]
    cells = [list(line) for line in lines]
    table: str = tabulate(cells, heads, "plain", disable_numparse=True, colalign=sides)
    return table
