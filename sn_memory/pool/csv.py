"""The CSV form of MiniMalloc: `id,lower,upper,size[,alignment]` in, the same with `offset` out."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..base.errors import PackError
from ..base.fields import show

_COLUMNS: Final = ("id", "lower", "upper", "size")


@dataclass(frozen=True)
class BufferFile:
    """Buffers of a file: their ids, and rows as `pack` takes them."""

    ids: tuple[str, ...]
    buffers: tuple[tuple[int, ...], ...]


def read_csv(path: str | os.PathLike[str]) -> BufferFile:
    """Read buffers; a column `alignment` is optional, a column `offset` is passed over.

    Raises PackError naming the line, and OSError.
    """
    try:
        with open(path, newline="", encoding="utf-8") as file:
            return _read(path, csv.reader(file, skipinitialspace=True))
    except PackError:
        raise
    except (csv.Error, ValueError) as problem:
        # Not UTF-8, a field without end, a path with a NUL in it.
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
                f"{path}: line {line}: the id {show(name)} is there twice, in line {ids[name]} "
                "first; give each buffer its own."
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
            fields = [*buffer, 1][:4] if aligned else buffer
            out.writerow([id_, *fields, offset])
