"""Gather: every rank sends its own payload to all, and all take the same mean.

The way of the paper. Each rank keeps its own largest coefficients; what is received grows with
the number of ranks, so it suits up to about 16 of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..base.errors import PayloadError
from .base import Bytes, Codec, Floats, Payload

# NCCL and Horovod's fusion buffer copy aligned blocks several times faster (Horovod PR 3727).
# Small payloads are fused with others, and would pay for it with a large part of their size.
_ALIGNED = 512
_ALIGNED_FROM = 16384


def wire_bytes(nbytes: int) -> int:
    """Bytes that travel for a payload: from 16 KiB on a multiple of 512."""
    return -(-nbytes // _ALIGNED) * _ALIGNED if nbytes >= _ALIGNED_FROM else nbytes


def on_wire(buffer: Bytes) -> Bytes:
    """The bytes of a payload, and zeros behind them up to wire_bytes."""
    missing = wire_bytes(buffer.size) - buffer.size
    return np.concatenate([buffer, np.zeros(missing, np.uint8)]) if missing else buffer


def mean_of_gathered(codec: Codec, gathered: Bytes, ranks: int, n: int) -> Floats:
    """The mean of the ranks' vectors, [n] float32.

    gathered : uint8, the ranks' payloads, or what `on_wire` made of them, in order of rank; summed
        in that order, so that every rank gets the same bits.
    Raises PayloadError if the bytes are not that.
    """
    size = codec.payload_bytes(n)
    step = gathered.size // ranks
    if gathered.size % ranks or step not in (size, wire_bytes(size)):
        raise PayloadError(
            f"gathered {gathered.size} bytes from {ranks} ranks; expected {size} from each. Do "
            "all ranks run the same version with the same settings?"
        )
    parts = [gathered[rank * step : rank * step + size] for rank in range(ranks)]
    return codec.decode_mean(payloads_of(parts, n))


def payloads_of(parts: Sequence[Bytes], n: int) -> list[Payload]:
    """The ranks' payloads of n elements from their bytes, in order of rank.

    Raises PayloadError, which names the rank, if bytes are not a payload.
    """
    payloads = []
    for rank, part in enumerate(parts):
        try:
            payloads.append(Payload.from_bytes(part, n=n))
        except PayloadError as error:
            raise PayloadError(f"from rank {rank}: {error}") from error
    return payloads
