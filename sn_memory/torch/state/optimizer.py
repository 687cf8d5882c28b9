"""The optimizer of a model whose state is planned: its own step, on one parameter at a time.

The step of a torch.optim optimizer treats parameters one by one, and the update of each depends on
its own gradient, state and group only. So its own `step` is called with a group of one parameter: a
stand-in that shares memory with the tensor on the device. The optimizer itself is not modified
meanwhile, so an exception can leave only values of that parameter half updated.

The optimizer stays the same object with the same groups and gets another `step`: its class is
replaced by a subclass, so `isinstance`, schedulers, `state_dict` and `zero_grad` work as before.
With `update="backward"` each parameter is already updated when `step` is called. Its `.grad` is
then a tensor that raises when used (by clipping, a loss scaler), as a gradient that is None would
be skipped silently.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ...base.errors import PlanError
from ...graph.hosted import Unit
from ..model.tracker import StorageTracker
from ..trace.fake import FakeMode, fake_of
from ..trace.fake_step import LOOKS_PER_PARAMETER
from ..trace.record import View
from ..trace.trace import Trace

# Optimizers that update parameter by parameter; not LBFGS, SparseAdam, or subclasses, whose step
# may do anything.
BY_PARAMETER = tuple(
    getattr(torch.optim, name)
    for name in (
        *("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "Muon"),
        *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
    )
    if hasattr(torch.optim, name)
)
_STATE = "_sn_memory_state"  # in the optimizer's `__dict__`, which `state_dict` does not save


def check_optimizer(optimizer: Any) -> None:
    """Raise PlanError for an optimizer that does not update parameter by parameter."""
    if not isinstance(optimizer, torch.optim.Optimizer) or _plain_class(optimizer) not in (
        BY_PARAMETER
    ):
        got = optimizer if isinstance(optimizer, type) else type(optimizer)
        names = ", ".join(cls.__name__ for cls in BY_PARAMETER)
        raise PlanError(
            f"state: got optimizer {getattr(got, '__name__', got)}, expected an instance of one "
            f"whose update is by parameter: {names} of torch.optim. Make one before planning, and "
            "pass it; LBFGS, SparseAdam and optimizers of other libraries keep their state on the "
            "device."
        )
    seen: set[int] = set()
    for group in optimizer.param_groups:
        if group.get("differentiable") or group.get("capturable"):
            raise PlanError(
                "state: got an optimizer with differentiable or capturable set, whose step is part "
                "of a larger graph. Leave them out."
            )
        for parameter in group["params"]:
            if id(parameter) in seen:
                raise PlanError(
                    "state: a parameter is in two groups of the optimizer, so one gradient would "
                    "make two updates. Put it into one."
                )
            seen.add(id(parameter))


def _plain_class(optimizer: torch.optim.Optimizer) -> Any:
    """Return the class of an optimizer before its state was planned."""
    return getattr(type(optimizer), "sn_memory_of", type(optimizer))


def _plain_step(optimizer: torch.optim.Optimizer) -> Callable[[Any], Any]:
    """Return the step of its class without hooks, which must run once for the whole step."""
    step: Any = _plain_class(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def updated(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    state: dict[str, Any],
) -> dict[str, Any]:
    """Run the optimizer's step on one parameter, in place; return its state after it.

    optimizer, group : the optimizer, and the group with its settings
    parameter, gradient : tensors of the same form on the same device
    state : the optimizer state of the parameter, on the device; empty before the first step
    """
    alone = torch.nn.Parameter(parameter.detach(), requires_grad=True)
    alone.grad = gradient
    # Without `__init__`, which validates groups again and may create state (Adagrad).
    twin = object.__new__(_plain_class(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.pop("step", None)  # set by a scheduler, to count steps
    twin.state = defaultdict(dict)
    if state:
        twin.state[alone] = state
    twin.param_groups = [{**group, "params": [alone]}]
    _plain_step(optimizer)(twin)
    after: dict[str, Any] = twin.state[alone]
    return after


def is_movable(value: Any) -> bool:
    """Whether an entry of the state may be moved: a tensor with dimensions, not a step count."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() > 0


