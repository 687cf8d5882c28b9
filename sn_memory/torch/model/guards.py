"""Guards: the module state that a trace read, compared before each planned step.

If a dropout rate changes between steps, the recorded calls still have its old value; the same holds
for a number in a list, a function of a module, or a field of its configuration. So the names that a
forward reads are recorded while it is traced (`recorded_reads`); their contents are part of the
signature of the input (`signature_of`), and a step is valid for signatures with the same contents.

Evaluating all reads takes some microseconds per module, and they hardly ever change. So
`GuardCache` keeps what was read: compiled code compares the dictionaries of modules and objects by
the addresses in them, and Python only what is in no dictionary. A U-Net's 55 modules have 1,100
attributes; comparing each in Python took 0.2 ms of a 27 ms step.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, zip_longest
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from ...base.errors import core
from .modes import casting
from .sharded import is_elsewhere
from .signature import (
    Arguments,
    InputSignature,
    Settings,
    alike,
    form_of_leaf,
    forms_of,
    is_hashable,
    is_ones,
    leaves_of,
    plain,
)
from .snapshot import GLOBAL_HOOKS, HOOKS, OPAQUE, SLOTS, TRACING_HOOKS, attributes_held

_Value = TypeVar("_Value", bound=Hashable)
# Per module, the names that count; for modules beyond the last entry, all names count.
Reads = tuple[frozenset[str], ...]

# Attributes that torch gives every module: its tensors, modules and hooks, and flags of hooks.
OF_TORCH = frozenset(torch.nn.Module().__dict__) - {"training"}
# Methods that an instance may override, as accelerate does. No other method of torch.nn.Module
# counts, and neither does `_compiled_call_impl`, which computes the same.
_CALLED = frozenset({"forward", "_call_impl"})
_NOT_COUNTED = OF_TORCH.union(dir(torch.nn.Module)) - _CALLED


# What a forward reads


# Per recording, the names read so far, by the id of the module.
_RECORDINGS: list[dict[int, set[str]]] = []
_RECORDING = threading.Lock()
# Code that accesses a module's `__dict__` without reading its settings.
_NO_READERS = (
    str(Path(torch.nn.modules.module.__file__)),
    str(Path(__file__).resolve().parents[2]),
)


def _reading(module: Any, name: str) -> Any:
    """Replacement of the modules' `__getattribute__` while a forward is recorded."""
    for recording in _RECORDINGS:
        names = recording.get(id(module))
        if names is None:
            # A submodule may refer to the planned model while its plain twin is traced; both share
            # the same dictionary of modules.
            own = object.__getattribute__(module, "__dict__").get("_modules")
            names = recording.get(id(own))
        if names is None:
            continue
        if name != "__dict__":
            names.add(name)
        elif not sys._getframe(1).f_code.co_filename.startswith(_NO_READERS):
            names |= every_name(module)
    return object.__getattribute__(module, name)


@contextmanager
def recorded_reads(model: torch.nn.Module) -> Iterator[Callable[[], Reads]]:
    """Record which attributes of a model's modules are read inside; yield a getter for them."""
    modules = list(model.modules())
    recording: dict[int, set[str]] = {id(module): set() for module in modules}
    # The key by which `_reading` recognizes the model's planned twin.
    recording[id(model.__dict__["_modules"])] = recording[id(model)]
    kind: Any = torch.nn.Module
    with _RECORDING:
        _RECORDINGS.append(recording)
        kind.__getattribute__ = _reading
    try:
        yield lambda: _reads_of(_counted(recording[id(module)]) for module in modules)
    finally:
        with _RECORDING:
            # By identity: the dictionaries of two recordings may be equal.
            _RECORDINGS[:] = [other for other in _RECORDINGS if other is not recording]
            if not _RECORDINGS:
                del kind.__getattribute__


def _counted(names: Iterable[str]) -> frozenset[str]:
    return frozenset(
        name
        for name in (*names, "training")
        if name not in _NOT_COUNTED and not name.startswith(("__", "_flat_weight"))
    )


def _shared(values: Iterable[_Value]) -> tuple[_Value, ...]:
    """Deduplicate equal values into one object, as many modules and tensors are alike."""
    met: dict[_Value, _Value] = {}
    return tuple(met.setdefault(value, value) for value in values)


