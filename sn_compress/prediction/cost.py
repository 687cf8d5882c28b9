"""Cost model: seconds of a step from bytes, a link, a codec and the backward pass.

A ratio of 100 is not a speed-up of 100: what a rank sends is not what it receives, every collective
has a latency, and the codec takes time. This is the alpha-beta model of all three (Hockney 1994;
rings as in Thakur, Rabenseifner, Gropp 2005), with a simple schedule in which links, the codec and
the backward pass process buckets. docs/cost.md derives the formulas.

Pure arithmetic: `predict.py` and `tuning.py` pass in the measurements.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

from ..errors import CompressError


@dataclass(frozen=True)
class Layer:
    """One parameter: weights as (out, in, ...), as in torch."""

    name: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def layers(model: str) -> list[Layer]:
    """Return the parameters of a model; CompressError, listing the models, for other names.

    >>> sum(layer.elements for layer in layers("resnet50"))
    25557032
    """
    if model not in MODELS:
        raise CompressError(f"no layers of {model!r}; known: {', '.join(sorted(MODELS))}")
    return [Layer(name, shape) for name, shape in MODELS[model]()]


_Shapes = Iterator[tuple[str, tuple[int, ...]]]


def _weighted(name: str, *shape: int) -> _Shapes:
    yield f"{name}.weight", shape
    yield f"{name}.bias", shape[:1]


def _alexnet() -> _Shapes:
    """Krizhevsky, Sutskever, Hinton 2012, without its split over two GPUs."""
    convolutions = ((96, 3, 11), (256, 96, 5), (384, 256, 3), (384, 384, 3), (256, 384, 3))
    for number, (out, into, side) in enumerate(convolutions, 1):
        yield from _weighted(f"conv{number}", out, into, side, side)
    for number, (out, into) in enumerate(((4096, 9216), (4096, 4096), (1000, 4096)), 6):
        yield from _weighted(f"fc{number}", out, into)


def _vgg16() -> _Shapes:
    """Simonyan, Zisserman 2015, configuration D."""
    into, number = 3, 0
    for out, repeat in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(repeat):
            number += 1
            yield from _weighted(f"conv{number}", out, into, 3, 3)
            into = out
    for out, into in ((4096, 25088), (4096, 4096), (1000, 4096)):
        number += 1
        yield from _weighted(f"fc{number}", out, into)


def _resnet50() -> _Shapes:
    """He, Zhang, Ren, Sun 2016: bottlenecks of 1x1, 3x3, 1x1, each with a batch norm."""

    def convolution(name: str, out: int, into: int, side: int) -> _Shapes:
        yield f"{name}.weight", (out, into, side, side)
        yield from _weighted(f"{name}.norm", out)

    yield from convolution("conv1", 64, 3, 7)
    into = 64
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), 1):
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            yield from convolution(f"{name}.conv1", width, into, 1)
            yield from convolution(f"{name}.conv2", width, width, 3)
            yield from convolution(f"{name}.conv3", 4 * width, width, 1)
            if block == 0:
                yield from convolution(f"{name}.down", 4 * width, into, 1)
            into = 4 * width
    yield from _weighted("fc", 1000, 2048)


def _gpt2_small() -> _Shapes:
    """Radford et al. 2019: 12 layers of width 768, output tied to the token embedding."""
    width = 768
    yield "tokens", (50257, width)
    yield "places", (1024, width)
    for block in range(12):
        name = f"block{block}"
        yield from _weighted(f"{name}.norm1", width)
        yield from _weighted(f"{name}.attention.into", 3 * width, width)
        yield from _weighted(f"{name}.attention.out", width, width)
        yield from _weighted(f"{name}.norm2", width)
        yield from _weighted(f"{name}.up", 4 * width, width)
        yield from _weighted(f"{name}.down", width, 4 * width)
    yield from _weighted("norm", width)


MODELS = {
    "alexnet": _alexnet,
    "gpt2-small": _gpt2_small,
    "resnet50": _resnet50,
    "vgg16": _vgg16,
}
"""Name -> its parameters."""


BUCKET_ELEMENTS = 25 * 2**20 // 4  # DDP's default bucket size; ours are as large
FUSED_BYTES = 128 * 2**20  # Horovod's default fusion threshold
BACKWARD = 2 / 3  # share of a step's computation: two products for each in the forward pass
Method = Literal["plain", "fp16", "shared", "gather", "cast"]
# "inside": to the owners in a node, or from them; its bytes are those of the largest owner.
Collective = Literal["allreduce", "allgather", "alltoall", "inside"]
Rounds = tuple[tuple[Collective, int], ...]
_Worker = Literal["codec", "link", "inside"]
SLOWEST, FASTEST = 1e5, 1e13  # bytes per second: range in which a break-even is searched


@dataclass(frozen=True)
class Link:
    """The connection of each rank to the others, or of each node of several ranks to other nodes.

    Attributes
    ----------
    bytes_per_s : in each direction
    latency_s : of one message from a rank to the next
    operation_s : for negotiating one collective before it begins
    gpus : number of ranks in a node, which share the link, and are consecutive in a ring
    inside : link from each rank to the others of its node
    tree : all-reduces use two trees of nodes, as NCCL's do, instead of a ring: as many bytes in
        2 log2(nodes) messages
    """

    bytes_per_s: float
    latency_s: float = 50e-6
    operation_s: float = 1e-3
    gpus: int = 1
    inside: Link | None = None
    tree: bool = False

    def __post_init__(self) -> None:
        seconds = self.latency_s, self.operation_s
        if not (self.bytes_per_s > 0 and all(0 <= value < math.inf for value in seconds)):
            raise CompressError(f"{self}; expected bytes_per_s above 0 and no negative seconds")
        if self.gpus < 1 or (self.gpus > 1) != (self.inside is not None):
            raise CompressError(
                f"Link: gpus={self.gpus!r}, inside={self.inside}; expected one or more, and a link "
                "inside a node where it has several"
            )

    @classmethod
    def of_gbit(cls, gbit: float, **options: Any) -> Link:
        """Return a link of `gbit` Gbit/s (1e9 bits).

        >>> Link.of_gbit(10).bytes_per_s
        1250000000.0
        """
        return cls(gbit * 1e9 / 8, **options)


INSIDE = {"nvlink": Link(450e9, latency_s=3.4e-6), "pcie": Link(31.5e9, latency_s=5.7e-6)}
"""Links inside a node by name; specified, not measured. Bandwidths are those of an H100's NVLink
each way (18 links of 25 GB/s: NVIDIA's data sheet) and of 16 lanes of PCIe 4.0 (16 GT/s, 128 bits
in 130); latencies per hop in a ring are those in NCCL's tuning model (src/graph/tuning.cc)."""


