"""A model put back after a step that must leave no mark; one that means to is refused."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, zip_longest
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from ..errors import SetsStateError, TraceError
from .modes import outside_saved_tensors_hooks
from .snapshot import SLOTS, StateSnapshot, Values, kept_by, kept_by_global_hooks

_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
# The generators behind the functions of `random` and `numpy.random`, which models draw from.
OUTSIDE_TORCH: dict[str, Any] = {
    "random": random._inst,  # type: ignore[attr-defined]
    "numpy.random": np.random.mtrand._rand,  # type: ignore[attr-defined]
}


class Generators:
    """The states of random number generators among some values, when this is made."""

    def __init__(self, values: Iterable[Any]) -> None:
        found = {id(it): it for it in values if isinstance(it, _GENERATORS)}
        self._before = [(it, _state(it)) for it in found.values()]

    def changed(self) -> bool:
        """Whether one of them was drawn from."""
        # The text of a tensor leaves values out.
        return any(
            not torch.equal(_state(it), state)
            if isinstance(it, torch.Generator)
            else repr(_state(it)) != repr(state)
            for it, state in self._before
        )

    def seed(self, number: int) -> None:
        """Let each draw as one that was made with this seed."""
        for it, _ in self._before:
            if isinstance(it, torch.Generator):
                it.manual_seed(number)
            elif isinstance(it, np.random.Generator):
                it.bit_generator.state = type(it.bit_generator)(number).state
            else:
                it.seed(number)

    def restore(self) -> None:
        """Let them go on from where they were."""
        for it, state in self._before:
            if isinstance(it, torch.Generator):
                it.set_state(state)
            elif isinstance(it, np.random.Generator):
                it.bit_generator.state = state
            elif isinstance(it, np.random.RandomState):
                it.set_state(state)
            else:
                it.setstate(state)


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.get_state() if isinstance(generator, torch.Generator) else generator.getstate()


def outside_states() -> list[str]:
    """Return the states of the generators outside torch, as something that can be compared."""
    return [repr(_state(it)) for it in OUTSIDE_TORCH.values()]


@contextmanager
def forbid_external_rng() -> Iterator[None]:
    """Refuse a forward that draws random numbers outside torch: a replay would go one way only."""
    before = {name: Generators([it]) for name, it in OUTSIDE_TORCH.items()}
    drawn = []
    try:
        yield
    finally:
        drawn = [name for name, it in before.items() if it.changed()]
        for it in before.values():
            it.restore()
    if drawn:
        raise TraceError(
            f"the forward pass draws from {' and '.join(drawn)}, so what it does differs from step "
            "to step. Draw with torch and compute with the result."
        )


class ModelSnapshot:
    """All that a step may change of a model and of what it is given, when this is made.

    Parameters
    ----------
    model, given
        What the step runs on.
    others
        Tensors and generators that it may change beside those that modules hold as attributes.
    spared
        Tensors that it changes only as training does.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        given: Any,
        others: Iterable[Any],
        spared: Iterable[torch.Tensor],
    ) -> None:
        self._modules = [
            (path, module, dict(module.__dict__), [dict(getattr(module, it)) for it in SLOTS])
            for path, module in model.named_modules()
        ]
        of_modules = (
            (_joined(path, name), value)
            for path, module, _, _ in self._modules
            for name, value in kept_by(module)
            # The slots may be full of fake tensors by the time they are looked at.
            if name not in SLOTS and not name.startswith("_flat_weight")
        )
        self._kept = StateSnapshot(chain(of_modules, kept_by_global_hooks()))
        self.given = StateSnapshot([("arguments", given)])
        leaves = (it for it in tree_leaves(given) if isinstance(it, torch.Tensor))
        flags = (*model.parameters(), *model.buffers(), *leaves)
        self._wanted = [(it, it.requires_grad) for it in flags]
        # Under fake tensors a real one that is met is computed with, and written to.
        attributes = (it for _, _, own, _ in self._modules for it in own.values())
        held = [*others, *self._kept.values(), *attributes]
        self._values = Values(held, spared)
        self.generators = Generators(held)

    def changed(self) -> list[str]:
        """Return the names of attributes that are others, or hold something else, now."""
        names = self._kept.changed()
        for path, module, attributes, slots in self._modules:
            now = module.__dict__
            other = [
                name
                for name in now.keys() | attributes.keys()
                if now.get(name) is not attributes.get(name)
            ]
            for slot, before in zip(SLOTS[:2], slots, strict=False):
                other += getattr(module, slot).keys() ^ before.keys()
            names += [_joined(path, name) for name in other if not name.startswith("_flat_weight")]
        return list(dict.fromkeys(names))

    def restore(self) -> None:
        """Let all be as it was."""
        for _, module, attributes, slots in self._modules:
            _refill(module.__dict__, attributes)
            for slot, before in zip(SLOTS, slots, strict=True):
                _refill(getattr(module, slot), before)
        for it in (self._kept, self.given):
            it.restore()
        for tensor, wanted in self._wanted:
            if tensor.requires_grad != wanted:
                tensor.requires_grad_(wanted)
        self._values.restore()
        self.generators.restore()


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _refill(held: dict[str, Any], before: dict[str, Any]) -> None:
    """Let a dict hold what it held before.

    One that still does is left alone: filled anew, the attributes of each module would take three
    times the memory, as they no longer share their names with those of its kind.
    """
    pairs = zip_longest(held.items(), before.items(), fillvalue=("", None))
    if any(now[0] != then[0] or now[1] is not then[1] for now, then in pairs):
        held.clear()
        held.update(before)


def changes_what_it_is_given() -> TraceError:
    """Return the refusal of a forward that writes into its arguments."""
    return TraceError(
        "the forward pass changes what it is given: it writes into a list, mapping or object among "
        "its arguments, as text models do into a cache of keys and values; a replay of its calls "
        "would not. Train without it."
    )


@contextmanager
def restore_model(model: torch.nn.Module, given: Any = ()) -> Iterator[None]:
    """Put the model, and what its forward is given, back as they were after it was traced.

    Refuses a forward that changed attributes of its modules, or what lists, mappings and objects
    hold: in these, in what it is given, in what hooks of the modules reach. Such a forward means to
    leave a mark (a count, a new buffer), and a replay of its calls would not.
    """
    before = ModelSnapshot(model, given, (), (*model.parameters(), *model.buffers()))
    changed: list[str] = []
    received = drawn = False
    try:
        with outside_saved_tensors_hooks():
            yield
    finally:
        # Read before it is put back, and all is put back whatever is found.
        changed, received = before.changed(), bool(before.given.changed())
        drawn = before.generators.changed()
        before.restore()
        torch.clear_autocast_cache()
    if received:
        raise changes_what_it_is_given()
    if drawn:
        raise TraceError(
            "the forward pass draws from a generator of the model's own, so what it does differs "
            "from step to step. Draw with torch's default generator and compute with the result."
        )
    if changed:
        raise SetsStateError(
            f"the forward pass sets {', '.join(changed[:5])}; a replay of its calls would not. "
            "Keep that in a buffer changed in place. If it does so in its first step only, run one "
            "step before planning."
        )
