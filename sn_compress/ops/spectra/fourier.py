"""Real FFT of blocks whose length is a power of two: the same bits on every machine.

SciPy's works on four numbers at a time at best, wherever it runs, and what it rounds differs
between its versions. Here half as many complex points go through passes of radix 8 which sort on
their way (Stockham), and the spectrum of the vector is taken out of theirs; the extension does
that in the machine's widest vectors. Nothing but additions and products in a fixed order, none of
them fused, with a table that is made of exactly rounded operations only. So ranks on different
machines, with and without the extension, decode alike.

`csrc/compress/fourier.cpp` does the work; `forward_twin` and `inverse_twin` are its oracle and its
stand-in.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import numpy.typing as npt

from ...devices import _native
from . import spans
from .butterflies import LONGEST, Floats, Parts, butterfly, times

SHORTEST = 32


def fits(length: int) -> bool:
    """Whether these functions take FFTs of this length; others are SciPy's."""
    return SHORTEST <= length <= LONGEST and length & (length - 1) == 0


@cache
def roots(block: int) -> Floats:
    """Roots of unity in the order the passes use them, [m] float32, real parts before imaginary.

    exp(-2 pi i k / block) for k below block / 2; then, for each pass but the last, with n points a
    transform, exp(-2 pi i k p / n), k = 1..7 and p below n / 8.
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
    """exp(-2 pi i k / count) for k below `count`, a power of two from 4 up, as two vectors.

    By halving angles and multiplying: sums, products, quotients and square roots are the same on
    all machines, which sines are not.
    """
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


def forward(blocks: Floats, span: int | None = None) -> Floats:
    """Spectrum of each row, [nb, block] -> [nb, block + 2], bins as pairs.

    Over sqrt(block); or those of spans of the row, each over sqrt(span), as spans.py lays them.
    """
    core = _native.core()
    if core is None:
        return forward_twin(blocks, span)
    rows, block = blocks.shape
    span = span or block
    bins = np.empty((rows, block + 2), np.float32)
    core.fourier(np.ascontiguousarray(blocks), bins, roots(span), block, span, False)
    return bins


def inverse(bins: Floats, block: int, span: int | None = None) -> Floats:
    """Inverse of `forward`; imaginary parts of the first and last bin count for nothing."""
    core = _native.core()
    if core is None:
        return inverse_twin(bins, block, span)
    span = span or block
    blocks = np.empty((len(bins), block), np.float32)
    core.fourier(blocks, np.ascontiguousarray(bins), roots(span), block, span, True)
    return blocks


def forward_twin(blocks: Floats, span: int | None = None) -> Floats:
    """`forward` in NumPy."""
    rows, block = blocks.shape
    if span is not None and span != block:
        with np.errstate(all="ignore"):
            return spans.join(forward_twin(blocks.reshape(-1, span)), block)  # type: ignore[no-any-return]
    points, scale = block // 2, np.float32(1 / math.sqrt(block))
    with np.errstate(all="ignore"):  # NaN and overflow travel on, as in C++
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
    """`inverse` in NumPy."""
    if span is not None and span != block:
        with np.errstate(all="ignore"):
            return inverse_twin(spans.part(bins, span), span).reshape(-1, block)
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
        # Real and imaginary parts change places before and after: the sign turns around.
        im, re = _transform((joined[1], joined[0]), block)
        out[:, 0::2] = re * scale
        out[:, 1::2] = im * scale
    return out


def _transform(z: Parts, block: int) -> Parts:
    """Discrete Fourier transform, sign -1, of each row of block / 2 complex points."""
    rows, n, stride = len(z[0]), block // 2, 1
    table = roots(block)[block:]
    while n > 1:
        radix = min(8, n)
        m = n // radix
        planes = [part.reshape(rows, radix, m, stride) for part in z]
        split = butterfly([(planes[0][:, k], planes[1][:, k]) for k in range(radix)])
        if m > 1:
            own, table = table[: 14 * m].reshape(7, 2, m, 1), table[14 * m :]
            split[1:] = [times(x, (w[0], w[1])) for x, w in zip(split[1:], own, strict=True)]
        re, im = (np.stack(parts, axis=2) for parts in zip(*split, strict=True))
        z = re.reshape(rows, -1), im.reshape(rows, -1)
        n, stride = m, stride * radix
    return z
