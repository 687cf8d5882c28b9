"""The kind of an input, known at a glance while the model is as it was in the step before.

To make out a kind, all that a forward may read from each module is gone through (`kinds.py`): some
forty microseconds a module, in each step. Hardly ever has any of it changed. So here are the
attributes as they were, of all modules in one list; where they are the same objects still, and
lists and mappings among them hold the same, an input of the same form is of the same kind.

Of tensors and objects the address and the type are compared, so that none is kept alive by this.

Where nothing at all was assigned since, which is the rule, compiled code sees that: a U-Net's 55
modules have 1,100 attributes, and to take each in hand in Python cost 0.2 ms of a step of 27.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple

import torch

from ...base.native import core
from .contents import OF_TORCH, PLAIN, contents, plain
from .guard import casting
from .kind import Kind
from .kinds import Arguments, form_of_leaf, kind_of
from .marks import GLOBAL_HOOKS, HOOKS

# So many inputs of other forms are known at a glance.
_INPUTS = 256
_SLOTS = ("_parameters", "_buffers", "_modules")
_WANTED = attrgetter("requires_grad")
_LEAVES = {bool, int, float, str, type(None)}


class Glance(NamedTuple):
    """What a step needs to know of its model and input.

    kind : None if an argument cannot be compared
    """

    kind: Kind | None
    parameters: list[torch.nn.Parameter]
    buffers: list[torch.Tensor]


class Recent:
    """The kinds of the inputs that came since the model last changed."""

    def __init__(self) -> None:
        self._seen: _Seen | None = None
        self._kinds: dict[Hashable, Kind] = {}

    def glance(
        self,
        model: torch.nn.Module,
        arguments: Arguments,
        noted: tuple[frozenset[str], ...],
        known: Iterable[Kind],
    ) -> Glance:
        """Return the kind of an input, and what the model has.

        Parameters
        ----------
        model, arguments, noted
            As for `kinds.kind_of`.
        known
            Kinds of which one is returned as it stands here if it is this.
        """
        form = _form(*arguments)
        there = self._seen.tensors(model) if self._seen else None
        if there is None:
            self._seen = _Seen(model, noted[0])
            self._kinds.clear()
        elif form in self._kinds:
            return Glance(self._kinds[form], *there)
        kind = kind_of(model, *arguments, noted)
        if kind is not None and form is not None:
            if len(self._kinds) == _INPUTS:
                self._kinds.clear()
            self._kinds[form] = kind = next((it for it in known if it == kind), kind)
        return Glance(kind, list(model.parameters()), list(model.buffers()))


class _Seen:
    """The attributes of a model's modules as they were.

    The model itself is not held, only what is in it: it holds who holds this.
    """

    def __init__(self, model: torch.nn.Module, noted: frozenset[str]) -> None:
        inside = list(model.modules())[1:]
        self._noted = noted
        self._dicts = [it.__dict__ for it in inside]
        self._slots = [getattr(it, slot) for it in (model, *inside) for slot in _SLOTS]
        # Hooks of the outermost module run around its forward.
        hooks = [*GLOBAL_HOOKS, *(getattr(it, slot) for it in inside for slot in HOOKS)]
        self._sized = [*self._dicts, *self._slots, *hooks]
        self._lengths = [*map(len, self._sized)]
        self._core = core()
        self._contents = self._core.contents(self._sized)
        # No name is new as long as there are as many and these are there.
        self._named = [*self._slots, *filter(None, hooks)]
        own = self._own(model)
        self._own_names = [*own]
        self._names = [*chain.from_iterable(self._named)]
        # Held, so that none of their addresses is given to another; all else is not.
        self._lasting: list[Any] = []
        self._getters: list[tuple[Callable[[Any], Any], dict[str, Any]]] = []
        self._others: list[tuple[dict[str, Any], str, Hashable]] = []
        for attributes in self._dicts:
            lasting = [name for name in attributes if _lasts(name, attributes[name])]
            self._getters.append((itemgetter(*lasting), attributes))
            self._lasting += itemgetter(*lasting)(attributes)
            self._others += [
                (attributes, name, _told(value))
                for name, value in attributes.items()
                if name not in lasting and name not in OF_TORCH
            ]
        self._own_told = [*map(_told, own.values())]
        # What its own attributes are, unless one may hold something else and be the same object.
        fixed = all(_lasts(name, value) for name, value in own.items())
        self._own_contents = self._core.contents([model.__dict__]) if fixed else None
        self._own_lasting = [*own.values()] if fixed else []
        # Of each module most of the three are empty, and stay so while there are as many.
        self._full = [*filter(None, self._slots)]
        held = self._held()
        self._ids = [*map(id, held)]
        place = {id(it): at for at, it in reversed([*enumerate(held)])}
        self._parameters = _places(place[id(it)] for it in model.parameters())
        self._buffers = _places(place[id(it)] for it in model.buffers())
        self._wanted = [it.requires_grad for it in model.parameters()]

    def tensors(self, model: torch.nn.Module) -> tuple[list[Any], list[Any]] | None:
        """Return all parameters and buffers, if all is as it was."""
        if not self._same(self._own_contents, [model.__dict__]):
            own = self._own(model)
            if [*own] != self._own_names or [*map(_told, own.values())] != self._own_told:
                return None
        try:
            if not self._same(self._contents, self._sized) and not self._alike():
                return None
            if any(_told(it[name]) != told for it, name, told in self._others):
                return None
        except KeyError:
            return None
        held = self._held()
        parameters = self._parameters(held)
        if [*map(_WANTED, parameters)] != self._wanted:
            return None
        return parameters, self._buffers(held)

    def _same(self, contents: Any, dicts: list[dict[str, Any]]) -> bool:
        """Whether dictionaries are known to hold the objects that they held."""
        return bool(contents) and self._core.unchanged(contents, dicts)

    def _alike(self) -> bool:
        """Whether all is as it was, though perhaps in other objects. May raise KeyError."""
        if [*map(len, self._sized)] != self._lengths:
            return False
        if [*chain.from_iterable(self._named)] != self._names:
            return False
        if [*map(id, self._held())] != self._ids:
            return False
        lasting = [*chain.from_iterable([getter(it) for getter, it in self._getters])]
        return all(map(is_, lasting, self._lasting)) or all(map(_is_equal, lasting, self._lasting))

    def _own(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return the attributes that count of the outermost module; of the others all do."""
        kind = type(model)
        return {
            name: value
            for name, value in model.__dict__.items()
            if name in self._noted or name in _SLOTS or hasattr(kind, name)
        }

    def _held(self) -> list[Any]:
        return [*chain.from_iterable(map(dict.values, self._full))]


