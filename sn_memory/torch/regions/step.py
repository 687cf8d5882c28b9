"""A step in which regions run planned, and what lies between them runs as the user wrote it.

The forwards of the regions' modules are replaced for the time of one forward pass. A call takes the
plan that was chosen for it. Where the step takes another course than the one that was planned for -
a layer is not left out this time, an expert is given more rows - what is held beyond that is
counted call by call, and calls take leaner plans as soon as the budget would not be kept.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Protocol
from weakref import WeakSet

import torch

from ...base.sizes import peak_line, seconds_line, show_bytes
from ...plan.plan import BudgetError
from ...run.measured_choice import MeasuredPlan
from ...run.unseen import TimeToPlan
from ..errors import ReplayError
from ..model.guards import Reads
from ..model.modes import Forwards, other_layout, warn
from ..model.signature import Arguments, InputSignature, Name, as_sampled
from ..modules.rerun import run_again
from ..step import Call, MeasuredStep
from ..trace.op_seconds import while_training
from ..trace.record import View
from .course import Chosen, Course
from .region import (
    Break,
    Region,
    TracedCall,
    as_written,
    call_layout,
    given_bytes,
    order_of,
    outputs_of,
    plans_at_once,
    traced_call,
    wants_gradient,
)

# Breaks that a plan names in its text.
_SHOWN = 3


class RegionsBudgetError(BudgetError):
    """No choice of plans for regions keeps the budget.

    outside_bytes : what is held outside of regions when the backward pass begins
    """

    def __init__(self, message: str, *, outside_bytes: int, **rest: Any) -> None:
        super().__init__(message, **rest)
        self.outside_bytes = outside_bytes


@dataclass(frozen=True, repr=False)
class RegionsPlan(MeasuredPlan):
    """Which plan each call of a region takes, and what a step with all of them needs.

    choices : per call of a region: whether something of it runs again, what it keeps, seconds of
        reruns.
    baseline_peak_bytes : simulated where the step without the plan was not run
    predicted_peak_bytes : simulated
    lower_bound_seconds : no choice of these plans that keeps the budget is faster on the calls that
        were seen
    breaks : what is no region, and why
    outside_bytes : what is held outside of regions when the backward pass begins, parameters
        included
    leaner_steps, over_steps : steps of another course in which calls took leaner plans; those for
        which that was not enough.
    notes : what people should know of it
    """

    predicted_peak_bytes: int = 0
    lower_bound_seconds: float = 0.0
    breaks: tuple[Break, ...] = ()
    outside_bytes: int = 0
    leaner_steps: int = 0
    over_steps: int = 0
    notes: tuple[str, ...] = ()

    @property
    def gap(self) -> float:
        """How far above the lower bound it is, as a fraction of the bound."""
        bound = self.lower_bound_seconds
        return max(0.0, self.seconds / bound - 1) if bound > 0 else 0.0

    def decided(self, technique: str) -> tuple[str, ...]:
        """Return the modules of the calls with this technique, `keep` or `recompute`."""
        return tuple(dict.fromkeys(super().decided(technique)))

    def __repr__(self) -> str:
        count = self.courses
        largest = "" if count == 1 else f", the peak is that of the largest of {count}"
        rerun = [choice for choice in self.choices if choice.technique == "recompute"]
        kept = sum(choice.saved_bytes for choice in self.choices)
        lines = [
            f"Plan of {len(self.choices)} calls of regions{largest}",
            peak_line(self.budget_bytes, self.baseline_peak_bytes, self.peak_bytes),
            f"{len(rerun)} calls run something again, all keep {show_bytes(kept)}; "
            f"{show_bytes(self.outside_bytes)} are held outside of regions",
            f"{seconds_line(self.baseline_seconds, self.seconds)}, {100 * self.gap:.1f} % above "
            "the bound for these calls",
        ]
        lines += [
            f"break in {b.module or 'the model'} ({show_bytes(b.kept_bytes)} kept): {b.why}"
            for b in self.breaks[:_SHOWN]
        ]
        if len(self.breaks) > _SHOWN:
            lines.append(f"and {len(self.breaks) - _SHOWN} more breaks")
        if self.leaner_steps:
            over = f", {self.over_steps} of them above the budget all the same"
            lines.append(
                f"{self.leaner_steps} steps took another course and leaner plans"
                f"{over if self.over_steps else ''}"
            )
        return "\n".join((*lines, *self.notes))


class Observer(Protocol):
    """Who is told of the calls while a step is measured."""

    def begins(self, path: str, kind: TracedCall, plan: int) -> int: ...
    def ended(self, call: int, outputs: Sequence[torch.Tensor], sections: int) -> None: ...
    def returned(self, outputs: Sequence[torch.Tensor]) -> None: ...


class RegionStep(MeasuredStep):
    """A model in which regions run planned.

    model : the plain model
    regions : by the paths of their modules
    reads, sets : see Step
    """

    backend = "regions"
    hidden_from_hooks = "do not see what its regions keep for the backward pass within the budget"
    plan: RegionsPlan

    def __init__(
        self,
        model: torch.nn.Module,
        regions: dict[str, Region],
        reads: Reads,
        sets: set[Name],
        resident_bytes: int,
    ) -> None:
        super().__init__()
        self.regions, self.reads, self.sets = regions, reads, sets
        self.resident_bytes = resident_bytes
        # Of the plain class: the planned model's own would come back here.
        self._forward = type(model).forward
        # The plans of the calls; without, all take their leanest.
        self.chosen: Chosen | None = None
        self.observer: Observer | None = None
        self.time = TimeToPlan()
        # What a warning was given of; nothing is said while steps are measured.
        self.warned = {"measured"}
        # Makes the step that runs where gradients of so many bytes are there.
        self.with_gradients: Callable[[int], RegionStep] | None = None

    @property
    def known(self) -> list[torch.Tensor]:  # type: ignore[override]
        """Tensors that traces hold and that belong to nobody."""
        kinds = {id(kind): kind for region in self.regions.values() for kind in region.alike.traced}
        return [
            tensor
            for kind in kinds.values()
            for tensor in kind.traced.captured.recording.constants.values()
        ]

    def for_gradients_of(self, held_bytes: int) -> RegionStep:
        """Return a step for gradients of so many bytes that are there when it begins."""
        assert self.with_gradients is not None
        step = self.with_gradients(held_bytes)
        step.counts_gradients = True
        return step

    def copied(self) -> RegionStep:
        """Return a step with the same regions, to follow other plans."""
        other = copy(self)
        other._passes = WeakSet()
        return other

    def run(self, model: torch.nn.Module, args: Any, kwargs: Any, call: Call | None = None) -> Any:
        """Run the model's own forward pass, with its regions planned."""
        course = Course(self.chosen)
        forwards = Forwards(
            {
                module: self._planned(region, module, course, lambda: forwards)
                for path, region in self.regions.items()
                for module in (model.get_submodule(path),)
            }
        )
        with forwards:
            returned = self._forward(model, *args, **kwargs)
        if self.observer is not None:
            self.observer.returned(outputs_of(returned))
        above = course.above
        if course.leaner or above:
            steps = self.plan.leaner_steps + 1
            over = self.plan.over_steps + above
            self.plan = replace(self.plan, leaner_steps=steps, over_steps=over)
        if above and course.more and self.chosen is not None:
            # The next step of this course is planned for it from its first call on.
            self.chosen = self.chosen.extended(course.more)
        self.follow(model, returned)
        return returned

    def _planned(
        self,
        region: Region,
        module: torch.nn.Module,
        course: Course,
        forwards: Callable[[], Forwards],
    ) -> Callable[..., Any]:
        original, thread = module.forward, threading.get_ident()

        def forward(*args: Any, **kwargs: Any) -> Any:
            # Another thread has the module too, and a pass of its own.
            if threading.get_ident() != thread or as_written():
                return original(*args, **kwargs)
            traced = self._kind(region, module, (args, kwargs), forwards)
            if not isinstance(traced, tuple):
                course.leaner |= traced is not None
                return (original if traced is None else traced)(*args, **kwargs)
            kind, call = traced
            plan = course.plan(region.path, kind)
            args, kwargs = as_sampled(module, kind.call, (args, kwargs))
            replay = kind.replay(plan)
            # Unless a trial notes it, what a kernel lays out otherwise is put right.
            replay.layouts = {} if self.layouts is None else self.layouts
            if self.observer is None:
                return replay.run(module, args, kwargs, call)
            number = self.observer.begins(region.path, kind, plan)
            returned = replay.run(module, args, kwargs, call)
            self.observer.ended(number, outputs_of(returned), len(replay.program.backward))
            return returned

        return forward

    def _kind(
        self,
        region: Region,
        module: torch.nn.Module,
        arguments: Arguments,
        forwards: Callable[[], Forwards],
    ) -> tuple[TracedCall, Call] | Callable[..., Any] | None:
        """Return what was traced for a call; else what runs it; None where it runs as written."""
        if not wants_gradient(module, arguments):
            return None
        signature, parameters, buffers = region.lookup(module, arguments)
        if signature is None:
            return None
        kinds = region.alike.kinds
        if signature not in kinds:
            with forwards().away():
                self._meet(region, module, arguments, signature)
                if signature not in kinds:
                    return run_again(region.path, module)
        kind = kinds[signature]
        if kind is None:
            return None
        return kind, Call(parameters, buffers, lambda _: _FirstOnly(region, kind, self.warned))

    def _meet(
        self,
        region: Region,
        module: torch.nn.Module,
        arguments: Arguments,
        signature: InputSignature,
    ) -> None:
        """Trace a call that is met for the first time."""
        others = region.alike.traced
        if signature in region.alike.refused or not self.time.left():
            return
        device = others[0].traced.graph.device
        began = time.perf_counter()
        try:
            with while_training():
                traced = traced_call(
                    module,
                    arguments,
                    layouts=others[0].traced.layouts,
                    profile=False,
                    device=device,
                    arriving=region.arriving,
                    shares_inputs=region.alike.shares_inputs,
                )
            size = given_bytes(arguments)
            kind = TracedCall(
                traced, call_layout(arguments), plans_at_once(traced.graph, others, size), size
            )
            region.add(module, arguments, signature, kind)
        # Whatever it is, the call runs again as a whole.
        except Exception:  # noqa: BLE001
            region.alike.refused.add(signature)
        finally:
            self.time.took(time.perf_counter() - began)


class _FirstOnly:
    """What a region computes beside its first derivatives: nothing."""

    def __init__(self, region: Region, kind: TracedCall, warned: set[str]) -> None:
        self._region, self._kind, self._warned = region, kind, warned

    def forward_ended(self) -> None:
        return

    def arrived(self, gradient: torch.Tensor, planned: View) -> None:
        """Note how the gradient of an output comes, and say it once while training."""
        text = other_layout(gradient, planned.stride)
        if not text:
            return
        place = self._kind.traced.captured.output_gradients.index(planned)
        order = order_of(gradient)
        if order is not None:
            # What is traced from now on is traced so.
            self._region.arriving.setdefault(place, order)
        if "measured" not in self._warned and "layout" not in self._warned:
            self._warned.add("layout")
            warn(f"in {self._region.path}, {text}")

    def retained(self) -> None:
        return

    def gradients(self, wanted: Any, arrived: Any) -> Any:
        raise ReplayError(
            "gradients of gradients or several at a time (create_graph=True, vmap, forward-mode "
            f"AD) are asked for, and {self._region.path!r} ran as a region of its own, which "
            "computes one gradient. Plan with backend='modules', or call the model as it was "
            "before planning."
        )
