"""What an optimizer holds: found by letting it make one step on fake parameters."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...base.errors import PlanWarning
from ..elsewhere.gpu import Gpu
from ..model.sharded import here
from ..model.tracker import StorageTracker
from .capture import fake_of

LOOKS_PER_PARAMETER = 100
# Ops whose second tensor may be a number, for one tensor and for many.
_NAMES = [name + suffix for name in ("add", "sub", "mul", "div") for suffix in ("", "_")]
_TAKES_NUMBER = frozenset(getattr(torch.ops.aten, name) for name in _NAMES)
_TAKES_NUMBERS = frozenset(getattr(torch.ops.aten, f"_foreach_{name}") for name in _NAMES)


@dataclass(frozen=True)
class OptimizerMemory:
    """Bytes an optimizer keeps between steps, and the most it holds beside that during one.

    sizes : of its storages
    """

    state_bytes: int
    transient_bytes: int
    sizes: tuple[int, ...] = ()


def optimizer_memory(
    model: torch.nn.Module, optimizer: Any, gpu: Gpu | None = None
) -> OptimizerMemory:
    """Return what an optimizer (an instance, or a class that takes parameters alone) holds.

    An instance is asked for its groups and settings; a fake twin makes the step, so the instance
    is not touched. Its settings must be those the class takes. Where the twin's step fails, a
    PlanWarning says why, and what counts is the state that the instance has by now. On a GPU that
    is not here it makes the step for all parameters at once (`foreach`), as torch does on one.
    """
    try:
        return _of_a_step(model, optimizer, gpu)
    except Exception as error:  # noqa: BLE001 - anybody's optimizer raises anything in its step
        state = _bytes_of(getattr(optimizer, "state", None))
        kind = optimizer if isinstance(optimizer, type) else type(optimizer)
        warnings.warn(
            f"a step of {getattr(kind, '__name__', kind)} does not run on tensors without values "
            f"({type(error).__name__}: {error}), so its state cannot be told before. "
            f"{state} bytes are counted, which it holds now; pass an optimizer that has made a "
            "step, or leave room for it.",
            PlanWarning,
            stacklevel=3,
        )
        return OptimizerMemory(state, 0)


def _of_a_step(model: torch.nn.Module, optimizer: Any, gpu: Gpu | None) -> OptimizerMemory:
    place = None if gpu is None else gpu.place
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    if isinstance(optimizer, torch.optim.Optimizer):
        kind, groups = type(optimizer), optimizer.param_groups
    else:
        kind, groups = optimizer, [{"params": list(model.parameters())}]
    fakes: dict[int, torch.Tensor] = {}
    twins = []
    for group in groups:
        fakes |= {
            id(it): fake_of(mode, here(it), place) for it in group["params"] if id(it) not in fakes
        }
        twins.append({**group, "params": [fakes[id(it)] for it in group["params"]]})
    with mode, SomeNumber(LOOKS_PER_PARAMETER * (1 + len(fakes))):
        for fake in fakes.values():
            if fake.requires_grad:
                fake.grad = torch.empty_like(fake)
        twin = kind(twins)
        for group in twin.param_groups:
            # By itself it asks for the type of its tensors, and these are of another.
            if gpu is not None and group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = True
        known = [*fakes.values(), *(it.grad for it in fakes.values() if it.grad is not None)]
        # Some make their state before the first step.
        there = sum(_sizes_of(twin.state, place))
        known += (it for it in tree_leaves(list(twin.state.values())) if torch.is_tensor(it))
        scratch = _number_bytes if gpu is None else None
        with StorageTracker(known, device=place, scratch=scratch) as tracker:
            twin.step()
    sizes = _sizes_of(twin.state, place)
    state = sum(sizes)
    transient = tracker.peak_bytes - tracker.start_bytes - (state - there)
    return OptimizerMemory(state, max(0, transient), sizes)


def _number_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> int:
    """Bytes that a kernel of the CPU takes for a Python number in the place of a tensor.

    The number becomes a tensor of eight bytes, and another of the type that is computed in.
    """
    flat = tree_leaves((args, kwargs))
    one = func.overloadpacket in _TAKES_NUMBER and isinstance(flat[1], int | float)
    # Many tensors are computed one by one.
    each = func.overloadpacket in _TAKES_NUMBERS and func._overloadname.startswith("Scalar")
    return 8 + int(flat[0].element_size()) if one or each else 0


def _bytes_of(state: Any) -> int:
    return sum(_sizes_of(state)) if isinstance(state, Mapping) else 0


def _sizes_of(state: Mapping[Any, Any], place: torch.device | None = None) -> tuple[int, ...]:
    """Bytes of the tensors in an optimizer's state, each storage once; on one device if given."""
    held = [it for it in tree_leaves(list(state.values())) if isinstance(it, torch.Tensor)]
    found = {
        it.untyped_storage()._cdata: it.untyped_storage().nbytes()
        for it in held
        # Counts of steps stay on the host.
        if place is None or it.device == place
    }
    return tuple(found.values())


class SomeNumber(TorchDispatchMode):
    """Has a number for an optimizer that looks at a value, as Adafactor at the size of a parameter.

    What it computes with that is as large as with any other. One that looks again and again, until
    it sees something else, is stopped.
    """

    def __init__(self, looks: int) -> None:
        super().__init__()
        self._left = looks

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("it looks at values again and again, and there are none")
        if args[0].dtype == torch.bool:
            return True
        # Not 0 or 1, of which differences and logarithms are divisors of 0.
        return 0.5 if args[0].dtype.is_floating_point else 2
