"""Scales on which numbers become digits: quarters of an octave, from a table.

No logarithm and no power is taken of an array: libraries differ in their last bit. An exponent e
stands for 2**(e / 4).
"""

from __future__ import annotations

import numpy as np

from ..arrays import Array, Constant, namespace, take

PER_OCTAVE = 4
LOWEST, HIGHEST = -256, 255  # scales from 2**-64 to nearly 2**64
_MARGIN = 1  # quarters of an octave between the ranks' mean peak and the largest digit

_EXPONENTS = np.arange(LOWEST, HIGHEST + 1)
_COVERED = Constant(np.exp2(_EXPONENTS / PER_OCTAVE).astype(np.float32))
_UNITS = Constant(np.exp2((_EXPONENTS + _MARGIN) / PER_OCTAVE).astype(np.float32))


def covering(peaks: Array) -> tuple[Array, Array]:
    """The lowest exponents that cover magnitudes, int32, and where these are above 0; [n] each.

    peaks : [n] float32, not negative, finite. One beyond the table gets its end
    """
    xp = namespace(peaks)
    found = xp.searchsorted(_COVERED.on(peaks), peaks)
    return xp.astype(xp.clip(found + LOWEST, LOWEST, HIGHEST), xp.int32), peaks > 0


def units(exponents: Array) -> Array:
    """[n] float32: the largest magnitude that digits on these scales can say, a margin included.

    exponents : [n] int32, LOWEST to HIGHEST
    """
    xp = namespace(exponents)
    return take(_UNITS.on(exponents), xp.astype(exponents - LOWEST, xp.int64))


def shifted(exponents: Array, quarters: int) -> Array:
    """Exponents for numbers 2**(quarters / 4) times as large, within the table's."""
    return namespace(exponents).clip(exponents + quarters, LOWEST, HIGHEST)
