"""A benchmark's flags, and the file of its rows, from which a stopped run resumes."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

Row = dict[str, Any]
Run = TypeVar("Run")


def flags(doc: str | None, default: Path | None = None) -> argparse.ArgumentParser:
    """A parser that has --json, and says what the first line of a script says.

    default : the file of the rows if none is named
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument(
        "--json", type=Path, default=default, metavar="FILE", help="file for the rows"
    )
    return parser


def path_of(args: argparse.Namespace, results: Path) -> Path:
    """Where rows go: as asked by --json, else to the results, which a --quick run leaves alone."""
    path: Path = args.json or (results.parents[1] / "out" / results.name if args.quick else results)
    return path


def load(path: Path | None) -> list[Row]:
    """The rows that an earlier run has left; none without a file."""
    if path is None or not path.exists():
        return []
    rows: list[Row] = json.loads(path.read_text())
    return rows


def save(path: Path | None, rows: list[Row] | Row) -> None:
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


def matching(rows: Sequence[Row], key: Mapping[str, Any]) -> Row | None:
    """The first row that has these columns; None if there is none."""
    return next((row for row in rows if key.items() <= row.items()), None)


def missing(runs: Sequence[Run], rows: Sequence[Row]) -> list[Run]:
    """The runs, dataclasses, whose fields are in no row; says how many there are."""
    left = [run for run in runs if matching(rows, asdict(run)) is None]  # type: ignore[call-overload]
    print(f"{len(left)} of {len(runs)} runs are missing", flush=True)
    return left


def replaced(
    rows: Sequence[Row], new: Sequence[Row], key_of: Callable[[Row], Hashable]
) -> list[Row]:
    """The rows, new ones in the place of those of the same key."""
    keys = {key_of(row) for row in new}
    return [*(row for row in rows if key_of(row) not in keys), *new]


def interruptible(main: Callable[[], None]) -> None:
    """Do it; whoever stops it is told that the rows that are done are kept."""
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("\nstopped; the same command does what is missing") from None