def _reads_of(names_of: Iterable[frozenset[str]]) -> Reads:
    # A forward assigned to the outermost instance runs around the planned one.
    return _shared(names if place else names - _CALLED for place, names in enumerate(names_of))


def every_name(module: torch.nn.Module) -> frozenset[str]:
    """Return all names that a forward may read from a module, except those of torch.nn.Module."""
    own = object.__getattribute__(module, "__dict__")
    return _counted({*own, *dir(type(module))})


def every_read(model: torch.nn.Module) -> Reads:
    """Return all current names, which count if no forward could be recorded."""
    return _reads_of(map(every_name, model.modules()))


def joined(reads: Reads, others: Reads) -> Reads:
    """Return the union of two reads; `reads` itself if the others add nothing."""
    both = zip_longest(reads, others, fillvalue=frozenset[str]())
    pairs = _reads_of(mine | theirs for mine, theirs in both)
    return reads if pairs == reads else pairs


# What the names hold


_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
# Compared by their repr: before Python 3.12 a slice has no hash.
_BY_TEXT = (range, slice)
_CONTAINERS = (Mapping, list, tuple, Set, deque)
# Levels of containers that are followed; an object counts as two, and configurations nest two.
_ROOM = 6


class _Same:
    """Compares by an object's identity, by a weak reference where the object allows one."""

    def __init__(self, value: Any) -> None:
        self._hash = id(value)
        self._value: Callable[[], Any]
        try:
            self._value = weakref.ref(value)
        except TypeError:
            self._value = lambda: value

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        mine = self._value()
        return isinstance(other, _Same) and mine is not None and mine is other._value()


def contents(value: Any, watch: _Watch | None = None, room: int = _ROOM) -> Hashable:
    """Return the contents of a value in a comparable form.

    Recurses into containers and objects; tensors, modules and functions count by identity.

    watch : receives everything whose change would change the result
    """
    if isinstance(value, _PLAIN):
        content: Hashable = plain(value)
    elif isinstance(value, _BY_TEXT):
        content = type(value), repr(value)
    elif isinstance(value, np.ndarray | np.generic):
        # A hash of the values rather than a copy of them.
        content = (type(value), value.dtype.str, value.shape, hash(value.tobytes()))
    elif not isinstance(value, _CONTAINERS):
        attributes = attributes_held(value) if room > 0 and not isinstance(value, OPAQUE) else {}
        held = tuple((name, contents(own, watch, room - 2)) for name, own in attributes.items())
        content = (_Same(value), held) if held else _Same(value)
    elif room <= 0:
        content = type(value), id(value), len(value)
    elif isinstance(value, Mapping):
        pairs = [
            (contents(key, watch, room - 1), contents(item, watch, room - 1))
            for key, item in value.items()
        ]
        content = type(value), tuple(pairs)
    else:
        items = [contents(item, watch, room - 1) for item in value]
        content = type(value), frozenset(items) if isinstance(value, Set) else tuple(items)
    if watch is not None:
        watch.add(value, content)
    return content


class _Watch:
    """Watches the parts of some values, to detect quickly whether any of them has changed."""

    def __init__(self) -> None:
        # Compared by the addresses of their items.
        self.dicts: list[dict[Any, Any]] = []
        self._containers: list[tuple[Any, list[int]]] = []
        # Values outside dictionaries: arrays, objects with slots.
        self._others: list[tuple[Any, Hashable]] = []
        self._objects: list[tuple[Any, dict[str, Any]]] = []
        self.of_classes: dict[tuple[type, str], Any] = {}
        # An address can be reused only once its object is gone. So numbers are kept alive, and the
        # end of tensors and objects is noted.
        self._kept: list[Any] = []
        self._references: list[Any] = []
        self._gone: list[Any] = []

    def add(self, value: Any, content: Hashable) -> None:
        """Watch a value with these contents; its items are added separately."""
        if type(value) is dict:
            self.dicts.append(value)
        elif isinstance(value, _PLAIN + _BY_TEXT):
            self._kept.append(value)
        elif isinstance(value, Mapping | np.ndarray):
            self._others.append((value, content))
        elif isinstance(value, _CONTAINERS):
            self._containers.append((value, [*map(id, value)]))
        else:
            self.identity(value)
            if not isinstance(content, tuple):
                return  # compared by identity alone
            held = getattr(value, "__dict__", None)
            if type(held) is dict:
                self.dicts.append(held)
                self._objects.append((value, held))
            if any("__slots__" in kind.__dict__ for kind in type(value).__mro__):
                self._others.append((value, content))

    def identity(self, value: Any) -> None:
        """Watch that a value is still alive."""
        try:
            self._references.append(weakref.ref(value, self._gone.append))
        except TypeError:
            self._kept.append(value)

    def begin(self) -> None:
        """Note the contents of the dictionaries, once all of them are added."""
        self._known = core().contents(self.dicts)

    def holds(self) -> bool:
        """Whether nothing is known to have changed."""
        return (
            not self._gone
            and bool(self._known)
            and core().unchanged(self._known, self.dicts)
            and all([*map(id, container)] == addresses for container, addresses in self._containers)
            and all(contents(value) == content for value, content in self._others)
            and all(value.__dict__ is held for value, held in self._objects)
            and all(
                getattr(kind, name, None) is value
                for (kind, name), value in self.of_classes.items()
            )
        )


