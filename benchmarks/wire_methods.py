"""Every method of the network bench behind one protocol, for the same ranks.

An exchange of one tensor is a generator: it yields what is to be summed or gathered over the ranks,
is sent the result, and returns the mean. `travel.py` carries them, and can also play a recorded
exchange whose codec takes a known time.

Settings of the rivals are those their authors name (`rivals.codecs.presets`), where there are any:
QSGD with 4 bits in buckets of 512, TernGrad with 2 bits and a scale per tensor, both without memory
as published; Top-k with 1 % and with 10 % ("topk10"), error feedback, 32-bit indices and values;
PowerSGD of rank 4 with error feedback
over two all-reduces of float32 (Vogels et al. 2019, algorithm 1); DeMo's coding of
its momentum, 32 of 64 x 64 coefficients.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch
from rivals.codecs import codec

import sn_compress
from sn_compress import FFTCompression, LowRankCompression
from sn_compress.allreduce.exchange import AllReduceExchange
from sn_compress.codecs.base import mean_of_gathered
from sn_compress.collective import Gradient
from sn_compress.engine.engine import Engine
from sn_compress.engine.payloads import Shares, shares_of
from sn_compress.ops.products import first_factor
from sn_compress.settings import Settings

KINDS = {"gather": "allgather", "alltoall": "alltoall"}  # of the engine, of Horovod
SMALLEST = 1024  # elements; below, rivals send a tensor plain, as ours do


@dataclass
class Request:
    """An array of this rank's, and what is to become of it.

    Attributes
    ----------
    kind : "allreduce", "allgather" or "alltoall"
    sizes : for an all-to-all, how much of the array each rank is to have
    alike : what a recording is answered, where it is not the sum or all of equal arrays: what this
        rank would get if all had the same gradient; made when called, as no rank makes it all
    """

    kind: str
    array: np.ndarray
    sizes: tuple[int, ...] = ()
    alike: Callable[[], np.ndarray] | None = None


Exchange = Generator[Request, np.ndarray, np.ndarray]
# (name, shape, values [n] float32) -> Exchange
Method = Callable[[str, tuple[int, ...], np.ndarray], Exchange]


def plain(ranks: int) -> Method:
    """As Horovod does it: float32."""

    def exchange(name: str, shape: tuple[int, ...], values: np.ndarray) -> Exchange:
        total = yield Request("allreduce", values)
        return total / np.float32(ranks)

    return exchange


def fp16(ranks: int) -> Method:
    """As Horovod's Compression.fp16, which sums in half precision and averages behind it."""

    def exchange(name: str, shape: tuple[int, ...], values: np.ndarray) -> Exchange:
        # NumPy casts tens of times slower than torch, and would make fp16 look bad.
        total = yield Request("allreduce", torch.from_numpy(values).half().numpy())
        return torch.from_numpy(total).float().div_(ranks).numpy()

    return exchange


def coded(
    ranks: int, codec_for: Callable[[tuple[int, ...]], Any], *, feedback: bool, decay: float = 1.0
) -> Method:
    """A codec of the registry by gather: each rank its payload, all decode the mean."""
    shapes: dict[str, tuple[int, ...]] = {}
    memory = sn_compress.ErrorFeedback(lambda name: codec_for(shapes[name]), decay=decay)
    states: dict[str, Any] = {}  # of those without memory: they count steps
    dense = plain(ranks)

    def exchange(name: str, shape: tuple[int, ...], values: np.ndarray) -> Exchange:
        if values.size < SMALLEST:
            return (yield from dense(name, shape, values))
        shapes[name] = shape
        codec = memory.codec_of(name)
        if feedback:
            payload = memory.encode(name, values)
        else:
            state = states.setdefault(name, codec.new_state(values.size))
            payload = codec.encode(values, state=state)
        gathered = yield Request("allgather", payload.buffer)
        return mean_of_gathered(codec, gathered, ranks, values.size)

    return exchange


def matrix_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """The first axis by all others, as published PowerSGD has it."""
    return (shape[0], prod(shape[1:])) if shape else (1, 1)


def powersgd(ranks: int, *, rank: int) -> Method:
    """Two dependent all-reduces of float32 factors, with error feedback and warm start."""
    memory: dict[str, np.ndarray] = {}
    factors: dict[str, np.ndarray] = {}
    dense = plain(ranks)

    def exchange(name: str, shape: tuple[int, ...], values: np.ndarray) -> Exchange:
        rows, columns = matrix_of(shape)
        r = min(rank, rows, columns)
        if len(shape) < 2 or r * (rows + columns) >= rows * columns:
            return (yield from dense(name, shape, values))
        matrix = values.reshape(rows, columns) + memory.get(name, np.float32(0))
        q = factors.get(name, first_factor(columns, r))
        total = yield Request("allreduce", np.ascontiguousarray(matrix @ q))
        p = np.linalg.qr(total.reshape(rows, r))[0]
        total = yield Request("allreduce", np.ascontiguousarray(matrix.T @ p))
        factors[name] = total.reshape(columns, r) / np.float32(ranks)
        mean = p @ factors[name].T
        memory[name] = matrix - mean
        return mean.reshape(-1)

    return exchange


