"""Which attributes of a module its forward may read, as far as its code tells.

Trainers and training steps note things on the module they train: Lightning the name of the hook
that runs, users the losses in a list. To a plan these are no other input, as the forward does not
look at them. What it may look at is the names in its code, and in the code that this calls by a
name of the class. Where the module itself is handed on, or attributes are asked for by a string,
nothing can be told and all count.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from contextlib import suppress
from types import CodeType, FunctionType
from typing import Any

import torch

# Asking for an attribute by a string, or for all.
_DYNAMIC = {"getattr", "vars", "eval", "exec", "locals", "attrgetter", "methodcaller"}
_DYNAMIC |= {"__dict__", "__getattribute__", "__getattr__", "state_dict", "named_parameters"}
# What may follow where a method names the module without handing it on.
_OF_SELF = ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR", "LOAD_SUPER_ATTR")
_TRAINERS = ("lightning", "pytorch_lightning")


def not_read(model: torch.nn.Module) -> frozenset[str]:
    """Return the names of attributes of a module that its forward, by its code, never reads."""
    own, kind = frozenset(model.__dict__), type(model)
    read: set[str] | None = None
    if not _referred_to(model):
        # Where there is code in another language than Python, all may be read.
        with suppress(TypeError):
            read = _names(kind)
    if read is None:
        return own & _notes_of_trainers(kind)
    return own - read - {"training"}


def _names(kind: type) -> set[str] | None:
    """Return the names that a class's forward may read of an instance; None: any."""
    read: set[str] = set()
    waiting, seen = ["forward"], {"forward"}
    while waiting:
        name = waiting.pop()
        for base in kind.__mro__:
            if base in (torch.nn.Module, object):
                continue
            for function in _functions(base.__dict__.get(name)):
                found = _of_code(function.__code__, _own_name(function))
                if found is None:
                    return None
                read |= found
                waiting += [it for it in found if it not in seen and hasattr(kind, it)]
                seen |= found
    return read


def _functions(member: Any) -> Iterator[FunctionType]:
    if isinstance(member, staticmethod | classmethod):
        member = member.__func__
    parts = (member.fget, member.fset) if isinstance(member, property) else (member,)
    for part in parts:
        function = inspect.unwrap(part) if callable(part) else part
        if isinstance(function, FunctionType):
            yield function
        elif part is not None and callable(part) and not isinstance(part, type):
            raise TypeError("code that is no Python")


def _own_name(function: FunctionType) -> str:
    code = function.__code__
    return code.co_varnames[0] if code.co_argcount else ""


def _of_code(code: CodeType, own: str) -> set[str] | None:
    found = set(code.co_names)
    if found & _DYNAMIC:
        return None
    steps = [
        it for it in dis.get_instructions(code) if it.opname not in ("CACHE", "COPY_FREE_VARS")
    ]
    for at, it in enumerate(steps):
        names = it.argval if isinstance(it.argval, tuple) else (it.argval,)
        if own not in names or it.opname in ("LOAD_CLOSURE", "MAKE_CELL"):
            continue
        after = steps[at + 1].opname if at + 1 < len(steps) else ""
        if after not in _OF_SELF or len(names) > 1:
            return None
    for part in code.co_consts:
        if isinstance(part, CodeType):
            inside = _of_code(part, own)
            if inside is None:
                return None
            found |= inside
    return found


def _referred_to(model: torch.nn.Module) -> bool:
    """Whether a module inside knows the one around it, and may read from it."""
    return any(
        it is model or (isinstance(it, list | tuple) and any(part is model for part in it))
        for module in model.modules()
        for it in module.__dict__.values()
    )


def _notes_of_trainers(kind: type) -> set[str]:
    """Return the names that a trainer's own base class sets in its instances."""
    return {
        step.argval
        for base in kind.__mro__
        if base.__module__.partition(".")[0] in _TRAINERS and "__init__" in base.__dict__
        for step in dis.get_instructions(base.__dict__["__init__"])
        if step.opname == "STORE_ATTR"
    }
