"""One record per block: its range, the codes of what is kept and where that belongs.

    bits 0..15   upper half of the float32 that ends the block's range; NON_FINITE marks a block
                 with NaN or Inf, which decodes to NaN everywhere
    then         2k codes: re, im of each kept bin, in order of position
    then         positions, as a bitmap of f bits or in Elias-Fano form

padded to 32-bit words. `csrc/compress/record.cpp` does the work in one pass over each block while
it is in the cache; `encode_twin` and `decode_twin` are its oracle and its stand-in.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import _native
from ..errors import PayloadError
from . import pack, quantize, select
from .spectrum import Spectrum, energy

NON_FINITE = 0x7FC0  # the upper half of a float32 NaN


@dataclass(frozen=True)
class Layout:
    """What fixes the bits of a record. `values="fp16"` ignores `bits` and `mantissa`."""

    block: int
    kept: int
    values: Literal["range", "fp16"]
    bits: int
    mantissa: int
    positions: Literal["elias-fano", "bitmap"]

    @property
    def bins(self) -> int:
        return self.block // 2 + 1

    @property
    def code_bits(self) -> int:
        return self.bits if self.values == "range" else 16

    @cached_property
    def words(self) -> int:
        """32-bit words per record."""
        return -(-(self.positions_at + self.position_bits) // 32)

    @property
    def positions_at(self) -> int:
        return 16 + 2 * self.kept * self.code_bits

    @property
    def position_bits(self) -> int:
        if self.positions == "bitmap":
            return self.bins
        k, f = self.kept, self.bins
        return k * pack.low_bits(k, f) + pack.upper_bits(k, f)


class Tally(NamedTuple):
    """What one call saw: values clipped, squared norm in, squared norm lost (finite blocks)."""

    saturated: int
    energy: float
    error: float


def encode_records(
    spectrum: Spectrum,
    memory: Spectrum | None,
    words: pack.Words,
    layout: Layout,
    decay: float = 1.0,
    top: int | None = None,
) -> Tally:
    """Encode each row of `spectrum` (+ decay * `memory`) into a row of `words`.

    spectrum : [nb, f] complex64, used as scratch: holds the residual afterwards
    memory : [nb, f] complex64 or None; becomes the residual, except in non-finite rows, where
        it stays as it was
    words : [nb, layout.words] uint32, written
    top : the range's end (upper half of a float32) if it is not each block's own
    """
    core = _native.core()
    if core is None:
        return encode_twin(spectrum, memory, words, layout, decay, top)
    end = -1 if top is None else top
    return Tally(
        *core.encode_records(spectrum, memory, words, *_numbers(layout), float(decay), end)
    )


def decode_records(words: pack.Words, accum: Spectrum, layout: Layout, weight: float) -> None:
    """Add weight * what the records hold to `accum`, [nb, f] complex64.

    Raises PayloadError if a record is not one of this layout.
    """
    core = _native.core()
    if core is None:
        decode_twin(words, accum, layout, weight)
    elif (bad := core.decode_records(words, accum, *_numbers(layout), weight)) >= 0:
        raise PayloadError(
            f"record {bad} is damaged: its range is not finite, or its positions are not "
            f"{layout.kept} in ascending order below {layout.bins}"
        )


def _numbers(layout: Layout) -> tuple[int, ...]:
    """The layout as the extension takes it; the same order as in csrc/compress/module.cpp."""
    half, bitmap = layout.values == "fp16", layout.positions == "bitmap"
    return (
        layout.block,
        layout.kept,
        layout.words,
        half,
        layout.code_bits,
        layout.mantissa,
        bitmap,
    )


def encode_twin(
    spectrum: Spectrum,
    memory: Spectrum | None,
    words: pack.Words,
    layout: Layout,
    decay: float = 1.0,
    top: int | None = None,
) -> Tally:
    """encode_records in NumPy."""
    if memory is not None:
        with np.errstate(all="ignore"):
            # As floats: a complex product would turn zeros and infinities into NaN and -0.
            spectrum.view(np.float32)[:] += memory.view(np.float32) * np.float32(decay)
    peaks = select.peak_bits(spectrum)
    finite = peaks <= select.MAX_FINITE
    keys = select.magnitude_keys(spectrum, peaks)
    positions = select.largest(keys, layout.kept)  # [nb, k]
    index = positions.astype(np.int64)
    kept = np.take_along_axis(spectrum, index, axis=1).view(np.float32)  # [nb, 2k]
    kept[~finite] = 0
    spectrum[~finite] = 0
    tops, codes, decoded, saturated = _encode_values(kept, peaks, layout, top)
    tops = np.where(finite, tops, NON_FINITE)
    where = (
        [pack.bitmap(positions, layout.bins)]
        if layout.positions == "bitmap"
        else pack.elias_fano(positions, layout.bins)
    )
    stream = np.concatenate(
        [
            pack.codes_to_bits(tops.astype(np.uint16)[:, None], 16),
            pack.codes_to_bits(codes, layout.code_bits),
            *where,
        ],
        axis=1,
    )
    stream[~finite, 16:] = 0
    words[:] = pack.bits_to_words(stream)
    before = energy(spectrum, layout.block)
    np.put_along_axis(spectrum, index, (kept - decoded).view(np.complex64), axis=1)
    if memory is not None:
        memory[finite] = spectrum[finite]
    return Tally(saturated, before, energy(spectrum, layout.block))


def decode_twin(words: pack.Words, accum: Spectrum, layout: Layout, weight: float) -> None:
    """decode_records in NumPy."""
    stream = pack.words_to_bits(words)
    tops = pack.bits_to_codes(stream[:, :16], 16)[:, 0]
    finite = tops != NON_FINITE
    accum[~finite] = complex(np.nan, np.nan)
    tops, stream = tops[finite], stream[finite]
    if (tops > select.MAX_FINITE >> 16).any():
        raise PayloadError(f"a block's range ends at {tops.max():#06x}, which is not finite")
    at, k, f = layout.positions_at, layout.kept, layout.bins
    if layout.positions == "bitmap":
        positions = pack.read_bitmap(stream[:, at : at + f], k)
    else:
        split = at + k * pack.low_bits(k, f)
        end = at + layout.position_bits
        positions = pack.read_elias_fano(stream[:, at:split], stream[:, split:end], k, f)
    codes = pack.bits_to_codes(stream[:, 16:at], layout.code_bits).astype(np.uint16)
    rows = np.flatnonzero(finite)[:, None]
    with np.errstate(all="ignore"):  # damaged half-precision codes may hold NaN and Inf
        values = _decode_values(codes, tops.astype(np.uint16), layout) * np.float32(weight)
        accum[rows, positions.astype(np.int64)] += values.view(np.complex64)


def _encode_values(
    kept: npt.NDArray[np.float32], peaks: npt.NDArray[np.uint32], layout: Layout, top: int | None
) -> tuple[npt.NDArray[np.uint16], quantize.Codes, npt.NDArray[np.float32], int]:
    saturated = 0
    if layout.values == "fp16":
        tops = ((peaks >> 23) << 7).astype(np.uint16)
        codes = (kept * _half_scale(tops)).astype(np.float16).view(np.uint16)
    else:
        tops = quantize.window_top(peaks, layout.mantissa)
        if top is not None:
            tops = np.full_like(tops, top)
        base = quantize.window_base(tops, layout.bits, layout.mantissa)[:, None]
        codes, saturated = quantize.encode_window(kept, base, layout.bits, layout.mantissa)
    return tops, codes, _decode_values(codes, tops, layout), saturated


def _decode_values(
    codes: quantize.Codes, tops: npt.NDArray[np.uint16], layout: Layout
) -> npt.NDArray[np.float32]:
    if layout.values == "fp16":
        # Dividing by a power of two is exact, so is this.
        halves: npt.NDArray[np.float16] = codes.view(np.float16)
        return np.asarray(halves.astype(np.float32) / _half_scale(tops), np.float32)
    base = quantize.window_base(tops, layout.bits, layout.mantissa)[:, None]
    return quantize.decode_window(codes, base, layout.bits, layout.mantissa)


def _half_scale(tops: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """The power of two that takes a block's peak to [2**14, 2**15), inside half precision."""
    exponent = np.maximum(tops.astype(np.uint32) >> 7, 15)
    scale = np.asarray((268 - exponent) << 23, np.uint32)[:, None]
    return scale.view(np.float32)
