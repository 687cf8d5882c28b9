"""Exchanges in flight in Horovod's torch; a handle's `finish` returns the value for p.grad."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import horovod.torch as hvd
import torch

from ...collective import Collective, Gradient
from ...consistency import result_of
from ...engine import all_to_all
from ...engine.all_to_all import AllToAll
from ...errors import CompressError
from .memory import OptimizerState, SideStream


@dataclass
class Cast:
    """A small tensor sent uncompressed, in a dtype that Horovod can reduce."""

    dtype: torch.dtype

    def finish(self, reduced: torch.Tensor) -> torch.Tensor:
        return reduced.to(self.dtype)


@dataclass
class PlainHandle:
    """An uncompressed gradient in flight, whose mean is passed to the engine."""

    memory: OptimizerState
    name: str
    factor: float  # result / mean
    dtype: torch.dtype

    @torch.compiler.disable
    def finish(self, reduced: torch.Tensor) -> torch.Tensor:
        self.memory.mark_all_sent()
        self.memory.engine.learn(self.name, reduced.detach().float() / self.factor)
        return reduced.to(self.dtype)


@dataclass
class RoundsHandle:
    """A compressed gradient in flight, in the rounds of its bucket."""

    gradient: Gradient  # whose values become the mean
    tensor: torch.Tensor  # whose elements the values are, or are a copy of
    factor: float
    complete: Callable[[], object]  # completes all exchanges of the step
    result: torch.Tensor | None = None

    @torch.compiler.disable
    def finish(self, token: torch.Tensor) -> torch.Tensor:
        self.complete()  # even if the mean has arrived: this ends the step
        assert self.result is not None
        return self.result.mul_(self.factor) if self.factor != 1.0 else self.result

    def end(self) -> None:
        """Take the mean, which has arrived, from the gradient's values."""
        mean = self.gradient.values.view(self.tensor.shape)
        in_place = mean.data_ptr() == self.tensor.data_ptr()
        self.result = self.tensor if in_place else torch.empty_like(self.tensor).copy_(mean)


@dataclass
class FusedHandle:
    """A small uncompressed gradient in flight, in one vector with the others of its bucket."""

    tensor: torch.Tensor  # becomes the mean
    kind: torch.dtype  # sent as this dtype
    send: Callable[[torch.Tensor, str], int]  # as Horovod's optimizer would send it
    complete: Callable[[], object]

    @torch.compiler.disable
    def finish(self, token: torch.Tensor) -> torch.Tensor:
        self.complete()
        return self.tensor


@dataclass(frozen=True)
class Plain:
    """A collective outside of the engine: uncompressed gradients as one vector, [n]."""

    words: torch.Tensor
    send: Callable[[torch.Tensor, str], int]
    kind: str = "plain"


Carried = Collective | Plain | AllToAll
Rounds = Generator[Sequence[Carried], list[Any], None]


@dataclass(frozen=True)
class Reducer:
    """Implements Wire for a Horovod process set, on the device of the words.

    named : whether collectives have explicit names; False leaves naming to Horovod
    sent : collects kind and name of each collective
    waiting : entered while this waits for other ranks
    """

    process_set: Any
    limit_s: float
    side: SideStream
    device: torch.device
    named: bool = True
    sent: set[tuple[str, str]] = field(default_factory=set)
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext

    def computing(self) -> AbstractContextManager[None]:
        return self.side.on(self.device)

    def start(self, name: str, carries: Sequence[Carried]) -> list[tuple[str, int, bool]]:
        return [
            (name, self._send(carry, f"{name}.{at}" if at else name), isinstance(carry, AllToAll))
            for at, carry in enumerate(carries)
        ]

    def _send(self, carry: Carried, name: str) -> Any:
        if isinstance(carry, Plain):
            name = f"{name}.{carry.words.dtype}"
            self.sent.add((carry.kind, name))
            return carry.send(carry.words, name)
        self.sent.add((carry.kind, name))
        called = name if self.named else None
        if carry.kind == "gather":
            return hvd.allgather_async(carry.words, name=called, process_set=self.process_set)
        if carry.kind == "alltoall":
            rank = self.process_set.rank()
            to_ranks = carry.splits if isinstance(carry, AllToAll) else carry.to_ranks(rank)
            splits = torch.tensor(to_ranks, dtype=torch.int32)
            return hvd.alltoall_async(carry.words, splits, called, process_set=self.process_set)
        return hvd.allreduce_async_(
            carry.words, name=called, op=hvd.Sum, process_set=self.process_set
        )

    def arrived(self, handles: list[tuple[str, int, bool]]) -> bool:
        """False without handles: rounds that request nothing resume at the end of the step."""
        return bool(handles) and all(hvd.poll(handle) for _, handle, _ in handles)

    def wait(self, handles: list[tuple[str, int, bool]]) -> list[Any]:
        with self.waiting():
            return [self._result(*handle) for handle in handles]

    def _result(self, name: str, handle: int, by_rank: bool) -> Any:
        try:
            result = result_of(hvd, handle, limit_s=self.limit_s, what=name)
        except hvd.mpi_ops.HorovodInternalError as error:
            error.add_note(f"while waiting for {name}; a rank has exited")
            raise
        # An all-to-all also returns how much each rank has sent.
        if by_rank:
            return list(result[0].split(result[1].tolist()))
        return result[0] if isinstance(result, tuple) else result


