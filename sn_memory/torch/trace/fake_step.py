"""Steps without values: the peak of a training step, and an optimizer's memory, in advance.

A graph knows when a tensor is last used, but not when it is freed: tensors in local variables of
the forward, and in autograd's nodes, live until these return. So the step itself is run, hooks and
reruns included, and live bytes are counted as in a real one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from ..chunked_loss import chunked_scratch, is_chunked_loss
from ..model.modes import warn
from ..model.results import ends_of, tensors_of
from ..model.sharded import here
from ..model.signature import storage_sizes, tensors
from ..model.snapshot import WrittenWeights
from ..model.step import Measured, device_of, restore_model, restore_rng_state, run_step
from ..model.tracker import Scratch, StorageTracker
from ..target.gpu import Gpu
from ..target.scratch import gpu_scratch_bytes
from .fake import FakeMode, ValueMode, fake_of, swapped
from .op_seconds import op_times
from .record import form_of

# A step reads few values per parameter (Adafactor its norm); a loop that waits for a value other
# than the substitute would read forever.
LOOKS_PER_PARAMETER = 100
# Ops whose second tensor may be a number, for one tensor and for many.
_NAMES = [name + suffix for name in ("add", "sub", "mul", "div") for suffix in ("", "_")]
_TAKES_NUMBER = frozenset(getattr(torch.ops.aten, name) for name in _NAMES)
_TAKES_NUMBERS = frozenset(getattr(torch.ops.aten, f"_foreach_{name}") for name in _NAMES)


def fake_step(
    model: torch.nn.Module,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    known: Sequence[torch.Tensor] = (),
    heard: Callable[[int], None] | None = None,
    *,
    accumulate: bool = False,
    scratch: Scratch | None = None,
) -> Measured:
    """Run a step of a model on fake tensors; nothing is allocated, and the model is restored.

    arguments : positional and by keyword; known : other tensors that exist; heard : as in
    StorageTracker; accumulate, scratch : as in run_step.
    """
    mode = ValueMode()
    arguments = tree_map_only(torch.Tensor, mode.give, arguments)
    # Small parameters that the model keeps in its own lists are used with their real values.
    weights = WrittenWeights((param, param) for param in model.parameters())
    with (
        op_times(device_of(model)),  # what `scratch` measures is saved once
        restore_model(model, replayed=False),
        restore_rng_state(),
        weights,
        swapped(model, mode),
        mode,
    ):
        return run_step(
            model,
            model,
            arguments,
            known=known,
            heard=heard,
            accumulate=accumulate,
            scratch=scratch,
        )


def fake_step_on(
    gpu: Gpu,
    model: torch.nn.Module,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    moved: Callable[[int, int], None] | None = None,
    *,
    keep: bool = True,
) -> Measured:
    """Run a step as on a GPU that is not here; kernels' workspaces count, as far as known.

    moved : as in StorageTracker; parameters and buffers come first. Existing gradients of
    parameters are present from the start and accumulated into. keep : whether parameters get
    gradients; else each is freed as soon as it is computed
    """
    earlier = [param.grad is not None for param in model.parameters()]
    mode = FakeMode(gpu.walk)
    arguments = tree_map_only(
        torch.Tensor, lambda tensor: fake_of(mode, tensor, gpu.place), arguments
    )
    with (
        restore_model(model, replayed=False),
        restore_rng_state(),
        swapped(model, mode, gpu.place),
        mode,
    ):
        args, kwargs = arguments
        resident = [*model.parameters(), *model.buffers(), *tensors(arguments)]
        leaves = {id(tensor): tensor for tensor in resident if tensor.requires_grad}
        # Gradients of earlier steps are made outside of the tracker, which counts them as resident.
        held = {
            id(param): torch.empty_like(param, requires_grad=False)
            for param, has in zip(model.parameters(), earlier, strict=True)
            if has and keep
        }
        resident += held.values()
        tracker = StorageTracker(
            resident,
            device=gpu.place,
            allocator="torch",
            scratch=partial(_scratch, gpu),
            moved=moved,
        )
        taken = {tensor.untyped_storage()._cdata for tensor in held.values()}

        # Like autograd's AccumulateGrad: adds to an existing gradient, or takes the new one over,
        # copied if it is shared, a part of a storage, or has another layout.
        def take(leaf: torch.Tensor, gradient: torch.Tensor) -> None:
            if id(leaf) not in leaves or not keep:
                return
            before = held.get(id(leaf))
            if before is not None:
                before.add_(gradient)
                return
            memory = gradient.untyped_storage()
            whole = memory.nbytes() == gradient.nbytes
            if memory._cdata in taken or gradient.stride() != leaf.stride() or not whole:
                gradient = torch.empty_like(leaf, requires_grad=False).copy_(gradient)
            held[id(leaf)] = gradient.detach()
            taken.add(gradient.untyped_storage()._cdata)

        with tracker, torch.enable_grad():
            with gpu.forward():
                returned = model(*args, **kwargs)
            outputs = tensors_of(returned, model)
            ends = ends_of(returned, outputs)
            del returned
            # Bytes that the forward pass leaves for the backward pass.
            left = tracker.live_bytes - tracker.start_bytes
            gpu.back(ends, [torch.empty_like(end) for end in ends], take)
    return Measured({}, tracker.peak_bytes, tracker.peak_op, 0.0, left)


def _scratch(gpu: Gpu, func: Any, args: Any, kwargs: Any, _: Any) -> int:
    if is_chunked_loss(func):
        return chunked_scratch(func, args, gpu.place)
    forms = [form_of(tensor, -1).form for tensor in tensors((args, kwargs))]
    return gpu_scratch_bytes(str(func.overloadpacket.__name__), forms, gpu.named)


@dataclass(frozen=True)
class OptimizerMemory:
    """Bytes an optimizer keeps between steps, and the most it takes in addition during one."""

    state_bytes: int
    transient_bytes: int
    sizes: tuple[int, ...] = ()  # of its storages


def optimizer_memory(
    model: torch.nn.Module, optimizer: Any, gpu: Gpu | None = None
) -> OptimizerMemory:
    """Return the memory of an optimizer: an instance, or a class that needs only parameters.

    Groups and settings are taken from an instance; a fake twin makes the step, so the instance is
    not touched. Its settings must be those the class takes. If the twin's step fails, a PlanWarning
    says why, and the instance's current state is counted. On a GPU that is not here it makes the
    step for all parameters at once (`foreach`), as torch does on one.
    """
    try:
        return _of_a_step(model, optimizer, gpu)
    except Exception as error:  # noqa: BLE001 - anybody's optimizer raises anything in its step
        held = getattr(optimizer, "state", None)
        state = sum(_sizes_of(held)) if isinstance(held, Mapping) else 0
        kind = optimizer if isinstance(optimizer, type) else type(optimizer)
        warn(
            f"a step of {getattr(kind, '__name__', kind)} does not run on tensors without values "
            f"({type(error).__name__}: {error}), so its state is unknown in advance. {state} bytes "
            "are counted, those it holds now; pass an optimizer that has made a step, or leave "
            "room for it."
        )
        return OptimizerMemory(state, 0)


def _of_a_step(model: torch.nn.Module, optimizer: Any, gpu: Gpu | None) -> OptimizerMemory:
    place = None if gpu is None else gpu.place
    if isinstance(optimizer, torch.optim.Optimizer):
        kind, groups = type(optimizer), optimizer.param_groups
    else:
        kind, groups = optimizer, [{"params": list(model.parameters())}]
    count = len({id(param) for group in groups for param in group["params"]})
    walk = None if gpu is None else gpu.walk
    mode = FakeMode(walk, looks=LOOKS_PER_PARAMETER * (1 + count))
    fakes: dict[int, torch.Tensor] = {}
    twins = []
    for group in groups:
        fakes |= {
            id(param): fake_of(mode, here(param), place)
            for param in group["params"]
            if id(param) not in fakes
        }
        twins.append({**group, "params": [fakes[id(param)] for param in group["params"]]})
    # A new optimizer with fake parameters, before its first step: the instance may have made steps.
    with mode:
        for fake in fakes.values():
            if fake.requires_grad:
                fake.grad = torch.empty_like(fake)
        twin = kind(twins)
        for group in twin.param_groups:
            # The default depends on the type of the tensors, which are fake.
            if gpu is not None and group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = True
        known = [*fakes.values(), *(fake.grad for fake in fakes.values() if fake.grad is not None)]
        # Some create state before the first step.
        state_bytes = sum(_sizes_of(twin.state, place))
        known += tensors([*twin.state.values()])
        scratch = _number_bytes if gpu is None else None
        with StorageTracker(known, device=place, scratch=scratch) as tracker:
            twin.step()
    sizes = _sizes_of(twin.state, place)
    state = sum(sizes)
    # State that the step itself created is kept, and counted with the rest of the state.
    transient = tracker.peak_bytes - tracker.start_bytes - (state - state_bytes)
    return OptimizerMemory(state, max(0, transient), sizes)


def _number_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> int:
    """Bytes that a CPU kernel takes for a Python number in place of a tensor.

    The number becomes a tensor, and another one of the dtype that is computed in.
    """
    flat = tree_leaves((args, kwargs))
    one = func.overloadpacket in _TAKES_NUMBER and isinstance(flat[1], int | float)
    # `_foreach` ops compute tensors one by one on the CPU.
    per_number = func.overloadpacket in _TAKES_NUMBERS and func._overloadname.startswith("Scalar")
    # Eight bytes: Python's numbers become tensors of int64 or float64.
    return 8 + int(flat[0].element_size()) if one or per_number else 0


def _sizes_of(state: Mapping[Any, Any], place: torch.device | None = None) -> tuple[int, ...]:
    """Bytes of the tensors in an optimizer's state, each storage once; on one device if given."""
    # Step counts stay on the host.
    held = (t for t in tensors([*state.values()]) if place is None or t.device == place)
    return tuple(storage_sizes(held).values())