def _places(places: Iterable[int]) -> Callable[[list[Any]], list[Any]]:
    """Return what takes the items at some places of a list."""
    found = [*places]
    if len(found) < 2:
        return lambda held: [held[at] for at in found]
    getter = itemgetter(*found)
    return lambda held: [*getter(held)]


def _lasts(name: str, value: Any) -> bool:
    """Whether an attribute holds the same while it is the same object, or holds torch's own."""
    return name in _SLOTS or name in HOOKS or (_is_fixed(value) and name not in OF_TORCH)


def _is_fixed(value: Any) -> bool:
    """Whether a value is a number or the like, or a tuple of them: a size, a stride."""
    return isinstance(value, PLAIN) or (type(value) is tuple and all(map(_is_fixed, value)))


def _is_equal(value: Any, before: Any) -> bool:
    """Whether a value is the one from before, or another that holds the same for good."""
    return value is before or (
        _is_fixed(value) and _is_fixed(before) and _told(value) == _told(before)
    )


def _told(value: Any) -> Hashable:
    """Return what an attribute is compared by: what it holds, or which object it is."""
    held = contents(value)
    return (type(value), id(value)) if held is None else held


def _form(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable | None:
    """Return the form of arguments as they are written; None for one of another class."""
    casts = casting()
    forms: list[Hashable] = [tuple(kwargs), *casts, *map(torch.get_autocast_dtype, casts)]
    first: dict[int, int] = {}
    waiting: list[Any] = [args, *kwargs.values()]
    for it in waiting:
        kind = type(it)
        if isinstance(it, torch.Tensor):
            forms.append(form_of_leaf(it, first, len(forms)))
        elif kind in _LEAVES:
            forms.append(plain(it))
        elif kind is list or kind is tuple:
            forms.append((kind, len(it)))
            waiting += it
        elif kind is dict:
            forms.append((kind, *it))
            waiting += it.values()
        else:
            return None
    return tuple(forms)
