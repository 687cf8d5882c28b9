"""Which batches, outputs and places of a kernel show what a merge changes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

Batch = TypeVar("Batch")
Shapes = tuple[tuple[int, ...], ...]
# Outputs of one reader that are looked at, of all batches and ranks together.
SAMPLES: Final = 2048


@dataclass
class Seen:
    """What one reader of a group saw on one rank.

    Attributes
    ----------
    fit
        [n + 1, n + 1] float64: the sum over samples of (h, 1) (h, 1)^T.
    samples
        [samples, offsets, n] float32 of each batch: what some outputs are made of.
    squares
        [samples] float64 of each batch: the square of what was put out there.
    """

    fit: NDArray[np.float64]
    samples: list[NDArray[np.float32]] = field(default_factory=list)
    squares: list[NDArray[np.float64]] = field(default_factory=list)


def most_alike(batches: Iterable[Batch], shapes_of: Callable[[Batch], Shapes]) -> list[Batch]:
    """Return the batches of the shapes that hold most rows: a trace is of one set of shapes."""
    alike: dict[Shapes, list[Batch]] = {}
    for batch in batches:
        alike.setdefault(shapes_of(batch), []).append(batch)

    def rows(shapes: Shapes) -> int:
        return len(alike[shapes]) * (shapes[0][0] if shapes and shapes[0] else 1)

    return alike[max(alike, key=rows)] if alike else []


def grid(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Return positions on each axis, evenly apart, at most about `most` of all combinations.

    >>> grid((14, 14), 16)
    [[1, 5, 9, 13], [1, 5, 9, 13]]
    """
    apart = 1
    while math.prod(-(-size // apart) for size in sizes) > most and apart < max(sizes):
        apart += 1
    return [list(range(min((apart - 1) // 2, (size - 1) // 2), size, apart)) for size in sizes]


def offsets(kernel: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the places of a kernel, the last axis running fastest.

    >>> offsets((1, 2))
    [(0, 0), (0, 1)]
    """
    return list(itertools.product(*(range(size) for size in kernel)))


def same_padding(
    kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], sizes: Sequence[int]
) -> list[tuple[int, int]]:
    """Return the zeros before and after each axis with which "same" gives one output a stride.

    >>> same_padding((3, 4), (1, 2), (1, 1), (14, 14))
    [(1, 1), (1, 1)]
    """
    found = []
    for size, step, spread, length in zip(kernel, stride, dilation, sizes, strict=True):
        outputs = -(-length // step)
        total = max((outputs - 1) * step + (size - 1) * spread + 1 - length, 0)
        found.append((total // 2, total - total // 2))
    return found
