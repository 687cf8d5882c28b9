"""State that a module reads in addition to its arguments, restored when it runs again.

Between a forward pass and its backward pass anything may change: functional_call restores the
model's own parameters, a context removes its hooks, weights are frozen, an average is updated. What
was replaced is restored for the second run; what was changed in place is lost, and raises an error.
So does a tensor whose memory was replaced (`p.data = ...`), which does not change its version.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.nn.utils import parametrize

from ..errors import ReplayError
from ..model.guards import OF_TORCH
from ..model.signature import tensors
from ..model.snapshot import memory_version, set_value
from ..quirks.recurrent import refresh_flat_weights
from ..target.accelerator import is_apart, rng_state, set_rng_state

_SLOTS = tuple(
    name
    for name, value in torch.nn.Module().__dict__.items()
    if name in OF_TORCH and isinstance(value, dict)
)
# A forward that other code set on the instance is for that code to remove.
_IGNORED = OF_TORCH | {"forward"}


class RunState:
    """Snapshot of the state that modules read in addition to their arguments.

    It is restored inside `with`, for a second run, whose assignments are dropped afterwards. A
    tensor that was changed in place since the snapshot cannot be restored, and raises an error.

    modules : by the name used in errors
    arguments : of the run; not held. None if the caller keeps random numbers and arguments
    changed : buffers that the run changes, as (module, name); None to compare copies of all.
    sharded : whether FSDP2 replaces parameters
    """

    def __init__(
        self,
        modules: Mapping[str, torch.nn.Module],
        arguments: Any = None,
        changed: Sequence[tuple[torch.nn.Module, str]] | None = (),
        *,
        sharded: bool = False,
    ) -> None:
        named = {part: name for name, module in modules.items() for part in module.modules()}
        self._held = [_Held(name, part, sharded) for part, name in named.items()]
        inputs = tensors(arguments)
        devices = {value.device for value in inputs if is_apart(value.device)}
        devices |= set() if arguments is None else {torch.device("cpu")}
        self._random = {device: rng_state(device) for device in devices}
        # Inside `parametrize.cached()` a weight that was computed before is not computed again. The
        # key is the module with the parametrization, of which this may be a copy.
        self._cached = parametrize._cache_enabled, dict(parametrize._cache)
        self._compares = changed is None
        # Buffers that the run changes are copied, as the second run must read the same values.
        if changed is None:
            changed = [(held.module, name) for held in self._held for name in held.module._buffers]
        self._copies = [
            (owner, name, buffer, buffer.clone())
            for owner, name in changed
            if (buffer := owner._buffers[name]) is not None
        ]
        # All other tensors must not be changed before the second run.
        copied = {id(buffer) for buffer in self.changed}
        self._versions: list[
            tuple[torch.Tensor, weakref.ref[torch.Tensor], tuple[int, int], str]
        ] = []
        for held in self._held:
            for what, tensor in held.read():
                if id(tensor) not in copied:
                    self._expect_unchanged(tensor, what)
        for tensor in inputs:
            self._expect_unchanged(tensor, f"an input of {next(iter(modules))!r}")
        # One stack per entered `with`: several if a graph is retained.
        self._undo: list[ExitStack] = []

    def _expect_unchanged(self, tensor: torch.Tensor, what: str) -> None:
        """Raise in the second run if a tensor was changed, or its memory replaced, by then."""
        # Detached: that shares the version counter and holds the memory, but not the graph.
        self._versions.append((tensor.detach(), weakref.ref(tensor), memory_version(tensor), what))

    def end(self) -> None:
        """End the first run: drop RNG states and buffers it left unchanged, and what it set."""
        for device, state in list(self._random.items()):
            if torch.equal(state, rng_state(device)):
                del self._random[device]
        for held in self._held:
            held.forget_changed()
        if not self._compares:
            return
        copies, self._copies = self._copies, []
        for module, name, buffer, copy in copies:
            if module._buffers[name] is not buffer or not torch.equal(buffer, copy):
                self._copies.append((module, name, buffer, copy))
            else:
                owner = next(held.name for held in self._held if held.module is module)
                self._expect_unchanged(buffer, f"buffer {name} of {owner!r}")

    @property
    def changed(self) -> list[torch.Tensor]:
        """Buffers that the run changes."""
        return [buffer for _, _, buffer, _ in self._copies]

    def __enter__(self) -> None:
        for shared, own, version, what in self._versions:
            tensor = own()
            now = memory_version(shared if tensor is None else tensor)
            if now[0] != version[0]:
                raise ReplayError(
                    f"{what}, which runs again in the backward pass, was changed after its forward "
                    f"pass: version {now[0]}, expected {version[0]}. Change it after "
                    "backward(), and call the optimizer's step after that too."
                )
            if tensor is not None and now != version:
                raise ReplayError(
                    f"{what}, which runs again in the backward pass, was given other memory "
                    "(model.double(), p.data = ...) after its forward pass. Change it after "
                    "backward()."
                )
        with ExitStack() as undo:
            for buffer in self.changed:
                undo.callback(set_value, buffer, buffer.clone())
            for held in self._held:
                undo.callback(_Held(held.name, held.module, held.sharded).put, alone=True)
            for device in self._random:
                undo.callback(set_rng_state, device, rng_state(device))
            undo.callback(_set_cache, parametrize._cache_enabled, parametrize._cache)
            enabled, weights = self._cached
            _set_cache(enabled, dict(weights))
            for device, state in self._random.items():
                set_rng_state(device, state)
            for held in self._held:
                held.put()
            for module, name, buffer, copy in self._copies:
                module._buffers[name] = buffer
                set_value(buffer, copy)
            self._undo.append(undo.pop_all())

    def __exit__(self, *_: object) -> None:
        self._undo.pop().close()


def _set_cache(enabled: int, weights: Any) -> None:
    """Set the cache of `parametrize.cached()`, which is in module globals without a setter."""
    parametrize._cache_enabled, parametrize._cache = enabled, weights


class _Held:
    """Contents of a module: torch's own dictionaries, and all other attributes."""

    def __init__(self, name: str, module: torch.nn.Module, sharded: bool) -> None:
        self.name, self.module, self.sharded = name, module, sharded
        self.attributes, self.slots = self._now()
        self.requires_grad = {id(param): param.requires_grad for param in self._parameters()}

    def _now(self) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        current = self.module.__dict__
        attributes = {name: value for name, value in current.items() if name not in _IGNORED}
        # FSDP2 gathers its parameters for the second run like for the first.
        slots = (name for name in _SLOTS if not (self.sharded and name == "_parameters"))
        return attributes, {name: dict(current[name]) for name in slots}

    def _parameters(self) -> list[torch.Tensor]:
        return [param for param in self.slots.get("_parameters", {}).values() if param is not None]

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the module's own tensors."""
        kinds = {"parameter": "_parameters", "buffer": "_buffers"}
        for what, slot in kinds.items():
            for name, tensor in self.slots.get(slot, {}).items():
                if tensor is not None:
                    yield f"{what} {name} of {self.name!r}", tensor
        for name, tensor in self.attributes.items():
            if isinstance(tensor, torch.Tensor):
                yield f"attribute {name} of {self.name!r}", tensor

    def forget_changed(self) -> None:
        """Drop what the run has replaced: a second run replaces it again."""
        attributes, slots = self._now()
        missing = object()
        self.attributes = {
            name: attribute
            for name, attribute in self.attributes.items()
            if attributes.get(name, missing) is attribute
        }
        self.slots = {name: slot for name, slot in self.slots.items() if _same(slot, slots[name])}

    def put(self, *, alone: bool = False) -> None:
        """Restore the module's contents; with `alone`, remove all other attributes."""
        attributes = self.module.__dict__
        for name in attributes.keys() - self.attributes.keys() - _IGNORED if alone else ():
            del attributes[name]
        for name, value in self.attributes.items():
            if attributes.get(name) is not value:
                attributes[name] = value
        replaced = False
        for name, before in self.slots.items():
            if not _same(before, attributes[name]):
                attributes[name].clear()
                attributes[name].update(before)
                replaced = True
        for name, param in self.slots.get("_parameters", {}).items():
            required = None if param is None else self.requires_grad[id(param)]
            if param is not None and param.requires_grad != required:
                # Frozen or unfrozen since: replaced, as the user's own tensor must keep its flag.
                attributes["_parameters"][name] = param.detach().requires_grad_(required)
                replaced = True
        if replaced:
            refresh_flat_weights([self.module])


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(other[name] is value for name, value in one.items())
