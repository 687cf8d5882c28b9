"""Gather: every rank sends its own payload to all, and all take the same mean.

The way of the paper. Each rank keeps its own largest coefficients; what is received grows with
the number of ranks, so it suits up to about 16 of them.
"""

from __future__ import annotations

from ..contract import Bytes, Codec, Floats, Payload
from ..errors import PayloadError


def mean_of_gathered(codec: Codec, gathered: Bytes, ranks: int, n: int) -> Floats:
    """The mean of the ranks' vectors, [n] float32.

    gathered : [ranks * codec.payload_bytes(n)] uint8, the payloads in order of rank; summed in
        that order, so that every rank gets the same bits.
    Raises PayloadError if the bytes are not that.
    """
    size = codec.payload_bytes(n)
    if gathered.size != ranks * size:
        raise PayloadError(
            f"gathered {gathered.size} bytes from {ranks} ranks; expected {size} from each. Do "
            "all ranks run the same version with the same settings?"
        )
    payloads = [Payload.from_bytes(gathered[r * size : (r + 1) * size]) for r in range(ranks)]
    # The header's n comes from a peer; ours decides what is allocated.
    for rank, payload in enumerate(payloads):
        if payload.n != n:
            raise PayloadError(f"rank {rank} sent {payload.n} elements; expected {n}")
    return codec.decode_mean(payloads)
