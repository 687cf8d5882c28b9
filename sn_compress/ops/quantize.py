"""The layout of a record, and the conversion of its values to codes.

**Range-based N-bit floats** spend the few N-bit codes on the range that is used. IEEE formats spend
codes on ranges in which gradients never lie. Here the float32 numbers with only m mantissa bits, in
order, form a ladder; 2**N - 1 of its rungs, those just below `high` on either side of zero, and
zero itself are the representable values ("SuperNeurons: FFT-based Gradient Sparsification", arXiv
1811.08596; formulas reconstructed, `docs/decisions/0003`).

    c(x)    = (bits(|x|) + half a step) >> (23 - m)      the rung nearest to |x|
    P       = 2**(N-1) positive rungs, P - 1 negative ones, both ending at c(high)
    base    = c(high) - P + 1                            the lowest positive rung
    code    = 0 for zero | c - base + 1 in 1..P for x > 0 | P + c - base in P+1..2P-1 for x < 0

All of this is integer arithmetic on the bits of a float, so every back end gives the same codes.

**Coders** of a record's values (`encode_values`, `decode_values` in record_arrays.py): each takes
values [nb, m] float32 and the bits of each block's peak, and returns heads [nb, h] (upper halves of
float32 scales), codes [nb, m] and the number of values that saturated.

"range"  these range-based floats; zero is a code
"fp16"   half precision, scaled per block by a power of two so that its peak fits
"sign"   one bit, and the mean magnitude of the block's kept values; no code for zero
"2bit"   sign and level; the levels are the mean magnitudes below and above the overall mean

Means are summed in fixed point: the sum of integers is the same in any order, on any back end.

**Coefficients to keep** are the k of largest magnitude, ties to the lower position. Comparing re**2
+ im**2 directly would underflow for small gradients (1e-25 squared is zero in float32) and overflow
for large ones, so a block is first scaled by the power of two that brings its largest component
near one: exact, and the same on every back end. Bins below 2**-75 of the largest count as zero.

**Large blocks**, near the largest float32, are divided by 2**LARGE_SHIFT before encoding, and
marked by a bit in the record's head. A transform sums a block before it divides by the square root
of its length, and coefficients are up to that root times as large as values. Below LARGE_FROM none
of this overflows float32 in a block of 2**32 elements; the largest float32 divided by
2**LARGE_SHIFT is below LARGE_FROM as well. The bits of ordinary blocks are unaffected.

A large block's memory is stored in the same unit as all others, i.e. times 2**LARGE_SHIFT, and
clipped to MOST_MEMORY: what float32 cannot hold is not kept. Counterpart: csrc/compress/record.cpp.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import _native
from ..arrays import (
    Array,
    Constant,
    bits_of,
    clipped,
    floats_of,
    largest_of_rows,
    namespace,
    shifted_right,
)
from ..errors import CompressError, SaturationWarning
from .bits import low_bits, upper_bits

Values = Literal["range", "fp16", "sign", "2bit"]

NON_FINITE = 0x7FC0
"""The upper half of a float32 NaN: the head of a block that has NaN or Inf."""


class Tally(NamedTuple):
    """Counts of one call: values clipped, squared norm in, squared norm lost (finite blocks)."""

    saturated: int
    energy: float
    error: float


@dataclass(frozen=True)
class Layout:
    """The settings that determine the layout of a record.

    `parts` is 2 for complex bins, of which a block of b reals has b // 2 + 1, and 1 for the
    block's b real coefficients. `bits` and `mantissa` apply to values="range".
    """

    block: int
    kept: int
    values: Values
    bits: int
    mantissa: int
    positions: Literal["elias-fano", "bitmap"]
    parts: Literal[1, 2] = 2

    @property
    def bins(self) -> int:
        return self.block // 2 + 1 if self.parts == 2 else self.block

    @property
    def code_bits(self) -> int:
        return {"range": self.bits, "fp16": 16, "sign": 1, "2bit": 2}[self.values]

    @property
    def head_bits(self) -> int:
        return 32 if self.values == "2bit" else 16

    @cached_property
    def words(self) -> int:
        """32-bit words per record."""
        return -(-(self.positions_at + self.position_bits) // 32)

    @property
    def positions_at(self) -> int:
        return self.head_bits + self.parts * self.kept * self.code_bits

    @property
    def position_bits(self) -> int:
        k, f = self.kept, self.bins
        if k == f:  # all are kept, in order
            return 0
        if self.positions == "bitmap":
            return f
        return k * low_bits(k, f) + upper_bits(k, f)


Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]

MAX_FINITE = 0x7F7FFFFF
MAGNITUDE = 2**31 - 1  # all bits of a float32 but its sign
_ZERO = Constant(np.zeros((), np.int64))


def peak_bits(coefficients: Array) -> Array:
    """Return the bits of the largest |component| of each row, [nb, m] float32 -> [nb] int32.

    Above MAX_FINITE if the row has a NaN or an Inf: float bits without sign order like integers.
    """
    return namespace(coefficients).max(bits_of(coefficients) & MAGNITUDE, axis=1)


def check_format(bits: int, mantissa: int) -> None:
    """Raise CompressError unless 4 <= bits <= 16 and the window is 1 to 64 octaves wide."""
    if not (isinstance(bits, int) and 4 <= bits <= 16):
        raise CompressError(f"bits={bits!r}: a range float has 4 to 16 bits; 8 is a good start")
    low, high = max(0, bits - 7), bits - 1
    if not (isinstance(mantissa, int) and low <= mantissa <= high):
        raise CompressError(
            f"mantissa={mantissa!r} with bits={bits}: legal are {low} to {high} (a window of 64 "
            "octaves down to one). Fewer mantissa bits reach further down, more are finer."
        )


def through_half(
    values: npt.NDArray[np.float32], out: npt.NDArray[np.float32] | None = None
) -> npt.NDArray[np.float32]:
    """Round [n] float32 to half precision as NumPy casts; written to `out` if not None."""
    if out is None:
        out = np.empty(values.shape, np.float32)
    core = _native.core()
    if core is not None:
        core.through_half(np.ascontiguousarray(values), out)
        return out
    with np.errstate(over="ignore"):
        out[...] = values.astype(np.float16)
    return out


def rungs(magnitudes: Array, mantissa: int) -> Array:
    """Return the nearest rung's index of each float, given as bits without sign, int64."""
    return shifted_right(magnitudes + 2 ** (22 - mantissa), 23 - mantissa)


