"""External input (sizes as text, checked numbers, JSON read field by field) and text output.

Sizes are summed in 64-bit integers and seconds in doubles, and neither reports an overflow: four
storages of 2**63 - 1 bytes wrap around to -4, twice 1e308 seconds are infinite, and then every
bound holds. So everything that a plan could ever sum is summed once, exactly, when a graph is made
(`graph/graph.py`).

`json` reports the line of text that is not JSON. For JSON with wrong contents we report the path of
the key (`ops[12].inputs[0]`), because that is what the author of the file has to look for.

Also formats the lines and tables of plans, estimates and reports.
"""

from __future__ import annotations

import json
import math
import operator
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING
from fractions import Fraction
from numbers import Real
from pathlib import Path
from typing import Any, Final

# A plan's live bytes are at most twice the sum of all sizes (an op may produce everything a second
# time), which is below 2**63.
LARGEST: Final = 2**62
LARGEST_FLOAT: Final = sys.float_info.max
# A plan may recompute ops. With this bound on running all ops once, 10**289 reruns would overflow.
LONGEST_S: Final = float(LARGEST)


def is_count(value: Any) -> bool:
    """Whether this is a whole number from 0 to LARGEST."""
    if isinstance(value, bool):
        return False
    try:
        return 0 <= operator.index(value) <= LARGEST
    except TypeError:
        return False


def is_amount(value: Any) -> bool:
    """Whether this is a number from 0 to the largest finite one; false for NaN."""
    try:
        return isinstance(value, Real) and 0.0 <= float(value) < math.inf
    except OverflowError:
        return False


def load(source: str | os.PathLike[str], error: type[ValueError], what: str) -> Any:
    """Parse JSON from a path, or from text that starts with a brace.

    Raises `error` if the text is not JSON (with line and column where known) or has a key twice,
    and OSError if the file cannot be read.
    """
    text, origin = str(source), "the text"

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        record = dict(pairs)
        if len(record) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for at, key in enumerate(keys) if key in keys[:at])
            raise error(f"{what}: {origin} has the key {show(twice)} twice in one object.")
        return record

    try:
        if not text.lstrip().startswith("{"):
            origin = show(text)
            text = Path(source).read_text(encoding="utf-8")
        return json.loads(text, object_pairs_hook=unique)
    except UnicodeDecodeError as problem:
        why = f"is not text in UTF-8: {problem.reason} at byte {problem.start}"
    except json.JSONDecodeError as problem:
        why = f"is not JSON: {problem.msg} at line {problem.lineno}, column {problem.colno}"
    except RecursionError:
        why = "is nested too deeply to be read"
    except error:
        raise
    except ValueError as problem:
        why = f"cannot be read: {problem}"
    raise error(
        f"{what}: {origin} {why}. Expected one JSON object with lists of records; see "
        "docs/graph_format.md."
    )


def write_records(
    head: Mapping[str, Any],
    lists: Mapping[str, Iterable[Any]],
    path: str | os.PathLike[str] | None,
) -> str:
    """Return JSON text with one record per line, so that files can be compared by line.

    head, lists : its keys in this order: single values, and lists of records
    path : file to write to as well, if given
    """
    parts = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    for key, records in lists.items():
        body = ",\n".join(map(json.dumps, records))
        parts.append(f'"{key}": [\n{body}\n]' if body else f'"{key}": []')
    text = "{\n" + ",\n".join(parts) + "\n}\n"
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text


