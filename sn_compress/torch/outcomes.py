"""Tracks outcomes of exchanged gradients: applied by an optimizer, held in `.grad`, or dropped.

torch has hooks for every optimizer step. Before a backward pass adds to `.grad`, a gradient that
was exchanged but not applied is either still there, so this pass accumulates, or was discarded: a
GAN's discriminator that the generator's loss went through, a step that the loop rejected or a loss
scaler skipped. The residual of a dropped gradient must not be sent later.

If a parameter's values have changed since its gradient was sent, but its optimizer has never
stepped, the parameter was updated by hand: the gradient counts as applied.

Each rank decides by itself: `.grad` holds the ranks' mean, so ranks that run the same program come
to the same result. The outcome is unknown for a parameter in no torch optimizer, e.g. if a loop
updates it by hand, or an optimizer holds a copy in another precision: its gradients count as
applied.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, Literal

import torch
from torch.autograd import Variable
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..consistency import weigh, weights
from ..engine.transaction import Outcome


class _FoundInf:
    """Whether a fused optimizer skipped its step; read lazily, as that waits for the device."""

    def __init__(self, flag: torch.Tensor) -> None:
        self._flag = flag

    @cached_property
    def skipped(self) -> bool:
        return bool(self._flag.item())


@dataclass(eq=False)
class _Parameter:
    """One parameter, and the outcome of its last exchanged gradient.

    known : whether a torch optimizer holds it or has ever stepped it
    stepped : whether one has ever stepped it
    hooked : whether `reached` is called in backward passes that reach it
    stepping : whether it had a gradient when the current optimizer step began
    found_inf : flag of a fused optimizer whose step either applied or skipped the gradient
    sent : the gradient tensor that was sent, and its version counter at that time
    values : digest of the parameter when its gradient was sent; None if not needed
    """

    parameter: torch.Tensor
    known: bool = False
    stepped: bool = False
    hooked: bool = False
    stepping: bool = False
    outcome: Outcome = "applied"
    found_inf: _FoundInf | None = None
    sent: tuple[weakref.ref[torch.Tensor], int] | Literal[False] = False
    values: str | None = None

    def settled(self) -> Outcome:
        """Return the outcome of the gradient so far."""
        if self.found_inf is not None and self.found_inf.skipped:
            self.outcome = "held"
        self.found_inf = None
        return self.outcome if self.known else "unknown"

    def is_gone(self) -> None:
        """Record that the gradient is None or zero, and that no optimizer has applied it."""
        by_hand = self.values is not None and self.values != digest(local_part(self.parameter))
        self.outcome = "applied" if by_hand else "dropped"

    @property
    def unwritten(self) -> bool:
        """Whether nothing was written to the gradient since it was sent."""
        gradient = self.parameter.grad
        if gradient is None or not self.sent:
            return False
        sent, version = self.sent
        return version == gradient._version and sent() is gradient


class _Pass:
    """A running backward pass; autograd holds it and calls it at the end."""

    over = False

    def __call__(self) -> None:
        self.over = True


class Outcomes:
    """Outcomes by parameter name, for one DDP or FSDP2 model or one Horovod optimizer.

    Attributes
    ----------
    joined : whether this rank is in a Join with no data left: only the other ranks know the outcome
        of a gradient, and usually they apply it
    """

    def __init__(self) -> None:
        self.joined = False
        self._records: dict[str, _Parameter] = {}
        self._by_id: dict[int, _Parameter] = {}
        self._pass: weakref.ref[_Pass] | None = None
        self._searched = False

    def follow(self, name: str, parameter: torch.Tensor) -> None:
        """Start tracking a parameter."""
        record = self._records.get(name)
        if not self._records:
            watch_optimizers(self)
        if record is None or record.parameter is not parameter:
            if record is not None:
                self._by_id.pop(id(record.parameter), None)
            record = self._records[name] = self._by_id[id(parameter)] = _Parameter(parameter)
        # A frozen parameter may be trained later, e.g. the two networks of a GAN.
        if parameter.requires_grad and not record.hooked:
            # Must run before the gradient is added: afterwards a zeroed `.grad` would go unnoticed.
            parameter.register_hook(partial(_reached, weakref.ref(self)))
            record.hooked = True

    def sent(self, names: Iterable[str]) -> None:
        """See engine.Outcomes."""
        for name in names:
            if (record := self._records.get(name)) is not None:
                record.outcome, record.found_inf = "applied" if self.joined else "held", None
                # The version as well: if DDP writes a mean, it writes it to the same tensor.
                gradient = record.parameter.grad
                record.sent = gradient is not None and (weakref.ref(gradient), gradient._version)
                needed = not record.stepped and (record.known or not self._searched)
                record.values = digest(local_part(record.parameter)) if needed else None

    def of(self, name: str) -> Outcome:
        """See engine.Outcomes."""
        record = self._records.get(name)
        return "unknown" if record is None else record.settled()

    def look(self) -> None:
        """Detect dropped gradients; called between backward passes."""
        if not self._searched and any(
            not record.known and record.outcome == "held" for record in self._records.values()
        ):
            self._search()
        held = []
        for record in self._records.values():
            if record.settled() == "held":
                if (gradient := record.parameter.grad) is None:
                    record.is_gone()
                else:
                    held.append((record, local_part(gradient)))
        # One wait per device, only if gradients accumulate over exchanges or are set to zero.
        for device in {gradient.device for _, gradient in held}:
            here = [pair for pair in held if pair[1].device == device]
            counts = torch.stack([gradient.count_nonzero() for _, gradient in here]).tolist()
            for (record, _), count in zip(here, counts, strict=True):
                if not count:
                    record.is_gone()

    def write_unused(self, means: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write means that DDP did not write because no rank used the parameter; after the pass.

        An old gradient still in `.grad` was sent again, with its residual. An optimizer may still
        apply it, so it has to be replaced with its mean.

        means : (name, mean in the tensor's shape; complex ones with a trailing axis of size 2)
        """
        for name, mean in means:
            record = self._records[name]
            if record.outcome == "held" and record.unwritten:
                gradient = record.parameter.grad
                assert gradient is not None
                gradient = torch.view_as_real(gradient) if gradient.is_complex() else gradient
                gradient.copy_(mean)

    def _search(self) -> None:
        """Find optimizers that have not stepped yet; runs once, after the first pass."""
        self._searched = True  # only once, as it visits all objects of the process
        gc.collect()  # which dead optimizers are still listed depends on when each rank collected
        for optimizer in live_objects(Optimizer):
            for record in self._of(optimizer):
                record.known = True

    def reached(self) -> None:
        """Called when a backward pass is about to add to the gradient of a parameter."""
        running = None if self._pass is None else self._pass()
        # A nested pass, as in reentrant checkpointing, is not a new pass. If a pass fails, autograd
        # drops its callbacks, and with them the _Pass.
        if running is None or running.over:
            running = _Pass()
            self._pass = weakref.ref(running)
            Variable._execution_engine.queue_callback(running)
            self.look()

    def begin_step(self, optimizer: Any) -> None:
        """Called before a step of any optimizer; the step may discard gradients."""
        for record in self._of(optimizer):
            record.stepping = record.parameter.grad is not None

    def end_step(self, optimizer: Any) -> None:
        """Called after a step of any optimizer."""
        # A fused optimizer is called even if the scaler skips, and checks found_inf itself.
        flag = getattr(optimizer, "found_inf", None)
        found_inf = _FoundInf(flag) if isinstance(flag, torch.Tensor) else None
        for record in self._of(optimizer):
            record.known = record.stepped = True
            # Check after the step, as a closure may have computed the gradient; and before it, as a
            # step may end with zero_grad.
            has_gradient = record.stepping or record.parameter.grad is not None
            if record.outcome == "held" and has_gradient:
                record.outcome, record.found_inf = "applied", found_inf
            record.stepping = False

    def _of(self, optimizer: Any) -> Iterator[_Parameter]:
        for group in getattr(optimizer, "param_groups", ()):  # missing during construction
            for parameter in group["params"]:
                if (record := self._by_id.get(id(parameter))) is not None:
                    yield record


