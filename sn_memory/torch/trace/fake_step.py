"""A training step run on tensors that have sizes and no values: its peak, before it runs.

A graph knows when a tensor is last used. When it goes is another thing: what a forward of Python
has in its variables, and what autograd's own nodes have, stays until they return. So the step
itself is run, hooks and second runs included, and what is live is counted as in a real one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    unset_fake_temporarily,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map_only

from ..elsewhere.gpu import Gpu
from ..elsewhere.scratch import form_of, scratch_bytes
from ..model.known_values import (
    COMPUTED,
    MOST_KNOWN,
    filled,
    filling,
    is_any,
    is_small,
    makes_known,
    may_be_known,
    written,
)
from ..model.restore import restore_model
from ..model.results import ends_of, tensors_of
from ..model.snapshot import WrittenWeights, written_arguments
from ..model.step import Measured, restore_rng_state, run_step, tensors
from ..model.tracker import Scratch, StorageTracker
from .capture import fake_of
from .fake_rules import FakeMode, quiet


def fake_step(
    model: torch.nn.Module,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    known: Sequence[torch.Tensor] = (),
    heard: Callable[[int], None] | None = None,
    *,
    accumulate: bool = False,
    scratch: Scratch | None = None,
) -> Measured:
    """Run a step of a model on fake tensors; nothing is allocated, and the model is as before.

    arguments : positional and by keyword; known : tensors that are there beside these; heard : as
    in StorageTracker; accumulate, scratch : as in run_step.
    """
    mode = _Knowing()
    arguments = tree_map_only(torch.Tensor, mode.given, arguments)
    # Small parameters that the model keeps in lists of its own are computed with as they are.
    weights = WrittenWeights((it, it) for it in model.parameters())
    with restore_model(model), restore_rng_state(), weights, swapped(model, mode), mode:
        return run_step(
            model,
            model,
            arguments,
            known=known,
            heard=heard,
            accumulate=accumulate,
            scratch=scratch,
        )


def is_known(tensor: torch.Tensor) -> bool:
    """Whether a step run without values has those of an input: a few integers that are there."""
    return tensor.device.type == "cpu" and may_be_known(tensor)


class _Knowing(FakeMode):
    """Fake tensors; but what follows from small integers of the sample, or of none, has values.

    Models look at them: at a mask of ones, which they then leave out, or at the edges of a graph.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._given: dict[int, torch.Tensor] = {}
        # Storages whose values are no longer right: what has none was written into them.
        self._stale: dict[int, StorageWeakRef] = {}

    def given(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an input as the model is given it: the same tensor twice is one."""
        if not is_known(tensor):
            return fake_of(self, tensor)
        if id(tensor) not in self._given:
            with unset_fake_temporarily():
                self._given[id(tensor)] = tensor.clone()
        return self._given[id(tensor)]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = tensors((args, kwargs))
        if not given:
            result = super().__torch_dispatch__(func, types, args, kwargs)
            if not makes_known(func) or not all(map(_could_be_known, tensors(result))):
                return result
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        fill = filling(func, args, kwargs)
        if fill is not None:
            result = super().__torch_dispatch__(func, types, args, kwargs)
            return filled(result, fill) if _could_be_known(result) else result
        if is_any(func) or not all(map(self._knows, given)):
            if _looks(func) and all(map(_has_values, given)):
                # Of one tensor there are no two, one with values and one without.
                with unset_fake_temporarily():
                    return func(*args, **kwargs)
            into = written(func, args, kwargs)
            memories = [it.untyped_storage() for it in given if into and _has_values(it)]
            self._stale |= {it._cdata: StorageWeakRef(it) for it in memories if it._cdata in into}
            # To make a fake one of it, torch looks at its `grad`, and warns of what autograd made.
            own, by_name = tree_map_only(torch.Tensor, _detached, (args, kwargs))
            result = super().__torch_dispatch__(func, types, own, by_name)
            # The one that was written to, not the fake one beside it that was computed with.
            return _written_to(func, args, kwargs) if into else result
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            pass
        else:
            if sum(it.numel() for it in tensors(result)) > MOST_KNOWN:
                return result
        with unset_fake_temporarily():
            return func(*args, **kwargs)

    def _knows(self, tensor: torch.Tensor) -> bool:
        return _has_values(tensor) and tensor.untyped_storage()._cdata not in self._stale


def _has_values(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and may_be_known(tensor, COMPUTED)


def _looks(func: Any) -> bool:
    """Whether a call returns a view of what it is given."""
    return any(it.alias_info is not None for it in func._schema.returns) and not (
        func._schema.is_mutable
    )


def _written_to(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the arguments that a call writes into and returns."""
    returned = written_arguments(func, args, kwargs)[: len(func._schema.returns)]
    return returned[0] if len(returned) == 1 else tuple(returned) or None


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    # Not `is_leaf`: where autograd makes the history of a view anew, that waits for itself.
    if not tensor.requires_grad or isinstance(tensor, FakeTensor):
        return tensor
    with unset_fake_temporarily():
        return tensor.detach()


def _could_be_known(made: torch.Tensor) -> bool:
    return made.device.type == "cpu" and is_small(made)


def fake_step_on(
    gpu: Gpu,
    model: torch.nn.Module,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    moved: Callable[[int, int], None] | None = None,
    *,
    keep: bool = True,
) -> Measured:
    """Run a step as a GPU would that is not here; kernels' workspaces count, as far as known.

    moved : as in StorageTracker; parameters and buffers come first. Gradients that parameters have
    by now are there from the start, and added to. keep : whether parameters get gradients; else
    each is gone as soon as it is made
    """
    earlier = [it.grad is not None for it in model.parameters()]
    mode = FakeMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
    arguments = tree_map_only(torch.Tensor, lambda it: fake_of(mode, it, gpu.place), arguments)
    with restore_model(model), restore_rng_state(), swapped(model, mode, gpu.place), mode:
        args, kwargs = arguments
        there = [*model.parameters(), *model.buffers(), *tensors(arguments)]
        leaves = {id(it): it for it in there if it.requires_grad}
        # A tensor is not counted before it is met, so those of earlier steps are made outside.
        held = {
            id(it): torch.empty_like(it, requires_grad=False)
            for it, has in zip(model.parameters(), earlier, strict=True)
            if has and keep
        }
        there += held.values()
        tracker = StorageTracker(
            there,
            device=gpu.place,
            allocator="torch",
            scratch=partial(_scratch, gpu),
            moved=moved,
        )
        taken = {it.untyped_storage()._cdata for it in held.values()}

        def take(leaf: torch.Tensor, gradient: torch.Tensor) -> None:
            if id(leaf) not in leaves or not keep:
                return
            before = held.get(id(leaf))
            if before is not None:
                before.add_(gradient)
                return
            if gradient.untyped_storage()._cdata in taken or not _lies_like(gradient, leaf):
                gradient = torch.empty_like(leaf, requires_grad=False).copy_(gradient)
            held[id(leaf)] = gradient.detach()
            taken.add(gradient.untyped_storage()._cdata)

        with tracker, torch.enable_grad():
            with gpu.forward():
                returned = model(*args, **kwargs)
            outputs = tensors_of(returned, model)
            ends = ends_of(returned, outputs)
            del returned
            left = tracker.live_bytes - tracker.start_bytes
            gpu.back(ends, [torch.empty_like(it) for it in ends], take)
    return Measured({}, tracker.peak_bytes, tracker.peak_op, 0.0, left)


def _scratch(gpu: Gpu, func: Any, args: Any, kwargs: Any, _: Any) -> int:
    forms = [form_of(it) for it in tensors((args, kwargs))]
    return scratch_bytes(str(func.overloadpacket.__name__), forms, gpu.named)


def _lies_like(gradient: torch.Tensor, leaf: torch.Tensor) -> bool:
    """Whether autograd keeps a gradient as it is: it lies as its leaf does, and is no part."""
    return gradient.stride() == leaf.stride() and (
        gradient.untyped_storage().nbytes() == gradient.nbytes
    )


@contextmanager
def on_fakes(model: torch.nn.Module, arguments: Any) -> Iterator[Any]:
    """Let a model compute without values inside; gives the arguments as it takes them then."""
    mode = FakeMode(allow_non_fake_inputs=True)
    with swapped(model, mode), torch.enable_grad(), mode:
        yield tree_map_only(torch.Tensor, lambda it: fake_of(mode, it), arguments)


@contextmanager
def swapped(
    model: torch.nn.Module, mode: FakeMode, place: torch.device | None = None
) -> Iterator[None]:
    """Let parameters and buffers be tensors without values."""
    made: dict[int, torch.Tensor] = {}
    before = []
    for module in model.modules():
        for own_tensors in (module._parameters, module._buffers):
            before.append((own_tensors, dict(own_tensors)))
            for name, it in own_tensors.items():
                if it is None:
                    continue
                if id(it) not in made:
                    fake = fake_of(mode, it, place)
                    is_weight = isinstance(it, torch.nn.Parameter)
                    made[id(it)] = torch.nn.Parameter(fake, it.requires_grad) if is_weight else fake
                cast("dict[str, Any]", own_tensors)[name] = made[id(it)]
        if isinstance(module, torch.nn.RNNBase):
            # It keeps a list of its own, and would go on with the real ones.
            module._flat_weights = [getattr(module, it) for it in module._flat_weights_names]
    try:
        with quiet():
            yield
    finally:
        for own_tensors, own in before:
            cast("dict[str, Any]", own_tensors).update(own)