def update_bytes(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor
) -> tuple[int, int, int]:
    """Return the bytes of a parameter's optimizer state, of step counts, and of update scratch.

    State may move, step counts do not; scratch is the most that is held besides them. Determined by
    two steps on a fake tensor: the second starts from the state of the first.
    """
    mode = FakeMode(looks=LOOKS_PER_PARAMETER)
    with mode:
        fake = fake_of(mode, parameter.detach())
        gradient, state = torch.empty_like(fake), dict[str, Any]()
        # Adagrad creates its state in `__init__`, others in their first step.
        for name, value in optimizer.state.get(parameter, {}).items():
            if is_movable(value):
                state[name] = torch.empty_like(value, device=fake.device)
            else:
                is_tensor = isinstance(value, torch.Tensor)
                state[name] = torch.zeros_like(value) if is_tensor else value
        # The first step allocates the state, so only the second shows the scratch of an update.
        state = updated(optimizer, group, fake, gradient, state)
        held = [tensor for tensor in state.values() if is_movable(tensor)]
        counts = [
            tensor
            for tensor in state.values()
            if isinstance(tensor, torch.Tensor) and not is_movable(tensor)
        ]
        with StorageTracker([fake, gradient, *held, *counts]) as tracker:
            state = updated(optimizer, group, fake, gradient, state)
    return (
        sum(tensor.untyped_storage().nbytes() for tensor in state.values() if is_movable(tensor)),
        sum(count.untyped_storage().nbytes() for count in counts),
        max(0, tracker.peak_bytes - tracker.start_bytes),
    )


