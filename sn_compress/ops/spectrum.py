"""Orthonormal transforms of blocks, so that energies in both domains agree (Parseval).

"fft"       real FFT: b reals give b // 2 + 1 complex bins; all but the first and (for even b) the
            last represent a conjugate pair and count twice in the energy. Blocks of up to 65,536,
            a power of two, use our own FFT; others, and vectors of any length, SciPy's
"dct"       DCT-II: b real coefficients
"hadamard"  Walsh-Hadamard, b a power of two: additions only; spreads outliers, smooths nothing
"identity"  none: top-k of the values themselves

Coefficients are float32, [nb, bins * parts]; complex bins are stored as pairs.

Our own FFT is bit-identical on every machine. SciPy's processes at most four numbers at a time,
wherever it runs, and its rounding differs between versions. Here half as many complex points go
through self-sorting passes of radix 8 (Stockham), and the real vector's spectrum is computed from
theirs; the extension uses the machine's widest vectors. There are only additions and products in a
fixed order, none of them fused, with a table computed by correctly rounded operations only. So
ranks on different machines, with and without the extension, decode alike.

`csrc/compress/spectrum.cpp` is the fast implementation; `forward_twin` and `inverse_twin` are its
reference, and run if the extension is missing.

A block may be split into spans with separate FFTs, with as many bins in total as one FFT of the
block. Distant elements of a flat gradient are hardly related: a short FFT keeps what is sparse
sparse, and the strongest bins are still selected from the whole block. A span of s reals has
s / 2 + 1 bins, two of them real, one too many for the bins of all spans to be the block's
b / 2 + 1. So a span's two real bins become the parts of one complex bin, times the square root of a
half, as such a bin counts twice in the energy; those of the first span remain the block's two edge
bins. Bin k of span q is bin q s / 2 + k of the block.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import scipy.fft

from .. import _native, arrays
from ..arrays import Array, device_of, namespace

Floats = npt.NDArray[np.float32]
Parts = tuple[Floats, Floats]
"""Real and imaginary parts."""

SHORTEST, LONGEST = 32, 2**16  # the longest with a table of roots that fits the L2 cache
_HALF_ROOT = np.float32(0.70710678)  # cos(pi / 4)
# Factors when two edge bins of a span become one complex bin, and back: such a bin counts twice in
# the energy. Python floats with float32 values, as every library accepts those.
_DOWN, _UP = float(np.float32(0.70710678)), float(np.float32(1.41421356))


def fits(length: int) -> bool:
    """Whether these functions support FFTs of this length; SciPy's are used for others."""
    return SHORTEST <= length <= LONGEST and length & (length - 1) == 0


