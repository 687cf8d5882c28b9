"""Kinds of input: what a plan depends on beside the values of tensors.

A plan is for the calls that were traced, so an input of another shape, a mode or a rate changes
them. How a call is written does not: the same argument by place or by name, in whatever order, or a
default spelled out. Neither does what others note on the model after it was planned.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_leaves

from .contents import OF_TORCH, contents, hooks, plain
from .marks import Marks

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
# How arguments are written: how many by place, and the names of the rest.
Written = tuple[int, tuple[str, ...]]
_NUMBERS = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Kind:
    """A kind of input; equal kinds take the same plan.

    Parameters
    ----------
    arguments
        Name of each argument that is not left at its default, and its form.
    casts
        Kind of device and type, where autocast is on.
    wanted
        Per parameter, whether it requires a gradient.
    sharded
        Whether some parameter is no plain tensor, as where FSDP2 has sharded a module.
    settings
        Per module, names and values of what a forward may read beside tensors it registers.
    """

    arguments: tuple[tuple[str, Hashable], ...]
    casts: tuple[Hashable, ...]
    wanted: tuple[bool, ...]
    sharded: bool
    settings: tuple[frozenset[tuple[str, Hashable]], ...]

    def unlike(self, planned: Kind, paths: list[str]) -> list[str]:
        """What makes it another kind than one that was planned; `paths` names the modules."""
        mine, theirs = dict(self.arguments), dict(planned.arguments)
        found = [f"{name} was not given then" for name in mine.keys() - theirs.keys()]
        found += [f"{name} is missing" for name in theirs.keys() - mine.keys()]
        found += [
            f"{name} is {_shown(form, theirs[name])}, and was {_shown(theirs[name], form)}"
            for name, form in self.arguments
            if name in theirs and theirs[name] != form
        ]
        if self.arguments != planned.arguments and not found:
            found.append("the inputs come in another order or share memory otherwise")
        if self.casts != planned.casts:
            found.append("autocast is otherwise")
        if self.wanted != planned.wanted:
            found.append("other parameters require gradients")
        if self.settings != planned.settings:
            names = {
                f"{path}.{name}" if path else name
                for path, now, then in zip(paths, self.settings, planned.settings, strict=False)
                for name, _ in now ^ then
            }
            told = ", ".join(sorted(names)[:4]) or "other modules"
            found.append(f"modes and numbers in its modules are otherwise ({told})")
        return found


def kind_of(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    noted: tuple[frozenset[str], ...] = (),
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
    """
    first: dict[int, int] = {}
    arguments, count = [], 0
    for name, value in _named(type(model).forward, args, kwargs):
        flat, spec = tree_flatten(value)
        leaves = []
        for leaf in flat:
            leaves.append(_form(leaf, first, count))
            count += 1
        arguments.append((name, (str(spec), tuple(leaves))))
    casts = [
        (kind, torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
        if torch.is_autocast_enabled(kind)
    ]
    kind = Kind(
        tuple(arguments),
        tuple(casts),
        tuple(it.requires_grad for it in model.parameters()),
        any(is_traceable_wrapper_subclass(it) for it in model.parameters()),
        tuple(
            _settings(module, names, outermost=module is model)
            for module, names in zip_longest(model.modules(), noted)
            if module is not None
        ),
    )
    try:
        hash(kind)
    except TypeError:
        return None
    return kind


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
    """Return the names of the attributes of each module."""
    return tuple(frozenset(module.__dict__) for module in model.modules())


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


def _form(leaf: Any, first: dict[int, int], place: int) -> Hashable:
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
    the class, no forward asked for then. Hooks are part of what was recorded, but for those of the
    outermost module, which run around its forward.
    """
    kind = type(module)
    found = {
        (name, held)
        for name, value in module.__dict__.items()
        if name not in OF_TORCH
        and not name.startswith("_flat_weight")
        and value is not None
        and (held := contents(value)) is not None
        and (noted is None or name in noted or hasattr(kind, name))
    }
    numbers = () if outermost else hooks(module)
    return frozenset(found | {("its hooks", numbers)} if numbers else found)


def _shown(form: Any, other: Any) -> str:
    """Show an argument's form beside another: shapes and types of tensors, values of the rest."""
    told = [_leaf(it) for it in form[1]]
    if told == [_leaf(it) for it in other[1]]:
        told = [_leaf(it, whole=True) for it in form[1]]
    return " and ".join(told[:3]) + (" and more" if len(told) > 3 else "")


def _leaf(leaf: Any, *, whole: bool = False) -> str:
    if not isinstance(leaf[0], tuple):
        return str(leaf[1])
    size, stride, offset, dtype, wanted, same, shared = leaf
    told = f"{str(dtype).removeprefix('torch.')} of shape {size}"
    if whole:
        told += f" (strides {stride} from {offset}, requires_grad {wanted}, the tensor of input "
        told += f"{same}, memory of input {shared})"
    return told
