"""Pre-quantise by twice the bound, predict integers by their neighbours, entropy-code the rest.

The scheme of SZ and cuSZ (Tian et al., PACT 2020, "dual quantization"), which the paper on
compressed activations uses (Jin et al., arXiv 2011.09017). Quantising first makes the prediction
one of integers, so decoding adds no error of its own. Huffman coding is left to zlib, which also
shortens runs: after a ReLU most symbols are zero.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import PayloadError

Floats = npt.NDArray[np.float32]

_FAR = 2**30  # integers from here on escape, so that differences fit 32 bits
_WIDE = 255  # the symbol of a difference that is no byte; four bytes of it follow all symbols
_LEVEL = 1  # of zlib: 9 takes ten times longer for a few per cent


class Stream(NamedTuple):
    """What `pack` makes of [n] values.

    coded : zlib stream of the symbols
    at, values : positions, ascending int64, and values of the elements that escape
    """

    coded: bytes
    at: npt.NDArray[np.int64]
    values: Floats


def pack(values: Floats, bound: float) -> Stream:
    """Code [n] float32; the error of every element is at most `bound`, or the element escapes."""
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
    """The values of a stream, [n] float32; escapes are still to be put in.

    Raises PayloadError if it is no stream of n symbols. At most 5 n bytes are ever made of it.
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
    with np.errstate(over="ignore"):  # a damaged stream may hold large numbers
        return (integers * (2 * bound)).astype(np.float32)
