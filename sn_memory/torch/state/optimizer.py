"""torch's own update, of one parameter at a time, on tensors that are wherever they are.

The step of an optimizer of torch.optim goes through its parameters one by one; what it does to one
depends on that one's gradient, state and group alone. So its own `step` is called with a group of
one parameter: a stand-in that shares memory with what is on the device. The optimizer itself is
not touched meanwhile, so an exception leaves nothing half done but values of that parameter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from ...base.errors import PlanError
from ..model.tracker import StorageTracker
from ..trace.fake import FakeMode, fake_of
from ..trace.fake_step import LOOKS_PER_PARAMETER

# Those whose update is by parameter; LBFGS and SparseAdam are not among them, nor are subclasses,
# whose step may do anything.
BY_PARAMETER = tuple(
    getattr(torch.optim, name)
    for name in (
        *("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "Muon"),
        *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
    )
    if hasattr(torch.optim, name)
)


def check_optimizer(optimizer: Any) -> None:
    """Raise PlanError for an optimizer that does not update parameter by parameter."""
    if isinstance(optimizer, torch.optim.Optimizer) and plain_class(optimizer) in BY_PARAMETER:
        seen: set[int] = set()
        for group in optimizer.param_groups:
            if group.get("differentiable") or group.get("capturable"):
                raise PlanError(
                    "state: got an optimizer with differentiable or capturable set, whose step is "
                    "part of a larger graph. Leave them out."
                )
            for parameter in group["params"]:
                if id(parameter) in seen:
                    raise PlanError(
                        "state: a parameter is in two groups of the optimizer, so one gradient "
                        "would make two updates. Put it into one."
                    )
                seen.add(id(parameter))
        return
    got = optimizer if isinstance(optimizer, type) else type(optimizer)
    names = ", ".join(it.__name__ for it in BY_PARAMETER)
    raise PlanError(
        f"state: got optimizer {getattr(got, '__name__', got)}, expected an instance of one whose "
        f"update is by parameter: {names} of torch.optim. Make one before planning, and pass it; "
        "LBFGS, SparseAdam and optimizers of other libraries keep their state on the device."
    )


def plain_class(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """Return the class that an optimizer had before its state was moved."""
    found: type[torch.optim.Optimizer] = getattr(type(optimizer), "sn_memory_of", type(optimizer))
    return found


def updated(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    state: dict[str, Any],
) -> dict[str, Any]:
    """Make the optimizer's step on one parameter, in place; return its state after it.

    Parameters
    ----------
    optimizer, group
        Whose step, and with which settings.
    parameter, gradient
        Tensors of one form on one device.
    state
        What the optimizer keeps for it, on the device; empty before its first step.
    """
    alone = torch.nn.Parameter(parameter.detach(), requires_grad=True)
    alone.grad = gradient
    twin = _twin(optimizer, group, alone, state)
    _step_of(plain_class(optimizer))(twin)
    found: dict[str, Any] = twin.state[alone]
    return found


def _twin(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], alone: Any, state: dict[str, Any]
) -> torch.optim.Optimizer:
    kind = plain_class(optimizer)
    twin: torch.optim.Optimizer = object.__new__(kind)
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.pop("step", None)  # that of a scheduler, which counts
    twin.state = defaultdict(dict)
    if state:
        twin.state[alone] = state
    twin.param_groups = [{**group, "params": [alone]}]
    return twin


def _step_of(kind: type[torch.optim.Optimizer]) -> Callable[[Any], Any]:
    """Return the step of a class without the hooks around it, which are the whole step's."""
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def update_bytes(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor
) -> tuple[int, int, int]:
    """Return bytes: what an optimizer keeps for a parameter, counts, and what its update takes.

    The first may move, counts of steps do not; the last is the most that is held beside them.
    Found by two steps on a tensor without values: the second finds the state of the first.
    """
    mode = FakeMode(looks=LOOKS_PER_PARAMETER)
    with mode:
        fake = fake_of(mode, parameter.detach())
        gradient, state = torch.empty_like(fake), dict[str, Any]()
        kept = optimizer.state.get(parameter) if isinstance(optimizer.state, dict) else None
        if kept:
            # Adagrad makes its state when it is made.
            state = {
                name: torch.empty_like(it, device=fake.device) if moves(it) else _number(it)
                for name, it in kept.items()
            }
        state = updated(optimizer, group, fake, gradient, state)
        held = [it for it in state.values() if moves(it)]
        beside = [it for it in state.values() if isinstance(it, torch.Tensor) and not moves(it)]
        with StorageTracker([fake, gradient, *held, *beside]) as tracker:
            again = updated(optimizer, group, fake, gradient, state)
    size = sum(it.untyped_storage().nbytes() for it in again.values() if moves(it))
    counts = sum(it.untyped_storage().nbytes() for it in beside)
    return size, counts, max(0, tracker.peak_bytes - tracker.start_bytes)


def _number(value: Any) -> Any:
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else value


def moves(value: Any) -> bool:
    """Whether an entry of the state may be moved: a tensor with dimensions, no count of steps."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() > 0
