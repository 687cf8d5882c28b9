"""What became of exchanged gradients: applied by an optimizer, held in `.grad`, or dropped.

torch announces every step of an optimizer. Before a backward pass adds to `.grad`, a gradient that
was exchanged and not applied is either still in it, and this pass accumulates, or gone: a GAN's
discriminator through which the generator's loss went, a step that the loop rejected or a loss
scaler skipped. What compression left out of a dropped gradient must not be sent later.

Before the first step of an optimizer that holds a parameter, one whose values have changed since
its gradient was sent was updated by hand: the gradient counts as applied.

Each rank decides by itself: `.grad` holds the ranks' mean, so ranks that run one program decide
alike. A parameter that no optimizer of torch holds is unknown, as where a loop updates it by hand,
or an optimizer holds a copy in another precision: its gradients count as applied.
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
    """Whether a fused optimizer skipped its step; read when it is needed, as it waits."""

    def __init__(self, flag: torch.Tensor) -> None:
        self._flag = flag

    @cached_property
    def skipped(self) -> bool:
        return bool(self._flag.item())


@dataclass(eq=False)
class _Parameter:
    """One parameter, and what became of its last exchanged gradient.

    known : whether an optimizer of torch holds it, or has ever stepped it
    stepped : whether one has ever stepped it
    hooked : whether `reached` is called in backward passes that reach it
    stepping : whether it had a gradient when the running step of an optimizer began
    found_inf : that of a fused optimizer whose step applied the gradient, or skipped it
    sent : the gradient when it was sent, and how often it had been written to
    values : a digest of the parameter when its gradient was sent; None: nobody asks for it
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
        """What became of the gradient so far."""
        if self.found_inf is not None and self.found_inf.skipped:
            self.outcome = "held"
        self.found_inf = None
        return self.outcome if self.known else "unknown"

    def is_gone(self) -> None:
        """The gradient is none, or zeros, and no optimizer has taken it."""
        by_hand = self.values is not None and self.values != digest(local_part(self.parameter))
        self.outcome = "applied" if by_hand else "dropped"

    @property
    def unwritten(self) -> bool:
        """Whether nothing was written into the gradient since."""
        gradient = self.parameter.grad
        if gradient is None or not self.sent:
            return False
        sent, version = self.sent
        return version == gradient._version and sent() is gradient


class _Pass:
    """A running backward pass, kept alive by autograd, which calls it at the end."""

    over = False

    def __call__(self) -> None:
        self.over = True


