"""One record per block: its range, the codes of what is kept and where that belongs.

    head         16 bits, the scale of the block's values as the upper half of a float32 (32 bits,
                 two scales, for 2-bit values); NON_FINITE marks a block with NaN or Inf, which
                 decodes to NaN everywhere
    then         the codes of each kept bin (re and im, or one real), in order of position
    then         positions, as a bitmap of f bits or in Elias-Fano form; nothing if all are kept

padded to 32-bit words. `csrc/compress/record.cpp` does the work in one pass over each block while
it is in the cache; `encode_twin` and `decode_twin` are its oracle, and run where it is missing.
A transform of all blocks before the records of all, or after, would bring each coefficient from
and to memory once more; `encode_blocks` and `decode_blocks` keep it in the core's first cache.

Streams are made of 32-bit little-endian words, the first bit in the lowest place. Elias-Fano
(Elias 1974; Fano 1971) splits each of k ascending positions below f into l = log2(f / k) low
bits, stored as they are, and the rest, stored as a map with k ones: bit (p >> l) + i is one for
the i-th position p. The size follows from k and f alone, and it is within a few percent of the
least possible: 7.6 bits a position at k = 41 of 2049, where a plain index takes 11.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import numpy as np
import numpy.typing as npt

from .. import _native
from ..errors import PayloadError
from . import quantize, spectrum
from .bits import low_bits, upper_bits
from .quantize import NON_FINITE, Layout, Positions, Tally, Values, decode_values, encode_values
from .spectrum import Floats, energy

Words = npt.NDArray[np.uint32]
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
    """Inverse of bitmap; raises PayloadError unless every row has exactly k ones."""
    counts = stream.sum(axis=1, dtype=np.int64)
    if (counts != k).any():
        row = int(np.argmax(counts != k))
        raise PayloadError(f"block {row} marks {counts[row]} positions; expected {k}")
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
    """Inverse of elias_fano; raises PayloadError unless positions ascend strictly below f."""
    ones = read_bitmap(uppers, k)
    index: Positions = np.arange(k, dtype=np.uint32)
    high: Positions = ones - index
    low = low_bits(k, f)
    positions: Positions = high << np.uint32(low)
    if low:
        positions |= bits_to_codes(lows, low)
    # Forged low bits may put positions out of order, or two of them on one bin.
    steps = np.diff(positions.astype(np.int64), axis=1)
    if (positions >= f).any() or (steps <= 0).any():
        raise PayloadError(f"positions do not ascend strictly below {f}")
    return positions


def encode_records(
    coefficients: Floats,
    memory: Floats | None,
    words: Words,
    layout: Layout,
    decay: float = 1.0,
    top: int | None = None,
) -> Tally:
    """Encode each row of `coefficients` (+ decay * `memory`) into a row of `words`.

    coefficients : [nb, bins * parts] float32, used as scratch: holds the residual afterwards,
        with zero for what the inverse transform ignores (imaginary parts of the edge bins)
    memory : the same shape, or None; becomes the residual, except in non-finite rows, where it
        stays as it was
    words : [nb, layout.words] uint32, written
    top : the range's end (upper half of a float32) if it is not each block's own
    """
    core = _native.core()
    if core is None:
        return encode_twin(coefficients, memory, words, layout, decay, top)
    end = -1 if top is None else top
    return Tally(
        *core.encode_records(coefficients, memory, words, numbers(layout), float(decay), end)
    )


def decode_records(words: Words, accum: Floats, layout: Layout, weight: float) -> None:
    """Add weight * what the records hold to `accum`, [nb, bins * parts] float32.

    Raises PayloadError if a record is not one of this layout.
    """
    core = _native.core()
    if core is None:
        decode_twin(words, accum, layout, weight)
    else:
        refuse(core.decode_records(words, accum, numbers(layout), weight), layout)


def refuse(damaged: int, layout: Layout) -> None:
    """Raise PayloadError for the record of this number, if it is not negative."""
    if damaged >= 0:
        raise PayloadError(
            f"record {damaged} is damaged: its range is not finite, or its positions are not "
            f"{layout.kept} in ascending order below {layout.bins}"
        )


def numbers(layout: Layout) -> tuple[int, ...]:
    """The layout as the extension takes it; the same order as in csrc/compress/module.cpp."""
    return (
        layout.block,
        layout.parts,
        layout.kept,
        layout.words,
        _KINDS.index(layout.values),
        layout.code_bits,
        layout.mantissa,
        layout.positions == "bitmap",
    )


_KINDS = get_args(Values)


def encode_twin(
    coefficients: Floats,
    memory: Floats | None,
    words: Words,
    layout: Layout,
    decay: float = 1.0,
    top: int | None = None,
) -> Tally:
    """encode_records in NumPy."""
    rows, k, parts = len(coefficients), layout.kept, layout.parts
    if memory is not None:
        with np.errstate(all="ignore"):
            coefficients += memory * np.float32(decay)
    peaks = quantize.peak_bits(coefficients)
    finite = peaks <= quantize.MAX_FINITE
    # Zeros from here on: one NaN would make the energy of all rows NaN, and NumPy warns of its
    # cast.
    coefficients[~finite] = 0
    keys = quantize.magnitude_keys(coefficients, peaks, parts)
    positions = quantize.largest_keys(keys, k)  # [nb, k]
    bins = coefficients.reshape(rows, layout.bins, parts)
    index = positions.astype(np.int64)[:, :, None]
    values = np.take_along_axis(bins, index, axis=1).reshape(rows, k * parts)
    heads, codes, saturated = encode_values(values, peaks, layout, top)
    # After the codes: whatever was encoded, this row says that it is not finite, and nothing else.
    heads[~finite] = [NON_FINITE] + [0] * (heads.shape[1] - 1)
    stream = np.concatenate(
        [
            codes_to_bits(heads, 16),
            codes_to_bits(codes, layout.code_bits),
            *_place(positions, layout),
        ],
        axis=1,
    )
    stream[~finite, 16:] = 0
    words[:] = bits_to_words(stream)
    before = energy(coefficients, layout.block, parts)
    decoded = decode_values(codes, heads, layout)
    residual = (values - decoded).reshape(rows, k, parts)
    residual[~finite] = 0
    np.put_along_axis(bins, index, residual, axis=1)
    if parts == 2:
        # The imaginary parts of the edge bins say nothing of a real vector; a coder without a zero
        # gives them a value all the same, which is no error and has no place in the memory.
        bins[:, 0, 1] = 0
        if layout.block % 2 == 0:
            bins[:, -1, 1] = 0
    if memory is not None:
        memory[finite] = coefficients[finite]
    return Tally(saturated, before, energy(coefficients, layout.block, parts))


def decode_twin(words: Words, accum: Floats, layout: Layout, weight: float) -> None:
    """decode_records in NumPy."""
    stream = words_to_bits(words)
    # Rows marked as not finite first: their other bits are ignored, and could not be checked.
    heads = bits_to_codes(stream[:, : layout.head_bits], 16)
    finite = heads[:, 0] != NON_FINITE
    accum[~finite] = np.nan
    heads, stream = heads[finite], stream[finite]
    if (heads > quantize.MAX_FINITE >> 16).any():
        raise PayloadError(f"a block's range ends at {heads.max():#06x}, which is not finite")
    positions = _find(stream, layout)
    code_stream = stream[:, layout.head_bits : layout.positions_at]
    codes = bits_to_codes(code_stream, layout.code_bits).astype(np.uint16)
    bins = accum.reshape(len(accum), layout.bins, layout.parts)
    rows = np.flatnonzero(finite)[:, None]
    shape = (len(stream), layout.kept, layout.parts)
    with np.errstate(all="ignore"):  # damaged half-precision codes may hold NaN and Inf
        values = decode_values(codes, heads.astype(np.uint16), layout) * np.float32(weight)
        bins[rows, positions.astype(np.int64)] += values.reshape(shape)


def _place(positions: quantize.Positions, layout: Layout) -> Sequence[Bits]:
    if layout.kept == layout.bins:
        return ()
    if layout.positions == "bitmap":
        return (bitmap(positions, layout.bins),)
    return elias_fano(positions, layout.bins)


def _find(stream: Bits, layout: Layout) -> quantize.Positions:
    at, k, f = layout.positions_at, layout.kept, layout.bins
    if k == f:
        return np.broadcast_to(np.arange(f, dtype=np.uint32), (len(stream), f))
    if layout.positions == "bitmap":
        return read_bitmap(stream[:, at : at + f], k)
    split, end = at + k * low_bits(k, f), at + layout.position_bits
    return read_elias_fano(stream[:, at:split], stream[:, split:end], k, f)


def encode_blocks(
    transform: str,
    values: Floats,
    memory: Floats | None,
    words: Words,
    layout: Layout,
    decay: float = 1.0,
    top: int | None = None,
    span: int | None = None,
) -> Tally:
    """Transform each row of `values`, [nb, block] float32, and encode it; see encode_records.

    span : elements of each FFT, where a block is cut into several
    """
    core, length = _native.core(), spectrum.span_length(span, layout.block)
    # One pass in C++ for the FFT of a power of two; other transforms of all rows, then their
    # records.
    if core is None or transform != "fft" or not spectrum.fits(length):
        forward = spectrum.transform(transform, span).forward

        def encode(values: Floats, memory: Floats | None, words: Words, top: int | None) -> Tally:
            return encode_records(forward(values), memory, words, layout, decay, top)

        values = values.astype(np.float32, copy=False)
        return quantize.encode_large(encode, values, memory, words, top)
    end = -1 if top is None else top
    table = spectrum.roots(length)
    values = np.ascontiguousarray(values)  # a gradient may be every other element of something
    arguments = (numbers(layout), float(decay), end, length, table)
    return Tally(*core.encode_blocks(values, memory, words, *arguments))


def decode_blocks(
    transform: str,
    records: Sequence[Words],
    out: Floats,
    layout: Layout,
    weight: float,
    span: int | None = None,
) -> Floats:
    """Return the inverse transform of the weighted sum of records, in their order, [nb, block].

    records : of each payload [nb, layout.words] uint32; span : see encode_blocks
    out : [nb, block] float32, which may be used for the result
    Raises PayloadError if a record is not one of this layout.
    """
    core, length = _native.core(), spectrum.span_length(span, layout.block)
    if core is None or transform != "fft" or not spectrum.fits(length):
        inverse_of = spectrum.transform(transform, span)
        # Payloads of one mean have to be in one unit before their values are added.
        records, rows = quantize.unified(records, layout)
        accum = np.zeros((len(out), layout.bins * layout.parts), np.float32)
        for words in records:
            decode_records(words, accum, layout, weight)
        values: Floats = inverse_of.inverse(accum, layout.block)
        if rows is not None:
            values[rows] = quantize.enlarged(values[rows])
        return values
    arguments = (numbers(layout), weight, length, spectrum.roots(length))
    refuse(core.decode_blocks(tuple(records), out, *arguments), layout)
    return out
