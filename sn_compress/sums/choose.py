"""What of each tensor travels, so that a whole model's gradient fits a number of words.

One rank for all tensors, as PowerSGD has it, spends as much on a matrix whose gradient is nearly
of rank one as on one whose is not. Directions are bought here one by one, always the one that
catches the largest share of its tensor's energy per word, until the budget is spent. A matrix
whose energy lies in few rows, as that of an embedding does, sells rows in place of directions; a
convolution's tensor whose energy lies in few frequencies of its kernels, directions of these.
"""

from __future__ import annotations

import heapq
import math
import zlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from ..base.errors import CompressError, PayloadError
from ..codecs.base import Floats
from ..ops.linear.directions import directions, first_factor
from ..ops.linear.kernels import kernels_of, waves
from ..ops.linear.matrices import cut
from ..ops.words.digits import Digits
from ..ops.words.positions import slot_words
from ..ops.words.word_sum import PRIME, word_sum
from .bucket import HEAD
from .parts.base import Part
from .parts.frequencies import Frequencies
from .parts.low_rank import LowRank
from .parts.rows import Rows
from .parts.whole import Whole

Words = npt.NDArray[np.int32]
Way = Literal["low_rank", "rows", "frequencies"]

WAYS: tuple[Way, ...] = get_args(Way)
MOST = 64  # directions looked at
MOST_FREQUENCIES = 256  # of them, which are about a quarter as long
_SILENT = 0  # in a rank's place, of one that has joined
_TOLD = 3  # words: ranks that speak, the checksum, and a digest of the shapes


@dataclass(frozen=True)
class Size:
    """How much of a tensor travels.

    Attributes
    ----------
    shape : the tensor's, as it is made a matrix
    size : directions, or rows that each rank names; 0 is the whole tensor
    way : what is sent: directions, rows, or directions of frequencies
    """

    shape: tuple[int, ...]
    size: int
    way: Way = "low_rank"

    @property
    def waits(self) -> bool:
        """Whether a matrix travels whole because it had no energy when sizes were chosen."""
        return self.size == 0 and min(cut(self.shape)) > 1

    def part(self) -> Part:
        """What sends it."""
        if self.size == 0:
            return Whole([(1, math.prod(self.shape))])
        if self.way == "frequencies" and (kernels := kernels_of(self.shape)) is not None:
            return Frequencies([kernels], [self.size])
        matrix = cut(self.shape)
        kind = Rows if self.way == "rows" else LowRank
        return kind([matrix], [self.size])


