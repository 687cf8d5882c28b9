"""Which dimensions of which parameters can only shrink together: what a rim's walk fills in.

Layers that make channels start a group, sums of two groups make them one, layers that mix channels
read it. A value's tag is where it holds the channels of its group. What a rim does not understand
is not guessed: the groups it touches are left as they are, with the reason.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Tag:
    """Where a value holds the channels of a group: `places` consecutive ones each, on `axis`."""

    group: int
    axis: int
    places: int = 1


@dataclass(frozen=True)
class Slice:
    """A parameter or buffer with `places` consecutive rows for each neuron, from row `start` on.

    `call` uses it. A layer that makes queries, keys and values has three slices of its weight.
    """

    name: str
    call: str
    places: int = 1
    start: int = 0


@dataclass(frozen=True)
class Site:
    """A call that reads the group through the inputs of `weight`."""

    call: str
    weight: str
    bias: str | None
    places: int
    axis: int
    takes_constant: bool


@dataclass
class Group:
    """Neurons that can only shrink together; `reason` says why they cannot, if they cannot.

    A neuron is `block` channels of the layer that makes it: more than one in a head of attention.
    """

    width: int
    slices: list[Slice] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)
    makers: list[str] = field(default_factory=list)
    reason: str | None = None
    block: int = 1

    @property
    def name(self) -> str:
        return " + ".join(self.makers)

    def refuse(self, reason: str) -> None:
        """Leave the group as it is; the first reason is the one that is reported."""
        self.reason = self.reason or reason


class Groups:
    """The groups of one model, joined as sums join them."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self._parent: list[int] = []

    def new_group(self, width: int, maker: str) -> int:
        self.groups.append(Group(width, makers=[maker]))
        self._parent.append(len(self._parent))
        return len(self._parent) - 1

    def root(self, group: int) -> int:
        # Groups that were joined point to the one that they are part of, the lowest number.
        while self._parent[group] != group:
            group = self._parent[group]
        return group

    def group(self, tag: Tag) -> Group:
        return self.groups[self.root(tag.group)]

    def join(self, first: Tag, second: Tag) -> None:
        """Make two groups one: a sum of both needs the same channels of both."""
        low, high = sorted((self.root(first.group), self.root(second.group)))
        if low == high:
            return
        kept, gone = self.groups[low], self.groups[high]
        kept.slices += gone.slices
        kept.sites += gone.sites
        kept.makers += gone.makers
        kept.block = max(kept.block, gone.block)
        # What keeps one from shrinking keeps both.
        if gone.reason:
            kept.refuse(gone.reason)
        self._parent[high] = low

    def coarsen(self, tag: Tag, size: int) -> None:
        """Make each `size` neurons in a row one, as heads of attention are."""
        group = self.group(tag)
        # The same channels, in fewer neurons of more places each.
        group.width //= size
        group.block *= size
        group.slices = [replace(piece, places=size * piece.places) for piece in group.slices]
        group.sites = [replace(site, places=size * site.places) for site in group.sites]

    def cut(self, tag: Tag, parts: int) -> None:
        """Make neurons that lie at the same place of equal parts one, as queries and keys do."""
        group = self.group(tag)
        group.width //= parts
        group.slices = [
            replace(piece, start=piece.start + part * group.width * piece.places)
            for piece in group.slices
            for part in range(parts)
        ]

    def roots(self) -> Iterator[Group]:
        for index, group in enumerate(self.groups):
            if self.root(index) == index:
                yield group


Batch = TypeVar("Batch")
Shapes = tuple[tuple[int, ...], ...]
# Outputs of one reader that are sampled, of all batches and ranks together.
SAMPLES: Final = 2048


@dataclass
class Seen:
    """What one reader of a group saw on one rank.

    fit : [n + 1, n + 1] float64: the sum over samples of (h, 1) (h, 1)^T
    samples : [samples, offsets, n] float32 of each batch: what some outputs are made of
    squares : [samples] float64 of each batch: the square of what was put out there
    """

    fit: NDArray[np.float64]
    samples: list[NDArray[np.float32]] = field(default_factory=list)
    squares: list[NDArray[np.float64]] = field(default_factory=list)


def most_alike(batches: Iterable[Batch], shapes_of: Callable[[Batch], Shapes]) -> list[Batch]:
    """Return the batches of the shapes that hold most rows: a trace is of one set of shapes."""
    alike: dict[Shapes, list[Batch]] = {}
    for batch in batches:
        alike.setdefault(shapes_of(batch), []).append(batch)

    def rows(shapes: Shapes) -> int:
        return len(alike[shapes]) * (shapes[0][0] if shapes and shapes[0] else 1)

    return alike[max(alike, key=rows)] if alike else []


def grid(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Return positions on each axis, evenly apart, at most about `most` of all combinations.

    >>> grid((14, 14), 16)
    [[1, 5, 9, 13], [1, 5, 9, 13]]
    """
    stride = 1
    while math.prod(-(-size // stride) for size in sizes) > most and stride < max(sizes):
        stride += 1
    return [list(range(min((stride - 1) // 2, (size - 1) // 2), size, stride)) for size in sizes]


def offsets(kernel: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the places of a kernel, the last axis running fastest.

    >>> offsets((1, 2))
    [(0, 0), (0, 1)]
    """
    return list(itertools.product(*(range(size) for size in kernel)))


def same_padding(
    kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], sizes: Sequence[int]
) -> list[tuple[int, int]]:
    """Return the zeros before and after each axis with which "same" gives one output a stride.

    >>> same_padding((3, 4), (1, 2), (1, 1), (14, 14))
    [(1, 1), (1, 1)]
    """
    paddings = []
    for size, step, spread, length in zip(kernel, stride, dilation, sizes, strict=True):
        outputs = -(-length // step)
        total = max((outputs - 1) * step + (size - 1) * spread + 1 - length, 0)
        # An odd zero goes to the end, as in TensorFlow and in torch.
        paddings.append((total // 2, total - total // 2))
    return paddings
