"""Predicts the cost of each exchange method for a model, before a machine is rented.

    >>> from sn_compress import Link, predict
    >>> from sn_compress.prediction.cost import layers
    >>> result = predict(layers("resnet50"), ranks=64, link=Link.of_gbit(10))
    >>> result.row("plain").ratio, round(result.row("LowRankCompression").ratio)
    (1.0, 100)

Sizes are those that codecs and exchange actually send; seconds come from the cost model of
`cost.py`, with codec rates from `rates.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import ceil
from typing import NamedTuple

import numpy as np

from ..allreduce.allocate import MOST, EnergyCurve, allocate, budget, words_of
from ..engine.hierarchy import Owners
from ..engine.payloads import Shares, shares_of
from ..errors import CompressError
from ..ops.casts import Cast
from ..ops.fixed_point import MAX_RANKS
from ..ops.products import cut
from ..settings import CompressionName, Settings
from ..text_table import text_table
from . import cost
from .cost import ALONE, Host, Layer, Link, Method, Rounds, Route, Step, break_even, step
from .rates import FREE, PASSES, Rates

LIMIT = 0.5  # points of accuracy: if more are lost, `advice` suggests a lower ratio
MARGIN = 0.02  # fraction of a step by which AutoCompression has to be faster than plain


class Lost(NamedTuple):
    """Points of accuracy lost with a compression on a net, at a ratio of received bytes."""

    compression: CompressionName
    net: str
    ratio: float
    points: float
    seeds: int


MEASURED = (
    Lost("LowRankCompression", "convolutional net", 50, 0.24, 3),
    Lost("LowRankCompression", "convolutional net", 150, 0.51, 3),
    Lost("LowRankCompression", "transformer", 50, 0.27, 3),
    Lost("LowRankCompression", "transformer", 150, 0.76, 6),
    Lost("LowRankCompression", "residual net", 20, 0.78, 2),
    Lost("LowRankCompression", "residual net", 50, 1.36, 2),
    Lost("AutoCompression", "residual net", 20, 0.47, 2),
    Lost("AutoCompression", "residual net", 50, 1.07, 2),
    Lost("FFTCompression", "convolutional net", 20, 0.28, 3),
    Lost("FFTCompression", "convolutional net", 50, 0.51, 6),
    Lost("FFTCompression", "transformer", 20, 0.37, 3),
    Lost("FFTCompression", "transformer", 50, 0.76, 6),
    Lost("FFTCompression", "convolutional net", 150, 1.47, 3),
    Lost("FFTCompression", "transformer", 150, 1.10, 3),
    Lost("FFTCompression", "net of a million parameters", 50, 0.81, 2),
    Lost("FFTCompression", "residual net", 20, 0.21, 2),
    Lost("FFTCompression", "residual net", 50, 0.91, 2),
)
"""Results for the nets in docs/accuracy.md; a test compares them with benchmarks/results."""


def worst(compression: CompressionName, ratio: float) -> Lost | None:
    """Return the largest loss at the highest measured ratio up to `ratio`; None without one."""
    at = [lost.ratio for lost in MEASURED if lost.compression == compression]
    near = max((measured for measured in at if measured <= ratio), default=None)
    losses = [lost for lost in MEASURED if (lost.compression, lost.ratio) == (compression, near)]
    return max(losses, key=lambda lost: lost.points, default=None)


def within(compression: CompressionName, points: float = LIMIT) -> float | None:
    """Return the largest measured ratio up to which no net lost more than `points`."""
    losses = [lost for lost in MEASURED if lost.compression == compression]
    ratios = sorted({lost.ratio for lost in losses})
    fine = [r for r in ratios if all(lost.points <= points for lost in losses if lost.ratio <= r)]
    return max(fine, default=None)


def advice(received: Mapping[CompressionName, float]) -> str:
    """Return a line per compression with its largest measured loss near a ratio; "" if none."""
    lines = []
    for name, ratio in received.items():
        lost = worst(name, ratio)
        if lost is None:
            continue
        line = f"{name}: {lost.points:g} points at {lost.ratio:g}x, {lost.net}"
        highest = within(name)
        if lost.points > LIMIT:
            # FFTCompression's setting is theta, which determines the ratio.
            at = "{:g}x" if name == "FFTCompression" else "ratio={:g}"
            line += f"; at most {LIMIT:g} at {at.format(highest)}" if highest else "; nothing below"
        lines.append(line)
    if not lines:
        return ""
    return "\n  ".join(["lost most in short trainings of small nets on 8 ranks:", *lines])


METHODS: dict[str, Method] = {
    "plain": "plain", "fp16": "fp16", "CastCompression": "cast", "LowRankCompression": "shared",
    "FFTCompression": "gather",
}  # fmt: skip
"""Names of the predicted methods, and how gradients are exchanged."""
BY_NODES = {f"{name} by nodes": method for name, method in METHODS.items() if name != "fp16"}
MOST_RANKS = 2**20  # for more ranks the sums of `consistency` do not fit an int64
_TOKEN_BYTES = 4  # size of the zero that Horovod all-reduces for each compressed tensor


@dataclass(frozen=True)
class Row:
    """The prediction for one method and the whole model.

    Attributes
    ----------
    method : one of METHODS or BY_NODES
    step : the predicted step
    ratio : float32 bytes over bytes that a rank passes to collectives
    speedup : seconds of the plain step over those of this one
    break_even_gbit, break_even_fp16_gbit : link rate in Gbit/s below which this method's step is
        faster than the plain one, and than fp16's
    tensors : number of tensors by method: small ones are sent plain
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
    """Rows in the order of METHODS, then BY_NODES if nodes have several ranks.

    auto : the method AutoCompression would choose where it supports casts, as in DDP
    impossible : the reasons why methods have no row
    """

    ranks: int
    link: Link
    elements: int
    rows: tuple[Row, ...]
    auto: str
    impossible: dict[str, str]

    def row(self, method: str) -> Row:
        """Return the row of a method; CompressError if it has none."""
        if (row_of := next((row for row in self.rows if row.method == method), None)) is None:
            known = ", ".join(row.method for row in self.rows)
            why = f"there is no row {method!r}; expected one of {known}"
            raise CompressError(self.impossible.get(method, why))
        return row_of

    def table(self) -> str:
        """Return the rows as text, with AutoCompression's choice, missing rows, and accuracy."""
        link = self.link
        rows = []
        for row in self.rows:
            of = row.step
            plain = "" if row.method == "plain" else gbit_text(row.break_even_gbit)
            half = "" if row.method in ("plain", "fp16") else gbit_text(row.break_even_fp16_gbit)
            rows.append(
                [
                    row.method, f"{1e3 * of.seconds:.1f}", f"{row.speedup:.2f}x",
                    f"{1e3 * of.codec_s:.1f}", f"{1e3 * of.exchange_s:.1f}",
                    f"{of.wire_bytes / 1e6:.2f}", f"{row.ratio:.1f}", plain, half,
                ]
            )  # fmt: skip
        nodes = ""
        if link.inside is not None:
            nodes = (
                f"; {self.ranks // link.gpus} nodes of {link.gpus} ranks, "
                f"{link.inside.bytes_per_s * 8e-9:g} Gbit/s inside, "
                f"all-reduces by {'trees' if link.tree else 'rings'}"
            )
        head = (
            "method", "ms a step", "speed-up", "codec ms", "exchange ms",
            "MB a node" if nodes else "MB on wire", "ratio", "break-even", "against fp16",
        )  # fmt: skip
        return "\n".join(
            [
                f"{self.elements:,} parameters, {self.ranks} ranks, {link.bytes_per_s * 8e-9:g} "
                f"Gbit/s, {1e6 * link.latency_s:g} us a message{nodes}",
                text_table(head, rows),
                f"AutoCompression comes to: {self.auto}",
                *(f"{method}: {why}" for method, why in self.impossible.items()),
                advice(self._received()),
            ]
        ).rstrip()

    def _received(self) -> dict[CompressionName, float]:
        """Return received bytes of the plain all-reduce over each compression's, as in `Lost`."""
        rows = {row.method.removesuffix(" by nodes"): row for row in self.rows}
        plain = rows["plain"].step.wire_bytes
        # A single rank, or node, receives nothing.
        ratios = {
            name: plain / row.step.wire_bytes if plain else row.ratio for name, row in rows.items()
        }
        if "LowRankCompression" in ratios:
            ratios["AutoCompression"] = ratios["LowRankCompression"]
        names: tuple[CompressionName, ...] = (
            "LowRankCompression", "AutoCompression", "FFTCompression"
        )  # fmt: skip
        return {name: ratios[name] for name in names if name in ratios}