@cache
def roots(block: int) -> Floats:
    """Return roots of unity in the order of use, [m] float32, real parts before imaginary.

    exp(-2 pi i k / block) for k below block / 2; then, for each pass but the last, with n points
    per transform, exp(-2 pi i k p / n), k = 1..7 and p below n / 8.
    """
    right, up = _circle(block)
    points = block // 2
    turns = [np.arange(points)]
    n = points
    while n > 8:
        turns += [k * np.arange(n // 8) * (block // n) for k in range(1, 8)]
        n //= 8
    table = np.concatenate([part[at] for at in turns for part in (right, up)]).astype(np.float32)
    table.setflags(write=False)
    return table


def _circle(count: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return exp(-2 pi i k / count) for k below `count`, a power of two from 4, as two vectors.

    By halving angles and multiplying: sums, products, quotients and square roots are the same on
    all machines, unlike sines.
    """
    # Start with two steps: halving a half turn would divide zero by zero.
    steps = [(-1.0, 0.0), (0.0, 1.0)]  # cosine and sine of a half turn, a quarter, an eighth, ...
    while len(steps) < count.bit_length() - 1:
        cosine, sine = steps[-1]
        half = math.sqrt((1 + cosine) / 2)
        steps.append((half, sine / (2 * half)))
    right, up = np.ones(1), np.zeros(1)
    for cosine, sine in reversed(steps):
        right, up = (
            np.concatenate([right, right * cosine + up * sine]),
            np.concatenate([up, up * cosine - right * sine]),
        )
    return right, up


def span_length(span: int | None, block: int) -> int:
    """Return the length of each FFT of a block: that of a span, or of the block if shorter."""
    return min(span or block, block)


def join_spans(bins: Array, block: int) -> Array:
    """Combine the spectra of spans into those of blocks, bins as pairs.

    bins : [blocks * spans, span + 2] float32; returns [blocks, block + 2]
    """
    xp, span = namespace(bins), int(bins.shape[1]) - 2
    spans = xp.reshape(bins, (-1, block // span, span + 2))
    edges = xp.stack([spans[:, :, 0], spans[:, :, span]], axis=2)
    first = edges[:, 0]
    inner = xp.concat([edges * _DOWN, spans[:, :, 2:span]], axis=2)
    flat = xp.reshape(inner, (-1, block))
    zero = xp.zeros((int(flat.shape[0]), 1), dtype=flat.dtype, device=device_of(flat))
    return xp.concat([first[:, :1], zero, flat[:, 2:], first[:, 1:], zero], axis=1)


def part_spans(bins: Array, span: int) -> Array:
    """Inverse of `join_spans`; imaginary parts of the edge bins are ignored.

    bins : [blocks, block + 2] float32; returns [blocks * spans, span + 2]
    """
    xp, block = namespace(bins), int(bins.shape[1]) - 2
    first = xp.concat([bins[:, :1], bins[:, block : block + 1]], axis=1)
    blocks = xp.reshape(bins[:, :block], (-1, block // span, span))
    edges = xp.concat([first[:, None, :], blocks[:, 1:, :2] * _UP], axis=1)
    zero = xp.zeros((*edges.shape[:2], 1), dtype=bins.dtype, device=device_of(bins))
    spans = xp.concat([edges[:, :, :1], zero, blocks[:, :, 2:], edges[:, :, 1:], zero], axis=2)
    return xp.reshape(spans, (-1, span + 2))


def rfft(blocks: Array) -> Array:
    """Return each row's spectrum over sqrt(length), any length and array library, bins as pairs.

    [nb, block] -> [nb, 2 * (block // 2 + 1)] float32: by `forward_fourier` if possible, else by the
    library's FFT: SciPy's, cuFFT, torch's, TensorFlow's.
    """
    if isinstance(blocks, np.ndarray) and fits(blocks.shape[1]):
        return forward_fourier(blocks)
    return arrays.rfft(blocks)


def irfft(bins: Array, block: int) -> Array:
    """Inverse of `rfft`; may overwrite its argument."""
    if isinstance(bins, np.ndarray) and fits(block):
        return inverse_fourier(bins, block)
    return arrays.irfft(bins, block)


def forward_fourier(blocks: Floats, span: int | None = None) -> Floats:
    """Return the spectrum of each row, [nb, block] -> [nb, block + 2], bins as pairs.

    Divided by sqrt(block); or the spectra of spans of the row, each divided by sqrt(span).
    """
    core = _native.core()
    if core is None:  # the same bits, several times slower
        return forward_twin(blocks, span)
    rows, block = blocks.shape
    span = span or block
    bins = np.empty((rows, block + 2), np.float32)
    core.fourier(np.ascontiguousarray(blocks), bins, roots(span), block, span, False)
    return bins


def inverse_fourier(bins: Floats, block: int, span: int | None = None) -> Floats:
    """Inverse of `forward_fourier`; imaginary parts of the first and last bin are ignored."""
    core = _native.core()
    if core is None:
        return inverse_twin(bins, block, span)
    span = span or block
    blocks = np.empty((len(bins), block), np.float32)
    core.fourier(blocks, np.ascontiguousarray(bins), roots(span), block, span, True)
    return blocks


def forward_twin(blocks: Floats, span: int | None = None) -> Floats:
    """`forward_fourier` in NumPy."""
    rows, block = blocks.shape
    if span is not None and span != block:
        with np.errstate(all="ignore"):
            return join_spans(forward_twin(blocks.reshape(-1, span)), block)  # type: ignore[no-any-return]
    points, scale = block // 2, np.float32(1 / math.sqrt(block))
    with np.errstate(all="ignore"):  # NaN and overflow propagate, as in C++
        re, im = _transform((blocks[:, 0::2], blocks[:, 1::2]), block)
        out = np.zeros((rows, block + 2), np.float32)
        out[:, 0] = (re[:, 0] + im[:, 0]) * scale
        out[:, block] = (re[:, 0] - im[:, 0]) * scale
        a, b, c, d = re[:, 1:], im[:, 1:], re[:, :0:-1], im[:, :0:-1]
        cosines, sines = roots(block)[1:points], roots(block)[points + 1 : 2 * points]
        up, over = b + d, c - a
        half = np.float32(0.5) * scale
        out[:, 2:block:2] = ((a + c) + (cosines * up - sines * over)) * half
        out[:, 3:block:2] = ((b - d) + (cosines * over + sines * up)) * half
    return out


def inverse_twin(bins: Floats, block: int, span: int | None = None) -> Floats:
    """`inverse_fourier` in NumPy."""
    if span is not None and span != block:
        with np.errstate(all="ignore"):
            return inverse_twin(part_spans(bins, span), span).reshape(-1, block)
    points, scale = block // 2, np.float32(1 / math.sqrt(block))
    re, im = bins[:, 0::2], bins[:, 1::2].copy()
    im[:, [0, points]] = 0
    p, q, r, s = re[:, :points], im[:, :points], re[:, :0:-1], im[:, :0:-1]
    cosines, sines = roots(block)[:points], roots(block)[points : 2 * points]
    out = np.empty((len(bins), block), np.float32)
    with np.errstate(all="ignore"):
        right, up = p - r, q + s
        joined = (
            (p + r) - (cosines * up - sines * right),
            (q - s) + (cosines * right + sines * up),
        )
        # Swapping real and imaginary parts before and after turns a forward transform into an
        # inverse one.
        im, re = _transform((joined[1], joined[0]), block)
        out[:, 0::2] = re * scale
        out[:, 1::2] = im * scale
    return out


def _transform(z: Parts, block: int) -> Parts:
    """Return the discrete Fourier transform, sign -1, of each row of block / 2 complex points."""
    rows, n, stride = len(z[0]), block // 2, 1
    table = roots(block)[block:]
    while n > 1:
        radix = min(8, n)
        m = n // radix
        planes = [part.reshape(rows, radix, m, stride) for part in z]
        split = _butterfly([(planes[0][:, k], planes[1][:, k]) for k in range(radix)])
        if m > 1:
            twiddles, table = table[: 14 * m].reshape(7, 2, m, 1), table[14 * m :]
            split[1:] = [_times(x, (w[0], w[1])) for x, w in zip(split[1:], twiddles, strict=True)]
        re, im = (np.stack(parts, axis=2) for parts in zip(*split, strict=True))
        z = re.reshape(rows, -1), im.reshape(rows, -1)
        n, stride = m, stride * radix
    return z


def _times(x: Parts, y: Parts) -> Parts:
    """Return the complex product, without fused multiply-add."""
    return x[0] * y[0] - x[1] * y[1], x[0] * y[1] + x[1] * y[0]


def _butterfly(z: list[Parts]) -> list[Parts]:
    """Transform 2, 4 or 8 points, by transforming the even and the odd ones."""
    if len(z) == 1:
        return z
    even, odd = _butterfly(z[0::2]), _butterfly(z[1::2])
    odd = [_turn(x, k, len(z)) for k, x in enumerate(odd)]
    pairs = list(zip(even, odd, strict=True))
    sums = [(a[0] + b[0], a[1] + b[1]) for a, b in pairs]
    return sums + [(a[0] - b[0], a[1] - b[1]) for a, b in pairs]


def _turn(x: Parts, k: int, n: int) -> Parts:
    """Multiply by exp(-2 pi i k / n), n <= 8, without products by one or zero."""
    re, im = x
    eighths = k * 8 // n
    if eighths == 0:
        return x
    if eighths == 2:
        return im, -re
    if eighths == 1:
        return (re + im) * _HALF_ROOT, (im - re) * _HALF_ROOT
    return (im - re) * _HALF_ROOT, (re + im) * -_HALF_ROOT


class Transform(NamedTuple):
    """A transform; `forward` may return its argument, `inverse` may overwrite it."""

    parts: Literal[1, 2]
    forward: Callable[[Array], Array]
    inverse: Callable[[Array, int], Array]


def _dct(blocks: Floats) -> Floats:
    return scipy.fft.dct(blocks, axis=-1, norm="ortho")  # type: ignore[no-any-return]


def _idct(coefficients: Floats, block: int) -> Floats:
    return scipy.fft.idct(  # type: ignore[no-any-return]
        coefficients, axis=-1, norm="ortho", overwrite_x=True
    )


def hadamard(blocks: Array) -> Array:
    """Return the Walsh-Hadamard transform of each row, divided by sqrt(b); its own inverse."""
    if isinstance(blocks, np.ndarray) and (core := _native.core()) is not None:
        out = np.array(blocks, np.float32)
        core.hadamard(out, out.shape[1])
        return out
    xp, (rows, block) = namespace(blocks), blocks.shape
    half, out = 1, blocks
    with arrays.full_fp32_matmul(blocks):  # NaN and overflow propagate silently, as in C++
        while half < block:
            pairs = xp.reshape(out, (rows, block // (2 * half), 2, half))
            left, right = pairs[:, :, 0], pairs[:, :, 1]
            out = xp.stack([left + right, left - right], axis=2)
            half *= 2
        return xp.reshape(out, (rows, block)) * float(np.float32(block**-0.5))


TRANSFORMS = {
    "fft": Transform(2, rfft, irfft),
    "dct": Transform(1, _dct, _idct),
    "hadamard": Transform(1, hadamard, lambda coefficients, block: hadamard(coefficients)),
    # A copy: encoding overwrites the coefficients, and the blocks may belong to the caller.
    "identity": Transform(1, np.copy, lambda coefficients, block: coefficients),
}


def transform(name: str, span: int | None = None) -> Transform:
    """Return the transform of this name; for "fft", of spans if blocks are longer."""
    if span is None:
        return TRANSFORMS[name]

    def forward(blocks: Array) -> Array:
        block = int(blocks.shape[1])
        if block <= span:
            return rfft(blocks)
        # The extension joins the spans of a block while they are in the cache; the bits are the
        # same.
        if isinstance(blocks, np.ndarray) and fits(span):
            return forward_fourier(blocks, span)
        return join_spans(rfft(namespace(blocks).reshape(blocks, (-1, span))), block)

    def inverse(bins: Array, block: int) -> Array:
        if block <= span:
            return irfft(bins, block)
        if isinstance(bins, np.ndarray) and fits(span):
            return inverse_fourier(bins, block, span)
        return namespace(bins).reshape(irfft(part_spans(bins, span), span), (-1, block))

    return Transform(2, forward, inverse)


def fast_length(n: int) -> int:
    """Return the smallest length >= n with no prime factor above 5: fast in every FFT library."""
    return int(scipy.fft.next_fast_len(n, real=True)) if n else 0
