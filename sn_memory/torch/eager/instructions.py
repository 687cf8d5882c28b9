"""Instructions: what does one action of a plan on what is held.

Everything that can be known ahead is: which arguments are tensors, how each looks at its storage,
which results are kept. What is left for the step is to fill in and call. As they stand here calls
are checked for how their results lie; `written.py` has what runs once that is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..errors import ReplayError
from ..quirks.recurrent import LAYER, in_training
from ..target.accelerator import chance, set_chance
from ..trace.op_seconds import carried_out
from ..trace.record import Call, Layouts, View, form_of, layout_key
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
    underway
        Per storage that a lane reads or writes, what waits for that.
    left_out
        Places of gradients that are None in this step, as no output they come from has one.
    plain, wanted
        The step without the plan, and the tensors whose gradients it has.
    passes
        Per graph task of autograd that does not use this up: memory of its own, or all gradients.

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
        self.underway: dict[int, Callable[[], None]] = {}
        self.left_out: frozenset[int] = frozenset()
        self.plain: Any = None
        self.wanted: Sequence[torch.Tensor] = ()
        self.passes: dict[int, Any] = {}

    def for_one_pass(self, overwritten: Iterable[int]) -> Memory:
        """Return memory for a backward pass that leaves this as it is.

        overwritten : storages that a backward pass writes over
        """
        arena = None if self.arena is None else self.arena.copied()
        found = Memory(0, arena, [])
        found.held = [*self.held]
        for storage in overwritten:
            if (tensor := self.held[storage]) is not None:
                memory = tensor.untyped_storage().clone()
                form = tensor.storage_offset(), tensor.size(), tensor.stride()
                found.held[storage] = tensor.new_empty(0).set_(memory, *form)
        found.chance = dict(self.chance)
        found.layouts = self.layouts
        return found

    def gradient(self, place: int, take: Take | None) -> torch.Tensor | None:
        """Return the gradient of that place; None where there is none in this step."""
        return None if take is None or place in self.left_out else take(self.held)

    def clear(self) -> None:
        """Let go of everything."""
        while self.underway:
            self.underway.popitem()[1]()
        arena, self.arena = self.arena, None
        if arena is not None:
            arena.settle()
            self._arenas.append(arena)
        # A frame that an exception keeps has the same list.
        self.held.clear()
        self.chance.clear()
        self.plain, self.wanted = None, ()

    def __del__(self) -> None:
        self.clear()


class FreeStorage:
    """The instruction that gives a storage back."""

    __slots__ = ("storage",)

    def __init__(self, storage: int) -> None:
        self.storage = storage

    def __call__(self, memory: Memory) -> None:
        memory.held[self.storage] = None


class ForgetState:
    """The instruction that gives back the state from which a call was run again."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, memory: Memory) -> None:
        del memory.chance[self.number]


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


class Take:
    """Takes a view of what is held.

    Parameters
    ----------
    view
        What to take.
    form
        How the tensor that is held looked at the same storage when it was traced. In a step it may
        begin elsewhere: a parameter that has become a part of a vector.

    Attributes
    ----------
    skipped
        How many elements after that tensor the view begins.
    """

    __slots__ = ("other_type", "skipped", "view", "whole")

    def __init__(self, view: View, form: View) -> None:
        self.view = view
        self.whole, self.other_type = view == form, view.dtype != form.dtype
        nbytes = view.offset * view.dtype.itemsize - form.offset * form.dtype.itemsize
        self.skipped = nbytes // view.dtype.itemsize

    def __call__(self, held: list[Any]) -> torch.Tensor:
        view, base = self.view, held[self.view.storage]
        if self.whole:
            return base
        if self.other_type:
            begin = base.storage_offset() * base.itemsize // view.dtype.itemsize + self.skipped
            empty = torch.empty(0, dtype=view.dtype, device=base.device)
            return empty.set_(base.untyped_storage(), begin, view.size, view.stride)
        return base.as_strided(view.size, view.stride, base.storage_offset() + self.skipped)


class RunCall:
    """The instruction that runs a call, and sees to it that its results look as traced.

    Parameters
    ----------
    call
        What to run.
    forms
        How each storage looks where it is held.
    results
        Place among the flat results, View, and whether it is to be held.
    number
        The call's.
    again
        It has run before.
    replayed
        It draws random numbers, and the plan runs it more than once.
    device
        Whose random numbers these are.
    way
        How to carry it out; None where there is no choice.
    """

    # A deep net has tens of thousands of them.
    __slots__ = ("again", "arguments", "call", "device", "number", "replayed", "results", "target")

    def __init__(
        self,
        call: Call,
        forms: dict[int, View],
        results: Sequence[tuple[int, View, bool]],
        *,
        number: int,
        again: bool,
        replayed: bool,
        device: torch.device,
        way: str | None = None,
    ) -> None:
        self.call, self.results, self.number, self.device = call, results, number, device
        self.again, self.replayed = again, replayed
        target = call.target if way is None else _in_way(call.target, way)
        if call.target is LAYER and call.outputs[-1] is not None:
            target = in_training(target)
        self.target: Callable[..., Any] = target
        without = statistics(call) if again else ()
        # Flat, with a Take in the place of each tensor.
        self.arguments = [
            None
            if place in without
            else Take(arg, forms[arg.storage])
            if isinstance(arg, View)
            else arg
            for place, arg in enumerate(call.flat)
        ]

    def __call__(self, memory: Memory) -> None:
        held = memory.held
        flat = [it(held) if isinstance(it, Take) else it for it in self.arguments]
        args, kwargs = tree_unflatten(flat, self.call.spec)
        # Else it would hold what the call may be the last to need.
        del flat
        if self.replayed and self.again:
            now = chance(self.device)
            set_chance(self.device, memory.chance[self.number])
            result = self.target(*args, **kwargs)
            set_chance(self.device, now)
        else:
            if self.replayed:
                memory.chance[self.number] = chance(self.device)
            result = self.target(*args, **kwargs)
        if not self.results:
            return
        found = (result,) if isinstance(result, torch.Tensor) else tree_flatten(result)[0]
        for place, view, fresh in self.results:
            tensor = found[place]
            if tensor is None or not view.shows(tensor):
                layouts = memory.layouts if fresh else None
                tensor = _as_traced(self.call, view, tensor, found, layouts)
            if fresh:
                held[view.storage] = tensor


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
