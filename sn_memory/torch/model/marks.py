"""What lists, mappings and objects hold, to tell whether a forward pass left a mark, and undo it.

Assigned attributes are easily told. But a forward may as well append to a list, note something in
an object it was given (a cache), or register a hook in its first run; a hook may keep what it sees.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

# Objects within objects are followed so far; a configuration has two or three levels.
_DEPTH = 6
_OPAQUE = (
    *(type(None), bool, int, float, complex, str, bytes, type, Enum, ModuleType, logging.Logger),
    *(torch.Tensor, torch.nn.Module, FunctionType, MethodType, BuiltinFunctionType),
)
_GROUPS = (list, deque, set, dict)
_THEIRS = ("torch", "numpy", "builtins", "collections", "sn_memory", "sn_compress")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class _Held:
    """What something holds: items (of a mapping key, value, key, value), and attributes."""

    items: tuple[Any, ...]
    attributes: dict[str, Any]

    def same(self, other: _Held) -> bool:
        mine, theirs = self.attributes, other.attributes
        return (
            len(self.items) == len(other.items)
            and all(a is b for a, b in zip(self.items, other.items, strict=True))
            and mine.keys() == theirs.keys()
            and all(mine[name] is theirs[name] for name in mine)
        )


class Marks:
    """What some values hold, at every depth, when this is made.

    Parameters
    ----------
    named
        Values with their names. Modules and tensors in them are not looked into.
    """

    def __init__(self, named: Iterable[tuple[str, Any]]) -> None:
        seen: set[int] = set()
        self._before = [
            (name, holder, _held(holder))
            for name, value in named
            for holder in _holders(value, seen, _DEPTH)
        ]

    def __bool__(self) -> bool:
        """Whether there is anything that could change."""
        return bool(self._before)

    def changed(self) -> list[str]:
        """Return the names of the values that hold something else now."""
        found = [name for name, holder, it in self._before if not _held(holder).same(it)]
        return list(dict.fromkeys(found))

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that were held."""
        held = (it for _, _, was in self._before for it in (*was.items, *was.attributes.values()))
        return [it for it in held if isinstance(it, torch.Tensor)]

    def put_back(self) -> None:
        """Let all hold what they held."""
        for _, holder, before in self._before:
            if not _held(holder).same(before):
                _fill(holder, before)


class Values:
    """The values of some tensors when this is made; of leaves that are trained, none."""

    def __init__(self, tensors: Iterable[Any], weights: Iterable[torch.Tensor]) -> None:
        spared = {id(it) for it in weights}
        self._before = {
            id(it): (it, it.detach().clone())
            for it in tensors
            if isinstance(it, torch.Tensor) and id(it) not in spared
        }

    def put_back(self) -> None:
        """Let the tensors have these values."""
        for tensor, value in self._before.values():
            # Beside autograd: a version that counts up would look like a change.
            tensor.data.copy_(value)


def kept_by(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield by name the attributes of a module, and what its hooks can write to."""
    yield from list(module.__dict__.items())
    for slot in _HOOKS:
        for hook in module.__dict__.get(slot, {}).values():
            name = getattr(hook, "__name__", type(hook).__name__)
            yield from ((f"what its hook {name} holds", it) for it in _reached(hook))


def fingerprint(value: Any) -> Hashable:
    """Return what differs when something in a value was changed; it holds nothing alive."""
    found: list[Hashable] = []
    for holder in _holders(value, set(), _DEPTH):
        held = _held(holder)
        found.append(id(holder))
        found += [_print_of(it) for it in (*held.items, *held.attributes.values())]
    return tuple(found)


def _print_of(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        # An address may be another tensor's by now; hardly with its shape and version too.
        return id(value), tuple(value.shape), value._version
    if isinstance(value, bool | int | float | str):
        return type(value), repr(value)
    return id(value)


def _holders(value: Any, seen: set[int], depth: int) -> Iterator[Any]:
    """Yield what can be changed, outermost first: lists, sets, mappings, objects."""
    if isinstance(value, _OPAQUE) or id(value) in seen or depth == 0:
        return
    seen.add(id(value))
    inside: Iterable[Any] = ()
    if isinstance(value, tuple | frozenset):
        inside = value
    else:
        held = _held(value)
        inside = (*held.items, *held.attributes.values())
        if inside or isinstance(value, _GROUPS) or hasattr(value, "__dict__"):
            yield value
    for it in inside:
        yield from _holders(it, seen, depth - 1)


def _held(holder: Any) -> _Held:
    items: tuple[Any, ...] = ()
    if isinstance(holder, dict):
        items = tuple(it for pair in dict.items(holder) for it in pair)
    elif isinstance(holder, _GROUPS):
        items = tuple(holder)
    return _Held(items, _attributes(holder))


def _attributes(value: Any) -> dict[str, Any]:
    if type(value).__module__.partition(".")[0] in _THEIRS:
        # Of no forward: an op of torch, for one, keeps where it is dispatched to.
        return {}
    found = dict(getattr(value, "__dict__", ()))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return found


def _reached(hook: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """Yield what a function can write to: what it closes over, its object, global containers."""
    if depth == 0:
        return
    if isinstance(hook, partial):
        yield from (*hook.args, *hook.keywords.values())
        yield from _reached(hook.func, depth - 1)
    elif isinstance(hook, MethodType):
        yield hook.__self__
        yield from _reached(hook.__func__, depth - 1)
    elif isinstance(hook, FunctionType):
        for cell in hook.__closure__ or ():
            try:
                held = cell.cell_contents
            except ValueError:  # Empty: the name is not bound yet.
                continue
            yield held
            if callable(held):
                yield from _reached(held, depth - 1)
        for name in hook.__code__.co_names:
            if isinstance(hook.__globals__.get(name), _GROUPS):
                yield hook.__globals__[name]
    else:
        yield hook


def _fill(holder: Any, before: _Held) -> None:
    if isinstance(holder, dict):
        kind = OrderedDict if isinstance(holder, OrderedDict) else dict
        kind.clear(holder)
        for key, value in zip(before.items[::2], before.items[1::2], strict=True):
            kind.__setitem__(holder, key, value)
    elif isinstance(holder, set):
        holder.clear()
        holder.update(before.items)
    elif isinstance(holder, list | deque):
        holder.clear()
        holder.extend(before.items)
    for name in _attributes(holder).keys() - before.attributes.keys():
        object.__delattr__(holder, name)
    for name, value in before.attributes.items():
        object.__setattr__(holder, name, value)
