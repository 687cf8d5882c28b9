"""The bits of a record one by one, read and written without the code under test."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sn_compress.ops.bits import low_bits, upper_bits

Words = npt.NDArray[np.uint32]
Positions = npt.NDArray[np.uint32]
Bits = npt.NDArray[np.uint8]


def codes_to_bits(codes: npt.NDArray[np.uint16] | Words, bits: int) -> Bits:
    """[nb, m] integers below 2**bits -> [nb, m * bits] zeros and ones, lowest bit first."""
    shifts = np.arange(bits, dtype=np.uint32)
    spread = (codes.astype(np.uint32)[:, :, None] >> shifts) & 1
    return spread.reshape(len(codes), codes.shape[1] * bits).astype(np.uint8)


def bits_to_codes(stream: Bits, bits: int) -> Words:
    """Inverse of codes_to_bits, [nb, m * bits] -> [nb, m] uint32."""
    if bits == 0:
        return np.zeros((len(stream), 0), np.uint32)
    weights = np.uint32(1) << np.arange(bits, dtype=np.uint32)
    grouped = stream.reshape(len(stream), stream.shape[1] // bits, bits).astype(np.uint32)
    return np.asarray((grouped * weights).sum(axis=2), np.uint32)


def bits_to_words(stream: Bits) -> Words:
    """[nb, s] zeros and ones -> [nb, ceil(s / 32)] words, padded with zeros."""
    padded = np.zeros((len(stream), -(-stream.shape[1] // 32) * 32), np.uint8)
    padded[:, : stream.shape[1]] = stream
    return np.packbits(padded, axis=1, bitorder="little").view("<u4").astype(np.uint32)


def words_to_bits(words: Words) -> Bits:
    """[nb, w] words -> [nb, 32 * w] zeros and ones."""
    return np.unpackbits(
        np.ascontiguousarray(words, "<u4").view(np.uint8), axis=1, bitorder="little"
    )


def bitmap(positions: Positions, f: int) -> Bits:
    """[nb, k] positions below f -> [nb, f] with a one at each."""
    stream = np.zeros((len(positions), f), np.uint8)
    np.put_along_axis(stream, positions.astype(np.int64), 1, axis=1)
    return stream


def read_bitmap(stream: Bits, k: int) -> Positions:
    """Inverse of bitmap, of sound streams."""
    return np.nonzero(stream)[1].reshape(len(stream), k).astype(np.uint32)


def elias_fano(positions: Positions, f: int) -> tuple[Bits, Bits]:
    """[nb, k] ascending positions below f -> low bits [nb, k * l] and map [nb, upper_bits]."""
    k = positions.shape[1]
    low = low_bits(k, f)
    lows = codes_to_bits(positions & np.uint32((1 << low) - 1), low)
    index: Positions = np.arange(k, dtype=np.uint32)
    ones: Positions = (positions >> np.uint32(low)) + index
    return lows, bitmap(ones, upper_bits(k, f))


def read_elias_fano(lows: Bits, uppers: Bits, k: int, f: int) -> Positions:
    """Inverse of elias_fano, of sound streams."""
    ones = read_bitmap(uppers, k)
    index: Positions = np.arange(k, dtype=np.uint32)
    high: Positions = ones - index
    low = low_bits(k, f)
    positions: Positions = high << np.uint32(low)
    if low:
        positions |= bits_to_codes(lows, low)
    return positions
