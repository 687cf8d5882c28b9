"""The optimizer of a model whose state is planned: same object, same groups, another `step`.

Its class becomes a subclass of its own, so `isinstance`, schedulers, `state_dict` and `zero_grad`
are as before. With `update="backward"` each parameter was updated by the time `step` is called.
`.grad` then is a tensor that says so to whoever would use it - clipping, a loss scaler - since a
gradient that is None would be passed over in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ...base.errors import PlanError
from .optimizer import plain_class

_STATE = "_sn_memory_state"


class UsedUp(torch.Tensor):
    """Stands for the gradient of a parameter that was updated in the backward pass. No memory."""

    @staticmethod
    def __new__(cls, parameter: torch.Tensor) -> UsedUp:
        made: UsedUp = torch.Tensor._make_wrapper_subclass(
            cls,
            parameter.size(),
            strides=parameter.stride(),
            dtype=parameter.dtype,
            device=parameter.device,
        )
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"UsedUp(size={tuple(self.size())})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # zero_grad(set_to_none=False) has nothing to do.
        if func in (torch.ops.aten.zero_.default, torch.ops.aten.detach.default):
            return args[0]
        if func is torch.ops.aten._foreach_zero_.default and _all_used_up(args[0]):
            return None
        raise PlanError(
            f"{func} was called on a gradient that was used up: the model is planned with "
            "update='backward', which updates each parameter in the backward pass. What needs all "
            "gradients at once (clipping by norm, a loss scaler, logging of norms, accumulation) "
            "needs update='step', which keeps them on the host until optimizer.step()."
        )


def _all_used_up(tensors: Any) -> bool:
    return all(isinstance(it, UsedUp) for it in tree_leaves(tensors))


class Steps:
    """What the class of an optimizer does otherwise; stands before it."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update what was not updated in the backward pass."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.__dict__[_STATE].step()
        return loss

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load, and move what belongs there to the host."""
        super().load_state_dict(state_dict)  # type: ignore[misc]
        self.__dict__[_STATE].adopt()

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Refuse: what is planned is planned with the groups there are."""
        raise PlanError(
            "add_param_group was called on an optimizer whose state is planned. Add the group "
            "first, then plan."
        )


def take_over(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Make an optimizer one whose step is that of a ModelState."""
    plain: Any = plain_class(optimizer)
    optimizer.__dict__[_STATE] = state
    kind: Any = type(plain.__name__, (Steps, plain), {"sn_memory_of": plain})
    kind.__module__, kind.__qualname__ = plain.__module__, plain.__qualname__
    optimizer.__class__ = kind
    # Hooks of a step run around the whole of it.
    optimizer._patch_step_function()


def step_in_memory(
    optimizer: torch.optim.Optimizer, without: Callable[[torch.nn.Parameter], bool]
) -> None:
    """Make the optimizer's own step on all parameters but some."""
    plain: Any = plain_class(optimizer)
    groups = optimizer.param_groups
    rest = [{**it, "params": [p for p in it["params"] if not without(p)]} for it in groups]
    if not any(p.grad is not None for it in rest for p in it["params"]):
        return
    step = plain.step.__wrapped__ if getattr(plain.step, "hooked", False) else plain.step
    try:
        optimizer.param_groups = rest
        step(optimizer)
    finally:
        optimizer.param_groups = groups
