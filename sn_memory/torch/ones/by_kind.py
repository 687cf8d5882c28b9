"""Per kind of input, which arguments are all ones: all that a plan takes from what they hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch.utils._pytree import tree_flatten

from ..model.kind import Kind
from ..model.kinds import Arguments, leaves_of
from .values import is_ones


class Ones:
    """The arguments that steps were planned for as all ones; and per kind, whether they are.

    An argument that counts in one kind of input counts in all: a shape that came masked first is
    told from ones of that shape, which the model computes otherwise.

    Iterates over kinds without a word on what inputs hold.
    """

    def __init__(self) -> None:
        # Name of an argument, and the place in it.
        self._names: set[tuple[str, int]] = set()
        # Where these are in each kind.
        self._places: dict[Kind, tuple[int, ...]] = {}
        self._kinds: dict[tuple[Kind, tuple[int, ...]], Kind] = {}

    def __iter__(self) -> Iterator[Kind]:
        return iter(self._places)

    def kind(self, model: torch.nn.Module, kind: Kind, given: Arguments) -> Kind:
        """Return the kind of an input with what it holds, where a step depends on that."""
        if not self._names:
            return kind
        places = self._places.get(kind)
        if places is None:
            names = enumerate(_names(kind))
            places = tuple(at for at, name in names if name in self._names)
            self._places[kind] = places
        if not places:
            return kind
        leaves = leaves_of(model, *given)
        ones = tuple(at for at in places if is_ones(leaves[at]))
        if not ones:
            return kind
        if (kind, ones) not in self._kinds:
            self._kinds[kind, ones] = replace(kind, ones=ones)
        return self._kinds[kind, ones]

    def noted(
        self, model: torch.nn.Module, kind: Kind, given: Arguments, flat: Iterable[int]
    ) -> Kind:
        """Return the kind that a step is for, and look at such arguments from now on.

        Parameters
        ----------
        model, kind, given
            What the step was planned for.
        flat
            Places among the flat arguments of which it counts whether they are all ones.
        """
        arguments = tree_flatten(given)[0]
        wanted = {id(arguments[place]) for place in flat}
        leaves = leaves_of(model, *given)
        bare = replace(kind, ones=()) if kind.ones else kind
        names = zip(_names(bare), leaves, strict=True)
        found = {name for name, leaf in names if id(leaf) in wanted}
        if not found <= self._names:
            self._names |= found
            self._places.clear()
        return self.kind(model, bare, given)

    def forget(self, kind: Kind) -> None:
        """Forget a kind that no step is kept for; not which arguments count."""
        bare = replace(kind, ones=()) if kind.ones else kind
        self._places.pop(bare, None)
        self._kinds.pop((bare, kind.ones), None)


def _names(kind: Kind) -> list[tuple[str, int]]:
    """Return, for each thing that arguments are made of, the argument and the place in it."""
    return [(name, at) for name, (_, leaves) in kind.arguments for at in range(len(leaves))]