def watch_optimizers(watcher: Any) -> None:
    """Call a watcher's begin_step and end_step around steps of all optimizers, while it lives."""
    # torch keeps its hooks forever, so a strong reference would keep the watcher alive.
    reference = weakref.ref(watcher)

    def begin(optimizer: Any, *_: Any) -> None:
        if (alive := reference()) is not None:
            alive.begin_step(optimizer)

    def end(optimizer: Any, *_: Any) -> None:
        if (alive := reference()) is not None:
            alive.end_step(optimizer)

    for handle in (register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end)):
        weakref.finalize(watcher, handle.remove)


def live_objects(kind: type) -> list[Any]:
    """Return all objects of a class tracked by Python's garbage collector, except frozen ones."""
    # By type: `isinstance` reads an object's `__class__`, at which lazy modules import things.
    return [obj for obj in gc.get_objects() if issubclass(type(obj), kind)]


def _reached(reference: weakref.ref[Outcomes], _: torch.Tensor) -> None:
    if (outcomes := reference()) is not None:
        outcomes.reached()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a tensor, or the tensor itself if it is not sharded."""
    return getattr(tensor, "_local_tensor", tensor)


@torch.compiler.disable  # called after an optimizer step, which may be compiled
def digest(tensor: torch.Tensor) -> str:
    """Return a digest of a tensor's bits, in index order; see weigh."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    word = {1: torch.uint8, 2: torch.int16}.get(flat.element_size(), torch.int32)
    return weigh(
        flat.view(word), _weights(tensor.device), lambda part: part.to(torch.int64), _fetched
    )


def _fetched(sums: list[torch.Tensor]) -> list[int]:
    return torch.stack(sums).tolist() if sums else []


@cache
def _weights(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(weights()).to(device)
