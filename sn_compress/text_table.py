"""Tables as text, with columns as wide as their cells."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest


def text_table(
    head: Sequence[str],
    rows: Iterable[Sequence[str | float | None]],
    formats: Sequence[str] = (),
) -> str:
    """Return a table as text: the first column left-aligned, the others right-aligned.

    Short rows are padded with empty cells. Numbers use the format of their column, if it has one;
    None is an empty cell.

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
