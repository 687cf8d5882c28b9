"""What of each tensor travels, so that a whole model's gradient fits a number of words.

One rank for all tensors, as PowerSGD has it, spends as much on a matrix whose gradient is nearly
of rank one as on one whose is not. Directions are bought here one by one, always the one that
catches the largest share of its tensor's energy per word, until the budget is spent. A matrix
whose energy lies in few rows, as that of an embedding does, sells rows in place of directions.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..codecs.base import Floats
from ..codecs.lowrank import matrix_shape
from .factors import Factors, leading
from .shared import Halved, Summable, scaled_words
from .support import Support
from .support import words_of as support_words

MOST = 64  # directions looked at


@dataclass(frozen=True)
class Curve:
    """What directions, or rows, of one tensor would catch.

    Attributes
    ----------
    shape : the tensor's
    shares : [directions] or [rows], share of the squared norm in each, falling
    sparse : rows are sent, in parcels of one for each rank; else directions
    """

    shape: tuple[int, ...]
    shares: npt.NDArray[np.float64]
    sparse: bool = False

    @classmethod
    def of(cls, mean: Floats, shape: Sequence[int]) -> Curve:
        """Of directions, measured on a mean gradient that all ranks know, [n]."""
        rows, columns = matrix_shape(shape)
        most = min(rows, columns, MOST)
        finite = np.isfinite(mean).all() and mean.any()
        if not finite or most < 2:
            return cls(tuple(shape), np.full(most, 1 / most))
        _, sigma, _ = leading(mean.reshape(rows, columns), most)
        energy = np.square(sigma, dtype=np.float64)
        return cls(tuple(shape), energy / np.square(mean, dtype=np.float64).sum())

    @classmethod
    def of_rows(cls, mean: Floats, shape: Sequence[int]) -> Curve:
        """Of rows, measured likewise."""
        rows, _ = matrix_shape(shape)
        energy = np.square(mean.reshape(rows, -1), dtype=np.float64).sum(axis=1)
        total = energy.sum()
        if not np.isfinite(total) or not total:
            return cls(tuple(shape), np.full(rows, 1 / rows), sparse=True)
        return cls(tuple(shape), np.sort(energy)[::-1] / total, sparse=True)

    def caught(self, size: int, ranks: int) -> float:
        """Share of the energy in `size` directions, or parcels of rows."""
        return float(self.shares[: size * ranks if self.sparse else size].sum())

    def most(self, ranks: int) -> int:
        """The largest size."""
        return -(-self.shares.size // ranks) if self.sparse else self.shares.size

    def largest(self, words: int, ranks: int) -> int:
        """The largest size that fits the words; 0 if none does."""
        sizes = range(1, self.most(ranks) + 1)
        return bisect_right(sizes, words, key=lambda size: _words(self, size, ranks))

    @property
    def flat(self) -> bool:
        """A vector has no factors."""
        return min(matrix_shape(self.shape)) < 2


def better(low_rank: Curve, rows: Curve, words: float, ranks: int) -> Curve:
    """Rows, if half as many words of them catch more than all the words in directions.

    Half, as a curve shows the best rows, and ranks name those they owe, some of them twice.
    """
    by_rows = rows.caught(rows.largest(int(words / 2), ranks), ranks)
    by_rank = low_rank.caught(max(1, low_rank.largest(int(words), ranks)), ranks)
    return rows if by_rows > by_rank else low_rank


def budget(taken: int, left_out: float, ratio: float) -> int:
    """Words for tensors of `taken` elements, beside others that send a word for each element."""
    return max(0, int((taken + left_out) / ratio - left_out))


def allocate(curves: Mapping[str, Curve], words: int, ranks: int) -> dict[str, int]:
    """The size of each tensor: its rank, or the rows each rank names; 0 for vectors: all of it.

    words : budget of 4-byte words over all these tensors; the smallest sizes may exceed it
    """
    chosen = {name: 0 if curve.flat else 1 for name, curve in curves.items()}
    left = words - sum(_words(curves[name], rank, ranks) for name, rank in chosen.items())
    # Ties by name: every rank decides alike.
    queue = [(-_gain(curves[name], 1, ranks), name) for name, rank in chosen.items() if rank]
    heapq.heapify(queue)
    while queue:
        _, name = heapq.heappop(queue)
        curve, rank = curves[name], chosen[name]
        price = _words(curve, rank + 1, ranks) - _words(curve, rank, ranks)
        if price > left:
            continue
        left -= price
        chosen[name] = rank + 1
        if rank + 1 < curve.most(ranks):
            heapq.heappush(queue, (-_gain(curve, rank + 1, ranks), name))
    return chosen


def summable(
    shape: Sequence[int],
    size: int,
    *,
    sparse: bool = False,
    start: Floats | None = None,
    undoable: bool = False,
) -> Summable:
    """What a size from `allocate` stands for."""
    if size == 0:
        return Halved(math.prod(shape), start=start, undoable=undoable)
    if sparse:
        rows, columns = matrix_shape(shape)
        return Support(rows=rows, columns=columns, each=size, start=start, undoable=undoable)
    return Factors(shape=shape, rank=size, start=start, undoable=undoable)


def words_of(shape: Sequence[int], size: int, ranks: int, *, sparse: bool = False) -> list[int]:
    """Words a tensor sends in each round at a size; 0 is whole."""
    if size == 0:
        return [scaled_words(math.prod(shape), 1, ranks, fine=True)]
    if sparse:
        return [support_words(*matrix_shape(shape), size, ranks)]
    return [scaled_words(side, size, ranks) for side in matrix_shape(shape)]


def _words(curve: Curve, size: int, ranks: int) -> int:
    return sum(words_of(curve.shape, size, ranks, sparse=curve.sparse))


def _gain(curve: Curve, size: int, ranks: int) -> float:
    """Share of energy per word that what is bought after `size` catches."""
    if size >= curve.most(ranks):
        return 0.0
    price = _words(curve, size + 1, ranks) - _words(curve, size, ranks)
    # The words of positions grow in steps, so that a parcel may come nearly free.
    return (curve.caught(size + 1, ranks) - curve.caught(size, ranks)) / max(price, 1)
