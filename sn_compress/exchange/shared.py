"""Shared support: what each rank sends can be summed, so an all-reduce carries it.

A gather hands every rank all payloads, so what is received grows with their number. Here all
ranks agree, from numbers they already share, on what will be sent; an all-reduce adds it up. The
cost does not grow with the number of ranks, and a rank that has joined just adds zeros.

The wire is int32 words of low-bit digits (`digits.py`) on scales that all ranks share. What
rounding or clipping takes away stays in the rank's own memory, like everything not sent.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import Any

import numpy as np
import numpy.typing as npt

from ..codecs.base import Floats, as_vector
from ..errors import CompressError, PayloadError
from ..saved import floats, reading
from .digits import Digits, Words

Array = npt.NDArray[Any]
# Yields words to be summed over the ranks, is sent the sum, returns the mean.
Rounds = Generator[Words, Words, Floats]

_FINENESS = 4  # exponents are kept in quarters of an octave
_FLOOR, _TOP = -256, 255  # of exponents: scales from 2**-64 to 2**64
_COUNT = 2**20  # in a word of the head, above the exponents' sum
PRIME = 2**20 - 3  # of checksums: the sum of 2047 of them fits a word
_HEAD = 2  # words: ranks that are lost, and the checksum
_SPREAD = 2  # a rank's peak over that of the mean, for a first guess
_MARGIN = 1  # quarters of an octave between the ranks' mean peak and the largest digit


class Scaled:
    """Columns of numbers as digits, each column on a scale that all ranks share.

    The scale of a step comes from the ranks' mean peak in the step before, which travels in the
    head: a word that counts ranks with numbers that are not finite, a checksum, and a word for
    each column. The checksum is linear, so that the sum of the ranks' must be that of the sum.
    """

    def __init__(self, side: int, columns: int, *, fine: bool = False) -> None:
        self.side, self.columns, self.fine = side, columns, fine
        self.exponents = np.zeros(columns, np.int32)

    @property
    def _head(self) -> int:
        return _HEAD + self.columns

    def expect(self, part: Floats) -> None:
        """Begin with scales for numbers like these, [side, columns]; zeros say nothing."""
        peaks = _SPREAD * np.abs(part).max(axis=0, initial=0.0)
        self.exponents = _logs(peaks)[0]

    def words(self, ranks: int) -> int:
        """Words that travel."""
        return scaled_words(self.side, self.columns, ranks, fine=self.fine)

    def pack(self, part: Floats | None, ranks: int) -> tuple[Words, Floats | None]:
        """[words] int32 for [side, columns] numbers, and what they will be read as.

        None, or numbers that are not finite, tell every rank that this step is lost.
        """
        words = np.zeros(self.words(ranks), np.int32)
        if part is None or not np.isfinite(part).all():
            words[0] = 1
            words[1] = checksum(words)
            return words, None
        digits = Digits.of(ranks, fine=self.fine)
        logs, some = _logs(np.abs(part).max(axis=0, initial=0.0))
        words[2 : self._head] = np.where(some, logs + _COUNT, 0)
        unit = self._unit(digits)
        whole = np.rint(part / unit).clip(-digits.limit, digits.limit).astype(np.int32)
        words[self._head :] = digits.pack(whole.reshape(-1))
        words[1] = checksum(words)
        return words, whole.astype(np.float32) * unit

    def unpack(self, total: Words, ranks: int) -> tuple[Floats | None, npt.NDArray[np.int32]]:
        """The mean [side, columns], None if a rank had no numbers, and the next exponents."""
        if total.size != self.words(ranks):
            raise CompressError(
                f"got {total.size} summed words; expected {self.words(ranks)}. Do all ranks run "
                "the same version with the same settings?"
            )
        if (checksum(total) - int(total[1])) % PRIME:
            raise PayloadError(
                "the summed words do not have the sum of their checksums: they were damaged on the "
                "way, or ranks run with different settings. If it happens again, suspect memory "
                "or the network."
            )
        if total[0] != 0:
            return None, self.exponents
        digits = Digits.of(ranks, fine=self.fine)
        sums = digits.unpack(total[self._head :], self.side * self.columns)
        mean = sums.astype(np.float32).reshape(self.side, self.columns)
        mean *= self._unit(digits) / np.float32(ranks)
        head = total[2 : self._head].astype(np.int64)
        counts = (head + _COUNT // 2) // _COUNT
        known = np.rint((head - counts * _COUNT) / np.maximum(counts, 1)).astype(np.int32)
        return mean, np.where(counts > 0, known, self.exponents)

    def _unit(self, digits: Digits) -> Floats:
        """What one digit stands for, [columns]."""
        peak = np.exp2((self.exponents + _MARGIN) / _FINENESS)
        return np.asarray(peak / digits.limit, np.float32)


def scaled_words(side: int, columns: int, ranks: int, *, fine: bool = False) -> int:
    """Words in which `Scaled` columns travel: head, a scale for each, and the digits."""
    return _HEAD + columns + Digits.of(ranks, fine=fine).words(side * columns)


def _quiet() -> np.errstate:
    """Overflow ends as numbers that are not finite, and those are looked for."""
    return np.errstate(all="ignore")


def checksum(words: Words) -> int:
    """Sum of factor_i * word_i, the checksum's own word left out, modulo a prime.

    Linear in the words; a prime, and no factor a multiple of it, so that no change of a single bit
    goes unseen, wherever it is. Factors count up from 1 and begin again below the prime.
    """
    factors = 1 + np.arange(words.size, dtype=np.int64) % (PRIME - 1)
    factors[1] = 0
    return int((words.astype(np.int64) % PRIME * factors % PRIME).sum() % PRIME)


def _logs(peaks: Floats) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
    """Exponents that cover the peaks, [columns] int32, and where there are any."""
    some = peaks > 0
    logs = np.log2(peaks.astype(np.float64), where=some, out=np.zeros(peaks.shape))
    return np.ceil(_FINENESS * logs).clip(_FLOOR, _TOP).astype(np.int32), some


class Summable(ABC):
    """One tensor on one rank.

    `exchange(values)` is a generator: it yields words, the caller sends back their sum over the
    ranks, once or more, and it returns the mean. All ranks make the same object and feed it the
    same sums; then they share its state and return the same bits. Only `memory` is their own.

    NaN or Inf on one rank makes the result NaN on all of them and leaves every state as it was.

    Attributes
    ----------
    n : elements of the tensor
    memory : [n] float32, what this rank has not sent yet
    undoable : keep what `undo` needs; costs as much as `memory`
    energy, error : squared norms of gradient plus memory in the last step, and of what is left
    """

    rounds: int  # all-reduces in a step
    _exponents: Array  # int32, of the scales on which columns travel

    def __init__(self, n: int, *, undoable: bool = False) -> None:
        self.n, self.undoable = n, undoable
        self.own_rank: int | None = None
        self.memory = np.zeros(n, np.float32)
        self._before: dict[str, Any] = {}
        self.energy = self.error = 0.0

    @abstractmethod
    def words(self, ranks: int) -> list[int]:
        """Words of 4 bytes that travel in each round."""

    @abstractmethod
    def _steps(self, vector: Floats | None, ranks: int) -> Generator[Words, Words, Floats | None]:
        """The rounds for gradient plus memory, [n], None if it is not finite.

        Updates memory and shared state when all went well, and returns None when it did not. The
        vector is for it to keep: written into, it becomes the memory.
        """

    @abstractmethod
    def _shared(self) -> dict[str, Array]:
        """The arrays all ranks share, by attribute name; replaced, never written into."""

    def exchange(
        self,
        values: npt.ArrayLike,
        *,
        ranks: int,
        rank: int | None = None,
        decay: float = 1.0,
    ) -> Rounds:
        """Rounds of words to sum; returns the mean of the ranks' vectors, [n] float32.

        values : [n] float32, float16 or bfloat16
        ranks : how many may add to the sum
        rank : which of them this is, from 0; only a Support has to know
        decay : factor on the memory before it is added
        """
        vector = as_vector(values).astype(np.float32)
        if vector.size != self.n:
            raise CompressError(f"exchange: got {vector.size} elements; expected {self.n}")
        self.own_rank = rank
        before = {"memory": self.memory, **self._shared()} if self.undoable else {}
        with _quiet():
            # Nothing as large as the gradient is made that is not needed: the C library hands large
            # buffers back to the system, and they come again page by page.
            vector += self.memory if decay == 1 else self.memory * np.float32(decay)
            energy = float(vector @ vector)
            finite = np.isfinite(energy) or np.isfinite(vector).all()
            steps = self._steps(vector if finite else None, ranks)
            words = next(steps)
        while True:
            total = yield words  # outside, or the caller would be silenced too
            try:
                with _quiet():
                    words = steps.send(total)
            except StopIteration as end:
                result: Floats | None = end.value
                break
        self._before = {} if result is None else before
        if result is None:
            return np.full(self.n, np.nan, np.float32)
        with _quiet():
            self.energy, self.error = energy, float(self.memory @ self.memory)
        return result

    def rescale(self, factor: float) -> None:
        """Expect gradients that are `factor` times as large from now on; memory is left alone."""
        shift = round(_FINENESS * math.log2(factor))
        self._exponents = (self._exponents + shift).clip(_FLOOR, _TOP).astype(np.int32)

    def undo(self) -> None:
        """Take the last step back, as a loss scaler does that found NaN in another tensor."""
        for name, value in self._before.items():
            setattr(self, name, value)
        self._before = {}

    def settle(self) -> None:
        """Keep the last step: `undo` does nothing until there is another."""
        self._before = {}

    def state_dict(self) -> dict[str, Any]:
        """Arrays to go on from bit by bit; all but `memory` are alike on all ranks."""
        shared = {name: value.copy() for name, value in self._shared().items()}
        return {"memory": self.memory.copy(), "shared": shared}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what state_dict returned; nothing changes if it does not fit."""
        mine = {"memory": self.memory, **self._shared()}
        with reading("the saved state"):
            saved = {"memory": state["memory"], **state["shared"]}
            found = {name: _like(saved[name], name, value) for name, value in mine.items()}
        self._before = {}
        for name, value in found.items():
            setattr(self, name, value)


