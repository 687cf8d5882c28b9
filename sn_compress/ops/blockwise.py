"""Blocks of values to records and back, in one pass over each block where the extension can.

A transform of all blocks before the records of all, or after, would bring each coefficient from
and to memory once more; here it does not leave the core's first cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .. import _native
from . import fourier
from .pack import Words
from .record import Layout, Tally, decode_records, encode_records, numbers, refuse
from .spectrum import TRANSFORMS, Floats


def encode_blocks(
    transform: str,
    values: Floats,
    memory: Floats | None,
    words: Words,
    layout: Layout,
    decay: float = 1.0,
    top: int | None = None,
) -> Tally:
    """Transform each row of `values`, [nb, block] float32, and encode it; see encode_records."""
    core = _native.core()
    if core is None or transform != "fft" or not fourier.fits(layout.block):
        coefficients = TRANSFORMS[transform].forward(values)
        return encode_records(coefficients, memory, words, layout, decay, top)
    end = -1 if top is None else top
    table = fourier.roots(layout.block)
    values = np.ascontiguousarray(values)  # a gradient may be every other element of something
    return Tally(
        *core.encode_blocks(values, memory, words, *numbers(layout), float(decay), end, table)
    )


def decode_blocks(
    transform: str, records: Sequence[Words], out: Floats, layout: Layout, weight: float
) -> None:
    """Write the inverse transform of the weighted sum of records, in their order, into `out`.

    records : of each payload [nb, layout.words] uint32; out : [nb, block] float32
    Raises PayloadError if a record is not one of this layout.
    """
    core = _native.core()
    if core is None or transform != "fft" or not fourier.fits(layout.block):
        way = TRANSFORMS[transform]
        accum = np.zeros((len(out), layout.bins * layout.parts), np.float32)
        for words in records:
            decode_records(words, accum, layout, weight)
        out[:] = way.inverse(accum, layout.block)
        return
    table = fourier.roots(layout.block)
    refuse(core.decode_blocks(tuple(records), out, *numbers(layout), weight, table), layout)
