"""FFTCodec's settings: validation, their 12 bytes in a payload's header, and sections."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt

from ..errors import CompressError
from ..ops import quantize
from ..ops.quantize import Layout, Values
from .base import HEADER_BYTES, MAGIC

TransformName = Literal["fft", "dct", "hadamard", "identity", "axes"]
Positions = Literal["elias-fano", "bitmap"]
_POSITIONS = get_args(Positions)
_VALUES = get_args(Values)
_TRANSFORMS = get_args(TransformName)
_SETTINGS = struct.Struct("<IBBBBI")  # docs/format.md
_LARGEST = float(np.finfo(np.float32).max)


def check_settings(codec: Coder) -> None:
    """Raise CompressError for the first setting that is not as documented in FFTCodec."""
    theta, block, span, window = codec.theta, codec.block, codec.span, codec.window
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
        _check("span", span, codec.transform == "fft", 'None unless transform="fft"')
    for name, value, legal in (
        ("positions", codec.positions, _POSITIONS),
        ("values", codec.values, _VALUES),
        ("transform", codec.transform, _TRANSFORMS),
    ):
        _check(name, value, value in legal, " or ".join(legal))
    ok = window in ("block", "payload") or (
        isinstance(window, (int, float)) and 0 < window <= _LARGEST
    )
    _check("window", window, ok, '"block", "payload" or a positive number within float32')
    threads = codec.threads
    _check("threads", threads, isinstance(threads, int) and threads >= 1, "at least 1")
    if codec.values == "range":
        quantize.check_format(codec.bits, codec.mantissa)
    else:  # the other formats have a scale per block
        _check("window", window, window == "block", f'"block" with values={codec.values!r}')
    _check_axes(codec.transform, codec.shape, codec.axes)


def pack_settings(codec: Coder, dropped_q32: int) -> bytes:
    """Return what a decoder needs to know; see docs/format.md."""
    coders = (
        _POSITIONS.index(codec.positions)
        | _VALUES.index(codec.values) << 1
        | _TRANSFORMS.index(codec.transform) << 4
    )
    # A hash of any number of sides in four bytes: ranks only need to detect a difference.
    last = codec.span or 0
    if codec.transform == "axes":
        last = zlib.crc32(repr((codec.shape, codec.axes)).encode())
    # Unused fields are 0, so that codecs that write the same bytes have the same settings: a
    # decoder compares all of them.
    bits, mantissa = (codec.bits, codec.mantissa) if codec.values == "range" else (0, 0)
    log2_block = 0 if codec.block is None else codec.block.bit_length() - 1
    return _SETTINGS.pack(dropped_q32, log2_block, bits, mantissa, coders, last)


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


Floats = npt.NDArray[np.float32]

CHUNK = 1 << 18  # elements processed at a time: 1 MiB, which fits a core's L2 cache
_SMALLEST = 32  # elements of the smallest block, which every back end supports
HEADER_WORDS = HEADER_BYTES // 4


@dataclass(frozen=True)
class Section:
    """A run of equal blocks: elements start..stop of the vector, the last block padded."""

    start: int
    stop: int
    count: int  # blocks
    layout: Layout
    words_at: int  # offset in the body, 32-bit words

    def records(self, body: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
        """Return a view of the section's part of a body, [count, layout.words]."""
        end = self.words_at + self.count * self.layout.words
        return body[self.words_at : end].reshape(self.count, self.layout.words)

    @property
    def memory_shape(self) -> tuple[int, int]:
        """Shape of the memory: the coefficients of each block, [blocks, bins * parts]."""
        return self.count, self.layout.bins * self.layout.parts

    def chunks(self) -> range:
        """Return the first blocks of the chunks to process."""
        return range(0, self.count, self.chunk)

    @property
    def chunk(self) -> int:
        """Number of blocks processed at a time."""
        return max(1, CHUNK // self.layout.block)

    def blocks(self, array: npt.NDArray[Any], first: int, last: int, half: bool = False) -> Floats:
        """Return blocks first..last as [blocks, block] float32; copies only to cast, round or pad.

        half : whether to round them to half precision
        """
        block = self.layout.block
        part = array[self.start + first * block : min(self.start + last * block, self.stop)]
        part = part.astype(np.float32, copy=False)
        if part.size == (last - first) * block:
            return (quantize.through_half(part) if half else part).reshape(last - first, block)
        # Only the last block is padded: all others are views of the vector if it is float32.
        padded = np.zeros((last - first) * block, np.float32)
        if half:
            quantize.through_half(part, padded[: part.size])
        else:
            padded[: part.size] = part
        return padded.reshape(last - first, block)

    def room(self, out: Floats, first: int, last: int) -> Floats:
        """Return an array for blocks first..last, [blocks, block]: a view of `out` if all full."""
        block = self.layout.block
        start, stop = self.start + first * block, self.start + last * block
        if stop > self.stop:
            return np.empty((last - first, block), np.float32)
        return out[start:stop].reshape(last - first, block)

    def put(self, blocks: Floats, out: Floats, first: int) -> None:
        """Write blocks, starting with the section's block `first`, to the vector `out`.

        Does nothing for views of `out` from `room`.
        """
        if np.may_share_memory(blocks, out):
            return
        start = self.start + first * self.layout.block
        stop = min(start + blocks.size, self.stop)
        out[start:stop] = blocks.reshape(-1)[: stop - start]


def cut(
    n: int, block: int | None, one_block: Callable[[int], int], layout: Callable[[int], Layout]
) -> list[Section]:
    """Divide n elements into sections: full blocks, then the rest padded to a power of two.

    block : size of the full blocks, or None for one block of `one_block(n)` elements
    layout : returns the layout of a block of a given size
    """
    # At most two sections, as launches and layouts are for one block length: all full blocks, and a
    # shorter one with the rest, so that it is not padded to a full block's bytes.
    cuts, start = [], 0
    if block and n >= block:
        start = n // block * block
        cuts.append((0, start, n // block, block))
    if tail := n - start:
        length = max(_SMALLEST, 1 << (tail - 1).bit_length() if block else one_block(tail))
        cuts.append((start, n, 1, length))
    sections, at = [], 0
    for first, stop, count, length in cuts:
        sections.append(Section(first, stop, count, layout(length), at))
        at += count * sections[-1].layout.words
    return sections


class Coder(Protocol):
    """The part of FFTCodec's interface used by the modules that it imports."""

    codec_id: int
    version: int
    settings: bytes
    theta: float
    block: int | None
    bits: int
    mantissa: int
    half: bool
    threads: int

    @property
    def positions(self) -> str: ...
    @property
    def values(self) -> str: ...
    @property
    def window(self) -> str | float: ...
    @property
    def transform(self) -> str: ...
    @property
    def span(self) -> int | None: ...
    @property
    def shape(self) -> tuple[int, ...] | None: ...
    @property
    def axes(self) -> tuple[int, ...] | None: ...
    def sections(self, n: int) -> list[Section]: ...
    def payload_bytes(self, n: int) -> int: ...
    def __hash__(self) -> int: ...


def header(codec: Coder, n: int) -> bytes:
    """Return the part of the header that depends on codec and size only."""
    return struct.pack("<2sBBQ", MAGIC, codec.version, codec.codec_id, n) + codec.settings


def used_words(codec: Coder, n: int) -> int:
    """Return the number of words of a payload without its padding."""
    return HEADER_WORDS + sum(s.count * s.layout.words for s in codec.sections(n))


def fixed_top(codec: Coder) -> int | None:
    """Return the end of a range given as a number, upper half of a float32; else None."""
    if isinstance(codec.window, str):
        return None
    return int(quantize.window_top(np.float32(codec.window).view(np.uint32), codec.mantissa))


def blockwise(codec: Coder) -> str:
    """Return the transform within blocks: "identity" for "axes", which transforms beforehand."""
    return "identity" if codec.transform == "axes" else codec.transform
