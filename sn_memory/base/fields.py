"""What comes from outside: how large numbers may be, and JSON objects read field by field.

Sizes are added in 64-bit integers and seconds in doubles, and neither says when it has too many:
four storages of 2**63 - 1 bytes wrap around to 4 bytes less than nothing, twice 1e308 seconds are
infinite, and then every bound is true. So whatever could ever be added up in a plan is added up
once, exactly, when a graph is made (`graph/graph.py`).

`json` reports a line for text that is not JSON; for JSON that says the wrong thing we keep the path
of the key (`ops[12].inputs[0]`), because that is what the writer of the file has to look for.
"""

from __future__ import annotations

import json
import math
import operator
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING
from numbers import Real
from pathlib import Path
from typing import Any, Final

# What a plan has at once is at most twice the sum (an op may make all that is there a second time),
# which is below 2**63.
LARGEST: Final = 2**62
LARGEST_FLOAT: Final = sys.float_info.max
# A plan may run ops again. With this bound on one run of all, it takes 10**289 reruns to overflow.
LONGEST_S: Final = float(LARGEST)


def is_count(value: Any) -> bool:
    """Whether this is a whole number from 0 to the largest there may be."""
    if isinstance(value, bool):
        return False
    try:
        return 0 <= operator.index(value) <= LARGEST
    except TypeError:
        return False


def is_amount(value: Any) -> bool:
    """Whether this is a number from 0 to the largest finite one; NaN is none."""
    try:
        return isinstance(value, Real) and 0.0 <= float(value) < math.inf
    except OverflowError:
        return False


def load(source: str | os.PathLike[str], error: type[ValueError], what: str) -> Any:
    """Parse JSON from a path, or from text that starts with a brace.

    Raises `error` when the text is not JSON, with the line and column where there is one, or says
    a key twice, and OSError when the file cannot be read.
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


class Fields:
    """One JSON object being read: each getter checks the type; `done` rejects unknown keys.

    Parameters
    ----------
    value
        What the JSON has at this place; anything but an object raises.
    path
        Where that is, for messages.
    error
        The exception to raise: GraphError or PlanError.
    """

    def __init__(self, value: object, path: str, error: type[ValueError]) -> None:
        self.path, self.error = path, error
        if not isinstance(value, dict):
            raise error(f"{path}: got {show(value)}, expected an object {{...}}.")
        self._left: dict[str, Any] = dict(value)

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys that nobody asked for yet, for objects whose keys are names."""
        return tuple(self._left)

    def _take(self, key: str, default: object, valid: Callable[[Any], bool], expected: str) -> Any:
        """Return a value that is valid, or the default where the key is missing or null."""
        value = self._left.pop(key, None)
        if value is None and default is not MISSING:
            return default
        if value is None:
            raise self.error(f"{self.path}: the key {key!r} is missing; add it.")
        if not valid(value):
            raise self.fail(key, value, expected)
        return value

    def fail(self, key: str, value: object, expected: str) -> ValueError:
        """Return the error for a value of the wrong kind, ready to be raised."""
        return self.error(f"{self.path}.{key}: got {show(value)}, expected {expected}.")

    def text(self, key: str, default: object = MISSING) -> Any:
        return self._take(key, default, is_text, "a string")

    def integer(self, key: str, default: object = MISSING) -> Any:
        value = self._take(key, default, lambda value: type(value) is int, "a whole number")
        if value is not default and abs(value) > LARGEST:
            raise self.fail(key, value, "a whole number of 2**62 at most")
        return value

    def number(self, key: str, default: object = MISSING) -> Any:
        value = self._take(key, default, lambda value: type(value) in (int, float), "a number")
        if value is default:
            return value
        if not abs(value) <= LARGEST_FLOAT:
            raise self.fail(key, value, "a finite number")
        return float(value)

    def flag(self, key: str, default: object = False) -> bool:
        return bool(
            self._take(key, default, lambda value: isinstance(value, bool), "true or false")
        )

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
        for name in value:
            if not is_text(name):
                raise self.fail(key, name, "keys that are strings")
        return dict(value)

    def child(self, key: str) -> Fields | None:
        value = self._take(key, None, lambda value: True, "")
        return None if value is None else Fields(value, f"{self.path}.{key}", self.error)

    def done(self) -> None:
        """Raise if a key is left that nobody asked for: it is a typing error or a newer format."""
        if self._left:
            key = next(iter(self._left))
            raise self.error(
                f"{self.path}: unknown key {key[:60]!r}. Remove it, or see "
                "docs/graph_format.md for the keys there are."
            )


def is_text(value: object) -> bool:
    """Whether this is a string that can be written to a file: half of a pair of surrogates cannot.

    JSON may have one as an escape, and whoever prints the name would fail on it, long after.
    """
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def show(value: object) -> str:
    """Return a value for a message: as JSON, cut to sixty characters, whatever it is."""
    try:
        text = json.dumps(value, default=str)
    except (RecursionError, ValueError):
        text = f"a {type(value).__name__} too deep or too large to show"
    return text if len(text) <= 60 else text[:57] + "..."
