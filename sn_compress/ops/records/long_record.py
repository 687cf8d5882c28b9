"""The record of one long vector, encoded from its spectrum where the transform left it.

A spectrum in natural order, then its keys, positions, values and codes, would each be written to
memory and read again: more time than the transform takes. `csrc/compress/long_record.cpp` finds
the smallest key that is kept, then goes through runs of bins that stay in the cache. The bits are
those of `record.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from ...devices import _native
from ..spectra import long_fourier
from ..spectra.spectrum import Floats
from . import large
from .layout import Layout, Tally
from .pack import Words
from .record import numbers, refuse

_LARGE = int(np.float32(large.LIMIT).view(np.uint32))  # of the spectrum: it is known by then


def fits(transform: str, layout: Layout) -> bool:
    """Whether `encode_long` and `decode_long` take these records."""
    # One and two levels are means over all that is kept, which a run does not know.
    known = transform == "fft" and layout.values in ("range", "fp16")
    return _native.core() is not None and known and long_fourier.fits(layout.block)


def encode_long(
    values: Floats,
    memory: Floats | None,
    words: Words,
    layout: Layout,
    *,
    decay: float = 1.0,
    top: int | None = None,
    half: bool = False,
    threads: int = 1,
) -> Tally:
    """Transform a vector and encode it as one record; see `record.encode_records`.

    values : [m] float32, m <= layout.block; zeros behind. With `half`, rounded to float16
    memory : [bins * 2] float32 or None; words : [layout.words] uint32, written
    """

    def encode(
        values: Floats,
        memory: Floats | None,
        words: Words,
        top: int | None,
        is_low: bool = half,  # what float16 holds is never large
    ) -> Tally:
        (row,), (own,) = values, words
        kept = None if memory is None else memory[0]
        plane, peak = long_fourier.to_plane(row, layout.block, half, kept, decay, threads)
        if peak >= _LARGE and not is_low:
            return large.lowered(partial(encode, is_low=True))(values, memory, words, top)
        cut, end = long_fourier.split(layout.block), -1 if top is None else top
        core = _native.core()
        return Tally(*core.long_encode(cut, plane, peak, kept, own, *numbers(layout), end))

    row = np.ascontiguousarray(values)[None]
    kept = None if memory is None else memory[None]
    return encode(row, kept, words[None], top)


def decode_long(
    records: Sequence[Words], out: Floats, layout: Layout, weight: float, threads: int = 1
) -> None:
    """Write the inverse transform of the weighted sum of records into `out`, [m] float32.

    records : of each payload [layout.words] uint32; out : contiguous, m <= layout.block
    Raises PayloadError if a record is not one of this layout.
    """
    whole, rows = large.unified([words[None] for words in records], layout)
    records = [words[0] for words in whole]
    cut = long_fourier.split(layout.block)
    plane = cut.plane(np.zeros)
    core = _native.core()
    damaged, finite = core.long_decode(cut, tuple(records), plane, *numbers(layout), weight)
    refuse(0 if damaged >= 0 else -1, layout)
    if finite:
        long_fourier.from_plane(plane, layout.block, out, threads)
        if rows is not None:
            out[:] = large.enlarged(out)
    else:
        out[:] = np.nan
