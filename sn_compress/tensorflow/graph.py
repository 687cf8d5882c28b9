"""A step as nodes of the graph that is being traced, without Python while it runs.

As long as neither the sizes of factors nor theta change, the words of a step are as many at every
step, and all of it is arithmetic with Horovod's collectives in between (`graph_buckets.py`). What
the engine remembers moves to variables, what is counted is counted in variables, and both go back
to the engine when somebody asks.

Other steps are for the engine itself: a dense one, that in which sizes are chosen, one of another
theta (`memory.py`). So functions are traced again when a graph comes to its end; see
`tracing.forget`. A graph without any bucket only counts: that of steps in which AutoCompression
lets all tensors travel plain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from ..consistency import ParameterCheck
from ..errors import CompressError
from ..report import TensorTraffic
from .tracing import Call
from .variables import GraphOutcomes, Mark, variable

LEAST = 10  # steps of the same sizes: for fewer, tracing a graph would take longer than it saves
FOR_EVER = 2**62  # steps: half of what int64 holds, so that _OVERDUE may be added
_OVERDUE = 1000  # steps behind the last one, after which no trace will come
_ENDED = (
    "CompressError: this graph is out of date: its error memories were loaded, synchronized, "
    "cleared, or used by another function. Call the tf.function, which is retraced, instead of an "
    "earlier concrete function."
)

_OTHER_SIZE = (
    "PayloadError: the number of gathered words is not what all ranks together send. Do all ranks "
    "run the same version with the same settings?"
)


def after(*nodes: Any) -> Any:
    """A context of nodes that wait for these, of which some may be None."""
    return tf.control_dependencies([node for node in nodes if node is not None])


def rarely(when: Any, function: Callable[..., Any], *inputs: Any, name: str) -> Any:
    """A node, [] int64 zero, that calls Python in the few steps in which `when` is true."""

    def run(*values: Any) -> Any:
        function(*values)
        return np.int64(0)

    def call() -> Any:
        called = tf.numpy_function(run, inputs, tf.int64)
        called.set_shape([])  # a planner of the step's memory has to know it
        return called

    with tf.device("CPU"):
        return tf.cond(when, call, lambda: tf.constant(0, tf.int64), name=f"sn_rare_{name}")


class Collectives:
    """How the words of a call's buckets travel, as nodes of the graph; number : of the bucket."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self.ranks, self.rank = call.process_set.size(), call.process_set.rank()

    def named(self, words: Any, mark: str) -> tuple[Any, dict[str, Any]]:
        """The words, and how Horovod names them: after their node where the user gave no name."""
        call = self._call
        return tf.identity(words, name=mark), {
            "name": call.name and f"{mark}_{call.name}",
            "ignore_name_scope": call.ignore_name_scope,
            "process_set": call.process_set,
        }

    def present(self, vector: Any, number: int) -> Any:
        """The number of ranks in the step, [1] int32; a rank that has joined adds nothing."""
        return self.total(one_of(vector), number, 0)

    def total(self, words: Any, number: int, turn: int) -> Any:
        """The sum of the ranks' words in a round."""
        words, how = self.named(words, f"sn_b{number}_round{turn}")
        return hvd.allreduce(words, op=hvd.Sum, **how)

    def gather(self, words: Any, sizes: Sequence[int], number: int) -> Any:
        """The ranks' words one after another; sizes : how many of each."""
        words, how = self.named(words, f"sn_b{number}_payload")
        return arrived(hvd.allgather(words, **how), sizes)

    def alltoall(
        self, words: Any, to_ranks: Sequence[int], of_ranks: Sequence[int], number: int
    ) -> Any:
        """The words that ranks have for this one; to_ranks : how many of `words` are for each."""
        words, how = self.named(words, f"sn_b{number}_parts")
        splits = tf.constant(to_ranks, tf.int32)
        return arrived(hvd.alltoall(words, splits=splits, **how)[0], of_ranks)


def one_of(vector: Any) -> Any:
    """[1] int32 one, computed from a vector: TensorFlow folds an all-reduce of constants away."""
    return tf.clip_by_value(tf.cast(vector[:1], tf.int32), 1, 1)


def arrived(received: Any, sizes: Sequence[int]) -> Any:
    """Return what was received, [words]; fails at run time if its size differs.

    sizes : words of each rank
    """
    size = sum(sizes)
    complete = tf.debugging.Assert(tf.size(received) == size, [_OTHER_SIZE])
    received.set_shape([size])  # a planner of the step's memory has to know it
    with tf.control_dependencies([complete]):
        return tf.identity(received)


