"""A compiled training step before it is compiled: its kernels, its memory, its peak.

Forward and backward wrapper run one after the other on fake tensors; between them, and after them,
is held what autograd and the caller hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from .lowering import Lowered
from .wrapper import Watch


@dataclass(frozen=True)
class DryStep:
    """What a compiled step does.

    Parameters
    ----------
    watch
        Storages, values and kernels of both passes.
    boundary
        How many kernels the forward pass has.
    inputs
        Per placeholder of the forward graph that is a tensor, its value.
    returned
        Values that the forward graph returns to the caller, in order; None for what is no tensor.
    saved
        Likewise those that it hands to the backward graph.
    output_gradients
        Values of the gradients that the backward graph is given.
    gradients
        Values that it returns.
    peak_bytes
        Most bytes of live storages, those of the inputs included.
    """

    watch: Watch
    boundary: int
    inputs: tuple[int | None, ...]
    returned: tuple[int | None, ...]
    saved: tuple[int | None, ...]
    output_gradients: tuple[int, ...]
    gradients: tuple[int | None, ...]
    peak_bytes: int


def dry_step(forward: Lowered, backward: Lowered, outputs: int) -> DryStep:
    """Run a lowered step on fake tensors.

    Parameters
    ----------
    forward, backward
        The two graphs.
    outputs
        How many results of the forward graph go to the caller.
    """
    fake = _mode_of(forward)
    watch = Watch()

    def value(it: Any) -> int | None:
        return watch.value(it) if isinstance(it, torch.Tensor) else None

    with torch.no_grad(), fake, watch:
        with watch.silent():
            inputs = _made_anew(forward.inputs)
        given = tuple(value(it) for it in inputs)
        results = list(watch.run(forward.text, list(inputs)))
        boundary = len(watch.steps)
        kept = results[:outputs]
        saved = results[outputs:]
        del results
        returned = tuple(value(it) for it in kept)
        handed_over = tuple(value(it) for it in saved)
        with watch.silent():
            output_gradients = _made_anew(backward.inputs[len(saved) :])
        between = tuple(it for it in map(value, output_gradients) if it is not None)
        arguments = [*saved, *output_gradients]
        saved.clear()
        ends = list(watch.run(backward.text, arguments))
        gradients = tuple(value(it) for it in ends)
        # Counted here: what goes when these names go is after the step.
        events = tuple(watch.events)
    del inputs, kept, output_gradients, ends
    live = peak = 0
    for kind, number in events:
        if kind == "new":
            live += watch.nbytes[number]
            peak = max(peak, live)
        elif kind == "gone":
            live -= watch.nbytes[number]
    watch.events[:] = events
    return DryStep(watch, boundary, given, returned, handed_over, between, gradients, peak)


def _mode_of(lowered: Lowered) -> FakeTensorMode:
    return next(it.fake_mode for it in lowered.inputs if hasattr(it, "fake_mode"))


def _made_anew(like: Any) -> list[Any]:
    """Return tensors of the same form on storages of their own; one storage stays one."""
    storages: dict[int, torch.Tensor] = {}
    made = []
    for it in like:
        if not isinstance(it, torch.Tensor):
            made.append(it)
            continue
        key = it.untyped_storage()._cdata
        if key not in storages:
            nbytes = it.untyped_storage().nbytes()
            storages[key] = torch.empty(nbytes, dtype=torch.uint8, device=it.device)
        flat = storages[key].view(it.dtype)
        made.append(flat.as_strided(it.size(), it.stride(), it.storage_offset()))
    return made