class StateUnits:
    """The parameters of models that an optimizer updates, as units of the planner.

    optimizer : raises PlanError if it does not update parameter by parameter
    groups : the group of each of its parameters, by id
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        check_optimizer(optimizer)
        self.optimizer = optimizer
        self.groups = {
            id(param): group for group in optimizer.param_groups for param in group["params"]
        }
        self._bytes: dict[Any, tuple[int, int, int]] = {}

    def of(
        self, model: torch.nn.Module, traced: Trace, host_bytes_per_s: float | None = None
    ) -> list[Unit]:
        """Return the units of a model.

        model : the plain model
        traced : its step, without an optimizer
        host_bytes_per_s : bandwidth of host memory; None if host and device are one processor
        """
        parameters = dict(model.named_parameters())
        captured = traced.captured
        names = {number: name for name, number in traced.named.storage_of.items()}
        gradients = dict(captured.gradients)
        returned = captured.returned
        # Gradients whose memory has other uses, so that an update must not free them.
        kept = {grad.storage for grad in captured.output_gradients} | set(captured.recording.roles)
        speed = traced.graph.device.bytes_per_s
        host_speed = speed if host_bytes_per_s is None else host_bytes_per_s
        units = []
        for name, form in captured.parameters:
            parameter, gradient = parameters[name], gradients.get(name)
            updated_gradient = None
            size = state = counts = scratch = 0
            if gradient is not None and id(parameter) in self.groups:
                updated_gradient = names[gradient.storage]
                state, counts, scratch = self._update_bytes(parameter)
                size = parameter.numel() * parameter.element_size()
                # A gradient of another layout is copied first: see `ParameterState.update`.
                scratch += 0 if gradient.stride == form.stride else size
            # Parameter, gradient and state are read; parameter and state are written.
            moved = 3 * size + 2 * state
            units.append(
                Unit(
                    names[form.storage],
                    updated_gradient,
                    state,
                    scratch,
                    moved / speed if speed else 0.0,
                    movable=_is_whole(parameter, form) and form.storage not in returned,
                    used_up=gradient is not None and gradient.storage not in kept,
                    counts_bytes=counts,
                    host_update_s=moved / host_speed if host_speed else 0.0,
                )
            )
        return units

    def _update_bytes(self, parameter: torch.nn.Parameter) -> tuple[int, int, int]:
        group = self.groups[id(parameter)]
        # The settings of a group, such as amsgrad, determine its state.
        key = (tuple(parameter.size()), parameter.stride(), parameter.dtype, id(group))
        if key not in self._bytes:
            self._bytes[key] = update_bytes(self.optimizer, group, parameter)
        return self._bytes[key]


def _is_whole(parameter: torch.nn.Parameter, form: View) -> bool:
    """Whether a parameter fills a storage of its own from the start, without gaps."""
    return (
        parameter.numel() > 0
        and form.offset == 0
        and torch.empty_like(parameter, device="meta").stride() == parameter.stride()
        and (
            parameter.is_meta
            or parameter.untyped_storage().nbytes() >= parameter.numel() * parameter.element_size()
        )
    )


class UsedGradient(torch.Tensor):
    """Placeholder for the gradient of a parameter updated in the backward pass; has no memory."""

    @staticmethod
    def __new__(cls, parameter: torch.Tensor) -> UsedGradient:
        gradient: UsedGradient = torch.Tensor._make_wrapper_subclass(
            cls,
            parameter.size(),
            strides=parameter.stride(),
            dtype=parameter.dtype,
            device=parameter.device,
        )
        return gradient

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"UsedGradient(size={tuple(self.size())})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # For zero_grad(set_to_none=False), which has nothing to do.
        if func in (torch.ops.aten.zero_.default, torch.ops.aten.detach.default):
            return args[0]
        if func is torch.ops.aten._foreach_zero_.default and all(
            isinstance(leaf, UsedGradient) for leaf in tree_leaves(args[0])
        ):
            return None
        raise PlanError(
            f"{func} was called on a gradient that was already applied: the model is planned with "
            "update='backward', which updates each parameter in the backward pass. What needs all "
            "gradients together (clipping by norm, a loss scaler, logging of norms, accumulation) "
            "needs update='step', which keeps them on the host until optimizer.step()."
        )


class _PlannedStep:
    """Mixin with the methods that replace those of the optimizer's class."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update what was not updated in the backward pass."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.__dict__[_STATE].step()
        return loss

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict, and move planned state to the host."""
        super().load_state_dict(state_dict)  # type: ignore[misc]
        self.__dict__[_STATE].move_state()

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Raise PlanError, as the plan was made for the existing groups."""
        raise PlanError(
            "add_param_group was called on an optimizer whose state is planned. Add the group "
            "first, then plan."
        )


def replace_step(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Let an optimizer's step run that of a ModelState."""
    # An optimizer that is planned a second time is not wrapped twice.
    plain = _plain_class(optimizer)
    optimizer.__dict__[_STATE] = state
    kind: Any = type(plain.__name__, (_PlannedStep, plain), {"sn_memory_of": plain})
    kind.__module__, kind.__qualname__ = plain.__module__, plain.__qualname__
    # Schedulers and training loops refer to this object, so its class is changed.
    optimizer.__class__ = kind
    # Step hooks run once, around the whole step.
    optimizer._patch_step_function()
    # A scheduler created earlier has set `step` on the object, which would hide that of the class.
    own = vars(optimizer).get("step")
    if own is not None and hasattr(own, "_wrapped_by_lr_sched"):

        @wraps(own)  # keeps the attribute by which the scheduler recognizes it
        def step(*args: Any, **kwargs: Any) -> Any:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # as a scheduler's step does
            return kind.step(optimizer, *args, **kwargs)

        optimizer.step = step  # type: ignore[method-assign]


def step_without(optimizer: torch.optim.Optimizer, updated_ids: Mapping[int, Any]) -> None:
    """Run the optimizer's own step on all parameters except those with these ids."""
    groups = optimizer.param_groups
    rest = [
        {**group, "params": [p for p in group["params"] if id(p) not in updated_ids]}
        for group in groups
    ]
    if not any(p.grad is not None for group in rest for p in group["params"]):
        return
    try:
        optimizer.param_groups = rest
        _plain_step(optimizer)(optimizer)
    finally:
        optimizer.param_groups = groups