@dataclass(frozen=True)
class Host:
    """Cores shared by the ranks of one machine, on which they compute, encode and move bytes.

    Attributes
    ----------
    cores, ranks : of the machine, which comprises one or more nodes of a link
    move_s, sum_s : CPU seconds to send and receive a byte; sum_s in an all-reduce, which also adds
    """

    cores: int
    ranks: int
    move_s: float = 0.0
    sum_s: float = 0.0

    def __post_init__(self) -> None:
        if min(self.cores, self.ranks) < 1 or min(self.move_s, self.sum_s) < 0:
            raise CompressError(f"{self}; expected a core and a rank or more, no negative seconds")

    @property
    def share(self) -> float:
        """Seconds a rank takes for one core-second of work while all ranks work."""
        return max(1.0, self.ranks / self.cores)

    def slower(self, busiest: float, mean: float) -> float:
        """Return the amount of unequal work that determines the time; times `share`, in seconds.

        While the busiest rank of a node is working, the others leave it their cores.
        """
        return max(busiest / self.share, mean)

    def moves_s(self, collective: Collective, nbytes: float) -> float:
        """Return the seconds of all cores for each rank to send and receive `nbytes`."""
        of_byte = self.sum_s if collective == "allreduce" else self.move_s
        return self.ranks * nbytes * of_byte / self.cores


ALONE = Host(cores=2**30, ranks=1)
"""Each rank has more cores than it can use, and network cards move bytes without them."""


