"""Modules that could run again: what each is given and what its forward pass costs.

Costs are counted, not timed: with the same model and batch the same modules are chosen, whatever
else the machine does.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ...activations import Unit
from ...activations.rerun import INPUT
from ..compress.calls import MIN_ELEMENTS
from ..compress.saving import Pass
from ..model.snapshot import version_of
from ..model.step import tensors

_OPERATIONS_PER_BYTE = 10.0
"""That take as long as to read or write a byte; 5 to 15 on CPU cores."""
# From inputs that were rounded a second run would draw another number of times.
_DRAWS_BY_VALUE = {
    torch.ops.aten.rrelu_with_noise.default,
    torch.ops.aten.rrelu_with_noise_.default,
}
_PLAIN = (torch.Tensor, int, float, complex, bool, str, type(None), torch.dtype, torch.device)


@dataclass
class _Seen:
    """A module, over all its calls of one forward pass."""

    work: float = 0.0
    inputs: dict[str, int] = field(default_factory=dict)
    repeatable: bool = True


@dataclass
class _Running:
    module: torch.nn.Module
    name: str
    given: list[tuple[torch.Tensor, int]]
    attributes: dict[str, Any]
    chance: tuple[Any, Any]


class Units(TorchDispatchMode):
    """Watches one forward pass, as a context; it is told when modules begin and end.

    A module that sets attributes, draws from Python's or NumPy's random numbers, changes its input
    in place or is given what is no tensor, number or text would not do the same when run again.
    """

    def __init__(self, current: Pass) -> None:
        super().__init__()
        self._pass = current
        self._seen: dict[str, _Seen] = {}
        self._running: list[_Running] = []
        self._work = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        work = _work(func, args, kwargs, result)
        self._work += work
        for name in {run.name for run in self._running}:
            self._seen[name].work += work
            if func in _DRAWS_BY_VALUE:
                self._seen[name].repeatable = False
        return result

    def enter(self, module: torch.nn.Module, name: str, arguments: Any) -> None:
        """A module begins."""
        seen = self._seen.setdefault(name, _Seen())
        given = tensors(arguments)
        if not all(isinstance(leaf, _PLAIN) for leaf in tree_leaves(arguments)):
            seen.repeatable = False
        for place, tensor in enumerate(given):
            there = tensor.untyped_storage()._cdata in self._pass.left_alone
            if not there and tensor.numel() >= MIN_ELEMENTS and tensor.is_floating_point():
                group = self._pass.group(tensor, f"{name}/{INPUT}/{place}")
                seen.inputs[group] = tensor.numel()
        versions = [(tensor, version_of(tensor)) for tensor in given]
        attributes = dict(module.__dict__)
        self._running.append(_Running(module, name, versions, attributes, _chance()))

    def leave(self) -> None:
        """The module that began last ends."""
        run = self._running.pop()
        now = run.module.__dict__
        same = now.keys() == run.attributes.keys() and all(
            now[key] is value for key, value in run.attributes.items()
        )
        unchanged = all(version_of(tensor) == version for tensor, version in run.given)
        if not (same and unchanged and _chance() == run.chance):
            self._seen[run.name].repeatable = False

    def found(self) -> Iterator[Unit]:
        """What may run again, after the pass."""
        marked = [name for name, it in self._seen.items() if not it.repeatable]
        for name, it in self._seen.items():
            inside = any(f"{other}.".startswith(f"{name}.") for other in marked)
            if name and not inside:
                yield Unit(name, it.work / max(self._work, 1e-9), it.inputs)


def _work(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
    """Bytes read and written, or what operations count in these; nothing for a view."""
    read, made = tensors((args, kwargs)), tensors(result)
    known = {tensor.untyped_storage()._cdata for tensor in read}
    views = all(tensor.untyped_storage()._cdata in known for tensor in made)
    if views and not func._schema.is_mutable:
        return 0.0
    moved = sum(tensor.numel() * tensor.element_size() for tensor in (*read, *made))
    count = flop_registry.get(func.overloadpacket)
    operations = count(*args, **kwargs, out_val=result) if count is not None else 0
    return max(float(moved), operations / _OPERATIONS_PER_BYTE)


def _chance() -> tuple[Any, str]:
    legacy: Any = np.random.mtrand._rand  # type: ignore[attr-defined]
    return random.getstate(), repr(legacy.get_state(legacy=False))
