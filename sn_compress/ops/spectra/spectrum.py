"""Orthonormal transforms of blocks, so that energies in both domains agree (Parseval).

"fft"       real FFT: of b reals, b // 2 + 1 complex bins; all but the first and (for even b) the
            last stand for a conjugate pair and count twice in the energy. Lengths that are powers
            of two are fourier.py's, others SciPy's. A block may be cut into spans, see spans.py
"dct"       DCT-II: b real coefficients
"hadamard"  Walsh-Hadamard, b a power of two: additions only; spreads outliers, smooths nothing
"identity"  none: top-k of the values themselves

Coefficients are float32, [nb, bins * parts]; complex bins lie as pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import scipy.fft

from ...devices import _native
from . import fourier, long_fourier, spans

Floats = npt.NDArray[np.float32]


class Transform(NamedTuple):
    """`forward` may return its argument, `inverse` may overwrite it."""

    parts: Literal[1, 2]
    forward: Callable[[Floats], Floats]
    inverse: Callable[[Floats, int], Floats]


def _rfft(blocks: Floats) -> Floats:
    if fourier.fits(blocks.shape[1]):
        return fourier.forward(blocks)
    if long_fourier.fits(blocks.shape[1]):
        return long_fourier.forward(blocks)
    # float32 in, complex64 out: SciPy keeps single precision.
    return scipy.fft.rfft(blocks, axis=-1, norm="ortho").view(np.float32)  # type: ignore[no-any-return]


def _irfft(coefficients: Floats, block: int) -> Floats:
    if fourier.fits(block):
        return fourier.inverse(coefficients, block)
    if long_fourier.fits(block):
        return long_fourier.inverse(coefficients, block)
    return scipy.fft.irfft(  # type: ignore[no-any-return]
        coefficients.view(np.complex64), n=block, axis=-1, norm="ortho", overwrite_x=True
    )


def _dct(blocks: Floats) -> Floats:
    return scipy.fft.dct(blocks, axis=-1, norm="ortho")  # type: ignore[no-any-return]


def _idct(coefficients: Floats, block: int) -> Floats:
    return scipy.fft.idct(  # type: ignore[no-any-return]
        coefficients, axis=-1, norm="ortho", overwrite_x=True
    )


def hadamard(blocks: Floats) -> Floats:
    """Walsh-Hadamard transform of each row, divided by sqrt(b); its own inverse."""
    out = np.array(blocks, np.float32)
    core = _native.core()
    if core is not None:
        core.hadamard(out, out.shape[1])
        return out
    rows, block = out.shape
    half = 1
    with np.errstate(all="ignore"):  # NaN and overflow travel on, as in C++
        while half < block:
            pairs = out.reshape(rows, block // (2 * half), 2, half)
            pairs[:, :, 0], pairs[:, :, 1] = (
                pairs[:, :, 0] + pairs[:, :, 1],
                pairs[:, :, 0] - pairs[:, :, 1],
            )
            half *= 2
        out *= np.float32(block**-0.5)
    return out


TRANSFORMS = {
    "fft": Transform(2, _rfft, _irfft),
    "dct": Transform(1, _dct, _idct),
    "hadamard": Transform(1, hadamard, lambda coefficients, block: hadamard(coefficients)),
    # A copy: encoding uses the coefficients as scratch, and the blocks may be the caller's.
    "identity": Transform(1, np.copy, lambda coefficients, block: coefficients),
}


def transform(name: str, span: int | None = None) -> Transform:
    """The transform of this name; "fft" of spans of blocks, where they are longer."""
    if span is None:
        return TRANSFORMS[name]

    def forward(blocks: Floats) -> Floats:
        block = blocks.shape[1]
        if block <= span:
            return _rfft(blocks)
        if fourier.fits(span):
            return fourier.forward(blocks, span)
        return spans.join(_rfft(blocks.reshape(-1, span)), block)  # type: ignore[no-any-return]

    def inverse(bins: Floats, block: int) -> Floats:
        if block <= span:
            return _irfft(bins, block)
        if fourier.fits(span):
            return fourier.inverse(bins, block, span)
        return _irfft(spans.part(bins, span), span).reshape(-1, block)

    return Transform(2, forward, inverse)


def energy(coefficients: Floats, block: int, parts: int) -> float:
    """Squared norm of the blocks that have these coefficients, summed in float64."""
    squares = coefficients.astype(np.float64) ** 2
    total = squares.sum()
    if parts == 2:
        total = 2 * total - squares[:, :2].sum()
        if block % 2 == 0:
            total -= squares[:, -2:].sum()
    return float(total)


def fast_length(n: int) -> int:
    """The smallest length >= n with no prime factor above 5: quick in every FFT library."""
    return int(scipy.fft.next_fast_len(n, real=True)) if n else 0