def window_top(peaks: Array, mantissa: int) -> Array:
    """Return the range's end: the upper 16 bits, int64, of a float at or above the rung of `peaks`.

    Exact for mantissa <= 7; for finer ladders rounded up by less than 2**-7.
    """
    xp = namespace(peaks)
    ends = rungs(xp.astype(peaks, xp.int64), mantissa) * 2 ** (23 - mantissa)
    return clipped(shifted_right(ends + 0xFFFF, 16), 0, MAX_FINITE >> 16)


def window_base(tops: Array, bits: int, mantissa: int) -> Array:
    """Return the lowest positive rung of the window that ends at `tops`, int64, at least 1."""
    ends = shifted_right(tops * 2**16, 23 - mantissa)
    return clipped(ends - 2 ** (bits - 1) + 1, 1, 2**31)


def encode_window(values: Array, base: Array, bits: int, mantissa: int) -> tuple[Array, Array]:
    """Return codes, int64, of finite values in the window from rung `base`, and saturation, bool.

    Values below the window become the nearer of zero and its lowest rung; values above, its top.
    """
    xp, step = namespace(values), 23 - mantissa
    words = xp.astype(bits_of(values), xp.int64)
    negative = xp.astype(words < 0, xp.int64)
    magnitude = words & MAGNITUDE
    half = 2 ** (bits - 1)
    end = base + half - 1
    rung = rungs(magnitude, mantissa)
    is_over = rung > end
    rung = xp.minimum(rung, end)
    lowest = base + negative  # the negative side has one code fewer
    low = lowest * 2**step
    halfway = xp.where(low >= 2 * 2**23, low - 2**23, shifted_right(low, 1))
    rung = xp.where((rung < lowest) & (magnitude > halfway), lowest, rung)
    code = rung - base + 1 + negative * (half - 1)
    return xp.where(rung < lowest, _ZERO.on(code), code), is_over


def decode_window(codes: Array, base: Array, bits: int, mantissa: int) -> Array:
    """Decode codes, int64, in the window that starts at rung `base`, to float32."""
    xp, half = namespace(codes), 2 ** (bits - 1)
    negative = xp.astype(codes > half, xp.int64)
    rung = codes - 1 + base - negative * (half - 1)
    magnitude = xp.where(codes == 0, _ZERO.on(codes), rung * 2 ** (23 - mantissa))
    return signed(magnitude, negative)


