"""What is no model or no optimizer is refused where it is handed in, by one clear error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parameter import UninitializedTensorMixin

from ..errors import SampleError, TraceError
from .step import tensors


def check_model(model: Any) -> None:
    """Raise TypeError for what is no instance of a module, TraceError where nothing trains."""
    if isinstance(model, type):
        raise TypeError(
            f"got the class {model.__name__} as model, expected an instance of it. Make one: "
            f"{model.__name__}(...)."
        )
    if not isinstance(model, torch.nn.Module):
        name = getattr(model, "__name__", "")
        what = f"{type(model).__name__} {name}".strip()
        raise TypeError(
            f"got a {what} as model, expected an instance of torch.nn.Module. A function becomes "
            "one as the forward of a class that derives from it."
        )
    lazy = [
        name
        for name, it in (*model.named_parameters(), *model.named_buffers())
        if isinstance(it, UninitializedTensorMixin)
    ]
    if lazy:
        raise TraceError(
            f"{lazy[0]!r} and {len(lazy) - 1} other tensors of the {type(model).__name__} have no "
            "shapes yet, as its lazy modules have not run. Call model(sample) once before."
        )
    if next(model.parameters(), None) is None:
        raise TraceError(
            f"the {type(model).__name__} has no parameters, so that no training step can be "
            "planned. Pass the module that holds those that are trained."
        )


def check_optimizer(optimizer: Any) -> None:
    """Raise TypeError for what is neither an optimizer nor a class or function that makes one."""
    if optimizer is None or callable(optimizer) or hasattr(optimizer, "param_groups"):
        return
    known = {name.lower(): name for name in dir(torch.optim) if name[0].isupper()}
    name = known.get(str(optimizer).lower(), "AdamW")
    raise TypeError(
        f"got optimizer {optimizer!r}, expected an optimizer or its class: torch.optim.{name}."
    )


def check_memory(model: torch.nn.Module, given: Any, why: str) -> None:
    """Raise TraceError for a model or a sample on the meta device; why : what needs memory."""
    if any(it.is_meta for it in (*tensors(given), *model.parameters())):
        raise TraceError(
            f"{why}, and the model or the sample is on the meta device. Pass them with memory, or "
            "plan with backend='graph', which then makes a plan to read."
        )


@contextmanager
def explained(given: Any) -> Iterator[None]:
    """Name the arguments that were made in inference mode where autograd refuses one."""
    try:
        yield
    except Exception as error:
        made = [at for at, it in enumerate(tensors(given)) if it.is_inference()]
        if not made or "inference" not in str(error).lower():
            raise
        raise SampleError(
            f"tensor {made[0]} of the sample was made in torch.inference_mode, and autograd saves "
            "no such tensor for the backward pass. Make it outside, or pass its clone()."
        ) from error
