"""Whether the ranks still have the same parameters, asked every so many steps.

All ranks add the same mean to the same weights, so they stay alike to the bit without ever being
compared. But a bit that turns over where one rank receives, in what travels compressed or plain,
makes that rank another for ever, and nothing fails. A digest of the parameters, 17 words to sum,
finds it. It costs one look at every weight: once in 100 steps, well below a thousandth of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from .agreement import Said, Total, difference
from .errors import CompressError

_WIDTH = 2**16  # words that are weighed at once: they stay in the cache
_MASK = 2**64 - 1
DO = (
    "Go on from a checkpoint saved before, or give all ranks the parameters of one of them and "
    "begin their error memories anew. If it happens again, suspect a rank's memory or its network "
    "adapter. check_every=0 asks no more"
)


class Sameness:
    """When to compare, and what to say if ranks differ; for one optimizer.

    every : steps from one comparison to the next; 0 for none
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.begin_anew()

    def begin_anew(self) -> None:
        """Count from here, as when ranks have come or gone; on all ranks at once."""
        self.steps, self.same_at = 0, 0

    def step(self) -> bool:
        """A step begins: whether the parameters that it begins with are to be compared."""
        due = self.every > 0 and self.steps > 0 and self.steps % self.every == 0
        self.steps += 1
        return due

    @property
    def free_steps(self) -> int:
        """Steps from the next one on in which nothing is compared."""
        return -self.steps % self.every if self.every else 2**62

    def pass_by(self, steps: int) -> None:
        """Count steps that have not asked."""
        self.steps += steps

    def found(self, at: int) -> None:
        """All were the same before step `at`, counted from 0."""
        self.same_at = at

    def apart(
        self, at: int, said: Said | None, *, total: Total, rank: int, ranks: int, hint: str = ""
    ) -> CompressError:
        """The error to raise, the same on every rank; blocks, and all ranks call it.

        said : None of a rank that is not asked; hint : alike on all ranks, before what to do
        """
        told = difference(said, total=total, rank=rank, ranks=ranks, name="sn.same")
        since = f"they were the same after step {self.same_at}"
        if not self.same_at:
            since = (
                "they were not compared before: did all begin with the same, as broadcasting "
                "the parameters of one rank makes them"
            )
        error: CompressError = CompressError(
            f"ranks have different parameters after step {at}, {since}; {told} (digests). "
            f"{hint}{DO}."
        )
        return error


@cache
def weights() -> npt.NDArray[np.int64]:
    """One odd number for each place in a stretch of words, [65536] int64."""
    numbers = np.random.default_rng(2026).integers(-(2**62), 2**62, _WIDTH)
    return numbers * 2 + 1


def weigh(
    words: Any, factors: Any, wide: Callable[[Any], Any], fetch: Callable[[list[Any]], list[int]]
) -> str:
    """A digest of [n] words of up to 32 bits, on any device: their sum, each times an odd number.

    Modulo 2**64, so that another value of a single word is never missed, and of several hardly
    ever: with odds of 2**-32 at most for bits that random numbers do not favour.

    factors : `weights()`, of the same array library and device
    wide : makes int64 of words
    fetch : brings the sums of all stretches to the host, at once: a device waits for each that
        comes alone
    """
    sums = []
    for start in range(0, len(words), _WIDTH):
        part = wide(words[start : start + _WIDTH])
        sums.append((part * factors[: len(part)]).sum())
    total = sum((2 * number + 1) * each for number, each in enumerate(fetch(sums)))
    return f"{total & _MASK:016x}"


def digest(values: npt.NDArray[Any]) -> str:
    """That of an array on the host, by its bits."""
    flat = np.ascontiguousarray(values).reshape(-1)
    size = min(flat.dtype.itemsize, 4)
    words = flat.view(np.uint8) if flat.dtype == np.bool_ else flat.view(f"i{size}")
    return weigh(
        words, weights(), lambda part: part.astype(np.int64), lambda sums: [int(it) for it in sums]
    )
