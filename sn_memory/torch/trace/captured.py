"""What was recorded of a training step: calls on storages, and what they are to the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..model.results import Form
from .record import Recording, View


@dataclass(frozen=True)
class Captured:
    """The calls of a training step, and which storages are whose.

    Parameters
    ----------
    recording
        The calls.
    boundary
        How many of them belong to the forward pass; the loss comes after those.
    parameters, buffers
        Path and View of each; of several paths to the same tensor the first.
    inputs
        View per flat input, None where it is no tensor.
    outputs
        Per flat output: its View, or the value itself where it is no tensor.
    output_form
        How the flat outputs make up what the model returns.
    differentiable
        Per flat output, whether a gradient comes back for it.
    output gradients
        View of the gradient of each differentiable output, as the backward pass wants it.
    gradients
        Name and View of the gradient for each parameter that requires one and then for each flat
        input that does (`input 0`); None where the outputs do not depend on it.
    only_outside
        The forward pass runs under autocast, and the backward pass, recorded outside of it as torch
        advises, would make other calls inside.
    numbers
        Per call, its place before any was put off; empty where none was. Ops are named by it, so
        that they have the same names at another batch size, where others are put off.
    earlier
        Per parameter whose gradient is there when the step begins, as after an earlier micro-batch,
        its name and the storage of that gradient. The new one is added to it by a call, which in a
        replay is autograd's.
    updated
        Per parameter that is updated as soon as its gradient is complete, and the gradient then let
        go, its name and storage. The update is a call, which in a replay is a hook's.
    ones
        Places of flat inputs that are all ones: the model looked at them, and would otherwise make
        other calls.
    looked
        These and those of inputs that are not, where it would make other calls if they were.
    """

    recording: Recording
    boundary: int
    parameters: tuple[tuple[str, View], ...]
    buffers: tuple[tuple[str, View], ...]
    inputs: tuple[View | None, ...]
    outputs: tuple[Any, ...]
    output_form: Form | None
    differentiable: tuple[bool, ...]
    output_gradients: tuple[View, ...]
    gradients: tuple[tuple[str, View | None], ...]
    only_outside: bool = False
    numbers: tuple[int, ...] = ()
    earlier: tuple[tuple[str, int], ...] = ()
    updated: tuple[tuple[str, int], ...] = ()
    ones: frozenset[int] = frozenset()
    looked: frozenset[int] = frozenset()

    @property
    def summed(self) -> dict[int, int]:
        """Per storage that gradients are added to, the number of the call that does it.

        That is a gradient that is there, or a parameter that is updated at once.
        """
        there = {storage for _, storage in (*self.earlier, *self.updated)}
        return {
            storage: at
            for at, call in enumerate(self.recording.calls)
            for storage in call.writes
            if storage in there
        }
