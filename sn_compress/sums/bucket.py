"""Bucket: the parts of many tensors in one step, so that each round is one all-reduce.

The head of a round is two words: how many ranks have numbers that are not finite, and a checksum
that is linear in the words, so that the sum of the ranks' must be that of the sum. A step in which
a rank had none is lost on all of them: its mean is NaN, and everything stays as it was.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from ..base.errors import CompressError
from ..devices.arrays import namespace
from ..ops.words.word_sum import PRIME, word_sum
from .parts.base import Array, Outcome, Part, State, Step, Summed

HEAD = 2  # words


@dataclass(frozen=True)
class Result:
    """What a step has made.

    Attributes
    ----------
    left, mean : per tensor, in the order of the parts; see Outcome
    state : the next step's; the old one if this was lost
    lost : 0-d bool: a rank had numbers that are not finite. `left` is good for nothing then
    damaged : 0-d bool: a sum does not have the sum of the checksums
    sent : 0-d float32, the squared norm of gradient and memory less that of what is left
    """

    left: list[Array]
    mean: list[Array]
    state: State
    lost: Array
    damaged: Array
    sent: Array


Rounds = Generator[Array, Array, Result]


class Bucket:
    """Parts side by side.

    parts : in any order; at least one
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)
        self.rounds = max(part.rounds for part in parts)

    def split(self, state: State) -> list[State]:
        """The state of each tensor, in the order of `shapes`."""
        pieces = zip(self.parts, self._states(state), strict=True)
        return [each for part, own in pieces for each in part.split(own)]

    def join(self, states: Sequence[State]) -> State:
        """What `split` has split."""
        given = zip(self.parts, self._given(states), strict=True)
        return self._named(part.join(own) for part, own in given)

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(rows, columns) of each tensor, in the order in which they are handed over."""
        return [shape for part in self.parts for shape in part.shapes]

    def words(self, ranks: int) -> list[int]:
        """Words of 4 bytes that travel in each round, heads included."""
        each = [part.words(ranks) for part in self.parts]
        return [
            HEAD + sum(words[place] for words in each if place < len(words))
            for place in range(self.rounds)
        ]

    def new_state(self, like: Array) -> State:
        """The state before anything is known, on the device of `like`."""
        return self._named(part.new_state(like) for part in self.parts)

    def begin(self, state: State, means: Sequence[Array]) -> State:
        """Directions and scales for gradients like these means; see Part.begin."""
        states, given = self._states(state), self._given(means)
        pieces = zip(self.parts, states, given, strict=True)
        return self._named(part.begin(own, mine) for part, own, mine in pieces)

    def rescale(self, state: State, quarters: int) -> State:
        """Expect gradients 2**(quarters / 4) times as large from now on."""
        pieces = zip(self.parts, self._states(state), strict=True)
        return self._named(part.rescale(own, quarters) for part, own in pieces)

    def step(
        self,
        state: State,
        matrices: Sequence[Array],
        *,
        ranks: int,
        rank: int | None,
        exact: bool = False,
        outs: Sequence[Array] | None = None,
        finite: Array | None = None,
    ) -> Rounds:
        """The rounds of a step: yields [words] int32, is sent their sum; see Part.step.

        finite : 0-d bool, whether the squared norm of all matrices is a number in float32. Then no
            product with directions is too large, so that a step is not lost when some parts of it
            have ended
        """
        xp = namespace(matrices[0])
        into = self._given(outs) if outs is not None else [None] * len(self.parts)
        steps: list[Step] = [
            part.step(own, mine, ranks=ranks, rank=rank, exact=exact, outs=out)
            for part, own, mine, out in zip(
                self.parts, self._states(state), self._given(matrices), into, strict=True
            )
        ]
        found: dict[int, Outcome] = {}
        sends = {place: next(step) for place, step in enumerate(steps)}
        lost = damaged = None
        while sends:
            words = _round(sends, finite)
            total = yield words
            if total.shape != words.shape:
                raise wrong_size(total, words)
            bad = (word_sum(total) - xp.astype(total[1], xp.int64)) % PRIME != 0
            gone = total[0] != 0
            lost = gone if lost is None else lost | gone
            damaged = bad if damaged is None else damaged | bad
            one = xp.ones_like(total[0], dtype=xp.float32)
            poison = xp.where(lost, one * float("nan"), one)
            sends = _on(steps, sends, total, poison, found)
        outcomes = [found[place] for place in range(len(steps))]
        new = self._named(it.state for it in outcomes)
        return Result(
            left=[each for it in outcomes for each in it.left],
            mean=[each for it in outcomes for each in it.mean],
            state={name: xp.where(lost, state[name], value) for name, value in new.items()},
            lost=lost,
            damaged=damaged,
            sent=sum(it.sent for it in outcomes[1:]) + outcomes[0].sent,
        )

    def _given(self, values: Sequence[Any]) -> list[Sequence[Any]]:
        """Each part's own."""
        found, at = [], 0
        for part in self.parts:
            found.append(values[at : at + len(part.shapes)])
            at += len(part.shapes)
        return found

    def _named(self, states: Any) -> State:
        return {
            f"{place}.{name}": value
            for place, state in enumerate(states)
            for name, value in state.items()
        }

    def _states(self, state: State) -> list[State]:
        return [
            {
                name.partition(".")[2]: value
                for name, value in state.items()
                if name.partition(".")[0] == str(place)
            }
            for place in range(len(self.parts))
        ]


def _round(sends: dict[int, Any], finite: Array | None) -> Array:
    """The words of a round with their head; zeros but for the first one without numbers."""
    pieces = list(sends.values())
    xp = namespace(pieces[0].words)
    finite = pieces[0].finite if finite is None else pieces[0].finite & finite
    for piece in pieces[1:]:
        finite = finite & piece.finite
    body = xp.concat([it.words for it in pieces])
    body = xp.where(finite, body, xp.zeros_like(body))
    lost = xp.reshape(xp.astype(~finite, xp.int32), (1,))
    words = xp.concat([lost, xp.zeros_like(lost), body])
    check = xp.reshape(xp.astype(word_sum(words), xp.int32), (1,))
    return xp.concat([lost, check, body])


def _on(
    steps: Sequence[Step], sends: dict[int, Any], total: Array, poison: Array, found: dict[int, Any]
) -> dict[int, Any]:
    """Hand every part its words; what they send in the next round."""
    following, at = {}, HEAD
    for place, send in sends.items():
        end = at + send.words.shape[0]
        try:
            following[place] = steps[place].send(Summed(total[at:end], poison))
        except StopIteration as stop:
            found[place] = stop.value
        at = end
    return following


def wrong_size(total: Array, words: Array) -> CompressError:
    """The error for a sum that is of other words."""
    error: CompressError = CompressError(
        f"got {total.shape[0]} summed words; expected {words.shape[0]}. Do all ranks run the same "
        "version with the same settings?"
    )
    return error
