"""What an optimizer holds: found by letting it make one step on fake parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from .capture import fake_of
from .tracker import StorageTracker


@dataclass(frozen=True)
class OptimizerMemory:
    """Bytes an optimizer keeps between steps, and the most it holds beside that during one."""

    state_bytes: int
    transient_bytes: int


def optimizer_memory(model: torch.nn.Module, optimizer: Any) -> OptimizerMemory:
    """Return what an optimizer (an instance, or a class that takes parameters alone) holds.

    An instance is asked for its groups and settings; a fake twin makes the step, so the instance
    is not touched. Its settings must be those the class takes.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    if isinstance(optimizer, torch.optim.Optimizer):
        kind, groups = type(optimizer), optimizer.param_groups
    else:
        kind, groups = optimizer, [{"params": list(model.parameters())}]
    fakes: dict[int, torch.Tensor] = {}
    twins = []
    for group in groups:
        fakes |= {id(it): fake_of(mode, it) for it in group["params"] if id(it) not in fakes}
        twins.append({**group, "params": [fakes[id(it)] for it in group["params"]]})
    with mode:
        for fake in fakes.values():
            if fake.requires_grad:
                fake.grad = torch.empty_like(fake)
        twin = kind(twins)
        known = [*fakes.values(), *(it.grad for it in fakes.values() if it.grad is not None)]
        with StorageTracker(known) as tracker:
            twin.step()
    held = {
        it.untyped_storage()._cdata: it.untyped_storage().nbytes()
        for state in twin.state.values()
        for it in state.values()
        if isinstance(it, torch.Tensor)
    }
    state = sum(held.values())
    return OptimizerMemory(state, max(0, tracker.peak_bytes - tracker.start_bytes - state))
