"""Checksums of payloads: CRC-32 since version 2 of the format, a sum in version 1.

The obvious sum modulo 2**32 forgets what an even number of changes does to the highest bit, so
turned signs, a stuck line and swapped halves pass. A CRC is a remainder of polynomials over GF(2)
and has laws instead; `docs/format.md` lists them, decision 0022 says why this one.

On the CPU it is zlib's. A GPU cannot go through the words one after the other, and need not: the
remainder is linear, so word i times x**(-32 i), summed by exclusive or in any order, and the sum
times x**(32 words) at the end, are the same 32 bits. This file holds that arithmetic for the host
and the table of powers; its twin is csrc/compress/crc.cuh.
"""

from __future__ import annotations

import zlib
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

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
