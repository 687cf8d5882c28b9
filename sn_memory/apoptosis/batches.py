"""Which of the batches that were kept decide: those of one set of shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

Batch = TypeVar("Batch")
Shapes = tuple[tuple[int, ...], ...]


def most_alike(batches: Iterable[Batch], shapes_of: Callable[[Batch], Shapes]) -> list[Batch]:
    """Return the batches of the shapes that hold most rows: a trace is of one set of shapes."""
    alike: dict[Shapes, list[Batch]] = {}
    for batch in batches:
        alike.setdefault(shapes_of(batch), []).append(batch)

    def rows(shapes: Shapes) -> int:
        return len(alike[shapes]) * (shapes[0][0] if shapes and shapes[0] else 1)

    return alike[max(alike, key=rows)] if alike else []
