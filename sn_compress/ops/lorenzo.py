"""Pre-quantize by twice the bound, predict integers from neighbours, entropy-code differences.

The scheme of SZ and cuSZ (Tian et al., PACT 2020, "dual quantization"), used by the paper on
compressed activations (Jin et al., arXiv 2011.09017). As quantization comes first, prediction is on
integers, and decoding adds no further error. Huffman coding is left to zlib, which also shortens
runs: after a ReLU most symbols are zero.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import PayloadError

Floats = npt.NDArray[np.float32]

_FAR = 2**30  # integers of at least this magnitude escape, so that differences fit 32 bits
_WIDE = 255  # symbol of a difference that does not fit a byte; its four bytes follow all symbols
_LEVEL = 1  # of zlib: 9 takes ten times longer for a few per cent


class Stream(NamedTuple):
    """The result of `pack` for [n] values.

    coded : zlib stream of the symbols
    at, values : positions, ascending int64, and values of the elements that escape
    """

    coded: bytes
    at: npt.NDArray[np.int64]
    values: Floats


def pack(values: Floats, bound: float) -> Stream:
    """Encode [n] float32; the error of every element is at most `bound`, or it escapes."""
    exact = values.astype(np.float64)
    with np.errstate(all="ignore"):
        nearest = np.rint(exact / (2 * bound))
        decoded = (nearest * (2 * bound)).astype(np.float32)
        good = np.abs(decoded - exact) <= bound  # false for NaN
    good &= np.abs(nearest) < _FAR
    integers = np.where(good, nearest, 0).astype(np.int64)
    difference = np.diff(integers, prepend=0)
    folded = (difference << 1) ^ (difference >> 63)  # 0, -1, 1, -2 ... as 0, 1, 2, 3 ...
    wide = folded >= _WIDE
    symbols = np.where(wide, _WIDE, folded).astype(np.uint8)
    coder = zlib.compressobj(_LEVEL)
    parts = [
        coder.compress(symbols.tobytes()),
        coder.compress(folded[wide].astype("<u4").tobytes()),
    ]
    at = np.flatnonzero(~good)
    return Stream(b"".join([*parts, coder.flush()]), at, values[at])


def unpack(coded: bytes, n: int, bound: float) -> Floats:
    """Decode a stream to [n] float32, without escapes.

    Raises PayloadError if it is not a stream of n symbols. Decompresses at most 5 n + 1 bytes.
    """
    reader = zlib.decompressobj()
    try:
        plain = reader.decompress(coded, 5 * n + 1)
    except zlib.error as error:
        raise PayloadError(f"the coded symbols are damaged: {error}") from error
    symbols = np.frombuffer(plain[:n], np.uint8)
    wide = symbols == _WIDE
    if not reader.eof or len(plain) != n + 4 * int(wide.sum()):
        raise PayloadError(
            f"the coded symbols are damaged: {len(plain)} bytes for {n} elements, of which "
            f"{int(wide.sum())} are wide"
        )
    folded = symbols.astype(np.int64)
    folded[wide] = np.frombuffer(plain[n:], "<u4")
    integers = np.cumsum((folded >> 1) ^ -(folded & 1))
    with np.errstate(over="ignore"):  # a corrupt stream may contain large numbers
        return (integers * (2 * bound)).astype(np.float32)
