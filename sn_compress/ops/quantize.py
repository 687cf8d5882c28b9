"""What fixes the bits of a record, and how its values become codes.

**Range-based N-bit floats** spend the few numbers of an N-bit code on the range that is used. IEEE
formats spend codes on ranges gradients never visit. Here the float32 numbers with only m
mantissa bits, in order, form a ladder; 2**N - 1 of its rungs, those just below `high` on either
side of zero, and zero itself are the representable values ("SuperNeurons: FFT-based Gradient
Sparsification", arXiv 1811.08596; formulas reconstructed, `docs/decisions/0003`).

    c(x)    = (bits(|x|) + half a step) >> (23 - m)      the rung nearest to |x|
    P       = 2**(N-1) positive rungs, P - 1 negative ones, both ending at c(high)
    base    = c(high) - P + 1                            the lowest positive rung
    code    = 0 for zero | c - base + 1 in 1..P for x > 0 | P + c - base in P+1..2P-1 for x < 0

All of it is integer arithmetic on the bits of a float, so every back end gives the same codes.

**Coders** of the values that a record keeps (`encode_values`, `decode_values`): each takes values
[nb, m] float32 and the bits of each block's peak and gives heads [nb, h] uint16 (upper halves of
float32 scales), codes [nb, m] uint16 and how many values saturated.

"range"  these range-based floats; zero is a code
"fp16"   half precision, scaled per block by a power of two so that its peak fits
"sign"   one bit, and the mean magnitude of the block's kept values; no code for zero
"2bit"   sign and level; the levels are the mean magnitudes below and above the overall mean

Means are summed in fixed point: integers add up to the same in any order, on any back end.

**Which coefficients stay**: the k of largest magnitude, ties to the lower position. Comparing re**2
+ im**2 as it stands would underflow for small gradients (1e-25 squared is zero in float32) and
overflow for large ones, so a block is first scaled by the power of two that brings its largest
component near one: exact, and the same on every back end. Bins below 2**-75 of the largest count as
zero.

**Large blocks**, near the largest float32, are encoded over 2**LARGE_SHIFT, and a bit of the
record's head says so. A transform sums a block before it divides by the square root of its length,
and coefficients are up to that root larger than values. Below LARGE_FROM nothing of this leaves
float32 in a block of 2**32 elements; LARGE_SHIFT octaves lower the largest float32 is below
LARGE_FROM, too. Ordinary blocks have the bits that they have without this.

A large block's memory is kept as all others are, times 2**LARGE_SHIFT, and ends at MOST_MEMORY:
what float32 cannot hold is not remembered. Twin: csrc/compress/record.cpp.
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
from ..arrays import Array, Constant, clipped, largest_of_rows, namespace
from ..errors import CompressError, SaturationWarning
from .bits import low_bits, upper_bits

Values = Literal["range", "fp16", "sign", "2bit"]

NON_FINITE = 0x7FC0
"""The upper half of a float32 NaN: the head of a block that has NaN or Inf."""


class Tally(NamedTuple):
    """What one call saw: values clipped, squared norm in, squared norm lost (finite blocks)."""

    saturated: int
    energy: float
    error: float


@dataclass(frozen=True)
class Layout:
    """What fixes the bits of a record.

    `parts` is 2 for complex bins, of which a block of b reals has b // 2 + 1, and 1 for the
    block's b real coefficients. `bits` and `mantissa` belong to values="range".
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
    # At most 253: the power of two of a larger exponent would be a denormal, which some devices
    # take for zero.
    exponent = np.minimum(peaks >> 23, 253)
    scale = ((254 - exponent) << 23).astype(np.uint32).view(np.float32)  # [nb] powers of two
    with np.errstate(all="ignore"):
        scaled = coefficients * scale[:, None]
        squares = scaled * scaled
        return np.asarray(squares[:, 0::2] + squares[:, 1::2]).view(np.int32)


def largest_keys(keys: Keys, k: int) -> Positions:
    """Positions of the k largest keys of each row, ascending, [nb, k] uint32."""
    # A stable sort of the negated keys: of equal ones the lower position comes first.
    order = np.argsort(-keys.astype(np.int64), axis=1, kind="stable")[:, :k]
    return np.sort(order, axis=1).astype(np.uint32)


