"""One training step, run and measured; and everything it changes put back afterwards.

Whoever compares (verify) or chooses by measurement (modules) runs steps that must leave no mark:
parameters, gradients, buffers, attributes and random states are as before.
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
    """The states of random number generators among some values, when this is made."""

    def __init__(self, values: Iterable[Any]) -> None:
        generators = {id(value): value for value in values if isinstance(value, _GENERATORS)}
        self._before = [(generator, _state(generator)) for generator in generators.values()]

    def changed(self) -> bool:
        """Whether one of them was drawn from."""
        return any(
            _comparable(_state(generator)) != _comparable(state)
            for generator, state in self._before
        )

    def seed(self, number: int) -> None:
        """Let each draw as one that was made with this seed."""
        for generator, _ in self._before:
            if isinstance(generator, torch.Generator):
                generator.manual_seed(number)
            elif isinstance(generator, np.random.Generator):
                # It has no method for that, so it gets the state of a new one.
                generator.bit_generator.state = type(generator.bit_generator)(number).state
            else:
                generator.seed(number)

    def restore(self) -> None:
        """Put their states back."""
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
    """Return the states of the generators outside torch, as something that can be compared."""
    return [_comparable(_state(generator)) for generator in OUTSIDE_TORCH.values()]


def _comparable(state: Any) -> Any:
    # As text a state of NumPy's takes five milliseconds, and each module that is called asks.
    if isinstance(state, dict):
        return {name: _comparable(value) for name, value in state.items()}
    if isinstance(state, torch.Tensor):
        state = state.numpy()
    return state.tobytes() if isinstance(state, np.ndarray) else state


class SideEffects:
    """What a call has changed since this was created, so that a second one would do otherwise.

    inputs : tensors that it is not to write to
    objects : what it is not to change at any depth, nor tensors in them
    """

    def __init__(self, inputs: Iterable[torch.Tensor], objects: Iterable[Any]) -> None:
        self._objects = StateSnapshot(("", value) for value in objects)
        self._versions = _versions(inputs)
        self._inner_versions = _versions(self._objects.tensors())
        self._drawn = outside_states()

    @property
    def has_objects(self) -> bool:
        """Whether there are any that it, or what comes later, could change."""
        return bool(self._objects)

    def objects_changed(self) -> bool:
        """Whether objects are not as they were."""
        return bool(self._objects.changed()) or _are_written(self._inner_versions)

    def changed(self) -> bool:
        """Whether anything is not as it was, random numbers outside torch included."""
        return (
            _are_written(self._versions)
            or self._drawn != outside_states()
            or self.objects_changed()
        )


def _versions(tensors: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
    return [(tensor, version_of(tensor)) for tensor in tensors]


def _are_written(versions: list[tuple[torch.Tensor, int]]) -> bool:
    return any(version_of(tensor) != version for tensor, version in versions)


@contextmanager
def forbid_external_rng() -> Iterator[None]:
    """Refuse a traced forward that draws random numbers outside torch, or seeds torch's generator.

    A replay would repeat what was drawn, and would not seed.
    """
    before = {name: Generators([generator]) for name, generator in OUTSIDE_TORCH.items()}
    of_torch = Generators([torch.default_generator])
    drawn, seeded = [], False
    try:
        yield
    finally:
        drawn = [name for name, generators in before.items() if generators.changed()]
        seeded = of_torch.changed()
        for generators in (*before.values(), of_torch):
            generators.restore()
    # Fake tensors draw nothing, so only torch.manual_seed and the like change it.
    if seeded:
        raise TraceError(SEEDS)
    if drawn:
        raise TraceError(
            f"the forward pass draws from {' and '.join(drawn)}, so what it does differs from step "
            "to step. Draw with torch and compute with the result."
        )


class ModelSnapshot:
    """All that a step may change of a model and of its arguments, as of when this is created.

    model, arguments : what the step runs on
    others : tensors and generators that it may change beside those that modules hold as attributes
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
            # The slots may be full of fake tensors by the time they are looked at.
            if name not in SLOTS and not name.startswith("_flat_weight")
        )
        self._kept = StateSnapshot(chain(of_modules, kept_by_global_hooks()))
        self.arguments = StateSnapshot([("arguments", arguments)])
        # Restored, and not reported as changed: it may be the cache of a function.
        self._outside = StateSnapshot(kept_by_code(model))
        leaves = (leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor))
        flags = (*model.parameters(), *model.buffers(), *leaves)
        self._wanted = [(flag, flag.requires_grad) for flag in flags]
        # Under fake tensors a real one that is met is computed with, and written to.
        attributes = (hooks for _, _, own, _ in self._modules for hooks in own.values())
        held = [*others, *self._kept.values(), *attributes]
        self._values = Values(held, spared)
        self.generators = Generators(held)

    def changed(self) -> list[str]:
        """Return the names of attributes that were replaced, or hold something else now."""
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
            names += [
                f"{path}.{name}".lstrip(".")
                for name in other
                # Lists of weights that are refreshed with the parameters (quirks/recurrent.py).
                if not name.startswith("_flat_weight")
            ]
        return list(dict.fromkeys(names))

    def end_graphs(self) -> bool:
        """Put leaves in the places of tensors that were computed; say whether there were any.

        A step then goes back no further. What made them is the caller's: run backward from here, it
        would lose what it saved, or add to gradients that nobody puts back.
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
        """Put everything back as it was."""
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
    """Let a dict hold what it held before.

    One that still does is left alone: refilled, a module's `__dict__` would take three times the
    memory, as it no longer shares its keys with those of the other instances of its class.
    """
    pairs = zip_longest(held.items(), before.items(), fillvalue=("", None))
    if any(now[0] != then[0] or now[1] is not then[1] for now, then in pairs):
        held.clear()
        held.update(before)


def changes_what_it_is_given() -> TraceError:
    """Return the refusal of a forward that writes into its arguments."""
    return TraceError(
        "the forward pass changes what it is given: it writes into a list, mapping or object among "
        "its arguments, such as the cache of keys and values of a text model; a replay of its "
        "calls would not. Train without it."
    )


@contextmanager
def restore_model(
    model: torch.nn.Module, arguments: Any = (), *, replayed: bool = True
) -> Iterator[None]:
    """Put the model, and what its forward is given, back as they were after it was traced.

    Where its calls are to be replayed, refuses a forward that changed attributes of its modules, or
    what lists, mappings and objects hold: in these, in its arguments, in what hooks of the modules
    reach. Such a forward has side effects on purpose (a count, a new buffer), and a replay of its
    calls would not have them.
    """
    spared = (*model.parameters(), *model.buffers())
    original = before = ModelSnapshot(model, arguments, (), spared)
    if original.end_graphs():
        before = ModelSnapshot(model, arguments, (), spared)
    changed: list[str] = []
    received = drawn = False
    try:
        with outside_saved_tensors_hooks():
            yield
    finally:
        # Read before it is put back, and all is put back whatever is found.
        changed, received = before.changed(), bool(before.arguments.changed())
        drawn = before.generators.changed()
        original.restore()
        # It may hold casts of tensors that stood in for the weights.
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


# What stands for the forward pass of a model: a planned one, or the model itself.
Forward = Callable[..., Any]
Loss = Callable[[Any], torch.Tensor]


def gradient_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of gradients that parameters have now; of sharded ones, those held here."""
    # functional_call may swap in parameters that are no leaves; asked for `grad`, torch warns.
    held = (param.grad for param in model.parameters() if param.is_leaf and param.grad is not None)
    return sum(piece.nbytes for tensor in held for piece in pieces(tensor))


