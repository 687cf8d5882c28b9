"""Run and measure one training step, and restore everything it changed.

Comparing results (verify) and choosing by measurement (modules) need steps without side effects:
parameters, gradients, buffers, attributes and random states are restored.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from ..errors import SEEDS, SetsStateError, TraceError
from ..target.accelerator import in_use, now, working_device
from .modes import (
    Forwards,
    kernel_of_max_pool1d,
    outside_autocast,
    outside_saved_tensors_hooks,
    replaced_tensors,
)
from .results import ends_of, tensors_of
from .sharded import here, pieces, shards_put_back
from .signature import Arguments, tensors
from .snapshot import (
    SLOTS,
    StateSnapshot,
    Values,
    WrittenWeights,
    ended,
    kept_by,
    kept_by_code,
    kept_by_global_hooks,
    version_of,
)
from .tracker import AllocationTracker, Scratch, StorageTracker, is_profiled

_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
# The generators behind the functions of `random` and `numpy.random`, which models draw from.
OUTSIDE_TORCH: dict[str, Any] = {
    "random": random._inst,  # type: ignore[attr-defined]
    "numpy.random": np.random.mtrand._rand,  # type: ignore[attr-defined]
}


class Generators:
    """The states of the random number generators among some values, at creation of this object."""

    def __init__(self, values: Iterable[Any]) -> None:
        generators = {id(value): value for value in values if isinstance(value, _GENERATORS)}
        self._before = [(generator, _state(generator)) for generator in generators.values()]

    def changed(self) -> bool:
        """Whether one of them was drawn from."""
        pairs = ((_state(generator), state) for generator, state in self._before)
        return any(_comparable(now) != _comparable(then) for now, then in pairs)

    def seed(self, number: int) -> None:
        """Seed each generator."""
        for generator, _ in self._before:
            if isinstance(generator, torch.Generator):
                generator.manual_seed(number)
            elif isinstance(generator, np.random.Generator):
                # It cannot be seeded again, so it gets the state of a new one.
                generator.bit_generator.state = type(generator.bit_generator)(number).state
            else:
                generator.seed(number)

    def restore(self) -> None:
        for generator, state in self._before:
            if isinstance(generator, np.random.Generator):
                generator.bit_generator.state = state
            elif isinstance(generator, random.Random):
                generator.setstate(state)
            else:
                generator.set_state(state)


def seed(model: torch.nn.Module, number: int | None) -> None:
    """Seed all generators that a step may draw from; None leaves them as they are."""
    if number is None:
        return
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 - what models draw from
    Generators(kept for module in model.modules() for _, kept in kept_by(module)).seed(number)


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.get_state() if isinstance(generator, torch.Generator) else generator.getstate()


def outside_states() -> list[Any]:
    """Return the states of the generators outside torch in a comparable form."""
    return [_comparable(_state(generator)) for generator in OUTSIDE_TORCH.values()]


def _comparable(state: Any) -> Any:
    # Converting a NumPy state to text takes five milliseconds, and each module call compares it.
    if isinstance(state, dict):
        return {name: _comparable(value) for name, value in state.items()}
    if isinstance(state, torch.Tensor):
        state = state.numpy()
    return state.tobytes() if isinstance(state, np.ndarray) else state


class SideEffects:
    """Detects what a call changes that would make a second call behave differently.

    inputs : tensors that the call must not write to
    objects : objects that it must not change at any depth, including tensors in them
    """

    def __init__(self, inputs: Iterable[torch.Tensor], objects: Iterable[Any]) -> None:
        self._inputs, self._objects = [*inputs], StateSnapshot(("", value) for value in objects)
        self._versions = _versions(self._inputs)
        self._inner_versions = _versions(self._objects.tensors())
        self._drawn = outside_states()

    @property
    def has_objects(self) -> bool:
        """Whether there are objects that the call, or later code, could change."""
        return bool(self._objects)

    def objects_changed(self) -> bool:
        inside_changed = _versions(self._objects.tensors()) != self._inner_versions
        return bool(self._objects.changed()) or inside_changed

    def changed(self) -> bool:
        """Whether anything changed, including the random states outside torch."""
        written = _versions(self._inputs) != self._versions
        return written or self._drawn != outside_states() or self.objects_changed()


def _versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    return [version_of(tensor) for tensor in tensors]


@contextmanager
def forbid_external_rng() -> Iterator[None]:
    """Reject a traced forward that draws random numbers outside torch, or seeds torch's generator.

    A replay would repeat the numbers drawn, and would not seed.
    """
    before = {name: Generators([generator]) for name, generator in OUTSIDE_TORCH.items()}
    of_torch = Generators([torch.default_generator])
    try:
        yield
    finally:
        drawn = [name for name, generators in before.items() if generators.changed()]
        seeded = of_torch.changed()
        for generators in (*before.values(), of_torch):
            generators.restore()
    # Ops on fake tensors draw nothing, so only torch.manual_seed and the like change the state.
    if seeded:
        raise TraceError(SEEDS)
    if drawn:
        raise TraceError(
            f"the forward pass draws from {' and '.join(drawn)}, so what it does differs from step "
            "to step. Draw with torch and compute with the result."
        )


class ModelSnapshot:
    """All that a step may change in a model and its arguments, at creation of this object.

    others : tensors and generators that it may change besides those in module attributes
    spared : tensors that it changes only as training does
    """

    def __init__(
        self,
        model: torch.nn.Module,
        arguments: Any,
        others: Iterable[Any],
        spared: Iterable[torch.Tensor],
    ) -> None:
        self._modules = [
            (path, module, dict(module.__dict__), [dict(getattr(module, slot)) for slot in SLOTS])
            for path, module in model.named_modules()
        ]
        of_modules = (
            (f"{path}.{name}".lstrip("."), value)
            for path, module, _, _ in self._modules
            for name, value in kept_by(module)
            # The slots may contain fake tensors by the time they are compared.
            if name not in SLOTS and not name.startswith("_flat_weight")
        )
        self._kept = StateSnapshot(chain(of_modules, kept_by_global_hooks()))
        self.arguments = StateSnapshot([("arguments", arguments)])
        # Restored but not reported as changed: it may be a function's cache.
        self._outside = StateSnapshot(kept_by_code(model))
        leaves = (leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor))
        flags = (*model.parameters(), *model.buffers(), *leaves)
        self._wanted = [(flag, flag.requires_grad) for flag in flags]
        # Under the fake mode, ops on a real tensor still compute, and write to it.
        attributes = (hooks for _, _, own, _ in self._modules for hooks in own.values())
        held = [*others, *self._kept.values(), *attributes]
        self._values = Values(held, spared)
        self.generators = Generators(held)

    def changed(self) -> list[str]:
        """Return the names of attributes that were replaced or whose contents changed."""
        names = self._kept.changed()
        for path, module, attributes, slots in self._modules:
            now = module.__dict__
            other = [
                name
                for name in now.keys() | attributes.keys()
                if now.get(name) is not attributes.get(name)
            ]
            for slot, before in zip(SLOTS[:2], slots, strict=False):
                other += getattr(module, slot).keys() ^ before.keys()
            # `_flat_weights` is refreshed with the parameters (quirks/recurrent.py).
            own = (name for name in other if not name.startswith("_flat_weight"))
            names += [f"{path}.{name}".lstrip(".") for name in own]
        return list(dict.fromkeys(names))

    def end_graphs(self) -> bool:
        """Replace tensors that have a graph by leaves; return whether there were any.

        A step's backward pass then ends at them. Their graphs belong to the caller: running them
        backward would free what they saved, or add to gradients that are not restored.
        """
        ends = [snapshot.end_graphs() for snapshot in (self._kept, self.arguments, self._outside)]
        for _, module, _, _ in self._modules:
            for held in (module.__dict__, module._buffers):
                for name, value in [*held.items()]:
                    if (leaf := ended(value)) is not value:
                        held[name] = leaf
                        ends.append(True)
        return any(ends)

    def restore(self) -> None:
        """Restore everything."""
        for _, module, attributes, slots in self._modules:
            _refill(module.__dict__, attributes)
            for slot, before in zip(SLOTS, slots, strict=True):
                _refill(getattr(module, slot), before)
        for snapshot in (self._kept, self.arguments, self._outside):
            snapshot.restore()
        for tensor, wanted in self._wanted:
            if tensor.requires_grad != wanted:
                tensor.requires_grad_(wanted)
        self._values.restore()
        self.generators.restore()


def _refill(held: dict[str, Any], before: dict[str, Any]) -> None:
    """Restore the contents of a dict.

    An unchanged dict is not touched: refilled, a module's `__dict__` would take three times the
    memory, as it no longer shares its keys with those of the other instances of its class.
    """
    pairs = zip_longest(held.items(), before.items(), fillvalue=("", None))
    if any(now[0] != then[0] or now[1] is not then[1] for now, then in pairs):
        held.clear()
        held.update(before)


def changes_what_it_is_given() -> TraceError:
    """Return the error for a forward that writes into its arguments."""
    return TraceError(
        "the forward pass changes what it is given: it writes into a list, mapping or object among "
        "its arguments, such as the cache of keys and values of a text model; a replay of its "
        "calls would not. Train without it."
    )


@contextmanager
def restore_model(
    model: torch.nn.Module, arguments: Any = (), *, replayed: bool = True
) -> Iterator[None]:
    """Restore the model and the arguments of its forward after a trace.

    If its calls will be replayed, rejects a forward that changed attributes of its modules, or the
    contents of lists, mappings and objects in these, in its arguments, or within reach of module
    hooks. Such a forward has side effects on purpose (a count, a new buffer), and a replay of its
    calls would not have them.
    """
    spared = (*model.parameters(), *model.buffers())
    original = before = ModelSnapshot(model, arguments, (), spared)
    if original.end_graphs():
        before = ModelSnapshot(model, arguments, (), spared)
    try:
        with outside_saved_tensors_hooks():
            yield
    finally:
        # Compared before everything is restored; it is restored whatever the comparison finds.
        changed, received = before.changed(), bool(before.arguments.changed())
        drawn = before.generators.changed()
        original.restore()
        # The cache may hold casts of the fake weights.
        torch.clear_autocast_cache()
    if not replayed:
        return
    if received:
        raise changes_what_it_is_given()
    if drawn:
        raise TraceError(
            "the forward pass draws from a generator of the model's own, so what it does differs "
            "from step to step. Draw with torch's default generator and compute with the result."
        )
    if changed:
        raise SetsStateError(
            f"the forward pass sets {', '.join(changed[:5])}; a replay of its calls would not. "
            "Keep that in a buffer changed in place. If it does so in its first step only, run one "
            "step before planning."
        )


# The forward pass to run: a planned one, or the model itself.
Forward = Callable[..., Any]
Loss = Callable[[Any], torch.Tensor]


def gradient_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of the parameters' current gradients; for shards, of this rank's part."""
    # functional_call may swap in non-leaf parameters, and torch warns when their `grad` is read.
    held = (param.grad for param in model.parameters() if param.is_leaf and param.grad is not None)
    return sum(piece.nbytes for tensor in held for piece in pieces(tensor))


