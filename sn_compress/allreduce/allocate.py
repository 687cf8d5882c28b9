"""Decides how much of each tensor to send, so that a model's gradient fits a budget of words.

The same rank for all tensors, as in PowerSGD, spends as much on a matrix whose gradient is nearly
of rank one as on others. Here directions are added greedily, always the one that captures the
largest share of its tensor's energy per word, until the budget is spent. If the energy lies in few
rows, as for an embedding, rows are added instead of directions; if a convolution's lies in few
frequencies of its kernels, directions of these.

A size is chosen from the gradient of one step, which may lie in few directions by chance, or
because its loss has only just started. Then what is not sent piles up: the memory holds several
gradients instead of about one, and training lags behind. So ranks vote from time to time whether a
tensor has outgrown its size.
"""

from __future__ import annotations

import heapq
import math
import statistics
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from ..arrays import Array, namespace
from ..codecs.base import Floats
from ..errors import CompressError, PayloadError
from ..ops.bits import slot_words
from ..ops.fixed_point import PRIME, Digits, word_sum
from ..ops.products import cut, directions, first_factor
from .methods.base import HEAD, Method
from .methods.dense import Dense
from .methods.frequencies import Frequencies, kernels_of, waves
from .methods.low_rank import LowRank
from .methods.rows import Rows

# Elements from which a vector, such as a bias or the weights of a norm, is compressed. A vector has
# no low rank, and a model's many small ones add up to little: sending them uncompressed costs less
# than compression would save.
VECTOR = 2**16


def check_settings(ratio: float, warmup: int, every: int) -> None:
    """Raise CompressError unless they are as AllReduceExchange describes them."""
    if not ratio > 1 or warmup < 1 or every < 1:
        raise CompressError(
            f"ratio={ratio!r}, warmup={warmup!r}, every={every!r}; expected a ratio above 1 "
            "and at least one step each"
        )


def is_large(shape: Sequence[int], min_elements: int) -> bool:
    """Whether a tensor is worth compressing: the same rule for all compressions and frameworks."""
    return _is_large(tuple(shape), min_elements)


@lru_cache(maxsize=4096)  # called for each gradient in each step
def _is_large(shape: tuple[int, ...], min_elements: int) -> bool:
    is_vector = sum(side > 1 for side in shape) <= 1
    return math.prod(shape) >= (max(VECTOR, min_elements) if is_vector else min_elements)


Words = npt.NDArray[np.int32]
Kind = Literal["low_rank", "rows", "frequencies"]

METHODS: tuple[Kind, ...] = get_args(Kind)
MOST = 64  # directions in a curve; no tensor gets more
MOST_FREQUENCIES = 256  # the same for frequencies, whose directions are about a quarter as long
_JOINED = 0  # in the slot of a rank that has joined; other ranks' values start at 1
_HEADER = 3  # words: the number of ranks that have not joined, the checksum, a digest of shapes


@dataclass(frozen=True)
class Allocation:
    """How much of a tensor is sent.

    Attributes
    ----------
    shape : the tensor's; `cut` makes it a matrix
    size : number of directions, or of rows that each rank names; 0 is the whole tensor
    method : what the size counts: directions, rows, or directions of frequencies
    """

    shape: tuple[int, ...]
    size: int
    method: Kind = "low_rank"

    @property
    def waits(self) -> bool:
        """Whether a matrix is sent whole because it was all zeros when sizes were chosen."""
        return self.size == 0 and min(cut(self.shape)) > 1

    def part(self) -> Method:
        """Return the method with these settings, for this tensor alone."""
        if self.size == 0:
            return Dense([(1, math.prod(self.shape))])
        if self.method == "frequencies" and (kernels := kernels_of(self.shape)) is not None:
            return Frequencies([kernels], [self.size])
        matrix = cut(self.shape)
        kind = Rows if self.method == "rows" else LowRank
        return kind([matrix], [self.size])


