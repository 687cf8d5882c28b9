"""Whether all ranks have the same settings and weights, and how far apart they are later."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ...errors import CompressError
from ..buckets.torch import Bucket
from ..peers.torch import Peers, Wait


def agree(
    peers: Peers, prefix: str, settings: Sequence[Any], buckets: Iterable[Bucket], *,
    same_weights: bool = True,
) -> None:  # fmt: skip
    """Raise CompressError, on every rank, unless all have the same settings and weights.

    settings : anything whose repr() is the same on ranks that agree
    """
    buckets = list(buckets)
    shapes = [
        (b.name, [tuple(t.shape) for t in b.tensors], str(b.tensors[0].dtype),
         b.copies and b.copies.wire_bytes)
        for b in buckets
    ]  # fmt: skip
    told = hashlib.sha256(repr((*settings, shapes)).encode())
    digest = torch.tensor(list(told.digest()), dtype=torch.float64)
    for bucket in buckets:
        told.update(bucket.flat().view(torch.uint8).cpu().numpy().tobytes())
    own = torch.cat([digest, torch.tensor(list(told.digest()), dtype=torch.float64)])
    # Sums of whole numbers below 256 are exact. One that differs shows on some rank at least,
    # and is then told to all.
    total = peers.sum(f"{prefix}.agree", own)()
    differ = (own * peers.ranks != total).view(2, -1).any(1).double()
    differ = peers.sum(f"{prefix}.differ", differ)()
    if differ[0]:
        raise CompressError(
            "ranks have different settings or parameters; expected the same model and the same "
            "arguments of GossipOptimizer on all of them"
        )
    if differ[1] and same_weights:
        raise CompressError(
            "ranks begin with different weights; expected the same. Load a checkpoint into "
            "all ranks, or call consensus() to begin with their mean."
        )


class Spread:
    """The distance of the ranks from their mean, by the distances between partners.

    Attributes
    ----------
    value : the last measure over the norm of the weights, the same on all ranks; None: none yet
    """

    def __init__(self, peers: Peers, prefix: str, limit: float | None) -> None:
        self.peers, self.prefix, self.limit = peers, prefix, limit
        self.value: float | None = None
        self._measured: Wait | None = None

    def measure(self, apart: Any, parameters: Iterable[Any]) -> None:
        """Start a sum over the ranks of squared distances to partners and of squared norms."""
        own = torch.zeros(3, dtype=torch.float64)
        if apart is not None:
            own[0], own[1] = apart.item(), 1
        own[2] = sum((p.detach().double() ** 2).sum().item() for p in parameters)
        self._measured = self.peers.sum(f"{self.prefix}.spread", own)

    def over_limit(self) -> bool:
        """Take in the last measure; whether it is over the limit."""
        if self._measured is None:
            return False
        (apart, count, norm), self._measured = self._measured().tolist(), None
        if count:
            # Two that deviate independently are the square root of 2 times as far apart as each is
            # from the mean.
            mean_norm = norm / self.peers.ranks
            self.value = math.sqrt(apart / count / 2 / mean_norm) if mean_norm else 0.0
        return self.limit is not None and (self.value or 0) > self.limit

    def load(self, value: float | None) -> None:
        """Take over a saved measure, and forget the one under way."""
        self.value, self._measured = value, None
