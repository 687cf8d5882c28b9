"""What encoding and decoding on a GPU share: vectors checked, headers, sizes."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from .. import _cuda
from ..errors import CompressError
from ..ops import launch
from .base import HEADER_BYTES, MAGIC, VERSION

if TYPE_CHECKING:
    from .fft import FFTCodec

HEADER_WORDS = HEADER_BYTES // 4


def check_codec(codec: FFTCodec) -> None:
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


def header(codec: FFTCodec, n: int) -> bytes:
    """The part of the header that follows from codec and size."""
    return struct.pack("<2sBBQ", MAGIC, VERSION, codec.codec_id, n) + codec.settings


def used_words(codec: FFTCodec, n: int) -> int:
    return HEADER_WORDS + sum(s.count * s.layout.words for s in codec.sections(n))


def blockwise(codec: FFTCodec) -> str:
    return "identity" if codec.transform == "axes" else codec.transform
