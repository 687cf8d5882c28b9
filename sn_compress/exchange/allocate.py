"""Which rank each tensor gets, so that a whole model's gradient fits a number of words.

One rank for all tensors, as PowerSGD has it, spends as much on a matrix whose gradient is nearly
of rank one as on one whose is not. Directions are bought here one by one, always the one that
catches the largest share of its tensor's energy per word, until the budget is spent.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..codecs.lowrank import matrix_shape
from ..contract import Floats
from .digits import Digits
from .factors import Factors, leading
from .shared import Halved

MOST = 64  # directions looked at


@dataclass(frozen=True)
class Curve:
    """What directions of one tensor would catch.

    Attributes
    ----------
    shape : the tensor's
    shares : [directions], share of the squared norm in each, falling
    """

    shape: tuple[int, ...]
    shares: npt.NDArray[np.float64]

    @classmethod
    def of(cls, mean: Floats, shape: Sequence[int]) -> Curve:
        """Measured on a mean gradient that all ranks know, [n]."""
        rows, columns = matrix_shape(shape)
        most = min(rows, columns, MOST)
        finite = np.isfinite(mean).all() and mean.any()
        if not finite or most < 2:
            return cls(tuple(shape), np.full(most, 1 / most))
        _, sigma, _ = leading(mean.reshape(rows, columns), most)
        energy = np.square(sigma, dtype=np.float64)
        return cls(tuple(shape), energy / np.square(mean, dtype=np.float64).sum())

    @property
    def flat(self) -> bool:
        """A vector has no factors."""
        return min(matrix_shape(self.shape)) < 2


def allocate(curves: Mapping[str, Curve], words: int, ranks: int) -> dict[str, int]:
    """The rank of each tensor: 0 for vectors, which travel whole, else at least 1.

    words : budget of 4-byte words over all these tensors; the smallest ranks may exceed it
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
        if rank + 1 < curve.shares.size:
            heapq.heappush(queue, (-_gain(curve, rank + 1, ranks), name))
    return chosen


def summable(
    shape: Sequence[int], rank: int, *, start: Floats | None = None, undoable: bool = False
) -> Factors | Halved:
    """What a rank from `allocate` stands for."""
    if rank == 0:
        return Halved(math.prod(shape), start=start, undoable=undoable)
    return Factors(shape=shape, rank=rank, start=start, undoable=undoable)


def _words(curve: Curve, rank: int, ranks: int) -> int:
    return sum(words_of(curve.shape, rank, ranks))


def words_of(shape: Sequence[int], rank: int, ranks: int) -> list[int]:
    """Words a tensor sends in each round at a rank; 0 is whole."""
    if rank == 0:
        return [3 + Digits.of(ranks, fine=True).words(math.prod(shape))]
    digits = Digits.of(ranks)
    return [2 + rank + digits.words(side * rank) for side in matrix_shape(shape)]


def _gain(curve: Curve, rank: int, ranks: int) -> float:
    """Share of energy per word that the direction after `rank` catches."""
    price = _words(curve, rank + 1, ranks) - _words(curve, rank, ranks)
    return float(curve.shares[rank]) / price if rank < curve.shares.size else 0.0
