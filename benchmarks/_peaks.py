"""Columns of peaks, and how rows of them are made, for the benchmarks of both frameworks."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from accuracy import save
from machine import commit, machine

ROOT = Path(__file__).resolve().parent.parent


def make_rows(
    purpose: str,
    file: str,
    nets: Collection[str],
    levels: Sequence[Any],
    quick: str,
    row_of: Callable[[str, Any, int], dict[str, Any]],
    table: Callable[[list[dict[str, Any]]], str],
) -> None:
    """Read the command line, make a row for each net and level, save them, print the table.

    purpose : what the command is for
    file : name of the rows' file
    nets, levels : all; --quick takes the net `quick` and the first level
    row_of : of a net, a level, and how many steps are timed
    """
    parser = argparse.ArgumentParser(description=purpose)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="one net, few steps")
    args = parser.parse_args()
    path = args.json or ROOT / "benchmarks" / ("out" if args.quick else "results") / file
    about = {"commit": commit(), "machine": machine()}
    rows = [
        row_of(name, level, 2 if args.quick else 10) | about
        for name in ([quick] if args.quick else nets)
        for level in (levels[:1] if args.quick else levels)
    ]
    save(path, rows)
    print(f"{table(rows)}\n\nrows: {path}")


def cells(row: dict[str, Any]) -> list[str]:
    """The last cells of a table: two peaks in MiB, what that is less, milliseconds a step."""
    plain, compressed = row["plain_peak_bytes"], row["peak_bytes"]
    peaks = f"{plain / 2**20:.2f}, {compressed / 2**20:.2f}"
    times = f"{1e3 * row['plain_step_s']:.0f}, {1e3 * row['step_s']:.0f}"
    return [peaks, f"{1 - compressed / plain:.0%}", times]
