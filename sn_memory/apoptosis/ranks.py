"""The ranks that train one model: sums over them, and decisions that have to be the same on all."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class AgreementError(RuntimeError):
    """Ranks came to different decisions; raised on all of them, and nothing was changed."""


class Ranks(ABC):
    """All ranks of a run; a rim says how two kinds of arrays travel between them."""

    size: int
    rank: int

    @abstractmethod
    def _sum(self, flat: NDArray[Any]) -> NDArray[Any]:
        """Return the sum over ranks of an array [n], the same bits on each."""

    @abstractmethod
    def _gather(self, row: NDArray[np.uint8]) -> Iterable[NDArray[np.uint8]]:
        """Return the bytes [n] of every rank, in the order of ranks."""

    def sums(self, values: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Return arrays of one dtype summed over ranks; one message for all of them."""
        if self.size == 1 or not values:
            return list(values)
        flat = self._sum(np.concatenate([np.ravel(value) for value in values]))
        parts = np.split(flat, np.cumsum([value.size for value in values])[:-1])
        return [part.reshape(value.shape) for part, value in zip(parts, values, strict=True)]

    def stacked(self, values: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Return rows [size x rows, ...] of all ranks; arrays must have as many rows on each."""
        found = []
        for value in values:
            every = np.zeros((self.size, *value.shape), value.dtype)
            every[self.rank] = value
            found.append(every)
        return [every.reshape(-1, *every.shape[2:]) for every in self.sums(found)]

    def largest(self, values: Sequence[float]) -> list[float]:
        """Return the largest of each value over all ranks."""
        if self.size == 1:
            return list(values)
        mine = np.frombuffer(np.array(values, np.float64).tobytes(), np.uint8)
        every = [np.frombuffer(row.tobytes(), np.float64) for row in self._gather(mine)]
        return [float(value) for value in np.max(every, axis=0)]

    def fingerprint(self, values: Iterable[NDArray[Any]]) -> str:
        """Return a hash of the bits of arrays; empty where there is nobody to compare with."""
        if self.size == 1:
            return ""
        found = hashlib.sha256()
        for value in values:
            found.update(np.ascontiguousarray(value).tobytes())
        return found.hexdigest()

    def require_same(self, what: str, text: str) -> None:
        """Raise AgreementError on every rank unless all gave the same text."""
        if self.size == 1:
            return
        mine = hashlib.sha256(text.encode()).digest()
        every = [row.tobytes() for row in self._gather(np.frombuffer(mine, np.uint8))]
        ours = [rank for rank, other in enumerate(every) if other == mine]
        if len(ours) < len(every):
            others = sorted(set(range(len(every))) - set(ours))
            raise AgreementError(
                f"Apoptosis: {what} of this rank is that of ranks {ours} and not of ranks "
                f"{others}; expected the same on all. Nothing was changed. Ranks must hold the "
                f"same weights and settings, and call step() equally often. Here: {text[:300]}"
            )


class Alone(Ranks):
    """One rank, which has nobody to agree with."""

    size, rank = 1, 0

    def _sum(self, flat: NDArray[Any]) -> NDArray[Any]:
        return flat

    def _gather(self, row: NDArray[np.uint8]) -> Iterable[NDArray[np.uint8]]:
        return [row]


class HorovodRanks(Ranks):
    """The ranks of Horovod.

    Parameters
    ----------
    hvd
        Horovod's module of a framework, initialised.
    tensor
        Makes a tensor of that framework of an array.
    """

    def __init__(self, hvd: Any, tensor: Callable[[NDArray[Any]], Any]) -> None:
        self.size, self.rank = hvd.size(), hvd.rank()
        self._hvd, self._tensor = hvd, tensor

    def _sum(self, flat: NDArray[Any]) -> NDArray[Any]:
        name = "sn_memory.apoptosis.statistics"
        every = self._hvd.allreduce(self._tensor(flat), op=self._hvd.Sum, name=name)
        return np.asarray(every.numpy())

    def _gather(self, row: NDArray[np.uint8]) -> Iterable[NDArray[np.uint8]]:
        name = "sn_memory.apoptosis.bytes"
        every = self._hvd.allgather(self._tensor(row[None].copy()), name=name)
        return list(every.numpy())
