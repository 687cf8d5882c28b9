"""A gradient on its way in Horovod's torch: `finish` makes of it what p.grad becomes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from .._waiting import result_of
from ..codecs.fft import FFTCodec
from ..codecs.gather import mean_of_gathered
from ..errors import CompressError, PayloadError
from ..exchange.pending import Pending
from .memory import Memory


@dataclass
class Cast:
    """A small tensor that went uncompressed in a type Horovod can reduce."""

    dtype: torch.dtype

    def finish(self, reduced: torch.Tensor) -> torch.Tensor:
        return reduced.to(self.dtype)


@dataclass
class InFlight:
    """A payload on its way."""

    handle: int
    name: str
    memory: Memory
    codec: FFTCodec
    ranks: int
    factor: float  # on the mean: the number of ranks for a sum
    like: torch.Tensor  # shape, dtype and device of the result

    def finish(self, token: torch.Tensor) -> torch.Tensor:
        self.memory.theta.observe(self.name, *token.tolist())
        try:
            limit_s = self.memory.settings.wait_s
            what = f"the payloads of {self.name}"
            gathered = result_of(hvd, self.handle, limit_s=limit_s, what=what).numpy()
        except hvd.mpi_ops.HorovodInternalError as error:
            if "join" in str(error).lower():
                raise self._joined() from error
            error.add_note(f"while gathering {self.name}; a rank has ended, or called hvd.join()")
            raise
        try:
            mean = mean_of_gathered(self.codec, gathered, self.ranks, self.like.numel())
        except PayloadError as error:
            # Once the gather is in its response cache, Horovod runs it without asking and puts
            # zeros in the place of a rank that has joined.
            parts = np.array_split(gathered, self.ranks)
            if not all(part.any() for part in parts):
                raise self._joined() from error
            raise
        self.memory.check(mean)
        return _gradient(mean, self.factor, self.like)

    def _joined(self) -> CompressError:
        return CompressError(
            f"{self.name}: another rank called hvd.join(), after which Horovod gathers nothing. "
            "Give all ranks equally many batches (drop_last=True), or train without compression."
        )


@dataclass(frozen=True)
class Reducer:
    """Sums of words over the ranks of a process set."""

    process_set: Any
    limit_s: float

    def start(self, name: str, words: Any) -> tuple[str, int]:
        wire = torch.from_numpy(words)
        handle = hvd.allreduce_async(wire, name=name, op=hvd.Sum, process_set=self.process_set)
        return name, handle

    def arrived(self, handle: tuple[str, int]) -> bool:
        return bool(hvd.poll(handle[1]))

    def wait(self, handle: tuple[str, int]) -> Any:
        name, number = handle
        return result_of(hvd, number, limit_s=self.limit_s, what=name).numpy()


@dataclass
class Shown:
    """A gradient on its way uncompressed, of whose mean the shared exchange takes note."""

    memory: Memory
    name: str
    factor: float  # from the mean to what was asked for
    dtype: torch.dtype

    def finish(self, reduced: torch.Tensor) -> torch.Tensor:
        mean = reduced.detach().to("cpu", torch.float32).numpy() / np.float32(self.factor)
        self.memory.check(mean)
        self.memory.shared.learn(self.name, mean)
        return reduced.to(self.dtype)


@dataclass
class InRounds:
    """A gradient on its way in the rounds of the shared exchange."""

    memory: Memory
    name: str
    factor: float
    like: torch.Tensor
    ranks: int
    pending: Pending

    def finish(self, token: torch.Tensor) -> torch.Tensor:
        mean = self.pending.finish(self.name)
        self.memory.check(mean)
        shared = self.memory.shared
        sent = 4 * sum(shared.words(self.name, self.ranks)) + token.element_size()
        lost = shared.lost(self.name)
        self.memory.traffic.shared(self.name, self.like.numel(), sent, *lost)
        return _gradient(mean, self.factor, self.like)


def _gradient(mean: Any, factor: float, like: torch.Tensor) -> torch.Tensor:
    """The mean times the factor, as a fresh tensor: Horovod makes it the storage of p.grad."""
    if factor != 1.0:
        mean *= factor
    return torch.from_numpy(mean).reshape(like.shape).to(like)
