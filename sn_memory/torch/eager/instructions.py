"""Instructions: functions that carry out one action of a plan on the step's memory.

All that is known in advance is prepared: which arguments are tensors, how each views its storage,
which results are kept. The step only fills in arguments and calls. Instructions check the layout of
their results; `Row` generates the code that runs once these layouts are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import Any, Protocol

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_unflatten

from ..errors import ReplayError
from ..host.copies import OffloadBuffers, Wait, no_wait
from ..quirks.recurrent import LAYER, in_training
from ..target.accelerator import rng_state, set_rng_state
from ..trace.record import Call, Layouts, View, form_of, layout_key
from ..trace.to_graph import statistics

Instruction = Callable[["Memory"], None]


class UpdateOps(Protocol):
    """Ops of a plan's graph that are not recorded calls, and their implementation.

    storages : number of storages, those of the recording included
    fetched : the caller's storages that such an op makes on the device instead
    used_gradients : names of parameters whose gradients are used inside the step, and not returned
    """

    storages: int
    fetched: frozenset[int]
    used_gradients: frozenset[str]

    def begin(self) -> None:
        """Begin a forward pass; raises if it would compute wrong values."""

    def end(self) -> None:
        """End a backward pass; from now on the caller may read what was written."""

    def copied(self, op: str) -> tuple[int, ...] | None:
        """Return the storages that an op starts to copy; None for a call."""

    def instruction(self, op: str, load: Callable[[View], ViewLoad]) -> Instruction:
        """Return the instruction of an op; `load` makes the loader of a view."""


class Memory:
    """State of a step between instructions.

    held : per storage, a tensor that holds it; None if it is not on the device.
    rng_states : state of the random number generator before a call that will run again, per call
    buffers : host buffers of offloaded storages; None if the plan offloads none.
    layouts : dictionary in which a trial records results with another layout than traced; None to
        raise instead.
    consumed : whether a backward pass has begun that frees this memory
    pending_copies : per storage that is being copied to the host or back, a function that waits
    left_out : indices of gradients that are None in this step, as no output they depend on has one
    plain, wanted : the step without the plan (`PlainStep` of higher_derivatives.py, or None), and
        the tensors whose gradients it returns
    used : if gradients are used inside the step, leaves that show which gradients a backward pass
        computes: an extra leaf, which stands for all of them, and the parameters
    passes : per graph task of autograd that keeps this memory: a copy of the memory, or all
        gradients.

    However the step ends - after the backward pass, with an exception, or as a forward pass without
    a backward pass - ops wait for the copies in flight before its storages are freed, and `buffers`
    go to `free_buffers`, for the next step.
    """

    def __init__(
        self, storages: int, buffers: OffloadBuffers | None, free_buffers: list[OffloadBuffers]
    ) -> None:
        self.held: list[torch.Tensor | None] = [None] * storages
        self.rng_states: dict[int, torch.Tensor] = {}
        self.buffers, self._free_buffers = buffers, free_buffers
        self.layouts: Layouts | None = None
        self.consumed = False
        self.pending_copies: dict[int, Wait] = {}
        self.left_out: frozenset[int] = frozenset()
        self.plain: Any = None
        self.wanted: Sequence[torch.Tensor] = ()
        self.used: Sequence[torch.Tensor] = ()
        self.passes: dict[int, Any] = {}

    def for_one_pass(self, overwritten: Iterable[int]) -> Memory:
        """Return a copy for a backward pass after which this memory is still valid.

        overwritten : storages that a backward pass overwrites
        """
        # With a separate list of free buffers: copies of pinned memory are freed after the pass.
        other = Memory(0, None if self.buffers is None else self.buffers.copied(), [])
        other.held, other.layouts = [*self.held], self.layouts
        for storage in overwritten:
            if (tensor := self.held[storage]) is not None:
                memory = tensor.untyped_storage().clone()
                form = tensor.storage_offset(), tensor.size(), tensor.stride()
                other.held[storage] = tensor.new_empty(0).set_(memory, *form)
        other.rng_states, other.pending_copies = {**self.rng_states}, {**self.pending_copies}
        return other

    def gradient(self, place: int, load: ViewLoad | None) -> torch.Tensor | None:
        """Return the gradient at an index; None if there is none in this step."""
        return None if load is None or place in self.left_out else load(self.held)

    def clear(self) -> None:
        """Free everything."""
        # First: storages and buffers are reused, and a copy in flight would still use them.
        while self.pending_copies:
            self.pending_copies.popitem()[1]()
        buffers, self.buffers = self.buffers, None
        if buffers is not None:
            buffers.forget()
            self._free_buffers.append(buffers)
        # In place: a frame kept alive by an exception holds the same list.
        self.held.clear()
        self.rng_states.clear()
        self.plain, self.wanted, self.used = None, (), ()

    def __del__(self) -> None:
        self.clear()


class FreeStorage:
    """Instruction that frees a storage; a class, so that `written` recognizes it."""

    __slots__ = ("storage",)

    def __init__(self, storage: int) -> None:
        self.storage = storage

    def __call__(self, memory: Memory) -> None:
        memory.held[self.storage] = None


def free_rng_state(number: int) -> Instruction:
    """Return the instruction that frees the RNG state from which a call was run again."""

    def free(memory: Memory) -> None:
        del memory.rng_states[number]

    return free


def offload(storage: int, host_copy: int) -> Instruction:
    """Return the instruction that starts copying a storage to its buffer on the host."""

    def start(memory: Memory) -> None:
        tensor = memory.held[storage]
        assert memory.buffers is not None
        assert tensor is not None
        # Held until `wait_for_copy` frees it: its memory must not be reused while it is read.
        memory.pending_copies[storage] = memory.buffers.offload(host_copy, tensor)

    return start


def prefetch(storage: int, host_copy: int, form: View) -> Instruction:
    """Return the instruction that allocates a storage and starts copying into it."""

    def start(memory: Memory) -> None:
        assert memory.buffers is not None
        held, pending = memory.held, memory.pending_copies
        held[storage], pending[storage] = memory.buffers.prefetch(host_copy, form)

    return start


def wait_for_copy(storage: int, *, free: bool = False) -> Instruction:
    """Return the instruction that waits for the copy of a storage, and frees it with `free`."""

    def wait(memory: Memory) -> None:
        memory.pending_copies.pop(storage, no_wait)()
        if free:
            memory.held[storage] = None

    return wait


class ViewLoad:
    """Loads a view of a held storage.

    form : the held tensor's own view of that storage when it was traced. In a step it may have
        another offset: a parameter that has become part of a flat vector.

    skipped : number of elements by which the view begins after that tensor
    """

    __slots__ = ("other_type", "skipped", "unchanged", "view")

    def __init__(self, view: View, form: View) -> None:
        self.view = view
        self.unchanged, self.other_type = view == form, view.dtype != form.dtype
        nbytes = view.offset * view.dtype.itemsize - form.offset * form.dtype.itemsize
        self.skipped = nbytes // view.dtype.itemsize

    def __call__(self, held: list[Any]) -> torch.Tensor:
        view, base = self.view, held[self.view.storage]
        if self.unchanged:
            return base
        # `as_strided` cannot change the dtype; `set_` can, and counts elements of the new one.
        if self.other_type:
            begin = base.storage_offset() * base.itemsize // view.dtype.itemsize + self.skipped
            empty = torch.empty(0, dtype=view.dtype, device=base.device)
            return empty.set_(base.untyped_storage(), begin, view.size, view.stride)
        return base.as_strided(view.size, view.stride, base.storage_offset() + self.skipped)


class RunCall:
    """Instruction that runs a call, and checks that its results have the traced layout.

    results : index in the flat results, View, and whether the result is to be held
    reruns : whether it has run before
    replayed : whether it draws random numbers on `device`, and the plan runs it more than once
    """

    # A deep net has tens of thousands of these instructions.
    __slots__ = (
        "arguments", "call", "device", "number", "replayed", "reruns", "results", "target",
    )  # fmt: skip

    def __init__(
        self,
        call: Call,
        forms: dict[int, View],
        results: Sequence[tuple[int, View, bool]],
        *,
        number: int,
        reruns: bool,
        replayed: bool,
        device: torch.device,
    ) -> None:
        self.call, self.results, self.number, self.device = call, results, number, device
        self.reruns, self.replayed = reruns, replayed
        trains = call.target is LAYER and call.outputs[-1] is not None
        self.target: Callable[..., Any] = in_training(LAYER) if trains else call.target
        without = statistics(call) if reruns else ()
        # Flat, with a ViewLoad in place of each tensor.
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
        flat = [arg(held) if isinstance(arg, ViewLoad) else arg for arg in self.arguments]
        args, kwargs = tree_unflatten(flat, self.call.spec)
        # Otherwise it would keep tensors alive that the call may be the last to need.
        del flat
        now = rng_state(self.device) if self.replayed else None
        if now is not None and self.reruns:
            set_rng_state(self.device, memory.rng_states[self.number])
        elif now is not None:
            memory.rng_states[self.number] = now
        result = self.target(*args, **kwargs)
        if now is not None and self.reruns:
            # Restored: later draws must equal those of a step that recomputes nothing.
            set_rng_state(self.device, now)
        leaves = tree_leaves(result) if self.results else ()
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
    """Record the layouts of a kernel's results, and return this one as traced; or raise."""
    if layouts is not None and tensor is not None:
        layouts[layout_key(call.target, call.flat)] = tuple(
            form_of(value, -1) if isinstance(value, torch.Tensor) else None for value in flat
        )
        if tensor.size() == view.size:
            # In the traced layout, so that a trial continues and sees layouts of later kernels too.
            copy = torch.empty_strided(
                view.size, view.stride, dtype=view.dtype, device=tensor.device
            )
            return copy.copy_(tensor)
    got = "nothing"
    if tensor is not None:
        got = f"a tensor of size {tuple(tensor.size())}, stride {tensor.stride()} and type "
        got += str(tensor.dtype)
    raise ReplayError(
        f"{call.target} returned {got}; traced were {view.size}, {view.stride} and {view.dtype}. "
        "Its rule for fake tensors is wrong. Plan with a real sample and a trial, which sees what "
        "the kernel does."
    )


