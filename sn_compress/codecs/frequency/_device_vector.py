"""What encoding and decoding on a GPU share: vectors checked, headers, sizes."""

from __future__ import annotations

import struct
from typing import Any, Protocol

from ...base.errors import CompressError
from ...devices import _cuda
from ...ops.cuda import launch
from ..base import HEADER_BYTES, MAGIC, VERSION
from .blocks import Section

HEADER_WORDS = HEADER_BYTES // 4


class Coder(Protocol):
    """What is asked of a codec here: FFTCodec, which itself asks this part to work on a GPU."""

    codec_id: int
    settings: bytes
    mantissa: int
    half: bool

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


def check_codec(codec: Coder) -> None:
    if codec.window == "payload":
        raise CompressError(
            'window="payload" on a GPU, where the largest magnitude of all blocks would take a '
            'second pass; expected window="block" or a number'
        )


def checked(tensor: Any) -> _cuda.View:
    view = _cuda.view(tensor)
    if view.dtype not in launch.DTYPES:
        raise CompressError(
            f"cannot encode dtype {view.dtype}; expected float32, float16 or bfloat16. "
            "Cast it: tensor.float()."
        )
    return view


def header(codec: Coder, n: int) -> bytes:
    """The part of the header that follows from codec and size."""
    return struct.pack("<2sBBQ", MAGIC, VERSION, codec.codec_id, n) + codec.settings


def used_words(codec: Coder, n: int) -> int:
    return HEADER_WORDS + sum(s.count * s.layout.words for s in codec.sections(n))


def blockwise(codec: Coder) -> str:
    return "identity" if codec.transform == "axes" else codec.transform
