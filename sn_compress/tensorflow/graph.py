"""A step as nodes of the graph being traced, which runs without Python.

As long as neither the sizes of factors nor theta change, every step sends the same number of words,
and consists of arithmetic with Horovod's collectives in between (`graph_buckets.py`). The engine's
memories move to variables, counts are kept in variables, and both are written back to the engine on
request.

All other steps are run by the engine itself: dense ones, those that choose sizes, and those with
another theta (`memory.py`). So functions are retraced when a graph ends; see `tracing.forget`. A
graph without buckets only counts: it is for steps in which AutoCompression sends all tensors
uncompressed.
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

LEAST = 10  # steps of equal sizes: for fewer, tracing a graph would take longer than it saves
FOR_EVER = 2**62  # steps: half the range of int64, so that _OVERDUE may be added
_OVERDUE = 1000  # steps past a graph's last one, after which no retrace is to be expected
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
    """Return a context whose nodes wait for these; None is ignored."""
    return tf.control_dependencies([node for node in nodes if node is not None])


def rarely(when: Any, function: Callable[..., Any], *inputs: Any, name: str) -> Any:
    """Return a node, [] int64 zero, that calls Python in the few steps in which `when` is true."""

    def run(*values: Any) -> Any:
        function(*values)
        return np.int64(0)

    def call() -> Any:
        called = tf.numpy_function(run, inputs, tf.int64)
        called.set_shape([])  # a memory planner needs it
        return called

    with tf.device("CPU"):
        return tf.cond(when, call, lambda: tf.constant(0, tf.int64), name=f"sn_rare_{name}")


class Collectives:
    """Collectives for the words of a call's buckets, as graph nodes; number : of the bucket."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self.ranks, self.rank = call.process_set.size(), call.process_set.rank()

    def named(self, words: Any, mark: str) -> tuple[Any, dict[str, Any]]:
        """Return the words and Horovod's arguments; by default Horovod names them by their node."""
        call = self._call
        return tf.identity(words, name=mark), {
            "name": call.name and f"{mark}_{call.name}",
            "ignore_name_scope": call.ignore_name_scope,
            "process_set": call.process_set,
        }

    def present(self, vector: Any, number: int) -> Any:
        """Return the number of ranks in the step, [1] int32; a joined rank adds nothing."""
        return self.total(one_of(vector), number, 0)

    def total(self, words: Any, number: int, turn: int) -> Any:
        """Return the sum of the ranks' words in a round."""
        words, how = self.named(words, f"sn_b{number}_round{turn}")
        return hvd.allreduce(words, op=hvd.Sum, **how)

    def gather(self, words: Any, sizes: Sequence[int], number: int) -> Any:
        """Return the ranks' words, concatenated; sizes : number of words of each rank."""
        words, how = self.named(words, f"sn_b{number}_payload")
        return arrived(hvd.allgather(words, **how), sizes)

    def alltoall(
        self, words: Any, to_ranks: Sequence[int], of_ranks: Sequence[int], number: int
    ) -> Any:
        """Return the words other ranks send to this one; to_ranks : number of `words` for each."""
        words, how = self.named(words, f"sn_b{number}_parts")
        splits = tf.constant(to_ranks, tf.int32)
        return arrived(hvd.alltoall(words, splits=splits, **how)[0], of_ranks)


def one_of(vector: Any) -> Any:
    """Return [1] int32 one, computed from a vector: TensorFlow would fold a constant's sum."""
    return tf.clip_by_value(tf.cast(vector[:1], tf.int32), 1, 1)


def arrived(received: Any, sizes: Sequence[int]) -> Any:
    """Return what was received, [words]; fails at run time if its size differs.

    sizes : words of each rank
    """
    size = sum(sizes)
    complete = tf.debugging.Assert(tf.size(received) == size, [_OTHER_SIZE])
    received.set_shape([size])  # a memory planner needs it
    with tf.control_dependencies([complete]):
        return tf.identity(received)


class GraphBucket(Protocol):
    """Tensors that travel together, with their memories in variables."""

    names: tuple[str, ...]
    variables: Undoable

    def step(
        self, number: int, vectors: Sequence[Any], by: Collectives, dropped: Any = None
    ) -> tuple[list[Any], Any]:
        """Return the means, [n] float32 each, and [3] float64: energy, error, saturated.

        Energy and error are the squared norms of what this rank had to send and of its residuals.

        dropped : [tensors] bool, for which tensors the last gradient was not applied; None if all
            count as applied
        """

    def read(self, steps: int) -> None:
        """Write the variables' values back to the engine, after this many steps of this graph."""

    def ran(self, steps: int) -> list[TensorTraffic]:
        """Return what this many steps have sent; empty if `step` was not traced."""