def gbit_text(gbit: float) -> str:
    """Return a break-even as text.

    >>> gbit_text(3.21), gbit_text(8e4), gbit_text(8e-4)
    ('3.2 Gbit/s', 'any', 'none')
    """
    if gbit >= cost.FASTEST * 8e-9:
        return "any"
    return "none" if gbit <= cost.SLOWEST * 8e-9 else f"{gbit:.2g} Gbit/s"


def routes_of(
    method: Method, layers: Sequence[Layer], *, ranks: int, settings: Settings, rates: Rates
) -> list[Route]:
    """Return the route of each tensor of a model by one method: bytes and codec seconds."""
    if method == "plain":
        return [_plain(tensor, rates) for tensor in layers]
    if method == "fp16":
        half = (rates.cast_s + rates.bucket_s) / 2
        return [
            Route("fp16", (("allreduce", 2 * n),), (half * n, half * n), n)
            for n in (tensor.elements for tensor in layers)
        ]
    if method == "shared":
        return _shared(layers, ranks, settings, rates)
    if method == "cast":
        return [_cast(tensor, ranks, settings, rates) for tensor in layers]
    if method != "gather":
        raise CompressError(f"method={method!r}; expected one of {', '.join(METHODS)}")
    return _payloads(layers, ranks, settings, rates)


