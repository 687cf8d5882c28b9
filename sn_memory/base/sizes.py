"""Bytes as people write them: "6GiB", "500 MB", "60%"; parsed once, where they come in."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

from .fields import show

_UNITS: Final = {"": 1, "b": 1} | {
    f"{letter}{middle}b": (1024 if middle else 1000) ** power
    for power, letter in enumerate("kmgt", start=1)
    for middle in ("", "i")
}
# Characters that a size may have; nobody writes so many.
_LONGEST: Final = 60
_TEXT: Final = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]*|%)\s*")


def parse_bytes(size: int | str, *, whole: int | None = None) -> int:
    """Return a size in bytes.

    Parameters
    ----------
    size
        Bytes, or text: a number and B, kB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB (powers
        of 1024), or %.
    whole
        What 100% is; without it, percent is refused.

    Raises
    ------
    ValueError
        For anything else; negative sizes too.

    Examples
    --------
    >>> from sn_memory.base.sizes import parse_bytes
    >>> parse_bytes("1.5 KiB"), parse_bytes("50%", whole=10), parse_bytes(7)
    (1536, 5, 7)
    """
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return _small(size)
    found = _TEXT.fullmatch(size) if isinstance(size, str) and len(size) <= _LONGEST else None
    if found is not None and found[2] == "%" and whole is not None:
        return _small(Fraction(found[1]) * whole / 100)
    if found is None or found[2].lower() not in _UNITS:
        percent = ', "60%"' if whole is not None else ""
        raise ValueError(
            f'got size {show(size)}, expected bytes or text as "6GiB", "500 MB"{percent}.'
        )
    return _small(Fraction(found[1]) * _UNITS[found[2].lower()])


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
