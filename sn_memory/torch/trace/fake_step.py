"""A training step run on tensors that have sizes and no values: its peak, before it runs.

A graph knows when a tensor is last used. When it goes is another thing: what a forward of Python
has in its variables, and what autograd's own nodes have, stays until they return. So the step
itself is run, hooks and second runs included, and what is live is counted as in a real one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.utils._pytree import tree_map_only

from ..model.guard import as_it_was
from ..model.step import Measured, chance_put_back, run_step
from .capture import fake_of
from .recurrent import FakeMode


def fake_step(
    model: torch.nn.Module,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    known: Sequence[torch.Tensor] = (),
    heard: Callable[[int], None] | None = None,
) -> Measured:
    """Run a step of a model on fake tensors; nothing is allocated, and the model is as before.

    arguments : positional and by keyword; known : tensors that are there beside these; heard : as
    in StorageTracker.
    """
    mode = FakeMode(allow_non_fake_inputs=True)
    arguments = tree_map_only(torch.Tensor, lambda it: fake_of(mode, it), arguments)
    with as_it_was(model), chance_put_back(), swapped(model, mode), mode:
        return run_step(model, model, arguments, known=known, heard=heard)


@contextmanager
def on_fakes(model: torch.nn.Module, arguments: Any) -> Iterator[Any]:
    """Let a model compute without values inside; gives the arguments as it takes them then."""
    mode = FakeMode(allow_non_fake_inputs=True)
    with swapped(model, mode), torch.enable_grad(), mode:
        yield tree_map_only(torch.Tensor, lambda it: fake_of(mode, it), arguments)


@contextmanager
def swapped(model: torch.nn.Module, mode: FakeMode) -> Iterator[None]:
    """Let parameters and buffers be tensors without values."""
    made: dict[int, torch.Tensor] = {}
    before = []
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            before.append((tensors, dict(tensors)))
            for name, it in tensors.items():
                if it is None:
                    continue
                if id(it) not in made:
                    fake = fake_of(mode, it)
                    is_weight = isinstance(it, torch.nn.Parameter)
                    made[id(it)] = torch.nn.Parameter(fake, it.requires_grad) if is_weight else fake
                cast("dict[str, Any]", tensors)[name] = made[id(it)]
        if isinstance(module, torch.nn.RNNBase):
            # It keeps a list of its own, and would go on with the real ones.
            module._flat_weights = [getattr(module, it) for it in module._flat_weights_names]
    try:
        yield
    finally:
        for tensors, own in before:
            cast("dict[str, Any]", tensors).update(own)
