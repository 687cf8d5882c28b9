"""Real FFT of one long vector: the same bits on every machine, and faster than SciPy's.

SciPy's transform of a single vector works on one number at a time and goes through all of memory
in each of its passes. Here the vector is a matrix of `height` rows and `width` columns (Bailey,
"FFTs in external or hierarchical memory", J. Supercomputing 4, 1990). With j = width * a + b and
k = r + height * c,

    X[k] = sum over b of  w(width)^(b c)  w(length)^(b r)  sum over a of  w(height)^(a r) x[j]

where w(n) = exp(-2 pi i / n): transforms of the columns, a turn of each element, transforms of the
rows, each over pieces that stay in the cache, sixteen side by side in vector registers. The columns
are real, so two make one complex one, and half of the rows are enough.

`csrc/compress/long_fourier.cpp` does the work; `forward_twin` and `inverse_twin` are its oracle
and its stand-in: the same operations in the same order. Between the halves lies the `plane`,
the rows that are needed in the order of the extension, see long_fourier.h.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...devices import _native
from .butterflies import LONGEST, Floats, Parts, butterfly, minus, plus, times

Doubles = npt.NDArray[np.float64]

FINE = 64  # rows between those whose turns are multiplied up from the first; csrc: kFineTurns
SIDE = 16  # transforms side by side; csrc: kSide
_SHARE = 8  # tiles a thread takes at a time
_THIRD = np.float32(0.8660254)  # sin of a third of a turn
_FIFTHS = tuple(map(np.float32, (0.309017, -0.809017, 0.95105654, 0.58778524)))


class Split(NamedTuple):
    """How a vector is split, and the tables; as the extension takes it."""

    height: int
    width: int
    height_roots: Floats
    width_roots: Floats
    turns: Doubles

    @property
    def length(self) -> int:
        return self.height * self.width

    @property
    def column_tiles(self) -> int:
        return -(-self.width // (2 * SIDE))

    @property
    def row_tiles(self) -> int:
        return self.height // 2 // SIDE + 1

    def plane(self, make: Callable[..., Floats] = np.empty) -> Floats:
        """Room for the spectrum, float32."""
        return make(self.row_tiles * self.width * 2 * SIDE, np.float32)


def fits(length: int) -> bool:
    """Whether these functions take vectors of this length; shorter ones are fourier.py's."""
    return length > LONGEST and length % 2 == 0 and _smooth(length)


def _smooth(n: int) -> bool:
    for prime in (2, 3, 5):
        while n % prime == 0:
            n //= prime
    return n == 1


