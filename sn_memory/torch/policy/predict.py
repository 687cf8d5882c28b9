"""Predict the memory of a step with a policy by running torch's own executor on fake tensors.

The starts of each block's forward pass and rerun are noted, which gives the peak of each stretch
between them.

torch's selective checkpointing calls a policy at each op of the forward pass, and looks up saved
results in the rerun by (op, number of the call). It leaves two problems to its users: writes of a
rerun happen twice (statistics of batch norm, counters), and a dropout is one op under torch.compile
and four in eager, so that later calls of the same ops would get other numbers. Here a rerun does
not write to tensors that exist before it, and the ops of a dropout do not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _CachedTorchDispatchMode,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ..model.modes import Forwards
from ..model.snapshot import hidden_statistics, named_arguments, written_to
from ..model.tracker import Scratch
from ..trace.fake_step import fake_step

_DROPOUT = ("aten.bernoulli_.float", "aten.div_.Scalar", "aten.mul.Tensor")

# Per op, the numbers of its calls whose results are saved.
Saved = Mapping[str, tuple[int, ...]]


class Numbers:
    """Numbers calls of ops such that eager torch and torch.compile agree."""

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


def contexts(saved: Saved, begins: Callable[[], None] = lambda: None) -> tuple[Any, Any]:
    """Return the contexts of one call of a block: a `context_fn` of `torch.utils.checkpoint`.

    begins : called when the rerun begins
    """
    numbers = Numbers()
    kept = {op: frozenset(calls) for op, calls in saved.items()}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = str(op)
        if numbers.of(name) in kept.get(name, ()):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    first, second = create_selective_checkpoint_contexts(policy)
    return first, SecondRun(second.storage, begins)


def context_fn(saved: Saved, key: str) -> Any:
    """Return the `context_fn` of a block; `key` identifies it in torch.compile's cache."""
    context_of = partial(contexts, saved)
    context_of.cache_hash = key  # type: ignore[attr-defined]
    return context_of


# torch keeps the constructor of this private class stable, as others derive from it, too.
class SecondRun(_CachedTorchDispatchMode):  # type: ignore[misc]
    """Returns saved results in a rerun; skips calls that would write a second time."""

    def __init__(self, storage: Any, begins: Callable[[], None]) -> None:
        super().__init__(None, storage)
        self._begins = begins
        self._outputs: set[int] = set()

    def __enter__(self) -> Any:
        # A retained graph may run backward again, with another rerun.
        self._outputs.clear()
        self._begins()
        return super().__enter__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return super().__torch_dispatch__(func, types, args, kwargs)
        if into := self._written_before(func, args, kwargs):
            # Counted nevertheless, so that later calls get the right numbers.
            self.func_counter[func] += 1
            return into[0] if len(into) == 1 else tuple(into)
        named = named_arguments(func, args, kwargs)
        if hidden := hidden_statistics(func, named):
            args, kwargs = (), named | dict.fromkeys(hidden)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._outputs.add(_key(leaf))
        return result

    def _written_before(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[torch.Tensor]:
        """Return the tensors that a call writes to, if all of them existed before the rerun."""
        into = written_to(func, args, kwargs)
        return into if into and all(_key(tensor) not in self._outputs for tensor in into) else []


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


# Per block, its saved results; None for a block that is not rerun.
Selection = Mapping[str, Saved | None]


@dataclass
class Stretch:
    """A part of a step that begins with a block's forward pass or (phase `backward`) its rerun.

    peak_bytes : the most live bytes
    gradient_bytes : bytes of the parameters' gradients at its start
    """

    path: str
    phase: str
    peak_bytes: int = 0
    gradient_bytes: int = 0


@dataclass
class Step:
    """The peak of a step, the op that reaches it, and its stretches in order."""

    peak_bytes: int = 0
    peak_op: str = ""
    stretches: list[Stretch] = field(default_factory=list)


def predicted(
    model: torch.nn.Module,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    saved: Selection,
    known: list[torch.Tensor],
    scratch: Scratch,
) -> Step:
    """Return the memory of a step whose blocks are rerun with a selection of saved results.

    known : tensors that count besides the model's and the arguments
    scratch : returns the scratch bytes of a kernel
    """
    step = Step(stretches=[Stretch("", "forward")])

    def heard(live_bytes: int) -> None:
        now = step.stretches[-1]
        now.peak_bytes = max(now.peak_bytes, live_bytes)

    gradient_bytes = 0

    def accumulated(parameter: torch.Tensor) -> None:
        nonlocal gradient_bytes
        gradient_bytes += parameter.nbytes

    def started(path: str, phase: str) -> None:
        if len(step.stretches) == 1:
            # Only once the step runs, as the model then has its fake parameters.
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(accumulated)
        step.stretches.append(Stretch(path, phase, gradient_bytes=gradient_bytes))

    blocks = {model.get_submodule(path): (path, results) for path, results in saved.items()}
    with Forwards({block: _around(block.forward, *of, started) for block, of in blocks.items()}):
        peak = fake_step(model, arguments, known, heard, scratch=scratch)
    step.peak_bytes, step.peak_op = peak.peak_bytes, peak.peak_op
    return step


def _around(
    forward: Callable[..., Any], path: str, saved: Saved | None, started: Callable[[str, str], None]
) -> Callable[..., Any]:
    """Return a block's forward under a checkpoint; `started` is called at the start of each run."""

    def run(*args: Any, **kwargs: Any) -> Any:
        started(path, "forward")
        if saved is None:
            result = forward(*args, **kwargs)
        else:
            # Only the non-reentrant variant takes a `context_fn`.
            both = partial(contexts, saved, lambda: started(path, "backward"))
            result = checkpoint(forward, *args, use_reentrant=False, context_fn=both, **kwargs)
        # The ops that follow are in no block.
        started("", "forward")
        return result

    return run


def sharded_peak(
    model: torch.nn.Module, blocks: Iterable[str], stretches: Sequence[Stretch], ranks: int
) -> int:
    """Return the peak of a rank under FSDP2; each block is a unit, and everything else another.

    stretches : those of a step in one process
    """
    if ranks < 1:
        raise ValueError(f"got ranks {ranks!r}, expected 1 or more.")
    units: dict[str, int] = {}
    counted: set[int] = set()
    for path in blocks:
        # A parameter shared by two blocks is gathered with the first.
        own = [
            param for param in model.get_submodule(path).parameters() if id(param) not in counted
        ]
        units[path] = sum(param.nbytes for param in own)
        counted |= {id(param) for param in own}
    parameter_bytes = sum(param.nbytes for param in model.parameters())
    rest = parameter_bytes - sum(units.values())
    order = [stretch.path for stretch in stretches if stretch.path and stretch.phase == "forward"]
    most = 0
    for stretch in stretches:
        held = stretch.peak_bytes - parameter_bytes - stretch.gradient_bytes
        shards = (parameter_bytes + stretch.gradient_bytes) / ranks
        if stretch.phase == "forward":
            gathered = 2 * units.get(stretch.path, 0)
        else:
            place = order.index(stretch.path)
            ahead = units[order[place - 1]] if place else 0
            # Its gathered parameters, the prefetched ones, and the reduction of its gradients.
            gathered = units[stretch.path] + 2 * ahead + units[stretch.path]
        most = max(most, round(held + shards + rest + gathered))
    return most
