"""Compression of TensorFlow tensors in stock Horovod: eager tapes and tf.function.

Horovod calls `compress` while it traces, never per step, and tensor by tensor. So the first call
builds a graph for all gradients of the tape, in buckets (`buckets.py`, `sized.py`), and Horovod's
own all-reduces get one zero each.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, NoReturn

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext
from tensorflow.python.ops.control_flow_v2_func_graphs import CondBranchFuncGraph

from ..base.errors import CompressError
from ..compression import settings_of
from ..settings import Settings
from .alike import as_variables, compared, elastic, said_of_compression, said_of_variables
from .buckets import Bucket, Mean, Plain, cut, means_of, wire_type
from .memory import Memory, memory_at, memory_of
from .nodes.outcomes import digest_of
from .nodes.sized import Collectives, Sized
from .traced import NO_VARIABLE
from .tracing import Call, find_call, passed
from .tuned import Tensor, Tuned, asking, refuse_untraced, untraced, with_owed

__all__ = ["Beside", "compress", "compressed_means", "memory_of", "refuse_xla"]

_FLOATS = (tf.float32, tf.float16, tf.bfloat16)
_as_written = tf.autograph.experimental.do_not_convert


def _ask_memory(tape: Any, *_: Any) -> NoReturn:
    raise CompressError(
        f"got a {type(tape).__name__}; expected the optimizer of sn_compress.tensorflow.keras. A "
        "tape lives for one step, its compression for the run: what they remember and have sent is "
        "in sn_compress.tensorflow.tape.memory_of(compression)."
    )


# What Compression offers for optimizers; TensorFlow's own gradients come from a tape.
report = residuals = restart = state_dict = load_state_dict = synchronize = _ask_memory
watch = Elastic = _ask_memory


@_as_written
def compress(tensor: Any, settings: Settings, frame: FrameType) -> tuple[Any, Any]:
    """One gradient on its way; see Compression."""
    call = find_call(frame, tensor)
    _check(call)
    tensor = _shaped(tensor, call, call.place)
    if not _reaches_others(call):
        return tensor, None  # Horovod traces what it never runs
    memory = memory_at(call.compression, settings)
    memory.traffic.speaks = call.process_set.rank() == 0
    said = [*said_of_compression(call.compression), ("op", str(call.op))]
    said.append(("accumulates", str(memory.accumulates)))
    if call.sources is not None and all(v is not None for v in call.sources):
        said += said_of_variables(call.sources)
    memory.agree(call.process_set, said)
    found: tuple[Any, dict[int | None, Any], dict[int | None, Any]] = None, {}, {}
    if call.sources is not None:
        found = _of_tape(call, memory)
    elif _takes(tensor, None, call, memory):
        beside = _beside(call, memory)
        made = exchanged(call, memory, [call.name], [None], [tensor], beside)
        found = made.by_place([call.place])
    begun, means, plain = found
    if call.place not in means:
        if call.place in plain:
            tensor = plain[call.place]
        if begun is not None:
            with tf.control_dependencies([begun]):
                tensor = tf.identity(tensor)
        if call.place not in plain:
            tensor = _count_plain(tensor, _label(call, call.place, tensor), memory)
        return Plain.compress(tensor)
    # Grouped all-reduces want one dtype, that of the plain tensors beside it.
    mark = "sn_plain" if call.place is None else f"sn_{call.place}"
    token = tf.identity(tf.zeros([1], wire_type(tensor)), name=f"{mark}_token")
    return token, Mean(tensor, means[call.place], call)


@dataclass(frozen=True)
class Beside:
    """What is done once in a step beside the exchange of a call.

    python : makes the node that does it in Python, whose result goes into every Python function
    what : whose parameters are compared; see Traced.sameness_of
    variables : which are compared
    sparse : names and tf.IndexedSlices, to be counted
    """

    python: Callable[[], Any]
    what: Any
    variables: Sequence[Any] = ()
    sparse: Sequence[tuple[str, Any]] = ()


@dataclass(frozen=True)
class Exchanged:
    """What `exchanged` has made.

    begun : a node for the beginning of a step; None if nothing has to wait for it
    means : of each gradient, [n] float32; None where AutoCompression lets it travel plain
    sent : the gradients, those that travel plain with what is owed of them; they are counted
    """

    begun: Any
    means: Sequence[Any]
    sent: Sequence[Any]

    def by_place(
        self, places: Sequence[int | None]
    ) -> tuple[Any, dict[int | None, Any], dict[int | None, Any]]:
        """`begun`, the means, and what travels plain, by place of the gradient."""
        means = dict(zip(places, self.means, strict=True))
        sent = dict(zip(places, self.sent, strict=True))
        return (
            self.begun,
            {place: mean for place, mean in means.items() if mean is not None},
            {place: sent[place] for place, mean in means.items() if mean is None},
        )


def exchanged(
    call: Call,
    memory: Memory,
    names: Sequence[str | None],
    places: Sequence[int | None],
    tensors: Sequence[Any],
    beside: Beside,
) -> Exchanged:
    """Average gradients.

    names, places : of each, what it is kept under, or its place in the result of `beside.python`
    """
    tuned = None
    if memory.settings.tune and tensors:
        tuned = _tuned(call, memory, names, tensors, _variables(call, memory, places))
    taken = [at for at, name in enumerate(names) if tuned is None or name not in tuned.plain]
    cuts = cut([tensors[at].shape.num_elements() for at in taken])
    parts = [[taken[at] for at in part] for part in cuts]
    own = [
        {name: tensors[at].shape.num_elements() for at in part if (name := names[at]) is not None}
        for part in parts
    ]
    known = all(len(part) == len(some) for part, some in zip(parts, own, strict=True))
    followed = [at for part in parts for at in part]
    variables = _variables(call, memory, [places[at] for at in followed])
    earlier = _earlier(memory)
    form = None
    if known:
        form = memory.sized(own, beside.what, tuned, variables, earlier.forms)
    slots = theta = asked = None
    if tuned is not None and (form is None or not form.rests):
        asked = asking(memory.ask(tuned, form))
    if form is None:
        slots = beside.python()
        if asked is not None:
            slots = slots + asked
        if variables is not None:
            slots = _settled(
                memory, slots, [names[at] for at in followed], [places[at] for at in followed],
                variables, earlier.nodes(),
            )  # fmt: skip
        theta = _theta_of_step(call, memory, slots) if memory.learns and parts else None
    scale = None if call.sources is None else memory.scale()
    buckets = [
        Bucket(
            call, memory, [names[at] for at in part], [places[at] for at in part],
            [tensors[at] for at in part], slots, f"sn_b{number}", theta, scale,
        )
        for number, part in enumerate(parts)
    ]  # fmt: skip
    if form is None:
        begun, made = slots, [means_of(bucket) for bucket in buckets]
    else:
        begun, made = _sized(form, buckets, memory, beside, call, variables)
        earlier.forms.add(form)
        if asked is not None:
            begun += asked
        elif not buckets:
            begun = None  # all travel as in stock Horovod, which waits for nothing
    placed = {
        at: mean
        for part, some in zip(parts, made, strict=True)
        for at, mean in zip(part, some, strict=True)
    }
    if scale is not None:
        placed = {at: mean * scale for at, mean in placed.items()}
    earlier.means[:] = placed.values()
    sent = [
        tensor if at in placed else _with_owed(tensor, str(name), memory)
        for at, (name, tensor) in enumerate(zip(names, tensors, strict=True))
    ]
    return Exchanged(begun, [placed.get(at) for at in range(len(tensors))], sent)


@dataclass
class _Earlier:
    """What a graph has exchanged for a memory so far.

    means : the last ones
    """

    means: list[Any]
    forms: set[Sized]

    def nodes(self) -> list[Any]:
        """What the next exchange in Python has to wait for."""
        return [*self.means, *(it for form in self.forms for it in form.remembered())]


def _earlier(memory: Memory) -> _Earlier:
    if tf.executing_eagerly():
        return _Earlier([], set())
    known = _in_graph(tf.compat.v1.get_default_graph())
    found: _Earlier = known.setdefault((memory, "earlier"), _Earlier([], set()))
    return found


def _variables(call: Call, memory: Memory, places: Sequence[int | None]) -> list[Any] | None:
    """Variables of a tape's gradients; None where all gradients count as applied.

    A tape says nothing of what becomes of its gradients; see nodes/outcomes.py.
    """
    if not call.sources or memory.accumulates or not memory.settings.feedback:
        return None
    found = [None if place is None else call.sources[place] for place in places]
    return found if all(isinstance(it, tf.Variable) for it in found) else None


def _digests(variables: Sequence[Any]) -> Any:
    values = [tf.raw_ops.ReadVariableOp(resource=v.handle, dtype=v.dtype) for v in variables]
    return tf.stack([digest_of(it) for it in values])


def _settled(
    memory: Memory,
    slots: Any,
    names: Sequence[str | None],
    places: Sequence[int | None],
    variables: Sequence[Any],
    after: Sequence[Any],
) -> Any:
    """The slots, once what was dropped of these variables is taken back.

    after : nodes of exchanges before this one in the graph
    """

    def settle(slots: Any, digests: Any) -> Any:
        pairs = zip(names, places, strict=True)
        keys = [name or memory.key(None, int(slots[place])) for name, place in pairs]
        memory.settle([str(key) for key in keys], digests.tolist())
        return slots

    with tf.device("CPU"), tf.control_dependencies([*after]):
        made = tf.numpy_function(settle, [slots, _digests(variables)], tf.int64)
    made.set_shape(slots.shape)
    return made


def _tuned(
    call: Call,
    memory: Memory,
    names: Sequence[str | None],
    tensors: Sequence[Any],
    variables: Sequence[Any] | None,
) -> Tuned:
    """What AutoCompression has chosen for the gradients of a call, while it is traced."""
    of = {}
    for name, tensor in zip(names, tensors, strict=True):
        if name is None:
            refuse_untraced()
            raise untraced("where the graph may serve any variables: a tape that Horovod traces")
        n = tensor.shape.num_elements()
        of[name] = Tensor(tuple(tensor.shape), n, n * wire_type(tensor).size)
    known = dict(zip(of, variables or (), strict=variables is not None))
    return memory.tuned(of, call.process_set, known)


def _with_owed(tensor: Any, name: str, memory: Memory) -> Any:
    if name not in memory.owed:
        return tensor
    return with_owed(tensor, partial(memory.pay, name))


def _sized(
    form: Sized,
    buckets: Sequence[Bucket],
    memory: Memory,
    beside: Beside,
    call: Call,
    variables: Sequence[Any] | None,
) -> tuple[Any, list[list[Any]]]:
    """The same without Python."""
    begun, due, at = form.begin(memory.trace_again)
    begun += compared(due, beside.variables, memory, call.process_set, lambda: form.same, at)
    for name, each in beside.sparse:
        form.count_sparse(name, each.values, each.indices)

    if not buckets:
        return begun, []

    def total(words: Any, number: int, turn: int) -> Any:
        return buckets[number].reduce(words, hvd.Sum, f"round{turn}")

    def gather(words: Any, number: int) -> Any:
        return buckets[number].gather(words)

    def alltoall(words: Any, splits: Sequence[int], number: int) -> Any:
        return buckets[number].alltoall(words, splits)

    with tf.control_dependencies([begun]):
        vectors = [[tf.identity(each) for each in bucket.vectors()] for bucket in buckets]
    first = buckets[0]
    by = Collectives(first.ranks(), call.process_set.rank(), total, gather, alltoall)
    digests = None if variables is None else _digests(variables)
    made, factor = form.step(vectors, by, digests, memory.say_dropped), first.factor()
    return begun, [[mean if factor == 1 else mean * factor for mean in some] for some in made]


def _reaches_others(call: Call) -> bool:
    """Whether a tape sends anything: Horovod asks the same, in a branch of the graph."""
    own = call.process_set
    return not call.branch or elastic() or bool(own.included() and own.size() > 1)


def compressed_means(
    call: Call, gradients: Sequence[Any], names: Sequence[str], beside: Beside
) -> tuple[Any, list[Any], list[Any]]:
    """A node for the beginning of a step, the means of gradients that a rim names, and these.

    The means are as the gradients are; None for what travels plain: the gradients that are
    returned, which may hold what was owed of them.
    """
    memory = memory_at(call.compression, settings_of(call.compression, "DistributedOptimizer"))
    memory.traffic.speaks = call.process_set.rank() == 0
    _check(call)
    found: list[Any] = [None] * len(gradients)
    taken = []
    for at, (each, name) in enumerate(zip(gradients, names, strict=True)):
        if hasattr(each, "indices"):
            continue
        if _fits(each) and memory.takes(name, each.shape.as_list()):
            taken.append(at)
        else:
            _count_plain(each, name, memory)
    made = exchanged(
        call, memory, [names[at] for at in taken], [None] * len(taken),
        [gradients[at] for at in taken], beside,
    )  # fmt: skip
    sent = list(gradients)
    for at, mean, tensor in zip(taken, made.means, made.sent, strict=True):
        sent[at] = tensor
        if mean is not None:
            found[at] = Mean(tensor, mean, call).finish(None)
    return made.begun, found, sent


def _of_tape(
    call: Call, memory: Memory
) -> tuple[Any, dict[int | None, Any], dict[int | None, Any]]:
    """A node for the beginning of a step, and of a tape's gradients, by place, the means.

    Last come those that AutoCompression lets travel plain, as they are to be sent.

    Horovod hands over one tensor at a time, each in a branch of its own. What they have in common
    is made around these branches, with the first of them.
    """
    graph = _graph_of(call)
    known = _in_graph(graph)
    key = memory, "means", tuple(map(id, call.gradients))
    if key not in known:
        with graph.as_default():
            places, tensors = [], []
            for place, each in enumerate(call.gradients):
                if each is None or hasattr(each, "indices"):
                    continue
                each = _shaped(each, call, place)
                once = sum(other is call.gradients[place] for other in call.gradients) == 1
                if _takes(each, place if once else None, call, memory):
                    places.append(place)
                    tensors.append(each)
            names, beside = _names(call, memory), _beside(call, memory)
            named = [names[place] if names else None for place in places]
            made = exchanged(call, memory, named, places, tensors, beside)
        # With the gradients, as ids are used again.
        known[key] = made.by_place(places), call.gradients
    found: tuple[Any, dict[int | None, Any], dict[int | None, Any]] = known[key][0]
    return found


def _slots_now(call: Call, memory: Memory) -> Any:
    """The slots of a tape's variables, [variables] int64, if they are the trace's own, else None.

    They are not where their handles are arguments of the function that is traced.
    """
    sources = call.sources or ()
    own = {place: v.handle for place, v in enumerate(sources) if isinstance(v, tf.Variable)}
    arguments = passed(sys._getframe(1))
    if any(
        tf.is_symbolic_tensor(handle) or any(handle is each for each in arguments)
        for handle in own.values()
    ):
        return None
    slots = np.full(len(sources), NO_VARIABLE, np.int64)
    slots[list(own)] = memory.slots(map(repr, own.values()))
    return slots


def _names(call: Call, memory: Memory) -> list[str | None] | None:
    """What the gradients of a tape are kept under, where that is known while it is traced."""
    slots = _slots_now(call, memory)
    if slots is None:
        return None
    return [memory.key(None, int(slot)) for slot in slots]


def _beside(call: Call, memory: Memory) -> Beside:
    """What is done once in a step of a tape."""
    slots = _slots_now(call, memory)
    sparse = []
    if slots is not None:
        for place, each in call.sparse:
            sparse.append((memory.key(f"{place}:sparse", int(slots[place])) or "", each))
    return Beside(
        python=lambda: _slots(call, memory),
        what=None if slots is None else slots.tobytes(),
        variables=as_variables(call.sources or ()),
        sparse=sparse,
    )


def _shaped(tensor: Any, call: Call, place: int | None) -> Any:
    """Made dense from sparse, a gradient has lost its shape; its variable has not."""
    tensor = tf.convert_to_tensor(tensor)
    if call.sources and place is not None and tensor.shape.num_elements() is None:
        return tf.ensure_shape(tensor, call.sources[place].shape)
    return tensor


def _takes(tensor: Any, place: int | None, call: Call, memory: Memory) -> bool:
    """Whether a gradient of a call is compressed."""
    if not _fits(tensor) or _unclear(call, place, memory):
        return False
    return memory.takes(_label(call, place, tensor), tensor.shape.as_list())


def _fits(tensor: Any) -> bool:
    """Whether a gradient could be compressed, whatever its size."""
    return tensor.dtype in _FLOATS and tensor.shape.num_elements() is not None


def _unclear(call: Call, place: int | None, memory: Memory) -> bool:
    """Whether nothing tells which memory would be meant."""
    shared = memory.settings.exchange == "shared"
    if call.sources is None:
        # A gather works without memory; the shared exchange is nothing but memory.
        return shared and call.name is None
    if place is None:
        return True
    return shared and not isinstance(call.sources[place], tf.Variable)


def _check(call: Call) -> None:
    if call.op not in (hvd.Average, hvd.Sum):
        raise CompressError(
            f"{call.name or 'gradient'}: compression takes op=hvd.Average or hvd.Sum; Adasum, "
            "Min, Max and Product need the dense tensor. Use another op, or no compression."
        )
    refuse_xla()


def refuse_xla() -> None:
    """Raise CompressError where TensorFlow traces for XLA, with what to do about it."""
    if GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise CompressError(
            "gradients cannot be compressed or reduced by Horovod in a function that XLA compiles "
            "(jit_compile=True); expected a plain tf.function. In Keras: "
            "model.compile(jit_compile=False)."
        )


def _label(call: Call, place: int | None, tensor: Any) -> str:
    """A name for a gradient while its graph is made."""
    name = call.name if place == call.place else None
    return name or f"{place}:{tensor.shape}"


def _count_plain(tensor: Any, label: str, memory: Memory) -> Any:
    """Count a tensor that travels plain; returns it, to go on with."""
    size = wire_type(tensor).size
    elements = tensor.shape.num_elements()
    if elements is not None:
        memory.traffic.fixed(label, elements, elements * size)
        return tensor

    def count(elements: Any) -> Any:
        memory.count_plain(label, int(elements), int(elements) * size)
        return np.int64(0)

    with tf.device("CPU"):
        counted = tf.numpy_function(count, [tf.size(tensor)], tf.int64)
    with tf.control_dependencies([counted]):
        return tf.identity(tensor)


def _theta_of_step(call: Call, memory: Memory, slots: Any) -> Any:
    """Theta for all gradients of a call of Horovod, [] float64: made once for all of them.

    Every rank adds what it has lost since the last one, and the sum decides: so all have the same
    theta in the same step, in whatever order their threads encode.
    """
    if tf.executing_eagerly():
        raise CompressError(
            f"theta={memory.settings.theta!r} in an hvd.allreduce outside of a graph, where "
            "nothing tells steps apart; expected a DistributedGradientTape, Keras, or a call "
            "inside a tf.function. Or use a number, or a schedule of the step alone."
        )
    known = _in_graph(slots.graph)
    key = memory, "theta", tuple(map(id, call.sources or ()))
    if key not in known:

        def tell(_: Any) -> Any:
            memory.count_beside(16)
            return memory.lost()

        def hear(total: Any, slots: Any) -> Any:
            # Whatever was traced for these variables counts their steps.
            return np.float64(memory.begin_step(f"{zlib.crc32(slots.tobytes()):08x}", total))

        with slots.graph.as_default(), tf.device("CPU"):
            told = tf.numpy_function(tell, [slots], tf.float64)
            told.set_shape([2])
            total = hvd.allreduce(
                tf.identity(told, name="sn_lost"), op=hvd.Sum, process_set=call.process_set
            )
            theta = tf.numpy_function(hear, [total, slots], tf.float64)
            theta.set_shape([])
        known[key] = theta
    return known[key]


def _slots(call: Call, memory: Memory) -> Any:
    """The slots of all variables of the call, [variables] int64, -1 for what is no variable."""
    sources = call.sources or ()
    if tf.executing_eagerly():
        return tf.constant([], tf.int64)
    graph = _graph_of(call)
    known = _in_graph(graph)
    key = memory, "slots", tuple(map(id, sources))
    if key not in known:
        handles = {i: v.handle for i, v in enumerate(sources) if isinstance(v, tf.Variable)}
        places = [place for place, _ in call.sparse]
        sizes = [part.dtype.size for _, each in call.sparse for part in _parts(each)]

        def find(*found: Any) -> Any:
            slots = np.full(len(sources), NO_VARIABLE, np.int64)
            slots[list(handles)] = memory.slots(map(repr, found[: len(handles)]))
            counts = [int(count) for count in found[len(handles) :]]
            _count_sparse(memory, places, slots, counts, sizes)
            latest[:] = [memory.sameness_of(slots.tobytes())]
            return slots, latest[0].step()

        latest: list[Any] = []
        with graph.as_default(), tf.device("CPU"):
            counts = [tf.size(part) for _, each in call.sparse for part in _parts(each)]
            slots, due = tf.py_function(find, [*handles.values(), *counts], [tf.int64, tf.bool])
            slots.set_shape([len(sources)])
            variables = as_variables(sources)
            known[key] = slots + compared(
                due, variables, memory, call.process_set, lambda: latest[0]
            )
    return known[key]


def _graph_of(call: Call) -> Any:
    """That of a call: Horovod puts every gradient of a tape into a branch of its own."""
    graph = tf.compat.v1.get_default_graph()
    inner = call.branch and isinstance(graph, CondBranchFuncGraph)
    return graph.outer_graph if inner else graph


def _in_graph(graph: Any) -> dict[Any, Any]:
    """What was made once in a graph; it goes with the graph."""
    if not hasattr(graph, "_sn_made"):
        graph._sn_made = {}
    found: dict[Any, Any] = graph._sn_made
    return found


def _parts(sparse: Any) -> tuple[Any, Any]:
    return sparse.values, sparse.indices


def _count_sparse(
    memory: Memory, places: list[int], slots: Any, counts: list[int], sizes: list[int]
) -> None:
    """Count sparse gradients: their values and indices, by place, as many and as large as given."""
    nbytes = [count * size for count, size in zip(counts, sizes, strict=True)]
    for i, place in enumerate(places):
        key = memory.key(f"{place}:sparse", int(slots[place])) or ""
        memory.count_sparse(key, counts[2 * i], nbytes[2 * i] + nbytes[2 * i + 1])
