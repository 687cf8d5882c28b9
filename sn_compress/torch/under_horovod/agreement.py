"""Horovod's torch optimizers: agreement of ranks at the first gradient, and later comparisons."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import horovod.torch as hvd
import numpy as np
import torch
from horovod.common.elastic import notification_manager
from horovod.torch.elastic.state import StateHandler, get_handler_registry

from ... import __version__
from ...arrays import numpy_view
from ...codecs import registry
from ...consistency import Fingerprint, agree, all_equal, digest_words, plain, result_of
from ...engine import engine_state
from ...engine.hierarchy import Place, horovods_layout, may_have_nodes
from ...errors import CompressError
from ...ops.products import hardware_fingerprint
from ...settings import Settings
from ..layout import fingerprint_of, loaded_arrays
from ..outcomes import digest, live_objects
from .in_flight import complete
from .memory import OptimizerState, memory_of, optimizers_with_memory

_log = logging.getLogger(__name__)
_followed: weakref.WeakSet[Any] = weakref.WeakSet()  # states of elastic runs
_DO = (
    "Give all ranks the same model, the same named_parameters in the same order, the same number "
    "of optimizers, and the same arguments; load what all ranks have saved at the same step."
)
# Arguments of hvd.DistributedOptimizer that change what is sent, or when.
_OPTIONS = ("op", "backward_passes_per_step", "gradient_predivide_factor", "sparse_as_dense")


def total(memory: OptimizerState, process_set: Any, name: str, words: Any) -> Any:
    """Sum over the ranks; blocks."""
    send = partial(hvd.allreduce_async, op=hvd.Sum, process_set=process_set)
    return _at_once(memory, name, torch.from_numpy(words.copy()), send).numpy()


def _at_once(
    memory: OptimizerState, name: str, wire: torch.Tensor, send: Callable[..., int]
) -> Any:
    """Run a collective, wait for its result, and count it as overhead."""
    memory.engine.traffic.overhead(wire.nbytes)
    handle = send(wire, name=name)
    return result_of(hvd, handle, limit_s=memory.settings.wait_s, what=name)


def agree_on_optimizers(
    memory: OptimizerState, optimizer: Any, new: Callable[[Any], bool]
) -> list[Any]:
    """Return the new optimizers; CompressError on all ranks unless they have the same ones.

    Called when the first of them, `optimizer`, sends its first gradient. Horovod does not announce
    new optimizers, so live ones are searched for, after a garbage collection, as Python collects at
    different times on each rank.

    new : whether an optimizer has yet to be compared; others have agreed before
    """
    gc.collect()
    alive = _optimizers(optimizer.process_set)
    if all(other is not optimizer for other in alive):  # gc.freeze hides objects
        alive.append(optimizer)
    chosen = list(filter(new, alive))
    _agree(memory, optimizer.process_set, _fingerprint(chosen))
    return chosen


def agree_on_number(memory: OptimizerState, process_set: Any) -> int:
    """Return a number that has not been used in names of collectives on any rank.

    A collective that a deleted optimizer began on a single rank is still pending in Horovod. A new
    optimizer with the same parameter names would complete it.
    """
    send = partial(hvd.allreduce_async, op=hvd.Max, process_set=process_set)
    return int(
        _at_once(memory, "sn.agree.number", torch.tensor([OptimizerState.unused_number]), send)
    )


def agree_on_fresh(memory: OptimizerState, process_set: Any, *, fresh: bool) -> None:
    """Raise CompressError on all ranks unless all or none have new gradients.

    Called when an optimizer synchronizes again before its step.
    """
    fingerprint = [("a backward pass since", str(fresh))]
    assert memory.buckets is not None  # laid out when the first gradient came
    name = memory.wire_name(f"sn.fresh.{memory.buckets.members[0][0]}")
    if not all_equal(total(memory, process_set, name, digest_words(fingerprint))):
        raise CompressError(
            "an optimizer was synchronized again before its step, and some ranks have computed "
            "gradients since and others have not; expected a backward pass on all ranks or on "
            "none. Call backward() on every rank, or step() on none."
        )


def end_broken_rounds(memory: OptimizerState, process_set: Any) -> None:
    """End collectives that some ranks started before a step was aborted and others never joined.

    Pending in Horovod's table they do no harm, as later names differ, until a rank calls
    hvd.join(): then collectives that wait for that rank only are executed, and ranks that do not
    know them crash. So ranks exchange the names they have sent, and each sends a word for those it
    has not. Its shape differs, so Horovod reports an error to all and stops waiting.
    """
    words = "\n".join(f"{kind} {name}" for kind, name in sorted(memory.sent)) + "\n"
    wire = torch.frombuffer(bytearray(words.encode()), dtype=torch.uint8)
    send = partial(hvd.allgather_async, process_set=process_set)
    gathered = bytes(_at_once(memory, memory.wire_name("sn.left"), wire, send).tolist())
    names = {tuple(line.split(" ", 1)) for line in gathered.decode().split("\n") if line}
    for kind, name in sorted(names - memory.sent):
        with suppress(hvd.mpi_ops.HorovodInternalError):
            handle = _word(kind, name, process_set)
            result_of(hvd, handle, limit_s=memory.settings.wait_s, what=name)
    memory.forget_sent()


def _word(kind: str, name: str, process_set: Any) -> Any:
    if kind == "alltoall":
        words = torch.zeros(process_set.size(), dtype=torch.int32)
        return hvd.alltoall_async(words, name=name, process_set=process_set)
    word = torch.zeros(1, dtype=torch.int32)
    if kind == "gather":
        return hvd.allgather_async(word, name=name, process_set=process_set)
    return hvd.allreduce_async_(word, name=name, op=hvd.Sum, process_set=process_set)


def agree_on_calls(memory: OptimizerState, process_set: Any) -> None:
    """Raise CompressError on all ranks unless plain hvd.allreduce has the same settings on each."""
    _agree(memory, process_set, [("calls of", "hvd.allreduce"), *_fingerprint_of(memory.settings)])


def alike_in_hardware(memory: OptimizerState, process_set: Any, device: torch.device) -> bool:
    """Whether all ranks compute bit-identical matrix products, as low-rank exchanges require."""
    like = torch.zeros(1, dtype=torch.float32, device=device)
    words = digest_words(hardware_fingerprint(numpy_view(like)))
    return all_equal(total(memory, process_set, "sn.hardware", words))


def _agree(memory: OptimizerState, process_set: Any, fingerprint: Fingerprint) -> None:
    agree(
        fingerprint, total=partial(total, memory, process_set), rank=process_set.rank(),
        ranks=process_set.size(), name="sn.agree", do=_DO,
    )  # fmt: skip


def _optimizers(process_set: Any) -> list[Any]:
    return [
        opt
        for opt in live_objects(torch.optim.Optimizer)
        if isinstance(getattr(getattr(opt, "_compression", None), "settings", None), Settings)
        # Adasum's optimizer has no process set, and is refused at its own first gradient.
        and hasattr(opt, "process_set")
        and opt.process_set.process_set_id == process_set.process_set_id
    ]


def _fingerprint(optimizers: list[Any]) -> Fingerprint:
    # Sorted, as the collector lists objects in arbitrary order.
    fingerprints = sorted(map(_fingerprint_of_one, optimizers))
    named = [
        (f"optimizer {number}'s {what}" if len(fingerprints) > 1 else what, value)
        for number, fingerprint in enumerate(fingerprints)
        for what, value in fingerprint
    ]
    return [("number of optimizers", str(len(fingerprints))), *named]


def _fingerprint_of_one(optimizer: Any) -> list[tuple[str, str]]:
    names, groups = optimizer._parameter_names, optimizer._groups
    if isinstance(groups, list):
        groups = [[names.get(parameter) for parameter in group] for group in groups]
    tensors = fingerprint_of((p, names[p]) for p in reduced_parameters(optimizer))
    options = ((option, plain(getattr(optimizer, option))) for option in _OPTIONS)
    settings, memory = _fingerprint_of(optimizer._compression.settings), memory_of(optimizer)
    by_nodes = memory.nodes.saved(_place(optimizer)["ranks"])
    progress = [] if by_nodes else memory.engine.progress()
    return [*settings, *options, ("groups", str(groups)), *progress, *tensors]


def reduced_parameters(optimizer: Any) -> list[torch.Tensor]:
    """Return the parameters that Horovod reduces, in the optimizer's order, equal on all ranks."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return [parameter for parameter in parameters if parameter in optimizer._requires_update]


