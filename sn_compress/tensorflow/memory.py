"""State of one compression in TensorFlow: the engine, and the steps that run in graphs.

The engine keeps all state and runs all steps except those of graphs: `OptimizerState.average` runs
it on the host, in a single Python function of the graph. A graph takes over the state it needs for
as long as its steps have the same sizes, and returns it afterwards (`graph.py`).
"""

from __future__ import annotations

import logging
import math
import os
import sys
import weakref
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from ..allreduce.allocate import is_large
from ..allreduce.exchange import AllReduceExchange
from ..codecs.base import Floats
from ..collective import Gradient
from ..compression import settings_of
from ..consistency import Fingerprint, ParameterCheck
from ..engine import engine_state
from ..engine.engine import Engine
from ..engine.feedback import ErrorFeedback
from ..errors import CompressError
from ..prediction import new_tuner
from ..settings import Settings
from . import host_step
from .agreement import (
    Choice,
    Restarts,
    Tensor,
    agree_at_trace,
    differs,
    elastic,
    hardware_fingerprint,
    refuse_untraced,
    total,
)
from .graph import FOR_EVER, LEAST, GraphBucket, GraphStep
from .graph_buckets import GatheredBucket, SummedBucket, decoding_digest, serves, until_dense
from .nodes import Nodes, NodeSum
from .tracing import Call, forget, functions_of, warn_of_engine_once
from .variables import EngineOutcomes, Variables, digest_of

if TYPE_CHECKING:
    from ..prediction.tuning import Tuner

_log = logging.getLogger(__name__)


