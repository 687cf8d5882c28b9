"""A training step of a model under fake tensors: no memory, no arithmetic, all calls.

The model's parameters and buffers are swapped for fake ones while its forward runs, and autograd
walks back through it as in the real run; the recorder notes each call. Whatever happens, the model
is put back as it was. A forward that does more than compute from its inputs (keeps a count, draws
from Python's random numbers, looks at values) cannot be replayed from its calls and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules import module as module_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ..device.resting import working_device
from ..elsewhere.gpu import Gpu
from ..errors import TraceError, first_line, innermost_line, sample_line
from ..model.guards import recorded_reads
from ..model.known_values import KnownOnes
from ..model.modes import casting, kernel_of_max_pool1d, outside_autocast
from ..model.restore import changes_what_it_is_given, forbid_external_rng, restore_model
from ..model.results import ends_of, taken_apart
from ..model.snapshot import TRACING_HOOKS, StateSnapshot
from .captured import Captured, assuming_ones
from .fake_rules import FakeMode, quiet
from .record import Layouts, Recorder, layout_key
from .simplify import without_unused


def capture(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    layouts: Layouts | None = None,
    gpu: Gpu | None = None,
    *,
    ends: Sequence[bool] = (),
) -> Captured:
    """Record a training step of a model; raises TraceError (see `trace`).

    layouts : how kernels were seen to lay results out, as in Recorder; gpu : where the step is to
    run, if not where the model is; ends : as in Captured, for a model with as many such outputs
    """

    def made(ones: frozenset[int], *, inside: bool = False) -> Captured:
        capturing = partial(_Capture, model, layouts, inside, gpu, ones, ends)
        return _captured(model, args, kwargs, capturing)

    with recorded_reads(model) as reads:
        if gpu is not None:
            return replace(made(frozenset()), reads=reads())
        captured = assuming_ones(made, tree_leaves((args, kwargs)))
        if casting():
            inside = made(captured.ones, inside=True)
            captured = replace(captured, only_outside=_course(inside) != _course(captured))
        return replace(captured, reads=reads())


def _course(captured: Captured) -> list[Any]:
    return [layout_key(call.target, call.flat) for call in captured.recording.calls]


def _captured(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    capturing: Callable[[], _Capture],
) -> Captured:
    if isinstance(model, torch.jit.ScriptModule):
        raise TraceError(
            "the model is a ScriptModule, whose parts cannot be swapped. Pass the nn.Module it was "
            "made from."
        )
    with restore_model(model, (args, kwargs)), forbid_external_rng(), quiet():
        try:
            return capturing().run(args, kwargs)
        except TraceError:
            raise
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise TraceError(
                f"{error.func} makes the course of the model depend on values, not only on shapes "
                f"({innermost_line(error.__traceback__)}). Compute with tensors instead of Python "
                "numbers there."
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
                f"{first_line(error).rstrip('.')}. The sample is {sample_line(args, kwargs)}; is "
                "it what the model takes?"
            ) from error


def fake_of(
    mode: FakeTensorMode, tensor: torch.Tensor, place: torch.device | None = None
) -> torch.Tensor:
    """Return a fake leaf like a tensor, on another device if one is given.

    One on the meta device counts as one on the CPU, and one that rests on the host as one on the
    device that it is worked on.
    """
    if is_traceable_wrapper_subclass(tensor):
        raise TraceError(
            f"a {type(tensor).__name__} of shape {tuple(tensor.shape)} is a parameter, a buffer or "
            "an input; only plain tensors can be traced. With backend='modules', or 'auto', a "
            "sharded model is planned by its modules; plan before it is quantised."
        )
    if place is None and (working := working_device(tensor)) != tensor.device:
        place = working
    if place is None and tensor.device.type != "meta":
        return mode.from_tensor(tensor.detach()).requires_grad_(tensor.requires_grad)
    # On the meta device attention would be taken apart into its matrices.
    device = torch.device("cpu") if place is None else place
    with mode:
        made = torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device
        )
    return made.requires_grad_(tensor.requires_grad)


class _Capture:
    """One capture: fake tensors by the identity of the real ones, and the recorder."""

    def __init__(
        self,
        model: torch.nn.Module,
        layouts: Layouts | None,
        inside: bool,
        gpu: Gpu | None,
        ones: frozenset[int],
        ends: Sequence[bool],
    ) -> None:
        self.model, self.gpu, self.ones, self.ends = model, gpu, ones, ends
        self.known = KnownOnes()
        # Whether the backward pass runs inside autocast, where the forward pass does.
        self.inside = inside
        # What has no rule for fake tensors runs on real ones made up, where the device is here.
        self.mode = FakeMode(allow_non_fake_inputs=True, allow_fallback_kernels=gpu is None)
        self.recorder = Recorder(layouts)
        self.fakes: dict[int, torch.Tensor] = {}
        # Per fake of a parameter, whether it requires a gradient.
        self.wanted: dict[int, bool] = {}
        # Per fake of a parameter or buffer, the number of its memory.
        self.memory: dict[int, int] = {}

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Captured:
        parameters = self.swapped("_parameters", "parameter")
        buffers = self.swapped("_buffers", "state")
        flat, spec = tree_flatten((args, kwargs))
        inputs = [self.fake(arg, "input") if _is_tensor(arg) else arg for arg in flat]
        views = tuple(self.recorder.view(arg) if _is_tensor(arg) else None for arg in inputs)
        given_as = [
            self.known.give(flat[place], it) if place in self.ones else it
            for place, it in enumerate(inputs)
        ]
        args, kwargs = tree_unflatten(given_as, spec)
        # Its lists and mappings are others than the caller's.
        given = StateSnapshot([("arguments", (args, kwargs))])
        known = self.known if self.gpu is None else nullcontext()
        with (
            torch.enable_grad(),
            self.mode,
            self.recorder,
            known,
            kernel_of_max_pool1d(),
            scopes(self.model, self.recorder),
        ):
            with nullcontext() if self.gpu is None else self.gpu.forward():
                returned = self.model.forward(*args, **kwargs)
            outputs, output_form = taken_apart(returned, self.model)
            begins = set(map(id, ends_of(returned, outputs)))
            is_end = [id(out) in begins for out in outputs]
            outputs = [self.known.twin(out) if _is_tensor(out) else out for out in outputs]
            del returned
            self.recorder.hand_out(it for it in outputs if _is_tensor(it))
            boundary = len(self.recorder.recording.calls)
            if given.changed():
                raise changes_what_it_is_given()
            self.check_buffers()
            leaves = [(name, it) for name, it in parameters if it.requires_grad]
            leaves += [
                (f"input {place}", arg)
                for place, arg in enumerate(inputs)
                if _is_tensor(arg) and arg.requires_grad
            ]
            # A tensor passed twice has one gradient.
            first: dict[int, tuple[str, torch.Tensor]] = {}
            for name, leaf in leaves:
                first.setdefault(id(leaf), (name, leaf))
            wanted = list(first.values())
            places = [at for at, it in enumerate(outputs) if _is_tensor(it) and it.requires_grad]
            ends = tuple(is_end[at] for at in places)
            ends = tuple(self.ends) if len(self.ends) == len(places) else ends
            apart: tuple[list[torch.Tensor], ...] = ([], [])
            for at, end in zip(places, ends, strict=True):
                apart[end].append(outputs[at])
            others = _leaves_of(apart[False])
            output_gradients, gradients = self.backward(apart[True], [it for _, it in wanted])
        self.check_inputs({view.storage for view in views if view is not None})
        view = self.recorder.view
        captured = Captured(
            recording=self.recorder.recording,
            boundary=boundary,
            parameters=tuple((name, view(it)) for name, it in parameters),
            buffers=tuple((name, view(it)) for name, it in buffers),
            inputs=views,
            outputs=tuple(view(out) if _is_tensor(out) else out for out in outputs),
            output_form=output_form,
            differentiable=tuple(_is_tensor(out) and out.requires_grad for out in outputs),
            output_gradients=tuple(view(output_gradient) for output_gradient in output_gradients),
            gradients=tuple(
                (name, None if it is None else view(it))
                for (name, _), it in zip(wanted, gradients, strict=True)
            ),
            ends=ends,
            of_others=tuple(
                place
                for place, (_, leaf) in enumerate(wanted)
                if gradients[place] is None and id(leaf) in others
            ),
        )
        return without_unused(captured)

    def fake(self, tensor: torch.Tensor, role: str) -> torch.Tensor:
        if id(tensor) not in self.fakes:
            place = None if self.gpu is None else self.gpu.place
            self.fakes[id(tensor)] = fake_of(self.mode, tensor, place)
            self.recorder.give(self.fakes[id(tensor)], role)
        return self.fakes[id(tensor)]

    def swapped(self, slot: str, role: str) -> list[tuple[str, torch.Tensor]]:
        """Put fake tensors into the modules; return path and fake, each tensor once."""
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for path, module in self.model.named_modules():
            tensors = getattr(module, slot)
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                tensors[name] = fake = self.fake(tensor, role)
                self.memory[id(fake)] = self.recorder.view(fake).storage
                if slot == "_parameters":
                    self.wanted[id(fake)] = fake.requires_grad
                    self.recorder.weights.add(tensor.untyped_storage()._cdata)
                found.setdefault(id(fake), (f"{path}.{name}" if path else name, fake))
            if isinstance(module, torch.nn.RNNBase) and slot == "_parameters":
                # It keeps a list of its own, and would go on with the real ones.
                module._flat_weights = [
                    getattr(module, name) for name in module._flat_weights_names
                ]
        return list(found.values())

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
            output_gradients = [torch.empty_like(out) for out in ends]
        for output_gradient in output_gradients:
            self.recorder.meet(output_gradient)
        found: Sequence[torch.Tensor | None]
        if self.gpu is not None:
            found = self.gpu.gradients(ends, wanted, output_gradients)
        else:
            with nullcontext() if self.inside else outside_autocast():
                found = torch.autograd.grad(ends, wanted, output_gradients, allow_unused=True)
        taken = {
            self.recorder.view(output_gradient).storage for output_gradient in output_gradients
        }
        taken |= set(self.recorder.recording.given)
        gradients = []
        for leaf, gradient in zip(wanted, found, strict=True):
            if gradient is not None:
                gradient = self.as_autograd_keeps_it(leaf, gradient, taken)
                taken.add(self.recorder.view(gradient).storage)
            gradients.append(gradient)
        return output_gradients, gradients

    def as_autograd_keeps_it(
        self, leaf: torch.Tensor, gradient: torch.Tensor, taken: set[int]
    ) -> torch.Tensor:
        """Copy a gradient where `.grad` would: it lies otherwise than its leaf, or is shared.

        Done here, one by one, the copies are in the plan; left to autograd they are made at the
        end, beside all the others.
        """
        with self.recorder.silent():
            wanted = torch.empty_like(leaf).stride()
        same = all(
            have == want
            for size, have, want in zip(leaf.shape, gradient.stride(), wanted, strict=True)
            if size != 1
        )
        if same and self.recorder.view(gradient).storage not in taken:
            return gradient
        copy = torch.empty_strided(leaf.shape, wanted, dtype=leaf.dtype, device=leaf.device)
        return copy.copy_(gradient.detach())

    def check_buffers(self) -> None:
        """Refuse a model that puts new tensors in the place of its buffers, or freezes weights."""
        known = {id(fake) for fake in self.fakes.values()}
        for path, module in self.model.named_modules():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                where = f"{path}.{name}" if path else name
                if tensor is not None and id(tensor) not in known:
                    raise TraceError(
                        f"the forward pass puts a new tensor in the place of {where}. Change it in "
                        "place (copy_, mul_)."
                    )
                if tensor is not None and self.recorder.view(tensor).storage != self.memory.get(
                    id(tensor)
                ):
                    raise TraceError(
                        f"the forward pass sets .data of {where}, which a replay would not. Change "
                        "it in place (copy_, mul_)."
                    )
                if id(tensor) in self.wanted and tensor.requires_grad != self.wanted[id(tensor)]:
                    raise TraceError(
                        f"the forward pass sets requires_grad of {where}. Set it before planning."
                    )

    def check_inputs(self, inputs: set[int]) -> None:
        """Refuse a model that writes into what it is given."""
        for call in self.recorder.recording.calls:
            if inputs & set(call.writes):
                raise TraceError(
                    f"{call.scope or 'the model'} changes an input in place ({call.target}). Copy "
                    "the input first."
                )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _leaves_of(outputs: Iterable[torch.Tensor]) -> set[int]:
    """Return which leaves outputs depend on, by id."""
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
    stack, tracing = [""], get_ident()

    def enter(module: torch.nn.Module, args: Any) -> None:
        if get_ident() != tracing:
            return
        stack.append(paths.get(id(module), stack[-1]))
        recorder.scope = stack[-1]

    def leave(module: torch.nn.Module, args: Any, result: Any) -> None:
        if get_ident() != tracing:
            return
        stack.pop()
        recorder.scope = stack[-1]

    hooks = [
        module_hooks.register_module_forward_pre_hook(enter),
        module_hooks.register_module_forward_hook(leave, always_call=True),
    ]
    numbers = {it.id for it in hooks}
    TRACING_HOOKS.update(numbers)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        TRACING_HOOKS.difference_update(numbers)
