"""What an error in a saved activation does to the gradient of the weight it is multiplied with.

A linear layer's gradient is dW = dY^T X. With X' = X + E, where the errors E are independent, of
mean zero and of variance v[n, i], that of an entry is sum over n of dY[n, o]^2 v[n, i], exactly.
Its mean over the entries is v ||dY||^2 / outputs, with v the mean of v[n, i], if errors and dY are
unrelated. A convolution is the same with n over images and positions; at the rim of an image some
taps meet padding, which has no error. Nothing here is fitted: the paper (Jin et al., arXiv
2011.09017) has an empirical constant, and the mean magnitude of dY where the mean square belongs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

PAPER_CONSTANT = 0.32
"""Of the paper's formula, as remembered; it depends on the distribution of dY."""


def gradient_sd(
    variance: float, gradient_energy: float, outputs: int, coverage: float = 1.0
) -> float:
    """Return the standard deviation of the error of an entry of dW.

    Parameters
    ----------
    variance
        Mean variance of the error of an element of X, zeros included.
    gradient_energy
        The sum of dY^2 over all that the layer puts out.
    outputs
        Features or channels of Y.
    coverage
        Fraction of the products of a convolution that do not meet padding.

    Examples
    --------
    >>> round(gradient_sd(variance=0.03, gradient_energy=64.0, outputs=16), 4)
    0.3464
    """
    return math.sqrt(variance * gradient_energy / max(outputs, 1) * coverage)


def error_tolerance(
    sd: float, gradient_energy: float, outputs: int, nonzero: float = 1.0, coverage: float = 1.0
) -> float:
    """Return the tolerance whose uniform errors, on non-zeros only, give dW this deviation.

    A uniform error in [-tolerance, tolerance] has the variance tolerance^2 / 3. Infinite where dY
    is zero.
    """
    weight = gradient_energy / max(outputs, 1) * coverage * nonzero
    return sd * math.sqrt(3 / weight) if weight else math.inf


def paper_sd(
    tolerance: float, mean_gradient: float, terms: int, nonzero: float, a: float = PAPER_CONSTANT
) -> float:
    """Return the paper's a * L * sqrt(N R) * tolerance, with L the mean magnitude of dY.

    `terms` is the number of products an entry of dW sums: the batch, times positions for a
    convolution.
    """
    return a * mean_gradient * math.sqrt(terms * nonzero) * tolerance


def coverage(
    inputs: Sequence[int],
    outputs: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> float:
    """Return the fraction of a convolution's (position, tap) pairs that lie inside the input.

    One number per spatial dimension in each argument.

    Examples
    --------
    >>> coverage([4], [4], [3], [1], [1], [1])  # 2 of 12 pairs are off the ends
    0.8333333333333334
    """
    inside = 1.0
    for size, out, taps, step, pad, apart in zip(
        inputs, outputs, kernel, stride, padding, dilation, strict=True
    ):
        hits = sum(
            0 <= position * step + tap * apart - pad < size
            for position in range(out)
            for tap in range(taps)
        )
        inside *= hits / max(out * taps, 1)
    return inside