def ordered_tensors(optimizer: Any) -> list[tuple[str, int]]:
    """Return (name, elements) of an optimizer's tensors in gradient order, equal on all ranks."""
    names = optimizer._parameter_names
    return [(names[p], p.numel()) for p in reversed(reduced_parameters(optimizer))]


def find_nodes(memory: OptimizerState, optimizers: Sequence[Any], process_set: Any) -> None:
    """Find the node layout for optimizers; blocks, and all ranks call it.

    Horovod's process sets could serve as groups, but are not used (docs/decisions/0098).
    """
    states = [memory_of(optimizer) for optimizer in optimizers]
    if not any(may_have_nodes(state.settings, process_set) for state in states):
        return
    layout = horovods_layout(partial(total, memory, process_set), process_set)
    for optimizer, state in zip(optimizers, states, strict=True):
        nodes = state.nodes
        if layout is None or not may_have_nodes(state.settings, process_set):
            nodes.place = None
        elif nodes.place is None or nodes.place.layout != layout:
            # If the layout is unchanged, owners must stay: they have the residuals.
            nodes.place = Place(layout, process_set.rank())
            nodes.place.owned_names(ordered_tensors(optimizer))


def _fingerprint_of(settings: Settings) -> list[tuple[str, str]]:
    return [*settings.fingerprint(), ("version of sn_compress", __version__)]


