"""Bytes as people write them: "6GiB", "6G", "500 MB", "60%", 0.6; parsed once, where they enter."""

from __future__ import annotations

import re
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
        return _small(size)
    if isinstance(size, float) and size > 1 and size.is_integer():  # 6e9
        return _small(int(size))
    # 0.6 is six tenths, and not the nearest double to it.
    text = float.__repr__(size) if isinstance(size, float) else size
    found = _TEXT.fullmatch(text) if isinstance(text, str) and len(text) <= _LONGEST else None
    if found is not None and not found[2] and "." in found[1]:
        part = Fraction(found[1])
        if whole is not None and 0 < part <= 1:
            return _small(part * whole)
        found = None
    if found is not None and found[2] == "%" and whole is not None:
        return _small(Fraction(found[1]) * whole / 100)
    if found is None or found[2].lower() not in _UNITS:
        parts = ', or a part as "60%" or 0.6' if whole is not None else ""
        raise ValueError(
            f'got size {show(size)}, expected bytes or text as "6GiB", "500 MB"{parts}.'
        )
    return _small(Fraction(found[1]) * _UNITS[found[2].lower()])


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


# Exact: as a float, 100% of something may be one byte too few.
def _small(size: int | Fraction) -> int:
    if not size < 2**63:
        raise ValueError(f"got size {show(int(size))}, expected less than 2**63 bytes.")
    return int(size)


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
