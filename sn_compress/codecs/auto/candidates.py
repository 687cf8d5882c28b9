"""What `auto` tries: every method it knows, each set so that it fills the same bytes.

The order is that of the numbers in auto's payloads, so ranks must run one version.
"""

from __future__ import annotations

import math
from typing import Any

from ...ops.linear.matrices import cut
from ...ops.spectra.spectrum import fast_length
from ..base import HEADER_BYTES, Codec
from ..factors.lowrank import LowRankCodec
from ..frequency.fft import MOST_BINS, FFTCodec

_FORMATS: list[dict[str, Any]] = [
    {"bits": 4, "mantissa": 1},
    {"bits": 6, "mantissa": 2},
    {"values": "2bit"},
    {"values": "sign"},
]
# Worth their bits only where nearly everything is kept.
_FINE_FORMATS: list[dict[str, Any]] = [
    {"bits": bits, "mantissa": mantissa} for bits, mantissa in ((8, 3), (10, 5), (12, 7), (15, 10))
]
_FINE_BELOW = 8.0  # ratio


def proposals(n: int, budget: int, ratio: float, shape: tuple[int, ...] | None) -> list[Codec]:
    """The codecs to try on n elements, each filling `budget` bytes of payload as well as it can."""
    bases: list[dict[str, Any]] = [{"transform": t} for t in ("identity", "dct", "hadamard", "fft")]
    along: list[dict[str, Any]] = [
        {"transform": "axes", "axes": axes, "shape": shape} for axes in _axes(shape or ())
    ]
    if fast_length(n) <= MOST_BINS:
        bases += [{"transform": "identity", "block": None}, *along]
        bases += [{**basis, "block": None} for basis in along]
    else:
        bases += along
    found: list[Codec | None] = [
        _sparse(n, budget, {**basis, **fmt}) for basis in bases for fmt in _FORMATS
    ]
    if ratio < _FINE_BELOW:
        found += [_sparse(n, budget, {**basis, **fmt}) for basis in bases for fmt in _FINE_FORMATS]
    if shape is not None and min(cut(shape)) > 1:
        found += [_low_rank(shape, budget, bits, m) for bits, m in ((4, 1), (6, 2), (8, 3))]
        found += [_two_stage(shape, budget, share) for share in (0.25, 0.5, 0.75)]
    return [codec for codec in found if codec is not None]


def _axes(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Axes worth a DCT: a kernel's height and width, and each side of a matrix."""
    if len(shape) == 4:
        return [(2, 3)] if shape[2] * shape[3] > 1 else []
    if len(shape) == 3:
        return [(2,)] if shape[2] > 1 else []
    if len(shape) == 2:
        return [(axis,) for axis in (1, 0) if shape[axis] > 1]
    return []


def smallest(n: int) -> int:
    """Bytes of the smallest record there is, for tensors too small for the ratio."""
    return (
        FFTCodec(theta=1 - 2**-32, transform="identity", values="sign").payload_bytes(n)
        - HEADER_BYTES
    )


def _sparse(n: int, budget: int, settings: dict[str, Any]) -> FFTCodec | None:
    """The FFTCodec with these settings and the smallest theta that fits the budget."""

    def codec(kept: int) -> FFTCodec:
        # Between two counts: theta falls on no edge, so that rounding cannot matter.
        return FFTCodec(**settings, theta=1 - kept / 2**20)

    def fits(kept: int) -> bool:
        return codec(kept).payload_bytes(n) <= budget

    whole = FFTCodec(**settings, theta=0.0)
    if whole.payload_bytes(n) <= budget:
        return whole
    low, high = 1, 2**20
    if not fits(low):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return codec(low)


def _low_rank(shape: tuple[int, ...], budget: int, bits: int, mantissa: int) -> LowRankCodec | None:
    n = math.prod(shape)

    def codec(rank: int) -> LowRankCodec:
        return LowRankCodec(shape=shape, rank=rank, bits=bits, mantissa=mantissa)

    best = None
    for rank in range(1, min(cut(shape)) + 1):
        if codec(rank).payload_bytes(n) > budget:
            break
        best = codec(rank)
    return best


def _two_stage(shape: tuple[int, ...], budget: int, share: float) -> LowRankCodec | None:
    """Low rank in `share` of the bytes, top-k of what it leaves over in the others."""
    n = math.prod(shape)
    first = _low_rank(shape, HEADER_BYTES + int((budget - HEADER_BYTES) * share), 4, 1)
    if first is None:
        return None
    left = budget - first.payload_bytes(n) + HEADER_BYTES
    rest = _sparse(n, left, {"transform": "identity", "bits": 4, "mantissa": 1})
    if rest is None:
        return None
    return LowRankCodec(shape=shape, rank=first.rank, bits=4, mantissa=1, rest=rest)
