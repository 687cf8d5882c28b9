"""Which outputs of a convolution show what a merge changes, and which inputs they are made of."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Final

# Outputs of one reader that are looked at, of all batches and ranks together.
SAMPLES: Final = 2048


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
