"""What belongs to one compression in TensorFlow: kept between steps, whichever form a graph has."""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from ..agreement import Said
from ..compression import settings_of
from ..feedback import ErrorFeedback
from ..settings import Settings
from ..sums.session import SharedExchange
from .alike import agree_at_trace, elastic, unlike_in_hardware
from .sized import Sized, ready
from .traced import Traced
from .tracing import forget, functions_of

_log = logging.getLogger(__name__)


class Memory(Traced, tf.train.experimental.PythonState):  # type: ignore[misc]
    """What belongs to one compression: codec, error memories, counts.

    It goes into a checkpoint like a variable: `tf.train.Checkpoint(memory=memory_of(fft))`. It
    differs between ranks, so each rank writes and reads a checkpoint of its own.
    """

    def __init__(self, settings: Settings) -> None:
        self._sized: dict[tuple[str, ...], Sized] = {}  # by all names of a call
        self._buckets: set[tuple[str, ...]] = set()  # that could be in the sized form
        self._functions: weakref.WeakSet[Any] = weakref.WeakSet()
        threads = tf.config.threading.get_intra_op_parallelism_threads()
        super().__init__(settings, threads or len(os.sched_getaffinity(0)))

    def agree(self, process_set: Any, said: Said, asked: set[str] | None = None) -> None:
        """CompressError on every rank unless all trace the same; asked once, while it traces.

        Ranks of unlike hardware multiply in one order from then on.

        asked : what was, of an optimizer; of this compression by default
        """
        told = self.asked if asked is None else asked
        agree_at_trace(told, process_set, said, self.count_beside)
        key = f"hardware of {process_set.process_set_id}"
        if self.settings.exchange != "shared" or key in self.asked or elastic():
            return
        with tf.init_scope():
            if tf.executing_eagerly():
                self.asked.add(key)
                self.shared.exact |= unlike_in_hardware(process_set, self.count_beside)

    def sized(self, parts: Sequence[Sequence[str]], what: Any) -> Sized | None:
        """The sized form of a call that is being traced, if it is time for it; see sized.py.

        parts : names of the tensors of each bucket
        what : whose parameters are compared, see `sameness_of`
        """
        shared = self.settings.exchange == "shared" and not elastic()
        if not shared or not parts or tf.executing_eagerly():
            return None
        functions = functions_of(sys._getframe(1))
        if not functions:
            _say_python_once()
            return None
        self._functions.update(functions)
        self._buckets.update(map(tuple, parts))
        names = tuple(name for part in parts for name in part)
        with tf.init_scope():
            if not tf.executing_eagerly():
                return None
            known = self._sized.get(names)
            if known is not None and not known.ended:
                return known
            self.retire(names)
            if not ready(self.shared, names):
                return None
            return self._sized.setdefault(names, Sized(self.shared, parts, self.sameness_of(what)))

    def trace_again(self) -> None:
        """Let all functions be traced again that have used this memory."""
        for function in list(self._functions):
            forget(function)

    def stepped(self, keys: Sequence[str]) -> None:
        """Called in Python when a bucket's step of sums has ended: sizes are chosen."""
        if tuple(keys) in self._buckets and ready(self.shared, keys):
            self.trace_again()

    def begin(self, keys: Sequence[str], values: Any, **how: Any) -> Any:
        """See Traced.begin; a graph that was sized is so no more."""
        if self._sized:
            self.retire(keys)
        return super().begin(keys, values, **how)

    def read(self) -> None:
        """Bring all that graphs have counted and remembered to the exchange and the report."""
        with tf.init_scope():
            told = [each.read() for each in self._sized.values()]
        with self._lock:
            steps = max((steps for steps, _, _ in told), default=0)
            errors = np.sum([error for _, _, error in told], axis=0) if told else (0.0, 0.0)
            self.traffic.ran(steps, [each for _, ran, _ in told for each in ran], tuple(errors))

    def retire(self, names: Iterable[str] | None = None) -> None:
        """End the sized form of all calls, or those with some of these names; trace again."""
        wanted = None if names is None else set(names)
        ends = [key for key in self._sized if wanted is None or wanted.intersection(key)]
        if not ends:
            return
        self.read()
        for key in ends:
            with tf.init_scope():
                self._sized.pop(key).alive.assign(False)
        self.trace_again()

    def exchange(self) -> ErrorFeedback | SharedExchange:
        """Who keeps the memories, with what graphs have made of them."""
        self.read()
        return super().exchange()

    def report(self) -> dict[str, float]:
        """See Compression.report."""
        self.read()
        return super().report()

    def clear(self) -> None:
        """Forget all variables and what was dropped of them: for models that are gone."""
        self.retire()
        super().clear()

    def begin_anew(self) -> None:
        """When ranks have come or gone, on all of them: count steps from here."""
        self.retire()
        super().begin_anew()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what state_dict returned on the same rank, with the same exchange."""
        self.retire()
        super().load_state_dict(state)

    def synchronize(self, root_rank: int = 0, *, process_set: Any = hvd.global_process_set) -> None:
        """See Compression.synchronize; called by all ranks of the set."""
        own = self.exchange()
        self.begin_anew()
        state = hvd.broadcast_object(self.state_dict(), root_rank, process_set=process_set)
        residuals = {}
        for name, n in sorted(own.sizes(state).items()):
            wire = np.zeros(n + 1, np.float32)  # the last one counts the ranks that have a memory
            if own.remembers(name):
                wire[:n], wire[n] = own.residual(name), 1
            total = hvd.allreduce(wire, op=hvd.Sum, process_set=process_set).numpy()
            residuals[name] = total[:n] / max(total[n], 1)
        own.take_over(state, residuals)
        self.follow(state)

    def serialize(self) -> bytes:
        """Called by tf.train.Checkpoint."""
        return self.to_bytes(hvd.rank())

    def deserialize(self, string_value: bytes) -> None:
        """Called by tf.train.Checkpoint."""
        self.from_bytes(string_value, hvd.rank())


# A compression that is dropped takes its memory along, unless Horovod's cache holds it.
_memories: weakref.WeakKeyDictionary[Any, Memory] = weakref.WeakKeyDictionary()


def memory_of(compression: Any) -> Memory:
    """What a compression remembers and has sent, for all tapes that were given it.

    To keep two models apart in reports and checkpoints, give each its own:
    `FFTCompression.using()` returns a new one each time.
    """
    return memory_at(compression, settings_of(compression, "memory_of"))


def memory_at(compression: Any, settings: Settings) -> Memory:
    """That of a compression of these settings."""
    if compression not in _memories:
        _memories[compression] = Memory(settings)
    return _memories[compression]


@cache
def _say_python_once() -> None:
    _log.warning(
        "TensorFlow %s shows no tf.function that is being traced: low rank is computed by Python "
        "functions in the graph, which is slower",
        tf.__version__,
    )
