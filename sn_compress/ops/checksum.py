"""Checksums of payloads: CRC-32 since version 2 of the format, a sum in version 1.

The obvious sum modulo 2**32 forgets what an even number of changes does to the highest bit, so
turned signs, a stuck line and swapped halves pass. A CRC is a remainder of polynomials over GF(2)
and has laws instead; `docs/format.md` lists them, decision 0022 says why this one.

On the CPU it is zlib's. A GPU cannot go through the words one after the other, and need not: the
remainder is linear, so word i times x**(-32 i), summed by exclusive or in any order, and the sum
times x**(32 words) at the end, are the same 32 bits. This file holds that arithmetic for the host
and the table of powers; its twin is csrc/compress/crc.cuh.

`Checksums` are those of many payloads in one buffer over any array library, without a loop over
words. With the register at zero, the CRC of words side by side is the exclusive
or of what each of their bytes gives by itself, which a table holds for each place in a run of 64
words; the CRCs of 64 runs make one in the same way, with tables of larger steps, so that three
levels do for a mebibyte. Runs are filled up in front, where zeros change nothing. What the register
begins and ends with depends on the length alone.
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

# x**32 modulo the polynomial of IEEE 802.3; reflected, as zlib has it: bit 31 - i is that of x**i.
POLYNOMIAL = 0xEDB88320
ONE, _X = 1 << 31, 1 << 30
ORDER = 2**32 - 1  # of x: x**ORDER is 1, and no lower power is
OWN_WORD = 7  # where a header keeps the checksum
LEVELS, LEVEL_BITS = 4, 11  # of the table of powers: 2**44 words


def crc(buffer: Bytes) -> int:
    """CRC-32 of a payload, the checksum's own word as 0; version 2."""
    data: Any = buffer.data
    at = 4 * OWN_WORD
    return zlib.crc32(data[at + 4 :], zlib.crc32(bytes(4), zlib.crc32(data[:at])))


def weighted_sum(buffer: Bytes) -> int:
    """Sum of (2i + 1) * word_i modulo 2**32, the checksum's own word as 0; version 1."""
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
    """base**exponent modulo the polynomial."""
    total = ONE
    while exponent:
        if exponent & 1:
            total = product(total, base)
        base, exponent = product(base, base), exponent >> 1
    return total


@cache
def step_on(words: int) -> int:
    """x**(32 words): what a GPU multiplies the sum of a payload of so many words with."""
    return power(_X, 32 * words % ORDER)


def step_back(words: int) -> int:
    """x**(-32 words): the factor of the word at this place."""
    return power(_X, -32 * words % ORDER)


@cache
def powers() -> npt.NDArray[np.uint32]:
    """step_back(i * 2**(11 level)) for i below 2048, [4, 2048] uint32.

    The factor of any word is a product of one entry of each level.
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
_SLOTS = Constant(256 * np.arange(4 * RUN, dtype=np.int32).reshape(RUN, 4))  # bytes' tables


class Checksums:
    """Of payloads of these sizes, in words, one behind the other."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.words = sum(sizes)
        starts = np.cumsum([0, *sizes])[:-1]
        self.places = Constant((starts + OWN_WORD).astype(np.int64))
        self._levels: list[tuple[Constant, Constant]] = []
        # The checksum's own word counts as 0, in the first level alone: later ones have CRCs.
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
        """The CRC of each payload, its own word as 0: [rows, payloads] int32.

        words : [rows, words] int32, payloads side by side in each row
        """
        xp, rows = namespace(words), words.shape[0]
        slots, shifts = _SLOTS.on(words), _SHIFTS.on(words)
        for gathering, table in self._levels:
            zeros = xp.zeros((rows, 1), dtype=xp.int32, device=device_of(words))
            index = gathering.on(words)
            runs = xp.take(xp.concat([words, zeros], axis=1), index, axis=1)
            # A look-up for each byte of a run. A product with a matrix of bits would take 32 times
            # the payload in floats (decision 86).
            split = xp.bitwise_right_shift(xp.reshape(runs, (rows, -1, RUN, 1)), shifts) & 255
            terms = take(table.on(words), xp.reshape(split + slots, (-1,)))
            terms = xp.reshape(terms, (rows, -1, 4 * RUN))
            # Libraries have no exclusive or along an axis: halves of what is left, by and by.
            while terms.shape[2] > 1:
                half = terms.shape[2] // 2
                terms = terms[:, :, :half] ^ terms[:, :, half:]
            words = terms[:, :, 0]
        return words ^ self._ends.on(words)[None, :]


def _gathering(
    counts: npt.NDArray[np.int64], total: int, skipped: npt.NDArray[np.int64] | None
) -> npt.NDArray[np.int64]:
    """Where the words of each run are; `total`, behind all words, is a zero."""
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
    """What each value of each byte of a run gives, [64 * 4 * 256] int32.

    level : 0 for words, which the register has yet to take in; 1 for runs of words, 2 for runs of
        runs, which it only goes on from
    """
    step = step_on(RUN**level)
    factor = step_on(1) if level == 0 else ONE  # of the last word of a run, then backwards
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
