"""Shared parts of quantising codecs for NumPy arrays: codes as bytes, buckets, random numbers.

**Codes** of a whole vector are packed contiguously, b bits each, the first in the lowest bits. Five
three-valued codes fit a byte (3**5 = 243): 1.6 bits each, where whole bits take 2; their
information content is at most log2(3) = 1.585.

**Buckets** are rows of equal length with a separate scale. With a single scale for a whole tensor,
its largest element determines the step of all others; a scale per bucket costs 32 bits.

**Random numbers** depend on (seed, step, position) only. A stateful generator would return other
numbers after a restart, or when tensors come in another order. Philox (Salmon et al. 2011) is a
function of a key and a counter: here the key is (seed, step) and the counter the position, so any
step can be reproduced bit by bit. NumPy guarantees the stream of its bit generators across
versions, unlike that of its distributions.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import PayloadError

Bytes = npt.NDArray[np.uint8]
Integers = npt.NDArray[Any]

_WHOLE = {8: "<u1", 16: "<u2", 32: "<u4"}  # widths with a dtype, which need no packing
_CHUNK = 1 << 18  # codes at a time, a multiple of 8: bounds the memory for unpacked bits
_POWERS = np.array([1, 3, 9, 27, 81], np.uint8)


def packed_bytes(n: int, bits: int) -> int:
    """Return the number of bytes of n codes of `bits` bits."""
    return -(-n * bits // 8)


def pack_codes(codes: Integers, bits: int) -> Bytes:
    """Pack [n] integers in [0, 2**bits), 1 <= bits <= 32, to [packed_bytes(n, bits)] uint8."""
    if bits in _WHOLE:
        return np.ascontiguousarray(codes, _WHOLE[bits]).view(np.uint8)
    out = np.empty(packed_bytes(codes.size, bits), np.uint8)
    # Shift whole words if a few codes fill bytes; widths such as 9 or 11 go bit by bit.
    pack = _pack_groups if _group(bits) else _pack_bits
    for start in range(0, codes.size, _CHUNK):
        part = codes[start : start + _CHUNK]
        first, size = start * bits // 8, packed_bytes(part.size, bits)
        out[first : first + size] = pack(part, bits)[:size]
    return out


def unpack_codes(data: Bytes, n: int, bits: int) -> npt.NDArray[np.uint32]:
    """Inverse of pack_codes; `data` has packed_bytes(n, bits) bytes."""
    if bits in _WHOLE:
        return np.frombuffer(data.tobytes(), _WHOLE[bits]).astype(np.uint32)
    out = np.empty(n, np.uint32)
    unpack = _unpack_groups if _group(bits) else _unpack_bits
    for start in range(0, n, _CHUNK):
        count = min(_CHUNK, n - start)
        first = start * bits // 8
        part = data[first : first + packed_bytes(count, bits)]
        out[start : start + count] = unpack(part, count, bits)
    return out


def _group(bits: int) -> int:
    """Return the fewest codes that fill whole bytes, if these fit a 64-bit word; else 0."""
    codes = 8 // math.gcd(8, bits)
    return codes if codes * bits <= 64 else 0


def _pack_groups(codes: Integers, bits: int) -> Bytes:
    group = _group(bits)
    padded = np.zeros(-(-codes.size // group) * group, "<u8")
    padded[: codes.size] = codes
    rows = padded.reshape(-1, group)
    word = rows[:, 0].copy()
    for i in range(1, group):
        word |= rows[:, i] << np.uint64(i * bits)
    return word.view(np.uint8).reshape(-1, 8)[:, : group * bits // 8].reshape(-1)


def _unpack_groups(data: Bytes, count: int, bits: int) -> npt.NDArray[np.uint32]:
    group = _group(bits)
    size = group * bits // 8
    words = np.zeros((-(-count // group), 8), np.uint8)
    complete = data.size // size
    words[:complete, :size] = data[: complete * size].reshape(-1, size)
    # The last codes may not fill their bytes, which are padded with zeros.
    words[complete:, : data.size - complete * size] = data[complete * size :]
    word = words.reshape(-1).view("<u8")
    mask = np.uint64((1 << bits) - 1)
    out = np.empty((word.size, group), np.uint32)
    for i in range(group):
        out[:, i] = (word >> np.uint64(i * bits)) & mask
    return out.reshape(-1)[:count]


def _pack_bits(codes: Integers, bits: int) -> Bytes:
    part = np.ascontiguousarray(codes, "<u4").view(np.uint8).reshape(-1, 4)
    return np.packbits(
        np.unpackbits(part, axis=1, count=bits, bitorder="little"), bitorder="little"
    )


def _unpack_bits(data: Bytes, count: int, bits: int) -> npt.NDArray[np.uint32]:
    spread = np.unpackbits(data, count=count * bits, bitorder="little").reshape(count, bits)
    out = np.zeros((count, 4), np.uint8)
    out[:, : -(-bits // 8)] = np.packbits(spread, axis=1, bitorder="little")
    return out.reshape(-1).view("<u4").astype(np.uint32, copy=False)


def pack_trits(trits: Integers) -> Bytes:
    """Pack [n] integers in {0, 1, 2} to [ceil(n / 5)] uint8; the last byte is zero-padded."""
    padded = np.zeros(-(-trits.size // 5) * 5, np.uint8)
    padded[: trits.size] = trits
    return np.asarray((padded.reshape(-1, 5) * _POWERS).sum(axis=1, dtype=np.uint8))


def unpack_trits(data: Bytes, n: int) -> Bytes:
    """Inverse of pack_trits; raises PayloadError for invalid bytes."""
    if (data > 242).any():
        raise PayloadError(
            f"byte {int(np.argmax(data > 242))} is {int(data.max())}; five trits give at most 242. "
            "The payload was damaged or made by something else."
        )
    return np.asarray((data[:, None] // _POWERS % np.uint8(3)).reshape(-1)[:n])


Floats = npt.NDArray[np.float32]


def bucket_count(n: int, bucket: int | None) -> int:
    """Return the number of buckets in n elements; bucket=None: one for all."""
    if bucket is None:
        return min(n, 1)
    return -(-n // bucket)


def bucket_lengths(n: int, bucket: int | None) -> npt.NDArray[np.int64]:
    """Return the elements in each bucket, [nb] int64; the last may be shorter."""
    full = np.full(bucket_count(n, bucket), n if bucket is None else bucket, np.int64)
    if bucket is not None and n % bucket:
        full[-1] = n % bucket
    return full


def bucket_rows(values: Floats, bucket: int | None) -> Floats:
    """Reshape [n] to [nb, bucket], the last row padded with zeros."""
    nb = bucket_count(values.size, bucket)
    if bucket is None or values.size == nb * bucket:
        return values.reshape(nb, -1) if nb else values.reshape(0, bucket or 0)
    padded = np.zeros((nb, bucket), np.float32)
    padded.reshape(-1)[: values.size] = values
    return padded


def bucket_spread(per_bucket: npt.NDArray[np.float32], n: int, bucket: int | None) -> Floats:
    """Repeat one number per bucket over its elements, to [n]."""
    return np.repeat(per_bucket, bucket_lengths(n, bucket))


def finite_buckets(rows: Floats) -> npt.NDArray[np.bool_]:
    """Return which rows contain only finite numbers, [nb]."""
    return np.asarray(np.isfinite(rows).all(axis=1), np.bool_)


def uniform_words(seed: int, step: int, n: int) -> npt.NDArray[np.uint32]:
    """Return [n] uint32, uniform and independent; 0 <= seed, step < 2**64."""
    key = np.array([seed, step], np.uint64)
    raw = np.asarray(np.random.Philox(key=key).random_raw((n + 1) // 2), "<u8")
    return raw.view("<u4")[:n].astype(np.uint32, copy=False)


def happens(probability: npt.NDArray[np.float64], seed: int, step: int) -> npt.NDArray[np.bool_]:
    """Return True with the given probabilities, to 2**-32; never for 0, always for 1."""
    # 32 random bits rather than a float32, which could round up to 1.
    words = uniform_words(seed, step, probability.size).reshape(probability.shape)
    return np.asarray(words < probability * 2.0**32)