def wanted_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of gradients that parameters may have."""
    return sum(param.nbytes for param in model.parameters() if param.requires_grad)


@dataclass(frozen=True)
class Measured:
    """A step's results, peak, the op that reached it, and its seconds.

    left_bytes, output_bytes : bytes that its forward pass left live, and of these its outputs
    """

    results: dict[str, torch.Tensor | None]
    peak_bytes: int
    peak_op: str
    seconds: float
    left_bytes: int = 0
    output_bytes: int = 0

    def waiting_bytes(self, arguments: Any) -> tuple[int, int]:
        """Return the bytes held from forward to backward pass, and of these input and output."""
        input_bytes = _held_bytes(tensors(arguments))
        return self.left_bytes + input_bytes, self.output_bytes + input_bytes


def around(model: torch.nn.Module, forward: Callable[..., Any]) -> Forward:
    """Return a function that calls a model with another forward(model, args, kwargs).

    The model's hooks run around it as around its own: FSDP2 gathers parameters in one.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        with Forwards({model: lambda *args, **kwargs: forward(model, args, kwargs)}):
            return model(*args, **kwargs)

    return call


def _held_bytes(held: Sequence[torch.Tensor]) -> int:
    all_pieces = [piece for tensor in held for piece in pieces(tensor)]
    return sum({id(piece): piece.nbytes for piece in all_pieces}.values())


