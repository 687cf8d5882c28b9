"""Whether all ranks have the same settings and weights, and how far apart they are later."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ... import __version__
from ...base.agreement import Said, agree, alike, difference, question
from ...base.errors import CompressError
from ...gossip import sketch
from ..digests import digest
from .buckets import Bucket
from .peers import Peers, Wait


class Sums:
    """Sums of a few words over all ranks, for what they agree on; `sent_bytes` of this rank."""

    def __init__(self, peers: Peers, prefix: str) -> None:
        self.peers, self.prefix, self.sent_bytes = peers, prefix, 0

    def __call__(self, name: str, words: Any) -> Any:
        self.sent_bytes += words.nbytes
        wire = torch.from_numpy(words.copy())
        return self.peers.sum(f"{self.prefix}.{name}", wire)().cpu().numpy()


def agree_on_settings(sums: Sums, settings: Said, buckets: Iterable[Bucket]) -> None:
    """Raise CompressError, on every rank, unless all have the same settings and tensors."""
    tensors = [
        (f"tensor {place} of bucket {bucket.name}", f"{tuple(tensor.shape)} {tensor.dtype}")
        for bucket in buckets
        for place, tensor in enumerate(bucket.tensors)
    ]
    coded = [
        (f"bytes of bucket {bucket.name}", str(bucket.copies and bucket.copies.wire_bytes))
        for bucket in buckets
    ]
    peers = sums.peers
    agree(
        [("version of sn_compress", __version__), *settings, *tensors, *coded], total=sums,
        rank=peers.rank, ranks=peers.ranks, name="agree",
        do="Give all ranks the same model, and GossipOptimizer the same arguments.",
    )  # fmt: skip


def agree_on_weights(sums: Sums, buckets: Iterable[Bucket]) -> None:
    """Raise CompressError, on every rank, unless all have the same weights."""
    said = [
        (f"tensor {place} of bucket {bucket.name}", digest(tensor))
        for bucket in buckets
        for place, tensor in enumerate(bucket.tensors)
    ]
    if not alike(sums("weights", question(said))):
        peers = sums.peers
        told = difference(said, total=sums, rank=peers.rank, ranks=peers.ranks, name="weights")
        raise CompressError(
            f"ranks begin with different weights; expected the same; {told} (digests). Load a "
            "checkpoint into all ranks, or call consensus() to begin with their mean."
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
        self.sent_bytes = 0
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
        self.sent_bytes += own.nbytes
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