class Undoable:
    """A bucket's memories in variables, now and before the last step.

    values : arrays
    undoable : whether gradients may turn out to be dropped; else there is no second copy
    """

    def __init__(self, values: Sequence[Any], undoable: bool) -> None:
        self.now = [variable(value) for value in values]
        self.before = [variable(value) for value in values] if undoable and values else None

    def begin(self, dropped: Any, choose: Callable[..., Sequence[Any]]) -> list[Any]:
        """Return the memories for a new step; for dropped gradients those from before them.

        choose : if any gradient was dropped, called with the values before the last step and now
        """
        now = self.read()
        if self.before is None or dropped is None:
            return now
        before = self.before
        # Usually nothing was dropped, and the branch avoids a select over all memories.
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
        """Set the current values."""
        for target, value in zip(self.now, values, strict=True):
            target.assign(value)

    def read(self) -> list[Any]:
        """Return nodes of the values after what was traced so far."""
        return [target.read_value() for target in self.now]

    def arrays(self) -> tuple[list[Any], list[Any] | None]:
        """Return the values now, and those before the last step; outside of graphs."""
        before = self.before and [value.numpy() for value in self.before]
        return [value.numpy() for value in self.now], before


@dataclass(frozen=True)
class Counts:
    """What a graph has counted.

    steps, ran : number of steps, and what they have sent
    relative : [sum of the relative errors, number of steps summed]
    saturated : number of clipped values
    sparse : elements and bytes of sparse gradients
    """

    steps: int
    ran: list[TensorTraffic]
    relative: Any
    saturated: int
    sparse: dict[str, Any]


class GraphStep:
    """The step of one Horovod call; created while it is traced, and shared by its traces.

    buckets : their variables have taken over the tensors' memories
    same : decides when parameters are compared
    limit : number of steps until sizes change
    rests : whether there is a tuner that is not queried any more
    plain : name, elements and bytes of each tensor sent uncompressed, to be counted
    marks : of each tensor's variable; None if all gradients count as applied
    began : number of steps of the engine before this graph
    inside_bytes : bytes this rank sends inside its node per step, in a hierarchical exchange
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
        self.alive = variable(np.bool_(True))  # until its memories were returned to the engine
        self._compared = variable(np.int64(same.steps))
        self._relative = variable(np.zeros(2))
        self._saturated = variable(np.float64(0))
        self._sparse: dict[str, Any] = {}  # [elements, bytes] so far
        self._counts = Counts(0, [], np.zeros(2), 0, {})  # at the last read
        self._outcomes = None if marks is None else GraphOutcomes(marks)
        self._dropping = variable(np.int64(0))  # number of steps that followed a dropped gradient

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

        # Before anything is counted: an ended graph has returned its memories.
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
        """Return the check that counts steps, and the current step."""
        return self.same, int(self._compared.numpy()) - 1

    def step(
        self,
        vectors: Sequence[Sequence[Any]],
        by: Collectives,
        digests: Any,
        warn_dropped: Callable[[], None],
    ) -> list[list[Any]]:
        """Return the means of each bucket's gradients, [n] float32 each.

        digests : of all tensors' variables, [tensors] int64; None without marks
        warn_dropped : called once, in the first step after a dropped gradient
        """
        if not self.buckets:
            return []
        means, numbers = [], []
        dropped = [None] * len(self.buckets)
        if self._outcomes is not None:
            flags = self._outcomes.dropped(digests)
            some = tf.reduce_any(flags)
            self._dropping.assign_add(tf.cast(some, tf.int64))
            # Python is called only in the first such step, as there is only one warning.
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
        # A step with NaN, or with nothing to send, has no relative error.
        known = tf.math.is_finite(energy) & (energy > 0)
        relative = tf.sqrt(error / tf.where(known, energy, 1))
        both = tf.stack([relative, tf.ones_like(relative)])
        self._relative.assign_add(tf.where(known, both, tf.zeros_like(both)))
        self._saturated.assign_add(saturated)
        return means

    def remembered(self) -> list[Any]:
        """Return nodes that read the memories after what was traced so far, to wait for."""
        return [value for bucket in self.buckets for value in bucket.variables.read()]

    def marks(self) -> dict[str, Mark]:
        """Return the marks of the tensors' variables, by name."""
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
        """Write the buckets' memories to the engine; return the counts since the last call."""
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
        # Variables count from the beginning of the graph; return only what is new.
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
        """Number of steps so far."""
        return int(self.steps.numpy())

    @property
    def steps_left(self) -> int:
        """Number of remaining steps with these sizes."""
        return max(self.limit - self.ran, 0)

    @property
    def ended(self) -> bool:
        """Whether the next step has different sizes, or is dense."""
        return self.ran >= self.limit
