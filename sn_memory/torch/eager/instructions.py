"""Instructions: what does one action of a plan on what is held.

Everything that can be known ahead is: which arguments are tensors, how each looks at its storage,
which results are kept. What is left for the step is to fill in and call. As they stand here calls
are checked for how their results lie; `codegen.py` has what runs once that is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..errors import ReplayError
from ..host.copies import OffloadBuffers, Wait, no_wait
from ..quirks.recurrent import LAYER, in_training
from ..target.accelerator import rng_state, set_rng_state
from ..trace.op_seconds import carried_out
from ..trace.record import Call, Layouts, View, form_of, layout_key
from ..trace.to_graph import statistics

Instruction = Callable[["Memory"], None]


class UpdateOps(Protocol):
    """Ops of a plan's graph that are no recorded calls, and who carries them out.

    Attributes
    ----------
    storages
        How many storages there are, those of the recording included.
    fetched
        Of the storages that the caller gives, those that such an op makes instead.
    used_gradients
        Names of parameters whose gradients are used inside the step, and not handed out.
    """

    storages: int
    fetched: frozenset[int]
    used_gradients: frozenset[str]

    def begin(self) -> None:
        """Note that a forward pass begins; raises where it would not compute what it should."""

    def end(self) -> None:
        """Note that a backward pass has ended; from now on the caller reads what was written."""

    def copied(self, op: str) -> tuple[int, ...] | None:
        """Return the storages that an op starts to copy; None if it is a call."""

    def instruction(self, op: str, load: Callable[[View], ViewLoad]) -> Instruction:
        """Return what carries an op out; `load` makes what loads a view of what is held."""


class Memory:
    """What is held between instructions.

    Attributes
    ----------
    held
        Per storage, a tensor that holds it; None where it is not on the device.
    rng_states
        State of the random number generator before a call that will run again, per call.
    buffers
        Where storages on the host lie; None where the plan moves none.
    layouts
        Where a trial notes results that are laid out otherwise than traced; None raises instead.
    begun
        Whether a backward pass has begun to use it up.
    pending_copies
        Per storage that is being copied to the host or back, what waits for that.
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
    back, and `buffers` go to `free_buffers`, for the next step.
    """

    def __init__(
        self,
        storages: int,
        buffers: OffloadBuffers | None,
        free_buffers: list[OffloadBuffers],
    ) -> None:
        self.held: list[torch.Tensor | None] = [None] * storages
        self.rng_states: dict[int, torch.Tensor] = {}
        self.buffers, self._free_buffers = buffers, free_buffers
        self.layouts: Layouts | None = None
        self.begun = False
        self.pending_copies: dict[int, Wait] = {}
        self.left_out: frozenset[int] = frozenset()
        self.plain: Any = None
        self.wanted: Sequence[torch.Tensor] = ()
        self.passes: dict[int, Any] = {}

    def for_one_pass(self, overwritten: Iterable[int]) -> Memory:
        """Return memory for a backward pass that leaves this as it is.

        overwritten : storages that a backward pass writes over
        """
        other = Memory(0, None if self.buffers is None else self.buffers.copied(), [])
        other.held = [*self.held]
        for storage in overwritten:
            if (tensor := self.held[storage]) is not None:
                memory = tensor.untyped_storage().clone()
                form = tensor.storage_offset(), tensor.size(), tensor.stride()
                other.held[storage] = tensor.new_empty(0).set_(memory, *form)
        other.rng_states = dict(self.rng_states)
        other.pending_copies = dict(self.pending_copies)
        other.layouts = self.layouts
        return other

    def gradient(self, place: int, load: ViewLoad | None) -> torch.Tensor | None:
        """Return the gradient of that place; None where there is none in this step."""
        return None if load is None or place in self.left_out else load(self.held)

    def clear(self) -> None:
        """Let go of everything."""
        while self.pending_copies:
            self.pending_copies.popitem()[1]()
        buffers, self.buffers = self.buffers, None
        if buffers is not None:
            buffers.forget()
            self._free_buffers.append(buffers)
        # A frame that an exception keeps has the same list.
        self.held.clear()
        self.rng_states.clear()
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


def free_rng_state(number: int) -> Instruction:
    """Return the instruction that gives back the state from which a call was run again."""

    def free(memory: Memory) -> None:
        del memory.rng_states[number]

    return free


def offload(storage: int, host_copy: int) -> Instruction:
    """Return the instruction that starts copying a storage to its buffer on the host."""

    def start(memory: Memory) -> None:
        tensor = memory.held[storage]
        assert memory.buffers is not None
        assert tensor is not None
        memory.pending_copies[storage] = memory.buffers.offload(host_copy, tensor)

    return start


def prefetch(storage: int, host_copy: int, form: View) -> Instruction:
    """Return the instruction that makes a storage anew and starts copying into it."""

    def start(memory: Memory) -> None:
        assert memory.buffers is not None
        held, pending = memory.held, memory.pending_copies
        held[storage], pending[storage] = memory.buffers.prefetch(host_copy, form)

    return start


def wait_for_copy(storage: int, *, free: bool = False) -> Instruction:
    """Return the instruction after which a storage that is copied may be used, or is freed."""

    def wait(memory: Memory) -> None:
        memory.pending_copies.pop(storage, no_wait)()
        if free:
            memory.held[storage] = None

    return wait


class ViewLoad:
    """Loads a view of what is held.

    Parameters
    ----------
    view
        What to load.
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
        target = call.target if way is None else _carried_out(call.target, way)
        if call.target is LAYER and call.outputs[-1] is not None:
            target = in_training(target)
        self.target: Callable[..., Any] = target
        without = statistics(call) if again else ()
        # Flat, with a ViewLoad in the place of each tensor.
        self.arguments = [
            None
            if place in without
            else ViewLoad(arg, forms[arg.storage])
            if isinstance(arg, View)
            else arg
            for place, arg in enumerate(call.flat)
        ]

    def __call__(self, memory: Memory) -> None:
        held = memory.held
        flat = [it(held) if isinstance(it, ViewLoad) else it for it in self.arguments]
        args, kwargs = tree_unflatten(flat, self.call.spec)
        # Else it would hold what the call may be the last to need.
        del flat
        if self.replayed and self.again:
            now = rng_state(self.device)
            set_rng_state(self.device, memory.rng_states[self.number])
            result = self.target(*args, **kwargs)
            set_rng_state(self.device, now)
        else:
            if self.replayed:
                memory.rng_states[self.number] = rng_state(self.device)
            result = self.target(*args, **kwargs)
        if not self.results:
            return
        leaves = (result,) if isinstance(result, torch.Tensor) else tree_flatten(result)[0]
        for place, view, fresh in self.results:
            tensor = leaves[place]
            if tensor is None or not view.shows(tensor):
                layouts = memory.layouts if fresh else None
                tensor = _as_traced(self.call, view, tensor, leaves, layouts)
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
            copy = torch.empty_strided(
                view.size, view.stride, dtype=view.dtype, device=tensor.device
            )
            return copy.copy_(tensor)
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


def _carried_out(target: Any, way: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with carried_out(way):
            return target(*args, **kwargs)

    return run