@dataclass(frozen=True)
class Curve:
    """What directions, rows or directions of frequencies of one tensor would catch.

    Attributes
    ----------
    shape : the tensor's
    shares : [directions] or [rows], share of the squared norm in each, falling
    way : what is sent; rows in parcels of one for each rank
    """

    shape: tuple[int, ...]
    shares: npt.NDArray[np.float64]
    way: Way = "low_rank"

    @classmethod
    def of(cls, mean: Floats, shape: Sequence[int]) -> Curve:
        """Of directions, measured on a mean gradient that all ranks know, [n]."""
        rows, columns = cut(shape)
        most = min(rows, columns, MOST)
        finite = np.isfinite(mean).all() and mean.any()
        if not finite or most < 2:
            return cls(tuple(shape), np.full(most, 1 / most))
        sigma = _singular_values(mean.reshape(rows, columns), most)
        energy = np.square(sigma, dtype=np.float64)
        return cls(tuple(shape), energy / np.square(mean, dtype=np.float64).sum())

    @classmethod
    def of_rows(cls, mean: Floats, shape: Sequence[int]) -> Curve:
        """Of rows, measured likewise."""
        rows, _ = cut(shape)
        energy = np.square(mean.reshape(rows, -1), dtype=np.float64).sum(axis=1)
        total = energy.sum()
        if not np.isfinite(total) or not total:
            return cls(tuple(shape), np.full(rows, 1 / rows), "rows")
        return cls(tuple(shape), np.sort(energy)[::-1] / total, "rows")

    @classmethod
    def of_frequencies(cls, mean: Floats, shape: Sequence[int]) -> Curve | None:
        """Of directions of frequencies, measured likewise; None where there are no kernels."""
        if (it := kernels_of(shape)) is None:
            return None
        side = min(it.across, it.beside)
        most = min(it.count * side, MOST_FREQUENCIES)
        total = np.square(mean, dtype=np.float64).sum()
        if not np.isfinite(total) or not total:
            return cls(tuple(shape), np.full(most, 1 / most), "frequencies")
        wave = waves(it.sides).host
        if it.last:
            cube = (mean.reshape(-1, it.count) @ wave.T).reshape(it.across, it.beside, -1)
            cube = cube.transpose(2, 0, 1)
        else:
            cube = (wave @ mean.reshape(it.count, -1)).reshape(-1, it.beside, it.across)
        sigma = np.concatenate([_singular_values(each, min(side, most)) for each in cube])
        energy = np.sort(np.square(sigma, dtype=np.float64))[::-1]
        return cls(tuple(shape), energy[:most] / total, "frequencies")

    def caught(self, size: int, ranks: int) -> float:
        """Share of the energy in `size` directions, or parcels of rows."""
        return float(self.shares[: size * ranks if self.way == "rows" else size].sum())

    def most(self, ranks: int) -> int:
        """The largest size."""
        return -(-self.shares.size // ranks) if self.way == "rows" else self.shares.size

    def largest(self, words: int, ranks: int) -> int:
        """The largest size that fits the words; 0 if none does."""
        sizes = range(1, self.most(ranks) + 1)
        return bisect_right(sizes, words, key=lambda size: _words(self, size, ranks))

    @property
    def flat(self) -> bool:
        """A vector has no factors."""
        return min(cut(self.shape)) < 2


def better(low_rank: Curve, rows: Curve, words: float, ranks: int) -> Curve:
    """Rows, if half as many words of them catch more than all the words in directions.

    Half, as a curve shows the best rows, and ranks name those they owe, some of them twice.
    """
    by_rows = rows.caught(rows.largest(int(words / 2), ranks), ranks)
    by_rank = low_rank.caught(max(1, low_rank.largest(int(words), ranks)), ranks)
    return rows if by_rows > by_rank else low_rank


def with_frequencies(low_rank: Curve, frequencies: Curve | None, words: float, ranks: int) -> Curve:
    """Frequencies, if as many words of them catch more.

    Of both an exchange catches about as much of what the curve shows: seven to eight tenths
    (docs/decisions/0030).
    """
    if frequencies is None:
        return low_rank
    size = max(1, low_rank.largest(int(words), ranks))
    words = max(words, _words(low_rank, size, ranks))
    by_frequencies = frequencies.caught(frequencies.largest(int(words), ranks), ranks)
    return frequencies if by_frequencies > low_rank.caught(size, ranks) else low_rank


def budget(taken: int, left_out: float, ratio: float) -> int:
    """Words for tensors of `taken` elements, beside others that send a word for each element."""
    return max(0, int((taken + left_out) / ratio - left_out))


def allocate(curves: Mapping[str, Curve], words: int, ranks: int) -> dict[str, int]:
    """The size of each tensor: its rank, or the rows each rank names; 0 for vectors: all of it.

    words : budget of 4-byte words over all these tensors; the smallest sizes may exceed it
    """
    chosen = {name: 0 if curve.flat else 1 for name, curve in curves.items()}
    left = words - sum(_words(curves[name], rank, ranks) for name, rank in chosen.items())
    # Ties by name: every rank decides alike.
    queue = [(-_gain(curves[name], 1, ranks), name) for name, rank in chosen.items() if rank]
    heapq.heapify(queue)
    while queue:
        _, name = heapq.heappop(queue)
        curve, rank = curves[name], chosen[name]
        price = _words(curve, rank + 1, ranks) - _words(curve, rank, ranks)
        if price > left:
            continue
        left -= price
        chosen[name] = rank + 1
        if rank + 1 < curve.most(ranks):
            heapq.heappush(queue, (-_gain(curve, rank + 1, ranks), name))
    return chosen


def words_of(shape: Sequence[int], size: int, ranks: int, way: Way = "low_rank") -> list[int]:
    """Words that a tensor of its own sends in each round at a size; 0 is whole."""
    rows, columns = cut(shape)
    if size == 0:
        return [HEAD + 1 + Digits.of(ranks, fine=True).words(rows * columns)]
    digits = Digits.of(ranks)
    if way == "frequencies" and (it := kernels_of(shape)) is not None:
        return [HEAD + 1 + digits.words(side * size) for side in (it.across, it.beside)]
    if way == "rows":
        values = digits.words(min(size * ranks, rows) * columns)
        return [HEAD + 1 + values + ranks * slot_words(size, rows)]
    return [HEAD + size + digits.words(side * size) for side in (rows, columns)]


def _words(curve: Curve, size: int, ranks: int) -> int:
    return sum(words_of(curve.shape, size, ranks, curve.way))


def _gain(curve: Curve, size: int, ranks: int) -> float:
    """Share of energy per word that what is bought after `size` catches."""
    if size >= curve.most(ranks):
        return 0.0
    price = _words(curve, size + 1, ranks) - _words(curve, size, ranks)
    # The words of positions grow in steps, so that a parcel may come nearly free.
    return (curve.caught(size + 1, ranks) - curve.caught(size, ranks)) / max(price, 1)


def _singular_values(matrix: Floats, count: int) -> Floats:
    """The `count` leading ones.

    Exact for small matrices; for large ones by randomised subspace iteration (Halko, Martinsson,
    Tropp 2011, algorithm 4.4 with two iterations).
    """
    scale = np.float32(np.abs(matrix).max(initial=0)) or np.float32(1)
    part = matrix / scale
    if min(matrix.shape) > 4 * count and matrix.size > 2**16:
        part = directions(part, first_factor(matrix.shape[1], count + 8), 2).T @ part
    return np.asarray(np.linalg.svd(part, compute_uv=False)[:count] * scale, np.float32)


def encode_sizes(chosen: Mapping[str, Size], *, ranks: int, rank: int) -> Words:
    """What a rank adds to the sum that tells the sizes, [3 + ranks * tensors] int32.

    Every rank has computed sizes, from floats in which the last bit may be another. Each writes its
    own into a slot that the others leave at zero, and all take those of the first rank that has
    not joined: of one rank, then, whatever became of the others.
    """
    if not 0 <= rank < ranks:
        raise CompressError(f"rank={rank!r} of {ranks}; expected 0 to {ranks - 1}")
    words = np.zeros(_TOLD + ranks * len(chosen), np.int32)
    sizes = [chosen[name] for name in sorted(chosen)]
    own = [1 + len(WAYS) * it.size + WAYS.index(it.way) for it in sizes]
    words[0], words[2] = 1, _digest({name: size.shape for name, size in chosen.items()})
    words[_TOLD:].reshape(ranks, -1)[rank] = own
    words[1] = int(word_sum(words))
    return words


def decode_sizes(
    total: Words, shapes: Mapping[str, Sequence[int]], *, ranks: int
) -> dict[str, Size]:
    """The sizes that all ranks take, from the sum of what they have said.

    Raises PayloadError where the sum is damaged, and CompressError where ranks have other tensors;
    either way all of them do.
    """
    if total.shape != (_TOLD + ranks * len(shapes),):
        raise CompressError(
            f"got {total.size} words of sizes; expected {_TOLD + ranks * len(shapes)}: "
            f"{len(shapes)} tensors, {ranks} ranks. Do all ranks have the same tensors?"
        )
    slots = total[_TOLD:].reshape(ranks, -1)
    spoken = (slots != _SILENT).all(axis=1)
    sound = (int(word_sum(total)) - int(total[1])) % PRIME == 0
    if not sound or not spoken.any() or spoken.sum() != total[0]:
        raise PayloadError(
            f"the summed sizes are damaged: {int(total[0])} ranks spoke, {int(spoken.sum())} were "
            "heard, or the words do not have the sum of their checksums. If it happens again, "
            "suspect memory or the network."
        )
    if int(total[2]) != int(total[0]) * _digest(shapes):
        raise CompressError(
            f"ranks choose sizes for other tensors: this one for {len(shapes)}, of shapes "
            f"{[tuple(shape) for shape in list(shapes.values())[:3]]}, ... Give all ranks the same "
            "model."
        )
    found = {}
    for name, word in zip(sorted(shapes), slots[int(spoken.argmax())].tolist(), strict=True):
        size, which = divmod(word - 1, len(WAYS))
        way = WAYS[which]
        if not (way == "low_rank" and size == 0) and not 1 <= size <= largest(shapes[name], way):
            raise PayloadError(
                f"size {size} of {name!r}, {way} of {tuple(shapes[name])}: damaged, or two ranks "
                "say that they are the same one"
            )
        found[name] = Size(tuple(shapes[name]), size, way)
    return found


def largest(shape: Sequence[int], way: Way) -> int:
    """The largest size of a tensor; 0 where it cannot be sent in this way."""
    if way == "frequencies":
        it = kernels_of(shape)
        return 0 if it is None else it.count * min(it.across, it.beside)
    rows, columns = cut(shape)
    return rows if way == "rows" else min(rows, columns)


def _digest(shapes: Mapping[str, Sequence[int]]) -> int:
    """20 bits, so that the sum over all ranks fits a word."""
    text = repr([tuple(shapes[name]) for name in sorted(shapes)])
    return zlib.crc32(text.encode()) % PRIME