def device_of(model: torch.nn.Module) -> torch.device:
    """Return the device on which ops on the parameters run."""
    return working_device(next(iter(model.parameters())))


def run_step(
    forward: Forward,
    model: torch.nn.Module,
    arguments: Arguments,
    *,
    known: Sequence[torch.Tensor] = (),
    ignored: Sequence[torch.Tensor] = (),
    count: bool = True,
    loss: Loss | None = None,
    accumulate: bool = False,
    by_allocator: bool = False,
    heard: Callable[[int], None] | None = None,
    scratch: Scratch | None = None,
    kernels: bool = False,
) -> Measured:
    """Run forward and backward as users do; count live storages unless `count` is False.

    The forward pass runs under the caller's autocast, the backward pass always outside of it, as
    torch advises. A model that returns a `loss` is trained on it; otherwise the outputs' gradients
    are random but always the same (1 for a scalar).

    forward : called with the arguments
    model : its parameters and buffers are counted and returned
    known, ignored : tensors that are counted besides the model's, and tensors that are not counted
    loss : computes the loss from what the model returns, in the context of the forward pass.
    accumulate : parameters have gradients from the start: zeros.
    by_allocator : ask the device's allocator, which also sees the buffers of compiled code
    heard, scratch : as in StorageTracker
    kernels : also count kernels' scratch; on the CPU, by its allocator. Not while the caller
        profiles, as the allocator reports to one profiler only.
    """
    args, kwargs = arguments
    device = device_of(model)
    inputs = tensors(arguments)
    for leaf in (*model.parameters(), *inputs):
        # Dropped, not overwritten: others may hold the tensors.
        if leaf.is_leaf:
            leaf.grad = None
    if accumulate:
        for leaf in model.parameters():
            leaf.grad = torch.zeros_like(leaf) if leaf.requires_grad else None
        known = [*known, *(param.grad for param in model.parameters() if param.grad is not None)]
    resident = [*model.parameters(), *model.buffers(), *inputs, *known]
    tracker: StorageTracker | AllocationTracker
    if by_allocator or (kernels and not is_profiled()):
        tracker = AllocationTracker(resident, kernels=kernels, device=device)
    else:
        tracker = StorageTracker(
            resident,
            device=device,
            allocator="torch" if device.type == "cuda" else "none",
            ignored=ignored,
            heard=heard,
            scratch=scratch,
        )
    counting = tracker if count else nullcontext()
    began = now(device)
    with counting, kernel_of_max_pool1d():
        returned = forward(*args, **kwargs)
        outputs = tensors_of(returned, model)
        ends = [loss(returned)] if loss is not None else ends_of(returned, outputs)
    del returned
    # Held until the backward pass: tensors that autograd saved, and the outputs.
    left = tracker.live_bytes - tracker.start_bytes
    output_bytes = _held_bytes([leaf for leaf in outputs if isinstance(leaf, torch.Tensor)])
    output_gradients = _output_gradients(ends)
    # Allocated between the two contexts, so the tracker did not see them.
    for output_gradient in output_gradients:
        tracker.meet(output_gradient)
    with counting, outside_autocast():
        torch.autograd.backward(ends, output_gradients)
    seconds = now(device) - began
    results: dict[str, torch.Tensor | None] = {}
    for place, output in enumerate(outputs):
        if isinstance(output, torch.Tensor):
            results[f"output {place}"] = here(output)
    for name, param in model.named_parameters():
        results[f"gradient of {name}"] = None if param.grad is None else here(param.grad)
    for place, value in enumerate(inputs):
        if value.is_leaf:
            results[f"gradient of input {place}"] = value.grad
    # Copied, unlike gradients: `restore_step` puts values back into the same tensors.
    results |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
    return Measured(results, tracker.peak_bytes, tracker.peak_op, seconds, left, output_bytes)


