"""Buckets of torch tensors: one message, and one set of copies if there is a codec."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ...gossip.differences import Differences
from .peers import Wait


@dataclass
class Bucket:
    """Tensors of one type that travel in one message."""

    name: str
    tensors: list[Any]
    copies: Differences | None = None
    sent: Any = None  # [n], what the partner will take this rank's values for
    wait: Wait | None = None
    arrived: Any = None  # [n], what this rank takes the partner's values for

    def flat(self) -> Any:
        """The values of all tensors, [n], copied."""
        return torch.cat([tensor.detach().reshape(-1) for tensor in self.tensors])

    def add(self, delta: Any) -> None:
        """Add [n] float32 or wider to the tensors."""
        pieces = delta.split([tensor.numel() for tensor in self.tensors])
        with torch.no_grad():
            for tensor, piece in zip(self.tensors, pieces, strict=True):
                # In half precision the sum is rounded once, not the difference as well.
                tensor.copy_(tensor.to(piece.dtype) + piece.view(tensor.shape))

    def put(self, values: Any) -> None:
        """Set the tensors to [n]."""
        pieces = values.split([tensor.numel() for tensor in self.tensors])
        with torch.no_grad():
            for tensor, piece in zip(self.tensors, pieces, strict=True):
                tensor.copy_(piece.view(tensor.shape))


def split(tensors: Iterable[Any], kind: str, most_bytes: int) -> list[Bucket]:
    """Buckets of up to most_bytes, each of one dtype and device, in order."""
    found: list[Bucket] = []
    open_: dict[Any, tuple[Bucket, int]] = {}
    for tensor in tensors:
        key, size = (tensor.dtype, tensor.device), tensor.numel() * tensor.element_size()
        bucket, taken = open_.get(key, (None, 0))
        if bucket is None or taken + size > most_bytes:
            bucket, taken = Bucket(f"{kind}{len(found)}", []), 0
            found.append(bucket)
        bucket.tensors.append(tensor)
        open_[key] = bucket, taken + size
    return found
