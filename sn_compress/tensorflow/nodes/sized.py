"""The sized form of a step: all of it nodes of the graph, what it remembers in tf.Variables.

As long as neither the sizes of factors nor theta change, the words of a step are as many at every
step, and all of it is arithmetic, with Horovod's collectives in between: sums (`summed.py`) or
payloads (`gathered.py`). An ordinary step calls no Python. What counts is counted in variables, and
read when somebody asks.

A step of other sizes has another graph: a dense one, which calls Python (`tape.py`) to keep means
and choose sizes, or one of another theta. So functions are traced again when the form changes; see
`tracing.forget`. A form without any tensor only counts: that of steps in which AutoCompression lets
all of them travel plain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from ...base.errors import CompressError
from ...base.sameness import Sameness
from ...report import Ran
from .outcomes import Mark, Outcomes
from .variables import variable

LEAST = 10  # steps of the same sizes: for fewer it is not worth tracing a graph
_FOR_EVER = 2**62
_OVERDUE = 1000  # steps behind the last one, after which no trace will come
_ENDED = (
    "CompressError: the step of this graph has ended: its error memories were loaded, made alike, "
    "cleared, or went on in another function. Call the tf.function, which is traced again, in "
    "place of a concrete function of before."
)


@dataclass(frozen=True)
class Collectives:
    """How words travel, as nodes of the graph.

    total : the sum of the ranks' words; called with them, the bucket's number and the round
    gather : the ranks' words one behind the other; called with them and the bucket's number
    alltoall : what the ranks have for this one, likewise; called with words, how many of them each
        rank is to have, and the bucket's number
    """

    ranks: int
    rank: int
    total: Callable[[Any, int, int], Any]
    gather: Callable[[Any, int], Any]
    alltoall: Callable[[Any, Sequence[int], int], Any]


class SizedBucket(Protocol):
    """Tensors that travel together, and what is kept of them in variables."""

    names: tuple[str, ...]

    def step(
        self, number: int, vectors: Sequence[Any], by: Collectives, dropped: Any = None
    ) -> tuple[list[Any], Any]:
        """The means of gradients, [n] float32 each, and [3] float64: energy, error, saturated.

        Energy and error are squared norms of what this rank had to send, and of what it keeps.

        dropped : of which tensors the last gradient was not applied, [tensors] bool; None where
            all count as applied
        """

    def remembered(self) -> list[Any]:
        """What the variables hold where the graph has come to."""

    def read(self, steps: int) -> None:
        """Bring what the variables hold to the core, after so many steps of this form."""

    def ran(self, steps: int) -> list[Ran]:
        """What so many steps have sent; nothing where it was traced in vain."""


@dataclass(frozen=True)
class Told:
    """What graphs have counted.

    steps, ran : how many, and what they have sent
    relative : [sum over steps, steps] of the relative errors
    saturated : values that were clipped
    sparse : elements and bytes of sparse gradients
    """

    steps: int
    ran: list[Ran]
    relative: Any
    saturated: int
    sparse: dict[str, Any]


class Sized:
    """The sized form of one call of Horovod's; made while it traces, and shared by its traces.

    buckets : what the tensors remember has moved to their variables
    same : when parameters are compared
    until : steps until sizes are others; None where they stay
    rest : steps for which a tuner is not asked; 0 where one is asked at each step, or there is none
    plain : what travels plain beside them, each with its elements and bytes: to be counted
    marks : of each tensor's variable; None where all gradients count as applied
    """

    def __init__(
        self,
        buckets: Sequence[SizedBucket],
        same: Sameness,
        *,
        until: int | None = None,
        rest: int = 0,
        plain: Sequence[tuple[str, int, int]] = (),
        marks: Sequence[Mark] | None = None,
    ) -> None:
        self.buckets, self.same = list(buckets), same
        self._plain, self.rests = tuple(plain), rest > 0
        self.names = [name for bucket in buckets for name in bucket.names]
        self._until = until
        self.limit = min(_FOR_EVER if until is None else until, rest or _FOR_EVER)
        self.steps = variable(np.int64(0))
        self.alive = variable(np.bool_(True))
        self._compared = variable(np.int64(same.steps))
        self._relative = variable(np.zeros(2))
        self._saturated = variable(np.float64(0))
        self._sparse: dict[str, Any] = {}  # [elements, bytes] so far
        self._told = Told(0, [], np.zeros(2), 0, {})
        self._outcomes = None if marks is None else Outcomes(marks)
        self._dropping = variable(np.int64(0))  # steps before which something was dropped

    def begin(self, trace_again: Callable[[], None]) -> tuple[Any, Any, Any]:
        """A step begins: a node that counts it; whether parameters are compared, before which step.

        trace_again : called in steps in which the form has come to its end, but not in others
        """

        def ended(at: Any) -> Any:
            if self._until is not None and at > self._until + _OVERDUE:
                raise CompressError(
                    f"{_OVERDUE} steps without the one of other sizes that was to come: TensorFlow "
                    f"{tf.__version__} does not trace the step again. Call a tf.function, not a "
                    "concrete function; else please report your version of TensorFlow."
                )
            trace_again()
            return np.int64(0)

        def rare(at: Any) -> Any:
            found = tf.numpy_function(ended, [at], tf.int64)
            found.set_shape([])  # who plans the step's memory has to know it
            return found

        alive = tf.debugging.Assert(self.alive.read_value(), [_ENDED])
        with tf.control_dependencies([alive]):
            self.steps.assign_add(1)
            self._compared.assign_add(1)
        at, compared = self.steps.read_value(), self._compared.read_value()
        with tf.device("CPU"):
            begun = tf.cond(
                at >= self.limit,
                lambda: rare(at),
                lambda: tf.constant(0, tf.int64),
                name="sn_rare_end",
            )
        every = self.same.every
        before = compared - 1
        due = (before > 0) & (before % every == 0) if every else tf.constant(False)
        return begun, due, before

    def step(
        self,
        vectors: Sequence[Sequence[Any]],
        by: Collectives,
        digests: Any,
        say_dropped: Callable[[], None],
    ) -> list[list[Any]]:
        """The means of each bucket's gradients, [n] float32 each.

        digests : of all tensors' variables, [tensors] int64; None without marks
        say_dropped : called before the first step behind a gradient that was dropped
        """
        means, numbers = [], []
        dropped = [None] * len(self.buckets)
        if self._outcomes is not None:
            every = self._outcomes.dropped(digests)
            self._say_first(tf.reduce_any(every), say_dropped)
            dropped = tf.split(every, [len(bucket.names) for bucket in self.buckets])
        pieces = zip(self.buckets, vectors, dropped, strict=True)
        for number, (bucket, own, gone) in enumerate(pieces):
            made, told = bucket.step(number, own, by, gone)
            means.append(made)
            numbers.append(told)
        energy, error, saturated = tf.unstack(tf.add_n(numbers))
        known = tf.math.is_finite(energy) & (energy > 0)
        relative = tf.sqrt(error / tf.where(known, energy, 1))
        both = tf.stack([relative, tf.ones_like(relative)])
        self._relative.assign_add(tf.where(known, both, tf.zeros_like(both)))
        self._saturated.assign_add(saturated)
        return means

    def _say_first(self, dropped: Any, say: Callable[[], None]) -> None:
        def rare() -> Any:
            def run() -> Any:
                say()
                return np.int64(0)

            found = tf.numpy_function(run, [], tf.int64)
            found.set_shape([])
            return found

        self._dropping.assign_add(tf.cast(dropped, tf.int64))
        first = dropped & (self._dropping.read_value() == 1)
        with tf.device("CPU"):
            tf.cond(first, rare, lambda: tf.constant(0, tf.int64), name="sn_rare_dropped")

    def remembered(self) -> list[Any]:
        """What the tensors remember, read where the graph has come to: nodes to wait for."""
        return [it for bucket in self.buckets for it in bucket.remembered()]

    def marks(self) -> dict[str, Mark]:
        """Of the tensors' variables, by name."""
        found = [] if self._outcomes is None else self._outcomes.marks()
        return dict(zip(self.names, found, strict=False))

    def count_sparse(self, key: str, values: Any, indices: Any) -> None:
        """Count a sparse gradient in every step."""
        if key not in self._sparse:
            self._sparse[key] = variable(np.zeros(2, np.int64))
        parts = [(tf.size(each, tf.int64), each.dtype.size) for each in (values, indices)]
        nbytes = tf.add_n([size * width for size, width in parts])
        self._sparse[key].assign_add(tf.stack([parts[0][0], nbytes]))

    def read(self) -> Told:
        """Bring all to the core; what graphs have counted since this was asked last."""
        steps = self.ran
        for bucket in self.buckets:
            bucket.read(steps)
        now = Told(
            steps,
            [],
            self._relative.numpy(),
            int(self._saturated.numpy()),
            {key: each.numpy() for key, each in self._sparse.items()},
        )
        before, self._told = self._told, now
        own = now.steps - before.steps
        ran = [each for bucket in self.buckets for each in bucket.ran(own)]
        ran += [Ran(name, n, 4 * n, nbytes, "plain", own) for name, n, nbytes in self._plain]
        for key, (elements, nbytes) in now.sparse.items():
            had = before.sparse.get(key, (0, 0))
            new = int(nbytes - had[1])
            ran.append(Ran(key, int(elements - had[0]), new, new, "plain", 1))
        self.same.steps = int(self._compared.numpy())
        relative, saturated = now.relative - before.relative, now.saturated - before.saturated
        return Told(own, ran, relative, saturated, {})

    @property
    def ran(self) -> int:
        """Steps so far."""
        return int(self.steps.numpy())

    @property
    def ended(self) -> bool:
        """Whether the next step is another one: dense, or one that asks the tuner."""
        return self.ran >= self.limit
