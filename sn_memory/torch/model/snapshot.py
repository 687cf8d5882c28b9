"""Snapshots of lists, mappings and objects, to detect and undo changes by a forward pass.

Assigned attributes are easy to detect. But a forward may also append to a list, write into an
object among its arguments (a cache), or register a hook in its first run; a hook may keep values.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

# Depth to which objects within objects are followed; a configuration has two or three levels.
_DEPTH = 6
# Not inspected: values that cannot change, are compared elsewhere, or are shared by the process.
OPAQUE = (
    *(type(None), bool, int, float, complex, str, bytes, type, Enum, ModuleType, logging.Logger),
    *(torch.Tensor, torch.nn.Module, FunctionType, MethodType, BuiltinFunctionType),
)
_GROUPS = (list, deque, set, dict)
# Packages whose objects and functions are not part of a model's state.
_THEIRS = ("torch", "numpy", "builtins", "collections", "sn_memory", "sn_compress")
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# Hooks that torch calls around every module (`register_module_forward_hook` and the like).
GLOBAL_HOOKS: tuple[dict[int, Any], ...] = tuple(
    getattr(torch_module, f"_global{slot}") for slot in HOOKS
)
# Ids of those global hooks that trace a model in some thread; other threads see them, too.
TRACING_HOOKS: set[int] = set()
SLOTS = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True)
class _Held:
    """The contents of an object: its items (of a mapping: key, value, key, ...) and attributes."""

    items: tuple[Any, ...]
    attributes: dict[str, Any]

    def same(self, other: _Held) -> bool:
        mine, theirs = self.attributes, other.attributes
        return (
            len(self.items) == len(other.items)
            and all(map(is_, self.items, other.items))
            and mine.keys() == theirs.keys()
            and all(mine[name] is theirs[name] for name in mine)
        )

    def ended(self) -> _Held:
        """Return the same contents with leaves in place of tensors that have a graph."""
        attributes = {name: ended(value) for name, value in self.attributes.items()}
        return _Held(tuple(map(ended, self.items)), attributes)


class StateSnapshot:
    """The contents of some values, at every depth, at creation of this object.

    named : values with their names. Modules and tensors in them are not inspected.
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
        """Return the names of the values whose contents changed."""
        names = [name for name, holder, value in self._before if not _held(holder).same(value)]
        return list(dict.fromkeys(names))

    def values(self) -> list[Any]:
        return [
            item for _, _, was in self._before for item in (*was.items, *was.attributes.values())
        ]

    def tensors(self) -> list[torch.Tensor]:
        return [tensor for tensor in self.values() if isinstance(tensor, torch.Tensor)]

    def restore(self) -> None:
        for _, holder, before in self._before:
            if not _held(holder).same(before):
                _fill(holder, before)

    def end_graphs(self) -> bool:
        """Replace tensors that have a graph by leaves; return whether there were any.

        `restore` undoes it.
        """
        ends = [(holder, before, before.ended()) for _, holder, before in self._before]
        changed = [(holder, leaves) for holder, before, leaves in ends if not leaves.same(before)]
        for holder, leaves in changed:
            _fill(holder, leaves)
        return bool(changed)


def ended(value: Any) -> Any:
    """Return a leaf in place of a tensor that has a graph, also within a tuple."""
    if isinstance(value, tuple):
        inside = [ended(item) for item in value]
        if all(map(is_, inside, value)):
            return value
        return value._make(inside) if hasattr(value, "_make") else type(value)(inside)
    if isinstance(value, torch.Tensor) and not value.is_leaf:
        return value.detach().requires_grad_()
    return value


class Values:
    """Copies of the values of some tensors, except the weights."""

    def __init__(self, tensors: Iterable[Any], weights: Iterable[torch.Tensor]) -> None:
        spared = {id(weight) for weight in weights}
        self._before = {
            id(tensor): (tensor, _copyable(tensor.detach()).clone())
            for tensor in tensors
            if isinstance(tensor, torch.Tensor) and id(tensor) not in spared
        }

    def restore(self) -> None:
        for tensor, value in self._before.values():
            set_value(tensor, value)


