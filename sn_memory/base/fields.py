"""Reading JSON objects field by field, with errors that name the line or the key.

`json` reports a line for text that is not JSON; for JSON that says the wrong thing we keep the path
of the key (`ops[12].inputs[0]`), because that is what the writer of the file has to look for.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .limits import LARGEST, LARGEST_FLOAT

_MISSING = object()


def load(source: str | os.PathLike[str], error: type[ValueError], what: str) -> Any:
    """Parse JSON from a path, or from text that starts with a brace.

    Raises `error` when the text is not JSON, with the line and column where there is one, or says
    a key twice, and OSError when the file cannot be read.
    """
    text, origin = str(source), "the text"
    if not text.lstrip().startswith("{"):
        origin = show(text)
        text = _content(source, error, what)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        record = dict(pairs)
        if len(record) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for at, key in enumerate(keys) if key in keys[:at])
            raise error(f"{what}: {origin} has the key {show(twice)} twice in one object.")
        return record

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as problem:
        raise error(
            f"{what}: {origin} is not JSON: {problem.msg} at line {problem.lineno}, "
            f"column {problem.colno}. Expected one object; see docs/graph_format.md."
        ) from problem
    except RecursionError as problem:
        raise error(
            f"{what}: {origin} is nested too deeply to be read. Expected a list of records in one "
            "object; see docs/graph_format.md."
        ) from problem
    except error:
        raise
    except ValueError as problem:
        raise error(
            f"{what}: {origin} has a number that cannot be read ({problem}). Expected numbers of "
            "2**62 at most."
        ) from problem


def _content(source: str | os.PathLike[str], error: type[ValueError], what: str) -> str:
    try:
        return Path(source).read_text(encoding="utf-8")
    except UnicodeDecodeError as problem:
        raise error(
            f"{what}: {show(str(source))} is not text in UTF-8: {problem.reason} at byte "
            f"{problem.start}. Expected JSON; see docs/graph_format.md."
        ) from problem
    except ValueError as problem:
        raise error(
            f"{what}: {show(str(source))} is no path and no JSON object ({problem})."
        ) from problem


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

    def _take(self, key: str, default: object) -> Any:
        value = self._left.pop(key, _MISSING)
        if value is _MISSING or (value is None and default is not _MISSING):
            if default is _MISSING:
                raise self.error(f"{self.path}: the key {key!r} is missing; add it.")
            return default
        return value

    def fail(self, key: str, value: object, expected: str) -> ValueError:
        """Return the error for a value of the wrong kind, ready to be raised."""
        return self.error(f"{self.path}.{key}: got {show(value)}, expected {expected}.")

    def text(self, key: str, default: object = _MISSING) -> Any:
        value = self._take(key, default)
        if value is not default and not is_text(value):
            raise self.fail(key, value, "a string")
        return value

    def integer(self, key: str, default: object = _MISSING) -> Any:
        value = self._take(key, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(key, value, "a whole number")
        if abs(value) > LARGEST:
            raise self.fail(key, value, "a whole number of 2**62 at most")
        return value

    def number(self, key: str, default: object = _MISSING) -> Any:
        value = self._take(key, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(key, value, "a number")
        if not abs(value) <= LARGEST_FLOAT:
            raise self.fail(key, value, "a finite number")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self._take(key, False)
        if not isinstance(value, bool):
            raise self.fail(key, value, "true or false")
        return value

    def items(self, key: str, default: object = _MISSING) -> list[Any]:
        value = self._take(key, default)
        if value is default:
            return []
        if not isinstance(value, list):
            raise self.fail(key, value, "a list [...]")
        return value

    def names(self, key: str) -> tuple[str, ...]:
        value = self.items(key, ())
        for index, name in enumerate(value):
            if not is_text(name):
                raise self.fail(f"{key}[{index}]", name, "a string")
        return tuple(value)

    def mapping(self, key: str) -> Mapping[str, Any]:
        value = self._take(key, {})
        if not isinstance(value, dict):
            raise self.fail(key, value, "an object {...}")
        for name in value:
            if not is_text(name):
                raise self.fail(key, name, "keys that are strings")
        return value

    def child(self, key: str) -> Fields | None:
        value = self._take(key, None)
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
