"""What each way of exchanging gradients would cost a model, before a machine is rented.

    >>> from sn_compress import Link, predict
    >>> from sn_compress.prediction.layers import layers
    >>> result = predict(layers("resnet50"), ranks=64, link=Link.of_gbit(10))
    >>> result.row("plain").ratio, round(result.row("shared").ratio)
    (1.0, 100)

Sizes are those that the codecs and the exchange really send; seconds are the model of `cost.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from ..base.errors import CompressError
from ..base.text_table import text_table
from ..codecs.gather import wire_bytes
from ..engine.scattered import Shares, shares_of
from ..ops.linear.matrices import cut
from ..settings import CompressionName, Settings
from ..sums.choose import MOST, Curve, allocate, budget, words_of
from .accuracy import advice
from .cost import Link, Method, Rounds, Route, Step, break_even, choose, step
from .layers import Layer
from .rates import FREE, Rates

Seconds = tuple[float, ...]
METHODS: tuple[Method, ...] = ("plain", "fp16", "shared", "gather")
_TOKEN_BYTES = 4  # Horovod's own all-reduce beside each compressed tensor


@dataclass(frozen=True)
class Row:
    """One method for the whole model; `auto` takes the fastest one for each tensor.

    Attributes
    ----------
    method : of METHODS, or "auto"
    step : the predicted step
    ratio : float32 bytes over bytes a rank brings to the collectives
    speedup : seconds of plain's step over those of this one
    break_even_gbit, break_even_fp16_gbit : link below which this method's step is faster than
        plain's, and than fp16's, in Gbit/s
    tensors : how many tensors go by each method
    """

    method: str
    step: Step
    ratio: float
    speedup: float
    break_even_gbit: float
    break_even_fp16_gbit: float
    tensors: dict[str, int]


@dataclass(frozen=True)
class Prediction:
    """Rows in the order of METHODS, then "auto"."""

    ranks: int
    link: Link
    elements: int
    rows: tuple[Row, ...]

    def row(self, method: str) -> Row:
        """The row of a method."""
        return next(row for row in self.rows if row.method == method)

    def table(self) -> str:
        """The rows as people read them."""
        gbit = self.link.bytes_per_s * 8 / 1e9
        rows = []
        for row in self.rows:
            of = row.step
            plain, half = (
                "" if row.method in same else gbit_text(limit)
                for same, limit in (
                    (("plain",), row.break_even_gbit),
                    (("plain", "fp16"), row.break_even_fp16_gbit),
                )
            )
            rows.append(
                [
                    row.method, f"{1e3 * of.seconds:.1f}", f"{row.speedup:.2f}x",
                    f"{1e3 * of.codec_s:.1f}", f"{1e3 * of.exchange_s:.1f}",
                    f"{of.wire_bytes / 1e6:.2f}", f"{row.ratio:.1f}", plain, half,
                ]
            )  # fmt: skip
        chosen = ", ".join(f"{n} {name}" for name, n in self.rows[-1].tensors.items())
        return (
            f"{self.elements:,} parameters, {self.ranks} ranks, {gbit:g} Gbit/s, "
            f"{1e6 * self.link.latency_s:g} us a message\n{text_table(_HEAD, rows)}\n"
            f"auto takes, of {sum(self.rows[-1].tensors.values())} tensors: {chosen}\n"
            f"{advice(self._received())}"
        ).rstrip()

    def _received(self) -> dict[CompressionName, float]:
        """Received bytes of plain's all-reduce over those of each compression."""
        shared, gather = (self._received_by(method) for method in ("shared", "gather"))
        return {
            "LowRankCompression": shared, "AutoCompression": shared, "FFTCompression": gather,
        }  # fmt: skip

    def _received_by(self, method: str) -> float:
        plain, ours = (self.row(name).step.wire_bytes for name in ("plain", method))
        # One rank receives nothing.
        return plain / ours if ours else self.row(method).ratio


