"""Checksums of payloads: CRC-32 since version 2 of the format, a sum in version 1.

A plain sum modulo 2**32 does not detect an even number of changes of the highest bit, so flipped
signs, a stuck line and swapped halves may go unnoticed. A CRC is a remainder of polynomials over
GF(2), with proven guarantees; `docs/format.md` lists them, decision 0022 explains the choice.

On the CPU it is zlib's. A GPU cannot process the words sequentially, and need not: the remainder is
linear, so the xor over all words i, in any order, of word i times x**(-32 i), multiplied at the end
by x**(32 words), gives the same 32 bits. This file has that arithmetic for the host and the table
of powers; the counterpart is csrc/compress/crc.cuh.

`Checksums` computes those of many payloads in one buffer over any array library, without a loop
over words. With the register at zero, the CRC of concatenated words is the xor of the CRCs of their
individual bytes, which a table holds for each position in a run of 64 words; the CRCs of 64 runs
are combined in the same way, with tables of larger steps, so that three levels cover a mebibyte.
Runs are padded in front, where zeros change nothing. The initial and final values of the register
contribute a term that depends only on the length.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays import Array, Constant, device_of, namespace, take

Bytes = npt.NDArray[np.uint8]

# x**32 modulo the polynomial of IEEE 802.3; reflected, as in zlib: bit 31 - i belongs to x**i.
POLYNOMIAL = 0xEDB88320
ONE, _X = 1 << 31, 1 << 30
ORDER = 2**32 - 1  # of x: x**ORDER is 1, and no lower power is
OWN_WORD = 7  # index of the header's word with the checksum
LEVELS, LEVEL_BITS = 4, 11  # of the table of powers, which covers 2**44 words


def crc(buffer: Bytes) -> int:
    """Return the CRC-32 of a payload, with the checksum's own word as 0; version 2."""
    data: Any = buffer.data
    at = 4 * OWN_WORD
    return zlib.crc32(data[at + 4 :], zlib.crc32(bytes(4), zlib.crc32(data[:at])))


def weighted_sum(buffer: Bytes) -> int:
    """Return the sum of (2i + 1) * word_i modulo 2**32, with its own word as 0; version 1."""
    words = buffer.view("<u4")
    factors = np.arange(1, 2 * words.size, 2, dtype=np.uint32)
    total = int(np.dot(words, factors))
    return (total - int(words[OWN_WORD]) * (2 * OWN_WORD + 1)) % 2**32


def product(a: int, b: int) -> int:
    """Multiply a by b modulo the polynomial, both reflected."""
    total = 0
    for i in range(31, -1, -1):
        total ^= b if a >> i & 1 else 0
        b = b >> 1 ^ (POLYNOMIAL if b & 1 else 0)
    return total


def power(base: int, exponent: int) -> int:
    """Return base**exponent modulo the polynomial."""
    total = ONE
    while exponent:
        if exponent & 1:
            total = product(total, base)
        base, exponent = product(base, base), exponent >> 1
    return total


@cache
def step_on(words: int) -> int:
    """Return x**(32 words), by which a GPU multiplies the sum over a payload of `words` words."""
    return power(_X, 32 * words % ORDER)


def step_back(words: int) -> int:
    """Return x**(-32 words), the factor of the word at this index."""
    return power(_X, -32 * words % ORDER)


@cache
def powers() -> npt.NDArray[np.uint32]:
    """Return step_back(i * 2**(11 level)) for i below 2048, [4, 2048] uint32.

    The factor of any word is a product of one entry per level.
    """
    table = np.empty((LEVELS, 1 << LEVEL_BITS), np.uint32)
    for level in range(LEVELS):
        step, value = step_back(1 << LEVEL_BITS * level), ONE
        for i in range(1 << LEVEL_BITS):
            table[level, i] = value
            value = product(value, step)
    table.setflags(write=False)
    return table


RUN = 64  # words
_SHIFTS = Constant(np.arange(0, 32, 8, dtype=np.int32))
_SLOTS = Constant(256 * np.arange(4 * RUN, dtype=np.int32).reshape(RUN, 4))  # table offset per byte


