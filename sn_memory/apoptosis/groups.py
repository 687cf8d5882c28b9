"""Groups: which dimensions of which parameters must shrink together; filled in by a rim's walk.

Layers that produce channels start a group, sums join two groups, and layers that mix channels are
its readers. A value's tag says where it holds the channels of its group. Nothing is guessed: groups
touched by an unknown call are left unchanged, with the reason.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Tag:
    """Where a value holds the channels of a group: `places` consecutive ones each, on `axis`."""

    group: int
    axis: int
    places: int = 1

    def lies_as(self, other: Tag) -> bool:
        """Whether both values hold their channels in the same layout."""
        return (self.axis, self.places) == (other.axis, other.places)


@dataclass(frozen=True)
class Slice:
    """A parameter or buffer with `places` consecutive rows for each neuron, from row `start` on.

    `call` uses it. A layer that produces queries, keys and values has three slices of its weight.
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
    """Neurons that must shrink together; `reason` says why they cannot shrink, if so.

    A neuron is `block` channels of the layer that produces it: several for an attention head.
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

    @property
    def parameters(self) -> list[str]:
        """The names of the parameters that are cut or changed when it shrinks."""
        readers = [name for site in self.sites for name in (site.weight, site.bias)]
        return [piece.name for piece in self.slices] + [name for name in readers if name]

    def refuse(self, reason: str) -> None:
        """Leave the group unchanged; the first reason is reported."""
        self.reason = self.reason or reason


class Refusal(Exception):  # noqa: N818 - a result that `Groups.follow` catches, not an error
    """A rule cannot tell what a call does to channels."""


class Groups(ABC):
    """The groups of one model, joined by sums: the state of a rim's walk over calls."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self._parent: list[int] = []

    @abstractmethod
    def tag(self, value: Any) -> Tag | None:
        """Return where a value holds channels; None for any other value."""

    def follow(
        self,
        rule: Callable[[], Tag | None] | None,
        inputs: Iterable[Any],
        *,
        kind: str,
        call: str,
    ) -> Tag | None:
        """Return the channels' layout in a call's result; refuse groups that it does not preserve.

        rule : the rule for calls of this kind, bound to the call; None if there is none
        """
        try:
            if rule is None:
                raise Refusal(f"{kind} is not understood")
            return rule()
        except Refusal as refusal:
            # Its inputs may not survive a cut, and its result has no known channels.
            self.refuse(inputs, f"{refusal} (at {call})")
            return None

    def refuse(self, values: Iterable[Any], reason: str) -> None:
        """Leave the groups of these values unchanged."""
        for value in values:
            if tag := self.tag(value):
                self.group(tag).refuse(reason)

    def finished(self, outputs: Iterable[Any]) -> list[Group]:
        """Return all groups of a model with these outputs, including those that cannot shrink."""
        self.refuse(outputs, "it is an output of the model")
        # Only after the walk: a later call may still read a group, or join it with another.
        groups = list(self.roots())
        for group in groups:
            if not group.sites:
                group.refuse("no layer reads it")
        return groups

    def add(self, group: Group) -> int:
        """Add a group that a call starts, and return its number."""
        self.groups.append(group)
        self._parent.append(len(self._parent))
        return len(self._parent) - 1

    def root(self, group: int) -> int:
        # Joined groups point to the group they are part of, which has the lowest number.
        while self._parent[group] != group:
            group = self._parent[group]
        return group

    def group(self, tag: Tag) -> Group:
        return self.groups[self.root(tag.group)]

    def join(self, first: Tag, *others: Tag) -> Tag:
        """Join groups, as a sum needs the same channels in all its terms; return the first tag."""
        for other in others:
            low, high = sorted((self.root(first.group), self.root(other.group)))
            if low == high:
                continue
            kept, gone = self.groups[low], self.groups[high]
            kept.slices += gone.slices
            kept.sites += gone.sites
            kept.makers += gone.makers
            kept.block = max(kept.block, gone.block)
            # A reason against shrinking one holds for both.
            if gone.reason:
                kept.refuse(gone.reason)
            self._parent[high] = low
        return first

    def coarsen(self, tag: Tag, size: int) -> None:
        """Make each `size` consecutive neurons one, as in attention heads."""
        group = self.group(tag)
        # The same channels, in fewer neurons of more places each.
        group.width //= size
        group.block *= size
        group.slices = [replace(piece, places=size * piece.places) for piece in group.slices]
        group.sites = [replace(site, places=size * site.places) for site in group.sites]

    def cut(self, tag: Tag, parts: int) -> None:
        """Make neurons at the same position of equal parts one, as for queries and keys."""
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
# Sampled outputs per reader, over all batches and ranks together.
SAMPLES: Final = 2048


