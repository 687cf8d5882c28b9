"""Numbers of a few bits in 32-bit words and back, many rows at once, over any array library.

A field is an offset in bits, the first bit of a row being the lowest of its first word, and a
number there. Fields of a row do not overlap, so adding their words puts them side by side: whole
numbers add up to the same in any order, on any device.
"""

from __future__ import annotations

import numpy as np

from ...devices.arrays import Array, Constant, add_at, device_of, namespace, shifted_right

WORD = 32
MASK = 2**32 - 1


def write(offsets: Array, values: Array, words: int) -> Array:
    """Words [rows, words] int64, 0 to 2**32 - 1, of fields of up to 32 bits.

    offsets, values : [rows, m] int64
    """
    xp = namespace(values)
    rows = values.shape[0]
    first = xp.reshape(xp.arange(rows, dtype=xp.int64, device=device_of(values)), (rows, 1)) * words
    at = first + shifted_right(offsets, 5)
    wide = xp.bitwise_left_shift(values, offsets & (WORD - 1))
    # The word behind the last one gets nothing but zeros.
    made = xp.zeros(rows * words + 1, dtype=xp.int64, device=device_of(values))
    places = xp.reshape(xp.concat([at, at + 1]), (-1,))
    parts = xp.concat([wide & MASK, shifted_right(wide, WORD) & MASK])
    made = add_at(made, places, xp.reshape(parts, (-1,)))
    return xp.reshape(made[: rows * words], (rows, words))


class Fields:
    """Where to read, the same in all rows.

    offsets, widths : in bits, [m] each; up to 32 bits each
    words : of a row
    """

    def __init__(self, offsets: Array, widths: Array, words: int) -> None:
        offsets, widths = np.asarray(offsets, np.int64), np.asarray(widths, np.int64)
        self.count = offsets.size
        self._first = Constant(offsets >> 5)
        self._next = Constant(np.minimum((offsets >> 5) + 1, words - 1))
        self._shift = Constant(offsets & (WORD - 1))
        self._mask = Constant((1 << widths) - 1)
        self._narrow = bool(np.all((offsets & (WORD - 1)) + widths <= WORD))

    def read(self, words: Array) -> Array:
        """[rows, m] int64 from words [rows, words] int64, 0 to 2**32 - 1."""
        xp = namespace(words)
        wide = xp.take(words, self._first.on(words), axis=1)
        if not self._narrow:  # the next word's highest bit may become the sign; masked away
            wide = wide + xp.take(words, self._next.on(words), axis=1) * 2**WORD
        return xp.bitwise_right_shift(wide, self._shift.on(words)) & self._mask.on(words)


def as_int32(words: Array) -> Array:
    """The same 32 bits as int32, from int64 of 0 to 2**32 - 1."""
    xp = namespace(words)
    return xp.astype((words ^ 2**31) - 2**31, xp.int32)


def as_int64(words: Array) -> Array:
    """0 to 2**32 - 1, int64, from the 32 bits of int32."""
    xp = namespace(words)
    return xp.astype(words, xp.int64) & MASK