def hooks(module: torch.nn.Module) -> tuple[int, ...]:
    """Return the ids of a module's hooks; torch never reuses one.

    The hooks that transformers registers when hidden states are first requested are left out: they
    act only while it collects some, and then the arguments differ as well.
    """
    return tuple(
        number
        for slot in HOOKS
        for number, hook in getattr(module, slot).items()
        if getattr(hook, "__module__", "") != "transformers.utils.output_capturing"
    )


def _held_by(module: torch.nn.Module, name: str, watch: _Watch | None) -> Hashable:
    """Return the contents of a module's or its class's attribute; None for methods and the like."""
    if name in module.__dict__:
        return contents(module.__dict__[name], watch)
    kind = type(module)
    value = next((base.__dict__[name] for base in kind.__mro__ if name in base.__dict__), None)
    if value is None or not isinstance(value, _PLAIN):
        return None
    if watch is not None:
        watch.of_classes[kind, name] = value
    return "of its class", plain(value)


def settings_of(
    model: torch.nn.Module, reads: Reads, watch: _Watch | None = None
) -> tuple[Settings, ...]:
    """Return what counts of each module: class, hooks, tensor names, and the attributes read.

    The class and hooks of the outermost module do not count: the planned model has another class,
    and its hooks run around the planned forward. Global hooks count once, with the outermost.
    """
    # Each dict is copied atomically, as a trace in another thread may add hooks of this package.
    of_all = [number for hooks in GLOBAL_HOOKS for number in tuple(hooks)]
    settings, met = [], dict[int, tuple[int, str]]()
    for place, module in enumerate(model.modules()):
        names = reads[place] if place < len(reads) else every_name(module)
        if place:
            held: list[tuple[str, Any]]
            held = [("its class", type(module)), ("its hooks", hooks(module))]
        else:
            numbers = tuple(hook for hook in of_all if hook not in TRACING_HOOKS)
            held = [("hooks of all modules", numbers)]
        # A recorded step takes the tensors in the order of the modules' dictionaries.
        held.append(("its order of tensors", _order(module, place, met)))
        settings.append(
            frozenset((*held, *((name, _held_by(module, name, watch)) for name in names)))
        )
    return _shared(settings)


def _order(
    module: torch.nn.Module, place: int, met: dict[int, tuple[int, str]]
) -> tuple[Hashable, ...]:
    """Return the names in a module's slots; for a shared value also where it was first seen."""
    order: list[Hashable] = []
    for name, value in chain.from_iterable(getattr(module, slot).items() for slot in SLOTS):
        own = place, name
        first = own if value is None else met.setdefault(id(value), own)
        order.append(name if first == own and value is not None else (name, first))
    return tuple(order)


def signature_of(
    model: torch.nn.Module,
    arguments: Arguments,
    settings: tuple[Settings, ...],
    *,
    loosely: bool = False,
) -> InputSignature | None:
    """Return the signature of an input; None if an argument cannot be compared.

    model : the plain or the planned one
    loosely : as in `forms_of`
    """
    signature = InputSignature(
        forms_of(model, arguments, loosely=loosely),
        tuple((kind, torch.get_autocast_dtype(kind)) for kind in casting()),
        tuple(param.requires_grad for param in model.parameters()),
        _forms_of_tensors(model),
        any(map(is_elsewhere, model.parameters())),
        settings,
    )
    return signature if is_hashable(signature) else None


