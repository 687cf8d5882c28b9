"""What a module's attributes hold, as something that can be compared: settings, also in containers.

LoRA keeps a scale per adapter in a dict, others a schedule in a list. What a forward reads there is
in the recorded calls as it was, just as an attribute of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Set
from typing import Any

import torch

from .marks import HOOKS

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CONTAINERS = (Mapping, list, tuple, Set, deque)
# Deeper or larger ones are compared by identity and size: they are looked at in each step.
_DEPTH = 6
_LARGE = 1000
# torch's own notes in a module: tensors, modules, hooks, and of what kind these are.
OF_TORCH = frozenset(torch.nn.Module().__dict__) - {"training"}


def plain(value: Any) -> Hashable:
    """Return a plain value with its type: True, 1 and 1.0 are equal in Python, as 0.0 and -0.0."""
    return type(value), repr(value) if isinstance(value, float) else value


def contents(value: Any, *, depth: int = 0) -> Hashable | None:
    """Return what a value holds; None for an object that is no setting and no container.

    Tensors count by identity, as do objects in containers.
    """
    if isinstance(value, torch.Tensor):
        return id(value)
    if isinstance(value, PLAIN):
        return plain(value)
    if not isinstance(value, _CONTAINERS):
        return id(value) if depth else None
    if depth == _DEPTH or len(value) > _LARGE:
        return type(value), id(value), len(value)
    if isinstance(value, Mapping):
        held = [
            (contents(k, depth=depth + 1), contents(v, depth=depth + 1)) for k, v in value.items()
        ]
        return type(value), tuple(held)
    items = [contents(it, depth=depth + 1) for it in value]
    return type(value), frozenset(items) if isinstance(value, Set) else tuple(items)


def hooks(module: torch.nn.Module) -> tuple[int, ...]:
    """Return the numbers of a module's hooks; torch gives none twice.

    Those that transformers registers when a model is first asked for hidden states are left out:
    they do nothing but while it collects some, and then other outputs were asked for.
    """
    return tuple(
        number
        for slot in HOOKS
        for number, hook in getattr(module, slot).items()
        if getattr(hook, "__module__", "") != "transformers.utils.output_capturing"
    )
