"""Small integers in 32-bit words over any array library: bit fields, and positions of the largest.

No shape depends on a value, and no value is read on the host: the same functions run in NumPy and
in torch on any device, bit-identically.

**Fields** are integers of a few bits at offsets in a row, whose first bit is the lowest of its
first word. They do not overlap, so they can be combined by adding their words: the sum of integers
is the same in any order, on any device.

**Positions** of the largest values are found by sorting unique integer keys, so that every
library's sort gives the same order. They are sent in Elias-Fano form (see `record.py`), whose
length depends only on their number. A slot of zeros contains no positions: as Elias-Fano marks each
position with a one, no list of positions is all zeros.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import Array, Constant, add_at, bits_of, device_of, namespace, shifted_right


def low_bits(k: int, f: int) -> int:
    """Return the number of low bits, l, of Elias-Fano for k of f positions."""
    return (f // k).bit_length() - 1 if k else 0


def upper_bits(k: int, f: int) -> int:
    """Return the length of the Elias-Fano map for k of f positions."""
    return k + ((f - 1) >> low_bits(k, f)) + 1


WORD = 32
MASK = 2**32 - 1
_PLACES = Constant(np.arange(WORD, dtype=np.int64))


def write_fields(offsets: Array, values: Array, words: int) -> Array:
    """Write fields of up to 32 bits to words, [rows, words] int64, 0 to 2**32 - 1.

    offsets, values : [rows, m] int64
    """
    xp = namespace(values)
    rows = values.shape[0]
    first = xp.reshape(xp.arange(rows, dtype=xp.int64, device=device_of(values)), (rows, 1)) * words
    at = first + shifted_right(offsets, 5)
    # In 64 bits a field that crosses into the next word is still in one piece; its two halves are
    # added separately.
    wide = xp.bitwise_left_shift(values, offsets & (WORD - 1))
    # The extra word after the last one only receives zeros.
    out = xp.zeros(rows * words + 1, dtype=xp.int64, device=device_of(values))
    places = xp.reshape(xp.concat([at, at + 1]), (-1,))
    parts = xp.concat([wide & MASK, shifted_right(wide, WORD) & MASK])
    out = add_at(out, places, xp.reshape(parts, (-1,)))
    return xp.reshape(out[: rows * words], (rows, words))


class Fields:
    """Reads bit fields at the same offsets in all rows.

    offsets, widths : in bits, [m] each; widths up to 32
    words : number of words per row
    """

    def __init__(self, offsets: Array, widths: Array, words: int) -> None:
        offsets, widths = np.asarray(offsets, np.int64), np.asarray(widths, np.int64)
        self.count = offsets.size
        self._first = Constant(offsets >> 5)
        self._next = Constant(np.minimum((offsets >> 5) + 1, words - 1))
        self._shift = Constant(offsets & (WORD - 1))
        self._mask = Constant((1 << widths) - 1)
        # If no field crosses a word, as with codes of 8 or 16 bits, half of the reads are saved.
        self._narrow = bool(np.all((offsets & (WORD - 1)) + widths <= WORD))

    def read(self, words: Array) -> Array:
        """Read [rows, m] int64 from words [rows, words] int64, 0 to 2**32 - 1."""
        xp = namespace(words)
        wide = xp.take(words, self._first.on(words), axis=1)
        if not self._narrow:  # the next word's highest bit may become the sign; masked away
            wide = wide + xp.take(words, self._next.on(words), axis=1) * 2**WORD
        return xp.bitwise_right_shift(wide, self._shift.on(words)) & self._mask.on(words)


def one_by_one(words: Array, at: int, count: int) -> Array:
    """Return bits `at` to `at + count` of each row, [rows, count] int64, 0 or 1.

    words : [rows, words] int64, 0 to 2**32 - 1; count : 1 or more
    """
    xp, first, last = namespace(words), at // WORD, -(-(at + count) // WORD)
    columns = xp.reshape(words[:, first:last], (words.shape[0], last - first, 1))
    bits = xp.bitwise_right_shift(columns, _PLACES.on(words)) & 1
    start = at - WORD * first
    return xp.reshape(bits, (words.shape[0], -1))[:, start : start + count]


def as_int32(words: Array) -> Array:
    """Convert int64 of 0 to 2**32 - 1 to int32 with the same 32 bits."""
    xp = namespace(words)
    # Map into int32's range before the cast: libraries differ in how they cast values beyond it.
    return xp.astype((words ^ 2**31) - 2**31, xp.int32)


def as_int64(words: Array) -> Array:
    """Convert int32 to int64 of 0 to 2**32 - 1 with the same 32 bits."""
    xp = namespace(words)
    return xp.astype(words, xp.int64) & MASK


_POSITION_BITS = 31  # low bits of a sort key that hold the position, below the order
FIRST = 2**31 - 1  # larger than the order of any finite float32
_WAITED = 5  # one in this many free places goes to the row that has waited longest
_TINY, _HUGE = 2.0**-126, 2.0**127  # limits of a row's expected change, in float32's range


def orders(values: Array) -> Array:
    """Return integers, [n] int64, in the same order as these float32, [n], none negative."""
    xp = namespace(values)
    # Bits of nonnegative floats order like integers. Adding 0.0 turns -0.0 into 0.0, as the bits of
    # -0.0 are those of the least integer.
    return xp.astype(bits_of(values + 0.0), xp.int64)


def falling(order: Array) -> Array:
    """Return unique sort keys, [n] int64, smallest for the largest order; ties to the lower.

    order : [n] int64, 0 to FIRST
    """
    xp = namespace(order)
    return (FIRST - order) * 2**_POSITION_BITS + counted(xp, order.shape[0], order)


def largest(order: Array, count: int) -> Array:
    """Return positions of the largest orders, [count] int64 ascending; ties to the lower."""
    xp = namespace(order)
    return xp.sort(xp.sort(falling(order))[:count] % 2**_POSITION_BITS)


def slot_words(count: int, n: int) -> int:
    """Return the number of words for `count` ascending positions below n."""
    return -(-(count * low_bits(count, n) + upper_bits(count, n)) // WORD)


def write_positions(positions: Array, n: int) -> Array:
    """Encode [count] int64 positions, strictly ascending below n, to [slot_words] int32."""
    xp = namespace(positions)
    count = positions.shape[0]
    low, upper = low_bits(count, n), upper_bits(count, n)
    lows = xp.bitwise_right_shift(positions[:, None], counted(xp, low, positions)) & 1
    ones = xp.bitwise_right_shift(positions, xp.full_like(positions, low))
    ones = ones + counted(xp, count, positions)
    below = xp.searchsorted(ones, counted(xp, upper + 1, positions))
    marks = xp.astype(below[1:] - below[:-1], xp.int64)
    words = slot_words(count, n)
    padding = xp.zeros(
        words * WORD - count * low - upper, dtype=xp.int64, device=device_of(positions)
    )
    bits = xp.reshape(xp.concat([xp.reshape(lows, (-1,)), marks, padding]), (words, WORD))
    return as_int32(xp.sum(bits * _powers(xp, WORD, positions), axis=1))


def own_slot(residuals: Array, count: int, ranks: int, rank: int) -> Array:
    """Encode the rows of the largest residuals, of [n], to this rank's slot of [ranks * slot]."""
    xp = namespace(residuals)
    slot = write_positions(largest(orders(residuals), count), residuals.shape[0])
    zeros = xp.zeros((ranks, slot.shape[0]), dtype=xp.int32, device=device_of(slot))
    before, after = zeros[:rank], zeros[rank + 1 :]
    return xp.reshape(xp.concat([before, slot[None, :], after]), (-1,))


