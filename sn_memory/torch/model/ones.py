"""Inputs that are all ones: the one thing that a plan may take from what inputs hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch.utils._pytree import tree_flatten

from .kind import Kind
from .kinds import Arguments, leaves_of


def is_ones(tensor: torch.Tensor) -> bool:
    """Whether all elements are 1. On a GPU this waits for it, as a model that looks does."""
    return bool((tensor == 1).all())


class Ones:
    """Per kind of input, the arguments that steps were planned for as all ones.

    Iterates over kinds without a word on what inputs hold.
    """

    def __init__(self) -> None:
        self._places: dict[Kind, tuple[int, ...]] = {}
        self._kinds: dict[tuple[Kind, tuple[int, ...]], Kind] = {}

    def __iter__(self) -> Iterator[Kind]:
        return iter(self._places)

    def kind(self, model: torch.nn.Module, kind: Kind, given: Arguments) -> Kind:
        """Return the kind of an input with what it holds, where a step depends on that."""
        places = self._places.get(kind)
        if places is None:
            return kind
        leaves = leaves_of(model, *given)
        ones = tuple(at for at in places if is_ones(leaves[at]))
        if not ones:
            return kind
        return self._kinds.setdefault((kind, ones), replace(kind, ones=ones))

    def noted(
        self, model: torch.nn.Module, kind: Kind, given: Arguments, flat: Iterable[int]
    ) -> Kind:
        """Return the kind that a step is for, and look at inputs of it from now on.

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
        places = [at for at, leaf in enumerate(leaves) if id(leaf) in wanted]
        bare = replace(kind, ones=()) if kind.ones else kind
        if places:
            self._places[bare] = tuple(sorted({*places, *self._places.get(bare, ())}))
        return self.kind(model, bare, given)

    def forget(self, kind: Kind) -> None:
        """Forget a kind that no step is kept for."""
        if kind.ones:
            bare = replace(kind, ones=())
            self._places.pop(bare, None)
            self._kinds.pop((bare, kind.ones), None)