def _forms_of_tensors(model: torch.nn.Module) -> tuple[Hashable, ...]:
    """Return size, strides and type of parameters and buffers, which e.g. `model.to` changes."""
    return _shared(
        (tensor.size(), tensor.layout is torch.strided and tensor.stride(), tensor.dtype)
        for tensor in chain(model.parameters(), model.buffers())
    )


def _looked_at(signature: InputSignature, value_guards: Set[tuple[str, int]]) -> list[int]:
    return [at for at, name in enumerate(signature.leaf_names()) if name in value_guards]


def _ones(places: list[int], model: torch.nn.Module, arguments: Arguments) -> tuple[int, ...]:
    leaves = leaves_of(model, arguments) if places else []
    return tuple(at for at in places if is_ones(leaves[at]))


# At each step


# The signature (None if an argument cannot be compared), the model's parameters and its buffers.
Lookup = tuple[InputSignature | None, list[torch.nn.Parameter], list[torch.Tensor]]
# Most forms of arguments that are remembered; each text length is one.
_INPUTS = 256


class GuardCache:
    """What steps depend on, and the signatures of inputs since that last changed.

    reads : what the steps read from modules
    value_guards : leaves of arguments, as name and index, for which steps depend on whether they
        are all ones. A leaf that counts for one signature counts for all: a mask that was not all
        ones at first must not match ones of that shape, for which the model runs other ops.
    """

    def __init__(self, before: GuardCache | None = None) -> None:
        self.reads: Reads = before.reads if before else ()
        self.value_guards: set[tuple[str, int]] = {*before.value_guards} if before else set()
        self._model: _ModelWatch | None = None
        # Per form of arguments, the leaves to look at; per form and all-ones leaves, the signature.
        self._places: dict[Hashable, list[int]] = {}
        self._signatures: dict[tuple[Hashable, tuple[int, ...]], InputSignature] = {}

    def add(
        self,
        signature: InputSignature,
        model: torch.nn.Module,
        arguments: Arguments,
        reads: Reads,
        value_places: Iterable[int],
    ) -> InputSignature:
        """Return a step's signature; what it depends on is compared from now on.

        value_places : indices of flat arguments for which it matters whether they are all ones
        """
        self.reads = joined(self.reads, reads)
        flat = tree_leaves(arguments)
        wanted = {id(flat[place]) for place in value_places}
        if signature.free:
            # Without the values left out, a signature has fewer leaves than the input.
            signature = replace(signature, arguments=forms_of(model, arguments, loosely=True))
        names = zip(signature.leaf_names(), leaves_of(model, arguments), strict=True)
        names_of_wanted = {name for name, leaf in names if id(leaf) in wanted}
        if not names_of_wanted <= self.value_guards:
            self.value_guards |= names_of_wanted
            self._places.clear()
        kept = replace(signature, settings=settings_of(model, reads), free=())
        return self._with_ones(kept, model, arguments).without(signature.free)

    def signature_of(
        self, model: torch.nn.Module, arguments: Arguments, *, loosely: bool = False
    ) -> InputSignature | None:
        """Return the signature of an input with all that steps depend on; see `signature_of`."""
        signature = signature_of(model, arguments, settings_of(model, self.reads), loosely=loosely)
        return signature and self._with_ones(signature, model, arguments)

    def _with_ones(
        self, signature: InputSignature, model: torch.nn.Module, arguments: Arguments
    ) -> InputSignature:
        ones = _ones(_looked_at(signature, self.value_guards), model, arguments)
        return replace(signature, ones=ones) if ones != signature.ones else signature

    def lookup(
        self, model: torch.nn.Module, arguments: Arguments, known: Mapping[InputSignature, Any]
    ) -> Lookup:
        """Return the signature of an input, and the model's tensors.

        known : signatures; the one that accepts this input, if any, is itself returned
        """
        watch, form = self._model, _form(*arguments)
        tensors = watch.tensors(model, self.reads) if watch else None
        if watch is None or tensors is None:
            before, self._model = watch, _ModelWatch(model, self.reads)
            watch = self._model
            tensors = watch.tensors_of()
            # An assigned value may equal the previous one.
            if before is None or before.state != watch.state:
                self._places.clear()
        if len(self._places) == _INPUTS:
            self._places.clear()
        if not self._places:
            self._signatures.clear()
        signature: InputSignature | None = None
        if form in self._places:
            ones = _ones(self._places[form], model, arguments)
            signature = self._signatures.get((form, ones))
        if signature is None:
            signature = signature_of(model, arguments, watch.settings)
            signature = signature and self._with_ones(signature, model, arguments)
        elif signature in known:
            return signature, *tensors
        if signature is not None:
            signature = next((kept for kept in known if kept.accepts(signature)), signature)
            if form is not None:
                self._places[form] = _looked_at(signature, self.value_guards)
                self._signatures[form, signature.ones] = signature
        return signature, *tensors


