"""Modules that run again in the backward pass, from inputs that wait for it compressed.

torch.utils.checkpoint would do the running again. But what it makes anew lies there in plain until
used, all of a module's at once; here that is compressed as well, where it is large. And statistics
are updated once: the second run sees them as the first did, in copies.

What a first run saves is a promise, nothing more. The first that is asked for lets the module run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import get_device_states, set_device_states

from ..compress.calls import storages_of
from ..compress.saving import Pass
from ..compress.treatments import Kept, Layout
from ..errors import ReplayError
from ..model.step import tensors


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
        versions = [(leaf, leaf._version) for leaf in tensors(leaves)]
        state = None if self._owner.compressor.blank else _State(self._module, leaves)
        current.first = self
        try:
            result = self._forward(*args, **kwargs)
        finally:
            current.first = None
        if any(leaf._version != version for leaf, version in versions):
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
        in_force = nullcontext() if self._state is None else self._state.again()
        with in_force, torch.enable_grad():
            copies = [] if self._state is None else self._state.copies
            there = [restored[key] for key, it in self._given.items() if it.left_alone]
            current = Pass(
                owner.compressor,
                self._resident,
                storages_of(there + copies),
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


class _State:
    """What a run depends on beside its arguments, as it was when it began.

    Random numbers, autocast, the modules' modes; buffers that the run changed.
    """

    def __init__(self, module: torch.nn.Module, leaves: list[Any]) -> None:
        self._devices, self._device_states = get_device_states(*leaves)
        self._random: torch.Tensor | None = torch.get_rng_state()
        kinds = {"cpu", *(leaf.device.type for leaf in tensors(leaves))}
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in sorted(kinds)
        ]
        self._modes = [(it, it.training) for it in module.modules()]
        self._weights = [(it, it._version) for it in module.parameters()]
        self._buffers = [
            (it, name, buffer, buffer.clone())
            for it in module.modules()
            for name, buffer in it._buffers.items()
            if buffer is not None
        ]

    def end(self) -> None:
        """Forget what the run left as it was."""
        if self._random is not None and torch.equal(self._random, torch.get_rng_state()):
            self._random = None
        self._buffers = [
            (module, name, buffer, before)
            for module, name, buffer, before in self._buffers
            if module._buffers[name] is not buffer or not torch.equal(buffer, before)
        ]

    @property
    def copies(self) -> list[torch.Tensor]:
        """Buffers that stand in for others just now."""
        return [module._buffers[name] for module, name, *_ in self._buffers]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Put it all in force, and back afterwards."""
        if any(it._version != version for it, version in self._weights):
            raise ReplayError(
                "a parameter of a module that runs again was changed after its forward pass. Call "
                "backward() before the optimizer's step."
            )
        buffers = [(module, name, module._buffers[name]) for module, name, *_ in self._buffers]
        modes = [(module, module.training) for module, _ in self._modes]
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=self._devices))
            if self._random is not None:
                torch.set_rng_state(self._random)
            set_device_states(self._devices, self._device_states)
            for kind, enabled, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            try:
                for module, training in self._modes:
                    module.training = training
                for module, name, _, before in self._buffers:
                    module._buffers[name] = before.clone()
                yield
            finally:
                for module, name, buffer in buffers:
                    module._buffers[name] = buffer
                for module, training in modes:
                    module.training = training
