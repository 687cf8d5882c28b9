"""Modules that run again in the backward pass, from inputs that wait for it compressed.

torch.utils.checkpoint would do the running again. But what it makes anew lies there in plain until
used, all of a module's at once; here that is compressed as well, where it is large. And statistics
are updated once: the second run sees them as the first did, in copies.

What a first run saves is a promise, nothing more. The first that is asked for lets the module run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..compress.calls import storages_of
from ..compress.saving import Pass
from ..compress.treatments import Kept, Layout
from ..errors import ReplayError
from ..model.snapshot import version_of
from ..model.step import tensors
from ..modules.state import RunState


class _DoneError(Exception):
    """A second run has made all that was promised."""


class Promise:
    """What stands for a tensor that a second run makes."""

    nbytes = 0

    def __init__(self, run: Run, place: int) -> None:
        self._run, self._place = run, place

    def restore(self, layout: Layout) -> torch.Tensor:
        return self._run.take(self._place).restore(layout)

    def mask(self) -> Any:
        """Return what was made: a mask."""
        return self._run.take(self._place)


@dataclass(frozen=True)
class _Given:
    """A tensor that a module was given: how it is kept, and whether it was there anyway."""

    kept: Kept
    layout: Layout
    wants_gradient: bool
    left_alone: bool


class _Place(int):
    """Stands for a tensor among a module's arguments."""


class Run:
    """One run of a module: what it was given, compressed, and the state in which it began.

    Parameters
    ----------
    owner
        Has a `current` pass; the second run stands there while it lasts.
    name, module, forward
        The module, and its own forward pass.
    exact_bytes
        If what is saved inside takes no more than this in plain, it is not compressed.
    """

    def __init__(
        self,
        owner: Any,
        name: str,
        module: torch.nn.Module,
        forward: Callable[..., Any],
        exact_bytes: int,
    ) -> None:
        self._owner, self._name, self._module = owner, name, module
        self._forward, self._exact_bytes = forward, exact_bytes
        self._promised: list[tuple[torch.Size | tuple[int, ...], torch.dtype]] = []
        self._made: dict[int, Kept] = {}
        self._plain_bytes = 0

    def first(self, current: Pass, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module, and keep what it was given."""
        leaves, self._spec = tree_flatten((args, kwargs))
        # One tensor given twice is one tensor again: attention asks whether its inputs are.
        same = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
        self._given = {
            key: _Given(
                *current.given(leaf, self._name, place),
                leaf.requires_grad,
                leaf.untyped_storage()._cdata in current.left_alone,
            )
            for place, (key, leaf) in enumerate(same.items())
        }
        self._leaves = [_Place(id(leaf)) if id(leaf) in same else leaf for leaf in leaves]
        self._path = tuple(current.path)
        inside = (self._name, f"{self._name}.")
        self._counts = {
            key: count
            for key, count in current.counts.items()
            if key[0] == inside[0] or key[0].startswith(inside[1])
        }
        versions = [(leaf, version_of(leaf)) for leaf in tensors(leaves)]
        self._casts = _autocast(leaves)
        state = None
        if not self._owner.compressor.blank:
            state = RunState(self._name, self._module, leaves)
        current.first = self
        try:
            result = self._forward(*args, **kwargs)
        finally:
            current.first = None
        if any(version_of(leaf) != version for leaf, version in versions):
            raise ReplayError(
                f"{self._name}: got a module that changes its input in place; expected one that "
                "does not, as it runs again. Leave it out of recompute=, or change a copy."
            )
        if state is not None:
            state.end()
        self._state, self._resident = state, current.resident
        return result

    def promise(self, layout: Layout) -> Kept:
        """Return what stands for a tensor."""
        self._promised.append((layout.shape, layout.dtype))
        self._plain_bytes += layout.numel * layout.dtype.itemsize
        return Promise(self, len(self._promised) - 1)

    def fulfil(self, kept: Kept, layout: Layout) -> None:
        """Take a tensor of the second run."""
        place = len(self._made)
        if (layout.shape, layout.dtype) != self._promised[place]:
            raise self._other(f"{layout.shape} of {layout.dtype}", self._promised[place])
        self._made[place] = kept
        if place == len(self._promised) - 1:
            raise _DoneError

    def take(self, place: int) -> Kept:
        """Return a tensor that was promised. Asked for twice, the module runs a third time."""
        if place not in self._made:
            self._made = {}
            self._run()
        return self._made.pop(place)

    def _run(self) -> None:
        owner = self._owner
        restored = {
            key: it.kept.restore(it.layout).detach().requires_grad_(it.wants_gradient)
            for key, it in self._given.items()
        }
        leaves = [restored[it] if isinstance(it, _Place) else it for it in self._leaves]
        args, kwargs = tree_unflatten(leaves, self._spec)
        with ExitStack() as stack:
            if self._state is not None:
                stack.enter_context(self._state.again())
            for kind, enabled, dtype in self._casts:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            stack.enter_context(torch.enable_grad())
            changed = [] if self._state is None else self._state.changed
            there = [restored[key] for key, it in self._given.items() if it.left_alone]
            current = Pass(
                owner.compressor,
                self._resident,
                storages_of(there + changed),
                path=self._path,
                counts=self._counts,
                again=self,
                exactly=self._plain_bytes <= self._exact_bytes,
            )
            for key, it in self._given.items():
                current.know(restored[key], it.kept)
            before, owner.current = owner.current, current
            try:
                with current:
                    self._forward(*args, **kwargs)
            except _DoneError:
                return
            finally:
                owner.current = before
        raise self._other(f"{len(self._made)} tensors", f"{len(self._promised)}")

    def _other(self, got: object, expected: object) -> ReplayError:
        self._made = {}
        return ReplayError(
            f"{self._name}, run again, saved something else: {got}, expected {expected}. It "
            "depends on what changes between two runs. Leave it out of recompute=."
        )


def _autocast(leaves: list[Any]) -> list[tuple[str, bool, torch.dtype]]:
    """Return, per kind of device, whether autocast is on, and its type."""
    kinds = {"cpu", *(leaf.device.type for leaf in tensors(leaves))}
    return [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in sorted(kinds)
    ]
