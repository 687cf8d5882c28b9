"""Hierarchical exchange by all-to-alls in which all ranks take part.

Groups of ranks cost too much in Horovod (docs/decisions/0098). So all ranks run every collective
together, and a rank sends nothing to most of the others. The first all-to-all sends each gradient
to its owner in the node. Then owners with the same local number exchange theirs, compressed. An
owner that is done sends its means to its node in the next all-to-all, and keeps taking part until
it has those of all owners of its node. Owners with the same number need the same number of rounds
on every node, so all ranks finish in the same round, after the same number of collectives, whatever
each of them owns.

A rank that fails sends the reason to all others in the next all-to-all.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..arrays import Array, asarray_like, device_of, join, namespace, put_all, split, to_host
from ..collective import Collective, Gradient
from ..errors import CompressError
from .engine import Engine
from .hierarchy import Place
from .shard import Shard, wide

# Vectors in a message start at multiples of 16 bytes, two words. So a message has an even number of
# words; an odd number marks an error message, and no header is needed.
_ALIGNED, _WORD = 16, 8


@dataclass(frozen=True)
class AllToAll:
    """One collective of all ranks; its result is the list of words received from each rank.

    words : [n] int64, the messages to all ranks, concatenated in rank order
    splits : the number of words to each rank
    """

    words: Array
    splits: tuple[int, ...]
    kind: str = "alltoall"


Rounds = Generator[list[AllToAll], list[list[Array]], None]  # results by rank
Vectors = Sequence[Array]
# One collective among owners with the same local number: a vector for each node, and the number of
# elements from each. Work yields lists of them, and is sent what was received in each.
Parcels = tuple[Vectors, Sequence[int]]
Work = Generator[list[Parcels], list[Vectors], Any]
Begins = Callable[[list[str]], object]


def total(vectors: Vectors) -> Array:
    """Sum in the given order: words modulo 2**32, or floats."""
    summed = namespace(vectors[0]).asarray(vectors[0], copy=True)
    for vector in vectors[1:]:
        summed += vector
    return summed


def mean(vectors: Vectors) -> Array:
    """Return the mean in the vectors' dtype; half precision is summed in single precision."""
    xp, dtype = namespace(vectors[0]), vectors[0].dtype
    summed = total([xp.astype(vector, wide(vector), copy=False) for vector in vectors])
    return xp.astype(summed / len(vectors), dtype, copy=False)


