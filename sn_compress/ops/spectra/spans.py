"""Blocks cut into spans of their own FFTs, in as many bins as one FFT of the block has.

Neighbours far apart in a flat gradient have little to do with each other: a short FFT leaves what
is sparse as sparse as it was, and the strongest bins are still picked out of a whole block. A span
of s reals has s / 2 + 1 bins, two of them real, one too many for a block of b reals to keep its
b / 2 + 1. So the two real bins of a span are the parts of one complex bin, times the square root of
a half, as such a bin counts twice in the energy; those of the first span stay the block's two edge
bins. Bin k of span q is bin q s / 2 + k of the block.
"""

from __future__ import annotations

import numpy as np

from ...devices.arrays import Array, device_of, namespace

_DOWN, _UP = float(np.float32(0.70710678)), float(np.float32(1.41421356))


def length(span: int | None, block: int) -> int:
    """Elements of each FFT of a block: those of a span, or of the block where it is no longer."""
    return min(span or block, block)


def join(bins: Array, block: int) -> Array:
    """From the spectrum of each span to those of blocks, bins as pairs.

    bins : [blocks * spans, span + 2] float32; returns [blocks, block + 2]
    """
    xp, span = namespace(bins), int(bins.shape[1]) - 2
    each = xp.reshape(bins, (-1, block // span, span + 2))
    edges = xp.stack([each[:, :, 0], each[:, :, span]], axis=2)
    first = edges[:, 0]
    inner = xp.concat([edges * _DOWN, each[:, :, 2:span]], axis=2)
    flat = xp.reshape(inner, (-1, block))
    zero = xp.zeros((int(flat.shape[0]), 1), dtype=flat.dtype, device=device_of(flat))
    return xp.concat([first[:, :1], zero, flat[:, 2:], first[:, 1:], zero], axis=1)


def part(bins: Array, span: int) -> Array:
    """Inverse of `join`; imaginary parts of the edge bins count for nothing.

    bins : [blocks, block + 2] float32; returns [blocks * spans, span + 2]
    """
    xp, block = namespace(bins), int(bins.shape[1]) - 2
    first = xp.concat([bins[:, :1], bins[:, block : block + 1]], axis=1)
    each = xp.reshape(bins[:, :block], (-1, block // span, span))
    edges = xp.concat([first[:, None, :], each[:, 1:, :2] * _UP], axis=1)
    zero = xp.zeros((*edges.shape[:2], 1), dtype=bins.dtype, device=device_of(bins))
    spans = xp.concat([edges[:, :, :1], zero, each[:, :, 2:], edges[:, :, 1:], zero], axis=2)
    return xp.reshape(spans, (-1, span + 2))
