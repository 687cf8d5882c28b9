"""A shared support: the rows of a matrix that all ranks send, agreed a step ahead.

The gradient of an embedding has few rows that are not zero, others at every step: it has no low
rank, and what one rank would pick is not what another has. But positions can be told in a sum: each
rank writes its picks into a slot of the words that the others leave at zero. A step late does
not matter, as a row is named for what of it has not been sent. What the picks leave free
goes to rows that past means show to be large, and to those that waited longest.
"""

from __future__ import annotations

from collections.abc import Generator

import numpy as np
import numpy.typing as npt

from ..codecs.base import Floats
from ..errors import CompressError, PayloadError
from ..ops import pack
from ..ops.indexed import largest
from .digits import Words
from .shared import PRIME, Array, Scaled, Summable, checksum

Positions = npt.NDArray[np.int64]

_WAITED = 5  # one in so many of the free places goes to what waited longest
_NEWS = np.float32(0.3)  # weight of the last mean in the average of past ones
_TINY = np.float32(2.0**-126)


class Support(Summable):
    """As many rows of the mean gradient as ranks times `each`.

    Parameters
    ----------
    rows, columns : of the matrix; columns = 1 is a vector, of which single values are sent
    each : rows that each rank names in a step
    start : [rows * columns], a mean gradient that all ranks know, to begin with
    """

    rounds = 1

    def __init__(
        self,
        *,
        rows: int,
        columns: int,
        each: int,
        start: npt.ArrayLike | None = None,
        undoable: bool = False,
    ) -> None:
        if rows < 1 or columns < 1 or not 1 <= each <= rows:
            raise CompressError(
                f"Support: each={each!r} of {rows} x {columns}; expected 1 to {rows} rows"
            )
        super().__init__(rows * columns, undoable=undoable)
        self.rows, self.columns, self.each = rows, columns, each
        self._exponents = np.zeros(1, np.int32)
        self._spread = np.zeros(rows, np.float32)  # expected change of a row in a step
        self._ages = np.ones(rows, np.float32)  # steps of it that were not sent
        self._named = np.zeros(rows, np.bool_)  # in the step before
        if start is not None:
            matrix = np.asarray(start, np.float32).reshape(rows, columns)
            self._spread = _peaks(matrix)
            wire = Scaled(rows * columns, 1)
            wire.expect(matrix.reshape(-1, 1))
            self._exponents = wire.exponents

    def words(self, ranks: int) -> list[int]:
        return [words_of(self.rows, self.columns, self.each, ranks)]

    def _steps(self, vector: Floats | None, ranks: int) -> Generator[Words, Words, Floats | None]:
        at = self._agreed(ranks)
        wire = Scaled(at.size * self.columns, 1)
        wire.exponents = self._exponents
        sent = None
        rest = None if vector is None else vector.reshape(self.rows, self.columns)
        words, sent = wire.pack(None if rest is None else rest[at].reshape(-1, 1), ranks)
        if rest is not None and sent is not None:
            rest[at] -= sent.reshape(-1, self.columns)
        total = yield np.concatenate([words, self._name(rest, ranks)])
        mean, exponents = wire.unpack(total[: words.size], ranks)
        named = self._read(total[words.size :], ranks)
        if mean is None or rest is None or named is None:
            return None
        values = mean.reshape(-1, self.columns)
        spread, ages = self._spread.copy(), self._ages + 1
        news = _peaks(values) / np.sqrt(self._ages[at])
        spread[at] += _NEWS * (news - spread[at])
        ages[at] = 1
        self.memory, self._exponents = rest.reshape(-1), exponents
        self._spread, self._ages, self._named = spread, ages, named
        result = np.zeros((self.rows, self.columns), np.float32)
        result[at] = values
        return result.reshape(-1)

    def _agreed(self, ranks: int) -> Positions:
        """The rows to send."""
        count = min(self.each * ranks, self.rows)
        free = max(0, count - int(np.count_nonzero(self._named)))
        waiting = -(-free // _WAITED)
        expected = np.maximum(self._spread * np.sqrt(self._ages), _TINY)
        expected[self._named] = np.inf
        at = _largest(expected, count - waiting)
        waited = self._ages.copy()
        waited[at] = 0
        return np.concatenate([at, _largest(waited, waiting)])

    def _name(self, rest: Floats | None, ranks: int) -> Words:
        """What the rank owes most, in its slot."""
        words = np.zeros(2 + ranks * _slot(self.each, self.rows), np.int32)
        if rest is None:
            words[0] = 1
        else:
            if self.own_rank is None or not 0 <= self.own_rank < ranks:
                raise CompressError(
                    f"rank={self.own_rank!r} of {ranks}; expected the rank's own number, as it has "
                    "a slot for its picks. Pass rank= to exchange()."
                )
            norms = np.sqrt(np.einsum("ij,ij->i", rest, rest))
            picks = _largest(norms, self.each).astype(np.uint32)
            bits = np.concatenate(pack.elias_fano(picks[None], self.rows), axis=1)
            slots = words[2:].reshape(ranks, -1)
            slots[self.own_rank] = pack.bits_to_words(bits)[0].view(np.int32)
        words[1] = checksum(words)
        return words

    def _read(self, total: Words, ranks: int) -> npt.NDArray[np.bool_] | None:
        """Where rows were named, [rows]; a rank that has joined names none."""
        if (checksum(total) - int(total[1])) % PRIME:
            raise PayloadError(
                "the summed positions do not have the sum of their checksums: they were damaged "
                "on the way, or ranks run with different settings"
            )
        if total[0]:
            return None
        slots = total[2:].reshape(ranks, -1)
        # Every slot that was written has ones: Elias-Fano marks each position.
        bits = pack.words_to_bits(slots[slots.any(axis=1)].view(np.uint32))
        low = self.each * pack.low_bits(self.each, self.rows)
        upper = low + pack.upper_bits(self.each, self.rows)
        found = pack.read_elias_fano(bits[:, :low], bits[:, low:upper], self.each, self.rows)
        named = np.zeros(self.rows, np.bool_)
        named[found.reshape(-1)] = True
        return named

    def rescale(self, factor: float) -> None:
        super().rescale(factor)
        self._spread = self._spread * np.float32(factor)

    def _shared(self) -> dict[str, Array]:
        names = ("_exponents", "_spread", "_ages", "_named")
        return {name: getattr(self, name) for name in names}


def words_of(rows: int, columns: int, each: int, ranks: int) -> int:
    """Words that travel when each rank names `each` rows."""
    values = Scaled(min(each * ranks, rows) * columns, 1).words(ranks)
    return values + 2 + ranks * _slot(each, rows)


def _slot(each: int, rows: int) -> int:
    """Words for `each` ascending positions below `rows`."""
    return -(-(each * pack.low_bits(each, rows) + pack.upper_bits(each, rows)) // 32)


def _peaks(matrix: Floats) -> Floats:
    """The largest magnitude of each row: unlike a norm, the same on every machine."""
    return np.asarray(np.abs(matrix).max(axis=1), np.float32)


def _largest(values: Floats, count: int) -> Positions:
    """Where the `count` largest are, ascending; ties to the lower."""
    return largest(values[None], count)[0] if count else np.zeros(0, np.int64)
