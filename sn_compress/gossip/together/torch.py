"""Whether all ranks have the same settings and weights, and how far apart they are later."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ...errors import CompressError
from .. import sketch
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
    """The distance of the ranks from their mean, by sketches of their weights.

    Attributes
    ----------
    value : the last measure over the norm of the weights, the same on all ranks; None: none yet
    """

    def __init__(self, peers: Peers, prefix: str, limit: float | None) -> None:
        self.peers, self.prefix, self.limit = peers, prefix, limit
        self.value: float | None = None
        self._measured: Wait | None = None

    def measure(self, buckets: Iterable[Bucket]) -> None:
        """Start a sum over the ranks; `over_limit` takes it in."""
        parts = [bucket.flat().float() for bucket in buckets]
        rows = [sketch.rows_of(len(part)) for part in parts]
        signs = torch.from_numpy(sketch.signs(sum(rows))).split(rows)
        own = torch.zeros(sketch.WIDTH + 2, dtype=torch.float64)
        for part, sign in zip(parts, signs, strict=True):
            missing = len(sign) * sketch.WIDTH - len(part)
            filled = torch.nn.functional.pad(part, (0, missing)).view(-1, sketch.WIDTH)
            own[:-2] += (sign.to(part.device) @ filled).double().cpu()
            own[-1] += part.norm().item() ** 2
        own[-2] = own[:-2] @ own[:-2]
        self._measured = self.peers.sum(f"{self.prefix}.spread", own)

    def over_limit(self) -> bool:
        """Take in the last measure; whether it is over the limit."""
        if self._measured is None:
            return False
        total, self._measured = self._measured(), None
        self.value = sketch.spread(total.numpy(), self.peers.ranks)
        return self.limit is not None and (self.value or 0) > self.limit

    def load(self, value: float | None) -> None:
        """Take over a saved measure, and forget the one under way."""
        self.value, self._measured = value, None
