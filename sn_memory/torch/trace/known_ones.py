"""Inputs that are all ones and that a model looks at, as at a mask that masks nothing.

Under fake tensors nothing can be looked at: a model either takes the way that needs no look (the
models of transformers then compute with the mask) or cannot be traced. Without a plan it looks, and
a mask of ones is left out, for a kernel that needs none. So such an input is handed in with its
values, and what follows from it alone has values too; beside each of them runs its fake twin, which
is what is recorded. Where a step recorded so is another than without the values, it is for inputs
of ones only, and says so. What the model makes itself, from no input, has values in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only

from ..errors import TraceError
from ..model.compare import same_bits
from ..model.ones import INTEGERS, MOST_KNOWN, is_ones, may_be_known
from .captured import Captured
from .record import Call


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


class KnownOnes(TorchDispatchMode):
    """Gives values to what follows from some inputs alone, or from none.

    Entered last, so it sees calls first. Only to a few integers: masks, positions, and what is made
    of them before they are numbers to compute with.
    """

    def __init__(self) -> None:
        super().__init__()
        # Per storage with values: a reference to it, so that its address stays its own while its
        # memory may go, and a fake tensor that looks at its twin from end to end.
        self._twins: dict[int, tuple[StorageWeakRef, torch.Tensor]] = {}
        # By the identity of an input, what the model is given for it.
        self._given: dict[int, torch.Tensor] = {}
        # Storages whose values are no longer right: what has none was written into them.
        self._stale: set[int] = set()

    def give(self, tensor: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
        """Return an input as the model is given it, with values, beside its fake twin."""
        if id(tensor) not in self._given:
            # A fake one of what is cut out of another ends where it is last looked at.
            size = fake.untyped_storage().nbytes() // tensor.itemsize
            given = torch.ones(size, dtype=tensor.dtype, device=tensor.device).as_strided(
                tensor.size(), tensor.stride(), tensor.storage_offset()
            )
            alike = _alike(given, fake)
            if alike:
                self._pair(given, fake)
            self._given[id(tensor)] = given if alike else fake
        return self._given[id(tensor)]

    def twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the fake tensor beside one with values; any other as it is."""
        known = self._twins.get(tensor.untyped_storage()._cdata)
        if known is None:
            return tensor
        whole = known[1] if known[1].dtype == tensor.dtype else known[1].view(tensor.dtype)
        return whole.as_strided(tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = _memories((args, kwargs))
        known = given & self._twins.keys()
        fakes, by_name = (
            tree_map_only(torch.Tensor, self.twin, (args, kwargs)) if known else (args, kwargs)
        )
        # What follows from no tensor at all is known as well: positions, the ones beside a mask.
        chosen = _is_random(func) if given else not makes_known(func)
        if given - known or known & self._stale or chosen:
            self._stale |= written(func, args, kwargs) & known
            return func(*fakes, **by_name)
        if not _makes_tensors(func):
            # A look: at one value, or at whether two are equal. Or several are written at once.
            if func._schema.is_mutable:
                func(*fakes, **by_name)
            with _disable_current_modes():
                return func(*args, **kwargs)
        recorded = func(*fakes, **by_name)
        if not all(is_small(it) for it in tree_flatten(recorded)[0]):
            self._stale |= written(func, args, kwargs) & known
            return recorded
        with _disable_current_modes():
            values = func(*args, **kwargs)
        return self._paired(values, recorded)

    def _paired(self, values: Any, recorded: Any) -> Any:
        made = list(zip(tree_flatten(values)[0], tree_flatten(recorded)[0], strict=True))
        for value, fake in made:
            if isinstance(value, torch.Tensor) and not (
                may_be_known(value) and _alike(value, fake)
            ):
                return recorded
        for value, fake in made:
            if isinstance(value, torch.Tensor):
                self._pair(value, fake)
        return values

    def _pair(self, value: torch.Tensor, fake: torch.Tensor) -> None:
        memory = value.untyped_storage()
        if memory._cdata not in self._twins:
            whole = fake.as_strided((memory.nbytes() // value.itemsize,), (1,), 0)
            self._twins[memory._cdata] = (StorageWeakRef(memory), whole)


def _memories(tree: Any) -> set[int]:
    found = [it for it in tree_flatten(tree)[0] if isinstance(it, torch.Tensor)]
    # A sparse one has no memory of its own, and is never known.
    return {it.untyped_storage()._cdata if it.layout == torch.strided else -id(it) for it in found}


def makes_known(func: Any) -> bool:
    """Whether what an op makes from no tensor is the same each time."""
    return func.namespace == "aten" and _makes_tensors(func) and not _is_random(func)


def _makes_tensors(func: Any) -> bool:
    return any("Tensor" in str(it.type) for it in func._schema.returns)


def _is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """Return the storages that a call writes into."""
    if not func._schema.is_mutable:
        return set()
    given = [
        args[at] if at < len(args) else kwargs.get(it.name)
        for at, it in enumerate(func._schema.arguments)
        if it.alias_info is not None and it.alias_info.is_write
    ]
    return _memories(given)


def is_small(result: Any) -> bool:
    """Whether a result is one that may be known once it is computed."""
    return not isinstance(result, torch.Tensor) or (
        result.dtype in INTEGERS and result.numel() <= MOST_KNOWN
    )


def _alike(value: torch.Tensor, fake: torch.Tensor) -> bool:
    """Whether a tensor lies as its fake twin does, so that views of one are views of the other."""
    return (
        value.size() == fake.size()
        and value.stride() == fake.stride()
        and value.storage_offset() == fake.storage_offset()
        and value.dtype == fake.dtype
        and value.device == fake.device
        and value.untyped_storage().nbytes() == fake.untyped_storage().nbytes()
    )