@dataclass
class Seen:
    """Statistics of one reader of a group on one rank.

    fit : [n + 1, n + 1] float64: the sum over samples of (h, 1) (h, 1)^T; in any array library
        while a rim measures
    samples : [samples, offsets, n] float32 per batch: the inputs of some outputs
    squares : [samples] float64 per batch: the squared norms of these outputs
    """

    fit: Any
    samples: list[NDArray[np.float32]] = field(default_factory=list)
    squares: list[NDArray[np.float64]] = field(default_factory=list)

    def add(self, samples: NDArray[Any], outputs: NDArray[Any]) -> None:
        """Add samples [samples, offsets, n] of a batch, and their outputs [samples, m]."""
        self.samples.append(np.asarray(samples, np.float32))
        self.squares.append(np.square(outputs, dtype=np.float64).sum(axis=1))


# Even rows are fitted, odd rows measure the change, so that overfitting does not pass for
# similarity.
FITTED: Final = slice(None, None, 2)


def held_out(rows: int) -> slice:
    """Return the rows of a batch that measure the change; a single row is used for both."""
    return slice(1, None, 2) if rows > 1 else slice(None)


def empty_statistics(
    groups: Sequence[Group], zeros: Callable[[int], Any]
) -> tuple[list[list[Seen]], dict[str, tuple[Site, Seen]]]:
    """Return empty statistics for each reader of each group, and the same by its call.

    zeros : makes a square float64 matrix for sums of products
    """
    seen = [[Seen(zeros(group.width + 1)) for _ in group.sites] for group in groups]
    pairs = (
        pair
        for group, row in zip(groups, seen, strict=True)
        for pair in zip(group.sites, row, strict=True)
    )
    return seen, {site.call: (site, own) for site, own in pairs}


def most_alike(batches: Iterable[Batch], shapes_of: Callable[[Batch], Shapes]) -> list[Batch]:
    """Return the batches of the shapes with the most rows: a trace is for one set of shapes."""
    alike: dict[Shapes, list[Batch]] = {}
    for batch in batches:
        alike.setdefault(shapes_of(batch), []).append(batch)

    def rows(shapes: Shapes) -> int:
        return len(alike[shapes]) * (shapes[0][0] if shapes and shapes[0] else 1)

    return alike[max(alike, key=rows)] if alike else []


def grid(sizes: Sequence[int], most: int) -> list[range]:
    """Return evenly spaced positions on each axis, with about `most` combinations at most.

    >>> grid((14, 14), 16)
    [range(1, 14, 4), range(1, 14, 4)]
    """
    stride = 1
    while math.prod(-(-size // stride) for size in sizes) > most and stride < max(sizes):
        stride += 1
    return [range(min((stride - 1) // 2, (size - 1) // 2), size, stride) for size in sizes]


def patches(
    padded: Any,
    out: Any,
    share: int,
    *,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
) -> tuple[list[Any], Any]:
    """Return inputs [samples, n] per kernel offset, and outputs [samples, m].

    Outputs are sampled on a grid of positions, so that there are about `share` of them.

    padded, out : input and output of a convolution, in any array library; channels are last
    """
    positions = grid(out.shape[1:-1], max(1, share // len(out)))
    parts = []
    for offset in offsets(kernel):
        places = [
            _places(row, step, at * spread)
            for row, step, at, spread in zip(positions, stride, offset, dilation, strict=True)
        ]
        parts.append(padded[(slice(None), *places)].reshape(-1, padded.shape[-1]))
    outputs = out[(slice(None), *map(_places, positions))]
    return parts, outputs.reshape(-1, out.shape[-1])


def _places(positions: range, step: int = 1, first: int = 0) -> slice:
    """Return the slice of first + step x for positions x."""
    begin, stride = first + step * positions.start, step * positions.step
    return slice(begin, begin + stride * (len(positions) - 1) + 1, stride)


def offsets(kernel: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the offsets in a kernel, the last axis running fastest.

    >>> offsets((1, 2))
    [(0, 0), (0, 1)]
    """
    return list(itertools.product(*(range(size) for size in kernel)))


def same_padding(
    kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], sizes: Sequence[int]
) -> list[tuple[int, int]]:
    """Return the zeros before and after each axis that "same" padding adds.

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
