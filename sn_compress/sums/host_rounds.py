"""The rounds of low rank on one thread of a host, each a single call of the extension.

Between its products a round is some hundred operations on small arrays, and in a small net calling
them takes longer than what they do: 3 ms of a step in which the products take 0.5. The bits are
those of `bucket` and `low_rank`, which stay for all else: devices, graphs, several threads, parts
of other kinds, ranks of unlike hardware.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ..devices import _native
from ..devices.arrays import host_threads, to_host
from ..ops.linear.products import kernel
from ..ops.words.scales import COVERED, LOWEST, unit_table
from .bucket import HEAD, Bucket, Result, wrong_size
from .parts.base import Array, Part
from .parts.columns import Columns
from .parts.low_rank import LowRank


class HostRounds:
    """What the calls have in common for some tensors and number of ranks."""

    def __init__(self, part: LowRank, ranks: int, fastest: int) -> None:
        self.part = part
        pairs = zip(part.shapes, part.sizes, strict=True)
        self.table = np.array([(*shape, size) for shape, size in pairs], np.int64)
        self.left, self.left_words, self.left_size = _side(part.left, ranks, 1)
        self.right, self.right_words, self.right_size = _side(part.right, ranks, 1)
        self.mean, _, _ = _side(part.right, ranks, ranks)
        self.kernel, self.transform = fastest, part.left_rows.bits

    def step(
        self,
        state: dict[str, Array],
        memories: tuple[Array, ...],
        gradients: tuple[Array, ...],
        added: tuple[Array, ...],
        means: tuple[Array, ...],
        decay: float,
    ) -> Generator[Array, Array, tuple[Result, Array]]:
        """What `step.summed` yields and returns; tensors in the order of the bucket, [n] each.

        state : of the bucket's one part
        added : where to write gradient plus memory, of which what is sent is then subtracted
        means : where to write the means; may be the gradients
        """
        core = _native.core()
        left, right, basis = state["left"], state["right"], state["basis"]
        words = np.empty(self.left_words, np.int32)
        energy, finite = core.low_rank_first(
            self.table, memories, gradients, added, decay, basis, self.left, left, self.kernel,
            words,
        )  # fmt: skip
        total = _summed((yield words), words)
        p, own = np.empty(self.left_size, np.float32), np.empty(self.right_size, np.float32)
        exponents = np.empty(left.size, np.int32), np.empty(right.size, np.int32)
        words = np.empty(self.right_words, np.int32)
        lost, damaged, sent = core.low_rank_second(
            self.table, added, total, self.left, left, self.right, right, self.transform,
            self.kernel, finite, p, own, exponents[0], words,
        )  # fmt: skip
        total = _summed((yield words), words)
        found = np.empty(self.right_size, np.float32)
        lost, damaged_too = core.low_rank_last(
            self.table, added, means, total, p, own, self.mean, right, self.transform,
            self.kernel, lost, basis, found, exponents[1],
        )  # fmt: skip
        damaged = damaged or damaged_too
        new = {"basis": found, "left": left if lost else exponents[0], "right": exponents[1]}
        numbers = np.array((lost, damaged, energy, sent), np.float64)
        return Result(list(added), list(means), new, lost, damaged, sent), numbers


def _summed(total: Array, words: Array) -> Array:
    """The sum as the extension reads it, [words] int32; another type is of whoever adds up."""
    if total.shape != words.shape:
        raise wrong_size(total, words)
    return np.ascontiguousarray(to_host(total), np.int32)


def rounds_for(
    bucket: Bucket, gradients: Sequence[Array], *, ranks: int, exact: bool
) -> HostRounds | None:
    """None where the rounds are for `Bucket.step`."""
    if exact or not all(type(it) is np.ndarray for it in gradients):
        return None
    if len(bucket.parts) > 1 or host_threads(gradients[0]) > 1:
        return None
    fastest = kernel(_native.core())
    return None if fastest is None else _made(bucket.parts[0], ranks, fastest)


@lru_cache(maxsize=256)
def _made(part: Part, ranks: int, fastest: int) -> HostRounds | None:
    return HostRounds(part, ranks, fastest) if type(part) is LowRank else None


def _side(columns: Columns, ranks: int, over: int) -> tuple[tuple[Any, ...], int, int]:
    """Of one side its tables for the extension, words of a round, and numbers.

    over : ranks that a digit's unit is divided by
    """
    digits = columns.digits(ranks)
    units = unit_table(digits.limit, over).host
    sides = (columns.sides, COVERED.host, units, LOWEST, digits.bits, float(digits.limit))
    return sides, HEAD + columns.words(ranks), columns.size
