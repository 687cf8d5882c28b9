"""Positions and other small numbers in 32-bit words: Elias-Fano sizes, bit fields, slots.

How many bits positions take in Elias-Fano form, see pack.py: known from their number alone.

Numbers of a few bits in 32-bit words and back, many rows at once, over any array library.

A field is an offset in bits, the first bit of a row being the lowest of its first word, and a
number there. Fields of a row do not overlap, so adding their words puts them side by side: whole
numbers add up to the same in any order, on any device.

Positions of what is largest, chosen and told in words, over any array library.

No shape depends on a value, and nothing is read: the same functions run in NumPy and in torch on
any device, with the same bits. What is sorted are whole numbers of which no two are equal, so that
every library's sort puts them into the same order.

Positions travel in Elias-Fano form (see `pack.py`), in as many words whatever they are. A slot of
zeros tells none: as Elias-Fano marks each position with a one, no list of positions is all zeros.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import Array, Constant, add_at, bits_of, device_of, namespace, shifted_right


def low_bits(k: int, f: int) -> int:
    """The l of Elias-Fano for k of f positions."""
    return (f // k).bit_length() - 1 if k else 0


def upper_bits(k: int, f: int) -> int:
    """Length of the Elias-Fano map for k of f positions."""
    return k + ((f - 1) >> low_bits(k, f)) + 1


WORD = 32
MASK = 2**32 - 1
_PLACES = Constant(np.arange(WORD, dtype=np.int64))


def write_fields(offsets: Array, values: Array, words: int) -> Array:
    """Words [rows, words] int64, 0 to 2**32 - 1, of fields of up to 32 bits.

    offsets, values : [rows, m] int64
    """
    xp = namespace(values)
    rows = values.shape[0]
    first = xp.reshape(xp.arange(rows, dtype=xp.int64, device=device_of(values)), (rows, 1)) * words
    at = first + shifted_right(offsets, 5)
    wide = xp.bitwise_left_shift(values, offsets & (WORD - 1))
    # The word behind the last one gets nothing but zeros.
    out = xp.zeros(rows * words + 1, dtype=xp.int64, device=device_of(values))
    places = xp.reshape(xp.concat([at, at + 1]), (-1,))
    parts = xp.concat([wide & MASK, shifted_right(wide, WORD) & MASK])
    out = add_at(out, places, xp.reshape(parts, (-1,)))
    return xp.reshape(out[: rows * words], (rows, words))


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


def one_by_one(words: Array, at: int, count: int) -> Array:
    """Bits `at` to `at + count` of each row, [rows, count] int64, 0 or 1.

    words : [rows, words] int64, 0 to 2**32 - 1; count : 1 or more
    """
    xp, first, last = namespace(words), at // WORD, -(-(at + count) // WORD)
    columns = xp.reshape(words[:, first:last], (words.shape[0], last - first, 1))
    bits = xp.bitwise_right_shift(columns, _PLACES.on(words)) & 1
    start = at - WORD * first
    return xp.reshape(bits, (words.shape[0], -1))[:, start : start + count]


def as_int32(words: Array) -> Array:
    """The same 32 bits as int32, from int64 of 0 to 2**32 - 1."""
    xp = namespace(words)
    return xp.astype((words ^ 2**31) - 2**31, xp.int32)


def as_int64(words: Array) -> Array:
    """0 to 2**32 - 1, int64, from the 32 bits of int32."""
    xp = namespace(words)
    return xp.astype(words, xp.int64) & MASK


_POSITION_BITS = 31  # bits for a position, below those of what it is sorted by
FIRST = 2**31 - 1  # an order that no float32 has
_WORD = 32
_WAITED = 5  # one in so many of the free places goes to what waited longest
_TINY, _HUGE = 2.0**-126, 2.0**127  # of float32, what a row is expected to change by


def orders(values: Array) -> Array:
    """Whole numbers [n] int64 that order as these float32 do, [n], none of them below zero."""
    xp = namespace(values)
    # Bits of a float without a sign order like whole numbers.
    return xp.astype(bits_of(values + 0.0), xp.int64)


def falling(order: Array) -> Array:
    """One key for each position, [n] int64, smallest for the largest order; ties to the lower.

    order : [n] int64, 0 to FIRST
    """
    xp = namespace(order)
    return (FIRST - order) * 2**_POSITION_BITS + _counted(xp, order.shape[0], order)


def largest(order: Array, count: int) -> Array:
    """Where the `count` largest orders are, [count] int64 ascending; ties to the lower."""
    xp = namespace(order)
    return xp.sort(xp.sort(falling(order))[:count] % 2**_POSITION_BITS)


def slot_words(count: int, n: int) -> int:
    """Words for `count` ascending positions below n."""
    return -(-(count * low_bits(count, n) + upper_bits(count, n)) // _WORD)


def write_positions(positions: Array, n: int) -> Array:
    """[slot_words] int32 for [count] int64 positions that ascend strictly below n."""
    xp = namespace(positions)
    count = positions.shape[0]
    low, upper = low_bits(count, n), upper_bits(count, n)
    lows = xp.bitwise_right_shift(positions[:, None], _counted(xp, low, positions)) & 1
    ones = xp.bitwise_right_shift(positions, xp.full_like(positions, low))
    ones = ones + _counted(xp, count, positions)
    below = xp.searchsorted(ones, _counted(xp, upper + 1, positions))
    marks = xp.astype(below[1:] - below[:-1], xp.int64)
    words = slot_words(count, n)
    padding = xp.zeros(
        words * _WORD - count * low - upper, dtype=xp.int64, device=device_of(positions)
    )
    bits = xp.reshape(xp.concat([xp.reshape(lows, (-1,)), marks, padding]), (words, _WORD))
    word = xp.sum(bits * _powers(xp, _WORD, positions), axis=1)
    return xp.astype((word ^ 2**31) - 2**31, xp.int32)


def own_slot(owed: Array, count: int, ranks: int, rank: int) -> Array:
    """[ranks * slot] int32: in this rank's slot what it names, those of [n] that owe most."""
    xp = namespace(owed)
    slot = write_positions(largest(orders(owed), count), owed.shape[0])
    zeros = xp.zeros((ranks, slot.shape[0]), dtype=xp.int32, device=device_of(slot))
    before, after = zeros[:rank], zeros[rank + 1 :]
    return xp.reshape(xp.concat([before, slot[None, :], after]), (-1,))


