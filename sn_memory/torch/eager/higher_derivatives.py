"""Higher derivatives: where a plan has no derivative to offer, the unplanned step runs.

A plan covers the calls of one forward and one backward pass. If autograd differentiates such a
backward pass (`create_graph=True`), the model's own forward pass runs once more, with the same
inputs and state, and its gradients have torch's own graph. Transforms of torch.func and
forward-mode AD inspect the forward pass itself, so there the model's own runs immediately. Both
take the memory of the unplanned step, which a warning says once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from ...base.errors import PlanError
from ...base.sizes import show_bytes
from ..errors import ReplayError
from ..model.modes import other_layout, warn_once
from ..model.results import flatten_outputs
from ..model.signature import Arguments, InputSignature, tensors
from ..model.snapshot import version_of
from ..model.step import restore_rng_state
from ..model.wrapping import inner_model, plain_class
from ..step import keeps_graph
from ..target.accelerator import device_types, rng_state, set_rng_state
from ..trace.record import View
from .replay import Gradients, Replay


@dataclass(eq=False)
class PlainStep:
    """A planned forward pass, and what is needed to run it once more without the plan.

    model, record : the planned model and its `PlanRecord`
    parameters, buffers : of the model in this forward pass; `functional_call` may have replaced the
        model's own.
    """

    model: torch.nn.Module
    record: Any
    kind: InputSignature
    arguments: Arguments
    parameters: Sequence[torch.Tensor]
    buffers: Sequence[torch.Tensor]
    step: Replay

    def __post_init__(self) -> None:
        # The state before the forward pass draws, so that it can draw the same numbers again.
        self.random = [(device, rng_state(device)) for device in self.step.drawn_on]

    def forward_ended(self) -> None:
        """Record the versions of all tensors that the forward pass read."""
        self.versions = self._versions()

    def retained(self) -> None:
        """Warn once if the budget has no room for the retained graph."""
        budget = self.record.budget_bytes
        # The pass frees only its own references: the retained graph keeps all tensors meanwhile.
        need = self.step.plan.peak_bytes + self.step.waiting_bytes[0]
        if need > budget:
            text = keeps_graph(self.model, need, budget)
            warn_once(self.record.inputs.warned, "retained", text)

    def arrived(self, gradient: torch.Tensor, planned: View) -> None:
        """Warn once if the gradient of an output has another layout than planned."""
        if text := other_layout(gradient, planned.stride):
            warn_once(self.record.inputs.warned, "layout", text)

    def gradients(
        self, wanted: Sequence[torch.Tensor], arrived: Sequence[torch.Tensor | None]
    ) -> Gradients:
        """Return differentiable gradients of `wanted`, given those of the outputs.

        Raises ReplayError if the forward pass would read other values than before.
        Raises PlanError with `strict`.
        """
        create_graph = torch.is_grad_enabled()
        if create_graph or not self.step.unplanned(arrived):
            what = "gradients of gradients are"
            why = (
                "a backward pass is differentiated itself or runs for several gradients at a time "
                "(create_graph=True, vmap, forward-mode AD)"
            )
        else:
            self.record.inputs.begins_at([grad is not None for grad in arrived])
            what = "the gradient of an output other than the loss is"
            why = (
                f"{what} requested, and only that of the loss was planned, as the model returns "
                "it; later steps are planned for what was requested"
            )
        # Before anything runs: are the values unchanged, and is the unplanned step allowed?
        self._check(what)
        _without_plan(self.model, self.record, self.step.plan.baseline_peak_bytes, why)
        with torch.enable_grad():
            # Views, as one of these tensors may have been computed from another.
            # A parameter may have been frozen since the forward pass.
            own = {
                id(tensor): tensor.view_as(tensor)
                if tensor.requires_grad
                else tensor.detach().requires_grad_()
                for tensor in wanted
            }
            outputs = self._outputs(own)
        pairs = [
            (out, gradient)
            for out, gradient in zip(outputs, arrived, strict=True)
            if gradient is not None and out.requires_grad
        ]
        if not pairs:
            return [None for _ in wanted]
        ends, gradients = zip(*pairs, strict=True)
        inputs = [own[id(tensor)] for tensor in wanted]
        settings = {"create_graph": create_graph, "allow_unused": True}
        return list(torch.autograd.grad(ends, inputs, gradients, **settings))

    def _outputs(self, own: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        """Run the model's own forward pass; return the outputs that have gradients."""
        captured = self.step.captured
        inputs = [own.get(id(param), param) for param in self.parameters]
        # Copies, as the forward pass may write to its buffers a second time.
        inputs += [buffer.clone() for buffer in self.buffers]
        names = [f"model.{name}" for name, _ in (*captured.parameters, *captured.buffers)]
        args, kwargs = tree_map_only(
            torch.Tensor, lambda leaf: own.get(id(leaf), leaf), self.arguments
        )
        model = _OwnForward(inner_model(self.model))
        # `functional_call` swaps parameters in the modules, where other threads would see them.
        with self.record.lock, self._as_then():
            returned = functional_call(model, dict(zip(names, inputs, strict=True)), args, kwargs)
        outputs = tensors(flatten_outputs(returned, self.model)[0])
        differentiable = zip(outputs, self.step.differentiable, strict=True)
        return [out for out, has_gradient in differentiable if has_gradient]

    @contextmanager
    def _as_then(self) -> Iterator[None]:
        """Restore autocast and RNG states of the forward pass, and disable functorch transforms."""
        casts: dict[Any, Any] = dict(self.kind.casts)  # type: ignore[arg-type]
        with ExitStack() as stack:
            stack.enter_context(restore_rng_state() if self.random else nullcontext())
            for device, state in self.random:
                set_rng_state(device, state)
            for kind in ("cpu", *device_types()):
                if kind in casts or torch.is_autocast_enabled(kind):
                    on = torch.autocast(kind, casts.get(kind), enabled=kind in casts)
                    stack.enter_context(on)
            stack.enter_context(temporarily_clear_interpreter_stack())
            yield

    def _check(self, what: str) -> None:
        """Raise if the forward pass would read other values now; `what` it runs for."""
        if self.step.overwritten:
            raise ReplayError(
                f"{what} requested, but the forward pass writes over "
                f"{', '.join(self.step.overwritten[:3])}, which it reads: a second run would "
                "compute something else. Plan with backend='modules', or call the model as it was "
                "before planning for these."
            )
        if self._versions() != self.versions:
            raise ReplayError(
                f"{what} requested, but a parameter, buffer or input was changed in place since "
                "the forward pass. Change it after backward."
            )
        now = self.record.guards.signature_of(self.model, self.arguments, loosely=True)
        assert now is not None
        if not self.kind.settings_hold_for(now):
            paths = [path for path, _ in self.model.named_modules()]
            raise ReplayError(
                f"{what} requested, but the model is not as it was in the forward pass: "
                f"{'; '.join(now.unlike(self.kind, paths))}. Change it after backward."
            )

    def _versions(self) -> list[int]:
        read = (*self.parameters, *self.buffers, *tensors(self.arguments), *self.step.known)
        return [version_of(tensor) for tensor in read]


class _OwnForward(torch.nn.Module):
    """A model without its forward hooks, which already ran in the first forward pass."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.model).forward(self.model, *args, **kwargs)


def without_plan(model: torch.nn.Module, record: Any, where: str) -> None:
    """Warn that the model's own forward runs, because the caller inspects it.

    where : e.g. "inside torch.func or forward-mode AD"
    """
    if record.state is not None:
        name = plain_class(type(model)).__name__
        raise PlanError(
            f"a planned {name} with its state on the host was called {where}, which needs the "
            "model's own forward pass. Call the model as it was before planning there."
        )
    why = f"it is called {where}"
    _without_plan(model, record, record.plan.baseline_peak_bytes, why)


def _without_plan(model: torch.nn.Module, record: Any, need: int, why: str) -> None:
    text = (
        f"the step of a planned {plain_class(type(model)).__name__} runs without its plan, because "
        f"{why}: it takes up to {show_bytes(need)} and what the plan holds, and the budget is "
        f"{show_bytes(record.budget_bytes)}"
    )
    if record.strict:
        raise PlanError(f"strict: {text}. Leave strict out to run it so.")
    warn_once(record.inputs.warned, why, f"{text}.")
