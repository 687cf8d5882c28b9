"""Bucket: the tensors of one step, grouped by method, so that each round is one all-reduce.

A round starts with two words: the number of ranks with NaN or Inf, and a checksum. The checksum is
linear in the words, so the sum of all ranks' checksums must be the checksum of the sum. A step in
which any rank has NaN or Inf is lost on all: the mean is NaN, and all state stays unchanged.

A bucket keeps no state between steps, and reads no value back from a device. So libraries with
graphs, such as TensorFlow, can trace a step; for others, `state.py` keeps the state between steps.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from .. import _native
from ..arrays import full_fp32_matmul, host_threads, namespace, where_all
from ..errors import CompressError
from ..ops.fixed_point import PRIME, word_sum
from ..ops.products import kernel, remembered
from .methods.base import HEAD, Array, Method, Outcome, Send, State, Step, StepOptions, Summed
from .methods.low_rank import LowRank


@dataclass(frozen=True)
class Result:
    """The result of a step; tensors in the order of the bucket.

    Attributes
    ----------
    residuals, mean : [rows, columns] float32 of each; see Outcome
    state : the next step's; the old one if this step was lost
    lost : 0-d bool: a rank had NaN or Inf; `residuals` is then undefined
    damaged : 0-d bool: a checksum does not match its sum
    energy : 0-d, the squared norm of gradients plus memories; None without memories
    sent : 0-d, the same minus the squared norm of the residuals
    """

    residuals: list[Array]
    mean: list[Array]
    state: State
    lost: Array
    damaged: Array
    energy: Array | None
    sent: Array

    def numbers(self) -> Array:
        """Return [4] float64: lost and damaged as 0 or 1, energy, sent."""
        values = (self.lost, self.damaged, self.energy, self.sent)
        if isinstance(self.lost, np.bool_ | np.ndarray):  # one call instead of five
            return np.array(values, np.float64)
        xp = namespace(self.lost)
        return xp.stack([xp.astype(number, xp.float64) for number in values])


Rounds = Generator[Array, Array, Result]


@lru_cache(maxsize=256)
def bucket_of(parts: tuple[Method, ...]) -> tuple[Bucket, tuple[int, ...]]:
    """Return a bucket with parts merged by class, and the index of the tensor at each position."""
    # By first appearance, never by hash: a round must have the same layout on all ranks.
    kinds = list(dict.fromkeys(type(part) for part in parts))
    order = [at for kind in kinds for at, part in enumerate(parts) if type(part) is kind]
    merged = [kind.together([part for part in parts if type(part) is kind]) for kind in kinds]
    return Bucket(merged), tuple(order)


class Bucket:
    """One or more methods, each for a subset of the tensors."""

    def __init__(self, parts: Sequence[Method]) -> None:
        self.parts = tuple(parts)
        self.rounds = max(part.rounds for part in parts)

    def split(self, state: State) -> list[State]:
        """Return the state of each tensor, in the order of `shapes`."""
        pieces = zip(self.parts, self._states(state), strict=True)
        return [piece for part, of_part in pieces for piece in part.split(of_part)]

    def join(self, states: Sequence[State]) -> State:
        """Invert `split`."""
        by_part = zip(self.parts, self._by_part(states), strict=True)
        return self._named(part.join(pieces) for part, pieces in by_part)

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(rows, columns) of each tensor, in the order in which they are passed."""
        return [shape for part in self.parts for shape in part.shapes]

    def words(self, ranks: int) -> list[int]:
        """Return the 4-byte words sent in each round, heads included."""
        words_of = [part.words(ranks) for part in self.parts]
        return [
            HEAD + sum(words[place] for words in words_of if place < len(words))
            for place in range(self.rounds)
        ]

    def step(
        self,
        state: State,
        gradients: Sequence[Array],
        options: StepOptions,
        memories: Sequence[Array] | None = None,
        *,
        added: Sequence[Array | None] | None = None,
        outs: Sequence[Array] | None = None,
    ) -> Rounds:
        """Run the rounds of a step: yields [words] int32, and is sent their sum over the ranks.

        Parameters
        ----------
        state : shared by all ranks, from `join` or the last step
        gradients, memories : of each tensor, [n] float32; without memories, gradients are
            [rows, columns], and the step overwrites them with the residuals
        added, outs : buffers for gradient plus memory, and for the means; None allocates them;
            `outs` may be the gradients

        Every rank makes the same call. Ranks that receive the same sums return the same bits.
        """
        steps: list[Step] = []
        sends: dict[int, Send] = {}
        energy: Array | None = None
        with full_fp32_matmul(gradients[0]):
            compiled = _compiled(gradients, options)
            lists = [self._by_part(values) for values in (gradients, memories, added, outs)]
            for part, shared, *arrays in zip(self.parts, self._states(state), *lists, strict=True):
                step, square = _begin(part, compiled, shared, options, *arrays)
                send = next(step)
                square = send.energy if square is None else square
                energy = square if energy is None else energy + square
                sends[len(steps)] = send
                steps.append(step)
            xp = namespace(sends[0].words)
            # Products with orthonormal directions have at most this norm. So if it is finite in
            # float32, no later round overflows: a step is lost in its first round or not at all.
            finite = None if energy is None else xp.isfinite(energy)
            words = _round(sends, finite)
        ended: dict[int, Outcome] = {}
        lost = damaged = None
        # Parts have one round or two; those with a second one share it.
        while sends:
            total = yield words
            if total.shape != words.shape:
                raise CompressError(
                    f"got {total.shape[0]} summed words; expected {words.shape[0]}. Do all ranks "
                    "run the same version with the same settings?"
                )
            with full_fp32_matmul(gradients[0]):
                bad = (word_sum(total) - xp.astype(total[1], xp.int64)) % PRIME != 0
                gone = total[0] != 0
                lost = gone if lost is None else lost | gone
                damaged = bad if damaged is None else damaged | bad
                # No branch on `lost`, which the device may not have computed yet: a factor of NaN
                # makes the means of a lost step NaN.
                one = xp.ones_like(total[0], dtype=xp.float32)
                poison = xp.where(lost, one * float("nan"), one)
                following, at = {}, HEAD
                for place, send in sends.items():
                    end = at + send.words.shape[0]
                    try:
                        following[place] = steps[place].send(Summed(total[at:end], poison))
                    except StopIteration as stop:
                        ended[place] = stop.value
                    at = end
                sends = following
                words = _round(sends, finite) if sends else words
        # Shared state is selected here, memories by the caller, which has the old ones.
        outcomes = [ended[place] for place in range(len(steps))]
        with full_fp32_matmul(gradients[0]):
            new = self._named(outcome.state for outcome in outcomes)
            return Result(
                residuals=[residual for end in outcomes for residual in end.residuals],
                mean=[mean for end in outcomes for mean in end.mean],
                state={name: xp.where(lost, state[name], value) for name, value in new.items()},
                lost=lost,
                damaged=damaged,
                energy=energy,
                sent=sum(outcome.sent for outcome in outcomes[1:]) + outcomes[0].sent,
            )

    def _by_part(self, values: Sequence[Any] | None) -> list[Any]:
        """Split a list into the values of each part's tensors; None becomes None for each part."""
        if values is None:
            return [None] * len(self.parts)
        by_part, at = [], 0
        for part in self.parts:
            by_part.append(values[at : at + len(part.shapes)])
            at += len(part.shapes)
        return by_part

    def _named(self, states: Iterable[State]) -> State:
        """Merge the parts' states into one, with the part's number as a prefix of the names."""
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