def rounds(
    memory: OptimizerState, members: Sequence[RoundsHandle | FusedHandle], process_set: Any
) -> Rounds:
    """Run the rounds of a bucket: hierarchical, or for compressed and plain gradients together."""
    coded = [member for member in members if isinstance(member, RoundsHandle)]
    gradients = [member.gradient for member in coded]
    if (place := memory.nodes.place) is not None:  # even uncompressed gradients have owners
        yield from all_to_all.rounds(memory.engine, place, gradients, memory.begins)
        for handle in coded:
            handle.end()
        return
    small: dict[torch.dtype, list[FusedHandle]] = {}
    for member in members:
        if isinstance(member, FusedHandle):
            small.setdefault(member.kind, []).append(member)
    # Plain gradients join the first round, which may have nothing else in it.
    coded_rounds: Rounds | None = None
    requests: Sequence[Carried] = ()
    coding = memory.engine.seconds.coding
    if coded:
        memory.begins(str(gradient.name) for gradient in gradients)
        coded_rounds = memory.engine.rounds(
            gradients, ranks=process_set.size(), rank=process_set.rank()
        )
        with coding():
            requests = next(coded_rounds)
    plain = [
        Plain(torch.cat([handle.tensor.reshape(-1).to(kind) for handle in fused]), fused[0].send)
        for kind, fused in small.items()
    ]
    results = yield [*requests, *plain]
    means, results = results[len(requests) :], results[: len(requests)]
    if coded_rounds is not None:
        with suppress(StopIteration):
            while True:
                with coding():
                    requests = coded_rounds.send(results)
                results = yield requests
    for handle in coded:
        handle.end()
    for fused, mean in zip(small.values(), means, strict=True):
        pieces = mean.split([member.tensor.numel() for member in fused])
        for member, piece in zip(fused, pieces, strict=True):
            member.tensor.copy_(piece.view(member.tensor.shape))


def count_ranks(memory: OptimizerState, key: str | None, process_set: Any) -> None:
    """Start counting the ranks in this step, if it has gathers.

    A gather crashes Horovod's background loop on all ranks if a rank has called hvd.join(). A sum
    tolerates that, and shows that a rank is missing.

    key : identifies the tensors of this step, or None
    """
    gathers = memory.settings.exchange != "shared" or memory.nodes.place is not None
    if not gathers or process_set.size() == 1 or memory.counts_ranks:
        return
    name = key and memory.wire_name(f"sn.ranks.{key}")
    if name:
        memory.sent.add(("shared", name))
    word = torch.ones(1, dtype=torch.int32)
    memory.engine.traffic.overhead(word.nbytes)
    memory.counts_ranks = True
    memory.ranks_sum = hvd.allreduce_async_(word, name=name, op=hvd.Sum, process_set=process_set)


def require_all_ranks(memory: OptimizerState, name: str, process_set: Any) -> None:
    """Before a gather, raise CompressError on all ranks that have not joined, if any rank has."""
    handle, memory.ranks_sum = memory.ranks_sum, None
    if handle is None:
        return
    what = f"the number of ranks, before {name}"
    present = int(result_of(hvd, handle, limit_s=memory.settings.wait_s, what=what))
    if present < process_set.size():
        if memory.buckets is not None:
            # Otherwise the step would count as broken, and ending its rounds needs the joined rank.
            memory.buckets.begin()
        why = f"{memory.settings.compression} gathers what each rank has"
        instead = "LowRankCompression or AutoCompression"
        if memory.nodes.place is not None:
            why = "by nodes each rank has gradients to sum"
            instead = f"{instead} with hierarchy=None"
        raise CompressError(
            f"{name}: another rank called hvd.join() ({present} of {process_set.size()} are in "
            f"this step), and {why}, which Horovod cannot do without it; none was sent. Give all "
            f"ranks the same number of batches (drop_last=True), or use {instead}, which allow "
            "hvd.join()."
        )


def begin(memory: OptimizerState, number: int, process_set: Any) -> None:
    """Start the exchange of a bucket's gradients."""
    assert memory.buckets is not None
    members = [member for _, member in memory.buckets.take(number)]
    require_all_ranks(memory, memory.buckets.members[number][0], process_set)
    wire = Reducer(
        process_set, memory.settings.wait_s, memory.side, members[0].tensor.device,
        sent=memory.sent, waiting=memory.engine.seconds.waiting,
    )  # fmt: skip
    key = memory.wire_name(f"{number}.{memory.buckets.members[number][0]}")
    memory.pending.begin(key, rounds(memory, members, process_set), wire)


def complete(memory: OptimizerState, process_set: Any) -> None:
    """Complete a step, including buckets that lack some gradients."""
    if memory.buckets is not None:
        for number in memory.buckets.incomplete():
            begin(memory, number, process_set)
    memory.complete()
