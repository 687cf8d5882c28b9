"""Columns of peaks, and how rows of them are made, for the benchmarks of both frameworks."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from accuracy import load, save
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
    others: Mapping[str, Sequence[Any]] | None = None,
) -> None:
    """Read the command line, make a row for each net and level, save them, print the table.

    purpose : what the command is for
    file : name of the rows' file
    nets, levels : all; --quick takes the net `quick` and the first level
    row_of : of a net, a level, and how many steps are timed
    others : nets that run only if `--nets` names them, with their levels
    """
    others = others or {}
    parser = argparse.ArgumentParser(description=purpose)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="one net, few steps")
    parser.add_argument("--nets", nargs="+", choices=[*nets, *others], help="these, or all small")
    args = parser.parse_args()
    path = args.json or ROOT / "benchmarks" / ("out" if args.quick else "results") / file
    about = {"commit": commit(), "machine": machine()}
    chosen = args.nets or ([quick] if args.quick else list(nets))
    rows = [
        row_of(name, level, 2 if args.quick else 10) | about
        for name in chosen
        for level in others.get(name, levels)[: 1 if args.quick else None]
    ]
    save(path, [row for row in load(path) if row["net"] not in chosen] + rows)
    print(f"{table(rows)}\n\nrows: {path}")


def cells(row: dict[str, Any]) -> list[str]:
    """The last cells of a table: two peaks in MiB, what that is less, milliseconds a step."""
    plain, compressed = row["plain_peak_bytes"], row["peak_bytes"]
    peaks = f"{plain / 2**20:.2f}, {compressed / 2**20:.2f}"
    times = f"{1e3 * row['plain_step_s']:.0f}, {1e3 * row['step_s']:.0f}"
    return [peaks, f"{1 - compressed / plain:.0%}", times]