class GraphBucket(Protocol):
    """Tensors that travel together, and what is remembered of them, in variables."""

    names: tuple[str, ...]
    variables: Undoable

    def step(
        self, number: int, vectors: Sequence[Any], by: Collectives, dropped: Any = None
    ) -> tuple[list[Any], Any]:
        """The means of gradients, [n] float32 each, and [3] float64: energy, error, saturated.

        Energy and error are squared norms of what this rank had to send, and of what it keeps.

        dropped : of which tensors the last gradient was not applied, [tensors] bool; None where
            all count as applied
        """

    def read(self, steps: int) -> None:
        """Write the variables' values back to the engine, after so many steps of this graph."""

    def ran(self, steps: int) -> list[TensorTraffic]:
        """What so many steps have sent; nothing where it was traced in vain."""


class Undoable:
    """What a bucket remembers, in variables, now and before the last step.

    values : arrays
    undoable : whether a gradient may turn out to be dropped; else there is no second copy
    """

    def __init__(self, values: Sequence[Any], undoable: bool) -> None:
        self.now = [variable(value) for value in values]
        self.before = [variable(value) for value in values] if undoable and values else None

    def begin(self, dropped: Any, choose: Callable[..., Sequence[Any]]) -> list[Any]:
        """Return what is remembered when a step begins; of dropped gradients what was before them.

        choose : called with the values before the last step and now, if any gradient was dropped
        """
        now = self.read()
        if self.before is None or dropped is None:
            return now
        before = self.before
        # In an ordinary step nothing was dropped: the branch saves selecting in all memories.
        values = tf.cond(
            tf.reduce_any(dropped),
            lambda: list(map(tf.identity, choose([old.read_value() for old in before], now))),
            lambda: list(map(tf.identity, now)),
        )
        for value, like, old in zip(values, now, before, strict=True):
            value.set_shape(like.shape)
            old.assign(value)
        return list(values)

    def assign(self, values: Sequence[Any]) -> None:
        """Remember these values from here on."""
        for target, value in zip(self.now, values, strict=True):
            target.assign(value)

    def read(self) -> list[Any]:
        """Nodes of the values after what was traced so far."""
        return [target.read_value() for target in self.now]

    def arrays(self) -> tuple[list[Any], list[Any] | None]:
        """The values now, and those before the last step; outside of graphs."""
        before = self.before and [value.numpy() for value in self.before]
        return [value.numpy() for value in self.now], before


@dataclass(frozen=True)
class Counts:
    """What a graph has counted.

    steps, ran : how many, and what they have sent
    relative : [sum over steps, steps] of the relative errors
    saturated : values that were clipped
    sparse : elements and bytes of sparse gradients
    """

    steps: int
    ran: list[TensorTraffic]
    relative: Any
    saturated: int
    sparse: dict[str, Any]