_HEAD = (
    "method", "ms a step", "speed-up", "codec ms", "exchange ms", "MB on wire", "ratio",
    "break-even", "against fp16",
)  # fmt: skip
_SLOWEST, _FASTEST = 1e5, 1e13  # bytes per second, between which break-even is looked for


def gbit_text(gbit: float) -> str:
    """A break-even as people read it.

    >>> gbit_text(3.21), gbit_text(8e4), gbit_text(8e-4)
    ('3.2 Gbit/s', 'any', 'none')
    """
    if gbit >= _FASTEST * 8e-9:
        return "any"
    return "none" if gbit <= _SLOWEST * 8e-9 else f"{gbit:.2g} Gbit/s"


def routes_of(
    method: Method, layers: Sequence[Layer], *, ranks: int, settings: Settings, rates: Rates
) -> list[Route]:
    """How each tensor of a model travels by one method, in bytes and seconds of codec."""
    if method == "plain":
        return [_plain(tensor, rates) for tensor in layers]
    if method == "fp16":
        half = (rates.cast_s + rates.bucket_s) / 2
        return [
            Route(
                "fp16",
                (("allreduce", 2 * t.elements),),
                (half * t.elements, half * t.elements),
                t.elements,
            )
            for t in layers
        ]
    if method == "shared":
        return _shared(layers, ranks, settings, rates)
    if method != "gather":
        raise CompressError(f"method={method!r}; expected one of {', '.join(METHODS)}")
    return _payloads(layers, ranks, settings, rates)


def _plain(tensor: Layer, rates: Rates) -> Route:
    half = tensor.elements * rates.bucket_s / 2
    return Route("plain", (("allreduce", 4 * tensor.elements),), (half, half), tensor.elements)


def _in_bucket(tensor: Layer, rates: Rates, of_each: float, times: Sequence[float]) -> Seconds:
    """Seconds of a codec, with those of the bucket, before and after, and for being a tensor."""
    half = (tensor.elements * rates.bucket_s + of_each) / 2
    return (times[0] + half, *times[1:-1], times[-1] + half)


def _payloads(layers: Sequence[Layer], ranks: int, settings: Settings, rates: Rates) -> list[Route]:
    """Gathered, or by way of the blocks' owners as `scattered.py` has it: of an average rank."""
    codec = settings.codec(threads=1)
    sizes = tuple(it.elements for it in layers if settings.compresses(it.shape))
    shares = shares_of(codec, sizes, ranks) if settings.scatter and sizes else None
    owned = iter(_bytes_by_owners(shares, len(sizes)) if shares else ())
    routes = []
    for tensor in layers:
        if not settings.compresses(tensor.shape):
            routes.append(_plain(tensor, rates))
            continue
        n = tensor.elements
        if shares is None:
            size = wire_bytes(codec.payload_bytes(n)) + _TOKEN_BYTES
            after = n * (rates.decode_s + ranks * rates.add_s)
            both = n * rates.encode_s, after
            taken = _in_bucket(tensor, rates, rates.gather_tensor_s, both)
            routes.append(Route("gather", (("allgather", size),), taken, n))
            continue
        parts, means = next(owned)
        # Its own piece, an equal part of all, a rank encodes once: as a mean.
        read = rates.decode_s + (ranks - 1) * rates.add_s
        times = (
            n * rates.encode_s * (ranks - 1) / ranks,
            n * (read + rates.encode_s) / ranks,
            n * (rates.decode_s + rates.add_s),
        )
        rounds: Rounds = (("alltoall", parts + _TOKEN_BYTES), ("allgather", means))
        taken = _in_bucket(tensor, rates, rates.gather_tensor_s, times)
        routes.append(Route("gather", rounds, taken, n))
    return routes


def _bytes_by_owners(shares: Shares, tensors: int) -> list[tuple[int, int]]:
    """Of each tensor what an average rank sends to the owners, and what it makes as one of them."""
    ranks, parts, means = len(shares.pieces), [0] * tensors, [0] * tensors
    for piece in (it for own in shares.pieces for it in own):
        parts[piece.tensor] += shares.parts.payload_bytes(piece.elements)
        means[piece.tensor] += shares.means.payload_bytes(piece.elements)
    return [
        (ceil(sent * (ranks - 1) / ranks), ceil(made / ranks))
        for sent, made in zip(parts, means, strict=True)
    ]


