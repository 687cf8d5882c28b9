"""Several ranks in one process: the gradients of each, and the result of their exchange.

Real ranks on two cores would spend their time waiting for each other. Here one process computes
every rank's gradient on that rank's images and hands all of them to the project's own exchange:
payloads are really encoded and decoded, sums are really rounded. Only the wire is missing.
tests/benchmarks/test_simulated.py holds that real ranks under Horovod get the same bits.

A tensor's exchange takes the ranks' vectors and returns the mean that all ranks would hold. It
also knows its bytes: `sent` is what a rank hands over, `received` what reaches it, (P - 1) times
as much in an all-gather and 2 (P - 1) / P times in a ring all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rivals.codecs.powersgd import powersgd_allreduce
from torch import nn
from wire_methods import by_hand

from sn_compress.allreduce.exchange import AllReduceExchange
from sn_compress.codecs.base import HEADER_BYTES, Codec, mean_of_gathered
from sn_compress.collective import Collective, Gradient
from sn_compress.engine.engine import Engine
from sn_compress.engine.feedback import ErrorFeedback

Floats = npt.NDArray[np.float32]
SMALLEST = 1024  # elements; what is smaller travels plain with every method


def rank_gradients(
    net: nn.Module, images: torch.Tensor, labels: torch.Tensor
) -> tuple[list[list[Floats]], float]:
    """Every rank's gradients as vectors, and the mean loss.

    images : [ranks, batch, ...]; labels : [ranks, batch]

    Batch norm normalises by the images of one rank. Its running statistics end as those of rank 0,
    which are what DistributedDataParallel tests with: the other ranks see them and leave no trace.
    """
    parameters, buffers = list(net.parameters()), list(net.buffers())
    before = [buffer.clone() for buffer in buffers]
    of_first: list[torch.Tensor] = []
    by_rank, total = [], 0.0
    for x, y in zip(images, labels, strict=True):
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)
        loss = nn.functional.cross_entropy(net(x), y)
        gradients = torch.autograd.grad(loss, parameters)
        by_rank.append([g.reshape(-1).numpy() for g in gradients])
        total += loss.item()
        of_first = of_first or [buffer.clone() for buffer in buffers]
    for buffer, value in zip(buffers, of_first, strict=True):
        buffer.copy_(value)
    return by_rank, total / len(images)


class Exchange:
    """One tensor's exchange among `ranks` ranks; counts its bytes over all steps."""

    sent = 0.0
    received = 0.0

    def mean(self, vectors: Sequence[Floats]) -> Floats:
        """The ranks' vectors [n], in order of rank, to the mean all of them get, [n]."""
        raise NotImplementedError

    def _gathered(self, nbytes: float, ranks: int) -> None:
        self.sent += nbytes
        self.received += (ranks - 1) * nbytes

    def _reduced(self, nbytes: int, ranks: int) -> None:
        self.sent += nbytes
        self.received += 2 * (ranks - 1) / ranks * nbytes


class Plain(Exchange):
    """Horovod's all-reduce, in float32 or (`half`) after a cast to float16."""

    def __init__(self, *, half: bool = False) -> None:
        self.dtype = np.float16 if half else np.float32

    def mean(self, vectors: Sequence[Floats]) -> Floats:
        total = sum_in_order([v.astype(self.dtype) for v in vectors])
        self._reduced(total.nbytes, len(vectors))
        return total.astype(np.float32) / np.float32(len(vectors))


