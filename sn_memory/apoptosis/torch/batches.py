"""Which of the batches that were kept decide: those of one set of shapes."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch.utils import _pytree as tree


def shapes_of(batch: Any) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of all tensors of a batch of (args, kwargs)."""
    leaves = tree.tree_leaves(batch)
    return tuple(tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor))


def most_alike(batches: deque[Any]) -> list[Any]:
    """Return the batches of the shapes that hold most rows: a trace is of one set of shapes."""
    alike: dict[Any, list[Any]] = {}
    for batch in batches:
        alike.setdefault(shapes_of(batch), []).append(batch)

    def rows(shapes: Any) -> int:
        return len(alike[shapes]) * (shapes[0][0] if shapes and shapes[0] else 1)

    return alike[max(alike, key=rows)] if alike else []
