"""The transform: orthonormal, single precision, in the norm within a derived bound."""

import numpy as np
import pytest
import scipy.fft
from samples import fft_error, random, weights

from sn_compress.ops import spectrum

BLOCKS = (32, 45, 64, 75, 1000, 4096, 2**16, 3**5 * 5**3)


@pytest.mark.parametrize("block", BLOCKS)
def test_forward_and_inverse(block):
    x = random(3 * block).reshape(3, block)
    bins = spectrum.forward(x)
    assert bins.dtype == np.complex64
    assert bins.shape == (3, spectrum.bins(block))
    exact = scipy.fft.rfft(x.astype(np.float64), norm="ortho")
    norms = np.linalg.norm(x.astype(np.float64), axis=1)
    # The half spectrum's plain norm is below that of the whole, which is that of x.
    assert (np.linalg.norm(bins - exact, axis=1) <= fft_error(block) * norms).all()
    back = spectrum.inverse(bins.copy(), block)
    assert back.dtype == np.float32
    difference = np.linalg.norm(back.astype(np.float64) - x, axis=1)
    # There and back; the inverse starts from at most (1 + small) times the norm.
    assert (difference <= 2.01 * fft_error(block) * norms).all()


@pytest.mark.parametrize("block", BLOCKS)
def test_energy_is_that_of_the_values(block):
    x = random(2 * block, seed=1).reshape(2, block)
    exact = scipy.fft.rfft(x.astype(np.float64), norm="ortho")
    total = float((x.astype(np.float64) ** 2).sum())
    # |a|**2 - |b|**2 <= |a - b| (|a| + |b|), and |a - b| <= fft_error |x|.
    assert (
        abs(spectrum.energy(spectrum.forward(x), block) - total) <= 2.01 * fft_error(block) * total
    )
    by_weights = float((weights(block) * abs(exact) ** 2).sum())
    assert abs(by_weights - total) <= 1e-12 * total  # float64, 2**-53 times a few hundred


def test_energy_neither_overflows_nor_vanishes():
    for scale in (1e-40, 1e30):
        x = np.full((1, 32), scale, np.float32)
        want = 32 * float(x[0, 0]) ** 2
        assert abs(spectrum.energy(spectrum.forward(x), 32) - want) <= 1e-4 * want


def smooth(n: int) -> bool:
    for prime in (2, 3, 5):
        while n % prime == 0:
            n //= prime
    return n == 1


def test_fast_length_is_the_next_smooth_number():
    assert spectrum.fast_length(0) == 0
    want = 2000
    assert smooth(want)
    for n in range(2000, 0, -1):
        want = n if smooth(n) else want
        assert spectrum.fast_length(n) == want
    for n in (2**20 + 1, 25_000_001, 2**40 + 1):
        assert smooth(spectrum.fast_length(n))
        assert n <= spectrum.fast_length(n) <= n * 1.01