@dataclass
class CheckedHandle:
    """The handle of a step's first gradient, with the sum of digests that compares parameters.

    The sum travels along with the gradients: a rank that waits for it has begun all of them.
    """

    memory: OptimizerState
    optimizer: Any
    fingerprint: Fingerprint
    step: int
    handle: int
    inner: Any  # the gradient's own handle, or None

    @classmethod
    def begin(cls, memory: OptimizerState, optimizer: Any, inner: Any) -> CheckedHandle:
        """Start summing the digests of the parameters that the step begins with."""
        fingerprint = [
            (name, digest(parameter))
            for parameter, name in optimizer._parameter_names.items()
            if parameter in optimizer._requires_update
        ]
        # Named after a parameter, as several optimizers may compare in one step.
        name = memory.wire_name("sn.same." + fingerprint[0][0])
        fingerprint = [*memory.engine.counted(), *fingerprint]
        words = digest_words(fingerprint)
        memory.engine.traffic.overhead(words.nbytes)
        memory.sent.add(("shared", name))
        handle = hvd.allreduce_async(
            torch.from_numpy(words), name=name, op=hvd.Sum, process_set=optimizer.process_set
        )
        return cls(memory, optimizer, fingerprint, memory.engine.sameness.steps - 1, handle, inner)

    @torch.compiler.disable
    def finish(self, reduced: Any) -> Any:
        """Return the mean to Horovod; CompressError on every rank if parameters differ."""
        memory, sets = self.memory, self.optimizer.process_set
        what = f"the digest of the parameters at step {self.step}"
        digests = result_of(hvd, self.handle, limit_s=memory.settings.wait_s, what=what)
        if not all_equal(digests.numpy()):
            complete(memory, sets)  # another rank may need our words before it gets here
            raise memory.engine.sameness.error(
                self.step, self.fingerprint, total=partial(total, memory, sets), rank=sets.rank(),
                ranks=sets.size(),
            )  # fmt: skip
        memory.engine.sameness.passed(self.step)
        return reduced if self.inner is None else self.inner.finish(reduced)


def _idle_state(optimizer: Any) -> OptimizerState:
    memory = memory_of(optimizer)
    memory.side.join()  # residuals are computed on the side stream, and read on this one
    return memory


def _settled_state(optimizer: Any) -> OptimizerState:
    """Same as _idle_state, after discarding the residuals of dropped gradients."""
    memory = _idle_state(optimizer)
    memory.outcomes.look()
    memory.engine.transaction.settle()
    return memory


def residuals(optimizer: Any) -> dict[str, torch.Tensor]:
    """See Compression.residuals."""
    memory = _settled_state(optimizer)
    engine = memory.engine
    # With nodes, a residual is that of the node's mean: scale it to that of a rank's gradient.
    by_nodes = memory.nodes.saved(_place(optimizer)["ranks"])
    times = len(by_nodes["nodes"][0]) if by_nodes else 1
    return {
        name: torch.from_numpy(engine.residual(name) * times).view_as(parameter)
        for parameter, name in optimizer._parameter_names.items()
        if engine.remembers(name)
    }


