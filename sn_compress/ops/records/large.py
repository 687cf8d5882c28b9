"""Blocks near the largest float32: encoded over 2**SHIFT, which a bit of the record's head says.

A transform sums a block before it divides by the square root of its length, and coefficients are up
to that root larger than values. Below LIMIT nothing of this leaves float32 in a block of 2**32
elements; SHIFT octaves lower the largest float32 is below LIMIT, too. Ordinary blocks have the bits
that they have without this.

A large block's memory is kept as all others are, times 2**SHIFT, and ends at MEMORY: what float32
cannot hold is not remembered. Twin: csrc/compress/record.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ...devices.arrays import Array, Constant, clipped, largest_of_rows, namespace
from .layout import NON_FINITE, Layout, Tally
from .select import MAX_FINITE

SHIFT = 40
LIMIT, MEMORY = 2.0**90, 2.0**126
LARGE = 0x8000  # in the head: the sign of a number that has none
HIGHEST = float(np.finfo(np.float32).max)
OCTAVES = SHIFT * 2**7  # of a head: its exponent is above 7 bits
# By 0 for an ordinary row, and 1 for a large one.
DOWN = Constant(np.array([1, 2.0**-SHIFT], np.float32))

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]


def is_large(values: Array, memory: Array | None = None) -> Array:
    """Of each row [rows, n], [rows] bool; one with NaN may be either."""
    return reach(largest_of_rows(values), memory)


def reach(peaks: Array, memory: Array | None) -> Array:
    """The same of rows whose largest magnitudes are known, [rows]."""
    if memory is not None:
        peaks = namespace(peaks).maximum(peaks, largest_of_rows(memory))
    return peaks >= LIMIT


def restored(values: Array, down: Array, limit: float) -> Array:
    """Rows [rows, n] as they were before a product with `down`, [rows, 1], of DOWN."""
    return clipped(values / down, -limit, limit)


def enlarged(values: Array, limit: float = HIGHEST) -> Array:
    """Times 2**SHIFT; what is beyond the limit ends there, and NaN stays."""
    return clipped(values, -limit * 2.0**-SHIFT, limit * 2.0**-SHIFT) * 2.0**SHIFT


def lower_top(top: int) -> int:
    """The end of a range, upper half of a float32, over 2**SHIFT."""
    return max(top - OCTAVES, 0)


def encode(
    encode_rows: Callable[[Floats, Floats | None, Words, int | None], Tally],
    values: Floats,
    memory: Floats | None,
    words: Words,
    top: int | None,
) -> Tally:
    """What `encode_rows` counts of ordinary rows and of large ones, these encoded over 2**SHIFT.

    encode_rows : as record.encode_records, of values, memory, words and top
    top : may be beyond float32, of a payload with large blocks
    """
    large = is_large(values, memory)
    ordinary = None if top is None else min(top, MAX_FINITE >> 16)
    if not large.any():
        return encode_rows(values, memory, words, ordinary)
    counts = []
    both = (~large, encode_rows, ordinary), (large, lowered(encode_rows), top)
    for rows, encode_those, end in both:
        if not rows.any():
            continue
        kept, out = None if memory is None else memory[rows], words[rows]
        counts.append(encode_those(values[rows], kept, out, end))
        words[rows] = out
        if memory is not None:
            memory[rows] = kept
    return Tally(*map(sum, zip(*counts, strict=True)))


def lowered(
    encode_rows: Callable[[Floats, Floats | None, Words, int | None], Tally],
) -> Callable[[Floats, Floats | None, Words, int | None], Tally]:
    """The same for rows that are all large."""

    def encode_large(values: Floats, memory: Floats | None, words: Words, top: int | None) -> Tally:
        down = np.float32(2.0**-SHIFT)
        kept = None if memory is None else memory * down
        end = None if top is None else lower_top(top)
        with np.errstate(all="ignore"):
            saturated, energy, error = encode_rows(values * down, kept, words, end)
        finite = words[:, 0] & 0xFFFF != NON_FINITE
        words[finite, 0] |= LARGE
        if memory is not None and kept is not None:
            memory[finite] = enlarged(kept[finite], MEMORY)
        return Tally(saturated, energy * 4.0**SHIFT, error * 4.0**SHIFT)

    return encode_large


def unified(
    records: Sequence[Words], layout: Layout
) -> tuple[Sequence[Words], npt.NDArray[np.bool_] | None]:
    """Records of payloads, [rows, words] each, as ordinary ones, and which are over 2**SHIFT.

    None where there is none: then records are those that came. Where one payload has a large record
    all others of the row are put into its unit.
    """
    marked = [(words[:, 0] & LARGE) != 0 for words in records]
    large = np.logical_or.reduce(marked)
    if not large.any():
        return records, None
    found = []
    for words, own in zip(records, marked, strict=True):
        out = words.copy()
        first, second = out[:, 0] & 0xFFFF, out[:, 0] >> 16
        first -= own * np.uint32(LARGE)
        lower = large & ~own & (first <= MAX_FINITE >> 16)
        for heads in (first, second) if layout.values == "2bit" else (first,):
            heads[lower] = np.maximum(heads[lower], OCTAVES) - np.uint32(OCTAVES)
        out[:, 0] = first | second << 16
        found.append(out)
    return found, large
