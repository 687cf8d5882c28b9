"""Shared supports that were compared; the one that was kept is sn_compress/exchange/support.py.

They differ in who names what is sent (nobody, one rank in turn, every rank its part), for how much
of it, and when (a step ahead, or in a round of its own); docs/decisions/0010-shared-support.md.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Literal

import numpy as np
import numpy.typing as npt

from sn_compress.codecs.base import Floats
from sn_compress.errors import CompressError, PayloadError
from sn_compress.exchange.digits import Words
from sn_compress.exchange.shared import PRIME, Array, Scaled, Summable, checksum
from sn_compress.ops import pack
from sn_compress.ops.indexed import largest

Positions = npt.NDArray[np.int64]

_AGED = 5  # one in so many of the picks from the past goes to what waited longest
_NEWS = np.float32(0.3)  # weight of the last mean in the average of past ones
_TINY = np.float32(2.0**-126)


class Candidate(Summable):
    """`count` units of the mean gradient at positions that all ranks agree on.

    Parameters
    ----------
    n : elements
    count : units sent in a step
    unit : values side by side that are sent together, as a row of an embedding; divides n
    named : share of them that ranks may name; the others are chosen from the past
    by : who names: one rank in turn, or all, each its part
    fresh : names travel in a round of their own, before the values; else a step ahead of them
    start : [n], a mean gradient that all ranks know, to begin with
    """

    def __init__(
        self,
        n: int,
        *,
        count: int,
        unit: int = 1,
        named: float = 1.0,
        by: Literal["leader", "all"] = "all",
        fresh: bool = False,
        start: npt.ArrayLike | None = None,
        undoable: bool = False,
    ) -> None:
        if (
            unit < 1
            or n % unit
            or not 1 <= count <= n // unit
            or not 0 <= named <= 1
            or by not in ("leader", "all")
        ):
            raise CompressError(
                f"Candidate: count={count!r}, unit={unit!r}, named={named!r}, by={by!r} for {n} "
                "elements; expected a unit that divides them, a count of at most all units, a "
                'share from 0 to 1, and "leader" or "all"'
            )
        super().__init__(n, undoable=undoable)
        self.count, self.named, self.by, self.fresh = count, named, by, fresh
        self.rounds = 1 + fresh
        self.unit, self._units = unit, n // unit
        self._wire = Scaled(count * unit, 1)
        first = np.zeros(n, np.float32) if start is None else np.asarray(start, np.float32)
        self._spread = self._peaks(first)  # [units] expected change of the mean in a step
        self._ages = np.ones(self._units, np.float32)  # [units] steps of it that were not sent
        self._turn = np.zeros(1, np.int64)
        self._next = self._agree(np.zeros(0, np.int64))  # [count] units
        if start is not None:
            self._wire.expect(self._rows(first)[self._next].reshape(-1, 1))

    def words(self, ranks: int) -> list[int]:
        parts = [self._slots(ranks)[2], self._wire.words(ranks)]
        return parts if self.fresh else [sum(parts)]

    def _steps(self, vector: Floats | None, ranks: int) -> Generator[Words, Words, Floats | None]:
        lost, at, named_words = vector is None, self._next, self._slots(ranks)[2]
        if self.fresh:
            named = self._read((yield self._name(vector, ranks)), ranks)
            lost = named is None
            at = self._next if named is None else self._agree(named)
        words, sent = self._wire.pack(
            None if lost else self._rows(vector)[at].reshape(-1, 1), ranks
        )
        rest = None if sent is None else vector.copy()
        if rest is not None:
            self._rows(rest)[at] -= sent.reshape(-1, self.unit)
        if self.fresh:
            total = yield words
        else:
            total = yield np.concatenate([self._name(rest, ranks), words])
            named = self._read(total[:named_words], ranks)
            total = total[named_words:]
        mean, exponents = self._wire.unpack(total, ranks)
        if mean is None or rest is None or named is None:
            return None
        values = mean.reshape(-1, self.unit)
        ages = self._ages + 1
        spread = self._spread.copy()
        spread[at] += _NEWS * (self._peaks(values) / np.sqrt(self._ages[at]) - spread[at])
        ages[at] = 1
        self.memory, self._exponents = rest, exponents
        self._ages, self._spread, self._turn = ages, spread, self._turn + 1
        if not self.fresh:
            self._next = self._agree(named)
        result = np.zeros(self.n, np.float32)
        self._rows(result)[at] = values
        return result

    def _slots(self, ranks: int) -> tuple[int, int, int]:
        """How many slots there are, positions in each, and the words of all of them."""
        most = round(self.count * self.named)
        if not most:
            return 0, 0, 0
        slots = ranks if self.by == "all" else 1
        each = max(1, most // slots)
        bits = each * pack.low_bits(each, self._units) + pack.upper_bits(each, self._units)
        return slots, each, 2 + slots * -(-bits // 32)

    def _name(self, vector: Floats | None, ranks: int) -> Words:
        """The rank's largest units in its slot; nothing where it is not its turn."""
        slots, each, size = self._slots(ranks)
        words = np.zeros(size, np.int32)
        if not slots:
            return words
        if vector is None:
            words[0] = 1
        elif self.by == "all" or self._turn[0] % ranks == self.own_rank:
            rows = self._rows(vector)
            norms = np.abs(vector) if self.unit == 1 else np.linalg.norm(rows, axis=1)
            picks = _largest(norms, each).astype(np.uint32)[None]
            bits = np.concatenate(pack.elias_fano(picks, self._units), axis=1)
            slot = self.own_rank if self.by == "all" else 0
            words[2:].reshape(slots, -1)[slot] = pack.bits_to_words(bits)[0].view(np.int32)
        words[1] = checksum(words)
        return words

    def _read(self, total: Words, ranks: int) -> Positions | None:
        """All positions named, ascending; a rank that has joined names none."""
        slots, each, size = self._slots(ranks)
        if not slots:
            return np.zeros(0, np.int64)
        if total.size != size:
            raise CompressError(f"got {total.size} summed words of positions; expected {size}")
        if (checksum(total) - int(total[1])) % PRIME:
            raise PayloadError(
                "the summed positions do not have the sum of their checksums: they were damaged "
                "on the way, or ranks run with different settings."
            )
        if total[0]:
            return None
        found = total[2:].reshape(slots, -1)
        bits = pack.words_to_bits(found[found.any(axis=1)].view(np.uint32))
        low = each * pack.low_bits(each, self._units)
        upper = low + pack.upper_bits(each, self._units)
        positions = pack.read_elias_fano(bits[:, :low], bits[:, low:upper], each, self._units)
        return np.unique(positions.astype(np.int64))

    def _agree(self, named: Positions) -> Positions:
        """The units to send, [count]."""
        expected = np.maximum(self._spread * np.sqrt(self._ages), _TINY)
        if named.size > self.count:
            named = np.roll(named, int(self._turn[0]))[: self.count]
        left = expected.copy()
        left[named] = 0
        aged = (self.count - named.size) // _AGED
        past = _largest(left, self.count - named.size - aged)
        waited = self._ages.copy()
        waited[named] = waited[past] = 0
        return np.concatenate([named, past, _largest(waited, aged)])

    def _rows(self, vector: Floats) -> Floats:
        return vector.reshape(-1, self.unit)

    def _peaks(self, values: Floats) -> Floats:
        """The largest magnitude of each unit: unlike a norm, the same on every machine."""
        return np.asarray(np.abs(self._rows(values)).max(axis=1), np.float32)

    @property
    def _exponents(self) -> Array:
        return self._wire.exponents

    @_exponents.setter
    def _exponents(self, value: Array) -> None:
        self._wire.exponents = value

    def _shared(self) -> dict[str, Array]:
        names = ("_exponents", "_spread", "_ages", "_turn", "_next")
        return {name: getattr(self, name) for name in names}


def _largest(values: Floats, count: int) -> Positions:
    return largest(values[None], count)[0] if count else np.zeros(0, np.int64)