def signed(magnitudes: Array, negative: Array) -> Array:
    """Return the float32 with these bits and signs, int64."""
    # A corrupt head may result in more than 31 bits.
    bits = (magnitudes & MAGNITUDE) - negative * 2**31
    return floats_of(namespace(bits).astype(bits, namespace(bits).int32))


class RangeFloat:
    """A floating-point format of N bits whose window ends at `high`.

    Parameters
    ----------
    bits : int, 4 to 16
    mantissa : int, bits - 7 (or 0) to bits - 1; the relative error inside the window is at
        most 2**-(mantissa + 1), as long as `low` is a normal float32
    high : float > 0, the largest value; rounded to `mantissa` bits and readable as `.high`.
        `.low` is the smallest positive value, 2**(N-1-mantissa) octaves below at most.

    Examples
    --------
    >>> fmt = RangeFloat(bits=8, mantissa=3, high=1.0)
    >>> fmt.decode(fmt.encode([0.0, 0.3, -1.0])).tolist()
    [0.0, 0.3125, -1.0]
    """

    def __init__(self, *, bits: int = 8, mantissa: int = 3, high: float = 1.0) -> None:
        check_format(bits, mantissa)
        with np.errstate(over="ignore"):
            peak = np.asarray(high, np.float32).view(np.int32).astype(np.int64)
        top = int(rungs(peak, mantissa))
        limit = (MAX_FINITE >> (23 - mantissa)) + 1
        if not (float(high) > 0 and (1 << (bits - 1)) <= top < limit):
            raise CompressError(
                f"high={high!r}: expected a finite float32 above zero with room for "
                f"{1 << (bits - 1)} values below it. Scale the data, or use fewer octaves."
            )
        self.bits, self.mantissa = bits, mantissa
        self._base = np.asarray(top - (1 << (bits - 1)) + 1, np.int64)
        self.high = float(self.decode([1 << (bits - 1)])[0])
        self.low = float(self.decode([1])[0])

    def __repr__(self) -> str:
        return f"RangeFloat(bits={self.bits}, mantissa={self.mantissa}, high={self.high!r})"

    def encode(self, values: npt.ArrayLike) -> npt.NDArray[Any]:
        """Encode `values` of any shape; returns uint8 for up to 8 bits, else uint16.

        Values beyond `high` are clipped to it and counted in a SaturationWarning. Raises
        CompressError for NaN and Inf, which the format cannot represent.
        """
        with np.errstate(over="ignore"):  # values beyond float32 become Inf, and are rejected below
            array = np.asarray(values, np.float32)
        if not np.isfinite(array).all():
            raise CompressError(
                f"{np.count_nonzero(~np.isfinite(array))} of {array.size} values are NaN, Inf or "
                "beyond float32; a range float holds finite values. Mask them before encoding."
            )
        codes, is_over = encode_window(array, self._base, self.bits, self.mantissa)
        if saturated := int(np.count_nonzero(is_over)):
            warnings.warn(
                f"{saturated} of {array.size} values lie beyond +-{self.high:g} and were clipped; "
                "choose a larger `high`.",
                SaturationWarning,
                stacklevel=2,
            )
        return np.asarray(codes, np.uint8 if self.bits <= 8 else np.uint16)

    def decode(self, codes: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """Decode `codes` (integers below 2**bits) to float32 of the same shape."""
        array = np.asarray(codes)
        if array.dtype.kind not in "ui" or (
            array.size and not 0 <= array.min() <= array.max() < 1 << self.bits
        ):
            raise CompressError(
                f"codes of dtype {array.dtype} with values outside 0..{(1 << self.bits) - 1}; "
                f"expected integers of {self.bits} bits, as encode() returns them."
            )
        values = decode_window(array.astype(np.int64), self._base, self.bits, self.mantissa)
        return np.asarray(values, np.float32)


LARGE_SHIFT = 40
LARGE_FROM, MOST_MEMORY = 2.0**90, 2.0**126
LARGE_BIT = 0x8000  # in the head: the unused sign bit of a nonnegative number
HIGHEST = float(np.finfo(np.float32).max)
LARGE_OCTAVES = LARGE_SHIFT * 2**7  # in a head, whose exponent is above 7 bits
# Factors of an ordinary row (0), and of a large one (1).
LARGE_DOWN = Constant(np.array([1, 2.0**-LARGE_SHIFT], np.float32))


def is_large(values: Array, memory: Array | None = None) -> Array:
    """Return which rows of [rows, n] are large, [rows] bool; undefined for rows with NaN."""
    return reach(largest_of_rows(values), memory)


def reach(peaks: Array, memory: Array | None) -> Array:
    """Return the same for rows whose largest magnitudes are known, [rows]."""
    if memory is not None:
        peaks = namespace(peaks).maximum(peaks, largest_of_rows(memory))
    return peaks >= LARGE_FROM


def restored(values: Array, down: Array, limit: float) -> Array:
    """Undo a product of rows [rows, n] with `down`, [rows, 1], from LARGE_DOWN; clip to +-limit."""
    return clipped(values / down, -limit, limit)


def enlarged(values: Array, limit: float = HIGHEST) -> Array:
    """Multiply by 2**LARGE_SHIFT and clip to +-limit; NaN stays NaN."""
    return clipped(values, -limit * 2.0**-LARGE_SHIFT, limit * 2.0**-LARGE_SHIFT) * 2.0**LARGE_SHIFT


def lower_top(top: int) -> int:
    """Return the end of a range, the upper half of a float32, divided by 2**LARGE_SHIFT."""
    return max(top - LARGE_OCTAVES, 0)


# Like record.encode_records, with values, memory, words and top.
EncodeRows = Callable[[Floats, Floats | None, Words, int | None], Tally]


def encode_large(
    encode_rows: EncodeRows, values: Floats, memory: Floats | None, words: Words, top: int | None
) -> Tally:
    """Encode ordinary rows, and large ones divided by 2**LARGE_SHIFT; return the sum of counts.

    top : may be beyond float32, for a payload with large blocks
    """
    large = is_large(values, memory)
    ordinary = None if top is None else min(top, MAX_FINITE >> 16)
    if not large.any():
        return encode_rows(values, memory, words, ordinary)
    counts = []
    # Two calls on whole arrays. Masked rows are copies, so words and memory are written back.
    for rows in (~large, large):
        if not rows.any():
            continue
        held, out = None if memory is None else memory[rows], words[rows]
        if rows is large:
            counts.append(_encode_lowered(encode_rows, values[rows], held, out, top))
        else:
            counts.append(encode_rows(values[rows], held, out, ordinary))
        words[rows] = out
        if memory is not None:
            memory[rows] = held
    return Tally(*map(sum, zip(*counts, strict=True)))


def _encode_lowered(
    encode_rows: EncodeRows, values: Floats, memory: Floats | None, words: Words, top: int | None
) -> Tally:
    """Encode rows all of which are large."""
    down = np.float32(2.0**-LARGE_SHIFT)
    held = None if memory is None else memory * down
    end = None if top is None else lower_top(top)
    with np.errstate(all="ignore"):
        saturated, energy, error = encode_rows(values * down, held, words, end)
    # A non-finite block has no unit, and its memory stays unchanged, in the old unit.
    finite = words[:, 0] & 0xFFFF != NON_FINITE
    words[finite, 0] |= LARGE_BIT
    if memory is not None and held is not None:
        memory[finite] = enlarged(held[finite], MOST_MEMORY)
    return Tally(saturated, energy * 4.0**LARGE_SHIFT, error * 4.0**LARGE_SHIFT)


def unified(
    records: Sequence[Words], layout: Layout
) -> tuple[Sequence[Words], npt.NDArray[np.bool_] | None]:
    """Return records, [rows, words] each, as ordinary ones, and which are over 2**LARGE_SHIFT.

    The latter is None where there is none, and records are unchanged. Where one payload has a large
    record, all others of its row are converted to its unit.
    """
    marked = [(words[:, 0] & LARGE_BIT) != 0 for words in records]
    large = np.logical_or.reduce(marked)
    if not large.any():
        return records, None
    records_of = []
    for words, mark in zip(records, marked, strict=True):
        out = words.copy()
        first, second = out[:, 0] & 0xFFFF, out[:, 0] >> 16
        first -= mark * np.uint32(LARGE_BIT)
        lower = large & ~mark & (first <= MAX_FINITE >> 16)
        for heads in (first, second) if layout.values == "2bit" else (first,):
            heads[lower] = np.maximum(heads[lower], LARGE_OCTAVES) - np.uint32(LARGE_OCTAVES)
        out[:, 0] = first | second << 16
        records_of.append(out)
    return records_of, large
