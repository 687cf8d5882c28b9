"""The transforms: orthonormal, single precision, in the norm within a derived bound."""

import numpy as np
import pytest
import scipy.linalg
from samples import U, exact_inverse, exact_transform, random, transform_error, walsh, weights

from sn_compress import FFTCodec
from sn_compress.ops import spectrum

BLOCKS = (32, 45, 64, 75, 1000, 4096, 2**16, 3**5 * 5**3)
CASES = [
    (name, block)
    for name in spectrum.TRANSFORMS
    for block in BLOCKS
    if name != "hadamard" or block & (block - 1) == 0
]


def bound(name: str, block: int) -> float:
    """Relative error of one way; a codec without blocks has one of the vector's length."""
    return transform_error(FFTCodec(transform=name, block=None), block)


@pytest.mark.parametrize(("name", "block"), CASES)
def test_forward_and_inverse(backend, name, block):
    transform = spectrum.TRANSFORMS[name]
    x = random(3 * block).reshape(3, block)
    given = x.copy()
    coefficients = transform.forward(x)
    np.testing.assert_array_equal(x, given)  # the caller's gradient
    assert coefficients.dtype == np.float32
    assert coefficients.shape == (3, (block // 2 + 1) * 2 if transform.parts == 2 else block)
    exact = exact_transform(FFTCodec(transform=name), x.astype(np.float64))
    norms = np.linalg.norm(x.astype(np.float64), axis=1)
    # The half spectrum's plain norm is below that of the whole, which is that of x.
    e = bound(name, block)
    assert (np.linalg.norm(coefficients - exact, axis=1) <= e * norms).all()
    np.testing.assert_allclose(
        exact_inverse(FFTCodec(transform=name), exact, block), x, atol=1e-12 * norms.max()
    )
    back = transform.inverse(coefficients.copy(), block)
    assert back.dtype == np.float32
    difference = np.linalg.norm(back.astype(np.float64) - x, axis=1)
    # There and back; the inverse starts from at most (1 + small) times the norm.
    assert (difference <= 2.01 * e * norms).all()


@pytest.mark.parametrize(("name", "block"), CASES)
def test_energy_is_that_of_the_values(backend, name, block):
    transform = spectrum.TRANSFORMS[name]
    x = random(2 * block, seed=1).reshape(2, block)
    total = float((x.astype(np.float64) ** 2).sum())
    said = spectrum.energy(transform.forward(x), block, transform.parts)
    # |a|**2 - |b|**2 <= |a - b| (|a| + |b|), and |a - b| <= e |x|; the sum itself is in float64.
    assert abs(said - total) <= (2.01 * bound(name, block) + 1e-12) * total
    exact = exact_transform(FFTCodec(transform=name), x.astype(np.float64))
    by_weights = float((weights(block, transform.parts) * exact**2).sum())
    assert abs(by_weights - total) <= 1e-12 * total  # float64, 2**-53 times a few hundred


@pytest.mark.parametrize("name", spectrum.TRANSFORMS)
def test_energy_neither_overflows_nor_vanishes(backend, name):
    transform = spectrum.TRANSFORMS[name]
    for scale in (1e-40, 1e30):
        x = np.full((1, 32), scale, np.float32)
        want = 32 * float(x[0, 0]) ** 2
        got = spectrum.energy(transform.forward(x), 32, transform.parts)
        assert abs(got - want) <= 1e-4 * want


@pytest.mark.parametrize("block", [1, 2, 32, 256, 1024])
def test_hadamard_is_scipys(backend, block):
    x = random(5 * block).reshape(5, block)
    exact = x.astype(np.float64) @ scipy.linalg.hadamard(block) / np.sqrt(block)
    norms = np.linalg.norm(x.astype(np.float64), axis=1)
    e = (np.log2(block) + 2) * U
    got = spectrum.hadamard(x)
    assert (np.linalg.norm(got - exact, axis=1) <= e * norms).all()
    np.testing.assert_allclose(walsh(x.astype(np.float64)), exact, atol=1e-12 * norms.max())
    again = spectrum.hadamard(got)
    assert (np.linalg.norm(again - x, axis=1) <= 2.01 * e * norms).all()
    # Of integers with an even power of two everything is exact.
    if block in (1, 256, 1024):
        whole = np.round(x * 100)
        np.testing.assert_array_equal(
            spectrum.hadamard(whole), whole @ scipy.linalg.hadamard(block) / np.sqrt(block)
        )


@pytest.mark.parametrize("scale", [1, 1e-38, 1e-42, 1e30, 3e38])
@pytest.mark.parametrize("block", [1, 2, 32, 64, 2048, 4096, 2**16])
def test_hadamard_gives_equal_bits_on_both_back_ends(core, monkeypatch, block, scale):
    x = (random(3 * block) * np.float64(scale)).clip(-3.4e38, 3.4e38)
    x = x.astype(np.float32).reshape(3, block)
    x[1] = np.where(np.arange(block) % 3, 0.0, -0.0)
    fast = spectrum.hadamard(x)
    monkeypatch.setattr(spectrum._native, "core", lambda: None)
    slow = spectrum.hadamard(x)
    nan = np.isnan(slow)
    np.testing.assert_array_equal(np.isnan(fast), nan)
    np.testing.assert_array_equal(fast.view(np.uint32)[~nan], slow.view(np.uint32)[~nan])


def test_the_extension_checks_the_block(core):
    rows = np.zeros(96, np.float32)
    for block in (0, -1, 3, 64, 2**40):
        with pytest.raises(ValueError, match="not rows of"):
            core.hadamard(rows, block)


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
