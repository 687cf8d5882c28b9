"""One record per block: its range, the codes of what is kept and where that belongs.

    head         16 bits, the scale of the block's values as the upper half of a float32 (32 bits,
                 two scales, for 2-bit values); NON_FINITE marks a block with NaN or Inf, which
                 decodes to NaN everywhere
    then         the codes of each kept bin (re and im, or one real), in order of position
    then         positions, as a bitmap of f bits or in Elias-Fano form; nothing if all are kept

padded to 32-bit words. `csrc/compress/record.cpp` does the work in one pass over each block while
it is in the cache; `encode_twin` and `decode_twin` are its oracle and its stand-in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import numpy as np

from ...base.errors import PayloadError
from ...devices import _native
from ..spectra.spectrum import Floats, energy
from ..words.elias_fano import low_bits
from . import pack, select
from .layout import NON_FINITE, Layout, Tally, Values
from .values import decode_values, encode_values


def encode_records(
    coefficients: Floats,
    memory: Floats | None,
    words: pack.Words,
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
        *core.encode_records(coefficients, memory, words, *numbers(layout), float(decay), end)
    )


def decode_records(words: pack.Words, accum: Floats, layout: Layout, weight: float) -> None:
    """Add weight * what the records hold to `accum`, [nb, bins * parts] float32.

    Raises PayloadError if a record is not one of this layout.
    """
    core = _native.core()
    if core is None:
        decode_twin(words, accum, layout, weight)
    else:
        refuse(core.decode_records(words, accum, *numbers(layout), weight), layout)


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
    words: pack.Words,
    layout: Layout,
    decay: float = 1.0,
    top: int | None = None,
) -> Tally:
    """encode_records in NumPy."""
    rows, k, parts = len(coefficients), layout.kept, layout.parts
    if memory is not None:
        with np.errstate(all="ignore"):
            coefficients += memory * np.float32(decay)
    peaks = select.peak_bits(coefficients)
    finite = peaks <= select.MAX_FINITE
    coefficients[~finite] = 0
    keys = select.magnitude_keys(coefficients, peaks, parts)
    positions = select.largest(keys, k)  # [nb, k]
    bins = coefficients.reshape(rows, layout.bins, parts)
    index = positions.astype(np.int64)[:, :, None]
    kept = np.take_along_axis(bins, index, axis=1).reshape(rows, k * parts)
    heads, codes, saturated = encode_values(kept, peaks, layout, top)
    heads[~finite] = [NON_FINITE] + [0] * (heads.shape[1] - 1)
    stream = np.concatenate(
        [
            pack.codes_to_bits(heads, 16),
            pack.codes_to_bits(codes, layout.code_bits),
            *_place(positions, layout),
        ],
        axis=1,
    )
    stream[~finite, 16:] = 0
    words[:] = pack.bits_to_words(stream)
    before = energy(coefficients, layout.block, parts)
    decoded = decode_values(codes, heads, layout)
    left = (kept - decoded).reshape(rows, k, parts)
    left[~finite] = 0
    np.put_along_axis(bins, index, left, axis=1)
    if parts == 2:
        # The imaginary parts of the edge bins say nothing of a real vector; a coder without a zero
        # gives them a value all the same, which is no error and has no place in the memory.
        bins[:, 0, 1] = 0
        if layout.block % 2 == 0:
            bins[:, -1, 1] = 0
    if memory is not None:
        memory[finite] = coefficients[finite]
    return Tally(saturated, before, energy(coefficients, layout.block, parts))


def decode_twin(words: pack.Words, accum: Floats, layout: Layout, weight: float) -> None:
    """decode_records in NumPy."""
    stream = pack.words_to_bits(words)
    heads = pack.bits_to_codes(stream[:, : layout.head_bits], 16)
    finite = heads[:, 0] != NON_FINITE
    accum[~finite] = np.nan
    heads, stream = heads[finite], stream[finite]
    if (heads > select.MAX_FINITE >> 16).any():
        raise PayloadError(f"a block's range ends at {heads.max():#06x}, which is not finite")
    positions = _find(stream, layout)
    code_stream = stream[:, layout.head_bits : layout.positions_at]
    codes = pack.bits_to_codes(code_stream, layout.code_bits).astype(np.uint16)
    bins = accum.reshape(len(accum), layout.bins, layout.parts)
    rows = np.flatnonzero(finite)[:, None]
    shape = (len(stream), layout.kept, layout.parts)
    with np.errstate(all="ignore"):  # damaged half-precision codes may hold NaN and Inf
        values = decode_values(codes, heads.astype(np.uint16), layout) * np.float32(weight)
        bins[rows, positions.astype(np.int64)] += values.reshape(shape)


def _place(positions: select.Positions, layout: Layout) -> Sequence[pack.Bits]:
    if layout.kept == layout.bins:
        return ()
    if layout.positions == "bitmap":
        return (pack.bitmap(positions, layout.bins),)
    return pack.elias_fano(positions, layout.bins)


def _find(stream: pack.Bits, layout: Layout) -> select.Positions:
    at, k, f = layout.positions_at, layout.kept, layout.bins
    if k == f:
        return np.broadcast_to(np.arange(f, dtype=np.uint32), (len(stream), f))
    if layout.positions == "bitmap":
        return pack.read_bitmap(stream[:, at : at + f], k)
    split, end = at + k * low_bits(k, f), at + layout.position_bits
    return pack.read_elias_fano(stream[:, at:split], stream[:, split:end], k, f)
