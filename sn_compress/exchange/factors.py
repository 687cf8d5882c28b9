"""Low rank over two all-reduces of low-bit digits.

PowerSGD (Vogels, Karimireddy, Jaggi 2019, algorithm 1) sums P = M Q over the ranks, makes it
orthonormal, sums Q = M^T P, and takes P Q^T: the best approximation in the columns of P, which
one power iteration from the last step's Q has turned towards this step's gradient. It sends
float32. The first sum only has to find directions, and what rounding takes from the second
stays in the memory: with 8 ranks both travel in 8 bits, so the same bytes hold four times the rank.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np
import numpy.typing as npt

from ..codecs.base import Floats
from ..codecs.lowrank import first_factor, matrix_shape
from ..errors import CompressError
from .digits import Words
from .shared import Array, Scaled, Summable


class Factors(Summable):
    """Rank-`rank` approximation of the mean gradient.

    Parameters
    ----------
    shape : the tensor's shape; more than two axes are flattened behind the first
    rank : columns of the factors, at most the smaller side of the matrix
    start : [n], a mean gradient that all ranks know, to begin with its directions
    """

    rounds = 2

    def __init__(
        self,
        *,
        shape: Sequence[int],
        rank: int,
        start: npt.ArrayLike | None = None,
        undoable: bool = False,
    ) -> None:
        rows, columns = matrix_shape(shape)
        if not 1 <= rank <= min(rows, columns):
            raise CompressError(
                f"Factors: rank={rank!r} for a {rows} x {columns} matrix; expected 1 to "
                f"{min(rows, columns)}"
            )
        super().__init__(rows * columns, undoable=undoable)
        self._size, self.rank = (rows, columns), rank
        self._left, self._right = Scaled(rows, rank), Scaled(columns, rank)
        self._basis = np.linalg.qr(first_factor(columns, rank))[0]
        if start is not None:
            matrix = np.asarray(start, np.float32).reshape(self._size)
            left, sigma, self._basis = leading(matrix, rank)
            self._left.expect(left * sigma)
            self._right.expect(self._basis * sigma)

    def words(self, ranks: int) -> list[int]:
        return [self._left.words(ranks), self._right.words(ranks)]

    def _steps(self, vector: Floats | None, ranks: int) -> Generator[Words, Words, Floats | None]:
        matrix = None if vector is None else vector.reshape(self._size)
        words, _ = self._left.pack(None if matrix is None else matrix @ self._basis, ranks)
        mean_p, left_exponents = self._left.unpack((yield words), ranks)
        # The second round runs even if this step is lost, so that its shape never depends on data.
        p = np.zeros((0, 0), np.float32) if mean_p is None else np.linalg.qr(mean_p)[0]
        lost = matrix is None or mean_p is None
        words, own = self._right.pack(None if lost else matrix.T @ p, ranks)  # type: ignore[union-attr]
        mean_q, right_exponents = self._right.unpack((yield words), ranks)
        if mean_q is None or own is None or matrix is None:
            return None
        matrix -= p @ own.T
        self.memory = matrix.reshape(-1)
        if mean_q.any():
            # Orthonormal and strongest first, so that a column keeps its scale.
            u, _, _ = np.linalg.svd(mean_q / np.abs(mean_q).max(), full_matrices=False)
            self._basis = np.ascontiguousarray(u)
        self._exponents = np.stack([left_exponents, right_exponents])
        return np.asarray(p @ mean_q.T, np.float32).reshape(-1)

    @property
    def _exponents(self) -> Array:
        return np.stack([self._left.exponents, self._right.exponents])

    @_exponents.setter
    def _exponents(self, value: Array) -> None:
        self._left.exponents, self._right.exponents = value

    def _shared(self) -> dict[str, Array]:
        return {"_basis": self._basis, "_exponents": self._exponents}


def leading(matrix: Floats, count: int) -> tuple[Floats, Floats, Floats]:
    """The `count` leading singular triplets: [rows, count], [count], [columns, count].

    Exact for small matrices; for large ones by randomised subspace iteration (Halko, Martinsson,
    Tropp 2011, algorithm 4.4 with two iterations), from the same random numbers on every rank.
    """
    scale = np.float32(np.abs(matrix).max(initial=0)) or np.float32(1)
    unit = matrix / scale
    if min(matrix.shape) <= 4 * count or matrix.size <= 2**16:
        u, sigma, vt = np.linalg.svd(unit, full_matrices=False)
    else:
        basis = np.linalg.qr(unit @ first_factor(matrix.shape[1], count + 8))[0]
        for _ in range(2):
            basis = np.linalg.qr(unit @ (unit.T @ basis))[0]
        u, sigma, vt = np.linalg.svd(basis.T @ unit, full_matrices=False)
        u = basis @ u
    return u[:, :count], sigma[:count] * scale, np.ascontiguousarray(vt[:count].T)
