"""Orthonormal columns of integer matrices, with the same bits wherever they are computed.

The matrix of products G of the columns is exact in float64, in any order of sums. Cholesky's method
on the small G takes elementwise operations alone, one after the other. The transform it ends in is
rounded to integers times a power of two, so that its product with the matrix is exact again; then
there is one rounding. No library, number of threads or device can show in the result.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..arrays import Array, Constant, device_of, namespace, take

_BITS = 30  # of the transform: 15 + 30 + 6 bits for up to 64 columns are exact in float64
_LEAST = 0.5  # of a squared length: integers that depend on others leave less

_POWERS = Constant(np.exp2(np.arange(-130.0, 131.0)))


def orthonormal(factors: Sequence[Array]) -> list[Array]:
    """Rows that are orthonormal and span what the given rows span, float32; zeros for none.

    Each row is made orthogonal to those before it, and of length 1. One that depends on them
    (what is left of it has a squared length below 0.5) becomes zeros.

    factors : of each matrix [rows, numbers], up to 64 rows of up to 2**23 whole numbers below
        2**15 in magnitude, of any dtype
    """
    xp = namespace(factors[0])
    wide = [xp.astype(it, xp.float64) for it in factors]
    most = max(it.shape[0] for it in wide)
    transforms = _transforms(xp.stack([_padded(it @ it.T, most) for it in wide]))
    found = []
    for place, it in enumerate(wide):
        rows = it.shape[0]
        found.append(xp.astype(transforms[place, :rows, :rows] @ it, xp.float32))
    return found


def _padded(square: Array, most: int) -> Array:
    """A square matrix with zeros at its end, [most, most]."""
    xp = namespace(square)
    rows, device = square.shape[0], device_of(square)
    if rows == most:
        return square
    right = xp.zeros((rows, most - rows), dtype=xp.float64, device=device)
    below = xp.zeros((most - rows, most), dtype=xp.float64, device=device)
    return xp.concat([xp.concat([square, right], axis=1), below])


def _transforms(grams: Array) -> Array:
    """[tensors, r, r]: what to multiply each matrix with, on a grid that keeps products exact."""
    xp = namespace(grams)
    rest, rows, most = grams, [], grams.shape[1]
    eye = xp.eye(most, dtype=xp.float64, device=device_of(grams))
    work = xp.zeros_like(grams) + eye  # the rows that are left, as made of the given ones
    for place in range(most):
        squared = rest[:, 0, 0]
        some = squared >= _LEAST
        length = xp.sqrt(xp.where(some, squared, xp.ones_like(squared)))
        scale = xp.where(some, 1 / length, xp.zeros_like(length))[:, None]
        # Multiplied first and subtracted then, each by itself: nothing may be fused.
        row = work[:, 0, :] * scale
        rows.append(row)
        if place + 1 < most:
            along = rest[:, 0, 1:] * scale
            minus = along[:, :, None] * along[:, None, :]
            rest = rest[:, 1:, 1:] - minus
            taken = along[:, :, None] * row[:, None, :]
            work = work[:, 1:, :] - taken
    transforms = xp.stack(rows, axis=1)
    peaks = xp.max(xp.abs(transforms), axis=2)
    flat = xp.reshape(peaks, (-1,))
    powers = _POWERS.on(flat)
    at = xp.clip(xp.searchsorted(powers, flat), 0, powers.shape[0] - 1)
    grid = xp.reshape(take(powers, at), peaks.shape)[:, :, None] * 2.0**-_BITS
    return xp.round(transforms / grid) * grid
