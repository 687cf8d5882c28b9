"""The two contexts of a block under a policy: its forward pass, and its second run.

torch's selective checkpointing asks a policy at each op of the forward pass, and looks saved
results up in the second run by (op, number of the call). Two things it leaves to its users: what a
second run writes is written twice (statistics of batch norm, counters), and a dropout is one op
under torch.compile where it is four in eager, so that later calls of the same ops would get other
numbers. Here writes to what was there before are left out of the second run, and the ops of a
dropout do not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

# Others build on this class too; torch keeps its signature for them.
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _CachedTorchDispatchMode,
    create_selective_checkpoint_contexts,
)

_STATISTICS = ("running_mean", "running_var")
_DROPOUT = ("aten.bernoulli_.float", "aten.div_.Scalar", "aten.mul.Tensor")

# Per op, the numbers of its calls whose results are saved.
Saved = Mapping[str, tuple[int, ...]]


class Numbers:
    """Numbers calls of ops as both eager torch and torch.compile see them."""

    def __init__(self) -> None:
        self._count: Counter[str] = Counter()
        self._dropout = 0

    def of(self, op: str) -> int | None:
        """Return the number of this call among those of its op; None for a part of a dropout."""
        at = self._dropout
        if op == _DROPOUT[0]:
            self._dropout = 1
            return None
        if at and op == _DROPOUT[at]:
            self._dropout = (at + 1) % len(_DROPOUT)
            return None
        self._dropout = 0
        self._count[op] += 1
        return self._count[op] - 1


def contexts(saved: Saved) -> tuple[Any, Any]:
    """Return the contexts of one call of a block: a `context_fn` of `torch.utils.checkpoint`."""
    numbers = Numbers()
    kept = {op: frozenset(calls) for op, calls in saved.items()}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = str(op)
        if numbers.of(name) in kept.get(name, ()):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    first, again = create_selective_checkpoint_contexts(policy)
    return first, SecondRun(None, again.storage)


def context_fn(saved: Saved, key: str) -> Any:
    """Return the `context_fn` of a block; `key` stands for it in the cache of torch.compile."""
    made = partial(contexts, saved)
    made.cache_hash = key  # type: ignore[attr-defined]
    return made


class SecondRun(_CachedTorchDispatchMode):  # type: ignore[misc]
    """Gives saved results; leaves out what would be written a second time."""

    def __init__(self, policy: Any, storage: Any) -> None:
        super().__init__(policy, storage)
        self._made: set[int] = set()

    def __enter__(self) -> Any:
        self._made.clear()
        return super().__enter__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return super().__torch_dispatch__(func, types, args, kwargs)
        if func._schema.is_mutable and (into := self._written_before(func, args, kwargs)):
            # It counts, so that later calls have their numbers.
            self.func_counter[func] += 1
            return into[0] if len(into) == 1 else tuple(into)
        args, kwargs = without_statistics(func, args, kwargs)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for it in tree_leaves(result):
            if isinstance(it, torch.Tensor):
                self._made.add(_key(it))
        return result

    def _written_before(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[torch.Tensor]:
        """Return what a call writes to, if all of it was there before the second run."""
        into = written(func, args, kwargs)
        return into if into and all(_key(it) not in self._made for it in into) else []


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that a call writes to, by its schema."""
    found = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += [it for it in tree_leaves(value) if isinstance(it, torch.Tensor)]
    return found


def without_statistics(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a batch norm in training without its running statistics.

    Its schema names no write, but it changes them; without them it returns the same.
    """
    names = [it.name for it in func._schema.arguments]
    if "running_mean" not in names or str(func.overloadpacket).endswith("_functional"):
        return args, kwargs
    given = dict(zip(names, args, strict=False)) | kwargs
    if not (given.get("training") or given.get("train")):
        return args, kwargs
    positional = [
        None if name in _STATISTICS else it for name, it in zip(names, args, strict=False)
    ]
    named = {name: None if name in _STATISTICS else it for name, it in kwargs.items()}
    return tuple(positional), named


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
