"""What a planned model carries as `model.sn_memory`: its steps, and what is known of them."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from operator import gt, or_
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ..base.errors import PlanError
from ..base.sizes import parse_bytes
from ..cost.devices import speeds
from ..run.at_once import TimeToPlan
from ..run.planned import PlannedKind, PlannedRecord
from .eager.replay import Replay
from .eager.trial import Trial
from .model.guards import GuardCache
from .model.known_values import is_ones, may_be_known
from .model.signature import Arguments, CallLayout, InputSignature, Name
from .model.wrapping import plain_model
from .modules.backend import ModuleStep
from .planning import PlanOptions, StateOnHost, Step
from .policy.policy import SelectivePolicy, checkpoint_policy
from .target.allocator import StepPool
from .trace.trace import Given, Trace

# Elements of an integer tensor of a sample that is held.
_MOST_HELD = 1 << 16
# Of the kinds that come while training so many steps are kept.
KINDS = 64


@dataclass
class Sampled:
    """A planned model, which this does not keep, and the form of a sample, without its memory.

    Of what it holds only a few integers: a model may look at them.
    """

    model: weakref.ref[torch.nn.Module]
    form: Any

    @classmethod
    def of(cls, model: torch.nn.Module, given: Arguments) -> Sampled:
        """Note a model and its sample."""
        return cls(weakref.ref(model), tree_map_only(torch.Tensor, _Form.of, given))

    def arguments(self) -> Given:
        """Return a sample of this form; what else it holds is zeros."""
        return Given(*tree_map_only(_Form, _Form.made, self.form))


@dataclass(frozen=True)
class _Form:
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    wanted: bool
    # The elements from the first to the last as they lie, or what each of them is.
    values: torch.Tensor | int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Form:
        values: torch.Tensor | int = 0
        if may_be_known(tensor):
            if (span := _span(tensor.size(), tensor.stride())) <= _MOST_HELD:
                row = tensor.detach().as_strided((span,), (1,), tensor.storage_offset())
                values = row.cpu().clone()
            else:
                values = int(is_ones(tensor))
        form = (tuple(tensor.size()), tensor.stride(), tensor.dtype, tensor.device)
        return cls(*form, tensor.requires_grad, values)

    def made(self) -> torch.Tensor:
        if isinstance(self.values, int):
            span = _span(self.size, self.stride)
            row = torch.full((span,), self.values, dtype=self.dtype, device=self.device)
        else:
            row = self.values.to(self.device, copy=True)
        return row.as_strided(self.size, self.stride).requires_grad_(self.wanted)


def _span(size: Sequence[int], stride: Sequence[int]) -> int:
    """Return how many elements there are from the first to the last as they lie."""
    if not all(size):
        return 0
    return 1 + sum((many - 1) * step for many, step in zip(size, stride, strict=True))


@dataclass(repr=False)
class Planned(PlannedRecord[Trace]):
    """What a planned model carries as `model.sn_memory`.

    Parameters
    ----------
    backend
        What carries the plan out: `graph`, `compile` or `modules`.
    steps
        What runs in place of the forward pass, per kind of input.
    latest
        The one that `plan` made last; of several samples, for the largest.
    written
        Per kind of input, how the arguments of its sample were written.
    trial
        What the trial of the plan made last found.
    planning
        How the model was planned last, with the budget in bytes.
    strict
        Whether to raise where no plan of ops keeps the budget.
    laid_out_otherwise
        Whether kernels were seen to lay results out otherwise than traced.
    told
        Per kind of input, how it was planned; see `kinds`.
    planned_online
        Of the kinds, those that came while training, with the number of the last step of each.
    safe
        Choices of modules that were measured on an input, each with its kind.
    time
        What planning at first sight took, and may take.
    count
        Steps so far.
    running
        The step that ran last.
    later
        Per step, the one that runs in its place where gradients of parameters are there already.
    told_of_several
        Whether a warning said that several forward passes before one backward break the budget.
    warned
        What a warning was given of, once.
    told_of_hooks
        Whether a warning said that hooks for saved tensors do not see what a plan keeps.
    guards
        What the steps depend on beside tensors; the kinds of the inputs that came last.
    changes
        Of attributes and arguments, for how many values at first sight a plan was made.
    free
        Those that change from step to step, whose values are left out; see
        `InputSignature.without`.
    sampled
        The model and the form of the sample that `plan` made last.
    pool
        Where the steps allocate, on a device that has such pools (CUDA).
    lock
        Held during a forward pass, and while one is planned: threads that share the model take
        turns, as both put other things in the place of what its modules have.
    """

    backend: str
    steps: dict[InputSignature, Step]
    latest: Step
    written: dict[InputSignature, CallLayout]
    trial: Trial
    planning: PlanOptions
    strict: bool = False
    laid_out_otherwise: bool = False
    told: dict[InputSignature, PlannedKind] = field(default_factory=dict)
    planned_online: dict[InputSignature, int] = field(default_factory=dict)
    safe: list[tuple[InputSignature, ModuleStep]] = field(default_factory=list)
    time: TimeToPlan = field(default_factory=TimeToPlan)
    count: int = 0
    running: Step | None = None
    later: dict[Step, Step] = field(default_factory=dict)
    told_of_several: bool = False
    warned: set[str] = field(default_factory=set, repr=False)
    told_of_hooks: bool = False
    guards: GuardCache = field(default_factory=GuardCache, repr=False)
    changes: Counter[Name] = field(default_factory=Counter, repr=False)
    free: set[Name] = field(default_factory=set, repr=False)
    sampled: Sampled | None = field(default=None, repr=False)
    pool: StepPool = field(default_factory=StepPool, repr=False, compare=False)
    lock: Any = field(default_factory=threading.RLock, repr=False, compare=False)

    def as_checkpoint_policy(
        self, blocks: Sequence[str | type | torch.nn.Module] | None = None
    ) -> SelectivePolicy:
        """Return a selective-checkpoint policy that keeps the same budget on the same sample.

        For who wants no new executor: `policy.wrap(model)` of the plain model. It is made for
        torch's own checkpointing, which cannot do what a plan of ops does, so its peak and what
        it saves are its own; see `checkpoint_policy`, also for `blocks` and errors.
        """
        model = None if self.sampled is None else self.sampled.model()
        if self.sampled is None or model is None:
            raise PlanError(
                "the planned model of this record is gone. Keep it, or call "
                "sn_memory.torch.checkpoint_policy with a model and a sample."
            )
        planning = self.planning
        return checkpoint_policy(
            plain_model(model),
            self.sampled.arguments(),
            self.budget_bytes,
            blocks=blocks,
            profile=planning.profile,
            device=speeds(planning.device),
            optimizer=planning.optimizer,
        )

    def release(self) -> None:
        """Give what the steps have reserved back to the device; the next step reserves it again.

        On CUDA the steps have a pool of their own. Gradients lie in it: let them go before
        (`zero_grad`), as memory that something lies in stays. Without such a pool nothing is done.
        """
        self.pool.release()

    def about_to_run(self, step: Step) -> None:
        """Note that a step runs now, in the pool of this model."""
        self.running = step
        if isinstance(step, Replay):
            step.pool = self.pool

    def begins_at(self, ends: Sequence[bool]) -> None:
        """Plan from now on for gradients of these outputs, beside others that were asked for."""
        before = self.planning.ends
        if len(before) == len(ends):
            ends = [*map(or_, before, ends)]
        self.planning = replace(self.planning, ends=tuple(ends))

    def is_to_plan(self, step: Step | None) -> bool:
        """Whether the step of a kind is to be planned, for the first time or once more.

        Once more where kernels lay out otherwise than traced, or gradients were asked for that it
        does not have.
        """
        if not isinstance(step, Replay):
            return step is None
        ends, own = self.planning.ends, step.captured.ends
        return bool(step.layouts) or (len(ends) == len(own) and any(map(gt, ends, own)))

    def known(self, kind: InputSignature | None) -> InputSignature | None:
        """Return a kind as a step is kept for it; if none is, without the values that change."""
        if kind is None or kind in self.steps:
            return kind
        free = kind.without(self.free)
        accepts = (it for like in (kind, free) for it in self.steps if it.accepts(like))
        return next(accepts, free)

    @property
    def state(self) -> StateOnHost | None:
        """All of the state, where it was planned: what lies where, and what that costs."""
        return self.planning.state

    def all_brought(self) -> AbstractContextManager[Any]:
        """Where the model's own forward runs: what rests on the host is brought for each op."""
        return nullcontext() if self.state is None else self.state.brought()

    @property
    def plan(self) -> Any:
        """The plan made last: a Plan, or with `modules` a MeasuredPlan."""
        return self.latest.plan

    @property
    def latest_trace(self) -> Trace | None:
        return self.latest.trace

    @property
    def budget_bytes(self) -> int:
        """The budget, for every kind of input."""
        return parse_bytes(self.planning.budget, whole=self.latest.plan.baseline_peak_bytes)

    def constants_bytes(self, *, beside: Iterable[torch.Tensor] = ()) -> int:
        """Bytes of what steps hold beside the model's tensors, each storage once.

        beside : tensors that do not count
        """
        known = {_key(it) for it in beside}
        steps = (*self.steps.values(), *self.later.values())
        held = {_key(it): it for step in steps for it in step.known}
        return sum(it.untyped_storage().nbytes() for key, it in held.items() if key not in known)

    def make_room(self, newest: InputSignature) -> None:
        """Let kinds go that were not used for longest: too many, or too much is held for them."""
        while len(self.planned_online) > 1 and (
            len(self.planned_online) > KINDS or self._is_held_too_much()
        ):
            oldest = min(
                (it for it in self.planned_online if it != newest),
                key=lambda it: self.planned_online[it],
            )
            self.later.pop(self.steps[oldest], None)
            del (
                self.planned_online[oldest],
                self.told[oldest],
                self.steps[oldest],
                self.written[oldest],
            )

    def _is_held_too_much(self) -> bool:
        """Whether what is held for other kinds takes one that keeps the budget above it."""
        return any(
            step.plan.peak_bytes <= self.budget_bytes
            and step.plan.peak_bytes + self.constants_bytes(beside=step.known) > self.budget_bytes
            for step in self.steps.values()
        )


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