def agreed_rows(spread: Array, age: Array, named: Array, count: int) -> Array:
    """`count` rows, [count] int64 ascending, that all ranks choose alike.

    spread, age : [n] float32, what each is thought to bring for each step that it has waited, and
        how long it has waited
    named : [n] bool, whether a rank has named it: those come first, and a part of the others are
        those that have waited longest
    """
    xp = namespace(spread)
    free = count - xp.sum(xp.astype(named, xp.int64))
    waiting = (xp.clip(free, 0, count) + _WAITED - 1) // _WAITED
    wide = xp.astype(spread, xp.float64) * xp.sqrt(xp.astype(age, xp.float64))
    expected = orders(xp.astype(xp.clip(wide, _TINY, _HUGE), xp.float32))
    keys = falling(xp.where(named, xp.full_like(expected, FIRST), expected))
    # All that are named, and of the others those that are large: below the first that is not.
    ends = xp.concat([xp.sort(keys), xp.full_like(keys[:1], 2**62)])
    large = keys < xp.take(ends, xp.reshape(count - waiting, (1,)), axis=0)
    waited = orders(age)
    return largest(xp.where(large, xp.full_like(waited, FIRST), waited), count)


def read_positions(slots: Array, count: int, n: int) -> Array:
    """Return whether any slot contains a position, [n] bool; a slot of zeros contains none.

    slots : [slots, slot_words] int32, what `write_positions` returned or zeros; else undefined
    """
    xp = namespace(slots)
    low, upper = low_bits(count, n), upper_bits(count, n)
    wide = (xp.astype(slots, xp.int64) & (2**32 - 1))[:, :, None]
    bits = xp.reshape(
        xp.bitwise_right_shift(wide, _counted(xp, _WORD, wide)) & 1, (slots.shape[0], -1)
    )
    lows = xp.reshape(bits[:, : count * low], (slots.shape[0], count, low))
    lows = xp.sum(lows * _powers(xp, low, wide), axis=2)
    marks = bits[:, count * low : count * low + upper]
    place = xp.broadcast_to(_counted(xp, upper, wide), marks.shape)
    nowhere = xp.full_like(place, 2**_POSITION_BITS)
    ones = xp.sort(xp.where(marks == 1, place, nowhere), axis=1)[:, :count]
    highs = xp.clip(ones - _counted(xp, count, wide), 0, n) * 2**low
    positions = xp.where(ones < upper, highs + lows, xp.full_like(highs, n))
    below = xp.searchsorted(xp.sort(xp.reshape(positions, (-1,))), _counted(xp, n + 1, wide))
    return below[1:] > below[:-1]


def _counted(xp: Any, count: int, like: Array) -> Array:
    """0, 1, 2, ... [count] int64, where `like` is."""
    return xp.arange(count, dtype=xp.int64, device=device_of(like))


def _powers(xp: Any, count: int, like: Array) -> Array:
    """1, 2, 4, ... [count] int64."""
    return xp.bitwise_left_shift(_counted(xp, count, like) * 0 + 1, _counted(xp, count, like))
