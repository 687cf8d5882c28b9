"""Range-based N-bit floats: the few numbers of an N-bit code spent on the range that is used.

IEEE formats spend codes on ranges gradients never visit. Here the float32 numbers with only m
mantissa bits, in order, form a ladder; 2**N - 1 of its rungs, those just below `high` on either
side of zero, and zero itself are the representable values ("SuperNeurons: FFT-based Gradient
Sparsification", arXiv 1811.08596; formulas reconstructed, `docs/decisions/0003-range-float.md`).

    c(x)    = (bits(|x|) + half a step) >> (23 - m)      the rung nearest to |x|
    P       = 2**(N-1) positive rungs, P - 1 negative ones, both ending at c(high)
    base    = c(high) - P + 1                            the lowest positive rung
    code    = 0 for zero | c - base + 1 in 1..P for x > 0 | P + c - base in P+1..2P-1 for x < 0

All of it is integer arithmetic on the bits of a float, so every back end gives the same codes.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import numpy.typing as npt

from ...base.errors import CompressError, SaturationWarning
from .select import MAX_FINITE

Codes = npt.NDArray[np.uint16]
Ints = npt.NDArray[np.int64]


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
