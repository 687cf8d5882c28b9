"""What a rim hands to the engine, and what it gets to carry to the other ranks."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from .arrays import Array

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

    kind : "sum", of which the result is the sum over the ranks, each word modulo 2**32; or
        "gather", of which it is what all ranks brought, in order of rank, one behind the other
    words : [n] int32 to sum, which the result may overwrite; [n] uint8 to gather
    """

    kind: Literal["sum", "gather"]
    words: Array


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
