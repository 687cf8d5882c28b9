"""Low rank for an all-reduce: all ranks share one factor, the other one is summed, in turn.

PowerSGD needs two all-reduces a step, one after the other. With one factor known to all ranks one
is enough, and because the roles change from step to step, both follow the gradient (as ACP-SGD,
arXiv 2306.08881). `lowrank.py` has the codec of one rank's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..errors import CompressError
from .base import Floats
from .lowrank import first_factor, matrix_shape


class AlternatingFactors:
    """Low rank for an all-reduce: one factor is shared, the other one summed, in turn.

    All ranks hold the same basis. A rank calls `project`, the ranks average what it returns
    (any all-reduce, in any precision), and each calls `reconstruct` with that average. Because
    the product is linear in the factor sent, the result is the mean of the ranks' projections.

    One step may be off while two in a row are right: what the first drops comes with the second.
    What the ranks' gradients have of their own, beside the mean, is never sent and stays in their
    memories; only the mean of the memories is bounded. NaN or Inf on one rank makes the result
    NaN on all, and leaves basis and memories as they were.

    Parameters
    ----------
    shape : the tensor's shape
    rank : columns of the factors
    """

    def __init__(self, *, shape: Sequence[int], rank: int = 4) -> None:
        rows, columns = matrix_shape(shape)
        if not 1 <= rank <= min(rows, columns):
            raise CompressError(
                f"AlternatingFactors: rank={rank!r} for a {rows} x {columns} matrix; expected 1 "
                f"to {min(rows, columns)}"
            )
        self._size = rows, columns
        self._basis = np.linalg.qr(first_factor(columns, rank))[0]  # orthonormal, of one side
        self._left = True  # the next factor sent is the left one
        self._sent: tuple[Floats, Floats] | None = None  # the matrix and its factor
        self.memory = np.zeros((rows, columns), np.float32)

    def project(self, values: npt.ArrayLike) -> Floats:
        """The factor of `values` plus memory on the shared basis, [side, rank] float32."""
        with np.errstate(all="ignore"):  # NaN, Inf and overflow travel
            matrix = np.asarray(values, np.float32).reshape(self._size) + self.memory
            factor: Floats = (matrix if self._left else matrix.T) @ self._basis
        self._sent = matrix, factor
        return factor

    def reconstruct(self, mean: npt.ArrayLike) -> Floats:
        """The mean gradient from the averaged factor, [n] float32; turns the roles around."""
        if self._sent is None:
            raise CompressError(
                "reconstruct() follows project(); the factor of this step is missing"
            )
        factor = np.asarray(mean, np.float32)
        (matrix, sent), self._sent = self._sent, None
        if not np.isfinite(factor).all():
            return np.full(matrix.size, np.nan, np.float32)
        own, result = (f @ self._basis.T for f in (sent, factor))
        if not self._left:
            own, result = own.T, result.T
        self.memory = matrix - own
        if factor.any():
            # The averaged factor spans what the mean gradient does: the basis of the next step.
            self._basis = np.linalg.qr(factor)[0]
            self._left = not self._left
        return np.ascontiguousarray(result, np.float32).reshape(-1)
