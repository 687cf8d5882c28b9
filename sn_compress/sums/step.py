"""A step of a bucket as a function: memories and states in, means and the next ones out.

Nothing is kept here, read, or changed but what the caller hands over to be. So a library that runs
a graph, as TensorFlow does, can have it traced into one; `summable.py` keeps what lies between
steps for libraries that do not.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..base.errors import CompressError
from ..devices.arrays import either, namespace, steady
from ..ops.linear.remember import remembered
from .bucket import Bucket, Result
from .parts.base import Array, Part, State


@dataclass(frozen=True)
class Stepped:
    """What a step has made; tensors in the order of the bucket.

    Attributes
    ----------
    means : [n] float32 of each tensor; NaN in a step that was lost
    memories : [n] float32 of each, what this rank has not sent; the old ones of a lost step
    state : the next step's; the old one of a lost step
    numbers : [4] float64: 1 if the step was lost as a rank had numbers that are not finite, 1 if a
        sum was damaged (an error: the words are not those that were sent), the squared norm of
        what it held, and of it what was sent
    """

    means: list[Array]
    memories: list[Array]
    state: State
    numbers: Array


@lru_cache(maxsize=256)
def bucket_of(parts: tuple[Part, ...]) -> tuple[Bucket, tuple[int, ...]]:
    """Parts taken together by class, and which tensor is at each place of the bucket.

    Parts are kept by settings: the same ones make the same bucket.
    """
    kinds = list(dict.fromkeys(type(part) for part in parts))
    order = [at for kind in kinds for at, part in enumerate(parts) if type(part) is kind]
    groups = [kind.together([it for it in parts if type(it) is kind]) for kind in kinds]
    return Bucket([part for group in groups for part in group]), tuple(order)


def step(
    bucket: Bucket,
    state: State,
    memories: Sequence[Array],
    gradients: Sequence[Array],
    *,
    ranks: int,
    rank: int | None,
    decay: float = 1.0,
    exact: bool = False,
) -> Generator[Array, Array, Stepped]:
    """One step of many tensors: yields words [w] int32, is sent their sum over the ranks.

    Parameters
    ----------
    bucket, state : what travels how, and what ranks share of it; see `bucket_of`, Bucket.begin
    memories, gradients : of each tensor in the order of the bucket, [n] float32
    ranks, rank : how many may add to the sum; which of them this is, from 0
    decay : factor on the memories before they are added
    exact : the same bits on ranks of unlike hardware

    Every rank makes the same call. Ranks that are fed the same sums return the same bits.
    """
    return steadily(
        _step(bucket, state, memories, gradients, ranks, rank, decay, exact), gradients[0]
    )


def _step(
    bucket: Bucket,
    state: State,
    memories: Sequence[Array],
    gradients: Sequence[Array],
    ranks: int,
    rank: int | None,
    decay: float,
    exact: bool,
) -> Generator[Array, Array, Stepped]:
    xp = namespace(gradients[0])
    tensors = zip(memories, gradients, bucket.shapes, strict=True)
    matrices, squares = [], []
    for memory, gradient, shape in tensors:
        check(gradient, shape)
        vector, square = remembered(memory, gradient, decay)
        matrices.append(xp.reshape(vector, shape))
        squares.append(square)
    result, numbers = yield from summed(
        bucket, state, matrices, squares, ranks=ranks, rank=rank, exact=exact
    )
    lost = result.lost | result.damaged
    names = list(state)
    left = [xp.reshape(it, (-1,)) for it in result.left]
    old = [*memories, *(state[name] for name in names)]
    kept = either(lost, old, [*left, *(result.state[name] for name in names)])
    count = len(left)
    return Stepped(
        means=[xp.reshape(it, (-1,)) for it in result.mean],
        memories=kept[:count],
        state=dict(zip(names, kept[count:], strict=True)),
        numbers=numbers,
    )


def summed(
    bucket: Bucket,
    state: State,
    matrices: Sequence[Array],
    squares: Sequence[Array],
    *,
    ranks: int,
    rank: int | None,
    exact: bool,
    outs: Sequence[Array] | None = None,
) -> Generator[Array, Array, tuple[Result, Array]]:
    """The rounds of a bucket for gradients with their memories; see Bucket.step, Stepped.numbers.

    matrices : as in Part.step; what is in `left` of a lost step is good for nothing
    squares : the squared norm of each, 0-d float32
    """
    energy = _total(squares)
    xp = namespace(matrices[0])
    result = yield from bucket.step(
        state,
        matrices,
        ranks=ranks,
        rank=rank,
        exact=exact,
        outs=outs,
        finite=xp.isfinite(energy),
    )
    numbers = (result.lost, result.damaged, energy, result.sent)
    return result, xp.stack([xp.astype(it, xp.float64) for it in numbers])


def steadily(steps: Generator[Array, Array, Any], like: Array) -> Generator[Array, Array, Any]:
    """The same rounds with products as `steady` says, but while the caller has the word."""
    total = None
    while True:
        try:
            with steady(like):
                words = next(steps) if total is None else steps.send(total)
        except StopIteration as end:
            return end.value
        total = yield words


def check(gradient: Array, shape: tuple[int, int]) -> None:
    """CompressError for a gradient of another size than the tensor's."""
    if tuple(gradient.shape) != (shape[0] * shape[1],):
        raise CompressError(
            f"exchange: got a gradient of shape {tuple(gradient.shape)}; expected "
            f"({shape[0] * shape[1]},)"
        )


def _total(values: Sequence[Array]) -> Array:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total