class Fields:
    """One JSON object being read: each getter checks the type; `done` rejects unknown keys.

    value : the JSON value; anything but an object raises
    path : its path in the file, for messages
    error : the exception to raise: GraphError or PlanError
    """

    def __init__(self, value: object, path: str, error: type[ValueError]) -> None:
        self.path, self.error = path, error
        if not isinstance(value, dict):
            raise error(f"{path}: got {show(value)}, expected an object {{...}}.")
        self._left: dict[str, Any] = dict(value)

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys not read yet, for objects whose keys are names."""
        return tuple(self._left)

    def _take(self, key: str, default: object, valid: Callable[[Any], bool], expected: str) -> Any:
        """Return a valid value, or the default if the key is missing or null."""
        value = self._left.pop(key, None)
        if value is None and default is not MISSING:
            return default
        if value is None:
            raise self.error(f"{self.path}: the key {key!r} is missing; add it.")
        if not valid(value):
            raise self.fail(key, value, expected)
        return value

    def fail(self, key: str, value: object, expected: str) -> ValueError:
        """Return the error to raise for an invalid value."""
        return self.error(f"{self.path}.{key}: got {show(value)}, expected {expected}.")

    def text(self, key: str, default: object = MISSING) -> Any:
        return self._take(key, default, is_text, "a string")

    def integer(self, key: str, default: object = MISSING) -> Any:
        # The type itself, as True is an instance of int.
        value = self._take(key, default, lambda value: type(value) is int, "a whole number")
        if value is not default and abs(value) > LARGEST:
            raise self.fail(key, value, "a whole number of 2**62 at most")
        return value

    def number(self, key: str, default: object = MISSING) -> Any:
        value = self._take(key, default, lambda value: type(value) in (int, float), "a number")
        if value is default:
            return value
        # Python's JSON reads `NaN` and `Infinity`, and whole numbers beyond any float.
        if not abs(value) <= LARGEST_FLOAT:
            raise self.fail(key, value, "a finite number")
        return float(value)

    def flag(self, key: str, default: object = False) -> bool:
        is_flag = self._take(key, default, lambda value: isinstance(value, bool), "true or false")
        return bool(is_flag)

    def items(self, key: str, default: object = MISSING) -> list[Any]:
        return list(self._take(key, default, lambda value: isinstance(value, list), "a list [...]"))

    def names(self, key: str, default: object = ()) -> tuple[str, ...]:
        value = self.items(key, default)
        for index, name in enumerate(value):
            if not is_text(name):
                raise self.fail(f"{key}[{index}]", name, "a string")
        return tuple(value)

    def mapping(self, key: str) -> Mapping[str, Any]:
        value = self._take(key, {}, lambda value: isinstance(value, dict), "an object {...}")
        # JSON keys are strings, but some cannot be written to a file: see `is_text`.
        for name in value:
            if not is_text(name):
                raise self.fail(key, name, "keys that are strings")
        return dict(value)

    def child(self, key: str) -> Fields | None:
        value = self._take(key, None, lambda value: True, "")
        return None if value is None else Fields(value, f"{self.path}.{key}", self.error)

    def done(self) -> None:
        """Raise if a key was not read: it is a typo or belongs to a newer format."""
        if self._left:
            key = next(iter(self._left))
            raise self.error(
                f"{self.path}: unknown key {key[:60]!r}. Remove it, or see "
                "docs/graph_format.md for the known keys."
            )


def is_text(value: object) -> bool:
    """Whether this is a string that can be written to a file, i.e. has no lone surrogates.

    JSON may contain one as an escape, and printing the name would fail much later.
    """
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def show(value: object) -> str:
    """Return any value as JSON, cut to sixty characters, for a message."""
    try:
        text = json.dumps(value, default=str)
    except (RecursionError, ValueError):
        text = f"a {type(value).__name__} too deep or too large to show"
    return text if len(text) <= 60 else text[:57] + "..."


_UNITS: Final = (
    {"": 1, "b": 1}
    | {
        f"{letter}{middle}b": (1024 if middle else 1000) ** power
        for power, letter in enumerate("kmgt", start=1)
        for middle in ("", "i")
    }
    # As memory is sold, and as in docker, ulimit and free.
    | {letter: 1024**power for power, letter in enumerate("kmgt", start=1)}
)
# The most characters of a size: longer text is not matched against the pattern.
_LONGEST: Final = 60
_TEXT: Final = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]*|%)\s*")


def parse_bytes(size: float | str, *, whole: int | None = None) -> int:
    """Return a size in bytes.

    size : bytes as a whole number (6e9 is one), or text: a number and B, kB, MB, GB, TB (powers of
        1000), KiB, MiB, GiB, TiB or K, M, G, T (powers of 1024), or %. A fraction above 0 and up to
        1, as a float or as text with a point and no unit, is a share of `whole`, like a percentage.
    whole : what 100% is; without it, percentages and fractions are refused.

    Raises ValueError for anything else, including negative sizes.

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
    # 0.6 means six tenths exactly, not the nearest double.
    text = float.__repr__(size) if isinstance(size, float) else size
    match_ = _TEXT.fullmatch(text) if isinstance(text, str) and len(text) <= _LONGEST else None
    if match_ is not None:
        number, unit = match_[1], match_[2].lower()
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
    """Whether a valid size is a share of a whole: a percentage, or a fraction up to 1.

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
    """Return a line with budget and peaks; a peak of 0 means neither predicted nor measured.

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
    """Count items and bytes per technique; `decisions` are (technique, bytes) pairs.

    >>> decided_line([("keep", 1), ("recompute", 1024), ("recompute_each", 1024)], "storages")
    'of 3 storages 2 recomputed (2 KiB), 0 offloaded'
    """
    counts = list(decisions)
    parts = []
    # `recompute_each` counts as recomputed, too.
    for word, technique in (("recomputed", "recompute"), ("offloaded", "offload")):
        sizes = [size for name, size in counts if name.startswith(technique)]
        parts.append(f"{len(sizes)} {word}" + (f" ({show_bytes(sum(sizes))})" if sizes else ""))
    return f"of {len(counts)} {what} {', '.join(parts)}"


def seconds_line(before: float, after: float) -> str:
    """Return a line with the seconds of a step without the plan and with it.

    >>> seconds_line(0.1, 0.11)
    'a step takes 100 ms -> 110 ms (+10.0 %)'
    """
    if not before:
        return f"a step takes {show_seconds(after)}"
    extra = f"{100 * (after / before - 1):+.1f} %"
    return f"a step takes {show_seconds(before)} -> {show_seconds(after)} ({extra})"


def table(rows: Sequence[Sequence[str]], *, indent: str = "", right: bool = False) -> list[str]:
    """Return rows of text in columns; with `right`, all but the first are right-aligned.

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
