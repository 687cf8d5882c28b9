"""Timed runs that measure the rates of one rank's codec, and of a link.

Two sizes yield a fixed and a per-unit part; both sizes are small, so measuring takes seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from ..allreduce.methods.base import StepOptions
from ..allreduce.methods.dense import Dense
from ..allreduce.methods.low_rank import LowRank
from ..allreduce.state import TensorState, exchange
from ..arrays import Array, namespace
from ..codecs.base import Floats
from ..collective import Gradient
from ..engine.casts import CastBucket
from ..errors import CompressError
from ..ops.casts import Cast, DType
from ..settings import Settings
from .cost import Link, wire_bytes

_SIDE = 1024  # rows and columns of the matrix in the timed runs
_RANKS = 8  # number of payloads and summands in the timed runs
_TINY = 32  # rows and columns of a matrix whose time is dominated by call overhead
_MANY = 16  # number of such matrices
_BUCKET = 8 * 2**20  # elements; exceeds the caches
PASSES = 3  # over a bucket: copy in, division, copy out
_SMALL, _LARGE = 2, 32  # columns of the factors in the timed runs
_LEAST_S = 1e-13  # per element: a difference of noisy times must not be negative
_LEAST_LINK_S = 1e-9  # the same for a difference of two all-reduces


@dataclass(frozen=True)
class Rates:
    """Seconds of one rank's codec per element of a tensor, and per tensor.

    Attributes
    ----------
    encode_s, decode_s, add_s : gather: to encode, to decode the mean, and to add a rank's payload
    pass_s, column_s : shared: for any rank of the factors, and per column of the factors
    whole_s : shared: a tensor without factors, encode and decode
    cast_s : fp16, encode and decode; approximated by two copies
    owners_s : cast, all three parts; this and shared use torch tensors if torch is loaded
    bucket_s : all methods, including plain: the framework copies a gradient into its bucket,
        divides it, and copies the mean out
    gather_tensor_s, shared_tensor_s : per compressed tensor, whatever its size
    """

    encode_s: float = 0.0
    decode_s: float = 0.0
    add_s: float = 0.0
    pass_s: float = 0.0
    column_s: float = 0.0
    whole_s: float = 0.0
    cast_s: float = 0.0
    owners_s: float = 0.0
    bucket_s: float = 0.0
    gather_tensor_s: float = 0.0
    shared_tensor_s: float = 0.0


FREE = Rates()
"""A codec that takes no time: predicts from bytes alone."""

RECORDED = {
    "core": Rates(
        encode_s=4.5e-9, decode_s=2e-9, add_s=0.35e-9, pass_s=2.7e-9,
        column_s=0.33e-9, whole_s=13e-9, cast_s=0.55e-9, bucket_s=2.6e-9,
        gather_tensor_s=170e-6, shared_tensor_s=24e-6,
    ),
    "h200": Rates(
        encode_s=0.215e-9, decode_s=0.215e-9, add_s=1.9e-12, pass_s=1.14e-9,
        whole_s=1.14e-9, cast_s=40e-12, bucket_s=6.3e-12,
        gather_tensor_s=160e-6, shared_tensor_s=400e-6,
    ),
}  # fmt: skip
"""Rates measured once, by name, so that results computed from them are reproducible.

"core": one core of an AMD EPYC, from benchmarks/results/pays.json. "h200": an NVIDIA H200, from the
seconds that compression adds to a DDP step of ResNet-50 and of GPT-2, attributed to elements and
compressed tensors (benchmarks/results/gpu/exchange_steps.json); most of it is the host's time to
launch kernels. Its copies and sums are from codec_seconds.json in the same folder. The split of a
gather's time into encoding and decoding was not measured; half is assumed for each."""


GLOO = {"move_s": 1.2e-9, "sum_s": 0.62e-9}
"""For a `cost.Host`: CPU seconds per byte that Gloo sends and receives, by an all-to-all into new
memory and by an all-reduce in place, over the loopback of an AMD EPYC (medians of three runs of
`python -m benchmarks nodes_predicted --measure`, load 8)."""


