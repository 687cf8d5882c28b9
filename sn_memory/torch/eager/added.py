"""Ops of a plan that are no recorded calls: what a program needs to know of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from ..trace.record import View
from .instructions import Instruction, Memory, Take


class Added(Protocol):
    """Ops of a plan's graph that are no recorded calls, and who carries them out.

    Attributes
    ----------
    storages
        How many storages there are, those of the recording included.
    brought
        Of the storages that the caller gives, those that such an op makes instead.
    used_up
        Names of parameters whose gradients are used inside the step, and not handed out.
    """

    storages: int
    brought: frozenset[int]
    used_up: frozenset[str]

    def begin(self) -> None:
        """Hear that a forward pass begins; raises where it would not compute what it should."""

    def end(self) -> None:
        """Hear that a backward pass has ended; from now on the caller reads what was written."""

    def without_updates(self) -> AbstractContextManager[None]:
        """Let steps inside change no parameter, no gradient and no state of the optimizer."""

    def moves(self, op: str) -> tuple[int, ...] | None:
        """Return the storages that an op lets a lane read or write; None if it is a call."""

    def instruction(self, op: str, take: Callable[[View], Take]) -> Instruction:
        """Return what carries an op out; `take` makes what takes a view of what is held."""


def await_underway(storage: int) -> Instruction:
    """Return the instruction that waits for the lane that reads or writes a storage."""

    def arrived(memory: Memory) -> None:
        memory.underway.pop(storage, _nothing)()

    return arrived


def _nothing() -> None:
    pass
