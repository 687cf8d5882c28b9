"""Which host memory the state of a model lies in."""

from __future__ import annotations

import os

import torch

from ...base.errors import PlanError
from ..model.step import device_of
from ..target.accelerator import is_apart
from .arena import StateArena
from .files import HostState
from .pinned import PinnedState


def arena_for(model: torch.nn.Module, state: str | os.PathLike[str] | StateArena) -> StateArena:
    """Return the host memory that `state` of `plan` asks for.

    Raises
    ------
    PlanError
        For one that does not go with the device that the model is on.
    """
    device = device_of(model)
    if state == "host":
        return PinnedState(device) if is_apart(device) else HostState()
    if not isinstance(state, StateArena):
        if is_apart(device):
            raise PlanError(
                f"state: got the folder {os.fspath(state)!r} for a model on {device}, whose state "
                "rests in pinned memory. Say state='host'."
            )
        return HostState(state)
    wanted = device if is_apart(device) else torch.device("cpu")
    if state.device != wanted:
        raise PlanError(
            f"state: got a {type(state).__name__} for a model on {state.device}, and the model is "
            f"on {device}. Pass one for {device}, or say state='host'."
        )
    return state