class Checksums:
    """Computes the checksums of concatenated payloads of these sizes, in words."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.words = sum(sizes)
        starts = np.cumsum([0, *sizes])[:-1]
        self.places = Constant((starts + OWN_WORD).astype(np.int64))
        self._levels: list[tuple[Constant, Constant]] = []
        # The checksum's own word counts as 0; only in the first level, as later ones have CRCs.
        skipped: npt.NDArray[np.int64] | None = starts + OWN_WORD
        counts, total = np.asarray(sizes, np.int64), self.words
        while skipped is not None or counts.max(initial=1) > 1:
            gathering = Constant(_gathering(counts, total, skipped))
            self._levels.append((gathering, _table(len(self._levels))))
            counts = -(-counts // RUN)
            skipped, total = None, int(counts.sum())
        ends = [zlib.crc32(bytes(4 * size)) for size in sizes]
        self._ends = Constant(np.asarray(ends, np.uint32).view(np.int32))

    def of(self, words: Array) -> Array:
        """Return the CRC of each payload, with its own word as 0, [rows, payloads] int32.

        words : [rows, words] int32, payloads concatenated in each row
        """
        xp, rows = namespace(words), words.shape[0]
        slots, shifts = _SLOTS.on(words), _SHIFTS.on(words)
        for gathering, table in self._levels:
            zeros = xp.zeros((rows, 1), dtype=xp.int32, device=device_of(words))
            index = gathering.on(words)
            runs = xp.take(xp.concat([words, zeros], axis=1), index, axis=1)
            # A table look-up per byte of a run. A product with a matrix of bits would take 32 times
            # the payload in floats (decision 86).
            split = xp.bitwise_right_shift(xp.reshape(runs, (rows, -1, RUN, 1)), shifts) & 255
            terms = take(table.on(words), xp.reshape(split + slots, (-1,)))
            terms = xp.reshape(terms, (rows, -1, 4 * RUN))
            # Libraries lack an xor reduction along an axis: halve repeatedly.
            while terms.shape[2] > 1:
                half = terms.shape[2] // 2
                terms = terms[:, :, :half] ^ terms[:, :, half:]
            words = terms[:, :, 0]
        return words ^ self._ends.on(words)[None, :]


def _gathering(
    counts: npt.NDArray[np.int64], total: int, skipped: npt.NDArray[np.int64] | None
) -> npt.NDArray[np.int64]:
    """Return the indices of the words of each run; index `total`, after all words, is a zero."""
    filled = -(-counts // RUN) * RUN
    ends = np.cumsum(filled)
    index = np.full(int(filled.sum()), total, np.int64)
    at = 0
    for count, end in zip(counts, ends, strict=True):
        index[end - count : end] = np.arange(at, at + count)
        at += count
    if skipped is not None:
        index[np.isin(index, skipped)] = total
    return index


@cache
def _table(level: int) -> Constant:
    """Return the contribution of each value of each byte of a run, [64 * 4 * 256] int32.

    level : 0 for words, which are still to be shifted into the register; 1 for the CRCs of runs of
        words, 2 for those of runs of runs, which only have to be advanced
    """
    step = step_on(RUN**level)
    factor = step_on(1) if level == 0 else ONE  # for the last word of a run, then backwards
    bits = np.empty((RUN, 32), np.uint32)
    for place in reversed(range(RUN)):
        value = factor
        for bit in reversed(range(32)):  # reflected: the highest bit is 1, the next x
            bits[place, bit] = value
            value = value >> 1 ^ (POLYNOMIAL if value & 1 else 0)
        factor = product(factor, step)
    basis = bits.reshape(4 * RUN, 8)
    table = np.zeros((4 * RUN, 256), np.uint32)
    for bit in range(8):
        table[:, 1 << bit : 2 << bit] = table[:, : 1 << bit] ^ basis[:, bit : bit + 1]
    return Constant(table.reshape(-1).view(np.int32))
