"""One record per block: its range, and the codes and positions of the kept coefficients.

    head         16 bits, the scale of the block's values as the upper half of a float32 (32 bits,
                 two scales, for 2-bit values); NON_FINITE marks a block with NaN or Inf, which
                 decodes to NaN everywhere
    then         the codes of each kept bin (re and im, or one real), in order of position
    then         positions, as a bitmap of f bits or in Elias-Fano form; nothing if all are kept

padded to 32-bit words. `csrc/compress/record.cpp` computes it in one pass over each block while
the block is in the cache; without the extension, record_arrays.py does so with NumPy.
Transforming all blocks before encoding any, or decoding all before any inverse transform, would
move each coefficient through memory once more; `encode_blocks` and `decode_blocks` keep it in L1.

Streams consist of 32-bit little-endian words, the first bit in the lowest place. Elias-Fano
(Elias 1974; Fano 1971) splits each of k ascending positions below f into l = log2(f / k) low
bits, stored directly, and the rest, stored as a map with k ones: bit (p >> l) + i is one for
the i-th position p. The size depends only on k and f, and is within a few percent of the
least possible: 7.6 bits per position at k = 41 of 2049, where a plain index takes 11.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import numpy as np

from .. import _native
from ..errors import PayloadError
from . import quantize, spectrum
from .quantize import Floats, Layout, Tally, Values, Words
from .record_arrays import Records


def encode_records(
    coefficients: Floats,
    memory: Floats | None,
    words: Words,
    layout: Layout,
    decay: float = 1.0,
    top: int | None = None,
) -> Tally:
    """Encode each row of `coefficients` (+ decay * `memory`) into a row of `words`.

    coefficients : [nb, bins * parts] float32, which may be overwritten
    memory : the same shape, or None; becomes the residual, except in non-finite rows, where it
        stays unchanged
    words : [nb, layout.words] uint32, written
    top : the range's end (upper half of a float32) if blocks do not have their own
    """
    core = _native.core()
    if core is None:
        with np.errstate(all="ignore"):
            records = Records(layout, clear_edges=False)
            encoded = records.encode(coefficients, memory, decay, top, tally=True)
        words[:] = encoded.words
        if memory is not None:
            memory[:] = encoded.residual
        counts = encoded.saturated, encoded.energy, encoded.error
        saturated, energy, error = (np.asarray(count).sum() for count in counts)
        return Tally(int(saturated), float(energy), float(error))
    end = -1 if top is None else top
    return Tally(
        *core.encode_records(coefficients, memory, words, numbers(layout), float(decay), end)
    )


def decode_records(words: Words, accum: Floats, layout: Layout, weight: float) -> None:
    """Add weight * the records' values to `accum`, [nb, bins * parts] float32.

    Raises PayloadError if a record is not one of this layout.
    """
    core = _native.core()
    if core is not None:
        refuse(core.decode_records(words, accum, numbers(layout), weight), layout)
        return
    if not len(words):
        return
    records = Records(layout)
    with np.errstate(all="ignore"):  # corrupt half-precision codes may be NaN and Inf
        decoded = records.decode(words.astype(np.int64))
        # Records must not carry the mark of large blocks here: see quantize.unified.
        damaged = decoded.damaged | (words[:, 0] & quantize.LARGE_BIT != 0)
        refuse(int(damaged.argmax()) if damaged.any() else -1, layout)
        pairs = accum.reshape(-1, layout.parts)
        accum[:] = records.add(pairs, decoded, weight).reshape(accum.shape)
    accum[decoded.missing] = np.nan


def refuse(damaged: int, layout: Layout) -> None:
    """Raise PayloadError for the record with this number, unless it is negative."""
    if damaged >= 0:
        raise PayloadError(
            f"record {damaged} is damaged: its range is not finite, or its positions are not "
            f"{layout.kept} in ascending order below {layout.bins}"
        )


def numbers(layout: Layout) -> tuple[int, ...]:
    """Return the layout in the form the extension takes; same order as csrc/compress/module.cpp."""
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
    # One pass in C++ for the FFT of a power of two; else transform all rows, then encode their
    # records.
    if core is None or transform != "fft" or not spectrum.fits(length):
        forward = spectrum.transform(transform, span).forward

        def encode(values: Floats, memory: Floats | None, words: Words, top: int | None) -> Tally:
            return encode_records(forward(values), memory, words, layout, decay, top)

        values = values.astype(np.float32, copy=False)
        return quantize.encode_large(encode, values, memory, words, top)
    end = -1 if top is None else top
    table = spectrum.roots(length)
    values = np.ascontiguousarray(values)  # a gradient may be a strided view
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

    records : for each payload, [nb, layout.words] uint32; span : see encode_blocks
    out : [nb, block] float32, which may be used for the result
    Raises PayloadError if a record is not one of this layout.
    """
    core, length = _native.core(), spectrum.span_length(span, layout.block)
    if core is None or transform != "fft" or not spectrum.fits(length):
        inverse_of = spectrum.transform(transform, span)
        # Payloads of one mean must be in the same unit before their values are added.
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
