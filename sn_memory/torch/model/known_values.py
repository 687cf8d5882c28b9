"""Inputs that are all ones and that a model looks at, as at a mask that masks nothing.

Under fake tensors nothing can be looked at: a model either takes the way that needs no look (the
models of transformers then compute with the mask) or cannot be traced. Without a plan it looks, and
a mask of ones is left out, for a kernel that needs none. So such an input is handed in with its
values, and what follows from it alone has values too; beside each of them runs its fake twin, which
is what is recorded. Where a step recorded so is another than without the values, it is for inputs
of ones only, and says so. What the model makes itself, from no input, has values in any case.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_flatten, tree_map_only

from ..device.resting import asked_for_device
from .snapshot import written_to

# Elements of a tensor whose values are computed.
MOST_KNOWN = 1 << 20
# Torch has others, for storing only: they cannot even be compared.
INTEGERS = {
    torch.bool,
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
}
# What is made of integers, or of nothing, may be floats on its way to a mask.
COMPUTED = {*INTEGERS, torch.float16, torch.bfloat16, torch.float32, torch.float64}


def may_be_known(tensor: torch.Tensor, dtypes: Container[torch.dtype] = INTEGERS) -> bool:
    """Whether a tensor has values that a model may look at: a few that are there.

    dtypes : of an input, integers: floats of ones are what many write for any input
    """
    return (
        tensor.dtype in dtypes
        and tensor.layout == torch.strided
        and not isinstance(tensor, FakeTensor)
        and not is_traceable_wrapper_subclass(tensor)
        and not tensor.is_meta
        and tensor.numel() <= MOST_KNOWN
    )


def is_ones(value: object) -> bool:
    """Whether it is a tensor whose values may be known, and all are 1.

    On a GPU this waits for it, as a model that looks does.
    """
    return isinstance(value, torch.Tensor) and may_be_known(value) and bool((value == 1).all())


class KnownOnes(TorchDispatchMode):
    """Gives values to what follows from some inputs alone, or from none.

    Entered last, so it sees calls first. Only to a few numbers: masks, positions, and what is made
    of them before a parameter or another input is met.
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
        device = asked_for_device(func, args)
        if device is not None:
            return device
        kwargs = kwargs or {}
        if func is torch.ops.aten.lift_fresh.default and not isinstance(args[0], FakeTensor):
            return self._lifted(func, args[0])
        given = _memories((args, kwargs))
        known = given & self._twins.keys()
        fakes, by_name = (
            tree_map_only(torch.Tensor, self.twin, (args, kwargs)) if known else (args, kwargs)
        )
        # What follows from no tensor at all is known as well: positions, the ones beside a mask.
        chosen = is_any(func) if given else not makes_known(func)
        fill = filling(func, args, kwargs)
        if fill is not None:
            recorded = func(*fakes, **by_name)
            if is_small(recorded):
                return self._paired(filled(recorded, fill), recorded)
            return recorded
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

    def _lifted(self, func: Any, made: torch.Tensor) -> Any:
        """A tensor that Python made, as torch.tensor([1, 2]), which is a constant of the plan."""
        recorded = func(made)
        if not is_small(made):
            return recorded
        with _disable_current_modes():
            # The constant stays as it is, whatever the model writes into it while it is traced.
            value = made.clone()
        return self._paired(value, recorded)

    def _paired(self, values: Any, recorded: Any) -> Any:
        made = list(zip(tree_flatten(values)[0], tree_flatten(recorded)[0], strict=True))
        for value, fake in made:
            if isinstance(value, torch.Tensor) and not (
                may_be_known(value, COMPUTED) and _alike(value, fake)
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
    return func.namespace == "aten" and _makes_tensors(func) and not is_any(func)


# Of their first argument these ask the form only; what they fill the result with.
_FILLS: dict[Any, Any] = {
    torch.ops.aten.zeros_like: 0,
    torch.ops.aten.new_zeros: 0,
    torch.ops.aten.ones_like: 1,
    torch.ops.aten.new_ones: 1,
}
_FILLS_WITH = {torch.ops.aten.full_like: 1, torch.ops.aten.new_full: 2}


def filling(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what a call fills a new tensor with, whatever tensor it is given; None for others."""
    place = _FILLS_WITH.get(func.overloadpacket)
    if place is None:
        return _FILLS.get(func.overloadpacket)
    return args[place] if len(args) > place else kwargs["fill_value"]


def filled(like: torch.Tensor, fill: Any) -> torch.Tensor:
    """Return a tensor with values that lies as a fake one does."""
    with _disable_current_modes():
        made = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=like.device)
        return made.fill_(fill)


def _makes_tensors(func: Any) -> bool:
    return any("Tensor" in str(it.type) for it in func._schema.returns)


def is_any(func: Any) -> bool:
    """Whether what it makes is drawn, or what was in memory.

    What fills that may be no op of torch (a kernel of others writes to an address), and unseen.
    """
    return torch.Tag.nondeterministic_seeded in func.tags or "empty" in func.overloadpacket.__name__


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """Return the storages that a call writes into."""
    return _memories(written_to(func, args, kwargs))


def is_small(result: Any) -> bool:
    """Whether a result is one that may be known once it is computed."""
    return not isinstance(result, torch.Tensor) or (
        result.dtype in COMPUTED and result.numel() <= MOST_KNOWN
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