def wanted_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of gradients that parameters may have."""
    return sum(param.nbytes for param in model.parameters() if param.requires_grad)


@dataclass(frozen=True)
class Measured:
    """A step's results, peak, the op that reached it, seconds; what its forward pass left live.

    output_bytes : of that, what it returned
    """

    results: dict[str, torch.Tensor | None]
    peak_bytes: int
    peak_op: str
    seconds: float
    left_bytes: int = 0
    output_bytes: int = 0

    def waiting_bytes(self, arguments: Any) -> tuple[int, int]:
        """What a pass holds until its backward pass; of that, input and output."""
        input_bytes = _held_bytes(tensors(arguments))
        return self.left_bytes + input_bytes, self.output_bytes + input_bytes


def around(model: torch.nn.Module, forward: Callable[..., Any]) -> Forward:
    """Return a function that calls a model with another forward, of model, args and kwargs.

    Hooks of the model run around it as around its own: FSDP2 gathers parameters in one.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        with Forwards({model: lambda *args, **kwargs: forward(model, args, kwargs)}):
            return model(*args, **kwargs)

    return call


def _held_bytes(held: Sequence[torch.Tensor]) -> int:
    all_pieces = [piece for tensor in held for piece in pieces(tensor)]
    return sum({id(piece): piece.nbytes for piece in all_pieces}.values())