def agreed_rows(spread: Array, age: Array, named: Array, count: int) -> Array:
    """Choose `count` rows, [count] int64 ascending, the same on all ranks.

    spread, age : [n] float32, expected change of each row per step, and number of steps it has
        waited
    named : [n] bool, whether any rank requests it: those come first; of the places left, one in
        `_WAITED` goes to the row that has waited longest
    """
    xp = namespace(spread)
    free = count - xp.sum(xp.astype(named, xp.int64))
    waiting = (xp.clip(free, 0, count) + _WAITED - 1) // _WAITED
    # In float64, whose roots and products are correctly rounded everywhere, then rounded once, so
    # that ranks with different hardware order rows alike.
    wide = xp.astype(spread, xp.float64) * xp.sqrt(xp.astype(age, xp.float64))
    expected = orders(xp.astype(xp.clip(wide, _TINY, _HUGE), xp.float32))
    keys = falling(xp.where(named, xp.full_like(expected, FIRST), expected))
    # All named rows, and the largest of the others: keys below the first one not chosen.
    ends = xp.concat([xp.sort(keys), xp.full_like(keys[:1], 2**62)])
    large = keys < xp.take(ends, xp.reshape(count - waiting, (1,)), axis=0)
    waited = orders(age)
    return largest(xp.where(large, xp.full_like(waited, FIRST), waited), count)


def read_positions(slots: Array, count: int, n: int) -> Array:
    """Return whether any slot contains a position, [n] bool; a slot of zeros contains none.

    slots : [slots, slot_words] int32, from `write_positions` or zeros; anything else is undefined
    """
    xp = namespace(slots)
    low, upper = low_bits(count, n), upper_bits(count, n)
    wide = as_int64(slots)
    bits = one_by_one(wide, 0, WORD * int(slots.shape[1]))
    lows = xp.reshape(bits[:, : count * low], (slots.shape[0], count, low))
    lows = xp.sum(lows * _powers(xp, low, wide), axis=2)
    marks = bits[:, count * low : count * low + upper]
    place = xp.broadcast_to(counted(xp, upper, wide), marks.shape)
    nowhere = xp.full_like(place, 2**_POSITION_BITS)
    ones = xp.sort(xp.where(marks == 1, place, nowhere), axis=1)[:, :count]
    highs = xp.clip(ones - counted(xp, count, wide), 0, n) * 2**low
    # A slot of zeros has no ones: its places are out of range, and its positions n, not a row.
    positions = xp.where(ones < upper, highs + lows, xp.full_like(highs, n))
    below = xp.searchsorted(xp.sort(xp.reshape(positions, (-1,))), counted(xp, n + 1, wide))
    return below[1:] > below[:-1]


def counted(xp: Any, count: int, like: Array) -> Array:
    """Return 0, 1, 2, ..., [count] int64, on the device of `like`."""
    return xp.arange(count, dtype=xp.int64, device=device_of(like))


def _powers(xp: Any, count: int, like: Array) -> Array:
    """Return 1, 2, 4, ..., [count] int64."""
    return xp.bitwise_left_shift(counted(xp, count, like) * 0 + 1, counted(xp, count, like))