class GraphStep:
    """The step of one call of Horovod's; made while it is traced, and shared by its traces.

    buckets : what the tensors remember has moved to their variables
    same : when parameters are compared
    limit : steps until sizes change
    rests : whether there is a tuner that is not asked any more
    plain : name, elements and bytes of each tensor that travels plain, to be counted
    marks : of each tensor's variable; None where all gradients count as applied
    began : steps of the engine before this
    inside_bytes : of a step by nodes, what this rank sends inside its node
    """

    def __init__(
        self,
        buckets: Sequence[GraphBucket],
        same: ParameterCheck,
        *,
        began: int,
        limit: int = FOR_EVER,
        rests: bool = False,
        plain: Sequence[tuple[str, int, int]] = (),
        marks: Sequence[Mark] | None = None,
        inside_bytes: int = 0,
    ) -> None:
        self.buckets, self.same, self.began = list(buckets), same, began
        self.limit, self.rests, self.inside_bytes = limit, rests, inside_bytes
        self._plain = tuple(plain)
        self.names = [name for bucket in buckets for name in bucket.names]
        self.steps = variable(np.int64(0))
        self.alive = variable(np.bool_(True))  # until its memories have gone back to the engine
        self._compared = variable(np.int64(same.steps))
        self._relative = variable(np.zeros(2))
        self._saturated = variable(np.float64(0))
        self._sparse: dict[str, Any] = {}  # [elements, bytes] so far
        self._counts = Counts(0, [], np.zeros(2), 0, {})  # at the last read
        self._outcomes = None if marks is None else GraphOutcomes(marks)
        self._dropping = variable(np.int64(0))  # steps before which something was dropped

    @property
    def undoable(self) -> bool:
        """Whether the last step may turn out to have been dropped."""
        return self._outcomes is not None

    def begin(self, trace_again: Callable[[], None]) -> tuple[Any, Any]:
        """Begin a step: return a node that counts it, and whether it compares parameters.

        trace_again : called only in steps in which the graph has ended
        """

        def ended(at: Any) -> None:
            if at > self.limit + _OVERDUE:
                raise CompressError(
                    f"TensorFlow {tf.__version__} did not retrace the step within {_OVERDUE} steps "
                    "after its sizes changed. Call a tf.function, not a concrete function; "
                    "otherwise please report your version of TensorFlow."
                )
            trace_again()

        # Before anything is counted: a graph that has ended has given its memories back.
        alive = tf.debugging.Assert(self.alive.read_value(), [_ENDED])
        with tf.control_dependencies([alive]):
            self.steps.assign_add(1)
            self._compared.assign_add(1)
        at, compared = self.steps.read_value(), self._compared.read_value()
        start = rarely(at >= self.limit, ended, at, name="end")
        interval, before = self.same.every, compared - 1
        is_due = (before > 0) & (before % interval == 0) if interval else tf.constant(False)
        return start, is_due

    def now(self) -> tuple[ParameterCheck, int]:
        """The check that counts steps, and the step under way."""
        return self.same, int(self._compared.numpy()) - 1

    def step(
        self,
        vectors: Sequence[Sequence[Any]],
        by: Collectives,
        digests: Any,
        warn_dropped: Callable[[], None],
    ) -> list[list[Any]]:
        """The means of each bucket's gradients, [n] float32 each.

        digests : of all tensors' variables, [tensors] int64; None without marks
        warn_dropped : called before the first step behind a gradient that was dropped
        """
        if not self.buckets:
            return []
        means, numbers = [], []
        dropped = [None] * len(self.buckets)
        if self._outcomes is not None:
            flags = self._outcomes.dropped(digests)
            some = tf.reduce_any(flags)
            self._dropping.assign_add(tf.cast(some, tf.int64))
            # Python is called in the first such step alone: there is one warning.
            first = some & (self._dropping.read_value() == 1)
            rarely(first, warn_dropped, name="dropped")
            dropped = tf.split(flags, [len(bucket.names) for bucket in self.buckets])
        pieces = zip(self.buckets, vectors, dropped, strict=True)
        for number, (bucket, values, gone) in enumerate(pieces):
            averaged, lost = bucket.step(number, values, by, gone)
            means.append(averaged)
            numbers.append(lost)
        if self._outcomes is not None:
            some = [tf.reduce_any(tf.cast(mean, tf.bool)) for part in means for mean in part]
            self._outcomes.unseen(~tf.stack(some))
        energy, error, saturated = tf.unstack(tf.add_n(numbers))
        # A step that is lost to NaN, or that had nothing to send, has no relative error.
        known = tf.math.is_finite(energy) & (energy > 0)
        relative = tf.sqrt(error / tf.where(known, energy, 1))
        both = tf.stack([relative, tf.ones_like(relative)])
        self._relative.assign_add(tf.where(known, both, tf.zeros_like(both)))
        self._saturated.assign_add(saturated)
        return means

    def remembered(self) -> list[Any]:
        """What the tensors remember, read where the graph has come to: nodes to wait for."""
        return [value for bucket in self.buckets for value in bucket.variables.read()]

    def marks(self) -> dict[str, Mark]:
        """Of the tensors' variables, by name."""
        marks = [] if self._outcomes is None else self._outcomes.marks()
        return dict(zip(self.names, marks, strict=False))

    def count_sparse(self, key: str, values: Any, indices: Any) -> None:
        """Count a sparse gradient in every step."""
        if key not in self._sparse:
            self._sparse[key] = variable(np.zeros(2, np.int64))
        parts = [(tf.size(part, tf.int64), part.dtype.size) for part in (values, indices)]
        nbytes = tf.add_n([size * width for size, width in parts])
        self._sparse[key].assign_add(tf.stack([parts[0][0], nbytes]))

    def read(self) -> Counts:
        """Write what buckets remember to the engine; return what was counted since last time."""
        steps = self.ran
        for bucket in self.buckets:
            bucket.read(steps)
        now = Counts(
            steps,
            [],
            self._relative.numpy(),
            int(self._saturated.numpy()),
            {key: count.numpy() for key, count in self._sparse.items()},
        )
        # Variables count from the beginning of the graph, a report what is new.
        before, self._counts = self._counts, now
        since = now.steps - before.steps
        ran = [sent for bucket in self.buckets for sent in bucket.ran(since)]
        ran += [
            TensorTraffic(name, n, 4 * n, nbytes, "plain", since) for name, n, nbytes in self._plain
        ]
        for key, (elements, nbytes) in now.sparse.items():
            had = before.sparse.get(key, (0, 0))
            new = int(nbytes - had[1])
            ran.append(TensorTraffic(key, int(elements - had[0]), new, new, "plain", 1))
        self.same.steps = int(self._compared.numpy())
        relative, saturated = now.relative - before.relative, now.saturated - before.saturated
        return Counts(since, ran, relative, saturated, {})

    @property
    def ran(self) -> int:
        """Steps so far."""
        return int(self.steps.numpy())

    @property
    def steps_left(self) -> int:
        """Remaining steps of these sizes."""
        return max(self.limit - self.ran, 0)

    @property
    def ended(self) -> bool:
        """Whether the next step has other sizes, or is dense."""
        return self.ran >= self.limit