def by_hand(
    session: AllReduceExchange, name: str, values: np.ndarray, **ranks: int
) -> Generator[np.ndarray, np.ndarray, np.ndarray]:
    """The rounds of one tensor: yields words, is sent their sum, returns the mean."""
    mean = values.astype(np.float32).reshape(-1)
    rounds: Any = session.rounds([Gradient(name, mean.shape, mean)], **{"rank": None, **ranks})
    sums: Any = None
    with suppress(StopIteration):
        while True:
            sums = [(yield rounds.send(sums)[0].words)]
    return mean


def shared(ranks: int, settings: Settings) -> Method:
    """Ours over all-reduces of low-bit words; dense at first, as in training."""
    session, dense = AllReduceExchange(**settings.shared), plain(ranks)

    def exchange(name: str, shape: tuple[int, ...], values: np.ndarray) -> Exchange:
        if not session.takes(name, shape):
            return (yield from dense(name, shape, values))
        if session.dense(name, shape):
            total = yield Request("allreduce", session.dense_values(name, values))
            mean = total / np.float32(ranks)
            session.learn(name, mean)
            return mean
        rounds = by_hand(session, name, values, ranks=ranks)
        words = next(rounds)
        while True:
            total = yield Request("allreduce", words)
            try:
                words = rounds.send(total)
            except StopIteration as end:
                return end.value

    return exchange


def frequencies(ranks: int, settings: Settings, rank: int) -> Method:
    """Ours by payloads: gathered, or by way of the blocks' owners."""
    engine, dense = Engine(settings, 1, stock="Horovod", tuner=None), plain(ranks)

    def exchange(name: str, shape: tuple[int, ...], values: np.ndarray) -> Exchange:
        if not settings.compresses(shape):
            return (yield from dense(name, shape, values))
        shares = shares_of(engine.codec, (values.size,), ranks) if settings.scatter else None
        before, received = values.copy(), None
        rounds = engine.rounds([Gradient(name, shape, values)], ranks=ranks, rank=rank)
        while True:
            try:
                (carry,) = rounds.send(received)
            except StopIteration:
                return values
            alike = partial(_alike, shares, before, rank, carry.kind) if shares else None
            kind, splits = KINDS[carry.kind], tuple(carry.to_ranks(rank))
            answer = yield Request(kind, carry.words, splits if kind == "alltoall" else (), alike)
            received = [answer]

    return exchange


def _alike(shares: Shares, values: np.ndarray, rank: int, kind: str) -> np.ndarray:
    """What comes to a rank in a round if all have this gradient, and no memories."""
    if kind == "alltoall":
        codec, pieces, times = shares.parts, shares.pieces[rank], len(shares.pieces) - 1
    else:
        codec, pieces, times = (
            shares.means,
            tuple(piece for own in shares.pieces for piece in own),
            1,
        )
    buffers = [codec.encode(values[piece.start : piece.stop]).buffer for piece in pieces]
    return np.concatenate([np.zeros(0, np.uint8), *buffers] * times)


def _named(name: str, *, shaped: bool = False, **settings: Any) -> Callable[..., Any]:
    def make(shape: tuple[int, ...]) -> Any:
        if shaped:
            return codec(name, shape=matrix_of(shape) if len(shape) > 1 else None, **settings)
        return codec(name, **settings)

    return make


GATHER = FFTCompression.settings
PAPER = FFTCompression.using(mode="paper", theta=0.9).settings
WARMUP = 1  # dense steps of `shared` in the bench: they are not what is timed


def shared_settings(ratio: float = 100.0, warmup: int = WARMUP) -> Settings:
    """The shared exchange of the bench."""
    return LowRankCompression.using(ratio=ratio, warmup=warmup, every=10**9).settings


def method(name: str, *, ranks: int, rank: int = 0, ratio: float = 100.0) -> Method:
    """The method of this name, fresh; `rank` seeds what is random."""
    table: dict[str, Callable[[], Method]] = {
        "plain": lambda: plain(ranks),
        "fp16": lambda: fp16(ranks),
        "qsgd": lambda: coded(ranks, _named("qsgd", preset="paper", seed=rank), feedback=False),
        "terngrad": lambda: coded(
            ranks, _named("terngrad", preset="paper", seed=rank), feedback=False
        ),
        "topk": lambda: coded(ranks, _named("topk", theta=0.99, indices="int32"), feedback=True),
        "topk10": lambda: coded(ranks, _named("topk", theta=0.9, indices="int32"), feedback=True),
        "powersgd": lambda: powersgd(ranks, rank=4),
        "demo": lambda: coded(
            ranks, _named("demo", preset="paper", shaped=True), feedback=True, decay=1.0
        ),
        "paper": lambda: frequencies(ranks, PAPER, rank),
        "gather": lambda: frequencies(ranks, GATHER, rank),
        "shared": lambda: shared(ranks, shared_settings(ratio)),
    }
    return table[name]()


METHODS = (
    "plain", "fp16", "qsgd", "terngrad", "topk", "topk10", "powersgd", "demo", "paper", "gather",
    "shared",
)  # fmt: skip
OURS = ("paper", "gather", "shared")
