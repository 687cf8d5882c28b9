"""Which coefficients stay: the k of largest magnitude, ties to the lower position.

Comparing re**2 + im**2 as it stands would underflow for small gradients (1e-25 squared is zero
in float32) and overflow for large ones, so a block is first scaled by the power of two that
brings its largest component near one: exact, and the same on every back end. Bins below 2**-75 of
the largest count as zero.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.int32]
Positions = npt.NDArray[np.uint32]

MAX_FINITE = 0x7F7FFFFF


def peak_bits(coefficients: npt.NDArray[np.float32]) -> npt.NDArray[np.uint32]:
    """Bits of the largest |component| of each row, [nb, m] float32 -> [nb] uint32.

    Above MAX_FINITE if the row has a NaN or an Inf: float bits without sign order like integers.
    """
    bits = coefficients.view(np.uint32) & np.uint32(0x7FFFFFFF)
    return np.asarray(bits.max(axis=1), np.uint32)


def magnitude_keys(
    coefficients: npt.NDArray[np.float32], peaks: npt.NDArray[np.uint32], parts: int
) -> Keys:
    """Integers that order like the magnitudes of the bins, [nb, bins * parts] -> [nb, bins] int32.

    For real bins (parts = 1) the bits of |c|, for complex ones those of the scaled |c|**2. Rows
    with non-finite components get meaningless keys; the caller marks them by `peaks`.
    """
    if parts == 1:
        return (coefficients.view(np.uint32) & np.uint32(0x7FFFFFFF)).view(np.int32)
    exponent = np.minimum(peaks >> 23, 253)
    scale = ((254 - exponent) << 23).astype(np.uint32).view(np.float32)  # [nb] powers of two
    with np.errstate(all="ignore"):
        scaled = coefficients * scale[:, None]
        squares = scaled * scaled
        return np.asarray(squares[:, 0::2] + squares[:, 1::2]).view(np.int32)


def largest(keys: Keys, k: int) -> Positions:
    """Positions of the k largest keys of each row, ascending, [nb, k] uint32."""
    order = np.argsort(-keys.astype(np.int64), axis=1, kind="stable")[:, :k]
    return np.sort(order, axis=1).astype(np.uint32)
