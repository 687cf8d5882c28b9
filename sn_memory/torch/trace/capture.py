"""Record a training step under fake tensors: all calls, without memory or arithmetic.

The model's parameters and buffers are swapped for fake ones while its forward runs, and autograd
runs its backward pass as usual; the recorder records each call. The model is always restored. A
forward that does more than compute from its inputs (keeps a count, draws from Python's random
numbers, reads values) cannot be replayed from its calls and is refused.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from operator import not_
from threading import get_ident
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules import module as module_hooks
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from ..errors import SetsStateError, TraceError, first_line, innermost_line, sample_line
from ..model.guards import recorded_reads
from ..model.modes import casting, kernel_of_max_pool1d, outside_autocast, replaced_tensors
from ..model.results import ends_of, flatten_outputs, same_bits
from ..model.signature import is_ones, may_be_known
from ..model.snapshot import TRACING_HOOKS, StateSnapshot, named_arguments
from ..model.step import changes_what_it_is_given, forbid_external_rng, restore_model
from ..target.gpu import Gpu
from .fake import FakeMode, ValueMode, fake_of, quiet
from .rearrange import without_unused
from .record import Call, Captured, Layouts, Recorder, View, layout_key


def capture(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    layouts: Layouts | None = None,
    gpu: Gpu | None = None,
    *,
    ends: Sequence[bool] = (),
    arriving: Sequence[tuple[int, ...] | None] = (),
    part: bool = False,
) -> Captured:
    """Record a training step of a model; raises TraceError (see `trace`).

    layouts : observed layouts of kernels' results, as in Recorder; gpu : where the step is to run,
    if not where the model is; ends : as in Captured, for a model with as many such outputs;
    arriving : per end the strides of its incoming gradient, None for those of the output; part :
    whether it is part of a larger step, which continues with the gradients of the inputs
    """

    def record(ones: frozenset[int], *, inside: bool = False) -> Captured:
        capture = _Capture(model, layouts, gpu, ends, arriving, part, ones, inside)
        return capture.captured(args, kwargs)

    with recorded_reads(model) as reads:
        if gpu is not None:
            return replace(record(frozenset()), reads=reads())
        captured = _assuming_ones(record, tree_leaves((args, kwargs)))
        if casting():
            # Recorded again only to check: would backward inside autocast make other calls?
            inside = record(captured.ones, inside=True)
            captured = replace(captured, only_outside=_call_keys(inside) != _call_keys(captured))
        return replace(captured, reads=reads())


def _call_keys(captured: Captured) -> list[Any]:
    return [layout_key(call.target, call.flat) for call in captured.recording.calls]


def _left_outside(recorder: Recorder) -> str:
    """Describe what still holds results of a finished forward; empty if nothing does."""
    # Weak references first: usually nothing is held, and the process has many objects.
    if not recorder.still_held():
        return ""
    torch.clear_autocast_cache()  # it keeps copies of weights until autocast ends
    gc.collect()  # hooks on autograd's nodes make cycles
    held = recorder.still_held()
    left = [
        value
        for value in (gc.get_objects() if held else ())
        if type(value) is FakeTensor and value.untyped_storage()._cdata in held
    ]
    holders = gc.get_referrers(*left) if left else []
    others = [one for one in holders if one is not left and not isinstance(one, _OF_AUTOGRAD)]
    # A function that keeps its own result makes a cycle of autograd nodes, which no step sees.
    if not left or (not others and any(isinstance(x, torch._C._FunctionBase) for x in holders)):
        return ""
    # Holders hidden by gc.freeze() have no known type.
    kind = type(others[0]).__name__ if others else "place"
    inside = {*map(id, gc.get_referents(*others[:1]))} or {id(left[0])}
    call = next(held[value.untyped_storage()._cdata] for value in left if id(value) in inside)
    return f"{kind} outside of its modules ({call.target} in {call.scope or 'the model'})"


_OF_AUTOGRAD = (FrameType, torch.Tensor, torch._C._FunctionBase)


@dataclass
class _Capture:
    """One recording: fake tensors by the identity of the real ones, and the recorder.

    The first fields are parameters of `capture`.

    ones : indices of inputs whose values the model may read, as they are all ones
    inside : whether the backward pass runs inside autocast if the forward pass does
    """

    model: torch.nn.Module
    layouts: Layouts | None
    gpu: Gpu | None
    ends: Sequence[bool]
    arriving: Sequence[tuple[int, ...] | None]
    part: bool
    ones: frozenset[int]
    inside: bool

    def __post_init__(self) -> None:
        self.mode = ValueMode(tracing=True) if self.gpu is None else FakeMode(self.gpu.walk)
        self.recorder = Recorder(self.layouts, self.mode.is_look)
        self.fakes: dict[int, torch.Tensor] = {}
        # Per fake of an input that is all ones, the tensor passed to the model instead.
        self.ones_of: dict[int, torch.Tensor] = {}
        # By id of the fake, before the forward pass: whether a parameter requires a gradient, and
        # the View of a parameter or buffer.
        self.trained: dict[int, bool] = {}
        self.views: dict[int, View] = {}

    def captured(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Captured:
        """Record the step; raises TraceError if it cannot be replayed."""
        if isinstance(self.model, torch.jit.ScriptModule):
            raise TraceError(
                "the model is a ScriptModule, whose parts cannot be swapped. Pass the nn.Module it "
                "was made from."
            )
        with restore_model(self.model, (args, kwargs)), forbid_external_rng(), quiet():
            try:
                with (
                    replaced_tensors(self.model, partial(self.fake, role="parameter")),
                    replaced_tensors(self.model, partial(self.fake, role="state"), "_buffers"),
                ):
                    captured = self.run(args, kwargs)
                left = _left_outside(self.recorder)
            except TraceError:
                raise
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise TraceError(
                    f"{error.func} makes the control flow of the model depend on values, not only "
                    f"on shapes ({innermost_line(error.__traceback__)}). Compute with tensors "
                    "instead of Python numbers there."
                ) from error
            except UnsupportedOperatorException as error:
                raise TraceError(
                    f"{error.func} has no rule for fake tensors "
                    f"({innermost_line(error.__traceback__)}). Register one with "
                    "torch.library.register_fake."
                ) from error
            except Exception as error:
                raise TraceError(
                    f"it raises {type(error).__name__} under fake tensors "
                    f"({innermost_line(error.__traceback__)}): "
                    f"{first_line(error).rstrip('.')}. The sample is {sample_line(args, kwargs)}; "
                    "is it what the model takes?"
                ) from error
        # Results held by its modules have raised an error before this.
        if left:
            raise SetsStateError(
                f"the forward pass leaves a result in a {left}, where a replay of its calls would "
                "leave nothing. Return it with the other results. If it does so only in its first "
                "step, run one step before planning."
            )
        return captured

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Captured:
        parameters, buffers = [*self.model.named_parameters()], [*self.model.named_buffers()]
        flat, spec = tree_flatten((args, kwargs))
        inputs = [self.fake(arg, "input") if _is_tensor(arg) else arg for arg in flat]
        views = tuple(self.recorder.view(arg) if _is_tensor(arg) else None for arg in inputs)
        passed = [
            self.with_values(value) if at in self.ones else value for at, value in enumerate(inputs)
        ]
        # New lists and mappings, so that the forward cannot change the caller's.
        args, kwargs = tree_unflatten(passed, spec)
        snapshot = StateSnapshot([("arguments", (args, kwargs))])
        with (
            torch.enable_grad(),
            self.mode,
            self.recorder,
            kernel_of_max_pool1d(),
            scopes(self.model, self.recorder),
        ):
            with nullcontext() if self.gpu is None else self.gpu.forward():
                returned = self.model.forward(*args, **kwargs)
            outputs, output_form = flatten_outputs(returned, self.model)
            begins = set(map(id, ends_of(returned, outputs)))
            is_end = [id(out) in begins for out in outputs]
            del returned
            self.recorder.hand_out(output for output in outputs if _is_tensor(output))
            # The forward pass is over. It may have changed nothing except by recorded calls.
            boundary = len(self.recorder.recording.calls)
            if snapshot.changed():
                raise changes_what_it_is_given()
            self.check_buffers()
            leaves = [*parameters]
            leaves += [(f"input {at}", arg) for at, arg in enumerate(inputs) if _is_tensor(arg)]
            # A tensor passed twice has one gradient.
            first: dict[int, tuple[str, torch.Tensor]] = {}
            for name, leaf in leaves:
                if leaf.requires_grad:
                    first.setdefault(id(leaf), (name, leaf))
            wanted = list(first.values())
            # Outputs that may receive a gradient, and those where the backward pass begins.
            differentiable = tuple(_is_tensor(out) and out.requires_grad for out in outputs)
            ends = tuple(compress(is_end, differentiable))
            ends = tuple(self.ends) if len(self.ends) == len(ends) else ends
            of_gradients = list(compress(outputs, differentiable))
            starts = list(compress(of_gradients, ends))
            of_rest = _leaves_of(compress(of_gradients, map(not_, ends)))
            output_gradients, gradients = self.backward(starts, [leaf for _, leaf in wanted])
        self.check_inputs({view.storage for view in views if view is not None})
        view = self.recorder.view
        captured = Captured(
            recording=self.recorder.recording,
            boundary=boundary,
            parameters=tuple((name, view(param)) for name, param in parameters),
            buffers=tuple((name, view(buffer)) for name, buffer in buffers),
            inputs=views,
            outputs=tuple(view(out) if _is_tensor(out) else out for out in outputs),
            output_form=output_form,
            differentiable=differentiable,
            output_gradients=tuple(view(output_gradient) for output_gradient in output_gradients),
            gradients=tuple(
                (name, None if grad is None else view(grad))
                for (name, _), grad in zip(wanted, gradients, strict=True)
            ),
            ends=ends,
            of_others=tuple(
                place
                for place, (_, leaf) in enumerate(wanted)
                if gradients[place] is None and id(leaf) in of_rest
            ),
        )
        return without_unused(captured)

    def fake(self, tensor: torch.Tensor, role: str) -> torch.Tensor:
        if id(tensor) not in self.fakes:
            place = None if self.gpu is None else self.gpu.place
            fake = self.fakes[id(tensor)] = fake_of(self.mode, tensor, place)
            self.views[id(fake)] = self.recorder.give(fake, role)
            if role == "parameter":
                self.trained[id(fake)] = fake.requires_grad
                self.recorder.weights.add(tensor.untyped_storage()._cdata)
        return self.fakes[id(tensor)]

    def with_values(self, fake: torch.Tensor) -> torch.Tensor:
        """Return the tensor passed to the model for an input of ones; it has values."""
        if id(fake) not in self.ones_of:
            assert isinstance(self.mode, ValueMode)  # on an absent GPU no input has values
            ones = self.mode.give_ones(fake)
            if ones is not None:
                self.recorder.alias(ones, fake)
            self.ones_of[id(fake)] = fake if ones is None else ones
        return self.ones_of[id(fake)]

    def backward(
        self, ends: list[torch.Tensor], wanted: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        if not ends or not wanted:
            raise TraceError(
                "no output of the model depends on anything that requires a gradient, so there is "
                "no backward pass to plan. Pass a model in training, with parameters that require "
                "gradients."
            )
        self.recorder.phase, self.recorder.scope = "backward", ""
        with self.recorder.silent():
            # Made by the caller, so they are not calls of the step.
            output_gradients = [torch.empty_like(out) for out in ends]
            for at, stride in enumerate(self.arriving):
                if stride is not None:
                    output_gradients[at] = torch.empty_strided(
                        ends[at].shape, stride, dtype=ends[at].dtype, device=ends[at].device
                    )
        # Storages that `.grad` must not use: the caller's, or those of other gradients.
        taken = {self.recorder.meet(gradient).storage for gradient in output_gradients}
        arrived: Sequence[torch.Tensor | None]
        if self.gpu is not None:
            arrived = self.gpu.gradients(ends, wanted, output_gradients)
        else:
            # In this thread: on an accelerator autograd uses another one, which may release the
            # last gradients after this call has returned, as if something still held them.
            with (
                nullcontext() if self.inside else outside_autocast(),
                torch.autograd.set_multithreading_enabled(False),
            ):
                arrived = torch.autograd.grad(ends, wanted, output_gradients, allow_unused=True)
        # After the backward pass, which may add constants.
        taken |= set(self.recorder.recording.roles)
        gradients = []
        for leaf, gradient in zip(wanted, arrived, strict=True):
            if gradient is not None:
                gradient = self.as_stored_in_grad(leaf, gradient, taken)
                taken.add(self.recorder.view(gradient).storage)
            gradients.append(gradient)
        return output_gradients, gradients

    def as_stored_in_grad(
        self, leaf: torch.Tensor, gradient: torch.Tensor, taken: set[int]
    ) -> torch.Tensor:
        """Copy a gradient if `.grad` would: its layout differs from its leaf's, or it is shared.

        Done here, one by one, the copies are in the plan; left to autograd, all are made at the
        end. The inputs of a part are not leaves, and their gradients keep their layouts: kernels
        that sum in memory order would round differently.
        """
        goes_on = self.part and id(leaf) not in self.trained
        with self.recorder.silent():
            wanted = torch.empty_like(gradient if goes_on else leaf).stride()
        # As in torch's `obeys_layout_contract`, strides of dimensions of size 1 do not count.
        same = goes_on or all(
            have == want
            for size, have, want in zip(leaf.shape, gradient.stride(), wanted, strict=True)
            if size != 1
        )
        if same and self.recorder.view(gradient).storage not in taken:
            return gradient
        copy = torch.empty_strided(leaf.shape, wanted, dtype=leaf.dtype, device=leaf.device)
        return copy.copy_(gradient.detach())

    def check_buffers(self) -> None:
        """Refuse a model that replaces buffers, freezes weights, or computes their gradients."""
        known = {id(fake) for fake in self.fakes.values()}
        for path, module in self.model.named_modules():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is None:
                    continue
                where = f"{path}.{name}" if path else name
                trains = self.trained.get(id(tensor))
                if id(tensor) not in known:
                    why = f"replaces {where} with a new tensor. Change it in place (copy_, mul_)"
                elif (now := self.recorder.view(tensor)).storage != self.views[id(tensor)].storage:
                    why = f"sets .data of {where}, which a replay would not. Change it in place"
                elif now != self.views[id(tensor)]:
                    why = (
                        f"resizes {where}, which a replay would not. If it does so in its first "
                        "step only, run one step before planning"
                    )
                elif trains is not None and tensor.requires_grad != trains:
                    why = f"sets requires_grad of {where}. Set it before planning"
                elif trains is not None and tensor.grad is not None:
                    why = f"calls backward, which adds to {where}.grad. Call it after the forward"
                else:
                    continue
                raise TraceError(f"the forward pass {why}.")

    def check_inputs(self, inputs: set[int]) -> None:
        """Refuse a model that writes to its inputs."""
        for call in self.recorder.recording.calls:
            if inputs & set(call.writes):
                raise TraceError(
                    f"{call.scope or 'the model'} changes an input in place ({call.target}). Copy "
                    "the input first."
                )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _leaves_of(outputs: Iterable[torch.Tensor]) -> set[int]:
    """Return the ids of the leaves that outputs depend on."""
    waiting = [get_gradient_edge(out).node for out in outputs]
    seen = set(waiting)
    while waiting:
        follow = {node for node, _ in waiting.pop().next_functions if node is not None} - seen
        seen |= follow
        waiting += follow
    return {id(node.variable) for node in seen if hasattr(node, "variable")}


@contextmanager
def scopes(model: torch.nn.Module, recorder: Recorder) -> Iterator[None]:
    """Tell the recorder which module is running."""
    paths = {id(module): path for path, module in reversed(list(model.named_modules()))}
    # These hooks run for all modules in the process, in other threads too.
    stack, tracing = [""], get_ident()

    def enter(module: torch.nn.Module, args: Any) -> None:
        if get_ident() == tracing:
            stack.append(paths.get(id(module), stack[-1]))
            recorder.scope = stack[-1]

    def leave(module: torch.nn.Module, args: Any, result: Any) -> None:
        if get_ident() == tracing:
            stack.pop()
            recorder.scope = stack[-1]

    hooks = [
        module_hooks.register_module_forward_pre_hook(enter),
        module_hooks.register_module_forward_hook(leave, always_call=True),
    ]
    numbers = {hook.id for hook in hooks}
    TRACING_HOOKS.update(numbers)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        TRACING_HOOKS.difference_update(numbers)


def _assuming_ones(
    record: Callable[[frozenset[int]], Captured], arguments: Iterable[Any]
) -> Captured:
    """Return the recording of a step that may read those of its inputs that are all ones.

    It also states which inputs the model would read if they were all ones.

    record : records the step with values for the inputs of these indices, which are ones
    """
    flags = [
        (place, is_ones(arg))
        for place, arg in enumerate(arguments)
        if isinstance(arg, torch.Tensor)
        and may_be_known(arg)
        and bool(((arg == 0) | (arg == 1)).all())
    ]
    captured = _fewest_ones(record, frozenset(place for place, ones in flags if ones))

    def differs(places: frozenset[int]) -> bool:
        other = _or_none(record, captured.ones | places)
        return other is not None and not _same(captured, other)

    others = frozenset(place for place, ones in flags if not ones)
    looked = set(captured.ones)
    # All together first: usually none makes a difference.
    if others and differs(others):
        looked |= {other for other in others if len(others) == 1 or differs(frozenset({other}))}
    return replace(captured, looked=frozenset(looked))


def _or_none(record: Callable[[frozenset[int]], Captured], ones: frozenset[int]) -> Captured | None:
    try:
        return record(ones)
    except TraceError:
        return None


def _fewest_ones(record: Callable[[frozenset[int]], Captured], ones: frozenset[int]) -> Captured:
    """Return the recording in which as few as possible of these inputs have values.

    ones : indices of inputs that are all ones. They get no values if these change nothing, or if
        the model cannot be recorded with them.
    """
    looking = _or_none(record, ones) if ones else None
    if looking is None:
        return record(frozenset())
    # If this raises, the model can only be traced for inputs of ones.
    blind = _or_none(record, frozenset())
    if blind is not None and _same(blind, looking):
        return blind
    for place in sorted(ones):
        # If it cannot be recorded without the values of an input, that input is read. The last one
        # stays: without any, the recording differs, as checked above.
        fewer = _or_none(record, ones - {place}) if len(ones) > 1 else None
        if fewer is not None and _same(fewer, looking):
            looking, ones = fewer, ones - {place}
    return replace(looking, ones=ones)


def _same(one: Captured, other: Captured) -> bool:
    """Whether two recordings make the same calls on the same storages, with the same outputs."""
    constants, others = one.recording.constants, other.recording.constants
    return (
        list(map(_comparable, one.recording.calls)) == list(map(_comparable, other.recording.calls))
        and (one.outputs, one.gradients) == (other.outputs, other.gradients)
        and constants.keys() == others.keys()
        and all(_equal(constant, others[storage]) for storage, constant in constants.items())
    )


def _comparable(call: Call) -> tuple[Any, ...]:
    """Return a call in comparable form; defaults spelled out by some modes are equal to omitted."""
    args, kwargs = call.arguments(lambda view: view)
    inputs = [*named_arguments(call.target, args, kwargs).values()]
    # A tensor of which only the form is read is on the meta device, without values to compare.
    inputs = tree_map_only(
        torch.Tensor, lambda tensor: (tensor.size(), tensor.stride(), tensor.dtype), inputs
    )
    # By `repr`, NaN is equal to itself.
    inputs = tree_map_only(float, repr, inputs)
    return call.target, inputs, call.outputs, call.makes, call.writes, call.phase, call.scope


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if isinstance(one, FakeTensor) or isinstance(other, FakeTensor):
        return one is other
    # By bits: NaN is not equal to itself.
    return one.size() == other.size() and same_bits(one, other)
