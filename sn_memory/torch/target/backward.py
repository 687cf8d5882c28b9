"""The backward pass of fake tensors on a GPU that is not here, without torch's engine.

The engine asks the accelerator for its stream wherever a gradient arrives, and there is none. So
autograd's nodes are called one by one, in the engine's order: of those whose gradients are all
there, the one made last. What a node saved goes when it has run, as in the engine; hooks of tensors
and nodes do not run.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

# What takes the gradient of a leaf.
Take = Callable[[torch.Tensor, torch.Tensor], None]
_LAST = 1 << 62
_COPY_THEIR_RESERVE = ("CudnnRnnBackward0", "CudnnBatchNormBackward0")


class _Saved:
    """A tensor that a node saved, until that node has run."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor


class Walk:
    """Backward passes of forward passes that ran inside `saving`."""

    def __init__(self) -> None:
        # A node of cuDNN's runs, which copies what it reserved unless torch's engine calls it; the
        # mode of fake tensors lets it read that as it is.
        self.copies_reserve = False
        self._unpacked: list[_Saved] = []
        self._caller: Any = None

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Around a forward pass: hold what nodes save, so that it can be let go."""
        with torch.autograd.graph.saved_tensors_hooks(_Saved, self._unpack):
            yield

    def _unpack(self, saved: _Saved) -> torch.Tensor:
        assert saved.tensor is not None
        # A node of torch's own asks from within its call. Who asks from elsewhere, as a checkpoint
        # for its inputs, may ask again.
        if sys._getframe(1) is self._caller:
            self._unpacked.append(saved)
        return saved.tensor

    def back(
        self, ends: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], take: Take
    ) -> None:
        """Carry the gradients of the ends back to the leaves."""
        arrived: dict[Any, dict[int, torch.Tensor]] = {}
        for end, gradient in zip(ends, gradients, strict=True):
            if end.grad_fn is None:
                take(end, gradient)
            else:
                _add(arrived.setdefault(end.grad_fn, {}), end.output_nr, gradient)
        waits = _arrivals(list(arrived))
        ready: list[tuple[int, int, Any]] = []
        for node in arrived:
            if not waits.get(node):
                heapq.heappush(ready, (-node._sequence_nr(), len(ready), node))
        count = len(ready)
        while ready:
            node = heapq.heappop(ready)[2]
            results = self._run(node, arrived.pop(node, {}), take)
            for place, (target, slot) in enumerate(node.next_functions):
                if target is None:
                    continue
                if place < len(results) and results[place] is not None:
                    form = target._input_metadata[slot]
                    _add(arrived.setdefault(target, {}), slot, _formed(results[place], form))
                waits[target] -= 1
                if not waits[target]:
                    heapq.heappush(ready, (-_number(target), count, target))
                    count += 1
            del results

    def _run(self, node: Any, given: dict[int, torch.Tensor], take: Take) -> Sequence[Any]:
        forms = node._input_metadata
        if hasattr(node, "variable"):
            if given:
                take(node.variable, given.pop(0))
            return ()
        if not given:
            return ()
        arguments = [given.get(place) for place in range(len(forms))]
        given.clear()
        if isinstance(node, BackwardCFunction):
            # A function of Python's is given zeros, unless it says that it need not.
            if getattr(node, "materialize_grads", True):
                arguments = [
                    torch.zeros(form.shape, dtype=form.dtype, device=form.device)
                    if it is None
                    else it
                    for it, form in zip(arguments, forms, strict=True)
                ]
            results: Any = node.apply(*arguments)
            node.maybe_clear_saved_tensors()
        else:
            self._caller = sys._getframe()
            self.copies_reserve = node.name() in _COPY_THEIR_RESERVE
            try:
                results = node(*arguments)
            finally:
                self._caller, self.copies_reserve = None, False
            for saved in self._unpacked:
                saved.tensor = None
            self._unpacked.clear()
        return results if isinstance(results, tuple) else (results,)


def _arrivals(roots: list[Any]) -> dict[Any, int]:
    """Return per node how many others send it a gradient."""
    waits: dict[Any, int] = {}
    seen: set[Any] = set()
    left = list(roots)
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        for target, _ in node.next_functions:
            if target is not None:
                waits[target] = waits.get(target, 0) + 1
                left.append(target)
    return waits


def _number(node: Any) -> int:
    # Gradients of leaves are taken at once.
    return _LAST if hasattr(node, "variable") else int(node._sequence_nr())


def _formed(gradient: torch.Tensor, form: Any) -> torch.Tensor:
    """Return a gradient in the shape and type of what it is a gradient of, as the engine does."""
    if tuple(gradient.shape) != tuple(form.shape):
        gradient = gradient.sum_to_size(form.shape)
    return gradient if gradient.dtype == form.dtype else gradient.to(form.dtype)


def _add(slots: dict[int, torch.Tensor], place: int, gradient: torch.Tensor) -> None:
    before = slots.get(place)
    slots[place] = gradient if before is None else before + gradient
