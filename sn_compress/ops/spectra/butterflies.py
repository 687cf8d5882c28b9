"""Discrete Fourier transforms of 2, 4 and 8 complex points, sign -1: what longer ones are made of.

Additions and products in a fixed order, none of them fused, as in `csrc/compress/butterflies.h`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Parts = tuple[Floats, Floats]
"""Real and imaginary parts."""

LONGEST = 2**16  # of the vectors of fourier.py; longer ones are long_fourier.py's
_HALF_ROOT = np.float32(0.70710678)  # cos(pi / 4)


def plus(x: Parts, y: Parts) -> Parts:
    """Sum."""
    return x[0] + y[0], x[1] + y[1]


def minus(x: Parts, y: Parts) -> Parts:
    """Difference."""
    return x[0] - y[0], x[1] - y[1]


def times(x: Parts, y: Parts) -> Parts:
    """Product, no two roundings in one."""
    return x[0] * y[0] - x[1] * y[1], x[0] * y[1] + x[1] * y[0]


def butterfly(z: list[Parts]) -> list[Parts]:
    """Transform of 2, 4 or 8 points, from those of the even and of the odd ones."""
    if len(z) == 1:
        return z
    even, odd = butterfly(z[0::2]), butterfly(z[1::2])
    odd = [_turn(x, k, len(z)) for k, x in enumerate(odd)]
    pairs = list(zip(even, odd, strict=True))
    return [plus(*pair) for pair in pairs] + [minus(*pair) for pair in pairs]


def _turn(x: Parts, k: int, n: int) -> Parts:
    """Times exp(-2 pi i k / n), n <= 8, without the products that ones and zeros spare."""
    re, im = x
    eighths = k * 8 // n
    if eighths == 0:
        return x
    if eighths == 2:
        return im, -re
    if eighths == 1:
        return (re + im) * _HALF_ROOT, (im - re) * _HALF_ROOT
    return (im - re) * _HALF_ROOT, (re + im) * -_HALF_ROOT
