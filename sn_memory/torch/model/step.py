"""One training step, run and measured; and everything it changes put back afterwards.

Whoever compares (verify) or chooses by measurement (modules) runs steps that must leave no mark:
parameters, gradients, buffers, attributes and random states are as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from ..quirks.recurrent import refresh_flat_weights
from ..target.accelerator import in_use, now
from ..target.host_resident import working_device
from .allocations import AllocationTracker, is_profiled
from .modes import kernel_of_max_pool1d, outside_autocast, outside_saved_tensors_hooks
from .restore import OUTSIDE_TORCH, Generators, ModelSnapshot
from .results import ends_of, tensors_of
from .sharded import here, pieces, shards_put_back
from .snapshot import StateSnapshot, Values, WrittenWeights
from .tracker import Scratch, StorageTracker

# What stands for the forward pass of a model: a planned one, or the model itself.
Forward = Callable[..., Any]
Loss = Callable[[Any], torch.Tensor]


def gradient_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of gradients that parameters have now; of sharded ones, those held here."""
    held = (it.grad for it in model.parameters() if it.is_leaf and it.grad is not None)
    return sum(piece.nbytes for it in held for piece in pieces(it))


def wanted_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of gradients that parameters may have."""
    return sum(it.nbytes for it in model.parameters() if it.requires_grad)


@dataclass(frozen=True)
class Measured:
    """A step's results, peak, the op that reached it, seconds; what its forward pass left live."""

    results: dict[str, torch.Tensor | None]
    peak_bytes: int
    peak_op: str
    seconds: float
    left_bytes: int = 0


def apart(arguments: Any) -> Any:
    """Return arguments whose tensors are leaves: a step run on them goes back no further."""

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.is_leaf else tensor.detach().requires_grad_(tensor.requires_grad)

    return tree_map_only(torch.Tensor, leaf, arguments)


def around(model: torch.nn.Module, forward: Callable[..., Any]) -> Forward:
    """Return what calls a model with another forward, which takes model, args and kwargs.

    Hooks of the model run around it as around its own: FSDP2 gathers parameters in one.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        before = model.__dict__.get("forward")
        model.__dict__["forward"] = lambda *args, **kwargs: forward(model, args, kwargs)
        try:
            return model(*args, **kwargs)
        finally:
            model.__dict__.pop("forward")
            if before is not None:
                model.__dict__["forward"] = before

    return call


def tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in nested lists, tuples and mappings."""
    return [it for it in tree_leaves(tree) if isinstance(it, torch.Tensor)]


def device_of(model: torch.nn.Module) -> torch.device:
    """Return where ops on the parameters run."""
    return working_device(next(iter(model.parameters())))


def run_step(
    forward: Forward,
    model: torch.nn.Module,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
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

    Parameters
    ----------
    forward
        Called with the arguments.
    model
        Whose parameters and buffers are looked at.
    arguments
        Positional and by keyword.
    known, ignored
        Tensors that are there beside the model's, and those that are not counted.
    loss
        Makes the loss of what the model returns; it runs where the forward pass does.
    accumulate
        Gradients of parameters are there from the start: zeros.
    by_allocator
        Ask the device's allocator, which sees the buffers of compiled code as well.
    heard, scratch
        As in StorageTracker.
    kernels
        Count what kernels take for themselves as well; on the CPU, by its allocator. Not while the
        caller profiles: the allocator tells one profiler only.
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
        known = [*known, *(it.grad for it in model.parameters() if it.grad is not None)]
    there = [*model.parameters(), *model.buffers(), *inputs, *known]
    tracker: StorageTracker | AllocationTracker
    if by_allocator or (kernels and not is_profiled()):
        tracker = AllocationTracker(there, kernels=kernels, device=device)
    else:
        tracker = StorageTracker(
            there,
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
    left = tracker.live_bytes - tracker.start_bytes
    output_gradients = _output_gradients(ends)
    for output_gradient in output_gradients:
        tracker.meet(output_gradient)
    with counting, outside_autocast():
        torch.autograd.backward(ends, output_gradients)
    seconds = now(device) - began
    results: dict[str, torch.Tensor | None] = {
        f"output {place}": here(it)
        for place, it in enumerate(outputs)
        if isinstance(it, torch.Tensor)
    }
    results |= {
        f"gradient of {name}": None if it.grad is None else here(it.grad)
        for name, it in model.named_parameters()
    }
    results |= {
        f"gradient of input {place}": it.grad for place, it in enumerate(inputs) if it.is_leaf
    }
    results |= {f"buffer {name}": it.clone() for name, it in model.named_buffers()}
    return Measured(results, tracker.peak_bytes, tracker.peak_op, seconds, left)


@contextmanager
def restore_rng_state() -> Iterator[None]:
    """Put the random number generators of torch, Python and NumPy back as they were."""
    outside = Generators(OUTSIDE_TORCH.values())
    try:
        with ExitStack() as stack:
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
    that a forward pass or a hook may write to. Gives who watches for writes into parameters, as a
    momentum encoder's forward makes them. Inside, other parameters with the same memory stand in
    the model, so that hooks on the user's own, an optimizer's step among them, do not run.

    Parameters
    ----------
    model, inputs
        What a step runs on.
    inputs_too
        Copy values of inputs, which a forward may scale in place, and put them back.
    written
        The parameters that an earlier such step was seen to write to: nothing is watched then, so
        that seconds are the step's own.
    """
    weights, given = list(model.parameters()), tensors(inputs)
    gradients = [(it, it.grad) for it in (*weights, *given) if it.is_leaf]
    spared = [*weights, *(it for it in given if it.requires_grad or not inputs_too)]
    inside = StateSnapshot([("arguments", inputs)]).values()
    before = ModelSnapshot(model, inputs, (*model.buffers(), *given, *inside), spared)
    overwritten = Values(written or (), ())
    watched = WrittenWeights((weight, part) for weight in weights for part in pieces(weight))
    with restore_rng_state(), shards_put_back(model) as shards, _without_hooks(model, shards):
        try:
            with (
                outside_saved_tensors_hooks(),
                watched if written is None else nullcontext(),
            ):
                yield watched
        finally:
            before.restore()
            for leaf, gradient in gradients:
                leaf.grad = gradient
            overwritten.restore()


@contextmanager
def _without_hooks(model: torch.nn.Module, spared: set[int]) -> Iterator[None]:
    modules = list(model.modules())
    before = [(module, dict(module._parameters)) for module in modules]
    stand_ins: dict[int, torch.nn.Parameter] = {}
    try:
        for module, parameters in before:
            for name, own in parameters.items():
                if own is not None and id(own) not in spared:
                    module._parameters[name] = stand_ins.setdefault(id(own), _stand_in(own))
        refresh_flat_weights(modules)
        yield
    finally:
        for module, parameters in before:
            module._parameters.clear()
            module._parameters.update(parameters)
        refresh_flat_weights(modules)


def _stand_in(own: torch.nn.Parameter) -> torch.nn.Parameter:
    made = torch.nn.Parameter(own.detach(), requires_grad=own.requires_grad)
    made.__dict__.update(own.__dict__)
    return made


def _output_gradients(ends: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return gradients for outputs, always the same."""
    output_gradients = []
    for place, end in enumerate(ends):
        output_gradient = torch.empty_like(end)
        generator = torch.Generator(end.device).manual_seed(place)
        output_gradients.append(
            output_gradient.normal_(generator=generator)
            if end.dim()
            else output_gradient.fill_(1.0)
        )
    return output_gradients