def measure_rates(
    settings: Settings,
    *,
    repeat: int = 3,
    threads: int = 1,
    side: int = _SIDE,
    clock: Callable[[], float] = time.perf_counter,
    say: Callable[[str], object] = lambda text: None,
) -> Rates:
    """Time the codecs of these settings on this machine, on a million elements.

    side : rows and columns of the matrix; arrays beyond 32 MB are newly mapped by the kernel each
        time, which costs as much as a few passes over them
    clock : returns seconds; time.process_time excludes the time of other programs
    say : called with a line before each part, to show progress
    """
    values = np.random.default_rng(0).laplace(size=side**2).astype(np.float32)

    def least(run: Callable[[], object]) -> float:
        # The minimum: other programs make a run slower, never faster.
        return min(_seconds(run, clock) for _ in range(repeat))

    def per_element(run: Callable[[], object]) -> float:
        return least(run) / values.size

    say("timing the codec of payloads")
    # One payload and several, to separate decoding from adding.
    codec = settings.codec(threads=threads)
    state = codec.new_state(values.size) if settings.feedback else None
    payload = codec.encode(values, state=state)
    one = per_element(lambda: codec.decode_mean([payload]))
    several = per_element(lambda: codec.decode_mean([payload] * _RANKS))
    add = max((several - one) / (_RANKS - 1), _LEAST_S)

    tiny = values[: _TINY**2].copy()
    of_tiny = codec.new_state(tiny.size) if settings.feedback else None
    gather_tensor = least(lambda: codec.decode_mean([codec.encode(tiny, state=of_tiny)]))

    say("timing the codec of the shared exchange")
    matrix, small_one = _in_torch(values), _in_torch(tiny)
    many = [TensorState.of(LowRank([(_TINY, _TINY)], [1]), small_one) for _ in range(_MANY)]
    shared_tensor = least(partial(_exchange, many, [small_one] * _MANY)) / _MANY
    # Two ranks of the factors, to separate the cost per column from the rest.
    narrow, wide = (
        TensorState.of(LowRank([(side, side)], [columns]), matrix) for columns in (_SMALL, _LARGE)
    )
    small, large = (per_element(partial(_exchange, [f], [matrix])) for f in (narrow, wide))
    column = max((large - small) / (_LARGE - _SMALL), _LEAST_S)
    bucket, copy = np.ones(_BUCKET, np.float32), np.ones(_BUCKET, np.float32)
    halved = TensorState.of(Dense([(side, side)]), matrix)
    return Rates(
        encode_s=per_element(lambda: codec.encode(values, state=state)),
        decode_s=max(one - add, _LEAST_S),
        add_s=add,
        pass_s=max(small - _SMALL * column, _LEAST_S),
        column_s=column,
        whole_s=per_element(partial(_exchange, [halved], [matrix])),
        # NumPy casts far slower than the frameworks, which cast at about memory bandwidth.
        cast_s=2 * per_element(values.copy),
        owners_s=per_element(partial(_cast_by_owners, settings.dtype, _in_torch(values))),
        bucket_s=PASSES * least(partial(np.copyto, copy, bucket)) / bucket.size,
        gather_tensor_s=gather_tensor,
        shared_tensor_s=shared_tensor,
    )


def fit_link(
    sizes: Sequence[int], seconds: Sequence[float], ranks: int, *, operation_s: float = 0.0
) -> Link:
    """Return the link on which all-reduces of two sizes took these seconds.

    sizes : bytes of a small and of a large all-reduce; their difference gives the bandwidth, the
        small one the latency
    operation_s : seconds of the small one that are not spent on messages

    >>> link = fit_link([4, 1_000_004], [0.001, 0.0145], 4)
    >>> round(link.bytes_per_s / 1e6)  # 1.5 MB moved in 13.5 ms
    111
    """
    if len(sizes) != 2 or len(seconds) != 2 or ranks < 2 or not sizes[0] < sizes[1]:
        raise CompressError(
            f"fit_link: sizes={list(sizes)!r}, seconds={list(seconds)!r}, ranks={ranks!r}; "
            "expected a small and a large size, a time for each, and two ranks or more"
        )
    moved = [wire_bytes("allreduce", size, ranks) for size in sizes]
    slope = max(seconds[1] - seconds[0], _LEAST_LINK_S) / (moved[1] - moved[0])
    latency = max(seconds[0] - operation_s - moved[0] * slope, 0.0) / (2 * (ranks - 1))
    return Link(1 / slope, latency_s=latency, operation_s=operation_s)


def _seconds(run: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    run()
    return clock() - start


def _exchange(tensors: list[TensorState], values: list[Array]) -> None:
    """Run an exchange of tensors of one method, in which all ranks have the same values."""
    rounds = exchange(tensors, values, StepOptions(_RANKS, 0))
    words = next(rounds)
    for _ in range(tensors[0].part.rounds - 1):
        words = rounds.send(words * _RANKS)
    try:
        rounds.send(words * _RANKS)
    except StopIteration:
        return


def _in_torch(values: Floats) -> Array:
    """Copy, to a torch tensor if torch is loaded, as the code for its gradients differs."""
    torch = sys.modules.get("torch")
    return values.copy() if torch is None else torch.from_numpy(values.copy())


def _cast_by_owners(dtype: DType, values: Array) -> None:
    """Run an exchange of casts, in which all ranks have the same values."""
    gradient = Gradient(None, tuple(values.shape), values)
    bucket = CastBucket(Cast(dtype), [gradient], ranks=_RANKS, rank=0, feedback=None, looks=False)
    means = bucket.reduce(bucket.begin())
    bucket.end(namespace(means).concat([means] * _RANKS))