def routes_by_nodes(
    method: Method,
    layers: Sequence[Layer],
    *,
    nodes: int,
    gpus: int,
    settings: Settings,
    rates: Rates,
    host: Host = ALONE,
) -> list[Route]:
    """Return routes of a hierarchical exchange: the owners of tensors in nodes exchange them.

    Owners work in parallel, so the busiest determines the time: codec seconds, and bytes inside a
    node, are scaled by its share of all tensors. On cores shared by ranks it counts only as much as
    keeps the cores busy.
    """
    owners = Owners(gpus)
    # In the order of a run: gradients come from the last to the first.
    owner = {layer.name: owners.of(layer.name, layer.elements) for layer in reversed(layers)}

    def busiest_share(of: Sequence[float]) -> float:
        busy = [0.0] * gpus
        for tensor, load in zip(layers, of, strict=True):
            busy[owner[tensor.name]] += load
        return max(busy) / (sum(busy) or 1.0)

    between = routes_of(
        method, layers, ranks=nodes, settings=settings, rates=replace(rates, bucket_s=0.0)
    )
    inside = busiest_share([route.elements for route in between])
    codec = host.slower(busiest_share([sum(route.codec_s) for route in between]), 1 / gpus)
    routes = []
    for route in between:
        first, *later = (codec * seconds for seconds in route.codec_s)
        # All ranks copy the whole gradient into and out of a bucket; an owner sums its node's.
        half = route.elements * rates.bucket_s / 2
        added = host.slower(inside, 1 / gpus) * route.elements * gpus * rates.bucket_s / PASSES
        handed: Rounds = (("inside", ceil(4 * inside * route.elements)),)
        times = (half, added + first, *later, half)
        routes.append(Route(route.method, (*handed, *route.rounds, *handed), times, route.elements))
    return routes


def routes_by_method(
    layers: Sequence[Layer],
    *,
    ranks: int,
    gpus: int = 1,
    settings: Settings,
    rates: Rates,
    host: Host = ALONE,
) -> dict[str, list[Route]]:
    """Return routes by METHODS, and by BY_NODES if several nodes have several; see `_missing`."""
    nodes, missing = _nodes(ranks, gpus), _missing(ranks, gpus, rates)
    routes: dict[str, list[Route]] = {
        name: routes_of(method, layers, ranks=ranks, settings=settings, rates=rates)
        for name, method in METHODS.items()
        if name not in missing
    }
    for name, method in BY_NODES.items() if nodes else ():
        if name not in missing:
            routes[name] = routes_by_nodes(
                method, layers, nodes=nodes, gpus=gpus, settings=settings, rates=rates, host=host
            )  # fmt: skip
    return routes


