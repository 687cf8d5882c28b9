"""Instructions in a row, written out as one function in Python.

Kernels on little data take a microsecond. A loop over instructions that each fill in arguments,
call and look at the results takes several times that. So instructions run one by one, checked, the
first time. Once results have shown that they lie as traced, they do so for good: the forms of all
arguments are the same in each step. From then on the row runs as a function of assignments,

    h[7] = f2(h[4], view(h[1], c3, c4))
    h[4] = None

where `h` is what is held, `f2` an overload of an op and the rest are constants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from threading import Lock
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_unflatten

from ..target.accelerator import rng_state, set_rng_state
from .instructions import FreeStorage, Instruction, Memory, RunCall, ViewLoad

Function = Callable[[Memory], None]
# Instructions that are written as one function: Python takes some kilobytes to compile a line.
PART = 100


class Names:
    """What the functions of a program speak of, by name. Most of it is in many of them.

    Attributes
    ----------
    values
        The globals of the functions.
    lock
        For who gives names: two threads may write at a time.
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {
            "view": torch.as_strided,
            "leaves": tree_leaves,
            "chance": rng_state,
            "set_chance": set_rng_state,
        }
        self._known: dict[int, str] = {}
        self.lock = Lock()

    def name(self, letter: str, value: Any) -> str:
        """Return the name of a value, a new one if it has none yet."""
        known = self._known.get(id(value))
        if known is None:
            known = self._known[id(value)] = f"{letter}{len(self._known)}"
            self.values[known] = value
        return known


class Row:
    """Instructions in a row.

    Parameters
    ----------
    instructions
        In order.
    names
        Of the program it is a part of.

    Attributes
    ----------
    is_checked
        Whether results were seen to lie as traced: what runs from then on is written.
    """

    __slots__ = ("_state", "is_checked", "names")

    def __init__(self, instructions: list[Instruction], names: Names) -> None:
        self.names = names
        self.is_checked = False
        # What is written, and what comes after it: exchanged at once, as two threads may run it.
        self._state: tuple[tuple[Function, ...], list[Instruction]] = (), instructions

    @property
    def instructions(self) -> list[Instruction]:
        """Those that are not written yet."""
        return self._state[1]

    def run(self, memory: Memory) -> None:
        """Do all of it on what is held."""
        functions, left = self._state
        for function in functions:
            function(memory)
        if not self.is_checked:
            for instruction in left:
                instruction(memory)
            # Results that were put right are to be so again.
            self.is_checked = not memory.layouts
            return
        while left:
            function = written(left[:PART], self.names)
            # Of a deep net the instructions would take as much again as what is written.
            functions, left = (*functions, function), left[PART:]
            self._state = functions, left
            function(memory)


def written(instructions: Sequence[Instruction], names: Names) -> Function:
    """Return a function that does what these do, without looking at results."""
    with names.lock:
        writer = _Writer(names)
        for kind, row in groupby(instructions, key=type):
            if kind is FreeStorage:
                writer.free([it for it in row if isinstance(it, FreeStorage)])
                continue
            for instruction in row:
                if isinstance(instruction, RunCall):
                    writer.call(instruction)
                else:
                    writer.lines.append(f"{names.name('i', instruction)}(memory)")
        return writer.function()


class _Writer:
    """Writes the lines of one function."""

    def __init__(self, names: Names) -> None:
        self.lines: list[str] = ["h = memory.held"]
        self.names = names
        self.name = names.name

    def function(self) -> Function:
        source = "def run(memory):\n" + "".join(f"    {line}\n" for line in self.lines)
        namespace: dict[str, Function] = {}
        exec(compile(source, "<planned step>", "exec"), self.names.values, namespace)
        return namespace["run"]

    def free(self, row: list[FreeStorage]) -> None:
        self.lines.append(" = ".join([*(f"h[{it.storage}]" for it in row), "None"]))

    def call(self, it: RunCall) -> None:
        # Of an overload, what its own __call__ calls.
        target = it.target._op if isinstance(it.target, OpOverload) else it.target
        args, kwargs = tree_unflatten(it.arguments, it.call.spec)
        arguments = [self.argument(arg) for arg in args]
        arguments += [f"{key}={self.argument(arg)}" for key, arg in kwargs.items()]
        call = f"{self.name('f', target)}({', '.join(arguments)})"
        device = self.name("c", it.device) if it.replayed else ""
        if it.replayed and it.again:
            self.lines.append(f"now = chance({device})")
            self.lines.append(f"set_chance({device}, memory.rng_states[{it.number}])")
        elif it.replayed:
            self.lines.append(f"memory.rng_states[{it.number}] = chance({device})")
        self.results(call, _returns(it.call.target), it)
        if it.replayed and it.again:
            self.lines += [f"set_chance({device}, now)", "now = None"]

    def results(self, call: str, returns: str, it: RunCall) -> None:
        """Write a call, and where those of its results go that are held."""
        kept = [(place, view.storage) for place, view, fresh in it.results if fresh]
        if not kept:
            self.lines.append(call)
        elif returns == "one":
            self.lines.append(f"h[{kept[0][1]}] = {call}")
        else:
            self.lines.append(f"r = {call}" if returns == "several" else f"r = leaves({call})")
            self.lines += [f"h[{storage}] = r[{place}]" for place, storage in kept]
            self.lines.append("r = None")

    def argument(self, value: Any) -> str:
        if isinstance(value, ViewLoad):
            return self.load(value)
        if isinstance(value, bool | int | None):
            return repr(value)
        if isinstance(value, list | tuple) and any(isinstance(it, ViewLoad) for it in value):
            inside = "".join(f"{self.argument(it)}, " for it in value)
            return f"[{inside}]" if isinstance(value, list) else f"({inside})"
        return self.name("c", value)

    def load(self, load: ViewLoad) -> str:
        view, base = load.view, f"h[{load.view.storage}]"
        if load.whole:
            return base
        if load.other_type:
            return f"{self.name('t', load)}(h)"
        form = f"{self.name('c', view.size)}, {self.name('c', view.stride)}"
        # Without a place it begins where the tensor does.
        begin = f", {base}.storage_offset() + {load.skipped}" if load.skipped else ""
        return f"view({base}, {form}{begin})"


def _returns(target: Any) -> str:
    """Return how many flat results a call has: "one", "several", or "nested" in lists."""
    if not isinstance(target, OpOverload):
        return "one"
    kinds = [str(it.type) for it in target._schema.returns]
    if kinds == ["Tensor"]:
        return "one"
    return "several" if len(kinds) == 1 or not any("List" in it for it in kinds) else "nested"
