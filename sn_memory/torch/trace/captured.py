"""What was recorded of a training step: calls on storages, and what they are to the model.

And which of several recordings is the step's, where the model may look at inputs of ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

from ..errors import TraceError
from ..model.known_values import is_ones, may_be_known
from ..model.results import Form, same_bits
from .record import Call, Recording, View


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
        Per flat output, whether a gradient may come back for it.
    output_gradients
        View of the gradient of each output at which the backward pass begins, as that wants it.
    gradients
        Name and View of the gradient for each parameter that requires one and then for each flat
        input that does (`input 0`); None where these outputs do not depend on it.
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
    ends
        Per differentiable output, whether the backward pass begins at it: at the loss alone where
        the model returns one.
    of_others
        Places among `gradients` that are None, as only the other outputs depend on them.
    reads
        Per module, the attributes that were read.
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
    ends: tuple[bool, ...] = ()
    of_others: tuple[int, ...] = ()
    reads: tuple[frozenset[str], ...] = ()

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


def assuming_ones(made: Callable[[frozenset[int]], Captured], arguments: Iterable[Any]) -> Captured:
    """Return what is recorded of a step that may look at those of its inputs that are all ones.

    It says as well at which inputs the model would look if they were.

    Parameters
    ----------
    made
        Records the step, where these inputs, by their places, are ones and have values.
    arguments
        The flat arguments.
    """
    flags = [
        (place, is_ones(it))
        for place, it in enumerate(arguments)
        if isinstance(it, torch.Tensor) and may_be_known(it) and _is_mask(it)
    ]
    found = _as_it_looks(made, frozenset(place for place, ones in flags if ones))

    def differs(places: frozenset[int]) -> bool:
        other = _or_none(made, found.ones | places)
        return other is not None and not _same(found, other)

    others = frozenset(place for place, ones in flags if not ones)
    looked = set(found.ones)
    # Together first: mostly none makes a difference.
    if others and differs(others):
        looked |= {it for it in others if len(others) == 1 or differs(frozenset({it}))}
    return replace(found, looked=frozenset(looked))


def _is_mask(tensor: torch.Tensor) -> bool:
    """Whether a tensor is made of zeros and ones."""
    return bool(((tensor == 0) | (tensor == 1)).all())


def _or_none(made: Callable[[frozenset[int]], Captured], ones: frozenset[int]) -> Captured | None:
    try:
        return made(ones)
    except TraceError:
        return None


def _as_it_looks(made: Callable[[frozenset[int]], Captured], ones: frozenset[int]) -> Captured:
    """Return what is recorded where the model may look at these; what cannot be so, without."""
    looking = _or_none(made, ones) if ones else None
    if looking is None:
        return made(frozenset())
    # Where this raises, the model cannot be traced but for inputs of ones.
    blind = _or_none(made, frozenset())
    if blind is not None and _same(blind, looking):
        return blind
    for place in sorted(ones) if len(ones) > 1 else ():
        # Where it cannot be recorded without the values of one, that one is looked at.
        fewer = _or_none(made, ones - {place}) if len(ones) > 1 else None
        if fewer is not None and _same(fewer, looking):
            looking, ones = fewer, ones - {place}
    return replace(looking, ones=ones)


def _same(one: Captured, other: Captured) -> bool:
    """Whether two recordings make the same calls on the same storages, and hand out the same."""
    constants, others = one.recording.constants, other.recording.constants
    return (
        list(map(_as_made, one.recording.calls)) == list(map(_as_made, other.recording.calls))
        and (one.outputs, one.gradients) == (other.outputs, other.gradients)
        and constants.keys() == others.keys()
        and all(_equal(it, others[storage]) for storage, it in constants.items())
    )


def _as_made(call: Call) -> tuple[Any, ...]:
    """Return what is called with what; a default that is spelled out, as some modes do, is one."""
    args, kwargs = call.arguments(lambda view: view)
    given = [
        args[at] if at < len(args) else kwargs.get(it.name, it.default_value)
        for at, it in enumerate(call.target._schema.arguments)
    ]
    # What is asked for its form only stands there as a tensor of that form.
    given = tree_map_only(torch.Tensor, lambda it: (it.size(), it.stride(), it.dtype), given)
    # NaN, as it is written, is equal to itself.
    given = tree_map_only(float, repr, given)
    return call.target, given, call.outputs, call.makes, call.writes, call.phase, call.scope


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if isinstance(one, FakeTensor) or isinstance(other, FakeTensor):
        return one is other
    # By bits: NaN is not equal to itself.
    return one.size() == other.size() and same_bits(one, other)