def restart(optimizer: Any, residuals: Any) -> NoReturn:
    """Raise CompressError: in torch, wrap the optimizer again instead."""
    raise CompressError(
        f"got a {type(optimizer).__name__} and {len(residuals)} residuals; expected an optimizer "
        "of Keras. In torch, wrap the optimizer again, and start with the residuals as gradients."
    )


def state_dict(optimizer: Any) -> dict[str, Any]:
    """See Compression.state_dict; with torch tensors, for torch.load(weights_only=True)."""
    memory, place = _settled_state(optimizer), _place(optimizer)
    engine = memory.engine
    state = engine_state.state_dict(engine, **place, without_held=True)
    state["hierarchy"] = memory.nodes.saved(place["ranks"])
    return registry.map_tree(np.ndarray, torch.from_numpy, state)  # type: ignore[no-any-return]


def load_state_dict(optimizer: Any, state: dict[str, Any]) -> None:
    """Load what state_dict returned on any rank, or the list of all ranks' states."""
    check = partial(engine_state.check_names, list(optimizer._parameter_names.values()))
    nodes = _idle_state(optimizer).nodes
    nodes.load(loaded_arrays(state), **_place(optimizer), own=True, check=check)


def _place(optimizer: Any) -> dict[str, Any]:
    sets = optimizer.process_set
    here = sets.included()
    return {"ranks": sets.size() if here else 1, "rank": sets.rank() if here else 0}


def synchronize(optimizer: Any, root_rank: int) -> None:
    """See Compression.synchronize."""
    memory, sets = _settled_state(optimizer), optimizer.process_set
    memory.reset()
    everyone = sets.process_set_id == 0  # only the global process set may have nodes

    def total(name: str, words: Any) -> Any:
        wire = torch.from_numpy(words)
        return hvd.allreduce(wire, name=name, op=hvd.Sum, process_set=sets).numpy()

    engine_state.synchronize(
        memory.engine, total=total,
        broadcast=partial(hvd.broadcast_object, root_rank=root_rank, process_set=sets),
        gather=partial(hvd.allgather_object, name="sn.rest") if everyone else None,
    )  # fmt: skip
    memory.nodes.loaded = None


def follow_restarts(forget_calls: Callable[[], None]) -> None:
    """Make ranks agree again whenever Horovod restarts, as in an elastic run.

    The number of ranks does not show a restart: as many ranks may have joined as were lost.

    forget_calls : called as well, to clear the state of plain hvd.allreduce calls
    """
    # Horovod notifies only the states of elastic runs.
    for state in notification_manager._listeners:
        if state not in _followed:
            _followed.add(state)
            state.register_reset_callbacks([_restarted, forget_calls])


def _restarted() -> None:
    for optimizer in optimizers_with_memory():
        memory = memory_of(optimizer)
        _give_up(memory)
        memory.reset()
        if memory.is_kept:
            continue
        # New ranks lack the shared state, and the remaining ones may be at different steps.
        engine_state.start_empty(memory.engine)
        memory.nodes.loaded = []
        if hvd.rank() == 0:
            _log.warning(
                "ranks have come or gone, and the compression of a %s begins anew on all: what was "
                "not sent yet is lost. hvd.elastic.TorchState(..., memory=%s.elastic(optimizer)) "
                "keeps it",
                type(optimizer).__name__,
                memory.settings.compression,
            )


def _give_up(memory: OptimizerState) -> None:
    memory.give_up()
    memory.forget_sent()  # Horovod was restarted, or no step was aborted


class Elastic:
    """What Compression.elastic returns: hvd.elastic.TorchState handles it like a model."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        if Elastic not in (kind for kind, _ in get_handler_registry()):
            get_handler_registry().append((Elastic, _ElasticHandler))


class _ElasticHandler(StateHandler):
    def __init__(self, value: Elastic) -> None:
        super().__init__(value)
        memory_of(value.optimizer).is_kept = True
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(state_dict(self.value.optimizer))

    def restore(self) -> None:
        memory = memory_of(self.value.optimizer)
        _give_up(memory)
        memory.reset()
        load_state_dict(self.value.optimizer, copy.deepcopy(self._saved))

    def sync(self) -> None:
        _give_up(memory_of(self.value.optimizer))
        synchronize(self.value.optimizer, 0)
        self.save()
