"""Rows as people read them: columns as wide as what is in them, the first at the left."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest


def text_table(
    head: Sequence[str],
    rows: Iterable[Sequence[str | float | None]],
    formats: Sequence[str] = (),
) -> str:
    """Lines of a table; the first column is a name, the others are aligned at the right.

    A shorter row is filled up with nothing. Numbers are written as the format of their column says;
    None, and a format that is missing, are nothing.

    >>> print(text_table(["method", "ms", "ratio"], [["plain", "12.5", "1.0"], ["fp16", "7.0"]]))
    method    ms  ratio
    plain   12.5    1.0
    fp16     7.0
    >>> print(text_table(["method", "ms", "adds"], [["fp16", 7, -0.5]], ["", ".1f", "+.1f"]))
    method   ms  adds
    fp16    7.0  -0.5
    """
    texts = [
        [
            cell if isinstance(cell, str) else "" if cell is None else format(cell, how)
            for cell, how in zip(row, [*formats, *[""] * len(row)], strict=False)
        ]
        for row in rows
    ]
    lines = [list(head), *texts]
    widths = [max(map(len, column)) for column in zip_longest(*lines, fillvalue="")]
    return "\n".join(
        "  ".join(
            text.rjust(width) if at else text.ljust(width)
            for at, (text, width) in enumerate(zip(line, widths, strict=False))
        ).rstrip()
        for line in lines
    )
