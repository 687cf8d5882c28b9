"""Positions of what is largest, chosen and told in words, over any array library.

No shape depends on a value, and nothing is read: the same functions run in NumPy and in torch on
any device, with the same bits. What is sorted are whole numbers of which no two are equal, so that
every library's sort puts them into the same order.

Positions travel in Elias-Fano form (see `pack.py`), in as many words whatever they are. A slot of
zeros tells none: as Elias-Fano marks each position with a one, no list of positions is all zeros.
"""

from __future__ import annotations

from typing import Any

from ...devices.arrays import bits_of, device_of, namespace
from .elias_fano import low_bits, upper_bits

Array = Any  # of NumPy, torch or CuPy

_PLACES = 31  # bits for a position, below those of what it is sorted by
FIRST = 2**31 - 1  # an order that no float32 has
_WORD = 32


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
    return (FIRST - order) * 2**_PLACES + _counted(xp, order.shape[0], order)


def largest(order: Array, count: int) -> Array:
    """Where the `count` largest orders are, [count] int64 ascending; ties to the lower."""
    xp = namespace(order)
    return xp.sort(xp.sort(falling(order))[:count] % 2**_PLACES)


def slot_words(count: int, n: int) -> int:
    """Words for `count` ascending positions below n."""
    return -(-(count * low_bits(count, n) + upper_bits(count, n)) // _WORD)


def write(positions: Array, n: int) -> Array:
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
    rest = xp.zeros(
        words * _WORD - count * low - upper, dtype=xp.int64, device=device_of(positions)
    )
    bits = xp.reshape(xp.concat([xp.reshape(lows, (-1,)), marks, rest]), (words, _WORD))
    word = xp.sum(bits * _powers(xp, _WORD, positions), axis=1)
    return xp.astype((word ^ 2**31) - 2**31, xp.int32)


def told(slots: Array, count: int, n: int) -> Array:
    """Whether a slot tells a position, [n] bool; one of zeros tells none.

    slots : [slots, slot_words] int32, what `write` made or zeros. Others are read as something.
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
    nowhere = xp.full_like(place, 2**_PLACES)
    ones = xp.sort(xp.where(marks == 1, place, nowhere), axis=1)[:, :count]
    highs = xp.clip(ones - _counted(xp, count, wide), 0, n) * 2**low
    found = xp.where(ones < upper, highs + lows, xp.full_like(highs, n))
    below = xp.searchsorted(xp.sort(xp.reshape(found, (-1,))), _counted(xp, n + 1, wide))
    return below[1:] > below[:-1]


def _counted(xp: Any, count: int, like: Array) -> Array:
    """0, 1, 2, ... [count] int64, where `like` is."""
    return xp.arange(count, dtype=xp.int64, device=device_of(like))


def _powers(xp: Any, count: int, like: Array) -> Array:
    """1, 2, 4, ... [count] int64."""
    return xp.bitwise_left_shift(_counted(xp, count, like) * 0 + 1, _counted(xp, count, like))