def pieces_of(size: int, nodes: int) -> list[int]:
    """Return how many of `size` words each node combines."""
    return [size // nodes + (node < size % nodes) for node in range(nodes)]


def combined(words: Array, combine: Callable[[Vectors], Array], place: Place) -> Work:
    """Combine all nodes' words element by element; every node gets the same bits."""
    nodes = len(place.layout.nodes)
    if nodes == 2:  # as many bytes as below, in one round
        (received,) = yield [([words] * 2, [len(words)] * 2)]
        return combine(received)
    # As in a ring: each node combines a piece, and all gather the pieces.
    sizes = pieces_of(len(words), nodes)
    (received,) = yield [(split(words, sizes), [sizes[place.node]] * nodes)]
    (received,) = yield [([combine(received)] * nodes, sizes)]
    return join(received)


def averaged(views: Vectors, place: Place) -> Work:
    """Replace vectors of one dtype by their mean over nodes."""
    means = yield from combined(join(views), mean, place)
    put_all(views, split(means, list(map(len, views))))


def carried(carry: Collective, place: Place) -> Work:
    """Run a collective of the engine among owners with this number; return its result."""
    nodes, words = len(place.layout.nodes), carry.words
    if carry.kind == "sum":
        return (yield from combined(words, total, place))
    parcels: Parcels = [words] * nodes, carry.sizes or [len(words)] * nodes
    if carry.kind == "alltoall":
        parcels = split(words, carry.to_ranks(place.node)), carry.of_ranks(place.node)
    (received,) = yield [parcels]
    return join(received)


def coded(engine: Engine, gradients: Sequence[Gradient], place: Place) -> Work:
    """Run the engine's rounds of compressed gradients."""
    rounds = engine.rounds(gradients, ranks=len(place.layout.nodes), rank=place.node)
    results: Any = None
    with suppress(StopIteration):
        while True:
            # An empty list of requests (Engine's `pauses`) costs no all-to-all here.
            with engine.seconds.coding():
                collectives = rounds.send(results)
            results = yield from together([carried(carry, place) for carry in collectives])


def together(works: Sequence[Work]) -> Work:
    """Run several works at once, each round in one all-to-all; return their results."""
    results: list[Any] = [None] * len(works)
    received: dict[int, Any] = dict.fromkeys(range(len(works)))
    while received:
        requests: dict[int, list[Parcels]] = {}
        for at, answer in received.items():
            try:
                requests[at] = works[at].send(answer)
            except StopIteration as end:
                results[at] = end.value
        if not requests:
            break
        answers = iter((yield [parcels for answer in requests.values() for parcels in answer]))
        received = {at: [next(answers) for _ in answer] for at, answer in requests.items()}
    return results


def exchanged(
    engine: Engine,
    place: Place,
    owned: Sequence[Sequence[Gradient]],
    begins: Begins,
    taken: bool = False,
) -> Work:
    """Replace gradients this rank owns by their mean over nodes; `owned` has a list per dtype."""
    begins([str(gradient.name) for gradients in owned for gradient in gradients])
    nodes = len(place.layout.nodes)
    works: list[Work] = []
    dense: list[Gradient] = []
    compressed: list[Gradient] = []
    for gradients in owned:
        step = engine.sort(gradients, ranks=nodes, total=_no_total, taken=taken)
        for gradient in step.dense:
            put_all([gradient.values], [engine.dense_values(gradient)])
        if views := [gradient.values for gradient in (*step.plain, *step.dense)]:
            works.append(averaged(views, place))
        dense += step.dense
        compressed += step.coded
    if compressed:
        works.append(coded(engine, compressed, place))
    yield from together(works)
    for gradient in dense:
        engine.learn(str(gradient.name), gradient.values)


def _no_total(name: str, words: Any) -> Any:
    # AutoCompression is not hierarchical: see hierarchy.may_have_nodes.
    raise AssertionError(f"{name}: a tuner was called in a hierarchical exchange")


def rounds(
    engine: Engine,
    place: Place,
    gradients: Sequence[Gradient],
    begins: Begins,
    *,
    taken: bool = False,
) -> Rounds:
    """Average gradients on one device in place; all ranks pass the same ones, in the same order.

    `engine.begin` must have been called with them.

    begins : called with the names of those that this rank owns, before the engine sorts them
    taken : see Engine.sort

    Raises CompressError if another rank has failed.
    """
    by_dtype: dict[Any, list[Gradient]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.values.dtype, []).append(gradient)
    shards = [Shard(place, of_dtype) for of_dtype in by_dtype.values()]
    ranks, like = place.layout.size * len(place.layout.nodes), gradients[0].values
    steps = _steps(shards, partial(exchanged, engine, place, begins=begins, taken=taken))
    received: Any = None
    while True:
        try:
            to = steps.send(received)
            by_rank = [
                [piece for vectors in to.get(rank, ()) for piece in _octets(vectors)]
                for rank in range(ranks)
            ]
        except StopIteration as end:
            means = end.value
            break
        except Exception as error:
            # The others wait in the next all-to-all: each gets the reason, and all end this step.
            text = f"rank {place.rank}: {type(error).__name__}: {error}".encode()
            octets = np.frombuffer(text, np.uint8).copy()  # torch warns about read-only arrays
            words = _words([asarray_like(octets, like)])
            words = join([words, words[:1] * 0])
            yield [AllToAll(join([words] * ranks), (len(words),) * ranks)]
            raise
        none = _octets([like[:0]])
        words = join([*none, *(piece for of_one in by_rank for piece in of_one)]).view(
            namespace(like).int64
        )
        splits = tuple(sum(map(len, of_one)) // _WORD for of_one in by_rank)
        (received,) = yield [AllToAll(words, splits)]
        if failed := [words for words in received if len(words) % 2]:
            reason = to_host(failed[0]).tobytes().rstrip(b"\0").decode()
            raise CompressError(f"another rank has failed in this step: {reason}")
    for number, shard in enumerate(shards):
        shard.finish([of_owner[number] for of_owner in means])


def _steps(
    shards: Sequence[Shard], exchange: Callable[..., Work]
) -> Generator[Mapping[int, Sequence[Vectors]], list[Array], list[list[Array]]]:
    """Yield the vectors for each rank, one all-to-all at a time; return all owners' means."""
    place = shards[0].place
    inside, owners = place.layout.nodes[place.node], place.layout.across()[place.number]
    owned = {
        rank: [(shard.dtype, shard.sizes[number]) for shard in shards]
        for number, rank in enumerate(inside)
    }
    peers = [rank for rank in inside if rank != place.rank]
    missing = {rank for rank in peers if any(size for _, size in owned[rank])}

    def take(received: list[Array]) -> None:
        for rank in missing & {rank for rank in peers if len(received[rank])}:
            means[rank] = received[rank]
        missing.difference_update(means)

    # Send each gradient to its owner; compute the node's means of what this rank owns.
    parts = zip(*(shard.parts for shard in shards), strict=True)  # by owner, then by shard
    place.sent_bytes += sum(shard.scatter_bytes + shard.gather_bytes for shard in shards)
    received = yield {rank: of for rank, of in zip(inside, parts, strict=True) if rank in peers}
    summed = zip(*(_unpacked(received[rank], owned[place.rank]) for rank in peers), strict=True)
    reduced = [shard.gradients(vectors) for shard, vectors in zip(shards, summed, strict=True)]
    means = {rank: received[rank][:0] for rank in peers if rank not in missing}  # words
    # Exchanges between owners. In any of them another owner of the node may already be done.
    work = exchange(reduced)
    answers: Any = None
    with suppress(StopIteration):
        while True:
            requests = work.send(answers)
            to = {rank: [[of[at]] for of, _ in requests] for at, rank in enumerate(owners)}
            here = [vector for (vector,) in to.pop(place.rank)]
            received = yield to
            take(received)
            of_nodes = [
                here
                if rank == place.rank
                else _unpacked(received[rank], [(of[0].dtype, sizes[at]) for of, sizes in requests])
                for at, rank in enumerate(owners)
            ]
            answers = list(zip(*of_nodes, strict=True))
    # Send this rank's means to its node; then take part until all of the others' have arrived.
    mine = [shard.values for shard in shards]
    take((yield {rank: [[values] for values in mine] for rank in peers}))
    while missing:
        take((yield {}))
    return [_unpacked(means[rank], owned[rank]) for rank in peers]


def _words(vectors: Vectors) -> Array:
    """Concatenate the vectors' bytes to an even number of words."""
    return join(_octets(vectors)).view(namespace(vectors[0]).int64)


def _octets(vectors: Vectors) -> list[Array]:
    """Return the vectors' bytes, and zeros up to an even number of words."""
    xp = namespace(vectors[0])
    octets = [vector.view(xp.uint8) for vector in vectors]
    missing = -sum(map(len, octets)) % _ALIGNED
    return [*octets, xp.zeros(missing, dtype=xp.uint8, device=device_of(octets[0]))]


def _unpacked(words: Array, kinds: Sequence[tuple[Any, int]]) -> list[Array]:
    """Split a rank's words into vectors with the dtypes and numbers of elements in `kinds`."""
    vectors, start, octets = [], 0, words.view(namespace(words).uint8)
    for dtype, elements in kinds:
        nbytes = elements * dtype.itemsize
        vectors.append(octets[start : start + nbytes].view(dtype))
        start += nbytes + -nbytes % _ALIGNED
    return vectors
