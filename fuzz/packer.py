"""Packing problems: each is packed without overlap, or refused with a documented error, in time.

A second of time limit each; `tables` are CSV files with damage.
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import numpy as np
from mutants import damaged_text
from runner import Target, main

from sn_memory import CapacityError, PackError
from sn_memory.check import check_packing
from sn_memory.pool.pack import arrange
from sn_memory.pool.problem import read_csv

Row = tuple[int, ...]
LIMIT_S = 1.0
ALIGNMENTS = (1, 1, 1, 2, 3, 8, 64, 256, 512, 4096, 10**6 + 3)
EXTREMES = (0, 1, -1, 2**31, 2**53 + 1, 2**62 - 1, 2**62, -(2**62), 2**63 - 1, 2**63, 2**64, 10**30)


def problem(rng: np.random.Generator) -> list[Row]:
    """Draw rows of one of several kinds: few or many, of like or unlike sizes, aligned or not."""
    count = int(rng.integers(1, 14)) if rng.random() < 0.95 else int(rng.integers(14, 400))
    moments = int(rng.choice([3, 10, 30, 1000]))
    largest = int(rng.choice([4, 64, 1000, 10**6, 10**12]))
    aligned, rows = rng.random() < 0.5, []
    for _ in range(count):
        lower = int(rng.integers(0, moments))
        length = moments if rng.random() < 0.1 else max(1, moments // 4)
        size = int(rng.integers(0, largest + 1))
        if rng.random() < 0.3:
            # Small ones beside huge ones are what makes bounds creep.
            size = int(rng.integers(0, 100))
        row = (lower, lower + int(rng.integers(1, length + 1)), size)
        rows.append((*row, int(rng.choice(ALIGNMENTS))) if aligned else row)
    return rows


def packed(rows: list[Row], capacity: int | None) -> str:
    """Pack and judge; an outcome's name."""
    try:
        packing = arrange(rows, capacity, time_limit_s=LIMIT_S)
    except CapacityError as error:
        assert capacity is not None
        assert error.height_bytes > capacity
        assert error.lower_bound_bytes <= error.height_bytes
        assert error.proved == (error.lower_bound_bytes > capacity)
        return "CapacityError, proved" if error.proved else "CapacityError, out of time"
    height = check_packing(rows, packing.offsets, capacity)
    assert height == packing.height >= packing.lower_bound
    if len(rows) <= 60:
        spans = [(row, at) for row, at in zip(rows, packing.offsets, strict=True) if row[2]]
        for (a, x), (b, y) in itertools.combinations(spans, 2):
            meet = a[0] < b[1] and b[0] < a[1]
            assert not (meet and x < y + b[2] and y < x + a[2]), (rows, packing)
        assert all(at % (*row, 1)[3] == 0 for row, at in spans)
    return "packed, proved" if packing.proved else "packed"


def solve(seed: int) -> str:
    """Pack a drawn problem, one in ten of them with numbers that are out of range."""
    rng = np.random.default_rng(seed)
    rows = problem(rng)
    # Of the moments some, so that a capacity may also be below the lower bound.
    live = max(sum(row[2] for row in rows if row[0] <= at < row[1]) for at in range(0, 40, 7))
    if rng.random() < 0.1:
        at = int(rng.integers(len(rows)))
        row = list(rows[at])
        row[int(rng.integers(len(row)))] = EXTREMES[int(rng.integers(len(EXTREMES)))]
        rows[at] = tuple(row[: int(rng.integers(2, 5))])
    capacity = int(live * rng.choice([0.9, 1, 1.02, 1.1, 2])) if rng.random() < 0.4 else None
    try:
        return packed(rows, capacity)
    except PackError:
        return "PackError"


def table(seed: int) -> str:
    """Read a damaged CSV file, and pack what it says."""
    rng = np.random.default_rng(seed)
    rows = problem(rng)[:12]
    width = min(len(row) for row in rows)
    head = ["id", "lower", "upper", "size", "alignment"][: width + 1]
    lines = [",".join(head), *(f"b{at},{','.join(map(str, row))}" for at, row in enumerate(rows))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "buffers.csv")
        path.write_bytes(damaged_text(rng, "\n".join(lines) + "\n"))
        try:
            file = read_csv(path)
            assert len(set(file.ids)) == len(file.ids) == len(file.buffers)
            return "read, " + packed(list(file.buffers), None)
        except PackError:
            return "PackError"


TARGETS = {
    "problems": Target(solve, full=10_000),
    "tables": Target(table, full=20_000),
}

if __name__ == "__main__":
    main(TARGETS)
