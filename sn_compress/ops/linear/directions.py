"""Where a matrix is strongest: the power iteration of low rank, on one rank.

PowerSGD takes one iteration a step, from the factor of the step before; who has no such factor, or
an old one, takes more (Halko, Martinsson, Tropp 2011, algorithm 4.4). The library's QR makes it
orthonormal. Ranks that have to find the same bits use `orthonormal.py` in its place.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...devices.arrays import Array, namespace

_SEED = 2019


def first_factor(columns: int, rank: int) -> npt.NDArray[np.float32]:
    """Where a power iteration begins, [columns, rank]: the same normal numbers on every rank."""
    rng = np.random.default_rng((_SEED, columns, rank))
    return rng.standard_normal((columns, rank), dtype=np.float32)


def directions(matrix: Array, start: Array, rounds: int = 0) -> Array:
    """Orthonormal columns, [rows, rank], that catch about the most of a matrix.

    matrix : [rows, columns], finite, floats; squares of its numbers must not overflow
    start : [columns, rank] of the same type, rank at most rows
    rounds : iterations beside the first; each costs two products of the matrix
    """
    xp = namespace(matrix)
    found = xp.linalg.qr(matrix @ start)[0]
    for _ in range(rounds):
        found = xp.linalg.qr(matrix @ (matrix.T @ found))[0]
    return found