@lru_cache(maxsize=16)  # a split of 2**24 elements takes 200 KiB
def split(length: int) -> Split:
    """The split of a length that `fits`: as square as can be, full tiles of columns if possible."""
    divisors = [1]
    for radix, _ in _radices(length):
        divisors = sorted({d * r for d in divisors for r in range(1, radix + 1) if radix % r == 0})
    widths = [w for w in divisors if w % 2 == 0 and min(w, length // w) >= 2 * SIDE]
    width = min(widths, key=lambda w: (w % (2 * SIDE) > 0, max(w, length // w), w))
    height = length // width
    columns = np.arange(width)
    turns = np.concatenate([*_turns(columns, length), *_turns(FINE * columns, length)])
    tables = _roots(height), _roots(width), turns
    for table in tables:
        table.setflags(write=False)
    return Split(height, width, *tables)


def _radices(n: int) -> Iterator[tuple[int, int]]:
    """Of each pass its radix and how many points its transforms have after it."""
    while n > 1:
        radix = next(radix for radix in (8, 4, 2, 3, 5) if n % radix == 0)
        n //= radix
        yield radix, n


def _roots(n: int) -> Floats:
    """For each pass but the last: exp(-2 pi i p k / points), pairs, k = 1..radix - 1 for each p."""
    tables = [np.empty(0)]
    for radix, left in _radices(n):
        if left > 1:
            powers = np.arange(left)[:, None] * np.arange(1, radix)
            tables.append(np.stack(_turns(powers, radix * left), axis=-1).reshape(-1))
    return np.concatenate(tables).astype(np.float32)


def _turns(numerators: npt.NDArray[np.int64], n: int) -> tuple[Doubles, Doubles]:
    """exp(-2 pi i k / n), float64, by Taylor's series in the first eighth of a turn.

    Sums and products are the same on all machines, which a library's sines are not.
    """
    eighth, rest = np.divmod(8 * (numerators % n), n)
    odd = eighth % 2 == 1
    angle = np.where(odd, n - rest, rest) / n * (np.pi / 4)
    square = angle * angle
    cosine, sine = np.ones_like(square), np.ones_like(square)
    for k in range(17, 0, -2):
        cosine = 1 - square * cosine / (k * (k + 1))
        sine = 1 - square * sine / ((k + 1) * (k + 2))
    sine = sine * angle
    swapped = (eighth + 1) // 2 % 2 == 1  # nearer to the vertical axis
    right, up = np.where(swapped, sine, cosine), np.where(swapped, cosine, sine)
    right = np.where((eighth >= 2) & (eighth < 6), -right, right)
    return right, np.where(eighth < 4, -up, up)


def to_plane(
    values: Floats,
    length: int,
    half: bool = False,
    memory: Floats | None = None,
    decay: float = 1.0,
    threads: int = 1,
) -> tuple[Floats, int]:
    """The plane of the spectrum of `values` + decay * `memory`, and the bits of its largest |part|.

    values : [m] float32, contiguous; zeros behind up to `length`. With `half`, rounded to float16
    memory : [length + 2] float32, bins as pairs, or None
    Needs the extension.
    """
    core, cut = _native.core(), split(length)
    plane = cut.plane()

    def columns(firsts: Iterator[int]) -> None:
        for first in firsts:
            last = min(first + _SHARE, cut.column_tiles)
            core.long_forward_columns(cut, values, plane, half, first, last)

    def rows(firsts: Iterator[int]) -> int:
        peak = 0
        for first in firsts:
            last = min(first + _SHARE, cut.row_tiles)
            peak = max(peak, core.long_forward_rows(cut, plane, memory, decay, first, last))
        return peak

    _native.parallel(columns, range(0, cut.column_tiles, _SHARE), threads)
    return plane, max(_native.parallel(rows, range(0, cut.row_tiles, _SHARE), threads))


def from_plane(plane: Floats, length: int, out: Floats, threads: int = 1) -> None:
    """Write the first elements of the vector with this spectrum into `out`, [m] float32.

    The plane becomes scratch. Needs the extension.
    """
    core, cut = _native.core(), split(length)

    def rows(firsts: Iterator[int]) -> None:
        for first in firsts:
            core.long_inverse_rows(cut, plane, first, min(first + _SHARE, cut.row_tiles))

    def columns(firsts: Iterator[int]) -> None:
        for first in firsts:
            last = min(first + _SHARE, cut.column_tiles)
            core.long_inverse_columns(cut, plane, out, first, last)

    _native.parallel(rows, range(0, cut.row_tiles, _SHARE), threads)
    _native.parallel(columns, range(0, cut.column_tiles, _SHARE), threads)


def forward(blocks: Floats) -> Floats:
    """Spectrum of each row over sqrt(length), [nb, length] -> [nb, length + 2], bins as pairs."""
    core = _native.core()
    if core is None:
        return forward_twin(blocks)
    rows, length = blocks.shape
    bins = np.empty((rows, length + 2), np.float32)
    for row, out in zip(np.ascontiguousarray(blocks), bins, strict=True):
        core.long_natural_order(split(length), to_plane(row, length)[0], out, False)
    return bins


def inverse(bins: Floats, length: int) -> Floats:
    """Inverse of `forward`; imaginary parts of the first and last bin count for nothing."""
    core = _native.core()
    if core is None:
        return inverse_twin(bins, length)
    blocks = np.empty((len(bins), length), np.float32)
    for row, out in zip(np.ascontiguousarray(bins), blocks, strict=True):
        plane = split(length).plane()
        core.long_natural_order(split(length), plane, row, True)
        from_plane(plane, length, out)
    return blocks


def forward_twin(blocks: Floats) -> Floats:
    """`forward` in NumPy."""
    out = np.zeros((len(blocks), blocks.shape[1] + 2), np.float32)
    with np.errstate(all="ignore"):  # NaN and overflow travel on, as in C++
        for row, bins in zip(blocks, out, strict=True):
            _forward(row, bins)
    return out


def inverse_twin(bins: Floats, length: int) -> Floats:
    """`inverse` in NumPy."""
    out = np.empty((len(bins), length), np.float32)
    with np.errstate(all="ignore"):
        for row, values in zip(bins, out, strict=True):
            _inverse(row, values)
    return out


def _forward(values: Floats, bins: Floats) -> None:
    cut = split(values.size)
    height, width, last = cut.height, cut.width, cut.height // 2
    matrix = values.reshape(height, width)
    re, im = _transform((matrix[:, 0::2], matrix[:, 1::2]), cut.height_roots)
    mirror = (height - np.arange(last + 1)) % height
    a, b, c, d = re[: last + 1], im[: last + 1], re[mirror], im[mirror]
    rows = np.empty((last + 1, width), np.float32), np.empty((last + 1, width), np.float32)
    rows[0][:, 0::2], rows[1][:, 0::2] = a + c, b - d
    rows[0][:, 1::2], rows[1][:, 1::2] = b + d, c - a
    rows = times(rows, _turned(cut))
    across = _transform((rows[0].T, rows[1].T), cut.width_roots)  # [width, rows]
    half = np.float32(0.5) * _scale(cut)
    re, im = (part * half for part in across)
    pairs = bins[:-2].reshape(width // 2, height, 2)  # the last bin is a row's of its own
    middle = width // 2
    pairs[:, : last + 1, 0], pairs[:, : last + 1, 1] = re[:middle], im[:middle]
    own = height - last - 1  # rows whose mirrors are others
    pairs[:, last + 1 :, 0] = re[: middle - 1 : -1, own:0:-1]
    pairs[:, last + 1 :, 1] = -im[: middle - 1 : -1, own:0:-1]
    bins[-2] = re[middle, 0]
    bins[1] = bins[-1] = 0


def _inverse(bins: Floats, values: Floats) -> None:
    cut = split(values.size)
    height, width, last, middle = cut.height, cut.width, cut.height // 2, cut.width // 2
    pairs = bins[:-2].reshape(middle, height, 2)
    own = height - last - 1
    re, im = (np.empty((width, last + 1), np.float32) for _ in range(2))
    re[:middle], im[:middle] = pairs[:, : last + 1, 0], pairs[:, : last + 1, 1]
    re[: middle - 1 : -1, 1 : own + 1] = pairs[:, : height - own - 1 : -1, 0]
    im[: middle - 1 : -1, 1 : own + 1] = -pairs[:, : height - own - 1 : -1, 1]
    re[middle, 0] = bins[-2]
    im[0, 0] = im[middle, 0] = 0
    re[:middle:-1, 0], im[:middle:-1, 0] = re[1:middle, 0], -im[1:middle, 0]
    if 2 * last == height:
        re[: middle - 1 : -1, last], im[: middle - 1 : -1, last] = (
            re[:middle, last],
            -im[:middle, last],
        )
    back = -np.arange(width) % width  # read backwards, sign -1 becomes +1
    rows = _transform((re, im), cut.width_roots)
    right, up = _turned(cut)
    turned = times((rows[0][back].T, rows[1][back].T), (right, -up))
    (a, b), (c, d) = ((turned[0][:, k::2], turned[1][:, k::2]) for k in range(2))
    re, im = (np.empty((height, width // 2), np.float32) for _ in range(2))
    mirror = height - np.arange(1, last + 1)
    re[mirror], im[mirror] = (a + d)[1:], (c - b)[1:]
    re[: last + 1], im[: last + 1] = a - d, b + c
    re, im = _transform((re, im), cut.height_roots)
    back = -np.arange(height) % height
    matrix = values.reshape(height, width)
    matrix[:, 0::2], matrix[:, 1::2] = re[back] * _scale(cut), im[back] * _scale(cut)


def _scale(cut: Split) -> np.float32:
    return np.float32(1 / np.sqrt(np.float64(cut.length)))


def _turned(cut: Split) -> Parts:
    """exp(-2 pi i r c / length) of each row r that is needed and each column c."""
    right, up = (
        np.repeat(part, FINE, axis=0) for part in _powers(cut, 2, cut.height // 2 // FINE + 1)
    )
    fine = (np.tile(part, (len(right) // FINE, 1)) for part in _powers(cut, 0, FINE))
    rows = cut.height // 2 + 1
    turned = times(tuple(fine), (right, up))  # type: ignore[arg-type]
    return turned[0][:rows], turned[1][:rows]


def _powers(cut: Split, at: int, count: int) -> Parts:
    """The first powers of each column's turn, [count, width]."""
    steps = cut.turns.reshape(4, cut.width)[at : at + 2]
    re, im = np.ones(cut.width), np.zeros(cut.width)
    table = np.empty((2, count, cut.width), np.float32)
    for row in range(count):
        table[:, row] = re, im
        re, im = re * steps[0] - im * steps[1], re * steps[1] + im * steps[0]
    return table[0], table[1]


def _transform(z: Parts, roots: Floats) -> Parts:
    """Discrete Fourier transform, sign -1, along the first of two axes."""
    n, across = z[0].shape
    stride = 1
    for radix, left in _radices(n):
        planes = [part.reshape(radix, left, stride * across) for part in z]
        split_up = _dft([(planes[0][k], planes[1][k]) for k in range(radix)])
        if left > 1:
            count = 2 * (radix - 1) * left
            own, roots = roots[:count].reshape(left, radix - 1, 2, 1), roots[count:]
            split_up[1:] = [
                times(x, (own[:, k, 0], own[:, k, 1])) for k, x in enumerate(split_up[1:])
            ]
        z = tuple(
            np.stack(parts, axis=1).reshape(n, across) for parts in zip(*split_up, strict=True)
        )  # type: ignore[assignment]
        stride *= radix
    return z


def _dft(z: list[Parts]) -> list[Parts]:
    """Of 2, 3, 4, 5 or 8 points."""
    if len(z) == 3:
        return _dft3(*z)
    if len(z) == 5:
        return _dft5(*z)
    return butterfly(z)


def _dft3(a: Parts, b: Parts, c: Parts) -> list[Parts]:
    total = plus(b, c)
    middle = minus(a, _by(np.float32(0.5), total))
    turned = _down(_by(_THIRD, minus(b, c)))
    return [plus(a, total), plus(middle, turned), minus(middle, turned)]


def _dft5(a: Parts, b: Parts, c: Parts, d: Parts, e: Parts) -> list[Parts]:
    c1, c2, s1, s2 = _FIFTHS
    outer, inner, over, under = plus(b, e), plus(c, d), minus(b, e), minus(c, d)
    near = plus(plus(a, _by(c1, outer)), _by(c2, inner))
    far = plus(plus(a, _by(c2, outer)), _by(c1, inner))
    once = _down(plus(_by(s1, over), _by(s2, under)))
    twice = _down(minus(_by(s2, over), _by(s1, under)))
    first = plus(plus(a, outer), inner)
    return [first, plus(near, once), plus(far, twice), minus(far, twice), minus(near, once)]


def _by(factor: np.float32, x: Parts) -> Parts:
    return factor * x[0], factor * x[1]


def _down(x: Parts) -> Parts:
    """Times -i."""
    return x[1], -x[0]
