"""Modules whose forward runs again in the backward pass, for one forward pass of a model.

This uses torch.utils.checkpoint, which ignores what else a second run reads, and what it does to
statistics and other buffers: see `state.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ..model.modes import Forwards, inside_checkpoint
from ..model.sharded import is_sharded
from ..model.signature import tensors
from ..model.snapshot import version_of
from .probe import Behaviour
from .state import RunState

# A unit's name, a tensor among its arguments, and the tensor's version at that time.
Input = tuple[str, torch.Tensor, int]


@dataclass
class Unit(Behaviour):
    """A module that may be run again, and its behaviour in one forward pass.

    name : its path
    changed : buffers that its forward pass changes, as (module, name); None to compare copies of
        all
    """

    name: str = ""
    changed: tuple[tuple[torch.nn.Module, str], ...] | None = None


def rerunning(
    model: torch.nn.Module, units: Sequence[Unit], inputs: list[Input] | None = None
) -> Forwards:
    """Return a context for one forward pass that checkpoints modules; adds to `inputs`."""
    # FSDP2 replaces parameters between the two runs.
    sharded, modules = is_sharded(model), dict(model.named_modules())
    again = [(modules[unit.name], unit) for unit in units]
    return Forwards(
        {module: _checkpointed(module, unit, inputs, sharded) for module, unit in again}
    )


def run_again(path: str, module: torch.nn.Module) -> Callable[..., Any]:
    """Return a forward that saves only a module's inputs, and runs it again for the rest."""
    return _checkpointed(module, Unit(name=path, saves_early=True), None, False)


def _checkpointed(
    module: torch.nn.Module, unit: Unit, inputs: list[Input] | None, sharded: bool
) -> Callable[..., Any]:
    forward, thread = module.forward, threading.get_ident()

    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            # In a module compiled in place, everything it reads is an input of compiled code.
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        if (
            not torch.is_grad_enabled()
            or inside_checkpoint()
            # Another thread that calls the module has its own pass or rerun.
            or threading.get_ident() != thread
        ):
            return forward(*args, **kwargs)
        if inputs is not None:
            inputs.extend(
                (unit.name, tensor, version_of(tensor)) for tensor in tensors((args, kwargs))
            )
        state = RunState({unit.name: module}, (args, kwargs), unit.changed, sharded=sharded)
        requires_grad = [isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args]
        # Kept by this closure: inference tensors, which autograd cannot save, and those that are
        # also passed by name. Attention checks whether its query is its key, and a caller's hooks
        # may return a copy of each saved tensor: so a tensor that is passed twice is saved once.
        by_name = {id(value) for value in kwargs.values()}
        direct = {
            place: arg
            for place, arg in enumerate(args)
            if id(arg) in by_name or (isinstance(arg, torch.Tensor) and arg.is_inference())
        }
        first_place = {id(arg): place for place, arg in reversed([*enumerate(args)])}
        same_as = [first_place[id(arg)] for arg in args]
        first = True

        def run_forward(*args: Any) -> Any:
            nonlocal first
            args = tuple(direct.get(place, arg) for place, arg in enumerate(args))
            if first:
                first = False
                result = forward(*(args[place] for place in same_as), **kwargs)
                state.end()
                return result
            with state:
                # Before duplicates are filled in, so that they stay the same tensor.
                args = tuple(map(_with_requires_grad, args, requires_grad))
                return forward(*(args[place] for place in same_as), **kwargs)

        return checkpoint(
            run_forward,
            *(
                arg if place not in direct and same_as[place] == place else None
                for place, arg in enumerate(args)
            ),
            use_reentrant=False,
            preserve_rng_state=False,  # `state` does, if random numbers are drawn
            early_stop=not unit.saves_early,
        )

    return run


def _with_requires_grad(value: Any, requires_grad: bool) -> Any:
    """Return an argument with `requires_grad` as in the first run."""
    if isinstance(value, torch.Tensor) and value.requires_grad != requires_grad:
        return value.detach().requires_grad_(requires_grad)
    return value
