"""Models whose state cannot be planned, and why."""

from __future__ import annotations

import torch

from ...base.errors import PlanError
from ..target.accelerator import has_streams


def check_model(model: torch.nn.Module) -> None:
    """Raise PlanError for a model whose parameters cannot be updated one by one inside a step."""
    check_device(model)
    check_apart(model)
    check_alone(model)


def check_device(model: torch.nn.Module) -> None:
    """Raise PlanError for a model on a device that cannot copy beside its ops."""
    for name, parameter in model.named_parameters():
        if parameter.device.type not in ("cpu", "meta") and not has_streams(parameter.device):
            raise PlanError(
                f"state: got the parameter {name!r} on {parameter.device}. State on the host is "
                "for models on the CPU, or on a device with streams beside its ops. Leave state "
                "out."
            )


def check_apart(model: torch.nn.Module) -> None:
    """Raise PlanError where two parameters share memory: an update of one changes the other."""
    seen: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        if parameter.is_meta or not parameter.numel():
            continue
        other = seen.setdefault(parameter.untyped_storage()._cdata, name)
        if other != name:
            raise PlanError(
                f"state: the parameters {other!r} and {name!r} are two that share memory. Make "
                "them one (assign the same parameter to both modules), or give each its own."
            )


def check_alone(model: torch.nn.Module) -> None:
    """Raise PlanError where somebody else waits for gradients."""
    ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    if ranks and torch.distributed.get_world_size() > 1:
        raise PlanError(
            "state: got a process group of several ranks, whose gradients are exchanged as "
            "autograd hands them over; those of parameters on the host are not. Train on one rank, "
            "or shard the state (FSDP2, ZeRO) in place of state=."
        )
    for name, parameter in model.named_parameters():
        hooks = parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
        if hooks:
            raise PlanError(
                f"state: the parameter {name!r} has a hook on its gradient, which would not run "
                "where the gradient is used inside the step. Remove it before planning."
            )
