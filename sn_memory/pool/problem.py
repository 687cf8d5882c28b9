"""A packing problem in arrays: the user's buffers, validated, with time divided into sections.

A section is the time between two consecutive starts or ends. Nothing changes within one, so the set
of live buffers of each section is all that a packer needs to know about time.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..base.errors import PackError
from ..base.sizes import show

Ints = npt.NDArray[np.int64]

# Offsets are sums of sizes, so their total bounds every number in a packer; half of the 64-bit
# range leaves room for rounding up to alignments.
_LARGEST: Final = 2**62
_ROWS: Final = "rows of whole numbers: (lower, upper, size) or (lower, upper, size, alignment)"


@dataclass(frozen=True)
class Problem:
    """Buffers in arrays [n] int64.

    lower, upper : the half-open lifetime [lower, upper), in any unit of time
    size, align : bytes; the offset of a buffer is a multiple of its alignment
    first, last : the sections [first, last) in which it is live
    sections : the number of sections
    """

    lower: Ints
    upper: Ints
    size: Ints
    align: Ints
    first: Ints
    last: Ints
    sections: int

    def __len__(self) -> int:
        return len(self.size)

    @property
    def live_bytes(self) -> Ints:
        """The sum of live sizes in each section: [sections] int64."""
        change = np.zeros(self.sections + 1, np.int64)
        np.add.at(change, self.first, self.size)
        np.subtract.at(change, self.last, self.size)
        return np.cumsum(change)[:-1]

    @property
    def lower_bound(self) -> int:
        """The largest sum of live sizes, below which no arena can be. Zero without buffers."""
        return int(self.live_bytes.max(initial=0))

    @property
    def grain(self) -> int:
        """The greatest common divisor of all sizes and alignments above 1, hence of heights."""
        return int(np.gcd.reduce(np.append(self.size, self.align[self.align > 1]), initial=0)) or 1

    def pairs(self) -> int:
        """Return how many pairs of buffers are live at the same time."""
        # Counted, not listed: there may be more pairs than fit in memory.
        starts, ends = np.sort(self.first), np.sort(self.last)
        # Those that start before it ends, minus those that end before it starts.
        before = np.searchsorted(starts, self.last, "left")
        over = np.searchsorted(ends, self.first, "right")
        return int((before - over - 1).sum()) // 2

    def only(self, chosen: Ints) -> Problem:
        """Return the problem restricted to these buffers."""
        return of_arrays(
            self.lower[chosen], self.upper[chosen], self.size[chosen], self.align[chosen]
        )

    def components(self) -> list[Ints]:
        """Return connected groups of buffer numbers; no two groups share any time."""
        if not len(self):
            return []
        # By start; a group ends when all earlier buffers have ended by the next start.
        order = np.argsort(self.first, kind="stable")
        reach = np.maximum.accumulate(self.last[order])
        cuts = np.flatnonzero(self.first[order][1:] >= reach[:-1]) + 1
        return list(np.split(order, cuts))


def of_arrays(lower: Ints, upper: Ints, size: Ints, align: Ints) -> Problem:
    """Return the problem of validated arrays."""
    times = np.unique(np.concatenate([lower, upper]))
    return Problem(
        lower=lower,
        upper=upper,
        size=size,
        align=align,
        first=np.searchsorted(times, lower).astype(np.int64),
        last=np.searchsorted(times, upper).astype(np.int64),
        sections=max(len(times) - 1, 0),
    )


def read_problem(buffers: Iterable[Sequence[int]] | npt.NDArray[Any]) -> Problem:
    """Read rows of (lower, upper, size) or (lower, upper, size, alignment).

    Raises PackError naming the first invalid row.
    """
    rows: Sequence[Sequence[int]] = (
        list(buffers.tolist()) if isinstance(buffers, np.ndarray) else list(buffers)
    )
    if not len(rows):
        empty = np.zeros(0, np.int64)
        return of_arrays(empty, empty, empty, empty)
    for at, row in enumerate(rows):
        if not hasattr(row, "__len__") or len(row) not in (3, 4):
            raise PackError(f"buffers[{at}]: got {row!r}, expected {_ROWS}.")
    try:
        table = np.array([(*row, 1)[:4] for row in rows])
    except (TypeError, ValueError, OverflowError) as problem:
        raise PackError(
            f"got buffers that do not form a table ({problem}), expected {_ROWS}."
        ) from problem
    if table.ndim != 2 or table.dtype.kind not in "iu":
        raise PackError(f"got buffers of {table.dtype}, expected {_ROWS}, below 2**63.")
    # Before the conversion to int64, in which larger values would wrap around.
    _refuse(np.any(table > _LARGEST, axis=1), rows, "numbers of 2**62 at most")
    table = table.astype(np.int64)
    _refuse(np.any(table < -_LARGEST, axis=1), rows, "times of -2**62 at least")
    lower, upper, size, align = (np.ascontiguousarray(column) for column in table.T)
    _refuse(upper <= lower, rows, "a lifetime with lower < upper")
    _refuse(size < 0, rows, "a size of 0 or more")
    _refuse(align < 1, rows, "an alignment of 1 or more")
    # As floats, whose sum does not wrap around; exactness is not needed for such sizes.
    if float(size.sum(dtype=float)) + float(align.sum(dtype=float)) > _LARGEST:
        raise PackError("got sizes that sum to more than 2**62 bytes; give them in larger units.")
    return of_arrays(lower, upper, size, align)


def _refuse(wrong: npt.NDArray[np.bool_], rows: Sequence[Sequence[int]], expected: str) -> None:
    if wrong.any():
        at = int(wrong.argmax())
        got = tuple(int(value) for value in rows[at])
        raise PackError(f"buffers[{at}]: got {got}, expected {expected}.")


_COLUMNS: Final = ("id", "lower", "upper", "size")


@dataclass(frozen=True)
class BufferFile:
    """Buffers of a file: their ids, and rows for `pack`."""

    ids: tuple[str, ...]
    buffers: tuple[tuple[int, ...], ...]


def read_csv(path: str | os.PathLike[str]) -> BufferFile:
    """Read buffers; a column `alignment` is optional, a column `offset` is ignored.

    Raises PackError naming the line, and OSError.
    """
    try:
        with open(path, newline="", encoding="utf-8") as file:
            return _read(path, csv.reader(file, skipinitialspace=True))
    except PackError:
        raise
    except (csv.Error, ValueError) as problem:
        # Not UTF-8, an unterminated field, a path with a NUL in it.
        raise PackError(
            f"{show(str(path))}: cannot be read as a table of text in UTF-8: {problem}."
        ) from problem


def _read(path: str | os.PathLike[str], rows: Any) -> BufferFile:
    head = [name.strip() for name in next(rows, [])]
    known = {*_COLUMNS, "alignment", "offset"}
    if not set(_COLUMNS) <= set(head) <= known or len(set(head)) < len(head):
        raise PackError(
            f"{path}: line 1: got columns {', '.join(head)[:60] or 'none'}, expected "
            f"{', '.join(_COLUMNS)} and perhaps alignment and offset, each once."
        )
    wanted = [head.index(name) for name in (*_COLUMNS[1:], "alignment") if name in head]
    ids: dict[str, int] = {}
    buffers: list[tuple[int, ...]] = []
    for row in rows:
        if not row:
            continue
        line = rows.line_num
        if len(row) != len(head):
            raise PackError(f"{path}: line {line}: got {len(row)} fields, expected {len(head)}.")
        try:
            buffers.append(tuple(int(row[at]) for at in wanted))
        except ValueError:
            raise PackError(
                f"{path}: line {line}: got {','.join(row)[:60]}, expected whole numbers after the "
                "id."
            ) from None
        name = row[head.index("id")]
        if name in ids:
            raise PackError(
                f"{path}: line {line}: the id {show(name)} is used twice, first in line "
                f"{ids[name]}; give each buffer its own."
            )
        ids[name] = line
    return BufferFile(tuple(ids), tuple(buffers))


def write_csv(
    path: str | os.PathLike[str],
    ids: Iterable[object],
    buffers: Iterable[Sequence[int]],
    offsets: Iterable[int],
) -> None:
    """Write buffers of three or of four numbers each, with their offsets as the last column."""
    buffers = list(buffers)
    aligned = any(len(buffer) == 4 for buffer in buffers)
    with open(path, "w", newline="", encoding="utf-8") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow([*_COLUMNS, *(["alignment"] if aligned else []), "offset"])
        for id_, buffer, offset in zip(ids, buffers, offsets, strict=True):
            # Rows of three among rows of four get an alignment of 1.
            fields = [*buffer, 1][:4] if aligned else buffer
            out.writerow([id_, *fields, offset])