def _nodes(ranks: int, gpus: int) -> int:
    """Return the number of nodes of several ranks; 0 unless there are at least two."""
    return ranks // gpus if gpus > 1 and ranks > gpus else 0


def _missing(ranks: int, gpus: int, rates: Rates) -> dict[str, str]:
    """Return the reasons why methods have no routes."""
    nodes = _nodes(ranks, gpus)
    missing = {
        name: f"no sum is of {many:,} ranks; expected {MAX_RANKS:,} or fewer"
        for name, many in (("LowRankCompression", ranks), ("LowRankCompression by nodes", nodes))
        if many > MAX_RANKS
    }
    if rates != FREE and not rates.owners_s:
        why = "its codec is not among these rates; measure it, or count none"
        missing["CastCompression"] = why
        if nodes:
            missing["CastCompression by nodes"] = why
    return missing


def _plain(tensor: Layer, rates: Rates) -> Route:
    half = tensor.elements * rates.bucket_s / 2
    return Route("plain", (("allreduce", 4 * tensor.elements),), (half, half), tensor.elements)


def _in_bucket(
    tensor: Layer, rates: Rates, of_each: float, times: Sequence[float]
) -> tuple[float, ...]:
    """Add the copies into and out of a bucket, and `of_each` seconds per tensor, to codec times."""
    half = (tensor.elements * rates.bucket_s + of_each) / 2
    return (times[0] + half, *times[1:-1], times[-1] + half)


def _cast(tensor: Layer, ranks: int, settings: Settings, rates: Rates) -> Route:
    """Return the route of a cast: an all-to-all and a gather; see engine/casts.py."""
    if not settings.compresses(tensor.shape):
        return _plain(tensor, rates)
    cast, n = Cast(settings.dtype), tensor.elements
    size = cast.nbytes(cast.padded(n))
    rounds: Rounds = (
        ("alltoall", ceil(size * (ranks - 1) / ranks)),
        ("allgather", ceil(size / ranks)),
    )
    # The three parts were not timed separately: begin, reduce and end count equally.
    times = _in_bucket(tensor, rates, 0.0, [n * rates.owners_s / 3] * 3)
    return Route("cast", rounds, times, n)


def _payloads(layers: Sequence[Layer], ranks: int, settings: Settings, rates: Rates) -> list[Route]:
    """Return routes of payloads, gathered or sent to block owners, for an average rank.

    See engine/payloads.py.
    """
    codec = settings.codec(threads=1)
    sizes = tuple(layer.elements for layer in layers if settings.compresses(layer.shape))
    shares = shares_of(codec, sizes, ranks) if settings.scatter and sizes else None
    owned = iter(_bytes_by_owners(shares, len(sizes)) if shares else ())
    routes = []
    for tensor in layers:
        if not settings.compresses(tensor.shape):
            routes.append(_plain(tensor, rates))
            continue
        n = tensor.elements
        if shares is None:
            size = codec.payload_bytes(n) + _TOKEN_BYTES
            # In a gather each rank adds the payloads of all.
            after = n * (rates.decode_s + ranks * rates.add_s)
            both = n * rates.encode_s, after
            taken = _in_bucket(tensor, rates, rates.gather_tensor_s, both)
            routes.append(Route("gather", (("allgather", size),), taken, n))
            continue
        parts, means = next(owned)
        # A rank owns an equal part of all blocks, which it encodes only as a mean.
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
    """Return the bytes that an average rank sends to owners, and as an owner, for each tensor."""
    ranks, parts, means = len(shares.pieces), [0] * tensors, [0] * tensors
    for piece in (piece for of_owner in shares.pieces for piece in of_owner):
        parts[piece.tensor] += shares.parts.payload_bytes(piece.elements)
        means[piece.tensor] += shares.means.payload_bytes(piece.elements)
    # A rank sends no part to itself, and owns an equal share.
    return [
        (ceil(part * (ranks - 1) / ranks), ceil(mean / ranks))
        for part, mean in zip(parts, means, strict=True)
    ]


