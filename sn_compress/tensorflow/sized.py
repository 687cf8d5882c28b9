"""The sized form of a step: low-rank factors as nodes of the graph, the memories in tf.Variables.

Once the ranks have agreed on sizes, the words of a step are as many at every step, and all of it is
arithmetic: the generator of `sums/step.py` is driven while TensorFlow traces, with Horovod's
all-reduce between two of its words. An ordinary step calls no Python. What counts is counted in
variables, and read when somebody asks.

A dense step has another form: it calls Python (`tape.py`), which keeps means and chooses sizes. So
functions are traced again when the form changes; see `tracing.forget`. A form without any tensor
only counts: that of steps in which AutoCompression lets all of them travel plain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from ..arrays import to_host
from ..errors import CompressError
from ..report import Ran
from ..sameness import Sameness
from ..sums.bucket import HEAD
from ..sums.session import SharedExchange
from ..sums.step import bucket_of, step
from ..sums.summable import Summable
from . import namespace as _namespace  # noqa: F401 - it makes tensors known to the core

LEAST = 10  # steps up to the next dense one: for fewer it is not worth tracing a graph
_OVERDUE = 1000  # steps behind the last one, after which no trace will come
_DAMAGED = (
    "PayloadError: the summed words do not have the sum of their checksums: they were damaged on "
    "the way, or ranks run with different settings. If it happens again, suspect memory or the "
    "network."
)
_ENDED = (
    "CompressError: the step of this graph has ended: its error memories were loaded, made alike, "
    "cleared, or went on in another function. Call the tf.function, which is traced again, in "
    "place of a concrete function of before."
)


@dataclass(frozen=True)
class Reduction:
    """How the ranks' words are summed: called with words, the bucket's number and the round."""

    ranks: int
    rank: int
    total: Callable[[Any, int, int], Any]


def variable(value: Any) -> Any:
    """A variable made in any trace: tf.function lets tf.Variable be made in its first only."""
    with tf.init_scope():
        return ResourceVariable(value, trainable=False)


class SizedBucket:
    """What ranks share of tensors that travel together, and what this rank has not sent of them."""

    def __init__(self, exchange: SharedExchange, names: Sequence[str]) -> None:
        self._of, self.names = exchange, tuple(names)
        summables = self.summables()
        self.bucket, self.order = bucket_of(tuple(one.part for one in summables))
        own = [summables[at] for at in self.order]
        state = self.bucket.join([_hosted(one.state) for one in own])
        self.state = {name: variable(it) for name, it in state.items()}
        self.memories = [variable(to_host(one.memory)) for one in own]
        for one in own:  # not twice in memory; `read` brings it back
            one.replace(np.broadcast_to(np.float32(0), (one.n,)))
        self.sent: list[int] = []  # words in each round, known when traced

    def summables(self) -> list[Summable]:
        """Those of the exchange, in the order of the names."""
        found = [self._of.tensors[name].summable for name in self.names]
        return [one for one in found if one is not None]

    def step(self, number: int, vectors: Sequence[Any], by: Reduction) -> tuple[list[Any], Any]:
        """The means of gradients, [n] float32 each, and the numbers of Stepped."""
        rounds = step(
            self.bucket,
            {name: it.read_value() for name, it in self.state.items()},
            [it.read_value() for it in self.memories],
            [vectors[at] for at in self.order],
            ranks=by.ranks,
            rank=by.rank,
            decay=self._of.decay,
            exact=self._of.exact,
        )
        total, self.sent = None, []
        while True:
            try:
                words = rounds.send(total)  # type: ignore[arg-type]
            except StopIteration as end:
                made = end.value
                break
            self.sent.append(words.shape[0])
            total = by.total(words, number, len(self.sent))
            total.set_shape(words.shape)
        sound = tf.debugging.Assert(made.numbers[1] == 0, [_DAMAGED])
        with tf.control_dependencies([sound]):
            for name, own in self.state.items():
                own.assign(made.state[name])
            for own, memory in zip(self.memories, made.memories, strict=True):
                own.assign(memory)
            placed = dict(zip(self.order, made.means, strict=True))
            return [tf.identity(placed[at]) for at in range(len(vectors))], made.numbers

    def read(self) -> None:
        """Bring what the variables hold to the exchange."""
        summables = self.summables()
        state = {name: it.numpy() for name, it in self.state.items()}
        pieces = zip(self.order, self.bucket.split(state), self.memories, strict=True)
        for at, own, memory in pieces:
            summables[at].replace(memory.numpy())
            summables[at].state = own

    def words(self, ranks: int) -> list[int]:
        """Of each tensor in a step; the first one has what none has alone, the heads."""
        own = [sum(each - HEAD for each in one.words(ranks)) for one in self.summables()]
        return [sum(self.sent) - sum(own[1:]), *own[1:]]


class Sized:
    """The sized form of one call of Horovod's; made while it traces, and shared by its traces.

    exchange : whose tensors have sizes; what they remember moves to variables
    parts : names of the tensors of each bucket
    same : when parameters are compared
    rest : steps for which a tuner is not asked; 0 where one is asked at each step, or there is none
    plain : what travels plain beside them, each with its elements and bytes: to be counted
    """

    def __init__(
        self,
        exchange: SharedExchange,
        parts: Sequence[Sequence[str]],
        same: Sameness,
        *,
        rest: int = 0,
        plain: Sequence[tuple[str, int, int]] = (),
    ) -> None:
        self._of, self.same = exchange, same
        self._plain, self.rests = tuple(plain), rest > 0
        self.names = [name for names in parts for name in names]
        self._dense = _until_dense(exchange, self.names) if self.names else None
        ends = [] if self._dense is None else [self._dense]
        self.limit = min([*ends, rest] if rest else ends)
        self._began = {name: exchange.tensors[name].step for name in self.names}
        self.buckets = [SizedBucket(exchange, names) for names in parts]
        self._ranks = 1
        self.steps = variable(np.int64(0))
        self.alive = variable(np.bool_(True))
        self._compared = variable(np.int64(same.steps))
        self._relative = variable(np.zeros(2))
        self._sparse: dict[str, Any] = {}  # [elements, bytes] so far
        self._told: tuple[int, Any, dict[str, Any]] = (
            0,
            np.zeros(2),
            {},
        )  # what `read` has said of these

    def begin(self, trace_again: Callable[[], None]) -> tuple[Any, Any, Any]:
        """A step begins: a node that counts it; whether parameters are compared, before which step.

        trace_again : called in steps in which the form has come to its end, but not in others
        """

        def ended(at: Any) -> Any:
            if self._dense is not None and at > self._dense + _OVERDUE:
                raise CompressError(
                    f"{_OVERDUE} steps without the dense one that was to come: TensorFlow "
                    f"{tf.__version__} does not trace the step again. Call a tf.function, not a "
                    "concrete function; else please report your version of TensorFlow."
                )
            trace_again()
            return np.int64(0)

        alive = tf.debugging.Assert(self.alive.read_value(), [_ENDED])
        with tf.control_dependencies([alive]):
            self.steps.assign_add(1)
            self._compared.assign_add(1)
        at, compared = self.steps.read_value(), self._compared.read_value()
        with tf.device("CPU"):
            begun = tf.cond(
                at >= self.limit,
                lambda: tf.numpy_function(ended, [at], tf.int64),
                lambda: tf.constant(0, tf.int64),
                name="sn_rare_end",
            )
        begun.set_shape([])
        every = self.same.every
        before = compared - 1
        due = (before > 0) & (before % every == 0) if every else tf.constant(False)
        return begun, due, before

    def step(self, vectors: Sequence[Sequence[Any]], by: Reduction) -> list[list[Any]]:
        """The means of each bucket's gradients, [n] float32 each."""
        self._ranks = by.ranks
        means, numbers = [], []
        for number, (bucket, own) in enumerate(zip(self.buckets, vectors, strict=True)):
            made, told = bucket.step(number, own, by)
            means.append(made)
            numbers.append(told)
        energy, sent = tf.unstack(tf.add_n(numbers))[2:]
        known = tf.math.is_finite(energy) & (energy > 0)
        error = tf.sqrt(tf.maximum(energy - sent, 0) / tf.where(known, energy, 1))
        both = tf.stack([error, tf.ones_like(error)])
        self._relative.assign_add(tf.where(known, both, tf.zeros_like(both)))
        return means

    def count_sparse(self, key: str, values: Any, indices: Any) -> None:
        """Count a sparse gradient in every step."""
        if key not in self._sparse:
            self._sparse[key] = variable(np.zeros(2, np.int64))
        parts = [(tf.size(each, tf.int64), each.dtype.size) for each in (values, indices)]
        nbytes = tf.add_n([size * width for size, width in parts])
        self._sparse[key].assign_add(tf.stack([parts[0][0], nbytes]))

    def read(self) -> tuple[int, list[Ran], Any]:
        """Bring all to the exchange; steps since it was asked last, what they sent, and errors.

        Errors are [sum over steps, steps] of the relative ones.
        """
        steps, relative = int(self.steps.numpy()), self._relative.numpy()
        sparse = {key: each.numpy() for key, each in self._sparse.items()}
        before, errors, counted = self._told
        self._told = steps, relative, sparse
        ran = []
        for bucket in self.buckets:
            bucket.read()
            if not bucket.sent:
                continue  # traced in vain
            words = zip(bucket.names, bucket.words(self._ranks), strict=True)
            for name, own in words:
                n = math.prod(self._of.tensors[name].shape)
                way = self._of.way(name)
                ran.append(Ran(name, n, 4 * n, 4 * own, way, steps - before))
        for name, n, nbytes in self._plain:
            ran.append(Ran(name, n, 4 * n, nbytes, "plain", steps - before))
        for name, first in self._began.items():
            self._of.tensors[name].step = first + min(steps, self.limit)
        for key, (elements, nbytes) in sparse.items():
            had = counted.get(key, (0, 0))
            new = int(nbytes - had[1])
            ran.append(Ran(key, int(elements - had[0]), new, new, "plain", 1))
        self.same.steps = int(self._compared.numpy())
        return steps - before, ran, relative - errors

    @property
    def ran(self) -> int:
        """Steps so far."""
        return int(self.steps.numpy())

    @property
    def ended(self) -> bool:
        """Whether the next step is another one: dense, or one that asks the tuner."""
        return self.ran >= self.limit


def ready(exchange: SharedExchange, names: Iterable[str]) -> bool:
    """Whether these tensors have sizes, and some steps to go until the next dense one."""
    found = [exchange.tensors.get(name) for name in names]
    chosen = all(it is not None and it.summable is not None for it in found)
    return chosen and _until_dense(exchange, names) >= LEAST


def _until_dense(exchange: SharedExchange, names: Iterable[str]) -> int:
    steps = [exchange.tensors[name].step for name in names]
    every = exchange.every
    return min((every - 1 - (step - exchange.warmup)) % every for step in steps)


def _hosted(state: dict[str, Any]) -> dict[str, Any]:
    return {name: to_host(value) for name, value in state.items()}