@dataclass(frozen=True)
class StepResult:
    """The result of `traced_step`; tensors in the order of the bucket.

    Attributes
    ----------
    means : [n] float32 of each tensor; NaN if the step was lost
    memories, state : the next step's; the old ones if the step was lost
    numbers : see Result.numbers
    """

    means: list[Array]
    memories: list[Array]
    state: State
    numbers: Array


def traced_step(
    bucket: Bucket,
    state: State,
    memories: Sequence[Array],
    gradients: Sequence[Array],
    options: StepOptions,
) -> Generator[Array, Array, StepResult]:
    """Run a step inside a graph; see Bucket.step.

    A graph cannot undo a lost step afterwards, so it selects the old state itself.
    """
    for gradient, shape in zip(gradients, bucket.shapes, strict=True):
        check(gradient, shape)
    result = yield from bucket.step(state, gradients, options, memories)
    xp, names, count = namespace(gradients[0]), list(state), len(memories)
    residuals = [xp.reshape(residual, (-1,)) for residual in result.residuals]
    values = where_all(
        result.lost | result.damaged,
        [*memories, *(state[name] for name in names)],
        [*residuals, *(result.state[name] for name in names)],
    )
    means = [xp.reshape(mean, (-1,)) for mean in result.mean]
    following = dict(zip(names, values[count:], strict=True))
    return StepResult(means, values[:count], following, result.numbers())