Function = Callable[[Memory], None]
# Instructions per generated function: Python takes some kilobytes to compile a line.
PART = 100


class Names:
    """The globals of a program's generated functions, most of which use the same ones."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {
            "view": torch.as_strided,
            "leaves": tree_leaves,
            "rng_state": rng_state,
            "set_rng_state": set_rng_state,
        }
        self._known: dict[int, str] = {}
        # Held while names are assigned: two threads may generate code concurrently.
        self.lock = Lock()

    def name(self, letter: str, value: Any) -> str:
        """Return the name of a value, a new one if it has none yet."""
        # By id: values may be equal but not identical, or unhashable; `values` keeps them alive.
        known = self._known.get(id(value))
        if known is None:
            known = self._known[id(value)] = f"{letter}{len(self._known)}"
            self.values[known] = value
        return known


class Row:
    """A sequence of instructions.

    Kernels on little data take a microsecond. A loop over instructions that each fill in arguments,
    call and check the results takes several times that. So instructions run one by one, checked,
    only the first time. If the results have the traced layouts then, they always will: the forms of
    all arguments are the same in each step. From then on the row runs as a generated function of
    assignments,

        h[7] = f2(h[4], view(h[1], c3, c4))
        h[4] = None

    where `h` is `Memory.held`, `f2` an overload of an op and the rest are constants.

    is_checked : whether all results had their traced layouts: from then on generated code runs
    """

    __slots__ = ("_state", "is_checked", "names")

    def __init__(self, instructions: list[Instruction], names: Names) -> None:
        self.names = names
        self.is_checked = False
        # Generated functions, and the instructions after them: replaced together, as two threads
        # may run this.
        self._state: tuple[tuple[Function, ...], list[Instruction]] = (), instructions

    @property
    def instructions(self) -> list[Instruction]:
        """Instructions for which no code is generated yet."""
        return self._state[1]

    def run(self, memory: Memory) -> None:
        """Run all instructions."""
        functions, left = self._state
        for function in functions:
            function(memory)
        if not self.is_checked:
            for instruction in left:
                instruction(memory)
            # Results whose layouts were corrected need that in the next run as well.
            self.is_checked = not memory.layouts
            return
        while left:
            function = written(left[:PART], self.names)
            # Instructions are dropped: those of a deep net take as much memory as the functions.
            functions, left = (*functions, function), left[PART:]
            self._state = functions, left
            function(memory)


def written(instructions: Sequence[Instruction], names: Names) -> Function:
    """Return a generated function that does the same without checking results."""
    with names.lock:
        writer = _Writer(names)
        for instruction in instructions:
            if isinstance(instruction, RunCall):
                writer.call(instruction)
            elif isinstance(instruction, FreeStorage):
                writer.lines.append(f"h[{instruction.storage}] = None")
            else:
                writer.lines.append(f"{names.name('i', instruction)}(memory)")
        source = "\n    ".join(["def run(memory):", *writer.lines])
        namespace: dict[str, Function] = {}
        exec(compile(source, "<planned step>", "exec"), names.values, namespace)
        return namespace["run"]


class _Writer:
    """Generates the lines of one function."""

    def __init__(self, names: Names) -> None:
        self.lines: list[str] = ["h = memory.held"]
        self.name = names.name

    def call(self, instruction: RunCall) -> None:
        # For an overload, what its `__call__` calls.
        target = instruction.target
        target = target._op if isinstance(target, OpOverload) else target
        args, kwargs = tree_unflatten(instruction.arguments, instruction.call.spec)
        arguments = [self.argument(arg) for arg in args]
        arguments += [f"{key}={self.argument(arg)}" for key, arg in kwargs.items()]
        call = f"{self.name('f', target)}({', '.join(arguments)})"
        device = self.name("c", instruction.device) if instruction.replayed else ""
        state = f"memory.rng_states[{instruction.number}]"
        if instruction.replayed and instruction.reruns:
            self.lines += [f"now = rng_state({device})", f"set_rng_state({device}, {state})"]
        elif instruction.replayed:
            self.lines.append(f"{state} = rng_state({device})")
        self.results(call, _returns(instruction.call.target), instruction)
        if instruction.replayed and instruction.reruns:
            self.lines += [f"set_rng_state({device}, now)", "now = None"]

    def results(self, call: str, returns: str, instruction: RunCall) -> None:
        """Write a call, and the assignments of those results that are held."""
        kept = [(place, view.storage) for place, view, fresh in instruction.results if fresh]
        if not kept:
            self.lines.append(call)
        elif returns == "one":
            self.lines.append(f"h[{kept[0][1]}] = {call}")
        else:
            self.lines.append(f"r = {call}" if returns == "several" else f"r = leaves({call})")
            self.lines += [f"h[{storage}] = r[{place}]" for place, storage in kept]
            # Otherwise this local would keep the results alive beyond the action that frees them.
            self.lines.append("r = None")

    def argument(self, value: Any) -> str:
        if isinstance(value, ViewLoad):
            return self.load(value)
        # Written as literals; the `repr` of other values may not evaluate to the same value.
        if isinstance(value, bool | int | None):
            return repr(value)
        if isinstance(value, list | tuple) and any(isinstance(item, ViewLoad) for item in value):
            inside = "".join(f"{self.argument(item)}, " for item in value)
            return f"[{inside}]" if isinstance(value, list) else f"({inside})"
        return self.name("c", value)

    def load(self, load: ViewLoad) -> str:
        view, base = load.view, f"h[{load.view.storage}]"
        if load.unchanged:
            return base
        if load.other_type:
            return f"{self.name('t', load)}(h)"
        form = f"{self.name('c', view.size)}, {self.name('c', view.stride)}"
        # Without an offset the view begins where the tensor does.
        begin = f", {base}.storage_offset() + {load.skipped}" if load.skipped else ""
        return f"view({base}, {form}{begin})"


def _returns(target: Any) -> str:
    """Return how many flat results a call has: "one", "several", or "nested" in lists."""
    if not isinstance(target, OpOverload):
        return "one"
    kinds = [str(output.type) for output in target._schema.returns]
    if kinds == ["Tensor"]:
        return "one"
    return "several" if len(kinds) == 1 or not any("List" in kind for kind in kinds) else "nested"
