"""What belongs to one compression in TensorFlow: the engine, and the steps that run in graphs.

The engine keeps everything, and takes all steps but those of graphs: `Memory.average` runs it in
one Python function of the graph, on the host. A graph borrows what it needs of the engine for as
long as its steps are alike, and gives it back (`graph.py`).
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
    """What belongs to one compression: codec, error memories, counts.

    It goes into a checkpoint like a variable: `tf.train.Checkpoint(memory=memory_of(fft))`. It
    differs between ranks, so each rank writes and reads a checkpoint of its own.

    A gradient is kept under a name, or that of the slot of its variable: "0:kernel".
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        threads = tf.config.threading.get_intra_op_parallelism_threads()
        self._threads = threads or len(os.sched_getaffinity(0))
        self.codec = settings.codec(self._threads)  # that of the first step
        self.graphs: dict[tuple[str, ...], GraphStep] = {}  # by all names of a call
        self._functions: weakref.WeakSet[Any] = weakref.WeakSet()
        self._accumulates = False
        self._scaler: Any = None
        self._warned_dropped = False
        self._unlike = False  # whether ranks decode with other bits in their graphs
        self._traces = 0  # how often all ranks were to trace again, in the same step
        self._restarts = Restarts(self.reset)
        self._begin()

    def _begin(self) -> None:
        self.outcomes = EngineOutcomes()
        self.engine = Engine(
            self.settings, self._threads, stock="Horovod", tuner=None, outcomes=self.outcomes,
            drops_unused=False,
        )  # fmt: skip
        self.engine.feedback.undoable = False  # not before a variable tells; see `_note`
        self.agreed: set[str] = set()  # what ranks have agreed on
        self.variables = Variables()
        self._sameness: dict[Any, ParameterCheck] = {}
        self._traceable: set[tuple[str, ...]] = set()  # names of calls that could be graphs
        self._in_turns: set[str] = set()  # names of tensors that several calls exchange
        self._outdone: set[tuple[str, ...]] = set()  # calls whose graph another one has ended
        self.tuner: Tuner | None = None  # of AutoCompression, from the first trace on
        self._tuned_set: int | None = None  # the process set it is of
        self._counted = 0  # steps in the report when graphs were read last
        self.nodes = Nodes(self.settings, self.engine)

    def clear(self) -> None:
        """Forget all variables and what was dropped of them: for models that are gone."""
        self.restart({})

    def restart(self, residuals: Mapping[str, Floats]) -> None:
        """Begin anew, counts as well, with what was not sent of these; shapes may be others."""
        self._end_graphs()
        logs = self.engine.traffic.logs
        self._begin()
        self.engine.traffic.logs = logs
        self.engine.exchange.restart(residuals)
        self.nodes.restarted = dict(residuals)

    def reset(self) -> None:
        """When ranks have come or gone, on all of them: count steps from here."""
        self._end_graphs()
        self._in_turns, self._outdone = set(), set()
        self.tuner = self._tuned_set = None
        self.engine.reset()
        for sameness in self._sameness.values():
            sameness.reset()

    # What a user sets

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
        if self.agreed:
            raise CompressError(
                "watch() was called after gradients were exchanged; expected before the first "
                "exchange. Call it before the first step."
            )
        self._scaler = scaler

    def scale(self) -> Any:
        """The factor on all gradients now, [] float32; None where no scaler is watched."""
        return None if self._scaler is None else self._scaler.dynamic_scale.value.read_value()

    # Which tensors there are, and what ranks have alike

    def agree(
        self, process_set: Any, fingerprint: Fingerprint, agreed: set[str] | None = None
    ) -> None:
        """Raise CompressError, on every rank, unless all trace the same; once, while it traces.

        Ranks of unlike hardware multiply in one order from then on, or decode on the host.

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
        """Whether a gradient is compressed; one that shrank goes on to be, small as it may be."""
        shared = self.engine.shared
        known = name in shared.tensors or self.engine.feedback.remembers(name)
        if known or is_large(shape, shared.min_elements):
            return True
        # What is small counts for one rank of a node.
        return self.nodes.owns(name, math.prod(shape)) and shared.takes(name, shape)

    def sameness_of(self, owner: Any) -> ParameterCheck:
        """When the parameters of one tape or optimizer are compared."""
        return self._sameness.setdefault(owner, ParameterCheck(self.settings.check_every))

    def count_beside(self, nbytes: int) -> None:
        """Count what is no gradient; see Traffic."""
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
        """Average gradients in their place, [n] float32 each, on all ranks; called at each step.

        digests : of their variables; None where all gradients count as applied
        """
        if elastic() and self._restarts.since_last():
            # Nobody called `synchronize`, so ranks no longer have alike what they share.
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
        # The step of a function that ran here for the sake of its sizes; alike steps lie ahead.
        again = tuple(known) in self._traceable and self._in_turns.isdisjoint(known)
        if again and unchanged >= LEAST:
            self.trace_again()

    def _loaded(self) -> None:
        """What another state leaves behind."""
        self.outcomes.marks.clear()
        self._restarts.happened = False

    def _note(self, names: Sequence[str], digests: Sequence[int] | None) -> None:
        """What became of the last gradients of tensors, before their next exchange.

        What was left out of gradients that were applied is kept; what was, of those that were
        dropped, is taken back.
        """
        if digests is not None:
            self.engine.feedback.undoable = True
        if self.outcomes.note(names, digests):
            self.warn_dropped()
        self.engine.transaction.settle()

    def _note_now(self, names: Sequence[str], variables: Sequence[Any]) -> None:
        """The same while a function is traced, before its first step."""
        marks = self.outcomes.marks
        pairs = [(name, v) for name, v in zip(names, variables, strict=True) if name in marks]
        with tf.init_scope():  # values, not nodes of the graph that is being traced
            digests = [int(digest_of(variable.read_value())) for _, variable in pairs]
        self._note([name for name, _ in pairs], digests)
        self.outcomes.unseen(name for name, _ in pairs)  # no exchange yet
        self.outcomes.sent(())

    def warn_dropped(self) -> None:
        """Warn, once: a loop that adds gradients up would lose what was left out of them."""
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
        """The step of a call that is being traced as nodes; None where the engine takes it.

        buckets : names and elements of the tensors of each bucket
        owner : whose parameters are compared, see `sameness_of`
        choice : of AutoCompression; the graph counts steps while the tuner rests
        variables : of all these tensors; None where all gradients count as applied
        stepped : those of which the graph that is being traced has made nodes
        by_nodes : where buckets are of what this rank owns of the call's tensors, perhaps of none
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
            # Without tensors there is nothing but a tuner to ask, which rests for good.
            limit = self._steady_steps(names) if sizes else FOR_EVER * rests
            if by_nodes is not None:
                limit = self.nodes.steps_left(key, limit)
            if limit < LEAST:
                return None
            self.read()  # steps that the engine counts from here on are those of other calls
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
        """Whether other calls exchange tensors of this call, too, as with a GAN's discriminator.

        A graph belongs to one call. The engine serves calls that share tensors, one after another.
        """
        tensors = set(key)
        sharing = [key for key in self.graphs if tensors.intersection(key) and set(key) != tensors]
        again = key in self._outdone or any(self.graphs[names] in stepped for names in sharing)
        if sharing and again:
            self._in_turns.update(tensors, *sharing)
        self._outdone.update(sharing)
        return not tensors.isdisjoint(self._in_turns)

    def _steady_steps(self, names: Sequence[str]) -> int:
        """Steps from the next one on in which these tensors send as many words as in that one."""
        if self.settings.exchange == "shared":
            return until_dense(self.engine.shared, names)
        return self.engine.theta.steady_steps()

    def _has_nodes(self, sizes: Sequence[int]) -> bool:
        """Whether payloads can be nodes of a graph, alike on all ranks; casts cannot."""
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
        """Let all functions be traced again that have used this memory; on all ranks at once."""
        self._traces += 1
        self.forget_traces()

    def forget_traces(self) -> None:
        """Likewise, and what was traced stays what the tuner chose."""
        for function in list(self._functions):
            forget(function)

    def read(self) -> None:
        """Write what graphs have counted and remembered to the engine and the report."""
        engine, traffic = self.engine, self.engine.traffic
        with tf.init_scope():
            counts = [graph.read() for graph in self.graphs.values()]
            for graph, count in zip(self.graphs.values(), counts, strict=True):
                self.nodes.count(count.steps * graph.inside_bytes)
                self.outcomes.marks.update(graph.marks())
                if graph.undoable:
                    engine.transaction.reopen(graph.names)
                if graph.names or graph.inside_bytes:  # calls of one step have counted it alike
                    engine.theta.steps = max(engine.theta.steps, graph.began + graph.ran)
        # The engine has counted some of these steps, for other calls in them.
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
        """End the graphs of all calls, or of those with some of these names; trace again."""
        chosen = None if names is None else set(names)
        ends = [key for key in self.graphs if chosen is None or chosen.intersection(key)]
        if not ends:
            return
        self.read()
        for key in ends:
            with tf.init_scope():
                graph = self.graphs.pop(key)
                self.nodes.ended(key, graph)
                # Who still runs it, by a concrete function, gets an error, and does not train on
                # with memories that nobody has.
                graph.alive.assign(False)
        self.forget_traces()

    def _end_graphs(self) -> None:
        """Of graphs that were traced so far nothing goes on."""
        self.retire()
        if self.settings.tune:
            self.trace_again()

    # AutoCompression: a graph sends each tensor in one way for good. While the tuner measures, a
    # Python function asks it at the beginning of a step about all tensors; where it says otherwise
    # than when the graph was traced, functions are traced again. The step under way still runs as
    # it is: on all ranks, as what the tuner says comes from summed integers.

    def choose(
        self, tensors: Mapping[str, Tensor], process_set: Any, variables: Mapping[str, Any]
    ) -> Choice:
        """Choose how AutoCompression sends the tensors of a call that is being traced.

        Plain gradients are sent with what was not sent of them before.

        variables : by name; none where all gradients count as applied
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
        """Return a node, [] int64 zero, that asks the tuner at each step, as long as it measures.

        It does not ask between a change and the trace that follows: in a loop inside a function
        steps continue as they were traced, and the tuner would measure the wrong ones.
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
                all_known = graph is not None or plain  # no size is to be chosen
                if plain != choice.plain or (all_known and tuner.rests):
                    self.trace_again()
            return np.int64(0)

        with tf.device("CPU"):
            node = tf.numpy_function(ask, [], tf.int64)
        node.set_shape([])
        return node

    # What is asked between steps, and saved

    def exchange(self) -> ErrorFeedback | AllReduceExchange:
        """Who keeps the memories, with what graphs have made of them."""
        self.read()
        return self.engine.exchange

    def report(self) -> dict[str, float]:
        """See Compression.report."""
        self.read()
        chosen = self.tuner.report() if self.tuner else {}
        return self.engine.traffic.report() | chosen | self.nodes.report()

    def remembers(self, name: str) -> bool:
        """Whether anything of a tensor has yet to be sent."""
        self.read()
        return self.engine.remembers(name)

    def residual(self, name: str) -> Floats:
        """What this rank has yet to send of a tensor, [n] float32."""
        # By nodes it is of the node's mean.
        return self.exchange().residual(name) * np.float32(self.nodes.size)

    def state_dict(self) -> dict[str, Any]:
        """The error memories by variable ("0:kernel"), as arrays; they differ between ranks."""
        self.read()
        nodes = self.nodes.saved(hvd.size())
        return engine_state.state_dict(self.engine, ranks=hvd.size(), rank=hvd.rank()) | {
            "hierarchy": nodes
        }

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Take over what state_dict returned, on whichever rank, or the list of all ranks'."""
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


# A compression that is dropped takes its memory along, unless Horovod's cache holds it.
_memories: weakref.WeakKeyDictionary[Any, OptimizerState] = weakref.WeakKeyDictionary()


def memory_of(compression: Any) -> OptimizerState:
    """What a compression remembers and has sent, for all tapes that were given it.

    To keep two models apart in reports and checkpoints, give each its own:
    `FFTCompression.using()` returns a new one each time.
    """
    if compression not in _memories:
        _memories[compression] = OptimizerState(settings_of(compression, "memory_of"))
    return _memories[compression]


def exchanged_by_tapes(variables: Sequence[Any]) -> list[Any]:
    """Those of these variables whose gradients tapes with compression exchange."""
    memories = list(_memories.values())
    return [
        v for v in variables if any(memory.variables.knows(repr(v.handle)) for memory in memories)
    ]
