"""What a policy will hold: torch's own executor, run on tensors without values.

Where each block's forward pass and second run begin is noted, so that the most live bytes of each
stretch between them are known, and what one more saved result would do to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ..model.tracker import Scratch
from ..trace.fake_step import fake_step
from .contexts import Saved, SecondRun, contexts

# Per block, what is saved of it; None for one that does not run again.
Selection = Mapping[str, Saved | None]


@dataclass
class Stretch:
    """A part of a step: from where a block begins (`forward`, or `backward`: its second run).

    peak_bytes, gradient_bytes : the most live bytes; gradients of parameters there at its start
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
    """Return what a step holds in which blocks run again, but for what is saved of each.

    known : tensors that are there beside the model's and the arguments; scratch : what a kernel
    takes for itself
    """
    step = Step(stretches=[Stretch("", "forward")])

    def heard(live_bytes: int) -> None:
        now = step.stretches[-1]
        now.peak_bytes = max(now.peak_bytes, live_bytes)

    made = 0

    def accumulated(parameter: torch.Tensor) -> None:
        nonlocal made
        made += parameter.nbytes

    def begun(path: str, phase: str) -> None:
        if len(step.stretches) == 1:
            # Now they are those without values.
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(accumulated)
        step.stretches.append(Stretch(path, phase, gradient_bytes=made))

    with checkpointed(model, saved, begun):
        found = fake_step(model, arguments, known, heard, scratch=scratch)
    step.peak_bytes, step.peak_op = found.peak_bytes, found.peak_op
    return step


@contextmanager
def checkpointed(
    model: torch.nn.Module, saved: Selection, begun: Callable[[str, str], None]
) -> Iterator[None]:
    """Let blocks of a model run under checkpoints inside; `begun` hears where each begins."""
    before = []
    for path, results in saved.items():
        module = model.get_submodule(path)
        before.append((module, module.__dict__.get("forward")))
        module.__dict__["forward"] = _around(module.forward, path, results, begun)
    try:
        yield
    finally:
        for module, own in before:
            module.__dict__.pop("forward")
            if own is not None:
                module.__dict__["forward"] = own


def _around(
    forward: Callable[..., Any], path: str, saved: Saved | None, begun: Callable[[str, str], None]
) -> Callable[..., Any]:
    def both() -> tuple[Any, Any]:
        assert saved is not None
        first, again = contexts(saved)
        return first, _Told(again.storage, lambda: begun(path, "backward"))

    def run(*args: Any, **kwargs: Any) -> Any:
        begun(path, "forward")
        if saved is None:
            made = forward(*args, **kwargs)
        else:
            made = checkpoint(forward, *args, use_reentrant=False, context_fn=both, **kwargs)
        begun("", "forward")
        return made

    return run


class _Told(SecondRun):
    """A second run that tells when it begins."""

    def __init__(self, storage: Any, told: Callable[[], None]) -> None:
        super().__init__(None, storage)
        self._told = told

    def __enter__(self) -> Any:
        self._told()
        return super().__enter__()