@contextmanager
def restore_rng_state() -> Iterator[None]:
    """Restore the random number generators of torch, Python and NumPy."""
    outside = Generators(OUTSIDE_TORCH.values())
    try:
        with ExitStack() as stack:
            # Devices are passed, as fork_rng by default initializes CUDA on all GPUs.
            stack.enter_context(torch.random.fork_rng(devices=[]))
            for kind in in_use():
                devices = range(getattr(torch, kind).device_count())
                stack.enter_context(torch.random.fork_rng(devices, device_type=kind))
            yield
    finally:
        outside.restore()


@contextmanager
def restore_step(
    model: torch.nn.Module,
    inputs: Any,
    *,
    inputs_too: bool = True,
    written: Sequence[torch.Tensor] | None = None,
) -> Iterator[WrittenWeights]:
    """Restore parameters, gradients, buffers, attributes and random states after a real step.

    Also restores tensors in module attributes, and the contents of lists, mappings and objects
    that a forward pass or a hook may write to. Yields the watch for writes to parameters, e.g. by
    the forward of a momentum encoder. Inside, the model has other parameters that share memory with
    its own, so that hooks on the user's (e.g. an optimizer step) do not run, and tensors that the
    caller computed and that modules or objects hold are leaves.

    inputs_too : also restore the values of inputs, which a forward may scale in place
    written : the parameters that an earlier such step wrote to; nothing is watched then, so that
        the watch does not add to the seconds.
    """
    weights, input_tensors = list(model.parameters()), tensors(inputs)
    gradients = [(weight, weight.grad) for weight in (*weights, *input_tensors) if weight.is_leaf]
    spared = [
        *weights,
        *(tensor for tensor in input_tensors if tensor.requires_grad or not inputs_too),
    ]
    # Includes tensors in argument objects, which torch's pytree does not look into.
    inside = StateSnapshot([("arguments", inputs)]).values()
    before = ModelSnapshot(model, inputs, (*model.buffers(), *input_tensors, *inside), spared)
    overwritten = Values(written or (), ())
    watched = WrittenWeights((weight, part) for weight in weights for part in pieces(weight))

    def without_hooks(weight: torch.Tensor) -> torch.Tensor:
        if id(weight) in shards:
            return weight
        param = torch.nn.Parameter(weight.detach(), requires_grad=weight.requires_grad)
        param.__dict__.update(weight.__dict__)
        return param

    with (
        restore_rng_state(),
        shards_put_back(model) as shards,
        replaced_tensors(model, without_hooks),
    ):
        watching = watched if written is None else nullcontext()
        try:
            with outside_saved_tensors_hooks(), watching:
                before.end_graphs()
                yield watched
        finally:
            before.restore()
            for leaf, gradient in gradients:
                leaf.grad = gradient
            overwritten.restore()


def measured_step(
    forward: Forward,
    model: torch.nn.Module,
    arguments: Arguments,
    *,
    written: Sequence[torch.Tensor] | None = None,
    **settings: Any,
) -> Measured:
    """Run a step by `run_step`, with the same settings, and restore the model.

    Like buffers, parameters that it writes to, e.g. those of a momentum encoder, are results.

    written : as in `restore_step`
    """
    named = list(model.named_parameters())
    with restore_step(model, arguments, written=written) as watched:
        measured = run_step(forward, model, arguments, **settings)
        ours = {id(param) for param in (watched.weights() if written is None else written)}
        measured.results.update(
            (f"parameter {name}", here(param).detach().clone())
            for name, param in named
            if id(param) in ours
        )
        return measured


def _output_gradients(ends: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return gradients for outputs, the same in each call."""
    # Not `ones_like`: a trace without values knows that they are ones, and would use that.
    gradients = [torch.empty_like(end) for end in ends]
    for place, gradient in enumerate(gradients):
        if gradient.dim():
            gradient.normal_(generator=torch.Generator(gradient.device).manual_seed(place))
        else:
            gradient.fill_(1.0)
    return gradients
