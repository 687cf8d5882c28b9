"""Blocks of values to records and back, in one pass over each block where the extension can.

A transform of all blocks before the records of all, or after, would bring each coefficient from
and to memory once more; here it does not leave the core's first cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...devices import _native
from ..spectra import fourier, spans, spectrum
from ..spectra.spectrum import Floats
from . import large
from .layout import Layout, Tally
from .pack import Words
from .record import decode_records, encode_records, numbers, refuse


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
    core, length = _native.core(), spans.length(span, layout.block)
    if core is None or transform != "fft" or not fourier.fits(length):
        forward = spectrum.transform(transform, span).forward

        def encode(values: Floats, memory: Floats | None, words: Words, top: int | None) -> Tally:
            return encode_records(forward(values), memory, words, layout, decay, top)

        values = values.astype(np.float32, copy=False)
        return large.encode(encode, values, memory, words, top)
    end = -1 if top is None else top
    table = fourier.roots(length)
    values = np.ascontiguousarray(values)  # a gradient may be every other element of something
    said = (*numbers(layout), float(decay), end, length, table)
    return Tally(*core.encode_blocks(values, memory, words, *said))


def decode_blocks(
    transform: str,
    records: Sequence[Words],
    out: Floats,
    layout: Layout,
    weight: float,
    span: int | None = None,
) -> None:
    """Write the inverse transform of the weighted sum of records, in their order, into `out`.

    records : of each payload [nb, layout.words] uint32; out : [nb, block] float32; span : see
    encode_blocks
    Raises PayloadError if a record is not one of this layout.
    """
    core, length = _native.core(), spans.length(span, layout.block)
    if core is None or transform != "fft" or not fourier.fits(length):
        way = spectrum.transform(transform, span)
        records, rows = large.unified(records, layout)
        accum = np.zeros((len(out), layout.bins * layout.parts), np.float32)
        for words in records:
            decode_records(words, accum, layout, weight)
        out[:] = way.inverse(accum, layout.block)
        if rows is not None:
            out[rows] = large.enlarged(out[rows])
        return
    said = (*numbers(layout), weight, length, fourier.roots(length))
    refuse(core.decode_blocks(tuple(records), out, *said), layout)
