"""Sizes and seconds in words: parsed once, where they enter, and shown as people write them.

Also the lines and tables of text by which plans, estimates and reports show themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Final

from .fields import show

_UNITS: Final = (
    {"": 1, "b": 1}
    | {
        f"{letter}{middle}b": (1024 if middle else 1000) ** power
        for power, letter in enumerate("kmgt", start=1)
        for middle in ("", "i")
    }
    # As memory is sold and as docker, ulimit and free have it.
    | {letter: 1024**power for power, letter in enumerate("kmgt", start=1)}
)
# Characters that a size may have; nobody writes so many.
_LONGEST: Final = 60
_TEXT: Final = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]*|%)\s*")


def parse_bytes(size: float | str, *, whole: int | None = None) -> int:
    """Return a size in bytes.

    Parameters
    ----------
    size
        Bytes as a whole number (6e9 is one), or text: a number and B, kB, MB, GB, TB (powers of
        1000), KiB, MiB, GiB, TiB or K, M, G, T (powers of 1024), or %. A fraction above 0 and up to
        1, as a float or as text with a point and no unit, is a part of `whole`, as percent are.
    whole
        What 100% is; without it, percent and fractions are refused.

    Raises
    ------
    ValueError
        For anything else; negative sizes too.

    Examples
    --------
    >>> from sn_memory.base.sizes import parse_bytes
    >>> parse_bytes("1.5 KiB"), parse_bytes("2K"), parse_bytes(7)
    (1536, 2048, 7)
    >>> parse_bytes("50%", whole=10), parse_bytes(0.5, whole=10)
    (5, 5)
    """
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return _checked(size)
    if isinstance(size, float) and size > 1 and size.is_integer():  # 6e9
        return _checked(int(size))
    # 0.6 is six tenths, and not the nearest double to it.
    text = float.__repr__(size) if isinstance(size, float) else size
    found = _TEXT.fullmatch(text) if isinstance(text, str) and len(text) <= _LONGEST else None
    if found is not None:
        number, unit = found[1], found[2].lower()
        if not unit and "." in number:
            if whole is not None and 0 < Fraction(number) <= 1:
                return _checked(Fraction(number) * whole)
        elif unit == "%":
            if whole is not None:
                return _checked(Fraction(number) * whole / 100)
        elif unit in _UNITS:
            return _checked(Fraction(number) * _UNITS[unit])
    parts = ', or a part as "60%" or 0.6' if whole is not None else ""
    raise ValueError(f'got size {show(size)}, expected bytes or text as "6GiB", "500 MB"{parts}.')


# Exact: as a float, 100% of something may be one byte too few.
def _checked(size: int | Fraction) -> int:
    if not size < 2**63:
        raise ValueError(f"got size {show(int(size))}, expected less than 2**63 bytes.")
    return int(size)


def is_part(size: float | str) -> bool:
    """Whether a size, if it is one, is a part of a whole: percent, or a fraction up to 1.

    >>> from sn_memory.base.sizes import is_part
    >>> is_part("60%"), is_part(0.6), is_part("6G"), is_part(1)
    (True, True, False, False)
    """
    try:
        parse_bytes(size)
    except ValueError:
        return True
    return False


def show_bytes(size: float) -> str:
    """Return a size for people, in binary units.

    >>> from sn_memory.base.sizes import show_bytes
    >>> show_bytes(1536), show_bytes(7)
    ('1.5 KiB', '7 B')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


def show_seconds(seconds: float) -> str:
    """Return a time for people.

    >>> show_seconds(0.0123), show_seconds(0)
    ('12.3 ms', '0 s')
    """
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.2g} us" if seconds else "0 s"


def peak_line(budget_bytes: int | None, before: int, after: int) -> str:
    """Return budget and peaks; a peak of 0 was neither predicted nor measured.

    >>> peak_line(2048, 4096, 1024)
    'budget 2 KiB, peak 4 KiB -> 1 KiB (-75 %)'
    """
    budget = "no budget" if budget_bytes is None else f"budget {show_bytes(budget_bytes)}"
    if not after:
        return f"{budget}, peak not measured"
    if not before:
        return f"{budget}, peak {show_bytes(after)}"
    cut = f"{100 * (after / before - 1):+.0f} %"
    return f"{budget}, peak {show_bytes(before)} -> {show_bytes(after)} ({cut})"


def decided_line(decisions: Iterable[tuple[str, int]], what: str) -> str:
    """Return how many things each technique has, with their bytes; `decisions` are both of each.

    >>> decided_line([("keep", 1), ("recompute", 1024), ("recompute_each", 1024)], "storages")
    'of 3 storages 2 recomputed (2 KiB), 0 offloaded, 0 compressed'
    """
    each = list(decisions)
    parts = []
    for word, kinds in (
        ("recomputed", ("recompute", "recompute_each")),
        ("offloaded", ("offload",)),
        ("compressed", ("compress",)),
    ):
        sizes = [size for technique, size in each if technique in kinds]
        parts.append(f"{len(sizes)} {word}" + (f" ({show_bytes(sum(sizes))})" if sizes else ""))
    return f"of {len(each)} {what} {', '.join(parts)}"


def seconds_line(before: float, after: float) -> str:
    """Return seconds of a step without the plan and with it.

    >>> seconds_line(0.1, 0.11)
    'a step takes 100 ms -> 110 ms (+10.0 %)'
    """
    if not before:
        return f"a step takes {show_seconds(after)}"
    extra = f"{100 * (after / before - 1):+.1f} %"
    return f"a step takes {show_seconds(before)} -> {show_seconds(after)} ({extra})"


def table(rows: Sequence[Sequence[str]], *, indent: str = "", right: bool = False) -> list[str]:
    """Return rows of text in columns; with `right`, all columns but the first end together.

    >>> table([("peak", "1 KiB"), ("input", "12 B")], right=True)
    ['peak   1 KiB', 'input   12 B']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        indent
        + "  ".join(
            cell.rjust(width) if right and at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