class Gather(Exchange):
    """Every rank's payload to all: ErrorFeedback.encode, then mean_of_gathered.

    Parameters
    ----------
    codecs : one per rank, as rounding at random wants its own seed on each
    feedback : whether what is dropped is remembered
    decay : of that memory
    headers : count our header of 32 bytes, which other codes for a rival's method would not send
    at : the codec for a step, where it changes (DGC's warm-up)
    """

    def __init__(
        self, codecs: Sequence[Codec], *, feedback: bool = True, decay: float = 1.0,
        headers: bool = True, at: Callable[[Any, int], Codec] | None = None,
    ) -> None:  # fmt: skip
        self.codecs, self.headers, self.at, self.step = list(codecs), headers, at, 0
        self.memories = [ErrorFeedback(codec, decay=decay) for codec in codecs]
        self.feedback = feedback

    def mean(self, vectors: Sequence[Floats]) -> Floats:
        codecs = [self.at(c, self.step) for c in self.codecs] if self.at else self.codecs
        self.step += 1
        payloads = []
        for codec, memory, vector in zip(codecs, self.memories, vectors, strict=True):
            payloads.append(
                memory.encode("tensor", vector, codec=codec)
                if self.feedback
                else codec.encode(vector)
            )
        gathered = np.concatenate([payload.buffer for payload in payloads])
        bare = payloads[0].nbytes - HEADER_BYTES
        self._gathered(gathered.size // len(vectors) if self.headers else bare, len(vectors))
        return mean_of_gathered(codecs[0], gathered, len(vectors), vectors[0].size)


class Frequencies(Exchange):
    """One tensor of FFTCompression, whose tensors travel together: Engine.rounds of each rank.

    Parameters
    ----------
    engines : one per rank, for all tensors of the net together
    name, shape : of this tensor
    """

    def __init__(self, engines: Sequence[Engine], name: str, shape: tuple[int, ...]) -> None:
        self.engines, self.name, self.shape = list(engines), name, shape

    def means(
        self, tensors: Sequence[Frequencies], vectors: Sequence[Sequence[Floats]]
    ) -> list[Floats]:
        """The means of a bucket's tensors, of which this is the first and counts the bytes.

        vectors : of each tensor those of the ranks
        """
        ranks = len(self.engines)
        by_engine = [
            [
                Gradient(tensor.name, tensor.shape, own[rank].copy())
                for tensor, own in zip(tensors, vectors, strict=True)
            ]
            for rank in range(ranks)
        ]
        for engine, own in zip(self.engines, by_engine, strict=True):
            engine.begin(own)
            engine.sort(own, ranks=ranks, total=_no_sums)  # the step begins: its theta
        running = [
            engine.rounds(own, ranks=ranks, rank=rank)
            for rank, (engine, own) in enumerate(zip(self.engines, by_engine, strict=True))
        ]
        asked = [next(rounds)[0] for rounds in running]
        while asked:
            received = self._carried(asked)
            asked = [more[0] for rounds, own in zip(running, received, strict=True)
                     if (more := _sent(rounds, own))]  # fmt: skip
        return [gradient.values for gradient in by_engine[0]]

    def _carried(self, asked: Sequence[Collective]) -> list[Any]:
        """What each rank gets of what all have asked for."""
        ranks, words = len(asked), [carry.words for carry in asked]
        total = sum(array.nbytes for array in words)
        if asked[0].kind == "gather":
            # Of ranks that bring more or less than others, what one brings and gets in the mean.
            self._gathered(total / ranks, ranks)
            return [np.concatenate(words)] * ranks
        self.sent += total / ranks
        self.received += total / ranks
        ends = [np.cumsum([0, *carry.to_ranks(rank)]) for rank, carry in enumerate(asked)]
        return [
            np.concatenate(
                [array[end[rank] : end[rank + 1]] for array, end in zip(words, ends, strict=True)]
            )
            for rank in range(ranks)
        ]


def _no_sums(*_: Any) -> Any:
    raise NotImplementedError("an engine asked for a sum of all ranks: theta follows what is lost")


def _sent(rounds: Any, received: Any) -> list[Collective] | None:
    """What rounds ask for next; None where they have come to their end."""
    try:
        more: list[Collective] = rounds.send([received])
    except StopIteration:
        return None
    return more


class Shared(Exchange):
    """One tensor of the shared exchange: words that are summed rank by rank, in one or two rounds.

    Parameters
    ----------
    sessions : one SharedExchange per rank, for all tensors of the net together
    name, shape : of this tensor

    Its dense steps, which show the ranks the same mean gradients, are counted like all others.
    """

    def __init__(
        self, sessions: Sequence[AllReduceExchange], name: str, shape: tuple[int, ...]
    ) -> None:
        self.sessions, self.name, self.shape = list(sessions), name, shape

    def mean(self, vectors: Sequence[Floats]) -> Floats:
        ranks = len(vectors)
        dense = [session.dense(self.name, self.shape) for session in self.sessions]
        pairs = list(zip(self.sessions, vectors, strict=True))
        if dense[0]:
            total = sum_in_order([own.dense_values(self.name, vector) for own, vector in pairs])
            self._reduced(total.nbytes, ranks)
            mean: Floats = total / np.float32(ranks)
            for session in self.sessions:
                session.learn(self.name, mean)
            return mean
        running = [
            by_hand(session, self.name, vector, ranks=ranks, rank=rank)
            for rank, (session, vector) in enumerate(pairs)
        ]
        words = [next(rounds) for rounds in running]
        while True:
            total = sum_in_order(words)
            self._reduced(total.nbytes, ranks)
            words, means = [], []
            with _factored_once():
                for rounds in running:
                    try:
                        words.append(rounds.send(total))
                    except StopIteration as end:
                        means.append(end.value)
            if means:
                return means[0]


class PowerSGD(Exchange):
    """PowerSGD as its authors ship it: two all-reduces of float32 factors, warm start, memory.

    Everything in it is linear in the ranks' gradients, so it works on their mean: the mean of the
    memories is all that matters, and it follows from the mean gradient.
    """

    def __init__(self, shape: tuple[int, int], *, rank: int) -> None:
        self.shape, self.rank = shape, min(rank, *shape)
        self.memory = np.zeros(shape[0] * shape[1], np.float32)
        self.factor: Floats | None = None

    def mean(self, vectors: Sequence[Floats]) -> Floats:
        vector = sum_in_order(vectors) / np.float32(len(vectors)) + self.memory
        mean, self.factor = powersgd_allreduce([vector], self.shape, self.rank, self.factor)
        self.memory = vector - mean
        self._reduced(4 * self.rank * sum(self.shape), len(vectors))
        return mean


def exchange_gradients(
    net: nn.Module, gradients: Sequence[Sequence[Floats]], exchanges: Mapping[str, Exchange]
) -> None:
    """Make the ranks' mean the gradient of every parameter of the net."""
    vectors = {
        name: [of_rank[index] for of_rank in gradients]
        for index, (name, _) in enumerate(net.named_parameters())
    }
    bucket = {
        name: exchange for name, exchange in exchanges.items() if isinstance(exchange, Frequencies)
    }
    means = {
        name: exchange.mean(vectors[name])
        for name, exchange in exchanges.items()
        if name not in bucket
    }
    if bucket:
        tensors = list(bucket.values())
        bucket_means = tensors[0].means(tensors, [vectors[name] for name in bucket])
        means |= dict(zip(bucket, bucket_means, strict=True))
    for name, parameter in net.named_parameters():
        mean = torch.from_numpy(means[name])
        parameter.grad = mean.to(parameter.dtype).view(parameter.shape)


@contextmanager
def _factored_once() -> Iterator[None]:
    """Let ranks that factor the same sums take the result of the first one.

    Real ranks work side by side; here they would do the same work one after the other.
    """

    def once(function: Callable[..., Any]) -> Callable[..., Any]:
        known: list[Any] = []

        def call(matrix: npt.NDArray[Any], **settings: Any) -> Any:
            if not known or known[1] != settings or not np.array_equal(known[0], matrix):
                known[:] = matrix.copy(), settings, function(matrix, **settings)
            return known[2]

        return call

    qr, svd = np.linalg.qr, np.linalg.svd
    np.linalg.qr, np.linalg.svd = once(qr), once(svd)
    try:
        yield
    finally:
        np.linalg.qr, np.linalg.svd = qr, svd


def sum_in_order(vectors: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """The sum, rank by rank, in the vectors' own precision."""
    total = vectors[0].copy()
    with np.errstate(over="ignore"):  # float16 has it; Inf is what the ranks would get
        for vector in vectors[1:]:
            total += vector
    return total