def device_of(model: torch.nn.Module) -> torch.device:
    """Return where ops on the parameters run."""
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
    """Run forward and backward as users do; count live storages unless told not to.

    The forward pass runs under autocast where the caller does, the backward pass always outside of
    it, as torch advises. A model that returns its loss by that name is trained on it; in place of
    the loss of any other the outputs' gradients are random (1 for a scalar), always the same.

    forward : called with the arguments
    model : whose parameters and buffers are counted and returned
    known, ignored : tensors that are counted besides the model's, and those that are not counted
    loss : computes the loss from what the model returns; it runs where the forward pass does.
    accumulate : parameters have gradients from the start: zeros.
    by_allocator : ask the device's allocator, which sees the buffers of compiled code as well
    heard, scratch : as in StorageTracker
    kernels : count what kernels take for themselves as well; on the CPU, by its allocator. Not
        while the caller profiles: the allocator tells one profiler only.
    """
    args, kwargs = arguments
    device = device_of(model)
    inputs = tensors(arguments)
    for leaf in (*model.parameters(), *inputs):
        # Dropped, not filled: others may hold the tensors.
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
    # What waits for the backward pass: what autograd saved, and the outputs.
    left = tracker.live_bytes - tracker.start_bytes
    output_bytes = _held_bytes([leaf for leaf in outputs if isinstance(leaf, torch.Tensor)])
    output_gradients = _output_gradients(ends)
    # They are allocated between the two contexts, where no tracker sees it.
    for output_gradient in output_gradients:
        tracker.meet(output_gradient)
    with counting, outside_autocast():
        torch.autograd.backward(ends, output_gradients)
    seconds = now(device) - began
    results: dict[str, torch.Tensor | None] = {
        f"output {place}": here(output)
        for place, output in enumerate(outputs)
        if isinstance(output, torch.Tensor)
    }
    results |= {
        f"gradient of {name}": None if param.grad is None else here(param.grad)
        for name, param in model.named_parameters()
    }
    results |= {
        f"gradient of input {place}": value.grad
        for place, value in enumerate(inputs)
        if value.is_leaf
    }
    # Copied, unlike gradients: `restore_step` puts values back into the same tensors.
    results |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
    return Measured(results, tracker.peak_bytes, tracker.peak_op, seconds, left, output_bytes)


@contextmanager
def restore_rng_state() -> Iterator[None]:
    """Put the random number generators of torch, Python and NumPy back as they were."""
    outside = Generators(OUTSIDE_TORCH.values())
    try:
        with ExitStack() as stack:
            # With devices named: by default fork_rng takes all GPUs, and starts CUDA on them.
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
    """Put parameters, gradients, buffers, attributes and random states back after a real step.

    So are the tensors that modules have as attributes, and what lists, mappings and objects hold
    that a forward pass or a hook may write to. Yields the watch for writes into parameters, as a
    momentum encoder's forward does them. Inside, the model has other parameters that share the
    memory of its own, so that hooks on the user's, an optimizer's step among them, do not run, and
    tensors that the caller computed, and that modules or objects hold, are leaves.

    model, inputs : what a step runs on
    inputs_too : copy values of inputs, which a forward may scale in place, and put them back
    written : the parameters that an earlier such step was seen to write to: nothing is watched
        then, so that seconds are the step's own.
    """
    weights, input_tensors = list(model.parameters()), tensors(inputs)
    gradients = [(weight, weight.grad) for weight in (*weights, *input_tensors) if weight.is_leaf]
    spared = [
        *weights,
        *(tensor for tensor in input_tensors if tensor.requires_grad or not inputs_too),
    ]
    # With tensors in objects among the arguments, which torch's pytree does not look into.
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
    """Run a step as `run_step` does, with the same settings, and leave the model as it was.

    Parameters that it writes to, as a momentum encoder does, are results as buffers are.

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
    """Return gradients for outputs, always the same."""
    # Not `ones_like`: ones are values that a trace without values knows, and goes on with.
    gradients = [torch.empty_like(end) for end in ends]
    for place, gradient in enumerate(gradients):
        if gradient.dim():
            gradient.normal_(generator=torch.Generator(gradient.device).manual_seed(place))
        else:
            gradient.fill_(1.0)
    return gradients
