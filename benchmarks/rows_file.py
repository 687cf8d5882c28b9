"""A benchmark's flags, and the file of its rows, which a run that was stopped goes on with."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any


def flags(doc: str | None, default: Path | None = None) -> argparse.ArgumentParser:
    """A parser that has --json, and says what the first line of a script says.

    default : the file of the rows if none is named
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, default=default, metavar="FILE", help="rows go there")
    return parser


def load(path: Path | None) -> list[dict[str, Any]]:
    """The rows that an earlier run has left; none without a file."""
    if path is None or not path.exists():
        return []
    rows: list[dict[str, Any]] = json.loads(path.read_text())
    return rows


def save(path: Path | None, rows: list[dict[str, Any]] | dict[str, Any]) -> None:
    """Write rows, one a line, or rows and what they share; nothing without a file.

    The file is replaced whole, so that a stop at any time leaves the old one or the new one.
    """
    if path is None:
        return
    if isinstance(rows, dict):
        text = json.dumps(rows, indent=1)
    else:
        text = "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]"
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".part")
    draft.write_text(text + "\n")
    os.replace(draft, path)
