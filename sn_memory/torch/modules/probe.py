"""Probe of a model's modules in one forward pass: seconds, saved bytes, side effects.

The sample runs once with gradients enabled, but tensors that autograd would save are only counted
and dropped, so the pass needs little memory. A module that sets attributes or appends to a list it
has, draws from Python's or NumPy's random numbers, changes its input in place, or is passed an
object (a cache) that changes then or later, would not do the same when run again; it is marked. So
is a module whose results stay referenced outside of the model: in a list or a global.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from typing import Any

import torch
from torch._C._functorch import is_batchedtensor as is_batched
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from ..model.guards import joined, recorded_reads
from ..model.sharded import is_elsewhere, is_sharded, most, pieces
from ..model.signature import objects, tensors
from ..model.snapshot import StateSnapshot, kept_by, version_of
from ..model.step import Generators, SideEffects, device_of, outside_states, restore_step
from ..target.accelerator import rng_state


@dataclass
class Behaviour:
    """Behaviour of a module over all its calls in one forward pass.

    seconds : of its forward passes
    saved_bytes : of tensors it saves, without parameters, buffers and its inputs
    given_bytes : of its inputs, without parameters and buffers: what is saved instead if it runs
        again
    saved_input_bytes : of those of its inputs that it saves
    unrepeatable : whether a second run would differ
    saves_early : whether an op inside saves a tensor before it writes to it, so a second run must
        not stop when the last tensor is saved
    """

    seconds: float = 0.0
    saved_bytes: int = 0
    given_bytes: int = 0
    saved_input_bytes: int = 0
    unrepeatable: bool = False
    saves_early: bool = False


@dataclass
class _Running:
    module: torch.nn.Module
    began: float
    effects: SideEffects
    inputs: dict[int, torch.Tensor]  # by their memories
    counted: dict[int, Any] = field(default_factory=dict)


class Probe:
    """One observed forward pass of a model on a sample. The model is left unchanged.

    behaviour : per module that was called
    changed : buffers whose values the pass changed, as (module, name)
    changes_inputs : whether the pass wrote into the model's inputs
    written : parameters that the pass wrote to
    sets, reads : attributes that the pass sets or changes, by the index of their module and their
        name; per module, those it read.
    by_chance : whether random numbers may decide which ops run: some were drawn, and values were
        read.

    model, arguments : the plain model and a sample
    begin : called before the pass, e.g. to seed generators, which are restored afterwards
    """

    def __init__(
        self,
        model: torch.nn.Module,
        arguments: tuple[Any, dict[str, Any]],
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        self.model = model
        self.by_chance = False
        self.behaviour: dict[torch.nn.Module, Behaviour] = {}
        self.changed: list[tuple[torch.nn.Module, str]] = []
        self._running: list[_Running] = []
        # Calls with objects among the arguments, which are compared once more after the pass.
        self._received: list[tuple[torch.nn.Module, SideEffects]] = []
        self._resident = {*_by_memory((*model.parameters(), *model.buffers()))}
        args, kwargs = arguments
        entered = [(tensor, version_of(tensor)) for tensor in tensors(arguments)]
        # Storages that exist before the pass; those created in it, with the modules that ran then.
        self._present = {*self._resident, *_by_memory(whole for whole, _ in entered)}
        self._created: dict[int, tuple[StorageWeakRef, list[torch.nn.Module]]] = {}
        with restore_step(model, arguments) as written:
            written.heard = self._wrote
            buffers = [
                (module, name, buffer, buffer.clone())
                for module in model.modules()
                for name, buffer in module._buffers.items()
                if buffer is not None
            ]
            attributes = [
                (module, dict(module.__dict__), StateSnapshot(_kept_by(module)))
                for module in model.modules()
            ]
            begin()
            with recorded_reads(model) as reads:
                self._run(lambda: model(*args, **kwargs))
                # FSDP2 itself leaves gathered parameters behind.
                if not is_sharded(model) and self._left():
                    # What only the first pass leaves behind is a cache.
                    self._run(lambda: model(*args, **kwargs))
                    for module in self._left():
                        self._mark(module)
            # What the pass has changed: inputs, buffers, attributes, objects among the arguments.
            self.reads = reads()
            self.changes_inputs = any(version_of(tensor) != version for tensor, version in entered)
            for module, name, buffer, before in buffers:
                if module._buffers[name] is not buffer or not torch.equal(buffer, before):
                    self.changed.append((module, name))
            self.sets: set[tuple[int, str]] = set()
            for place, (module, before, snapshot) in enumerate(attributes):
                now = module.__dict__
                names = {
                    name
                    for name in before.keys() | now.keys()
                    if name not in before or name not in now or now[name] is not before[name]
                }
                names.update(snapshot.changed())
                if names:
                    self._mark(module)
                # Other names refer to objects held by hooks, which are not attributes.
                self.sets |= {(place, name) for name in names & (before.keys() | now.keys())}
            for module, effects in self._received:
                if effects.objects_changed():
                    self._mark(module)
            self._received.clear()
        self.written = written.weights()

    def _wrote(self) -> None:
        """Mark the running modules: one that writes to a parameter would do so twice."""
        for run in self._running:
            self._mark(run.module)

    def _run(self, forward: Callable[[], Any]) -> None:
        """Run the pass and drop saved tensors; keep them if the model differentiates inside."""
        for keep in (False, True):
            self.behaviour.clear()
            self._running.clear()
            self._received.clear()
            self._created.clear()

            def saved(tensor: torch.Tensor, keep: bool = keep) -> torch.Tensor | None:
                self._saved(tensor)
                return tensor if keep else None

            held = (value for module in self.model.modules() for _, value in kept_by(module))
            generators = Generators(held)
            drawn, python = self._drawn(), outside_states()
            value_reads = _ValueReads(self._mark_early, self._note_created)
            try:
                hooks = saved_tensors_hooks(saved, _needed)
                with torch.enable_grad(), self._watched(), hooks, value_reads:
                    forward()
            except _Differentiates:
                continue
            # Whether random values drawn in Python decide what runs cannot be seen from ops.
            in_python = generators.changed() or python != outside_states()
            by_ops = not all(map(torch.equal, drawn, self._drawn()))
            self.by_chance = in_python or (by_ops and value_reads.looked)
            return

    @property
    def saved_bytes(self) -> int:
        """Bytes that the whole model saves for the backward pass, inputs included."""
        total = self.behaviour.get(self.model, Behaviour())
        return total.saved_bytes + total.saved_input_bytes

    def _drawn(self) -> list[torch.Tensor]:
        """Return the states of torch's random number generators, of the host and the device."""
        return [torch.get_rng_state(), rng_state(device_of(self.model)).clone()]

    def join(self, other: Probe) -> None:
        """Merge another pass: per module, take the larger values of both."""
        for module, does in other.behaviour.items():
            mine = astuple(self.behaviour.get(module, Behaviour()))
            self.behaviour[module] = Behaviour(*map(max, mine, astuple(does)))
        self.changed += [item for item in other.changed if item not in self.changed]
        self.changes_inputs |= other.changes_inputs
        known = {id(item) for item in self.written}
        self.written = [*self.written, *(item for item in other.written if id(item) not in known)]
        self.sets |= other.sets
        self.reads = joined(self.reads, other.reads)

    def agree(self) -> None:
        """Take the largest values over all ranks that share the model's parameters, per module."""
        modules = list(self.model.modules())
        rows = [astuple(self.behaviour.get(module, Behaviour())) for module in modules]
        agreed = iter(most(self.model, [float(number) for row in rows for number in row]))
        for module, row in zip(modules, rows, strict=True):
            does = Behaviour(*(type(number)(next(agreed)) for number in row))
            if module in self.behaviour or does.unrepeatable:
                self.behaviour[module] = does

    def _mark(self, module: torch.nn.Module) -> None:
        self.behaviour.setdefault(module, Behaviour()).unrepeatable = True

    def _mark_early(self) -> None:
        for run in self._running:
            self.behaviour.setdefault(run.module, Behaviour()).saves_early = True

    def _note_created(self, result: Any) -> None:
        for tensor in tensors(result):
            for piece in () if is_batched(tensor) else pieces(tensor):
                memory = piece.untyped_storage()
                known = self._created.get(memory._cdata)
                if memory._cdata not in self._present and (known is None or known[0].expired()):
                    running = [run.module for run in self._running]
                    self._created[memory._cdata] = StorageWeakRef(memory), running

    def _left(self) -> set[torch.nn.Module]:
        """Return the modules whose results are referenced outside of the model after the pass."""
        if any(not memory.expired() for memory, _ in self._created.values()):
            torch.clear_autocast_cache()
            gc.collect()  # hooks on nodes of autograd make cycles
        buffers = {buffer.untyped_storage()._cdata for buffer in self.model.buffers()}
        created = [entry for key, entry in self._created.items() if key not in buffers]
        return {module for memory, running in created if not memory.expired() for module in running}

    @contextmanager
    def _watched(self) -> Iterator[None]:
        modules = list(self.model.modules())

        def enter(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            arguments = (args, kwargs)
            plain = [tensor for tensor in tensors(arguments) if not is_batched(tensor)]
            if len(plain) < len(tensors(arguments)):
                self._mark(module)
            # Parameters that it writes to, like a momentum encoder, would be updated twice.
            effects = SideEffects([*plain, *module.parameters()], objects(args, kwargs))
            began = time.perf_counter()
            self._running.append(_Running(module, began, effects, _by_memory(plain)))

        def leave(module: torch.nn.Module, args: Any, kwargs: dict[str, Any], result: Any) -> None:
            run = self._running.pop()
            behaviour = self.behaviour.setdefault(module, Behaviour())
            behaviour.seconds += time.perf_counter() - run.began
            behaviour.given_bytes += sum(
                piece.untyped_storage().nbytes()
                for key, piece in run.inputs.items()
                if key not in self._resident
            )
            if run.effects.changed():
                behaviour.unrepeatable = True
            elif run.effects.has_objects:
                self._received.append((module, run.effects))

        hooks = []
        for module in modules:
            # Around the module's own hooks, which are part of what it does.
            hooks.append(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
            hooks.append(module.register_forward_hook(leave, with_kwargs=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _saved(self, tensor: torch.Tensor) -> None:
        if isinstance(tensor if tensor._base is None else tensor._base, torch.nn.Parameter):
            # One gathered by FSDP2 is not among the model's own parameters, and FSDP2 frees it.
            return
        if is_batched(tensor):
            return
        for piece in pieces(tensor):
            self._count(piece.untyped_storage())

    def _count(self, memory: Any) -> None:
        key, size = memory._cdata, memory.nbytes()
        for run in self._running:
            known = run.counted.get(key)
            # An address counts again once its storage has been freed.
            if key in self._resident or (known and known() is not None):
                continue
            run.counted[key] = weakref.ref(memory)
            behaviour = self.behaviour.setdefault(run.module, Behaviour())
            if key in run.inputs:
                behaviour.saved_input_bytes += size
            else:
                behaviour.saved_bytes += size


def _by_memory(wholes: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
    parts = (piece for whole in wholes for piece in pieces(whole))
    return {piece.untyped_storage()._cdata: piece for piece in parts}


def _kept_by(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    # FSDP2 replaces shards by gathered parameters, and leaves those of a root gathered.
    params = module._parameters.values()
    sharded = any(param is not None and is_elsewhere(param) for param in params)
    yield from (entry for entry in kept_by(module) if not (sharded and entry[0] == "_parameters"))


_RRELU = (torch.ops.aten.rrelu_with_noise, torch.ops.aten.rrelu_with_noise_)


class _ValueReads(TorchDispatchMode):
    """Detects reads of tensor values, on which the executed ops may depend.

    early : called if an op saves a tensor before it writes to it; one of torch's ops does: RReLU's
        kernel fills the noise that was saved before it ran
    created : called with the result of each op
    """

    looked = False

    def __init__(self, early: Callable[[], None], created: Callable[[Any], None]) -> None:
        super().__init__()
        self._early, self._created = early, created

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tell torch.compile that compiled code runs under this mode like any other."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # Ops that return a number that depends on values, or a tensor whose size depends on them.
        tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
        if func is torch.ops.aten.index.Tensor:
            # It has the tag, though the size depends on values only with a mask.
            self.looked |= any(arg is not None and arg.dtype == torch.bool for arg in args[1])
        else:
            self.looked |= not tags.isdisjoint(func.tags)
        if func.overloadpacket in _RRELU:
            self._early()
        if any(map(is_traceable_wrapper_subclass_type, types)):
            # A DTensor runs the op on its local tensor, and that call is dispatched here as well.
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        self._created(result)
        return result


class _Differentiates(Exception):  # noqa: N818 - says that the pass has a backward pass inside
    """Saved tensors are needed within the forward pass itself."""


def _needed(saved: torch.Tensor | None) -> torch.Tensor:
    if saved is None:
        raise _Differentiates
    return saved
