"""What a record holds, in NumPy, from the formulas of ops/: the oracle of the kernels.

It knows both kinds of coefficients (complex bins, real ones) and every value coder, whatever
`ops/record.py` is asked for; `test_fused.py` holds it to that where both can answer.
"""

from __future__ import annotations

import zlib

import numpy as np

from sn_compress.ops import bits as elias_fano
from sn_compress.ops import checksum as sums
from sn_compress.ops import quantize, record
from sn_compress.ops.launch import Format

MAX_FINITE, NON_FINITE = 0x7F7FFFFF, 0x7FC0


def make_format(
    block: int,
    transform: str,
    theta: float,
    values: str = "range",
    bits: int = 8,
    mantissa: int = 3,
    positions: str = "elias-fano",
    span: int | None = None,
) -> Format:
    """A format that keeps 1 - theta of the bins."""
    bins = block // 2 + 1 if transform in ("fft", "spectrum") else block
    parts = 2 if transform in ("fft", "spectrum") else 1
    kept = max(1, bins - int(bins * theta))
    code_bits = {"range": bits, "fp16": 16, "sign": 1, "2bit": 2}[values]
    if positions == "all":
        kept = bins
    place = {
        "elias-fano": kept * elias_fano.low_bits(kept, bins) + elias_fano.upper_bits(kept, bins),
        "bitmap": bins,
        "all": 0,
    }[positions]
    head = 32 if values == "2bit" else 16
    words = -(-(head + parts * kept * code_bits + place) // 32)
    length = span or block
    return Format(block, length, transform, values, kept, words, code_bits, mantissa, positions)


def encode(
    coefs: np.ndarray, memory: np.ndarray | None, form: Format, decay: float, top: int | None
) -> tuple[np.ndarray, np.ndarray, int]:
    """[nb, floats] float32 -> words [nb, words], residual [nb, floats], saturated."""
    values, parts = coefs.copy(), form.parts
    with np.errstate(all="ignore"):
        if memory is not None:
            values += memory * np.float32(decay)
    bits = values.view(np.uint32) & np.uint32(0x7FFFFFFF)
    peaks = bits.max(axis=1)
    finite = peaks <= MAX_FINITE
    values[~finite] = 0
    peaks[~finite] = 0
    exponent = np.minimum(peaks >> 23, 253)
    scale = ((254 - exponent) << 23).astype(np.uint32).view(np.float32)[:, None]
    keys = values.view(np.uint32) & np.uint32(0x7FFFFFFF)
    if parts == 2:
        squares = (values * scale) ** 2
        keys = (squares[:, 0::2] + squares[:, 1::2]).view(np.uint32)
    order = np.argsort(-keys.astype(np.int64), axis=1, kind="stable")[:, : form.kept]
    positions = np.sort(order, axis=1)
    index = (positions[:, :, None] * parts + np.arange(parts)).reshape(len(values), -1)
    kept = np.take_along_axis(values, index, axis=1)
    heads, codes, saturated = _codes(kept, peaks, exponent, scale, form, top)
    heads[~finite] = NON_FINITE
    place = []
    if form.positions == "bitmap":
        place = [record.bitmap(positions, form.bins)]
    elif form.positions == "elias-fano":
        place = list(record.elias_fano(positions.astype(np.uint32), form.bins))
    head = [record.codes_to_bits(heads[:, i : i + 1], 16) for i in range(heads.shape[1])]
    stream = np.concatenate([*head, record.codes_to_bits(codes, form.code_bits), *place], axis=1)
    stream[~finite, 16:] = 0
    residual = values.copy()
    with np.errstate(all="ignore"):
        np.put_along_axis(residual, index, kept - _values(codes, heads, form), axis=1)
    if parts == 2:  # the inverse ignores the imaginary parts of the edge bins
        residual[:, 1] = 0
        if form.block % 2 == 0:
            residual[:, -1] = 0
    if memory is not None:
        residual[~finite] = memory[~finite]
    return record.bits_to_words(stream), residual, saturated


def decode(words: np.ndarray, form: Format) -> np.ndarray:
    """[nb, words] of sound records -> coefficients [nb, floats] float32; NaN where marked."""
    stream, parts, count = record.words_to_bits(words), form.parts, form.kept * form.parts
    head = 32 if form.values == "2bit" else 16
    heads = record.bits_to_codes(stream[:, :head], 16).astype(np.uint16)
    finite = heads[:, 0] != NON_FINITE
    out = np.full((len(words), form.bins * parts), np.nan, np.float32)
    out[finite] = 0
    stream, heads = stream[finite], heads[finite]
    at = head + count * form.code_bits
    k, f = form.kept, form.bins
    if form.positions == "bitmap":
        positions = record.read_bitmap(stream[:, at : at + f], k)
    elif form.positions == "all":
        positions = np.tile(np.arange(f), (len(stream), 1))
    else:
        split = at + k * elias_fano.low_bits(k, f)
        uppers = stream[:, split : split + elias_fano.upper_bits(k, f)]
        positions = record.read_elias_fano(stream[:, at:split], uppers, k, f)
    codes = record.bits_to_codes(stream[:, head:at], form.code_bits).astype(np.uint16)
    index = (positions.astype(np.int64)[:, :, None] * parts + np.arange(parts)).reshape(-1, count)
    rows = np.flatnonzero(finite)[:, None]
    out[rows, index] = _values(codes, heads, form)
    return out


def _codes(kept, peaks, exponent, scale, form, top):
    if form.values == "fp16":
        heads = ((peaks >> 23) << 7).astype(np.uint16)[:, None]
        halves = (kept * _half_scale(heads)).astype(np.float16).view(np.uint16)
        # In the topmost binade 0x7800 would stand for 2**128, so what rounds to it goes down.
        over = (heads >= 0x7F00) & (halves & 0x7FFF >= 0x7800)
        return heads, np.where(over, halves & 0x8000 | 0x77FF, halves).astype(np.uint16), 0
    if form.values == "range":
        heads = quantize.window_top(peaks, form.mantissa)[:, None]
        if top is not None:
            heads = np.full_like(heads, top)
        base = quantize.window_base(heads, form.code_bits, form.mantissa)
        return heads, *quantize.encode_window(kept, base, form.code_bits, form.mantissa)
    fixed = (np.abs(kept) * scale * np.float32(1 << 22)).astype(np.int64)
    mean = fixed.sum(axis=1) // fixed.shape[1]
    negative = np.signbit(kept).astype(np.uint16)
    if form.values == "sign":
        return _bfloat(mean, exponent)[:, None], negative, 0
    upper = fixed > mean[:, None]
    high = (fixed * upper).sum(axis=1) // np.maximum(upper.sum(axis=1), 1)
    low = (fixed * ~upper).sum(axis=1) // (~upper).sum(axis=1)
    high = np.where(upper.any(axis=1), high, low)
    heads = np.stack([_bfloat(low, exponent), _bfloat(high, exponent)], axis=1)
    return heads, negative | upper.astype(np.uint16) << 1, 0


def _values(codes: np.ndarray, heads: np.ndarray, form: Format) -> np.ndarray:
    if form.values == "fp16":
        with np.errstate(over="ignore"):
            return codes.view(np.float16).astype(np.float32) / _half_scale(heads)
    if form.values == "range":
        base = quantize.window_base(heads, form.code_bits, form.mantissa)
        return quantize.decode_window(codes, base, form.code_bits, form.mantissa)
    levels = np.take_along_axis(heads, codes.astype(np.int64) >> 1, axis=1).astype(np.uint32)
    return (levels << 16 | (codes.astype(np.uint32) & 1) << 31).view(np.float32)


def _bfloat(fixed: np.ndarray, exponent: np.ndarray) -> np.ndarray:
    exact = np.ldexp(fixed.astype(np.float64), exponent.astype(np.int64) - 149)
    bits = exact.astype(np.float32).view(np.uint32).astype(np.int64)
    return np.minimum((bits + 0x8000) >> 16, MAX_FINITE >> 16).astype(np.uint16)


def _half_scale(heads: np.ndarray) -> np.ndarray:
    exponent = np.maximum(heads.astype(np.uint32) >> 7, 15)
    return ((268 - exponent) << 23).astype(np.uint32).view(np.float32)


def checksum(words: np.ndarray, first: int = 8) -> int:
    """The share of words from number `first` of a payload on, from zlib's CRC of their bytes."""
    # zlib turns all bits of what it begins and ends with; so it begins with zero here.
    crc = zlib.crc32(words.astype("<u4").tobytes(), 0xFFFFFFFF) ^ 0xFFFFFFFF
    return sums.product(crc, sums.step_back(first + words.size))
