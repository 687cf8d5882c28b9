"""Scales on which numbers become digits: quarters of an octave, from a table.

No logarithm and no power is taken of an array: libraries differ in their last bit. Nor is an array
divided by a number: some devices multiply by its inverse. An exponent e stands for 2**(e / 4).
"""

from __future__ import annotations

import math

import numpy as np

from ...devices.arrays import Array, Constant, clipped, namespace, take

PER_OCTAVE = 4
LOWEST, HIGHEST = -256, 255  # scales from 2**-64 to nearly 2**64
# Of exponents of a mean's peak: 2**40 squared and summed over 2**30 elements is 2**110; below
# 2**-50 the table ends 14 octaves lower, and there are factors smaller than the peak.
ORDINARY = -50, 40
MOST_EXPONENT = 149  # the least float32 is 2**-149
_MARGIN = 1  # quarters of an octave between the ranks' mean peak and the largest digit

_EXPONENTS = np.arange(LOWEST, HIGHEST + _MARGIN + 1)
# Written down, as hosts' exp2 may differ too; a power of two is exact.
_QUARTERS = np.array(
    [1.0, 1.1892071150027210667, 1.4142135623730950488, 1.6817928305074290861], np.float32
)
_SCALES = np.ldexp(_QUARTERS[_EXPONENTS % PER_OCTAVE], _EXPONENTS // PER_OCTAVE)
COVERED = Constant(_SCALES[:-_MARGIN])  # by each exponent
_units: dict[tuple[int, int], Constant] = {}

_LOW, _HIGH = -300, 300  # of powers of two: those of float32, and of sums in float64
_POWERS = Constant(np.ldexp(1.0, np.arange(_LOW, _HIGH + 1)))


def exponent_of(mean: Array) -> int:
    """The power of two that gradients like a mean are divided by before anything is computed.

    0 in the ordinary range, where squares, their sums, products with directions and the scales of
    this table are far from the ends of float32. mean : [n] float32; one that is not finite, or 0
    everywhere, says nothing
    """
    xp = namespace(mean)
    peak = float(xp.max(xp.abs(mean))) if mean.shape[0] else 0.0
    if not math.isfinite(peak) or not peak:
        return 0
    exponent = math.frexp(peak)[1]
    return 0 if ORDINARY[0] <= exponent <= ORDINARY[1] else exponent


def times_power(values: Array, exponent: int) -> Array:
    """Numbers times 2**exponent; in two products, as one power may be beyond float32."""
    if not exponent:
        return values
    half = exponent // 2
    return values * 2.0**half * 2.0 ** (exponent - half)


def covering(peaks: Array) -> tuple[Array, Array]:
    """The lowest exponents that cover magnitudes, int32, and where these are above 0; [n] each.

    peaks : [n] float32, not negative, finite. One beyond the table gets its end
    """
    xp = namespace(peaks)
    found = clipped(xp.searchsorted(COVERED.on(peaks), peaks), 0, HIGHEST - LOWEST)
    return xp.astype(found, xp.int32) + LOWEST, peaks > 0


def units(exponents: Array, limit: int = 1, ranks: int = 1) -> Array:
    """[n] float32: what a digit of at most `limit` stands for in a mean over ranks.

    The digit `limit` of one rank is the largest magnitude that can be said, a margin included.

    exponents : [n] int32, LOWEST to HIGHEST
    """
    return take(unit_table(limit, ranks).on(exponents), exponents - LOWEST)


def unit_table(limit: int = 1, ranks: int = 1) -> Constant:
    """[HIGHEST - LOWEST + 1] float32: the units of all exponents."""
    if (limit, ranks) not in _units:
        made = _SCALES[_MARGIN:] / np.float32(limit) / np.float32(ranks)
        _units[limit, ranks] = Constant(made)
    return _units[limit, ranks]


def shifted(exponents: Array, quarters: int) -> Array:
    """Exponents for numbers 2**(quarters / 4) times as large, within the table's."""
    return clipped(exponents + quarters, LOWEST, HIGHEST)


def integers(values: Array, bits: int) -> tuple[Array, Array]:
    """Rows [..., m] float64 as whole numbers of at most 2**bits, and their units [..., 1].

    Units are powers of two, so that nothing but the rounding to whole numbers is inexact.
    """
    xp = namespace(values)
    peaks = xp.max(xp.abs(values), axis=-1, keepdims=True)
    table = _POWERS.on(values)
    at = clipped(xp.searchsorted(table, xp.reshape(peaks, (-1,))), bits, _HIGH - _LOW)
    up = xp.reshape(take(table, bits - at - 2 * _LOW), peaks.shape)
    down = xp.reshape(take(table, at - bits), peaks.shape)
    return xp.round(values * up), down