def _shared(layers: Sequence[Layer], ranks: int, settings: Settings, rates: Rates) -> list[Route]:
    """With the ranks that would be chosen if every direction were worth the same."""
    curves = {}
    taken = [tensor for tensor in layers if settings.compresses(tensor.shape)]
    for tensor in taken:
        most = min(*cut(tensor.shape), MOST)
        curves[tensor.name] = Curve(tensor.shape, np.full(most, 1 / most))
    elements, all_elements = (sum(t.elements for t in tensors) for tensors in (taken, layers))
    chosen = allocate(curves, budget(elements, all_elements - elements, settings.ratio), ranks)
    routes = []
    for tensor in layers:
        if tensor.name not in chosen:
            routes.append(_plain(tensor, rates))
            continue
        rank, n = chosen[tensor.name], tensor.elements
        words = words_of(curves[tensor.name].shape, rank, ranks)
        if rank == 0:
            half = n * rates.whole_s / 2
            times: tuple[float, ...] = (half, half)
        else:
            # Of four products with the factors, one is before the rounds and one between them.
            quarter = n * (rates.pass_s + rank * rates.column_s) / 4
            times = (quarter, quarter, 2 * quarter)
        sent: Rounds = tuple(("allreduce", 4 * it) for it in words)
        whole = _in_bucket(tensor, rates, rates.shared_tensor_s, times)
        routes.append(Route("shared", sent, whole, n))
    return routes


def predict(
    layers: Sequence[Layer],
    *,
    ranks: int,
    link: Link,
    settings: Settings | None = None,
    rates: Rates = FREE,
    compute_s: float = 0.0,
    overlap: bool = False,
) -> Prediction:
    """Seconds of a step by each method; see `cost.step` for compute_s and overlap.

    Parameters
    ----------
    layers : the parameters, in the order of the forward pass
    settings : of FFTCompression (gather; among three ranks or more by way of the blocks' owners)
        and LowRankCompression (shared); None: the defaults
    rates : seconds of the codec, from `measure_rates`; by default it takes none, which is what
        bytes alone would give
    """
    settings = settings or Settings()
    if ranks < 1 or not layers:
        raise CompressError(f"predict: ranks={ranks!r}, {len(layers)} layers; expected one or more")

    def at(routes: Sequence[Route], place: Link) -> Step:
        return step(routes, ranks=ranks, link=place, compute_s=compute_s, overlap=overlap)

    def seconds(routes: Sequence[Route]) -> Callable[[Link], float]:
        return lambda place: at(routes, place).seconds

    found: dict[str, Sequence[Route]] = {
        method: routes_of(method, layers, ranks=ranks, settings=settings, rates=rates)
        for method in METHODS
    }
    found["auto"] = choose(found, ranks=ranks, link=link, compute_s=compute_s, overlap=overlap)
    elements = sum(tensor.elements for tensor in layers)
    plain_s = at(found["plain"], link).seconds
    rows = []
    for name, routes in found.items():
        of = at(routes, link)
        # On another link auto would choose anew; its break-even is that of the choice on this one.
        limits = [
            break_even(
                seconds(found[base]), seconds(routes), link=link, low=_SLOWEST, high=_FASTEST
            )
            for base in ("plain", "fp16")
        ]
        rows.append(
            Row(
                method=name,
                step=of,
                ratio=4 * elements / of.sent_bytes,
                speedup=plain_s / of.seconds if of.seconds else 1.0,
                break_even_gbit=8e-9 * limits[0],
                break_even_fp16_gbit=8e-9 * limits[1],
                tensors=dict(Counter(route.method for route in routes)),
            )
        )
    return Prediction(ranks, link, elements, tuple(rows))
