"""A gradient on its way in Horovod's torch: `finish` makes of it what p.grad becomes."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from .._waiting import result_of
from ..codecs.fft import FFTCodec
from ..codecs.gather import mean_of_gathered
from ..errors import CompressError, PayloadError
from .memory import Memory
from .streams import SideStream

Rounds = Generator[torch.Tensor, torch.Tensor, Any]


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
        return _gradient(mean, self.factor, self.like)

    def _joined(self) -> CompressError:
        return CompressError(
            f"{self.name}: another rank called hvd.join(), after which Horovod gathers nothing. "
            "Give all ranks equally many batches (drop_last=True), or train without compression."
        )


@dataclass(frozen=True)
class Reducer:
    """Sums of words over the ranks of a process set, where the words are."""

    process_set: Any
    limit_s: float
    side: SideStream
    device: torch.device

    def beside(self) -> AbstractContextManager[None]:
        return self.side.on(self.device)

    def start(self, name: str, words: torch.Tensor) -> tuple[str, int]:
        handle = hvd.allreduce_async_(words, name=name, op=hvd.Sum, process_set=self.process_set)
        return name, handle

    def arrived(self, handle: tuple[str, int]) -> bool:
        return bool(hvd.poll(handle[1]))

    def wait(self, handle: tuple[str, int]) -> torch.Tensor:
        name, number = handle
        return result_of(hvd, number, limit_s=self.limit_s, what=name)  # type: ignore[no-any-return]


@dataclass
class Shown:
    """A gradient on its way uncompressed, of whose mean the shared exchange takes note."""

    memory: Memory
    name: str
    factor: float  # from the mean to what was asked for
    dtype: torch.dtype

    def finish(self, reduced: torch.Tensor) -> torch.Tensor:
        self.memory.comes_back()
        self.memory.shared.learn(self.name, reduced.detach().float() / self.factor)
        return reduced.to(self.dtype)


@dataclass
class InRounds:
    """A gradient on its way in the rounds of its bucket."""

    memory: Memory
    name: str
    factor: float
    tensor: torch.Tensor  # without a graph; float32 that lies in order becomes the result
    complete: Callable[[], object]  # of all that is on its way
    result: torch.Tensor | None = None
    sent: int = 0  # bytes of words, those of the whole bucket with its first

    def finish(self, token: torch.Tensor) -> torch.Tensor:
        if self.result is None:
            self.complete()
        assert self.result is not None
        shared = self.memory.shared
        sent, lost = self.sent + token.element_size(), shared.lost(self.name)
        way = shared.way(self.name)
        self.memory.traffic.shared(self.name, self.tensor.numel(), sent, *lost, way=way)
        if self.factor != 1.0:
            self.result.mul_(self.factor)
        return self.result


def rounds(memory: Memory, members: Sequence[InRounds], process_set: Any) -> Rounds:
    """Those of gradients that travel together; their results are the means."""
    names = [member.name for member in members]
    with torch.no_grad():
        vectors = [member.tensor.float().reshape(-1) for member in members]
    opened = memory.shared.exchange_all(
        names, vectors, ranks=process_set.size(), rank=process_set.rank(), outs=vectors
    )
    memory.begins(names)
    means = yield from _counted(opened, members[0])
    for member, mean in zip(members, means, strict=True):
        result = mean.view(member.tensor.shape)
        if not _same_place(result, member.tensor):
            result = torch.empty_like(member.tensor).copy_(result)  # in its order, of its type
        member.result = result


def _counted(opened: Rounds, first: InRounds) -> Rounds:
    try:
        words = next(opened)
        while True:
            first.sent += words.nbytes
            words = opened.send((yield words))
    except StopIteration as end:
        return end.value


def _same_place(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = one.dtype == other.dtype and one.stride() == other.stride()
    return same and one.data_ptr() == other.data_ptr()


def begin(memory: Memory, number: int, process_set: Any) -> None:
    """Start what was filed in a bucket."""
    assert memory.buckets is not None
    members = [member for _, member in memory.buckets.take(number)]
    device = members[0].tensor.device
    beside = memory.settings.overlap and device.type == "cpu"
    wire = Reducer(process_set, memory.settings.wait_s, memory.side, device)
    key = memory.wire_name(f"{number}.{memory.buckets.members[number][0]}")
    opens = partial(rounds, memory, members, process_set)
    memory.pending.begin(key, opens, wire, encoding_thread() if beside else None)


def complete(memory: Memory, process_set: Any) -> None:
    """Take a step to its end: what was held back by tensors that nobody was asked about, too."""
    if memory.buckets is not None:
        for number in memory.buckets.rest():
            begin(memory, number, process_set)
    memory.complete()


@cache
def encoding_thread() -> ThreadPoolExecutor:
    """The one in which buckets of all optimizers are encoded."""
    return ThreadPoolExecutor(1, thread_name_prefix="sn_compress-encode")


# Threads do not survive a fork; the child makes its own.
os.register_at_fork(after_in_child=encoding_thread.cache_clear)


def _gradient(mean: Any, factor: float, like: torch.Tensor) -> torch.Tensor:
    """The mean times the factor, as a fresh tensor: Horovod makes it the storage of p.grad."""
    if factor != 1.0:
        mean *= factor
    return torch.from_numpy(mean).reshape(like.shape).to(like)
