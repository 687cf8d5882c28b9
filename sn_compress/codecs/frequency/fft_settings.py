"""The settings of FFTCodec: which are legal, and their 12 bytes in a payload's header."""

from __future__ import annotations

import struct
import zlib
from typing import Literal, get_args

import numpy as np

from ...base.errors import CompressError
from ...ops.records import quantize
from ...ops.records.layout import Values

TransformName = Literal["fft", "dct", "hadamard", "identity", "axes"]
Positions = Literal["elias-fano", "bitmap"]
_POSITIONS = get_args(Positions)
_VALUES = get_args(Values)
_TRANSFORMS = get_args(TransformName)
_SETTINGS = struct.Struct("<IBBBBI")
_LARGEST = float(np.finfo(np.float32).max)


def check_settings(
    theta: float,
    block: int | None,
    span: int | None,
    bits: int,
    mantissa: int,
    positions: str,
    values: str,
    window: str | float,
    transform: str,
    shape: tuple[int, ...] | None,
    axes: tuple[int, ...] | None,
    threads: int,
) -> None:
    """Raise CompressError for the first setting that is not as FFTCodec describes it."""
    fraction = isinstance(theta, (int, float)) and 0 <= theta < 1
    _check("theta", theta, fraction, "a fraction from 0 (keep all) to below 1")
    power = block is None or (
        isinstance(block, int) and block & (block - 1) == 0 and 32 <= block <= 1 << 20
    )
    _check("block", block, power, "a power of two from 32 to 2**20, or None")
    if span is not None:
        power = isinstance(span, int) and span & (span - 1) == 0 and 32 <= span <= (block or 0)
        wants = "a power of two from 32 to the block, or None for one transform of a block"
        _check("span", span, power, wants)
        _check("span", span, transform == "fft", 'None unless transform="fft"')
    for name, value, legal in (
        ("positions", positions, _POSITIONS),
        ("values", values, _VALUES),
        ("transform", transform, _TRANSFORMS),
    ):
        _check(name, value, value in legal, " or ".join(legal))
    ok = window in ("block", "payload") or (
        isinstance(window, (int, float)) and 0 < window <= _LARGEST
    )
    _check("window", window, ok, '"block", "payload" or a positive number within float32')
    _check("threads", threads, isinstance(threads, int) and threads >= 1, "at least 1")
    if values == "range":
        quantize.check_format(bits, mantissa)
    else:
        _check("window", window, window == "block", f'"block" with values={values!r}')
    _check_axes(transform, shape, axes)


def pack_settings(
    dropped_q32: int,
    block: int | None,
    span: int | None,
    bits: int,
    mantissa: int,
    positions: str,
    values: str,
    transform: str,
    shape: tuple[int, ...] | None,
    axes: tuple[int, ...] | None,
) -> bytes:
    """What a decoder has to know, as in docs/format.md."""
    coders = (
        _POSITIONS.index(positions) | _VALUES.index(values) << 1 | _TRANSFORMS.index(transform) << 4
    )
    return _SETTINGS.pack(
        dropped_q32,
        0 if block is None else block.bit_length() - 1,
        bits if values == "range" else 0,
        mantissa if values == "range" else 0,
        coders,
        zlib.crc32(repr((shape, axes)).encode()) if transform == "axes" else span or 0,
    )


def _check(name: str, got: object, ok: bool, expected: str) -> None:
    if not ok:
        raise CompressError(f"FFTCodec: {name}={got!r}; expected {expected}")


def _check_axes(
    transform: str, shape: tuple[int, ...] | None, axes: tuple[int, ...] | None
) -> None:
    if transform != "axes":
        _check("shape", shape, shape is None and axes is None, 'None unless transform="axes"')
        return
    ok = shape is not None and all(isinstance(size, int) and size > 0 for size in shape)
    _check("shape", shape, ok, 'the tensor\'s shape, with transform="axes"')
    dims = range(len(shape or ()))
    ok = (
        bool(axes)
        and all(axis in dims for axis in axes or ())
        and len(set(axes or ())) == len(axes or ())
    )
    _check("axes", axes, ok, f"different axes from 0 to {len(dims) - 1}")