class Outcomes:
    """The outcomes of the parameters of one DDP or FSDP2 model, or optimizer of Horovod, by name.

    Attributes
    ----------
    joined : this rank has no data left and only takes part, in a Join: what becomes of the gradient
        is known to the other ranks alone, and mostly they apply it
    """

    def __init__(self) -> None:
        self.joined = False
        self._records: dict[str, _Parameter] = {}
        self._by_id: dict[int, _Parameter] = {}
        self._pass: weakref.ref[_Pass] | None = None
        self._searched = False

    def follow(self, name: str, parameter: torch.Tensor) -> None:
        """Take note of what happens to a parameter from now on."""
        known = self._records.get(name)
        if not self._records:
            watch_optimizers(self)
        if known is None or known.parameter is not parameter:
            if known is not None:
                self._by_id.pop(id(known.parameter), None)
            known = self._records[name] = self._by_id[id(parameter)] = _Parameter(parameter)
        # One that is frozen now may be trained later, as networks that take turns are.
        if parameter.requires_grad and not known.hooked:
            # Before the gradient is added: after that, zeros cannot be told from what was held.
            parameter.register_hook(partial(_reached, weakref.ref(self)))
            known.hooked = True

    def sent(self, names: Iterable[str]) -> None:
        """See engine.Outcomes."""
        for name in names:
            if (record := self._records.get(name)) is not None:
                record.outcome, record.found_inf = "applied" if self.joined else "held", None
                # Its version as well: DDP writes the mean into the same tensor, if it writes one.
                gradient = record.parameter.grad
                record.sent = gradient is not None and (weakref.ref(gradient), gradient._version)
                asked = not record.stepped and (record.known or not self._searched)
                record.values = digest(local_part(record.parameter)) if asked else None

    def of(self, name: str) -> Outcome:
        """See engine.Outcomes."""
        record = self._records.get(name)
        return "unknown" if record is None else record.settled()

    def look(self) -> None:
        """Note which gradients were dropped; called between backward passes."""
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
        # A wait for each device, where gradients accumulate over exchanges or are set to zero.
        for device in {gradient.device for _, gradient in held}:
            here = [pair for pair in held if pair[1].device == device]
            counts = torch.stack([gradient.count_nonzero() for _, gradient in here]).tolist()
            for (record, _), count in zip(here, counts, strict=True):
                if not count:
                    record.is_gone()

    def write_unused(self, means: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write means that DDP did not write, as no rank had a gradient; called after the pass.

        An old gradient that is still in `.grad` was sent again, with its residual. An optimizer may
        still apply it, so its mean has to be in its place.

        means : of tensors by name, in their shapes; of complex ones with a last axis of two
        """
        for name, mean in means:
            record = self._records[name]
            if record.outcome == "held" and record.unwritten:
                gradient = record.parameter.grad
                assert gradient is not None
                gradient = torch.view_as_real(gradient) if gradient.is_complex() else gradient
                gradient.copy_(mean)

    def _search(self) -> None:
        """Find optimizers that have not stepped yet, once a second pass begins or has ended."""
        self._searched = True  # once: it walks all objects of the process
        gc.collect()  # of dead optimizers each rank has others, as Python collects at its own times
        for optimizer in live_objects(Optimizer):
            for record in self._of(optimizer):
                record.known = True

    def reached(self) -> None:
        """Called when a backward pass is about to add to the gradient of a parameter."""
        running = None if self._pass is None else self._pass()
        # A pass inside another one, as of a reentrant checkpoint, is no new pass. Autograd drops
        # its callbacks, and with them the _Pass, when a pass ends with an error.
        if running is None or running.over:
            running = _Pass()
            self._pass = weakref.ref(running)
            Variable._execution_engine.queue_callback(running)
            self.look()

    def begin_step(self, optimizer: Any) -> None:
        """Called before a step of any optimizer, after which its gradients may be gone."""
        for record in self._of(optimizer):
            record.stepping = record.parameter.grad is not None

    def end_step(self, optimizer: Any) -> None:
        """Called after a step of any optimizer."""
        # A fused one is called where the scaler skips, too, and looks itself.
        flag = getattr(optimizer, "found_inf", None)
        found_inf = _FoundInf(flag) if isinstance(flag, torch.Tensor) else None
        for record in self._of(optimizer):
            record.known = record.stepped = True
            # After the step if its closure computed the gradient; else before it, as a step may
            # end with zero_grad.
            has_gradient = record.stepping or record.parameter.grad is not None
            if record.outcome == "held" and has_gradient:
                record.outcome, record.found_inf = "applied", found_inf
            record.stepping = False

    def _of(self, optimizer: Any) -> Iterator[_Parameter]:
        for group in getattr(optimizer, "param_groups", ()):  # one may be half made
            for parameter in group["params"]:
                if (record := self._by_id.get(id(parameter))) is not None:
                    yield record


def watch_optimizers(watcher: Any) -> None:
    """Have steps of all optimizers call a watcher's begin_step and end_step while it lives."""
    # torch holds its hooks for good, and so would hold the watcher, and what that holds.
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
    """All objects of a class that Python's collector knows of, a frozen one not among them."""
    # By type: `isinstance` asks an object for its `__class__`, at which lazy modules import things.
    return [obj for obj in gc.get_objects() if issubclass(type(obj), kind)]


def _reached(reference: weakref.ref[Outcomes], _: torch.Tensor) -> None:
    if (outcomes := reference()) is not None:
        outcomes.reached()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor that may be sharded."""
    return getattr(tensor, "_local_tensor", tensor)


@torch.compiler.disable  # asked for when an optimizer has stepped, which may be compiled
def digest(tensor: torch.Tensor) -> str:
    """By its bits, in the order of its indices; see weigh."""
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