Codes = npt.NDArray[np.uint16]
Floats = npt.NDArray[np.float32]
Heads = npt.NDArray[np.uint16]
Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]

FIXED_BITS = 22


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
    """[n] float32 rounded to half precision as NumPy casts; in `out` if there is one."""
    if out is None:
        out = np.empty(values.shape, np.float32)
    core = _native.core()
    if core is not None:
        core.through_half(np.ascontiguousarray(values), out)
        return out
    with np.errstate(over="ignore"):
        out[...] = values.astype(np.float16)
    return out


def rungs(magnitude_bits: npt.ArrayLike, mantissa: int) -> Ints:
    """Index of the nearest rung of each float given by its bits without sign."""
    return (np.asarray(magnitude_bits, np.int64) + (1 << (22 - mantissa))) >> (23 - mantissa)


def window_top(peaks: npt.ArrayLike, mantissa: int) -> npt.NDArray[np.uint16]:
    """The upper 16 bits of a float at or above the rung of `peaks`: what travels as the range.

    Exact for mantissa <= 7; for finer ladders rounded up by less than 2**-7.
    """
    rung_bits = rungs(peaks, mantissa) << (23 - mantissa)
    return np.asarray(np.minimum((rung_bits + 0xFFFF) >> 16, MAX_FINITE >> 16), np.uint16)


def window_base(tops: npt.NDArray[np.uint16], bits: int, mantissa: int) -> Ints:
    """The lowest positive rung of the window that ends at `tops`, at least 1."""
    end = tops.astype(np.int64) << 16 >> (23 - mantissa)
    return np.asarray(np.maximum(end - (1 << (bits - 1)) + 1, 1), np.int64)


def encode_window(
    values: npt.NDArray[np.float32], base: Ints, bits: int, mantissa: int
) -> tuple[Codes, int]:
    """Codes of finite values in the window that starts at rung `base`, and how many saturated.

    Below the window the nearer of zero and its lowest rung is taken; above, its top.
    """
    raw = np.ascontiguousarray(values).view(np.uint32).astype(np.int64)
    negative = raw >> 31
    magnitude = raw & 0x7FFFFFFF
    positive_codes = 1 << (bits - 1)
    top = base + positive_codes - 1
    rung = rungs(magnitude, mantissa)
    saturated = int(np.count_nonzero(rung > top))
    rung = np.minimum(rung, top)
    lowest = base + negative  # the negative side has one code fewer
    low_bits = lowest << (23 - mantissa)
    halfway = np.where(low_bits >= 2 << 23, low_bits - (1 << 23), low_bits >> 1)
    rung = np.where((rung < lowest) & (magnitude > halfway), lowest, rung)
    code = np.where(negative, positive_codes + rung - base, rung - base + 1)
    return np.where(rung < lowest, 0, code).astype(np.uint16), saturated


