"""Casts of floats to fp16, bf16 or fp8, rounded to nearest, ties to even.

fp8 is e4m3: three bits of mantissa, from 2**-9 to 448, and no Inf (the OCP's 8-bit floats, torch's
float8_e4m3fn). Gradients have a wider range than that, so each block of 256 values has a scale, a
power of two that brings its largest value between 224 and 448. A block is sent as one byte for the
scale and one per value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ..arrays import (
    Array,
    Constant,
    bits_of,
    clipped,
    device_of,
    floats_of,
    is_torch,
    largest_of_rows,
    namespace,
    take,
)

DType = Literal["fp16", "bf16", "fp8"]
DTYPES: tuple[DType, ...] = ("fp16", "bf16", "fp8")
_BLOCK = 256  # values per scale: 8.03 bits per element
_TORCH = {"fp16": "float16", "bf16": "bfloat16", "fp8": "float8_e4m3fn"}
_INF = 0x7F800000
# Added to a float32's bits, it carries into the exponent if the mantissa is above 448 / 256.
_CARRY = 0x1FFFFF
# Difference between the exponents of the largest value and of the scale; and the least exponent of
# a scale: with a lower one fp8 subnormals would be subnormal in float32, which some devices flush.
_TOP, _LEAST = 8, 10
_NOT_FINITE = 255  # replaces a scale's exponent; as a float32 exponent it is Inf


@dataclass(frozen=True)
class Cast:
    """One of these dtypes, and the encoding of vectors."""

    dtype: DType

    @property
    def block(self) -> int:
        """Elements per block; vectors consist of whole blocks."""
        return _BLOCK if self.dtype == "fp8" else 1

    def padded(self, n: int) -> int:
        """Return n rounded up to whole blocks."""
        return -(-n // self.block) * self.block

    def nbytes(self, n: int) -> int:
        """Return the bytes of n elements, whole blocks."""
        return n // _BLOCK * (_BLOCK + 1) if self.dtype == "fp8" else 2 * n

    def room(self, n: int, like: Array) -> Array:
        """Allocate [n] zeros on the device of `like`, for `encode`; of this dtype if supported.

        Copying values into it then rounds them. fp8 is encoded from float32.
        """
        xp = namespace(like)
        native = is_torch(like) and self.dtype != "fp8"
        dtype = getattr(xp, _TORCH[self.dtype]) if native else xp.float32
        return xp.zeros(n, dtype=dtype, device=device_of(like))

    def encode(self, values: Array) -> Array:
        """Encode [n] float32, or an array from `room`, to [nbytes(n)] uint8.

        Values beyond the largest of fp16 or bf16 become Inf; fp8 blocks with NaN or Inf all NaN.
        """
        if self.dtype == "fp8":
            return _encode_blocks(values)
        xp = namespace(values)
        if is_torch(values):
            return values.to(getattr(xp, _TORCH[self.dtype])).view(xp.uint8)
        with np.errstate(all="ignore"):
            halves = _bf16(values) if self.dtype == "bf16" else values.astype(xp.float16)
        return halves.view(xp.uint8)

    def decode(self, words: Array) -> Array:
        """Decode the result of `encode` to [n] of a dtype that converts exactly to float32."""
        xp = namespace(words)
        if self.dtype == "fp8":
            blocks = xp.reshape(words, (-1, _BLOCK + 1))
            scales = floats_of(xp.astype(blocks[:, 0], xp.int32) << 23)
            with np.errstate(all="ignore"):  # zero times Inf is NaN
                return xp.reshape(_of_fp8(blocks[:, 1:]) * scales[:, None], (-1,))
        if is_torch(words):
            return words.view(getattr(xp, _TORCH[self.dtype]))
        if self.dtype == "fp16":
            return words.view(xp.float16)
        return floats_of(xp.astype(words.view(xp.uint16), xp.int32) << 16)


def _encode_blocks(values: Array) -> Array:
    xp = namespace(values)
    blocks = xp.reshape(values, (-1, _BLOCK))
    # Clear the sign bit, which a NaN may have.
    largest = bits_of(largest_of_rows(blocks)) & 0x7FFFFFFF
    scales = clipped((clipped(largest, 0, _INF) + _CARRY >> 23) - _TOP, _LEAST, _NOT_FINITE)
    scales = xp.where(largest < _INF, scales, _NOT_FINITE)
    # One over the scale; zero if not finite, so that codes are those of zero or NaN.
    inverse = floats_of(clipped(254 - scales, 0, 254) << 23)
    with np.errstate(all="ignore"):
        codes = to_fp8(blocks * inverse[:, None])
    return xp.reshape(xp.concat([xp.astype(scales, xp.uint8)[:, None], codes], axis=1), (-1,))


def to_fp8(values: Array) -> Array:
    """Return the bits of the nearest e4m3, uint8, for float32 up to 448, or NaN.

    Beyond 464 torch returns the largest number since 2.13, and NaN before.
    """
    xp = namespace(values)
    if is_torch(values):
        return values.to(xp.float8_e4m3fn).view(xp.uint8)
    words = bits_of(values)
    exponent = clipped((words & _INF) >> 23, 127 - 6, 127 + _TOP)
    # In units of this exponent's step: 8 to 16, or fewer below 2**-6.
    steps = xp.round(xp.abs(values) * floats_of(257 - exponent << 23))
    codes = (exponent - 121 << 3) + xp.astype(xp.where(steps < 17, steps, 15), xp.int32)
    return xp.astype(codes | words >> 24 & 128, xp.uint8)


def _of_fp8(codes: Array) -> Array:
    """Convert bits of e4m3 to float32, keeping the shape."""
    xp = namespace(codes)
    if is_torch(codes):
        return codes.view(xp.float8_e4m3fn).to(xp.float32)
    indices = xp.astype(xp.reshape(codes, (-1,)), xp.int64)
    return xp.reshape(take(_FP8.on(codes), indices), codes.shape)


def _table() -> Any:
    codes = np.arange(256)
    mantissa, exponent = codes & 7, codes >> 3 & 15
    values = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    values[codes & 127 == 127] = np.nan
    return np.where(codes > 127, -values, values).astype(np.float32)


_FP8 = Constant(_table())


def _bf16(values: Array) -> Array:
    """Return the bits of the nearest bfloat16, uint16; NaN stays NaN, whatever its lower bits."""
    xp = namespace(values)
    words = values.view(xp.uint32)
    # Add just under half a step, or half if the last kept bit is odd, and truncate.
    rounded = words + 0x7FFF + (words >> 16 & 1) >> 16
    return xp.astype(xp.where(xp.isnan(values), 0x7FC0, rounded), xp.uint16)