class _ModelWatch:
    """The state of a model's modules that counts, at creation of this object.

    It does not refer to the model itself, whose record holds this object: that would be a cycle.
    """

    def __init__(self, model: torch.nn.Module, reads: Reads) -> None:
        self._reads = reads
        self._watch = watch = _Watch()
        self.settings = settings_of(model, reads, watch)
        inside = list(model.modules())[1:]
        slots = [getattr(module, slot) for module in (model, *inside) for slot in SLOTS]
        # Most slots are empty; adding a tensor later changes a watched dictionary.
        self._full = [*filter(None, slots)]
        held = self._held()
        for module in held:
            watch.identity(module)
        # Hooks of the outermost module run around its forward, and trainers set other attributes on
        # it, so only what was read from it is compared.
        of_modules = (getattr(module, slot) for module in inside for slot in HOOKS)
        own = (module.__dict__ for module in inside)
        watch.dicts += [*own, *slots, *GLOBAL_HOOKS, *of_modules]
        self._own_names = [*reads[0]] if reads else []
        self._own = self._addresses(model)
        watch.begin()
        place = {id(value): at for at, value in reversed([*enumerate(held)])}
        self._parameters = _places(place[id(param)] for param in model.parameters())
        self._buffers = _places(place[id(buffer)] for buffer in model.buffers())
        self._alike = alike([*chain.from_iterable(self.tensors_of())])
        wanted = [param.requires_grad for param in model.parameters()]
        sharded = [*map(is_elsewhere, model.parameters())]
        self.state = (self.settings, wanted, _forms_of_tensors(model), sharded)

    def tensors(self, model: torch.nn.Module, reads: Reads) -> tuple[list[Any], list[Any]] | None:
        """Return all parameters and buffers; None if anything changed, or if the reads did."""
        if self._reads is not reads or self._addresses(model) != self._own:
            return None
        if not self._watch.holds():
            return None
        current = self.tensors_of()
        return current if self._alike([*chain.from_iterable(current)]) else None

    def tensors_of(self) -> tuple[list[Any], list[Any]]:
        """Return all parameters and buffers; the modules must hold as many tensors as before."""
        held = self._held()
        return self._parameters(held), self._buffers(held)

    def _addresses(self, model: torch.nn.Module) -> list[int]:
        return [*map(id, map(model.__dict__.get, self._own_names))]

    def _held(self) -> list[Any]:
        return [*chain.from_iterable(map(dict.values, self._full))]


def _places(places: Iterable[int]) -> Callable[[list[Any]], list[Any]]:
    """Return a function that gets the items of a list at some indices."""
    wanted = [*places]
    # An itemgetter of one index returns the bare item, and one without indices is an error.
    if len(wanted) < 2:
        return lambda held: [held[at] for at in wanted]
    getter = itemgetter(*wanted)
    return lambda held: [*getter(held)]


_LEAVES = {bool, int, float, str, type(None)}


def _form(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable | None:
    """Return the form of arguments as passed; None if one has a class that is not handled here."""
    casts = casting()
    forms: list[Hashable] = [tuple(kwargs), *casts, *map(torch.get_autocast_dtype, casts)]
    first: dict[int, tuple[int, int]] = {}
    waiting: list[Any] = [args, *kwargs.values()]
    # The list grows while it is iterated over: items of a container are appended.
    for value in waiting:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            forms.append(form_of_leaf(value, first, len(forms)))
        elif kind in _LEAVES:
            forms.append(plain(value))
        elif kind is list or kind is tuple:
            forms.append((kind, len(value)))
            waiting += value
        elif kind is dict:
            forms.append((kind, *value))
            waiting += value.values()
        else:
            return None
    return tuple(forms)