@dataclass(frozen=True)
class EnergyCurve:
    """The share of a tensor's energy in its directions, rows, or directions of frequencies.

    Attributes
    ----------
    shape : the tensor's
    shares : [directions] or [rows], share of the squared norm in each, descending
    method : what is sent; rows are added in parcels of one per rank
    """

    shape: tuple[int, ...]
    shares: npt.NDArray[np.float64]
    method: Kind = "low_rank"

    @classmethod
    def of(cls, mean: Floats, shape: Sequence[int]) -> EnergyCurve:
        """Return the curve of directions, from a mean gradient that all ranks know, [n]."""
        rows, columns = cut(shape)
        most = min(rows, columns, MOST)
        known = np.isfinite(mean).all() and mean.any()
        if not known or most < 2:
            return cls(tuple(shape), np.full(most, 1 / most))
        sigma = _singular_values(mean.reshape(rows, columns), most)
        energy = np.square(sigma, dtype=np.float64)
        # Relative to the whole norm: shares of the leading directions need not add up to 1.
        return cls(tuple(shape), energy / np.square(mean, dtype=np.float64).sum())

    @classmethod
    def of_rows(cls, mean: Floats, shape: Sequence[int]) -> EnergyCurve:
        """Return the curve of rows."""
        rows, _ = cut(shape)
        energy = np.square(mean.reshape(rows, -1), dtype=np.float64).sum(axis=1)
        total = energy.sum()
        if not np.isfinite(total) or not total:
            return cls(tuple(shape), np.full(rows, 1 / rows), "rows")
        return cls(tuple(shape), np.sort(energy)[::-1] / total, "rows")

    @classmethod
    def of_frequencies(cls, mean: Floats, shape: Sequence[int]) -> EnergyCurve | None:
        """Return the curve of directions of frequencies; None for a tensor without kernels."""
        if (kernels := kernels_of(shape)) is None:
            return None
        side = min(kernels.outputs, kernels.inputs)
        most = min(kernels.count * side, MOST_FREQUENCIES)
        total = np.square(mean, dtype=np.float64).sum()
        if not np.isfinite(total) or not total:
            return cls(tuple(shape), np.full(most, 1 / most), "frequencies")
        wave = waves(kernels.sides).host
        if kernels.last:
            cube = mean.reshape(-1, kernels.count) @ wave.T
            cube = cube.reshape(kernels.outputs, kernels.inputs, -1).transpose(2, 0, 1)
        else:
            cube = wave @ mean.reshape(kernels.count, -1)
            cube = cube.reshape(-1, kernels.inputs, kernels.outputs)
        sigma = np.concatenate([_singular_values(matrix, min(side, most)) for matrix in cube])
        energy = np.sort(np.square(sigma, dtype=np.float64))[::-1]
        return cls(tuple(shape), energy[:most] / total, "frequencies")

    def caught(self, size: int, ranks: int) -> float:
        """Return the share of the energy in `size` directions, or parcels of rows."""
        return float(self.shares[: size * ranks if self.method == "rows" else size].sum())

    def most(self, ranks: int) -> int:
        """Return the largest possible size."""
        return -(-self.shares.size // ranks) if self.method == "rows" else self.shares.size

    def largest(self, words: int, ranks: int) -> int:
        """Return the largest size that fits the words; 0 if none does."""
        sizes = range(1, self.most(ranks) + 1)
        return bisect_right(sizes, words, key=lambda size: _words(self, size, ranks))

    @property
    def flat(self) -> bool:
        """Whether the tensor is a vector, which has no factors."""
        return min(cut(self.shape)) < 2


def better(low_rank: EnergyCurve, rows: EnergyCurve, words: float, ranks: int) -> EnergyCurve:
    """Choose rows if half of the words, spent on rows, capture more than all on directions.

    Half, because a curve has the best rows, while ranks name rows by residual, some of them twice.
    """
    by_rows = rows.caught(rows.largest(int(words / 2), ranks), ranks)
    by_rank = low_rank.caught(max(1, low_rank.largest(int(words), ranks)), ranks)
    return rows if by_rows > by_rank else low_rank


def with_frequencies(
    low_rank: EnergyCurve, frequencies: EnergyCurve | None, words: float, ranks: int
) -> EnergyCurve:
    """Choose frequencies if they capture more with as many words.

    An exchange captures about the same fraction of what either curve shows: seven to eight tenths
    (docs/decisions/0030).
    """
    if frequencies is None:
        return low_rank
    size = max(1, low_rank.largest(int(words), ranks))
    words = max(words, _words(low_rank, size, ranks))
    by_frequencies = frequencies.caught(frequencies.largest(int(words), ranks), ranks)
    return frequencies if by_frequencies > low_rank.caught(size, ranks) else low_rank


def budget(taken: int, left_out: float, ratio: float) -> int:
    """Return the words for `taken` compressed elements, if others send a word per element."""
    return max(0, int((taken + left_out) / ratio - left_out))


def allocate(curves: Mapping[str, EnergyCurve], words: int, ranks: int) -> dict[str, int]:
    """Return the size of each tensor: its rank, or rows per rank; 0 for vectors: dense.

    words : budget of 4-byte words for all these tensors; the smallest sizes may exceed it
    """
    # Each tensor has a size of at least 1: if it were never sent, its memory would keep growing.
    chosen = {name: 0 if curve.flat else 1 for name, curve in curves.items()}
    remaining = words - sum(_words(curves[name], size, ranks) for name, size in chosen.items())
    # Ties are broken by name, so that all ranks decide alike.
    queue = [(-_gain(curves[name], 1, ranks), name) for name, size in chosen.items() if size]
    heapq.heapify(queue)
    while queue:
        _, name = heapq.heappop(queue)
        curve, size = curves[name], chosen[name]
        price = _words(curve, size + 1, ranks) - _words(curve, size, ranks)
        if price > remaining:
            continue  # not pushed again, as the budget only shrinks; others may still fit
        remaining -= price
        chosen[name] = size + 1
        if size + 1 < curve.most(ranks):
            heapq.heappush(queue, (-_gain(curve, size + 1, ranks), name))
    return chosen


def words_of(shape: Sequence[int], size: int, ranks: int, method: Kind = "low_rank") -> list[int]:
    """Return the words of each round for a tensor that travels alone; size 0 is dense."""
    rows, columns = cut(shape)
    if size == 0:
        return [HEAD + 1 + Digits.of(ranks, fine=True).words(rows * columns)]
    digits = Digits.of(ranks)
    if method == "frequencies" and (kernels := kernels_of(shape)) is not None:
        return [HEAD + 1 + digits.words(side * size) for side in (kernels.outputs, kernels.inputs)]
    if method == "rows":
        values = digits.words(min(size * ranks, rows) * columns)
        return [HEAD + 1 + values + ranks * slot_words(size, rows)]
    return [HEAD + size + digits.words(side * size) for side in (rows, columns)]


def _words(curve: EnergyCurve, size: int, ranks: int) -> int:
    return sum(words_of(curve.shape, size, ranks, curve.method))


def _gain(curve: EnergyCurve, size: int, ranks: int) -> float:
    """Return the share of energy per word of the next increment after `size`."""
    if size >= curve.most(ranks):
        return 0.0
    price = _words(curve, size + 1, ranks) - _words(curve, size, ranks)
    # The words for positions grow in steps, so a parcel may be nearly free.
    return (curve.caught(size + 1, ranks) - curve.caught(size, ranks)) / max(price, 1)


def _singular_values(matrix: Floats, count: int) -> Floats:
    """Return the `count` leading singular values.

    Exact for small matrices; for large ones by randomised subspace iteration (Halko, Martinsson,
    Tropp 2011, algorithm 4.4 with two iterations).
    """
    scale = np.float32(np.abs(matrix).max(initial=0)) or np.float32(1)
    part = matrix / scale
    if min(matrix.shape) > 4 * count and matrix.size > 2**16:
        part = directions(part, first_factor(matrix.shape[1], count + 8), 2).T @ part
    return np.asarray(np.linalg.svd(part, compute_uv=False)[:count] * scale, np.float32)


def encode_sizes(chosen: Mapping[str, Allocation], *, ranks: int, rank: int) -> Words:
    """Return this rank's addend to the sum that agrees on sizes, [3 + ranks * tensors] int32.

    Ranks compute sizes from floats whose last bits may differ. Each writes its own to a slot that
    the others leave at zero, and all use those of the first rank that has not joined.
    """
    if not 0 <= rank < ranks:
        raise CompressError(f"rank={rank!r} of {ranks}; expected 0 to {ranks - 1}")
    words = np.zeros(_HEADER + ranks * len(chosen), np.int32)
    sizes = [chosen[name] for name in sorted(chosen)]
    slot = [1 + len(METHODS) * size.size + METHODS.index(size.method) for size in sizes]
    words[0], words[2] = 1, _digest({name: size.shape for name, size in chosen.items()})
    words[_HEADER:].reshape(ranks, -1)[rank] = slot
    words[1] = int(word_sum(words))
    return words


def decode_sizes(
    total: Words, shapes: Mapping[str, Sequence[int]], *, ranks: int
) -> dict[str, Allocation]:
    """Return the sizes that all ranks use, from the sum over ranks of `encode_sizes`.

    Raises PayloadError if the sum is corrupt, and CompressError if ranks have different tensors; in
    either case on all ranks.
    """
    if total.shape != (_HEADER + ranks * len(shapes),):
        raise CompressError(
            f"got {total.size} words of sizes; expected {_HEADER + ranks * len(shapes)}: "
            f"{len(shapes)} tensors, {ranks} ranks. Do all ranks have the same tensors?"
        )
    slots = total[_HEADER:].reshape(ranks, -1)
    replied = (slots != _JOINED).all(axis=1)
    sound = (int(word_sum(total)) - int(total[1])) % PRIME == 0
    if not sound or not replied.any() or replied.sum() != total[0]:
        raise PayloadError(
            f"the summed sizes are corrupt: {int(total[0])} ranks replied, {int(replied.sum())} "
            "were received, or the checksum of the sum does not match the sum of the checksums. "
            "If it happens again, suspect memory or the network."
        )
    if int(total[2]) != int(total[0]) * _digest(shapes):
        raise CompressError(
            f"ranks allocate different tensors: this rank has {len(shapes)}, of shapes "
            f"{[tuple(shape) for shape in list(shapes.values())[:3]]}, ... Give all ranks the same "
            "model."
        )
    chosen = {}
    for name, word in zip(sorted(shapes), slots[int(replied.argmax())].tolist(), strict=True):
        size, which = divmod(word - 1, len(METHODS))
        method = METHODS[which]
        lowest = 0 if method == "low_rank" else 1  # a whole tensor is encoded as low rank 0
        if not lowest <= size <= largest(shapes[name], method):
            raise PayloadError(
                f"size {size} of {name!r}, {method} of {tuple(shapes[name])}: corrupt, or two "
                "ranks share a rank id"
            )
        chosen[name] = Allocation(tuple(shapes[name]), size, method)
    return chosen


def largest(shape: Sequence[int], method: Kind) -> int:
    """Return the largest size of a tensor; 0 if this method cannot send it."""
    if method == "frequencies":
        kernels = kernels_of(shape)
        return 0 if kernels is None else kernels.count * min(kernels.outputs, kernels.inputs)
    rows, columns = cut(shape)
    return rows if method == "rows" else min(rows, columns)


def _digest(shapes: Mapping[str, Sequence[int]]) -> int:
    """Return a digest of 20 bits, so that the sum over all ranks fits a word."""
    text = repr([tuple(shapes[name]) for name in sorted(shapes)])
    return zlib.crc32(text.encode()) % PRIME


# Steps after sizes were chosen: the first measurement of the memories, and the first vote. The
# interval doubles each time, so a vote never waits longer than a size has been in use already. A
# vote costs few words, and none if no size is small; in TensorFlow, whose graphs do not vote, it
# costs retracing the step.
LOOK, VOTE = 25, 50
# Norm of a memory over that of a gradient. If k of the K directions of a gradient are sent, each
# waits for about K / k steps, and the memory holds half as many gradients. A choice that captures
# most of the energy leaves 0.3 to 3; small nets whose sizes came from an unlucky step had 5 to 9,
# and learned ten times worse.
MOST_HELD = 4.0
# That ratio over the same of the tensors that got their even share of the words. If noise has as
# many directions as a matrix, or the ratio is high, all tensors hold several gradients, and a new
# choice would only take from others: small LSTMs, transformers and convolutions had up to 2.6 in
# ordinary training, nets as above 4 and more.
MOST_OVER_OTHERS = 3.0
# Words over an even share. Above this there is little to gain; and on its own a tensor gets at
# least half of its share, the largest size that fits, so that none is chosen again twice.
SMALL = 0.5


def looks(since: int) -> bool:
    """Whether memories are measured in the step that is `since` steps after the choice."""
    return since >= LOOK and since == _next(LOOK, since - 1)


def next_vote(since: int) -> int:
    """Return the next step with a vote after `since`, counted from the choice; `looks` is true."""
    return _next(VOTE, since)


def _next(first: int, since: int) -> int:
    return first << (since // first).bit_length()


def is_small(size: Allocation, even: float, ranks: int) -> bool:
    """Whether a size takes less than half of `even` words; never for a whole tensor."""
    return size.size > 0 and sum(words_of(size.shape, size.size, ranks, size.method)) < SMALL * even


def norm_of(vector: Array) -> float:
    """Return the norm of [n] numbers; not finite if a step was lost."""
    xp = namespace(vector)
    with np.errstate(over="ignore", invalid="ignore"):
        return math.sqrt(float(xp.sum(vector * vector)))


def is_outgrown(held: float, held_by_others: Iterable[float]) -> bool:
    """Return a rank's vote on a small tensor: whether its memory holds far more than others'."""
    known = list(held_by_others)
    return bool(known) and held > max(MOST_HELD, MOST_OVER_OTHERS * statistics.median(known))


def votes(outgrown: Sequence[bool]) -> Words:
    """Return a rank's addend to the sum of votes, [2 + tensors] int32; a joined rank adds zeros.

    Words: number of ranks that have not joined, the checksum, and a vote for each tensor.
    """
    words = np.array([1, 0, *outgrown], np.int32)
    words[1] = int(word_sum(words))
    return words


def majority(total: Words, tensors: int) -> list[bool]:
    """Return for each tensor whether more than half of the voting ranks find it outgrown.

    Raises PayloadError on every rank if the sum is corrupt.
    """
    if total.shape != (2 + tensors,):
        raise CompressError(
            f"got {total.size} words of votes; expected {2 + tensors}. Do all ranks have the same "
            "tensors?"
        )
    sound = (int(word_sum(total)) - int(total[1])) % PRIME == 0
    if not sound or not ((total[2:] >= 0) & (total[2:] <= total[0])).all():
        raise PayloadError(
            "the checksum of the summed votes on sizes does not match the sum of the checksums: "
            "corrupt in transit. If it happens again, suspect memory or the network."
        )
    return [bool(2 * count > total[0]) for count in total[2:].tolist()]
