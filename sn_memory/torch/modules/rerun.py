"""Modules whose forward runs again in the backward pass, for one forward pass of a model.

torch.utils.checkpoint does it, with the state of chance of the first time. What it leaves to its
users is what a second run does to statistics and other buffers: here they are as after one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ..model.step import tensors

# A unit's name, a tensor it was given, and the tensor's version then.
Input = tuple[str, torch.Tensor, int]


@dataclass
class Unit:
    """A module that may be run again.

    Parameters
    ----------
    name
        Its path.
    changed
        Buffers that its forward pass changes, as (module, name).
    seconds
        Of all its calls in one forward pass.
    saved_bytes
        What it saves for the backward pass.
    given_bytes, saved_input_bytes
        Of its inputs, which are saved instead when it runs again; of those that it saves anyway.
    """

    name: str
    changed: tuple[tuple[torch.nn.Module, str], ...]
    seconds: float
    saved_bytes: int
    given_bytes: int = 0
    saved_input_bytes: int = 0

    def buffers(self) -> list[torch.Tensor]:
        return [module._buffers[name] for module, name in self.changed]  # type: ignore[misc]


@contextmanager
def rerunning(units: dict[torch.nn.Module, Unit], inputs: list[Input] | None) -> Iterator[None]:
    """Put checkpointed forwards in the place of the modules' own for one forward pass.

    inputs : where what units were given is noted; None where nobody asks
    """
    before = {module: module.__dict__.get("forward") for module in units}
    for module, unit in units.items():
        module.__dict__["forward"] = _checkpointed(module.forward, unit, inputs)
    try:
        yield
    finally:
        for module, own in before.items():
            if own is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = own


def _checkpointed(
    forward: Callable[..., Any], unit: Unit, inputs: list[Input] | None
) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or _inside_checkpoint():
            return forward(*args, **kwargs)
        buffers = unit.buffers()
        earlier = [it.clone() for it in buffers]
        if inputs is not None:
            inputs.extend((unit.name, it, it._version) for it in tensors((args, kwargs)))
        first = True

        def once_more(*args: Any) -> Any:
            nonlocal first
            if first:
                first = False
                return forward(*args, **kwargs)
            # It sees its statistics as they were, and leaves them as they are.
            now = [it.clone() for it in buffers]
            _fill(buffers, earlier)
            try:
                return forward(*args, **kwargs)
            finally:
                _fill(buffers, now)

        return checkpoint(once_more, *args, use_reentrant=False)

    return run


def _inside_checkpoint() -> bool:
    """Whether a checkpoint of the model's own keeps nothing here, and runs all this again.

    By then the forwards put in place are gone, so that it must not meet them the first time.
    """
    if torch.compiler.is_compiling():
        return False  # where modules inside are compiled, torch's own checkpoint sees to it
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0].__qualname__.startswith("_checkpoint_hook.")


def _fill(buffers: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        # Beside autograd, which would take it for a change of what it saved.
        buffer.data.copy_(value)
