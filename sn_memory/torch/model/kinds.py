"""Kinds of input: what a plan depends on beside the values of tensors.

A plan is for the calls that were traced, so an input of another shape, a mode or a rate changes
them. How a call is written does not: the same argument by place or by name, in whatever order, or a
default spelled out. Neither does what others note on the model after it was planned.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from functools import lru_cache
from itertools import zip_longest
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves

from .contents import OF_TORCH, contents, hooks, plain
from .guard import casting
from .kind import Kind
from .marks import GLOBAL_HOOKS, TRACING_HOOKS, Marks
from .reads import not_read
from .sharded import is_elsewhere

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
# How arguments are written: how many by place, and the names of the rest.
Written = tuple[int, tuple[str, ...]]
_NUMBERS = (bool, int, float, str, type(None))


def kind_of(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    noted: tuple[frozenset[str], ...] = (),
    *,
    loosely: bool = False,
) -> Kind | None:
    """Return the kind of an input; None if an argument cannot be compared.

    Parameters
    ----------
    model
        The plain or the planned model.
    args, kwargs
        What its forward is given.
    noted
        Per module, the attributes it had when it was planned; see `attributes_of`.
    loosely
        Of what cannot be compared, take the type: enough for the bytes a step holds.
    """
    first: dict[int, int] = {}
    arguments, count = [], 0
    for name, value in _named(type(model).forward, args, kwargs):
        flat, spec = tree_flatten(value)
        leaves = []
        for leaf in flat:
            form = form_of_leaf(leaf, first, count)
            leaves.append(type(leaf) if loosely and not _is_hashable(form) else form)
            count += 1
        arguments.append((name, (str(spec), tuple(leaves))))
    casts = [(kind, torch.get_autocast_dtype(kind)) for kind in casting()]
    settings = (
        _settings(module, names, outermost=module is model)
        for module, names in zip_longest(model.modules(), noted)
        if module is not None
    )
    # Of the many modules that are alike, what they hold is kept once.
    alike: dict[frozenset[tuple[str, Hashable]], frozenset[tuple[str, Hashable]]] = {}
    kind = Kind(
        tuple(arguments),
        tuple(casts),
        tuple(it.requires_grad for it in model.parameters()),
        any(map(is_elsewhere, model.parameters())),
        tuple(alike.setdefault(it, it) for it in settings),
    )
    return kind if _is_hashable(kind) else None


def leaves_of(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return what the arguments are made of, in the order in which the kind has it."""
    named = _named(type(model).forward, args, kwargs)
    return [leaf for _, value in named for leaf in tree_leaves(value)]


