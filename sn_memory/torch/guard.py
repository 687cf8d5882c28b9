"""What must be as before when a model has been traced, whatever happened meanwhile.

The model's parameters are swapped for fake ones, and its forward is run: both must leave no mark. A
forward that means to leave one (a count, a new buffer, random numbers from outside torch) would not
do so when its calls are replayed, and is refused.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

from .errors import TraceError

# The generator behind np.random.rand and its like, which models draw from.
_legacy: Any = np.random.mtrand._rand


def casting() -> list[str]:
    """Return the kinds of devices for which autocast is on."""
    return [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]


@contextmanager
def outside_autocast() -> Iterator[None]:
    """Where a backward pass runs, as torch advises: outside of the `with` of the forward pass."""
    with ExitStack() as stack:
        for kind in casting():
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def as_it_was(model: torch.nn.Module) -> Iterator[None]:
    """Put the model back as it was; refuse a forward that changed attributes of its modules."""
    modules = dict(model.named_modules())
    slots = ("_parameters", "_buffers", "_modules")
    before = [
        (path, module, dict(module.__dict__), {slot: dict(getattr(module, slot)) for slot in slots})
        for path, module in modules.items()
    ]
    changed: list[str] = []
    try:
        yield
    finally:
        for path, module, attributes, parts in before:
            changed += _differences(path, module, attributes, parts)
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for slot in slots:
                held = getattr(module, slot)
                held.clear()
                held.update(parts[slot])
        torch.clear_autocast_cache()
    if changed:
        raise TraceError(
            f"the forward pass sets {', '.join(changed[:5])}; a replay of its calls would not. "
            "Keep that in a buffer changed in place."
        )


def _differences(
    path: str,
    module: torch.nn.Module,
    attributes: dict[str, Any],
    parts: dict[str, dict[str, Any]],
) -> list[str]:
    now = module.__dict__
    names = [
        name
        for name in now.keys() | attributes.keys()
        if not name.startswith("_flat_weight") and now.get(name) is not attributes.get(name)
    ]
    for slot in ("_parameters", "_buffers"):
        held = getattr(module, slot)
        names += list(held.keys() ^ parts[slot].keys())
    return [f"{path}.{name}" if path else name for name in names]


@contextmanager
def no_chance() -> Iterator[None]:
    """Refuse a forward that draws random numbers outside torch: a replay would go one way only."""
    python, arrays = random.getstate(), _legacy.get_state(legacy=False)
    yield
    drawn = []
    if random.getstate() != python:
        random.setstate(python)
        drawn.append("random")
    if repr(_legacy.get_state(legacy=False)) != repr(arrays):
        _legacy.set_state(arrays)
        drawn.append("numpy.random")
    if drawn:
        raise TraceError(
            f"the forward pass draws from {' and '.join(drawn)}, so what it does differs from step "
            "to step. Draw with torch and compute with the result."
        )