class OptimizerState(tf.train.experimental.PythonState):  # type: ignore[misc]
    """State of one compression: codec, error memories, counts.

    It can be checkpointed like a variable: `tf.train.Checkpoint(memory=memory_of(fft))`. It differs
    between ranks, so each rank writes and reads a separate checkpoint.

    Gradients are keyed by a name, or by slot and name of their variable: "0:kernel".
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        threads = tf.config.threading.get_intra_op_parallelism_threads()
        self._threads = threads or len(os.sched_getaffinity(0))
        self.codec = settings.codec(self._threads)  # of the first step
        self.graphs: dict[tuple[str, ...], GraphStep] = {}  # by all names of a call
        self._functions: weakref.WeakSet[Any] = weakref.WeakSet()
        self._accumulates = False
        self._scaler: Any = None
        self._warned_dropped = False
        self._unlike = False  # whether ranks' graphs decode to different bits
        self._traces = 0  # how often all ranks were told to retrace, in the same step
        self._restarts = Restarts(self.reset)
        self._begin()

    def _begin(self) -> None:
        self.outcomes = EngineOutcomes()
        self.engine = Engine(
            self.settings, self._threads, stock="Horovod", tuner=None, outcomes=self.outcomes,
            drops_unused=False,
        )  # fmt: skip
        self.engine.feedback.undoable = False  # until there are digests of variables; see `_note`
        self.agreed: set[str] = set()  # what ranks have agreed on
        self.variables = Variables()
        self._sameness: dict[Any, ParameterCheck] = {}
        self._traceable: set[tuple[str, ...]] = set()  # names of calls that could be graphs
        self._in_turns: set[str] = set()  # names of tensors that several calls exchange
        self._outdone: set[tuple[str, ...]] = set()  # calls whose graph another call has ended
        self.tuner: Tuner | None = None  # for AutoCompression, from the first trace on
        self._tuned_set: int | None = None  # the process set that it tunes
        self._counted = 0  # steps in the report when graphs were last read
        self.nodes = Nodes(self.settings, self.engine)

    def clear(self) -> None:
        """Forget all variables and their residuals: for models that no longer exist."""
        self.restart({})

    def restart(self, residuals: Mapping[str, Floats]) -> None:
        """Restart, including counts, with these residuals; shapes may differ from before."""
        self._end_graphs()
        logs = self.engine.traffic.logs
        self._begin()
        self.engine.traffic.logs = logs
        self.engine.exchange.restart(residuals)
        self.nodes.restarted = dict(residuals)

    def reset(self) -> None:
        """Restart step counts; called on all ranks when ranks have joined or left."""
        self._end_graphs()
        self._in_turns, self._outdone = set(), set()
        self.tuner = self._tuned_set = None
        self.engine.reset()
        for sameness in self._sameness.values():
            sameness.reset()

    # What a user sets

    @property
    def accumulates(self) -> bool:
        """Whether a loop accumulates gradients before it applies them: all count as applied.

        Otherwise a gradient counts as dropped if its variable is unchanged at its next exchange.
        """
        return self._accumulates

    @accumulates.setter
    def accumulates(self, value: bool) -> None:
        if value != self._accumulates:
            self._accumulates = value
            self.retire()
            self.trace_again()

    def watch(self, scaler: Any) -> None:
        """Track the scale of a keras.optimizers.LossScaleOptimizer around a plain optimizer.

        Call it before the first gradient. Residuals are those of unscaled gradients.
        """
        if not hasattr(scaler, "dynamic_scale"):
            raise CompressError(
                f"got a {type(scaler).__name__}; expected a keras.optimizers.LossScaleOptimizer "
                "that was built. Call its build(variables) first."
            )
        if self.agreed:
            raise CompressError(
                "watch() was called after gradients were exchanged; expected before the first "
                "exchange. Call it before the first step."
            )
        self._scaler = scaler

    def scale(self) -> Any:
        """Return the current factor on all gradients, [] float32; None without a scaler."""
        return None if self._scaler is None else self._scaler.dynamic_scale.value.read_value()

    # Which tensors there are, and what must be equal on all ranks

    def agree(
        self, process_set: Any, fingerprint: Fingerprint, agreed: set[str] | None = None
    ) -> None:
        """Raise CompressError on every rank unless all trace the same; checked once, while tracing.

        If the ranks' hardware differs, they multiply in a fixed order or decode on the host from
        then on.

        agreed : fingerprints an optimizer has compared; by default those of this compression
        """
        self.engine.traffic.logs = process_set.rank() == 0
        agreed = self.agreed if agreed is None else agreed
        agree_at_trace(agreed, process_set, fingerprint, self.count_beside)
        key = f"hardware of {process_set.process_set_id}"
        if key in self.agreed or elastic():
            return
        with tf.init_scope():
            if not tf.executing_eagerly():
                return
            self.agreed.add(key)
            self.nodes.find(process_set, partial(total, process_set, self.count_beside))
            if self.settings.exchange == "shared":
                self.engine.shared.exact |= differs(
                    process_set, self.count_beside, "sn.hardware", hardware_fingerprint()
                )
            elif self.settings.exchange == "gather" and differs(
                process_set, self.count_beside, "sn.nodes",
                [("decoding", decoding_digest(self.codec))],
            ):  # fmt: skip
                self._unlike = True
                _log.warning(
                    "ranks decode frequencies to different bits in TensorFlow's graphs; payloads "
                    "are encoded and decoded by a Python function, which is slower, identical on "
                    "all ranks"
                )

    def takes(self, name: str, shape: Sequence[int]) -> bool:
        """Whether a gradient is compressed; once compressed, always, even if it has shrunk."""
        shared = self.engine.shared
        known = name in shared.tensors or self.engine.feedback.remembers(name)
        if known or is_large(shape, shared.min_elements):
            return True
        # A small tensor counts on one rank of a node only.
        return self.nodes.owns(name, math.prod(shape)) and shared.takes(name, shape)

    def sameness_of(self, owner: Any) -> ParameterCheck:
        """Return the ParameterCheck of one tape or optimizer."""
        return self._sameness.setdefault(owner, ParameterCheck(self.settings.check_every))

    def count_beside(self, nbytes: int) -> None:
        """Count bytes other than gradients; see Traffic."""
        self.engine.traffic.overhead(nbytes)

    # A step that the engine takes

    def average(
        self,
        names: Sequence[str | None],
        shapes: Sequence[tuple[int, ...]],
        vectors: Sequence[Floats],
        digests: Sequence[int] | None,
        call: Call,
    ) -> None:
        """Average gradients in place, [n] float32 each, on all ranks; called at each step.

        digests : of their variables; None if all gradients count as applied
        """
        if elastic() and self._restarts.since_last():
            # `synchronize` was not called, so the shared state is no longer equal on all ranks.
            engine_state.start_empty(self.engine)
            self._loaded()
            self._restarts.warn(self.settings.compression)
        known = [name for name in names if name is not None]
        self.retire(known)
        self._note(known, digests)
        gradients = [Gradient(*fields) for fields in zip(names, shapes, vectors, strict=True)]
        mark = f"sn.{zlib.crc32(repr(shapes).encode()):08x}"
        if self.nodes.serve(call):
            self.nodes.average(gradients, call, mark, self.count_beside)
            unchanged = self.nodes.agree(
                known, self._steady_steps, call.process_set, self.count_beside
            )
        else:
            host_step.average(self.engine, gradients, call, mark, self.count_beside)
            unchanged = self._steady_steps(known)
        self.outcomes.unseen(str(one.name) for one in gradients if not one.values.any())
        if (factor := call.factor()) != 1:
            for gradient in gradients:
                gradient.values[:] *= np.float32(factor)
        # This call ran here only until its sizes were fixed; now enough equal steps follow.
        again = tuple(known) in self._traceable and self._in_turns.isdisjoint(known)
        if again and unchanged >= LEAST:
            self.trace_again()

    def _loaded(self) -> None:
        """Reset what belongs to the previous state, after loading another one."""
        self.outcomes.marks.clear()
        self._restarts.happened = False

    def _note(self, names: Sequence[str], digests: Sequence[int] | None) -> None:
        """Determine the outcomes of tensors' last gradients, before their next exchange.

        Residuals of applied gradients are kept; those of dropped gradients are undone.
        """
        if digests is not None:
            self.engine.feedback.undoable = True
        if self.outcomes.note(names, digests):
            self.warn_dropped()
        self.engine.transaction.settle()

    def _note_now(self, names: Sequence[str], variables: Sequence[Any]) -> None:
        """Same as `_note`, while a function is traced, before its first step."""
        marks = self.outcomes.marks
        pairs = [(name, v) for name, v in zip(names, variables, strict=True) if name in marks]
        with tf.init_scope():  # values, not nodes of the graph being traced
            digests = [int(digest_of(variable.read_value())) for _, variable in pairs]
        self._note([name for name, _ in pairs], digests)
        self.outcomes.unseen(name for name, _ in pairs)  # no exchange yet
        self.outcomes.sent(())

    def warn_dropped(self) -> None:
        """Warn, once: a loop that accumulates gradients would lose their residuals."""
        if not self._warned_dropped:
            self._warned_dropped = True
            _log.warning(
                "a variable is the same, bit by bit, as at its last exchange: that gradient counts "
                "as dropped, and what compression left out of it is not sent later. If the loop "
                "accumulates gradients before it applies them, set this before the first step: "
                "memory_of(compression).accumulates = True"
            )

    # Steps that run in graphs

    def graph_step(
        self,
        buckets: Sequence[Mapping[str, int]],
        owner: Any,
        choice: Choice | None = None,
        variables: Sequence[Any] | None = None,
        stepped: Collection[GraphStep] = (),
        by_nodes: NodeSum | None = None,
    ) -> GraphStep | None:
        """Return the step of a call being traced as graph nodes; None if the engine must run it.

        buckets : names and elements of the tensors of each bucket
        owner : whose parameters are compared, see `sameness_of`
        choice : of AutoCompression; the graph counts steps while the tuner rests
        variables : of all these tensors; None if all gradients count as applied
        stepped : steps that already have nodes in the graph being traced
        by_nodes : set if buckets have only the tensors that this rank owns, perhaps none
        """
        if elastic() or not (buckets or choice or by_nodes) or tf.executing_eagerly():
            return None
        sizes: Mapping[str, int] = dict(pair for bucket in buckets for pair in bucket.items())
        names, sizes = tuple(sizes), sizes if by_nodes is None else by_nodes.sizes
        if self.settings.exchange != "shared" and not self._has_nodes(list(sizes.values())):
            return None
        functions = functions_of(sys._getframe(1))
        if choice is not None:
            refuse_untraced(bool(functions))
        if not functions:
            warn_of_engine_once()
            return None
        self._functions.update(functions)
        self._traceable.add(tuple(sizes))
        rests, plain = (choice.rests, choice.counted) if choice else (False, [])
        key = (*sizes, *(name for name, _, _ in plain))
        with tf.init_scope():
            if not tf.executing_eagerly():
                return None
            known = self.graphs.get(key)
            same_form = known is not None and (known.names, known.rests) == ([*names], rests)
            if known is not None and same_form and not known.ended:
                return known
            if self._takes_turns(key, stepped):
                return None
            self.retire(key)
            if variables is not None:
                self._note_now(names, variables)
            # Without tensors there is only a tuner, which rests forever.
            limit = self._steady_steps(names) if sizes else FOR_EVER * rests
            if by_nodes is not None:
                limit = self.nodes.steps_left(key, limit)
            if limit < LEAST:
                return None
            self.read()  # from here on the engine counts only steps of other calls
            marks = None
            if variables is not None:
                marks = [self.outcomes.marks.get(name, (None, False)) for name in names]
            graph = GraphStep(
                [self._bucket(bucket, undoable=variables is not None) for bucket in buckets],
                self.sameness_of(owner), began=self.engine.theta.steps, limit=limit, rests=rests,
                plain=plain, marks=marks,
                inside_bytes=0 if by_nodes is None else by_nodes.inside_bytes,
            )  # fmt: skip
            return self.graphs.setdefault(key, graph)

    def _takes_turns(self, key: tuple[str, ...], stepped: Collection[GraphStep]) -> bool:
        """Whether other calls also exchange tensors of this call, e.g. a GAN's discriminator.

        A graph belongs to one call. Calls that share tensors are run by the engine, in sequence.
        """
        tensors = set(key)
        sharing = [key for key in self.graphs if tensors.intersection(key) and set(key) != tensors]
        again = key in self._outdone or any(self.graphs[names] in stepped for names in sharing)
        if sharing and again:
            self._in_turns.update(tensors, *sharing)
        self._outdone.update(sharing)
        return not tensors.isdisjoint(self._in_turns)

    def _steady_steps(self, names: Sequence[str]) -> int:
        """Return for how many steps, from the next one on, these tensors send as many words."""
        if self.settings.exchange == "shared":
            return until_dense(self.engine.shared, names)
        return self.engine.theta.steady_steps()

    def _has_nodes(self, sizes: Sequence[int]) -> bool:
        """Whether payloads can be coded in a graph, bit-identically on all ranks; casts cannot."""
        of_graph = self.settings.exchange == "gather" and not self._unlike
        return of_graph and serves(self.codec, sizes)

    def _bucket(self, tensors: Mapping[str, int], *, undoable: bool) -> GraphBucket:
        engine, settings = self.engine, self.settings
        if settings.exchange == "shared":
            return SummedBucket(engine.shared, list(tensors), undoable=undoable)
        return GatheredBucket(
            engine.theta.next_codec, engine.feedback if settings.feedback else None, tensors,
            scatter=settings.scatter, undoable=undoable,
        )  # fmt: skip

    def trace_again(self) -> None:
        """Make all functions that use this memory retrace; on all ranks at once."""
        self._traces += 1
        self.forget_traces()

    def forget_traces(self) -> None:
        """Make functions retrace, without changing the tuner's choice."""
        for function in list(self._functions):
            forget(function)

    def read(self) -> None:
        """Write the graphs' counts and memories to the engine and the report."""
        engine, traffic = self.engine, self.engine.traffic
        with tf.init_scope():
            counts = [graph.read() for graph in self.graphs.values()]
            for graph, count in zip(self.graphs.values(), counts, strict=True):
                self.nodes.count(count.steps * graph.inside_bytes)
                self.outcomes.marks.update(graph.marks())
                if graph.undoable:
                    engine.transaction.reopen(graph.names)
                if graph.names or graph.inside_bytes:  # all calls of a step have counted it
                    engine.theta.steps = max(engine.theta.steps, graph.began + graph.ran)
        # The engine has already counted some of these steps, for other calls in them.
        already_counted = max(traffic.steps - self._counted, 0)
        steps = max((count.steps - already_counted for count in counts), default=0)
        errors = np.sum([count.relative for count in counts], axis=0) if counts else (0.0, 0.0)
        saturated = traffic.ran(
            max(steps, 0), [ran for count in counts for ran in count.ran], tuple(errors),
            sum(count.saturated for count in counts),
        )  # fmt: skip
        self._counted = traffic.steps
        if saturated:
            _log.warning("values beyond the fixed window were clipped: `saturated` in the report")

    def retire(self, names: Iterable[str] | None = None) -> None:
        """End the graphs of all calls, or of those with any of these names; retrace."""
        chosen = None if names is None else set(names)
        ends = [key for key in self.graphs if chosen is None or chosen.intersection(key)]
        if not ends:
            return
        self.read()
        for key in ends:
            with tf.init_scope():
                graph = self.graphs.pop(key)
                self.nodes.ended(key, graph)
                # If a concrete function still runs it, it fails instead of training on with stale
                # memories.
                graph.alive.assign(False)
        self.forget_traces()

    def _end_graphs(self) -> None:
        """End all graphs that were traced so far."""
        self.retire()
        if self.settings.tune:
            self.trace_again()

    # AutoCompression: in a graph the method of each tensor is fixed. While the tuner measures, a
    # Python function queries it about all tensors at the beginning of each step; if its answer has
    # changed since the graph was traced, functions are retraced. The current step still runs
    # unchanged, on all ranks, as the tuner's answers come from summed integers.

    def choose(
        self, tensors: Mapping[str, Tensor], process_set: Any, variables: Mapping[str, Any]
    ) -> Choice:
        """Choose how AutoCompression sends the tensors of a call being traced.

        Residuals are added to gradients that are sent uncompressed.

        variables : by name; empty if all gradients count as applied
        """
        refuse_untraced()
        if self.tuner is None:
            self.tuner = new_tuner(
                self.settings,
                ranks=process_set.size(),
                total=partial(total, process_set, self.count_beside),
            )
        if self._tuned_set is None:
            self._tuned_set = process_set.process_set_id
        if self._tuned_set != process_set.process_set_id:
            raise CompressError(
                f"one AutoCompression is used in the process sets {self._tuned_set} and "
                f"{process_set.process_set_id}. Make one for each with AutoCompression.using()."
            )
        plain = self.tuner.choice == "plain"
        unsent = [n for n in sorted(tensors) if plain and self.engine.shared.remembers(n)]
        if unsent:
            self.retire(unsent)
            known = [name for name in unsent if name in variables]
            self._note_now(known, [variables[name] for name in known])
            for name in unsent:
                self.engine.shared.stop(name)
        return Choice(tensors, plain, self.tuner.rests)

    def asking(self, choice: Choice, graph: GraphStep | None) -> Any:
        """Return a node, [] int64 zero, that queries the tuner at each step while it measures.

        It stops between a change and the following retrace: in a loop inside a function, steps
        continue as they were traced, and the tuner would measure the wrong ones.
        """
        traces, tuner = self._traces, self.tuner
        assert tuner is not None

        def ask() -> Any:
            if graph is None:
                for name, elements, nbytes in choice.counted:
                    self.engine.traffic.plain(name, elements, nbytes)
            if self._traces == traces:
                for name, tensor in choice.tensors.items():
                    tuner.method(name, tensor.shape)
                plain = tuner.choice == "plain"
                all_known = graph is not None or plain  # no sizes left to choose
                if plain != choice.plain or (all_known and tuner.rests):
                    self.trace_again()
            return np.int64(0)

        with tf.device("CPU"):
            node = tf.numpy_function(ask, [], tf.int64)
        node.set_shape([])
        return node

    # Queries between steps, and saved state

    def exchange(self) -> ErrorFeedback | AllReduceExchange:
        """Return the store of the memories, updated from graphs."""
        self.read()
        return self.engine.exchange

    def report(self) -> dict[str, float]:
        """See Compression.report."""
        self.read()
        chosen = self.tuner.report() if self.tuner else {}
        return self.engine.traffic.report() | chosen | self.nodes.report()

    def remembers(self, name: str) -> bool:
        """Whether there is a residual of a tensor."""
        self.read()
        return self.engine.remembers(name)

    def residual(self, name: str) -> Floats:
        """Return this rank's residual of a tensor, [n] float32."""
        # In a hierarchical exchange, the stored residual is that of the node's mean.
        return self.exchange().residual(name) * np.float32(self.nodes.size)

    def state_dict(self) -> dict[str, Any]:
        """Return the error memories by variable ("0:kernel"); they differ between ranks."""
        self.read()
        nodes = self.nodes.saved(hvd.size())
        return engine_state.state_dict(self.engine, ranks=hvd.size(), rank=hvd.rank()) | {
            "hierarchy": nodes
        }

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Load what state_dict returned on any rank, or the list of all ranks' states."""
        self._end_graphs()
        self.nodes.load(
            state, ranks=hvd.size(), rank=hvd.rank(), own=True, check=self.variables.expect
        )
        self.nodes.changed()
        self._loaded()

    def serialize(self) -> bytes:
        """Called by tf.train.Checkpoint."""
        return engine_state.to_bytes(self.state_dict(), self.settings)

    def deserialize(self, string_value: bytes) -> None:
        """Called by tf.train.Checkpoint."""
        self.load_state_dict(engine_state.from_bytes(string_value, self.settings, hvd.rank()))

    def synchronize(self, root_rank: int = 0, *, process_set: Any = hvd.global_process_set) -> None:
        """See Compression.synchronize; called by all ranks of the set."""
        self.reset()
        everyone = process_set.process_set_id == 0
        total = partial(hvd.allreduce, op=hvd.Sum, process_set=process_set)
        engine_state.synchronize(
            self.engine, total=lambda _, words: total(words).numpy(),
            broadcast=partial(hvd.broadcast_object, root_rank=root_rank, process_set=process_set),
            gather=partial(hvd.allgather_object, name="sn.rest") if everyone else None,
        )  # fmt: skip
        self.nodes.loaded = None
        self.nodes.changed()
        self._loaded()


# A memory is freed with its compression, unless Horovod's cache holds that.
_memories: weakref.WeakKeyDictionary[Any, OptimizerState] = weakref.WeakKeyDictionary()


def memory_of(compression: Any) -> OptimizerState:
    """Return the state of a compression, shared by all tapes that use it.

    To separate two models in reports and checkpoints, give each its own compression:
    `FFTCompression.using()` returns a new one each time.
    """
    if compression not in _memories:
        _memories[compression] = OptimizerState(settings_of(compression, "memory_of"))
    return _memories[compression]


def exchanged_by_tapes(variables: Sequence[Any]) -> list[Any]:
    """Return those of the variables whose gradients are exchanged by tapes with compression."""
    memories = list(_memories.values())
    return [
        v for v in variables if any(memory.variables.knows(repr(v.handle)) for memory in memories)
    ]