def _like(saved: Any, name: str, value: Array) -> Array:
    """A copy of a saved array, checked to be of the shape and kind of the one there is."""
    if value.dtype.kind == "f":
        return floats(saved, name, value.shape)
    array = np.asarray(saved)
    if array.shape != value.shape or array.dtype.kind not in (
        "b" if value.dtype.kind == "b" else "iu"
    ):
        raise CompressError(
            f"saved {name} has shape {array.shape} and dtype {array.dtype}; expected {value.shape} "
            f"and {value.dtype}. Was it saved with other settings, or for another layer?"
        )
    if value.dtype.kind == "i" and not ((array >= _FLOOR) & (array <= _TOP)).all():
        raise CompressError(f"saved {name} is outside {_FLOOR} to {_TOP}: it is damaged")
    return np.array(array, value.dtype, order="C")


class Halved(Summable):
    """Everything, in 16-bit digits; what rounding takes is made good a step later.

    Parameters
    ----------
    n : elements
    start : [n], a mean gradient that all ranks know, to begin on its scale
    """

    rounds = 1

    def __init__(
        self, n: int, *, start: npt.ArrayLike | None = None, undoable: bool = False
    ) -> None:
        super().__init__(n, undoable=undoable)
        self._wire = Scaled(n, 1, fine=True)
        if start is not None:
            self._wire.expect(np.asarray(start, np.float32)[:, None])

    def words(self, ranks: int) -> list[int]:
        return [self._wire.words(ranks)]

    def _steps(self, vector: Floats | None, ranks: int) -> Generator[Words, Words, Floats | None]:
        words, sent = self._wire.pack(None if vector is None else vector[:, None], ranks)
        mean, exponents = self._wire.unpack((yield words), ranks)
        if mean is None or sent is None or vector is None:
            return None
        vector -= sent[:, 0]
        self.memory, self._exponents = vector, exponents
        return mean[:, 0]

    @property
    def _exponents(self) -> Array:
        return self._wire.exponents

    @_exponents.setter
    def _exponents(self, value: Array) -> None:
        self._wire.exponents = value

    def _shared(self) -> dict[str, Array]:
        return {"_exponents": self._exponents}
