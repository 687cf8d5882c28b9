"""What belongs to one compression in TensorFlow: kept between steps, whichever form a graph has."""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from ..base.agreement import Said
from ..base.errors import CompressError
from ..compression import settings_of
from ..engine.feedback import ErrorFeedback
from ..engine.owed import Owed
from ..prediction.tuning import Tuner
from ..settings import Settings
from ..sums.session import SharedExchange
from .alike import agree_at_trace, elastic, total, unlike_in_hardware, unlike_in_nodes
from .nodes.gathered import GatheredBucket, serves, way_back
from .nodes.outcomes import digest_of
from .nodes.sized import LEAST, Sized, SizedBucket
from .nodes.summed import SummedBucket, until_dense
from .traced import Traced, say_saturated
from .tracing import forget, functions_of
from .tuned import Tensor, Tuned, mean_over, refuse_untraced, untraced

_log = logging.getLogger(__name__)


class Memory(Traced, tf.train.experimental.PythonState):  # type: ignore[misc]
    """What belongs to one compression: codec, error memories, counts.

    It goes into a checkpoint like a variable: `tf.train.Checkpoint(memory=memory_of(fft))`. It
    differs between ranks, so each rank writes and reads a checkpoint of its own.
    """

    def __init__(self, settings: Settings) -> None:
        self._sized: dict[tuple[str, ...], Sized] = {}  # by all names of a call
        self._buckets: set[tuple[str, ...]] = set()  # that could be in the sized form
        self._in_turns: set[str] = set()  # names of tensors that several calls exchange
        self._outdone: set[tuple[str, ...]] = set()  # calls whose form another one has ended
        self._functions: weakref.WeakSet[Any] = weakref.WeakSet()
        self._accumulates = False
        self._scaler: Any = None
        self._said_dropped = False
        self.tuner: Tuner | None = None  # of AutoCompression, from the first trace on
        self._tuned_set: int | None = None  # the process set it is of
        self._counted = 0  # steps in the report when graphs were read last
        self._unlike = False  # whether ranks decode with other bits in their graphs
        self._traces = 0  # how often all ranks were to trace again, in the same step
        threads = tf.config.threading.get_intra_op_parallelism_threads()
        super().__init__(settings, threads or len(os.sched_getaffinity(0)))

    @property
    def accumulates(self) -> bool:
        """Whether a loop adds gradients up before it applies them: all of them count as applied.

        Otherwise a gradient counts as dropped if its variable is the same at its next exchange.
        """
        return self._accumulates

    @accumulates.setter
    def accumulates(self, value: bool) -> None:
        if value != self._accumulates:
            self._accumulates = value
            self.retire()
            self.trace_again()

    def watch(self, scaler: Any) -> None:
        """Follow the scale of a keras.optimizers.LossScaleOptimizer around a plain optimizer.

        Before the first gradient. What is remembered is of gradients that are not scaled.
        """
        if not hasattr(scaler, "dynamic_scale"):
            raise CompressError(
                f"got a {type(scaler).__name__}; expected a keras.optimizers.LossScaleOptimizer "
                "that was built. Call its build(variables) first."
            )
        if self.asked:
            raise CompressError(
                "a scaler is watched after gradients were exchanged; expected it before the first "
                "one. Call watch() before the first step."
            )
        self._scaler = scaler

    def scale(self) -> Any:
        """The factor on all gradients now, [] float32; None where no scaler is watched."""
        return None if self._scaler is None else self._scaler.dynamic_scale.value.read_value()

    def agree(self, process_set: Any, said: Said, asked: set[str] | None = None) -> None:
        """CompressError on every rank unless all trace the same; asked once, while it traces.

        Ranks of unlike hardware multiply in one order from then on, or decode in Python.

        asked : what was, of an optimizer; of this compression by default
        """
        told = self.asked if asked is None else asked
        agree_at_trace(told, process_set, said, self.count_beside)
        key = f"hardware of {process_set.process_set_id}"
        if key in self.asked or elastic():
            return
        with tf.init_scope():
            if not tf.executing_eagerly():
                return
            self.asked.add(key)
            if self.settings.exchange == "shared":
                self.shared.exact |= unlike_in_hardware(process_set, self.count_beside)
            elif unlike_in_nodes(process_set, way_back(self.codec), self.count_beside):
                self._unlike = True
                _log.warning(
                    "ranks decode frequencies with other bits in TensorFlow's graphs: payloads are "
                    "made and read by Python functions, which is slower and the same on all"
                )

    def tuned(
        self, tensors: Mapping[str, Tensor], process_set: Any, variables: Mapping[str, Any]
    ) -> Tuned:
        """How AutoCompression lets tensors of a call travel that is being traced.

        What was not sent of those that travel plain is owed from here on.

        variables : by name; none where all gradients count as applied
        """
        refuse_untraced()
        if self.tuner is None:
            self.tuner = Tuner(
                self.settings,
                ranks=process_set.size(),
                total=partial(total, process_set, self.count_beside),
                methods=(self.settings.exchange,),
            )
        if self._tuned_set is None:
            self._tuned_set = process_set.process_set_id
        if self._tuned_set != process_set.process_set_id:
            raise untraced(
                f"in the process sets {self._tuned_set} and {process_set.process_set_id} at once: "
                "each wants one of its own, by AutoCompression.using()"
            )
        plain = frozenset(name for name in tensors if self.tuner.chosen(name) == "plain")
        left = [name for name in sorted(plain) if self.shared.remembers(name)]
        if left:
            self.retire(left)
            known = [name for name in left if name in variables]
            self._settle_now(known, [variables[name] for name in known])
            with self._lock:
                for name in left:
                    self.owed.take(name, self.shared)
        rest = self.tuner.rest_steps
        return Tuned(tensors, plain, rest if rest >= LEAST else 0)

    def ask(self, tuned: Tuned, form: Sized | None) -> Callable[[], None]:
        """What a graph calls at the beginning of each step, as long as the tuner measures.

        Nothing is asked between a change and the trace that follows: in a loop inside of a
        function steps go on as they were traced, which are not those that the tuner means.

        form : that of the graph
        """
        traces, tuner = self._traces, self.tuner
        assert tuner is not None

        def ask() -> None:
            if form is None:
                for name, elements, nbytes in tuned.counted:
                    self.count_plain(name, elements, nbytes)
            if self._traces != traces:
                return
            said = {name: tuner.method(name, it.shape) for name, it in tuned.tensors.items()}
            plain = {name for name, method in said.items() if method == "plain"}
            all_known = form is not None or len(plain) == len(said)  # no size is to be chosen
            if plain != tuned.plain or (all_known and tuner.rest_steps >= LEAST):
                self.trace_again()

        return ask

    def pay(self, name: str, gradient: Any) -> Any:
        """What is owed of a tensor, [n] float32, to go along with its plain gradient; or zeros."""
        with self._lock:
            if name not in self.owed or not np.isfinite(gradient).all():
                return np.zeros(gradient.size, np.float32)
            left = self.owed.pay(name, gradient.size)
        self._forget()
        return left

    def sized(
        self,
        parts: Sequence[Mapping[str, int]],
        what: Any,
        tuned: Tuned | None = None,
        variables: Sequence[Any] | None = None,
        stepped: Collection[Sized] = (),
    ) -> Sized | None:
        """The sized form of a call that is being traced, if it is time for it; see sized.py.

        parts : names and elements of the tensors of each bucket
        what : whose parameters are compared, see `sameness_of`
        tuned : of AutoCompression, whose form counts steps while the tuner rests
        variables : of all these tensors; None where all gradients count as applied
        stepped : forms that the graph which is being traced has made steps of
        """
        if elastic() or not (parts or tuned) or tf.executing_eagerly():
            return None
        if self.settings.exchange == "gather" and not self._has_nodes(parts):
            return None
        functions = functions_of(sys._getframe(1))
        if tuned is not None:
            refuse_untraced(bool(functions))
        if not functions:
            _say_python_once()
            return None
        self._functions.update(functions)
        self._buckets.update(map(tuple, parts))
        names = tuple(name for part in parts for name in part)
        rest, plain = (tuned.rest, tuned.counted) if tuned else (0, [])
        key = (*names, *(name for name, _, _ in plain))
        with tf.init_scope():
            if not tf.executing_eagerly():
                return None
            known = self._sized.get(key)
            same_form = known is not None and (known.names, known.rests) == ([*names], rest > 0)
            if known is not None and same_form and not known.ended:
                return known
            if self._takes_turns(key, stepped):
                return None
            self.retire(key)
            if variables is not None:
                self._settle_now(names, variables)
            if tuned is not None and self.tuner is not None:
                rest = self.tuner.rest_steps if rest else 0  # fewer by those of the form retired
            until = self._alike(names) if names else None
            if (rest if until is None else until) < LEAST:
                return None
            self.read()  # steps that Python counts from here on are those of other calls
            form = Sized(
                [self._bucket(part, undoable=variables is not None) for part in parts],
                self.sameness_of(what), until=until, rest=rest, plain=plain,
                marks=variables and [self.marks.get(name, (None, False)) for name in names],
            )  # fmt: skip
            return self._sized.setdefault(key, form)

    def _takes_turns(self, key: tuple[str, ...], stepped: Collection[Sized]) -> bool:
        """Whether tensors of a call are in others, too, as a GAN's discriminator is in two.

        A form is of one call. Python functions serve those that share tensors, one after the other.
        """
        own = set(key)
        others = [it for it in self._sized if own.intersection(it) and set(it) != own]
        again = key in self._outdone or any(self._sized[it] in stepped for it in others)
        if others and again:
            self._in_turns.update(own, *others)
        self._outdone.update(others)
        return not own.isdisjoint(self._in_turns)

    def _settle_now(self, names: Sequence[str], variables: Sequence[Any]) -> None:
        """See Traced.settle; while a function is traced, before its first step."""
        pairs = [(name, v) for name, v in zip(names, variables, strict=True) if name in self.marks]
        with tf.init_scope():  # values, not nodes of the graph that is being traced
            digests = [int(digest_of(variable.read_value())) for _, variable in pairs]
            self.settle([name for name, _ in pairs], digests)
        for name, _ in pairs:  # no exchange yet
            self.marks[name] = None, self.marks[name][1]

    def settle(self, names: Sequence[str], digests: Sequence[int]) -> None:
        """See Traced.settle; a graph that was sized is so no more."""
        if self._sized:
            self.retire(names)
        super().settle(names, digests)

    def say_dropped(self) -> None:
        """Warn, once: a loop that adds gradients up would lose what was left out of them."""
        if not self._said_dropped:
            self._said_dropped = True
            _log.warning(
                "a variable is the same, bit by bit, as at its last exchange: that gradient counts "
                "as dropped, and what compression left out of it is not sent later. If the loop "
                "adds gradients up before it applies them, say so before the first step: "
                "memory_of(compression).accumulates = True"
            )

    def _alike(self, names: Sequence[str]) -> int:
        """Steps from the next one on in which these tensors send as many words as in that one."""
        if self.settings.exchange == "shared":
            return until_dense(self.shared, names)
        return 0 if self.learns else self.theta.stays(names)

    def _has_nodes(self, parts: Sequence[Mapping[str, int]]) -> bool:
        """Whether payloads can be nodes of a graph: with these settings, and alike on all ranks."""
        sizes = [n for part in parts for n in part.values()]
        return not self._unlike and serves(self.codec, sizes)

    def _bucket(self, tensors: Mapping[str, int], *, undoable: bool) -> SizedBucket:
        if self.settings.exchange == "shared":
            return SummedBucket(self.shared, list(tensors), undoable=undoable)
        feedback = self.feedback if self.settings.feedback else None
        scatter = self.settings.scatter
        return GatheredBucket(self.theta, feedback, tensors, scatter=scatter, undoable=undoable)

    def trace_again(self) -> None:
        """Let all functions be traced again that have used this memory; on all ranks at once."""
        self._traces += 1
        self._forget()

    def _forget(self) -> None:
        for function in list(self._functions):
            forget(function)

    def stepped(self, keys: Sequence[str]) -> None:
        """Called in Python when a bucket's step has ended: sizes may be chosen now."""
        if tuple(keys) in self._buckets and self._alike(keys) >= LEAST:
            self.trace_again()

    def begin(self, keys: Sequence[str], values: Any, **how: Any) -> Any:
        """See Traced.begin; a graph that was sized is so no more."""
        if self._sized:
            self.retire(keys)
        return super().begin(keys, values, **how)

    def encode(self, keys: Sequence[str | None], values: Any, theta: float | None = None) -> Any:
        """See Traced.encode; a graph that was sized is so no more."""
        names = [key for key in keys if key is not None]
        if self._sized:
            self.retire(names)
        made = super().encode(keys, values, theta)
        self.stepped(names)
        return made

    def read(self) -> None:
        """Bring all that graphs have counted and remembered to the exchange and the report."""
        with tf.init_scope():
            told = [each.read() for each in self._sized.values()]
            marks = [each.marks() for each in self._sized.values()]
        with self._lock:
            for each in marks:
                self.marks.update(each)
            # Python has counted some of these steps, for other calls in them.
            beside = max(self.traffic.steps - self._counted, 0)
            steps = max(0, *(each.steps - beside for each in told)) if told else 0
            errors = np.sum([each.relative for each in told], axis=0) if told else (0.0, 0.0)
            saturated = self.traffic.ran(
                steps, [it for each in told for it in each.ran], tuple(errors),
                sum(each.saturated for each in told),
            )  # fmt: skip
            self._counted = self.traffic.steps
        if saturated:
            say_saturated("gradients")

    def retire(self, names: Iterable[str] | None = None) -> None:
        """End the sized form of all calls, or those with some of these names; trace again."""
        wanted = None if names is None else set(names)
        ends = [key for key in self._sized if wanted is None or wanted.intersection(key)]
        if not ends:
            return
        self.read()
        for key in ends:
            with tf.init_scope():
                form = self._sized.pop(key)
                if form.rests and self.tuner is not None:
                    self.tuner.pass_by(form.ran)
                form.alive.assign(False)
        self._forget()

    def exchange(self) -> ErrorFeedback | SharedExchange:
        """Who keeps the memories, with what graphs have made of them."""
        self.read()
        return super().exchange()

    def report(self) -> dict[str, float]:
        """See Compression.report."""
        self.read()
        return super().report() | (self.tuner.report() if self.tuner else {})

    def clear(self) -> None:
        """Forget all variables and what was dropped of them: for models that are gone."""
        self._end()
        super().clear()

    def begin_anew(self) -> None:
        """When ranks have come or gone, on all of them: count steps from here."""
        self._end()
        super().begin_anew()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what state_dict returned on the same rank, with the same exchange."""
        self.retire()
        if self.settings.tune:
            self.trace_again()
        super().load_state_dict(state)

    def _end(self) -> None:
        """Of graphs that were traced so far nothing goes on, nor does the tuner."""
        self.retire()
        self._in_turns, self._outdone = set(), set()
        self.tuner = self._tuned_set = None
        if self.settings.tune:
            self.trace_again()

    def synchronize(self, root_rank: int = 0, *, process_set: Any = hvd.global_process_set) -> None:
        """See Compression.synchronize; called by all ranks of the set."""
        own = self.exchange()
        self.begin_anew()
        state = hvd.broadcast_object(self.state_dict(), root_rank, process_set=process_set)
        residuals, owed = {}, {}
        for name, n in sorted(own.sizes(state).items()):
            left = own.residual(name) if own.remembers(name) else None
            residuals[name] = mean_over(process_set, n, left)
        for name, values in sorted(state.get("owed", {}).items()):
            left = self.owed.left(name) if name in self.owed else None
            owed[name] = mean_over(process_set, values.size, left)
        own.take_over(state, residuals)
        self.owed = Owed.mean([owed])
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


def refuse_means_of_tapes(variables: Sequence[Any]) -> None:
    """Raise CompressError if tapes with compression exchange gradients of these variables."""
    for memory in list(_memories.values()):
        for variable in variables:
            if memory.exchanges(repr(variable.handle)):
                raise averaged_twice(f"{variable.name}: its gradients are")


def averaged_twice(what: str) -> CompressError:
    """For gradients that are means of all ranks when an optimizer is about to average them."""
    return CompressError(
        f"{what} averaged twice, by Horovod's tape and by this optimizer, whose compression would "
        "take clipped or unscaled means for new gradients, and add to them what it remembers; "
        "expected each rank's own. Use a plain tf.GradientTape with this optimizer, or a plain "
        "optimizer with the tape. If the tape's training is over: "
        "memory_of(its compression).clear()."
    )
