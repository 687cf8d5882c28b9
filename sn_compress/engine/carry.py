"""What a rim hands to the engine, and what it gets to carry to the other ranks."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from ..devices.arrays import Array

# What an all-reduce can average and a codec takes; of other types gradients travel as they are.
_FLOATS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Gradient:
    """One gradient of a step.

    Attributes
    ----------
    name : of its tensor, unique and the same on all ranks; None where nothing tells tensors apart,
        and then nothing is remembered
    shape : of its tensor
    values : [n], contiguous, of the rim's library and device; the mean is written there
    """

    name: str | None
    shape: tuple[int, ...]
    values: Array

    @property
    def elements(self) -> int:
        """How many there are."""
        return prod(self.shape)

    @property
    def is_float(self) -> bool:
        """Whether its dtype is one that can be compressed."""
        return dtype_name(self.values) in _FLOATS


@dataclass(frozen=True)
class Carry:
    """One collective for the rim to do; the same on all ranks, in the same order.

    kind : "sum", of which the result is the sum over the ranks, each word modulo 2**32; "gather",
        of which it is what all ranks brought, in order of rank, one behind the other; or
        "alltoall", of which it is what the others brought for this rank, likewise
    words : [n] int32 to sum, which the result may overwrite; [n] uint8 to gather, or what each of
        the others is to have, in order of rank, one behind the other
    sizes : of each rank, how much it brings to a gather, None if all bring as much; or how much
        each of the others has for it
    """

    kind: Literal["sum", "gather", "alltoall"]
    words: Array
    sizes: tuple[int, ...] | None = None

    def to_ranks(self, rank: int) -> list[int]:
        """How much a rank sends to each, in an all-to-all."""
        return [0 if each == rank else size for each, size in enumerate(self.sizes or ())]

    def of_ranks(self, rank: int) -> list[int]:
        """How much comes to a rank from each, in an all-to-all."""
        sizes = self.sizes or ()
        return [0 if each == rank else sizes[rank] for each in range(len(sizes))]


# Yields what to carry, nothing at times, is sent the results in the same order.
Rounds = Generator[list[Carry], list[Array], None]


@dataclass(frozen=True)
class Sorted:
    """How the gradients of a step travel.

    Attributes
    ----------
    plain : as without compression, in their own dtype; the rim's matter
    dense : likewise in this step, but of what `Engine.whole` says, and `Engine.learn` is told
    coded : by `Engine.rounds`
    """

    plain: list[Gradient]
    dense: list[Gradient]
    coded: list[Gradient]


def dtype_name(values: Any) -> str:
    """Of an array of any library: "float32"."""
    return str(values.dtype).rpartition(".")[2]
