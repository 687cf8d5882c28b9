"""What a payload's checksum finds: whole classes of damage, and by which law."""

import struct
import zlib

import numpy as np
import pytest
from samples import random

from sn_compress import FFTCodec, Payload, PayloadError, codec
from sn_compress.ops import checksum

CRC = slice(28, 32)


def refused(words: np.ndarray) -> bool:
    try:
        Payload.from_bytes(words.view(np.uint8))
    except PayloadError as error:
        return "checksum" in str(error)
    return False


@pytest.fixture(scope="module")
def words() -> np.ndarray:
    made = FFTCodec(theta=0.5, block=64, bits=8).encode(random(4000)).to_bytes()
    return np.frombuffer(made, "<u4")


def test_the_same_change_in_any_two_words(words):
    """Bit 31 of two words was lost on a sum modulo 2**32, whichever two."""
    rng = np.random.default_rng(0)
    for mask in (1 << 31, 1, 0xFFFFFFFF, 0x80808080, 0x12345678):
        for _ in range(300):
            i, j = rng.choice(np.arange(8, words.size), 2, replace=False)
            changed = words.copy()
            changed[[i, j]] ^= np.uint32(mask)
            assert refused(changed), (hex(mask), i, j)


def test_swapped_words(words):
    for i in range(8, 200):
        for j in range(i + 1, 200):
            if words[i] != words[j]:
                changed = words.copy()
                changed[[i, j]] = changed[[j, i]]
                assert refused(changed), (i, j)


def test_a_stuck_line(words):
    """One bit of all words from some place on reads as zero, or as one."""
    for bit in range(32):
        for start in range(8, words.size, 37):
            low, high = words.copy(), words.copy()
            low[start:] &= ~np.uint32(1 << bit)
            high[start:] |= np.uint32(1 << bit)
            for changed in (low, high):
                if (changed != words).any():
                    assert refused(changed), (bit, start)


def test_turned_signs_do_not_decode_to_minus_the_gradient():
    """Two thousand float32 of which all signs are turned: the sum did not change by that."""
    made = codec("topk", theta=0.5).encode(random(4000))
    changed = np.frombuffer(made.to_bytes(), "<u4").copy()
    changed[8 : 8 + 2000] ^= np.uint32(1 << 31)
    assert refused(changed)


def test_every_burst_of_up_to_32_bits(words):
    data = words[:40].copy()
    data[7] = 0
    first = checksum.crc(data.view(np.uint8))
    rng = np.random.default_rng(1)
    whole = int.from_bytes(data.tobytes(), "little")
    for at in range(8 * 32, data.size * 32 - 32):
        burst = (int(rng.integers(2**32)) | 1) << at
        bits = (whole ^ burst).to_bytes(data.nbytes, "little")
        assert checksum.crc(np.frombuffer(bits, np.uint8)) != first


def test_two_bits_are_found_up_to_half_a_gigabyte():
    """x has order 2**32 - 1: no two bits closer than that cancel, nor do two equal words."""
    x = 1 << 30  # reflected: the highest bit is x**0
    one = 1 << 31
    assert checksum.power(x, 2**32 - 1) == one
    for prime in (3, 5, 17, 257, 65537):  # 2**32 - 1 is their product
        assert checksum.power(x, (2**32 - 1) // prime) != one


def test_it_is_the_crc_of_zlib_with_its_own_word_as_zero(words):
    data = bytearray(words.tobytes())
    said = struct.unpack("<I", data[CRC])[0]
    data[CRC] = bytes(4)
    assert said == zlib.crc32(data)


def test_shares_of_words_add_up_in_any_order(words):
    """As a GPU sums them: each word times a power, by exclusive or."""
    n, total = words.size, 0
    for i in np.random.default_rng(2).permutation(n):
        word = 0 if i == 7 else int(words[i]) ^ (0xFFFFFFFF if i == 0 else 0)
        total ^= checksum.product(word, checksum.step_back(int(i)))
    found = checksum.product(total, checksum.step_on(n)) ^ 0xFFFFFFFF
    assert found == int(words[7])
    table = checksum.powers()
    for i in (0, 1, 2047, 2048, 4_000_000, 2**40 + 12345):
        found = 1 << 31
        for level in range(4):
            found = checksum.product(found, int(table[level, i >> 11 * level & 2047]))
        assert found == checksum.step_back(i)


def test_version_1_is_read_by_its_own_sum(words):
    old = words.copy()
    old[0] = int(old[0]) & 0xFF00FFFF | 1 << 16
    old[7] = 0
    old[7] = sum((2 * i + 1) * int(w) for i, w in enumerate(old)) % 2**32
    payload = Payload.from_bytes(old.view(np.uint8))
    made = FFTCodec(theta=0.5, block=64, bits=8)
    new = made.decode(Payload.from_bytes(words.view(np.uint8)))
    np.testing.assert_array_equal(made.decode(payload), new)
    assert payload.to_bytes() == old.tobytes()
    # A version changed on the way is no way around the checksum.
    for at, version in ((words, 1), (old, 2)):
        changed = at.copy()
        changed[0] = int(changed[0]) & 0xFF00FFFF | version << 16
        assert refused(changed)
