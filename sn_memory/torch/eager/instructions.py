"""Instructions: functions that do one action of a plan on what is held.

Everything that can be known ahead is: which arguments are tensors, how each looks at its storage,
which results are kept. What is left for the step is to fill in and call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..errors import ReplayError
from ..trace.convolutions import carried_out
from ..trace.record import Call, Layouts, View, form_of, layout_key
from ..trace.recurrent import LAYER, in_training
from ..trace.to_graph import statistics
from .host_arena import HostArena

Instruction = Callable[["Memory"], None]


class Memory:
    """What is held between instructions.

    Attributes
    ----------
    held
        Per storage, a tensor that holds it; None where it is not on the device.
    chance
        State of the random number generator before a call that will run again, per call.
    arena
        Where storages on the host lie; None where the plan moves none.
    layouts
        Where a trial notes results that are laid out otherwise than traced; None raises instead.
    begun
        Whether a backward pass has begun to use it up.

    Notes
    -----
    However it ends - after the backward pass, by an exception in the middle, or as a forward pass
    that no backward pass follows - ops wait for the copies under way before its storages are given
    back, and `arena` goes to `arenas`, for the next step.
    """

    def __init__(self, storages: int, arena: HostArena | None, arenas: list[HostArena]) -> None:
        self.held: list[torch.Tensor | None] = [None] * storages
        self.chance: dict[int, torch.Tensor] = {}
        self.arena, self._arenas = arena, arenas
        self.layouts: Layouts | None = None
        self.begun = False

    def clear(self) -> None:
        """Let go of everything."""
        arena, self.arena = self.arena, None
        if arena is not None:
            arena.settle()
            self._arenas.append(arena)
        self.held, self.chance = [], {}

    def __del__(self) -> None:
        self.clear()


def free_storage(storage: int) -> Instruction:
    """Return the instruction that gives a storage back."""

    def free(memory: Memory) -> None:
        memory.held[storage] = None

    return free


def offload_storage(storage: int, host_copy: int) -> Instruction:
    """Return the instruction that starts copying a storage to its place on the host."""

    def offload(memory: Memory) -> None:
        tensor = memory.held[storage]
        assert memory.arena is not None
        assert tensor is not None
        memory.arena.take(host_copy, tensor)

    return offload


def leave_device(storage: int, host_copy: int) -> Instruction:
    """Return the instruction that gives a storage back when its copy out has ended."""

    def leave(memory: Memory) -> None:
        assert memory.arena is not None
        memory.arena.left(host_copy)
        memory.held[storage] = None

    return leave


def prefetch_storage(storage: int, host_copy: int, form: View) -> Instruction:
    """Return the instruction that makes a storage anew and starts copying into it."""

    def prefetch(memory: Memory) -> None:
        assert memory.arena is not None
        memory.held[storage] = memory.arena.give(host_copy, form)

    return prefetch


def await_storage(host_copy: int) -> Instruction:
    """Return the instruction after which what a host copy brought back can be used."""

    def arrived(memory: Memory) -> None:
        assert memory.arena is not None
        memory.arena.arrived(host_copy)

    return arrived


def run_call(
    call: Call,
    forms: dict[int, View],
    results: Sequence[tuple[int, View, bool]],
    *,
    number: int,
    again: bool,
    replayed: bool,
    device: torch.device,
    way: str | None = None,
) -> Instruction:
    """Return the instruction that runs a call.

    results : place among the flat results, View, and whether it is to be held
    replayed : it draws random numbers, and the plan runs it more than once
    way : how to carry it out; None where there is no choice
    """
    target = call.target if way is None else _in_way(call.target, way)
    if call.target is LAYER and call.outputs[-1] is not None:
        target = in_training(target)
    arguments = _arguments(call, forms, without=statistics(call) if again else ())

    def run(memory: Memory) -> None:
        args, kwargs = arguments(memory.held)
        if replayed and again:
            now = _chance(device)
            _set_chance(device, memory.chance[number])
            result = target(*args, **kwargs)
            _set_chance(device, now)
        else:
            if replayed:
                memory.chance[number] = _chance(device)
            result = target(*args, **kwargs)
        if not results:
            return
        flat = (result,) if isinstance(result, torch.Tensor) else tree_flatten(result)[0]
        for place, view, fresh in results:
            tensor = flat[place]
            if tensor is None or not view.shows(tensor):
                tensor = _as_traced(call, view, tensor, flat, memory.layouts if fresh else None)
            if fresh:
                memory.held[view.storage] = tensor

    return run


def _as_traced(
    call: Call,
    view: View,
    tensor: torch.Tensor | None,
    flat: Sequence[Any],
    layouts: Layouts | None,
) -> torch.Tensor:
    """Note how a kernel lays its results out, and return this one as traced; or raise."""
    if layouts is not None and tensor is not None:
        layouts[layout_key(call.target, call.flat)] = tuple(
            form_of(it, -1) if isinstance(it, torch.Tensor) else None for it in flat
        )
        if tensor.size() == view.size:
            made = torch.empty_strided(
                view.size, view.stride, dtype=view.dtype, device=tensor.device
            )
            return made.copy_(tensor)
    got = (
        "nothing"
        if tensor is None
        else f"a tensor of size {tuple(tensor.size())}, stride {tensor.stride()} and type "
        f"{tensor.dtype}"
    )
    raise ReplayError(
        f"{call.target} returned {got}; traced were {view.size}, {view.stride} and {view.dtype}. "
        "Its rule for fake tensors is wrong. Plan with a real sample and a trial, which sees what "
        "the kernel does."
    )


def _in_way(target: Any, way: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with carried_out(way):
            return target(*args, **kwargs)

    return run


def _arguments(
    call: Call, forms: dict[int, View], *, without: tuple[int, ...]
) -> Callable[[list[Any]], tuple[list[Any], dict[str, Any]]]:
    """Return the function that fills a call's arguments from what is held."""
    flat = [None if place in without else arg for place, arg in enumerate(call.flat)]
    args, kwargs = tree_unflatten(flat, call.spec)
    args = list(args)
    plain = all(isinstance(arg, View) or not _has_view(arg) for arg in (*args, *kwargs.values()))
    if plain:
        places = [
            (place, take(arg, forms[arg.storage]))
            for place, arg in enumerate(args)
            if isinstance(arg, View)
        ]
        keys = [
            (key, take(arg, forms[arg.storage]))
            for key, arg in kwargs.items()
            if isinstance(arg, View)
        ]

        def fill(held: list[Any]) -> tuple[list[Any], dict[str, Any]]:
            filled = args.copy()
            for place, take in places:
                filled[place] = take(held)
            return filled, {**kwargs, **{key: take(held) for key, take in keys}} if keys else kwargs

        return fill
    takes = [take(arg, forms[arg.storage]) if isinstance(arg, View) else None for arg in flat]
    spec = call.spec

    def fill_nested(held: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        values = [
            arg if take is None else take(held) for arg, take in zip(flat, takes, strict=True)
        ]
        made: tuple[list[Any], dict[str, Any]] = tree_unflatten(values, spec)
        return made

    return fill_nested


def take(view: View, form: View) -> Callable[[list[Any]], torch.Tensor]:
    """Return the function that takes a view of what is held in a form."""
    storage, size, stride, offset = view.storage, view.size, view.stride, view.offset
    if view == form:
        return lambda held: held[storage]
    if view.dtype == form.dtype:
        return lambda held: held[storage].as_strided(size, stride, offset)

    def other_type(held: list[Any]) -> torch.Tensor:
        base = held[storage]
        empty = torch.empty(0, dtype=view.dtype, device=base.device)
        return empty.set_(base.untyped_storage(), offset, size, stride)

    return other_type


def _has_view(value: Any) -> bool:
    return any(isinstance(leaf, View) for leaf in tree_flatten(value)[0])


def _chance(device: torch.device) -> torch.Tensor:
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.get_rng_state()


def _set_chance(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
