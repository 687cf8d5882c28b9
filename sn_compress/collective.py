"""What a rim passes to the engine, and the collectives the rim runs on its behalf."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from .arrays import Array

# Dtypes that an all-reduce can average and a codec accepts; others are not compressed.
_FLOATS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Gradient:
    """One gradient of a step.

    Attributes
    ----------
    name : of its tensor, unique and the same on all ranks; None if tensors cannot be distinguished,
        so that there is no error feedback
    shape : of its tensor
    values : [n], contiguous, in the rim's library and device; overwritten with the mean
    """

    name: str | None
    shape: tuple[int, ...]
    values: Array

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def is_float(self) -> bool:
        """Whether its dtype can be compressed."""
        return dtype_name(self.values) in _FLOATS


@dataclass(frozen=True)
class Collective:
    """One collective for the rim to run; the same on all ranks, in the same order.

    kind : "sum", whose result is the sum over the ranks, each word modulo 2**32; "gather", whose
        result is the words of all ranks, concatenated in rank order; or "alltoall", whose result is
        the words the other ranks sent to this one, likewise concatenated
    words : [n] int32 to sum, which the result may overwrite; [n] uint8 to gather, or, for an
        all-to-all, the words for each other rank, concatenated in rank order
    sizes : for a gather, the number of words of each rank, None if all are equal; for an
        all-to-all, the number of words that each rank receives from each other rank
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


# Yields lists of collectives, which may be empty, and is sent their results in the same order.
Rounds = Generator[list[Collective], list[Array], None]


@dataclass(frozen=True)
class Routing:
    """How the gradients of a step travel.

    Attributes
    ----------
    plain : uncompressed, in their own dtype; the rim averages them by itself
    dense : also averaged by the rim in this step, but as `Engine.dense_values`, and the mean is
        passed to `Engine.learn`
    coded : compressed, by `Engine.rounds`
    """

    plain: list[Gradient]
    dense: list[Gradient]
    coded: list[Gradient]


def dtype_name(values: Any) -> str:
    """Return the name of an array's dtype, such as "float32", for any library."""
    return str(values.dtype).rpartition(".")[2]


GROUP = 2**23  # elements at which a bucket is full


class Buckets:
    """Assigns gradients to buckets, and tracks which of the current step are ready.

    Each collective has a latency, so gradients share a few. The layout is fixed by the order of the
    parameters, and so is the same on all ranks; the order in which gradients arrive is not.

    Parameters
    ----------
    tensors : (name, elements, device) in the usual order of arrival of the gradients
    full : elements at which a bucket is closed
    """

    def __init__(self, tensors: Iterable[tuple[str, int, Any]], *, full: int = GROUP) -> None:
        self.members: list[list[str]] = []
        self._number: dict[str, int] = {}
        size, last = full, None
        for name, elements, device in tensors:
            if size >= full or device != last:  # a bucket is encoded on a single device
                self.members.append([])
                size, last = 0, device
            self.members[-1].append(name)
            self._number[name] = len(self.members) - 1
            size += elements
        self.begin()

    def begin(self) -> None:
        """Begin a step, with no gradients added yet."""
        self._missing = [len(names) for names in self.members]
        self._filed: dict[int, dict[str, Any]] = {}

    def add(self, name: str, filed: Any = None) -> int | None:
        """Add a gradient; return the number of its bucket if that is now complete.

        filed : what `take` returns for it; None for a gradient sent outside the bucket
        """
        number = self._number[name]
        self._missing[number] -= 1  # also for a gradient sent outside: the bucket must not wait
        if filed is not None:
            self._filed.setdefault(number, {})[name] = filed
        return number if not self._missing[number] and number in self._filed else None

    def take(self, number: int) -> list[tuple[str, Any]]:
        """Remove and return what was filed in a bucket, in the order of its members."""
        filed = self._filed.pop(number)
        return [(name, filed[name]) for name in self.members[number] if name in filed]

    def incomplete(self) -> list[int]:
        """Return the numbers of buckets whose filed gradients were not taken, sorted."""
        return sorted(self._filed)


class StepTimer:
    """Accumulates the seconds that one optimizer's steps spend in the codec and in waiting.

    Time between two yields of the rounds counts as codec; time the rim waits for a collective
    counts as exchange, to the extent that no backward pass hid it. Both are host time: on a GPU
    they cover only the launch of the codec's kernels, and with NCCL the stream waits, not the
    thread.
    """

    def __init__(self) -> None:
        self._codec = self._waited = 0.0

    @contextmanager
    def coding(self) -> Iterator[None]:
        """Time what the rounds compute between two yields."""
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
        """Return seconds per step; see Compression.report."""
        steps = max(steps, 1)
        return {"codec_s": self._codec / steps, "exchange_s": self._waited / steps}
