"""What a rim passes to the engine, and the collectives that it runs for it."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from .arrays import Array

# What an all-reduce can average and a codec takes; gradients of other types travel as they are.
_FLOATS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Gradient:
    """One gradient of a step.

    Attributes
    ----------
    name : of its tensor, unique and the same on all ranks; None where tensors cannot be told from
        each other, so nothing is remembered
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
class Collective:
    """One collective for the rim to run; the same on all ranks, in the same order.

    kind : "sum", whose result is the sum over the ranks, each word modulo 2**32; "gather", whose
        result is the words of all ranks, in order of rank, one behind the other; or "alltoall",
        whose result is the words of the others for this rank, likewise
    words : [n] int32 to sum, which the result may overwrite; [n] uint8 to gather, or for each of
        the others, in order of rank, one behind the other
    sizes : for a gather, the words of each rank, None if all have as many; for an all-to-all, the
        words that each of the others sends it
    """

    kind: Literal["sum", "gather", "alltoall"]
    words: Array
    sizes: tuple[int, ...] | None = None

    def to_ranks(self, rank: int) -> list[int]:
        """Return how many words a rank sends to each rank in an all-to-all."""
        return [0 if to == rank else size for to, size in enumerate(self.sizes or ())]

    def of_ranks(self, rank: int) -> list[int]:
        """Return how many words a rank receives from each rank in an all-to-all."""
        sizes = self.sizes or ()
        return [0 if source == rank else sizes[rank] for source in range(len(sizes))]


# Yields collectives, at times an empty list, and is sent their results in the same order.
Rounds = Generator[list[Collective], list[Array], None]


@dataclass(frozen=True)
class Routing:
    """How the gradients of a step travel.

    Attributes
    ----------
    plain : as without compression, in their own dtype; the rim averages them by itself
    dense : likewise in this step, but `Engine.dense_values`, whose mean goes to `Engine.learn`
    coded : by `Engine.rounds`
    """

    plain: list[Gradient]
    dense: list[Gradient]
    coded: list[Gradient]


def dtype_name(values: Any) -> str:
    """The name of an array's dtype, such as "float32", of any library."""
    return str(values.dtype).rpartition(".")[2]


GROUP = 2**23  # elements from which on a bucket is full


class Buckets:
    """Which gradients travel together, and those of the step under way that are ready.

    A collective costs its latency, so gradients share a few. Their layout is fixed, the same on all
    ranks, by the order of parameters: that in which gradients come differs between ranks.

    Parameters
    ----------
    tensors : (name, elements, device) in the order in which gradients mostly come
    full : elements from which on a bucket takes no more
    """

    def __init__(self, tensors: Iterable[tuple[str, int, Any]], *, full: int = GROUP) -> None:
        self.members: list[list[str]] = []
        self._number: dict[str, int] = {}
        held, last = full, None
        for name, elements, device in tensors:
            if held >= full or device != last:  # words of a bucket are made on one device
                self.members.append([])
                held, last = 0, device
            self.members[-1].append(name)
            self._number[name] = len(self.members) - 1
            held += elements
        self.begin()

    def begin(self) -> None:
        """Begin a step: no gradient is there yet."""
        self._missing = [len(names) for names in self.members]
        self._filed: dict[int, dict[str, Any]] = {}

    def add(self, name: str, filed: Any = None) -> int | None:
        """Add a gradient; return the number of its bucket if that is complete now.

        filed : what `take` returns for it; None for a gradient that travels by itself
        """
        number = self._number[name]
        self._missing[number] -= 1  # also for one that travels by itself: the others wait for none
        if filed is not None:
            self._filed.setdefault(number, {})[name] = filed
        return number if not self._missing[number] and number in self._filed else None

    def take(self, number: int) -> list[tuple[str, Any]]:
        """Remove and return what was filed in a bucket, in its order."""
        filed = self._filed.pop(number)
        return [(name, filed[name]) for name in self.members[number] if name in filed]

    def incomplete(self) -> list[int]:
        """Return the numbers of buckets whose filed gradients were not taken, in order."""
        return sorted(self._filed)


class StepTimer:
    """Seconds of all steps of one optimizer on this rank's threads: codec, and waiting.

    What rounds take between two yields is the codec; what the rim takes to wait for a collective is
    the exchange, as far as no backward pass hid it. Both are seconds of the host: on a GPU they
    only launch the codec's kernels, and NCCL lets the stream wait, not the thread.
    """

    def __init__(self) -> None:
        self._codec = self._waited = 0.0

    @contextmanager
    def coding(self) -> Iterator[None]:
        """Time what rounds compute between two of their yields."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._codec += time.perf_counter() - began

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time a wait for other ranks."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._waited += time.perf_counter() - began

    def report(self, steps: int) -> dict[str, float]:
        """Seconds a step; see Compression.report."""
        steps = max(steps, 1)
        return {"codec_s": self._codec / steps, "exchange_s": self._waited / steps}