def changeable(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Return the kinds of objects among arguments that could change and be of the same kind.

    They are compared by identity, and what is in them is a constant of what was recorded.
    """
    return [
        type(leaf).__name__
        for leaf in tree_leaves((args, kwargs))
        if not isinstance(leaf, torch.Tensor)
        and (_by_identity(type(leaf)) or Marks([("", leaf)]).tensors())
        and Marks([("", leaf)])
    ]


def _by_identity(kind: type) -> bool:
    own: Any = kind.__hash__
    return own is object.__hash__


def attributes_of(model: torch.nn.Module) -> tuple[frozenset[str], ...]:
    """Return the names of the attributes of each module; of the outermost those it may read."""
    alike: dict[frozenset[str], frozenset[str]] = {}
    each = (frozenset(module.__dict__) for module in model.modules())
    names = [alike.setdefault(it, it) for it in each]
    return (names[0] - not_read(model), *names[1:])


def as_sampled(model: torch.nn.Module, sample: Written, given: Arguments) -> Arguments:
    """Return what is given, written as the sample was: the same by place, the same by name.

    Both are of one kind, so that an argument which one of them leaves out is at its default.
    """
    places, names = sample
    if (len(given[0]), tuple(given[1])) == sample:
        return given
    signature = _signature(type(model).forward)
    if signature is None:
        return given
    bound = signature.bind(None, *given[0], **given[1])
    bound.apply_defaults()
    by_place: list[Any] = []
    by_name: dict[str, Any] = {}
    for name, value in list(bound.arguments.items())[1:]:
        form = signature.parameters[name].kind
        if form is inspect.Parameter.VAR_POSITIONAL:
            by_place += value
        elif form is inspect.Parameter.VAR_KEYWORD:
            by_name |= value
        else:
            by_name[name] = value
            if form is not inspect.Parameter.KEYWORD_ONLY:
                by_place.append(value)
    return tuple(by_place[:places]), {name: by_name[name] for name in names}


def _named(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each argument that is not at its default, in the forward's order.

    What goes into `**kwargs` keeps its order, which a forward may go by.
    """
    signature = _signature(forward)
    bound = None
    if signature is not None:
        # Where it does not fit, the forward itself will say what is wrong with the call.
        with suppress(TypeError):
            bound = signature.bind(None, *args, **kwargs)
    if signature is None or bound is None:
        yield from ((f"argument {place}", value) for place, value in enumerate(args))
        yield from kwargs.items()
        return
    for name, value in list(bound.arguments.items())[1:]:
        parameter = signature.parameters[name]
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            yield from ((f"{name}[{place}]", it) for place, it in enumerate(value))
        elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
            yield from value.items()
        elif not _is(value, parameter.default):
            yield name, value


@lru_cache(maxsize=256)
def _signature(forward: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(forward)
    except (TypeError, ValueError):
        return None


def _is(value: Any, default: Any) -> bool:
    return value is default or (isinstance(default, _NUMBERS) and plain(value) == plain(default))


def form_of_leaf(leaf: Any, first: dict[int, int], place: int) -> Hashable:
    """Return what of a leaf among the arguments makes the kind.

    Parameters
    ----------
    leaf
        The leaf.
    first
        Per tensor and per memory that was seen, the place where it was first; added to here.
    place
        The leaf's own.
    """
    if not isinstance(leaf, torch.Tensor):
        return plain(leaf)
    # Which inputs are the same tensor, or share memory, is part of the trace.
    same = first.setdefault(id(leaf), place)
    shared = first.setdefault(_memory(leaf), place)
    form = (tuple(leaf.size()), leaf.stride(), leaf.storage_offset(), leaf.dtype)
    return (*form, leaf.requires_grad, same, shared)


def _memory(tensor: torch.Tensor) -> int:
    # Negative, so that it is no id; tensors without memory (meta) share nothing.
    return -(tensor.untyped_storage()._cdata) if tensor.device.type != "meta" else -id(tensor)


def _settings(
    module: torch.nn.Module, noted: frozenset[str] | None, *, outermost: bool
) -> frozenset[tuple[str, Hashable]]:
    """What a forward may read from a module beside tensors it registers: modes, rates, numbers.

    A dropout rate that is changed between steps is in the recorded calls with its old value, and
    so is a number in a dict or a list. An attribute that is new since, and stands in for none of
    the class, no forward asked for then. Classes of modules and hooks are part of what was
    recorded, but for those of the outermost: a planned one has another, and hooks run around it.
    Hooks of all modules count once, with the outermost.
    """
    kind: Any = type(module)
    found: set[tuple[str, Hashable]] = {
        (name, held)
        for name, value in module.__dict__.items()
        if name not in OF_TORCH
        and not name.startswith("_flat_weight")
        and value is not None
        and (held := contents(value)) is not None
        and (noted is None or name in noted or hasattr(kind, name))
    }
    if outermost:
        # Copied at once: other threads trace meanwhile, and set hooks of this package's own.
        numbers_of_all = [number for it in GLOBAL_HOOKS for number in tuple(it)]
        of_all = tuple(it for it in numbers_of_all if it not in TRACING_HOOKS)
        return frozenset(found | {("hooks of all modules", of_all)} if of_all else found)
    numbers = hooks(module)
    found.add(("its class", kind))
    return frozenset(found | {("its hooks", numbers)} if numbers else found)


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