@dataclass(frozen=True)
class Route:
    """The exchange of one tensor by one method.

    Attributes
    ----------
    method : tensors with the same method are fused
    rounds : the collective of each round, and the bytes that this rank passes to it
    codec_s : seconds of this rank's codec before the first round, between rounds, after the last
    elements : of the gradient; 0 for one that has a separate bucket
    """

    method: Method
    rounds: Rounds
    codec_s: tuple[float, ...]
    elements: int = 0

    def __post_init__(self) -> None:
        if len(self.codec_s) != len(self.rounds) + 1:
            raise CompressError(
                f"Route: {len(self.codec_s)} codec times for {len(self.rounds)} rounds; expected "
                "one more than rounds"
            )

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank passes to collectives, except inside a node (uncompressed)."""
        return sum(size for collective, size in self.rounds if collective != "inside")

    @property
    def by_nodes(self) -> bool:
        """Whether gradients are first summed within a node, then exchanged between owners."""
        return self.rounds[0][0] == "inside"

    def on(self, ranks: int, link: Link) -> list[tuple[Collective, int, int, Link]]:
        """Return the rounds, each with the number of participating ranks and their link."""
        if not self.by_nodes:
            return [(kind, size, ranks, link) for kind, size in self.rounds]
        first, *exchanged, last = self.rounds
        nodes, between = ranks // link.gpus, replace(link, gpus=1, inside=None)
        exchanges = [(kind, size, nodes, between) for kind, size in exchanged]
        return [(*first, ranks, link), *exchanges, (*last, ranks, link)]

    def moved(self, ranks: int, link: Link) -> list[float]:
        """Return the bytes an average rank sends in each round, within its node or out of it."""
        rounds = self.on(ranks, link)
        if not self.by_nodes:
            return [wire_bytes(kind, size, n) for kind, size, n, _ in rounds]
        # All ranks of a node send their gradients, in float32, and receive the means; an exchange
        # between owners is divided among them.
        handed = 4 * self.elements * (link.gpus - 1) / link.gpus
        sent = [wire_bytes(kind, size, n) / link.gpus for kind, size, n, _ in rounds[1:-1]]
        return [handed, *sent, handed]

    def wire_bytes(self, ranks: int, gpus: int = 1) -> float:
        """Return the bytes that leave this rank, or its node; as many arrive."""
        if self.by_nodes:
            ranks, gpus = ranks // gpus, 1
        return sum(wire_bytes(collective, size, ranks, gpus) for collective, size in self.rounds)


@dataclass(frozen=True)
class Event:
    """A pass, or the work of the codec or a link on a bucket, in seconds from the step's start.

    `tensor` is the index of the bucket's first tensor, None for passes.
    """

    what: Literal["forward", "backward", "codec", "link", "inside"]
    tensor: int | None
    start: float
    end: float


@dataclass(frozen=True)
class Step:
    """A predicted step.

    Attributes
    ----------
    seconds : of the whole step
    compute_s, codec_s, exchange_s : its parts, each without overlap
    cores_s : seconds in which all cores of a host are busy, which overlap cannot hide
    wire_bytes : bytes that leave each rank, or each node if nodes have several ranks
    sent_bytes : bytes that a rank passes to collectives
    events : ordered by start
    """

    seconds: float
    compute_s: float
    codec_s: float
    exchange_s: float
    cores_s: float
    wire_bytes: float
    sent_bytes: int
    events: tuple[Event, ...]


Seconds = Callable[[Link], float]


def wire_bytes(collective: Collective, size: float, ranks: int, gpus: int = 1) -> float:
    """Return the bytes that leave a node of `gpus` ranks that each pass `size` bytes.

    In an all-to-all these are for the other ranks, a part for each. A ring leaves each node once.

    >>> [wire_bytes(kind, 800, 8) for kind in ("allreduce", "allgather", "alltoall")]
    [1400.0, 5600, 800.0]
    >>> [wire_bytes(kind, 700, 8, gpus=4) for kind in ("allreduce", "allgather", "alltoall")]
    [1225.0, 4900, 1600.0]
    """
    if collective == "inside" or ranks == gpus:
        return 0.0
    if collective == "alltoall":  # of ranks - 1 others, ranks - gpus are on other nodes
        return gpus * size * (ranks - gpus) / (ranks - 1)
    return 2 * (ranks - 1) / ranks * size if collective == "allreduce" else (ranks - 1) * size


def latency_s(collective: Collective, ranks: int, link: Link) -> float:
    """Return the seconds of a collective without bytes.

    Hops between and inside nodes are counted as in NCCL's tuning model (tuning.cc).
    """
    if ranks == 1:
        return 0.0
    # A ring through all ranks has one hop from each node to the next; an all-reduce goes around
    # twice.
    nodes, times = ranks // link.gpus, 2 if collective == "allreduce" else 1
    between, within = times * (nodes - 1), times * (ranks - nodes)
    if collective == "allreduce" and link.tree:
        between, within = 2 * (nodes - 1).bit_length(), 2 * (link.gpus - 1)
    elif collective == "alltoall":
        between, within = ranks - link.gpus, link.gpus - 1
    elif collective == "inside":
        between, within = 0, link.gpus - 1
    inside = link.inside.latency_s if link.inside else 0.0
    return link.operation_s + between * link.latency_s + within * inside


def transfer_s(collective: Collective, size: float, ranks: int, link: Link) -> float:
    """Return the seconds for a collective's bytes to pass the slower of a node's links."""
    seconds = wire_bytes(collective, size, ranks, link.gpus) / link.bytes_per_s
    if link.inside is None:
        return seconds
    # Inside a node, a ring carries as many bytes as between nodes, past each rank.
    inside = wire_bytes(collective, size, ranks)
    if collective == "inside":  # what the others of its node send to an owner, or vice versa
        inside = (link.gpus - 1) * size
    elif collective == "alltoall":
        inside *= (link.gpus - 1) / (ranks - 1)
    return max(seconds, inside / link.inside.bytes_per_s)


def collective_s(collective: Collective, size: float, ranks: int, link: Link) -> float:
    """Return the seconds of a collective to which each rank passes `size` bytes."""
    return latency_s(collective, ranks, link) + transfer_s(collective, size, ranks, link)


def latencies_s(routes: Sequence[Route], ranks: int, link: Link) -> float:
    """Return the seconds of all collectives of a step if they carried no bytes.

    Tensors of one bucket, method and round share a collective. Those with separate buckets are
    fused with others of the same method, up to FUSED_BYTES.
    """
    rounds: dict[tuple[str, int, Collective], int] = {}
    bucketed = 0.0
    for _, _, route in _buckets(routes):
        if route.elements:
            bucketed += sum(latency_s(kind, n, at) for kind, _, n, at in route.on(ranks, link))
            continue
        for number, (collective, size) in enumerate(route.rounds):
            key = route.method, number, collective
            rounds[key] = rounds.get(key, 0) + size
    return bucketed + sum(
        math.ceil(size / FUSED_BYTES) * latency_s(collective, ranks, link)
        for (_, _, collective), size in rounds.items()
    )


def step(
    routes: Sequence[Route],
    *,
    ranks: int,
    link: Link,
    compute_s: float = 0.0,
    overlap: bool = False,
    host: Host = ALONE,
) -> Step:
    """Predict a training step.

    Parameters
    ----------
    routes : one for each tensor, in the order of the forward pass
    compute_s : forward and backward pass together
    overlap : codec and link work during the backward pass, whose gradients become ready at a
        uniform rate, from the last tensor to the first; otherwise they begin when it is over
    host : the cores that ranks share; codec_s of routes is then for an unshared core, and compute_s
        for all ranks at once

    Gradients travel in buckets: those with the same method and number of rounds together, when the
    last of them is ready. Codec and links may work on different buckets at the same time. In a
    hierarchical exchange, means are sent inside a node when all buckets have been exchanged.
    """
    if not 0 <= compute_s < math.inf:
        raise CompressError(f"compute_s={compute_s!r}; expected seconds of both passes, 0 or more")
    forward = (1 - BACKWARD) * compute_s
    events = [Event("forward", None, 0.0, forward), Event("backward", None, forward, compute_s)]
    jobs = _buckets(routes)
    stages = [_stages(route, ranks, link, host) for _, _, route in jobs]
    free = {"codec": 0.0, "link": 0.0, "inside": 0.0}
    waiting: list[tuple[float, int, int]] = []
    exchanged: list[tuple[float, int, int]] = []  # hierarchical, until all buckets are exchanged
    for place, (_, last, _) in enumerate(jobs):
        share = (last + 1) / len(routes) if overlap else 1.0
        waiting.append((forward + share * (compute_s - forward), place, 0))
    heapq.heapify(waiting)
    while waiting:  # first come, first served
        ready, place, stage = heapq.heappop(waiting)
        tensor, _, route = jobs[place]
        what, seconds = stages[place][stage]
        # Network cards move bytes while cores encode; without them cores do one or the other:
        # modelled as parallel, steps by nodes came out at 0.78 of those measured
        # (docs/decisions/0108).
        by = "codec" if what == "inside" and host.share > 1 else what
        start = max(ready, free[by])
        end = start + seconds
        if seconds:
            free[by] = end
            events.append(Event(what, tensor, start, end))
        if route.by_nodes and stage == len(stages[place]) - 3:  # next: send its means inside
            exchanged.append((end, place, stage + 1))
        elif stage + 1 < len(stages[place]):
            heapq.heappush(waiting, (end, place, stage + 1))
        if exchanged and not waiting:
            all_there = max(exchanged)[0]
            waiting = sorted((all_there, place, stage) for _, place, stage in exchanged)
            exchanged = []
    # Added at the end, as if not overlapped: which tensor waits for a latency depends on fusion.
    latencies = latencies_s(routes, ranks, link)
    # The total work of the cores is a lower bound of a step, whatever overlaps.
    codec_s = host.share * sum(sum(route.codec_s) for route in routes)
    worked = (compute_s + codec_s) * min(1.0, host.ranks / host.cores)
    busy = worked + sum(sum(_moves(route, ranks, link, host)) for _, _, route in jobs)
    return Step(
        seconds=max(busy, *(event.end for event in events)) + latencies,
        compute_s=compute_s,
        codec_s=codec_s,
        exchange_s=latencies + sum(s for job in stages for what, s in job if what != "codec"),
        cores_s=busy,
        wire_bytes=sum(route.wire_bytes(ranks, link.gpus) for route in routes),
        sent_bytes=sum(route.sent_bytes for route in routes),
        events=tuple(sorted(events, key=lambda event: event.start)),
    )


def _moves(route: Route, ranks: int, link: Link, host: Host) -> list[float]:
    """Return the core seconds, divided by the cores, to move the bytes of each round."""
    pairs = zip(route.rounds, route.moved(ranks, link), strict=True)
    return [host.moves_s(kind, nbytes) for (kind, _), nbytes in pairs]


def _passes(route: Route, ranks: int, link: Link, host: Host) -> list[float]:
    """Return the seconds that the bytes of each round take, on the link or through the cores."""
    transfers = [transfer_s(*arguments) for arguments in route.on(ranks, link)]
    return list(map(max, transfers, _moves(route, ranks, link, host)))


def _stages(route: Route, ranks: int, link: Link, host: Host) -> list[tuple[_Worker, float]]:
    """Return the workers of a bucket and their seconds: the codec and rounds, alternating."""
    stages: list[tuple[_Worker, float]] = [("codec", host.share * route.codec_s[0])]
    passes = _passes(route, ranks, link, host)
    for (kind, _), seconds, codec_s in zip(route.rounds, passes, route.codec_s[1:], strict=True):
        stages.append(("inside" if kind == "inside" else "link", seconds))
        stages.append(("codec", host.share * codec_s))
    return stages


def _buckets(routes: Sequence[Route]) -> list[tuple[int, int, Route]]:
    """Return buckets: index of a tensor, number of the last gradient, sum of the routes.

    Gradients are computed from the last tensor to the first, and numbered in this order.
    """
    buckets: list[tuple[int, int, Route]] = []
    open_: dict[tuple[object, ...], int] = {}
    filled = 0
    for number, route in enumerate(reversed(routes)):
        # Frameworks fill buckets by elements, before their tensors' methods are decided.
        if filled >= BUCKET_ELEMENTS:
            open_, filled = {}, 0
        filled += route.elements
        kind = route.method, tuple(name for name, _ in route.rounds)
        if not (route.elements and kind in open_):
            if route.elements:
                open_[kind] = len(buckets)
            buckets.append((len(routes) - 1 - number, number, route))
            continue
        first, _, fused = buckets[open_[kind]]
        sizes = zip(fused.rounds, route.rounds, strict=True)
        fused = replace(
            fused,
            rounds=tuple((name, size + more) for (name, size), (_, more) in sizes),
            codec_s=tuple(map(sum, zip(fused.codec_s, route.codec_s, strict=True))),
            elements=fused.elements + route.elements,
        )
        buckets[open_[kind]] = first, number, fused
    return buckets


def break_even(
    slower: Seconds, faster: Seconds, *, link: Link, low: float = SLOWEST, high: float = FASTEST
) -> float:
    """Return the bytes per second below which `faster` takes fewer seconds than `slower`.

    Both are functions of the link, whose latencies are those of `link`. Returns `high` if `faster`
    wins on every link up to it, `low` if on none; else bisects, to 0.1 %. The two must cross only
    once, as methods that send fixed bytes do.
    """

    def wins(bytes_per_s: float) -> bool:
        at = replace(link, bytes_per_s=bytes_per_s)
        return faster(at) < slower(at)

    if wins(high):
        return high
    if not wins(low):
        return low
    while high / low > 1.001:
        middle = math.sqrt(low * high)  # geometric: links span orders of magnitude
        low, high = (middle, high) if wins(middle) else (low, middle)
    return low