def _shared(layers: Sequence[Layer], ranks: int, settings: Settings, rates: Rates) -> list[Route]:
    """Return routes with the sizes that would be chosen if all directions had the same energy.

    There are no gradients here; real ones lead to other sizes, within the same budget.
    """
    curves = {}
    taken = [tensor for tensor in layers if settings.compresses(tensor.shape)]
    for tensor in taken:
        most = min(*cut(tensor.shape), MOST)
        curves[tensor.name] = EnergyCurve(tensor.shape, np.full(most, 1 / most))
    elements, all_elements = (sum(t.elements for t in tensors) for tensors in (taken, layers))
    chosen = allocate(curves, budget(elements, all_elements - elements, settings.ratio), ranks)
    routes = []
    for tensor in layers:
        if tensor.name not in chosen:
            routes.append(_plain(tensor, rates))
            continue
        rank, n = chosen[tensor.name], tensor.elements  # rank of the factors; 0 is whole
        words = words_of(curves[tensor.name].shape, rank, ranks)
        if rank == 0:
            half = n * rates.whole_s / 2
            times: tuple[float, ...] = (half, half)
        else:
            # Of the four products with the factors, one comes before the rounds, one between them,
            # and two, for the residual and the mean, after.
            quarter = n * (rates.pass_s + rank * rates.column_s) / 4
            times = (quarter, quarter, 2 * quarter)
        sent: Rounds = tuple(("allreduce", 4 * word) for word in words)
        codec_s = _in_bucket(tensor, rates, rates.shared_tensor_s, times)
        routes.append(Route("shared", sent, codec_s, n))
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
    host: Host = ALONE,
) -> Prediction:
    """Predict the seconds of a step by each method.

    Parameters
    ----------
    layers : the parameters, in the order of the forward pass
    ranks : number of ranks
    link : between ranks, or between nodes of several ranks
    settings : of FFTCompression (gather; with three or more ranks through block owners) and
        LowRankCompression (shared); None: the defaults
    rates : codec seconds, from `measure_rates`; by default zero, which predicts from bytes alone
    compute_s, overlap, host : see `cost.step`
    """
    settings = settings or Settings()
    if ranks < 1 or not layers or ranks % link.gpus:
        raise CompressError(
            f"predict: ranks={ranks!r}, {link.gpus} a node, {len(layers)} layers; expected one "
            "layer or more, and nodes of as many ranks each, one or more"
        )
    if ranks > MOST_RANKS:
        raise CompressError(f"predict: {ranks:,} ranks; expected {MOST_RANKS:,} ranks or fewer")
    by_method = routes_by_method(
        layers, ranks=ranks, gpus=link.gpus, settings=settings, rates=rates, host=host
    )  # fmt: skip
    of_step = partial(step, ranks=ranks, compute_s=compute_s, overlap=overlap, host=host)

    @cache  # bisections of all rows evaluate plain and fp16, partly on the same links
    def seconds(name: str, at: Link) -> float:
        return of_step(by_method[name], link=at).seconds

    elements = sum(tensor.elements for tensor in layers)
    rows = []
    for name, routes in by_method.items():
        of = of_step(routes, link=link)
        limits = [
            break_even(partial(seconds, base), partial(seconds, name), link=link)
            for base in ("plain", "fp16")
        ]
        rows.append(
            Row(
                method=name,
                step=of,
                ratio=4 * elements / of.sent_bytes if of.sent_bytes else 1.0,
                speedup=seconds("plain", link) / of.seconds if of.seconds else 1.0,
                break_even_gbit=8e-9 * limits[0],
                break_even_fp16_gbit=8e-9 * limits[1],
                tensors=dict(Counter(route.method for route in routes)),
            )
        )
    # AutoCompression is not hierarchical.
    choices = [name for name in ("LowRankCompression", "CastCompression") if name in by_method]
    auto = min(choices, key=lambda name: seconds(name, link), default="plain")
    if seconds(auto, link) > (1 - MARGIN) * seconds("plain", link):
        auto = "plain"
    missing = _missing(ranks, link.gpus, rates)
    return Prediction(ranks, link, elements, tuple(rows), auto, missing)