def set_value(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Give a tensor a value, and its size if it was resized, without incrementing its version."""
    # By `data`, as autograd would see a changed version as a change of a saved tensor. Into the
    # same memory, as saved views have to show the value.
    if tensor.shape == value.shape:
        _copyable(tensor.data).copy_(value)
    else:
        # An observer of quantization takes the size of the first input.
        tensor.data = value.clone()


# Integers of less than a byte take one byte each, and torch has no kernel that copies them.
_SUB_BYTE = {
    getattr(torch, name)
    for kind in ("int", "uint")
    for bits in range(1, 8)
    if hasattr(torch, name := f"{kind}{bits}")
}


def _copyable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype in _SUB_BYTE else tensor


class WrittenWeights(TorchDispatchMode):
    """Restores parameters that are written to inside; each is copied before its first write.

    Copying all of them would take as much memory as the model.

    parts : parameters, each with a plain tensor that it consists of on this rank
    """

    supports_higher_order_operators = True  # torch.cond and the like, which write to no input

    def __init__(self, parts: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self._weights = {part.untyped_storage()._cdata: (weight, part) for weight, part in parts}
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        # Called before each write.
        self.heard: Callable[[], None] | None = None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile run compiled code under this mode."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            # A DTensor runs the op on its local tensor, and that call is dispatched here in turn.
            return NotImplemented
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return func(*args, **kwargs)
        for tensor in written_to(func, args, kwargs):
            key = tensor.untyped_storage()._cdata
            if key in self._weights:
                part = self._weights[key][1]
                if key not in self._before:
                    self._before[key] = (part, part.detach().clone())
                if self.heard is not None:
                    self.heard()
        return func(*args, **kwargs)

    def weights(self) -> list[torch.Tensor]:
        """Return the parameters that were written to."""
        return [self._weights[key][0] for key in self._before]

    def __exit__(self, *error: Any) -> Any:
        result = super().__exit__(*error)
        for part, value in self._before.values():
            part.data.copy_(value)
        return result


def written_to(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that a call writes to, according to its schema."""
    written = written_arguments(func, args, kwargs) if func._schema.is_mutable else []
    return [leaf for leaf in tree_leaves(written) if isinstance(leaf, torch.Tensor)]


def named_arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by the names in its schema, including defaults."""
    return {
        arg.name: args[at] if at < len(args) else kwargs.get(arg.name, arg.default_value)
        for at, arg in enumerate(func._schema.arguments)
    }


def written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that a call writes to, in the order of its schema."""
    named = named_arguments(func, args, kwargs)
    return [
        named[arg.name]
        for arg in func._schema.arguments
        if arg.alias_info is not None and arg.alias_info.is_write
    ]


def hidden_statistics(func: Any, named: dict[str, Any]) -> tuple[str, ...]:
    """Return the names of running statistics that a call updates without its schema saying so.

    Batch norm in training changes them in place. Given None for them, it returns the same and
    changes nothing, which is how it is rerun. Its functional form returns new ones instead.
    """
    return takes_statistics(func) if named.get("training") or named.get("train") else ()


@cache
def takes_statistics(func: Any) -> tuple[str, ...]:
    """Return the names of running statistics that an op may update without saying so."""
    if str(func.overloadpacket).endswith("_functional"):
        return ()
    return tuple(
        arg.name
        for arg in func._schema.arguments
        if arg.name in ("running_mean", "running_var") and arg.alias_info is None
    )


def kept_by(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a module, and what its hooks can write to, with names."""
    yield from list(module.__dict__.items())
    yield from _kept_by_hooks([module.__dict__.get(slot, {}) for slot in HOOKS])


def kept_by_global_hooks() -> Iterator[tuple[str, Any]]:
    """Yield what the global hooks can write to, with names."""
    yield from _kept_by_hooks(GLOBAL_HOOKS)


def kept_by_code(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield what methods of modules can write to: globals, class attributes, closures."""
    kinds = {base for module in model.modules() for base in type(module).__mro__}
    methods = [
        method
        for kind in kinds
        if kind.__module__.partition(".")[0] not in _THEIRS
        for method in vars(kind).values()
        if isinstance(method, FunctionType)
    ]
    seen: set[int] = set()
    yield from (("what its code reaches", item) for f in methods for item in _reached(f, seen))


def _kept_by_hooks(slots: Iterable[dict[int, Any]]) -> Iterator[tuple[str, Any]]:
    for hook in [hook for slot in slots for hook in slot.values()]:
        name = getattr(hook, "__name__", type(hook).__name__)
        yield from ((f"what its hook {name} holds", value) for value in _reached(hook))


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place; 0 for one created in inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def memory_version(tensor: torch.Tensor) -> tuple[int, int]:
    """Return a tensor's version and the address of its storage, as `data =` changes no version."""
    # Sparse tensors have several storages, none of which can be accessed through them.
    strided = tensor.layout is torch.strided
    return version_of(tensor), tensor.untyped_storage()._cdata if strided else 0


def _holders(value: Any, seen: set[int], depth: int) -> Iterator[Any]:
    """Yield the mutable objects in a value, outermost first: lists, sets, mappings, objects."""
    if isinstance(value, OPAQUE) or id(value) in seen or depth == 0:
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
    for inner in inside:
        yield from _holders(inner, seen, depth - 1)


def _held(holder: Any) -> _Held:
    items: tuple[Any, ...] = ()
    if isinstance(holder, dict):
        items = tuple(item for pair in dict.items(holder) for item in pair)
    elif isinstance(holder, _GROUPS):
        items = tuple(holder)
    return _Held(items, attributes_held(holder))


def attributes_held(value: Any) -> dict[str, Any]:
    """Return the attributes of a user's object, including those in slots."""
    if type(value).__module__.partition(".")[0] in _THEIRS:
        # For example, an op of torch caches its dispatch in its attributes.
        return {}
    attributes = dict(getattr(value, "__dict__", ()))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__") and hasattr(value, name):
                attributes[name] = getattr(value, name)
    return attributes


def _reached(hook: Any, seen: set[int] | None = None, depth: int = _DEPTH) -> Iterator[Any]:
    """Yield what a function can write to: its closure, its `self`, global containers.

    Also containers in global classes and objects; recurses into functions that it names.
    """
    seen = set() if seen is None else seen
    if depth == 0 or id(hook) in seen:
        return
    seen.add(id(hook))
    if isinstance(hook, partial):
        yield from (*hook.args, *hook.keywords.values())
        yield from _reached(hook.func, seen, depth - 1)
    elif isinstance(hook, MethodType):
        yield hook.__self__
        yield from _reached(hook.__func__, seen, depth - 1)
    elif isinstance(hook, FunctionType):
        for cell in hook.__closure__ or ():
            try:
                held = cell.cell_contents
            except ValueError:  # Empty: the name is not bound yet.
                continue
            yield held
            if callable(held):
                yield from _reached(held, seen, depth - 1)
        for name in hook.__code__.co_names:
            named = hook.__globals__.get(name)
            theirs = (getattr(named, "__module__", None) or "").partition(".")[0] in _THEIRS
            if isinstance(named, _GROUPS):
                yield named
            elif isinstance(named, FunctionType) and not theirs:
                yield from _reached(named, seen, depth - 1)
            elif not theirs and (isinstance(named, type) or not isinstance(named, OPAQUE)):
                own = getattr(named, "__dict__", {}).values()
                yield from (value for value in own if isinstance(value, _GROUPS))
    else:
        yield hook


def _fill(holder: Any, before: _Held) -> None:
    if isinstance(holder, dict):
        # By the methods of dict: those of a subclass may raise, or do more. An OrderedDict keeps
        # its order in C, which dict's methods would not update.
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
    # By the methods of object, as a frozen dataclass rejects assignment.
    for name in attributes_held(holder).keys() - before.attributes.keys():
        object.__delattr__(holder, name)
    for name, value in before.attributes.items():
        object.__setattr__(holder, name, value)
