"""Bytes as people write them: "6GiB", "500 MB", "60%"; parsed once, at the door."""

from __future__ import annotations

import re
from typing import Final

_UNITS: Final = {"": 1, "b": 1} | {
    f"{letter}{middle}b": (1024 if middle else 1000) ** power
    for power, letter in enumerate("kmgt", start=1)
    for middle in ("", "i")
}
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
    >>> from sn_memory.sizes import parse_bytes
    >>> parse_bytes("1.5 KiB"), parse_bytes("50%", whole=10), parse_bytes(7)
    (1536, 5, 7)
    """
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    found = _TEXT.fullmatch(size) if isinstance(size, str) else None
    if found is not None and found[2] == "%" and whole is not None:
        return int(float(found[1]) / 100 * whole)
    if found is None or found[2].lower() not in _UNITS:
        percent = ', "60%"' if whole is not None else ""
        raise ValueError(f'got size {size!r}, expected bytes or text as "6GiB", "500 MB"{percent}.')
    return int(float(found[1]) * _UNITS[found[2].lower()])


def show_bytes(size: float) -> str:
    """Return a size for people, in binary units.

    >>> from sn_memory.sizes import show_bytes
    >>> show_bytes(1536), show_bytes(7)
    ('1.5 KiB', '7 B')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"