def _begin(
    part: Method,
    compiled: bool,
    state: State,
    options: StepOptions,
    gradients: Sequence[Array],
    memories: Sequence[Array] | None,
    added: Sequence[Array | None] | None,
    outs: Sequence[Array] | None,
) -> tuple[Step, Array | None]:
    """Return a part's step, and the squared norm of gradients plus memories if known here."""
    if memories is None:
        return part.step(state, gradients, options, outs), None
    if isinstance(part, LowRank) and compiled:
        return part.compiled_step(state, gradients, memories, options, added, outs), None
    xp, energy, matrices = namespace(gradients[0]), None, []
    into = added or [None] * len(gradients)
    for memory, gradient, out, shape in zip(memories, gradients, into, part.shapes, strict=True):
        vector, square = remembered(memory, gradient, options.decay, out)
        matrices.append(xp.reshape(vector, shape))
        energy = square if energy is None else energy + square
    if outs is not None:
        pairs = zip(outs, part.shapes, strict=True)
        outs = [namespace(out).reshape(out, shape) for out, shape in pairs]
    return part.step(state, matrices, options, outs), energy


def _compiled(gradients: Sequence[Array], options: StepOptions) -> bool:
    """Whether the extension computes the low-rank parts, with one call per round.

    It runs on one thread; products outside of it use all threads.
    """
    if options.exact or any(type(gradient) is not np.ndarray for gradient in gradients):
        return False
    return host_threads(gradients[0]) == 1 and kernel(_native.core()) is not None


def _round(sends: dict[int, Send], finite: Array | None) -> Array:
    """Return the words of a round with their head; zeros if this rank has NaN or Inf."""
    pieces = list(sends.values())
    xp = namespace(pieces[0].words)
    finite = pieces[0].finite if finite is None else pieces[0].finite & finite
    for piece in pieces[1:]:
        finite = finite & piece.finite
    body = xp.concat([piece.words for piece in pieces])
    # Conversion of non-finite floats to integers differs between processors.
    body = xp.where(finite, body, xp.zeros_like(body))
    lost = xp.reshape(xp.astype(~finite, xp.int32), (1,))
    words = xp.concat([lost, xp.zeros_like(lost), body])  # word_sum skips its own position
    check = xp.reshape(xp.astype(word_sum(words), xp.int32), (1,))
    return xp.concat([lost, check, body])


def check(gradient: Array, shape: tuple[int, int]) -> None:
    """Raise CompressError if a gradient does not have the tensor's size."""
    if tuple(gradient.shape) != (shape[0] * shape[1],):
        raise CompressError(
            f"exchange: got a gradient of shape {tuple(gradient.shape)}; expected "
            f"({shape[0] * shape[1]},)"
        )