def decode_window(codes: Codes, base: Ints, bits: int, mantissa: int) -> npt.NDArray[np.float32]:
    """Values of the codes in the window that starts at rung `base`."""
    code = codes.astype(np.int64)
    positive_codes = 1 << (bits - 1)
    negative = code > positive_codes
    rung = np.where(negative, code - positive_codes, code - 1) + base
    raw = np.where(code == 0, 0, rung << (23 - mantissa)).astype(np.uint32)
    return (raw | (negative.astype(np.uint32) << 31)).view(np.float32)


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
            peak = int(np.float32(high).view(np.uint32))
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
        """Codes of `values`, any shape; uint8 for up to 8 bits, else uint16.

        Values beyond `high` are clipped to it and counted in a SaturationWarning. Raises
        CompressError for NaN and Inf, which the format cannot hold.
        """
        with np.errstate(over="ignore"):  # beyond float32 becomes Inf, and is refused below
            array = np.asarray(values, np.float32)
        if not np.isfinite(array).all():
            raise CompressError(
                f"{np.count_nonzero(~np.isfinite(array))} of {array.size} values are NaN, Inf or "
                "beyond float32; a range float holds finite values. Mask them before encoding."
            )
        codes, saturated = encode_window(array, self._base, self.bits, self.mantissa)
        if saturated:
            warnings.warn(
                f"{saturated} of {array.size} values lie beyond +-{self.high:g} and were clipped; "
                "choose a larger `high`.",
                SaturationWarning,
                stacklevel=2,
            )
        return codes.astype(np.uint8 if self.bits <= 8 else np.uint16).reshape(array.shape)

    def decode(self, codes: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """Values of `codes` (integers below 2**bits), float32 of the same shape."""
        array = np.asarray(codes)
        if array.dtype.kind not in "ui" or (
            array.size and not 0 <= array.min() <= array.max() < 1 << self.bits
        ):
            raise CompressError(
                f"codes of dtype {array.dtype} with values outside 0..{(1 << self.bits) - 1}; "
                f"expected integers of {self.bits} bits, as encode() returns them."
            )
        return decode_window(array.astype(np.uint16), self._base, self.bits, self.mantissa)


def encode_values(
    values: Floats, peaks: npt.NDArray[np.uint32], layout: Layout, top: int | None
) -> tuple[Heads, Codes, int]:
    """Heads, codes and the number of saturated values; `top` replaces each block's own range."""
    if layout.values == "fp16":
        heads = np.asarray((peaks >> 23) << 7, np.uint16)[:, None]
        halves = np.asarray(values * _half_scale(heads), np.float16).view(np.uint16)
        # In the topmost binade 0x7800 stands for 2**128, which is Inf, so what rounds to it goes
        # down.
        over = (heads >= 0x7F00) & (halves & 0x7FFF >= 0x7800)
        return heads, np.where(over, halves & 0x8000 | 0x77FF, halves).astype(np.uint16), 0
    if layout.values == "range":
        heads = window_top(peaks, layout.mantissa)[:, None]
        if top is not None:
            heads = np.full_like(heads, top)
        base = window_base(heads, layout.bits, layout.mantissa)
        codes, saturated = encode_window(values, base, layout.bits, layout.mantissa)
        return heads, codes, saturated
    exponent = np.minimum(peaks >> 23, 253).astype(np.int64)
    fixed = to_fixed(values, exponent)  # [nb, m]
    negative = np.asarray(np.signbit(values), np.uint16)
    everything = np.ones_like(fixed, bool)
    mean = _mean(fixed, everything)
    if layout.values == "sign":
        return _bfloat(mean, exponent)[:, None], negative, 0
    upper = fixed > mean[:, None]
    low, high = _mean(fixed, ~upper), _mean(fixed, upper)
    # Where all magnitudes are equal none is above their mean: one level, sent twice.
    high = np.where(upper.any(axis=1), high, low)
    heads = np.stack([_bfloat(low, exponent), _bfloat(high, exponent)], axis=1)
    codes = np.asarray(negative + 2 * upper, np.uint16)
    return heads, codes, 0


def decode_values(codes: Codes, heads: Heads, layout: Layout) -> Floats:
    """[nb, m] codes and [nb, h] heads -> [nb, m] float32."""
    if layout.values == "fp16":
        halves: npt.NDArray[np.float16] = codes.view(np.float16)
        # Dividing by a power of two is exact.
        with np.errstate(over="ignore"):  # a damaged payload may hold infinities
            return np.asarray(halves.astype(np.float32) / _half_scale(heads), np.float32)
    if layout.values == "range":
        base = window_base(heads, layout.bits, layout.mantissa)
        return decode_window(codes, base, layout.bits, layout.mantissa)
    levels = np.take_along_axis(heads, codes.astype(np.int64) >> 1, axis=1).astype(np.uint32)
    return (levels << 16 | (codes.astype(np.uint32) & 1) << 31).view(np.float32)


def to_fixed(values: Floats, exponent: Ints) -> Ints:
    """|values| in units of 2**-22 of their block's binade, truncated, [nb, m] int64 < 2**24."""
    scale = np.asarray((254 - exponent) << 23, np.uint32).view(np.float32)[:, None]
    return (np.abs(values) * scale * np.float32(1 << FIXED_BITS)).astype(np.int64)


def _mean(fixed: Ints, where: npt.NDArray[np.bool_]) -> Ints:
    count = where.sum(axis=1)
    return np.asarray((fixed * where).sum(axis=1) // np.maximum(count, 1), np.int64)


def _bfloat(fixed: Ints, exponent: Ints) -> Heads:
    """Fixed-point magnitudes as upper halves of float32, to nearest; [nb] uint16."""
    power = (exponent - 127 - FIXED_BITS).astype(np.int32)
    bits = np.ldexp(fixed.astype(np.float32), power).view(np.uint32).astype(np.int64)
    return np.asarray(np.minimum((bits + 0x8000) >> 16, MAX_FINITE >> 16), np.uint16)


def _half_scale(heads: Heads) -> Floats:
    """The power of two that takes a block's peak to [2**14, 2**15), inside half precision."""
    exponent = np.maximum(heads.astype(np.uint32) >> 7, 15)
    return np.asarray((268 - exponent) << 23, np.uint32).view(np.float32)


LARGE_SHIFT = 40
LARGE_FROM, MOST_MEMORY = 2.0**90, 2.0**126
LARGE_BIT = 0x8000  # in the head: the sign of a number that has none
HIGHEST = float(np.finfo(np.float32).max)
LARGE_OCTAVES = LARGE_SHIFT * 2**7  # of a head: its exponent is above 7 bits
# By 0 for an ordinary row, and 1 for a large one.
LARGE_DOWN = Constant(np.array([1, 2.0**-LARGE_SHIFT], np.float32))


def is_large(values: Array, memory: Array | None = None) -> Array:
    """Of each row [rows, n], [rows] bool; one with NaN may be either."""
    return reach(largest_of_rows(values), memory)


def reach(peaks: Array, memory: Array | None) -> Array:
    """The same of rows whose largest magnitudes are known, [rows]."""
    if memory is not None:
        peaks = namespace(peaks).maximum(peaks, largest_of_rows(memory))
    return peaks >= LARGE_FROM


def restored(values: Array, down: Array, limit: float) -> Array:
    """Rows [rows, n] as they were before a product with `down`, [rows, 1], of LARGE_DOWN."""
    return clipped(values / down, -limit, limit)


def enlarged(values: Array, limit: float = HIGHEST) -> Array:
    """Times 2**LARGE_SHIFT; what is beyond the limit ends there, and NaN stays."""
    return clipped(values, -limit * 2.0**-LARGE_SHIFT, limit * 2.0**-LARGE_SHIFT) * 2.0**LARGE_SHIFT


def lower_top(top: int) -> int:
    """The end of a range, upper half of a float32, over 2**LARGE_SHIFT."""
    return max(top - LARGE_OCTAVES, 0)


def encode_large(
    encode_rows: Callable[[Floats, Floats | None, Words, int | None], Tally],
    values: Floats,
    memory: Floats | None,
    words: Words,
    top: int | None,
) -> Tally:
    """What `encode_rows` counts of ordinary rows and of large ones, these over 2**LARGE_SHIFT.

    encode_rows : as record.encode_records, of values, memory, words and top
    top : may be beyond float32, of a payload with large blocks
    """
    large = is_large(values, memory)
    ordinary = None if top is None else min(top, MAX_FINITE >> 16)
    if not large.any():
        return encode_rows(values, memory, words, ordinary)
    counts = []
    both = (~large, encode_rows, ordinary), (large, lowered(encode_rows), top)
    # Two calls of whole arrays. Rows that a mask picks are copies: words and memory go back.
    for rows, encode_those, end in both:
        if not rows.any():
            continue
        held, out = None if memory is None else memory[rows], words[rows]
        counts.append(encode_those(values[rows], held, out, end))
        words[rows] = out
        if memory is not None:
            memory[rows] = held
    return Tally(*map(sum, zip(*counts, strict=True)))


def lowered(
    encode_rows: Callable[[Floats, Floats | None, Words, int | None], Tally],
) -> Callable[[Floats, Floats | None, Words, int | None], Tally]:
    """The same for rows that are all large."""

    def encode_lowered(
        values: Floats, memory: Floats | None, words: Words, top: int | None
    ) -> Tally:
        down = np.float32(2.0**-LARGE_SHIFT)
        held = None if memory is None else memory * down
        end = None if top is None else lower_top(top)
        with np.errstate(all="ignore"):
            saturated, energy, error = encode_rows(values * down, held, words, end)
        # A block that is not finite has no unit, and its memory stays as it was, in the old unit.
        finite = words[:, 0] & 0xFFFF != NON_FINITE
        words[finite, 0] |= LARGE_BIT
        if memory is not None and held is not None:
            memory[finite] = enlarged(held[finite], MOST_MEMORY)
        return Tally(saturated, energy * 4.0**LARGE_SHIFT, error * 4.0**LARGE_SHIFT)

    return encode_lowered


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
