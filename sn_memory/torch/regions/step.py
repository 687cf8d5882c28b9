"""A step in which regions run planned, and what lies between them runs as the user wrote it.

The forwards of the regions' modules are replaced during one forward pass. A call takes the plan
that was chosen for it. Where the step takes another path than planned for - a layer is not
skipped this time, an expert gets more rows - what is held beyond that is counted call by call, and
calls take leaner plans as soon as the budget would not be kept.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from typing import Any
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
from .find import StepObserver
from .forward_pass import Chosen, ForwardPass
from .region import (
    Break,
    Region,
    TracedCall,
    as_written,
    order_of,
    outputs_of,
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
    lower_bound_seconds : of any choice of these plans within the budget, for the calls that were
        seen
    breaks : what is no region, and why
    outside_bytes : what is held outside of regions when the backward pass begins, parameters
        included
    leaner_steps, over_steps : steps of another path in which calls took leaner plans; those of
        them that were above the budget nevertheless.
    notes : what users should know of it
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
        """How far its seconds are above the lower bound, as a fraction of that."""
        bound = self.lower_bound_seconds
        return max(0.0, self.seconds / bound - 1) if bound > 0 else 0.0

    def decided(self, technique: str) -> tuple[str, ...]:
        """Return the modules of the calls with this technique, `keep` or `recompute`."""
        return tuple(dict.fromkeys(super().decided(technique)))

    def __repr__(self) -> str:
        count = self.runs
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
                f"{self.leaner_steps} steps took another path and leaner plans"
                f"{over if self.over_steps else ''}"
            )
        return "\n".join((*lines, *self.notes))


class RegionStep(MeasuredStep):
    """A model in which regions run planned.

    model : the plain model
    regions : by the paths of their modules
    reads, sets : see Step
    """

    backend = "regions"
    hidden_from_hooks = "do not see what its regions keep for the backward pass within the budget"
    plan: RegionsPlan
    # Returns a step for parameters that have gradients of so many bytes when it begins.
    with_gradients: Callable[[int], RegionStep]

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
        # Of the plain class: the planned model's own forward calls this step.
        self._forward = type(model).forward
        # The plans of the calls; without, all take their leanest.
        self.chosen: Chosen | None = None
        self.observer: StepObserver | None = None
        self.time = TimeToPlan()
        # "measured" suppresses warnings while steps are measured.
        self.warned = {"measured"}

    @property
    def known(self) -> list[torch.Tensor]:  # type: ignore[override]
        """Constants of the traces: tensors that no module holds."""
        kinds = {id(kind): kind for region in self.regions.values() for kind in region.alike.traced}
        return [
            tensor
            for kind in kinds.values()
            for tensor in kind.traced.captured.recording.constants.values()
        ]

    def copied(self) -> RegionStep:
        """Return a step with the same regions, which may follow other plans."""
        other = copy(self)
        # Forward passes of this one that wait are not the other's.
        other._passes = WeakSet()
        return other

    def run(self, model: torch.nn.Module, args: Any, kwargs: Any, call: Call | None = None) -> Any:
        """Run the model's own forward pass, with its regions planned."""
        current = None if self.chosen is None else ForwardPass(self.chosen)
        forwards = Forwards(
            {
                module: self._planned(region, module, current, lambda: forwards)
                for path, region in self.regions.items()
                for module in (model.get_submodule(path),)
            }
        )
        with forwards:
            returned = self._forward(model, *args, **kwargs)
        if self.observer is not None:
            self.observer.returned(outputs_of(returned))
        above = current is not None and current.above
        if current is not None and (current.leaner or above):
            steps = self.plan.leaner_steps + 1
            over = self.plan.over_steps + above
            self.plan = replace(self.plan, leaner_steps=steps, over_steps=over)
            if above and current.more and self.chosen is not None:
                # Such a pass is planned for from its first call on, the next time.
                self.chosen = self.chosen.extended(current.more)
        self.follow(model, returned)
        return returned

    def _planned(
        self,
        region: Region,
        module: torch.nn.Module,
        current: ForwardPass | None,
        forwards: Callable[[], Forwards],
    ) -> Callable[..., Any]:
        original, thread = module.forward, threading.get_ident()

        def forward(*args: Any, **kwargs: Any) -> Any:
            # Another thread that calls the module has a pass of its own.
            own = threading.get_ident() == thread and not as_written()
            if not own or not wants_gradient(module, (args, kwargs)):
                return original(*args, **kwargs)
            signature, parameters, buffers = region.lookup(module, (args, kwargs))
            kinds = region.alike.kinds
            if signature is not None and signature not in kinds:
                with forwards().away():
                    self._meet(region, module, (args, kwargs), signature)
                    again = run_again(region.path, module)
                if signature not in kinds:
                    if current is not None:
                        current.leaner = True
                    return again(*args, **kwargs)
            kind = None if signature is None else kinds[signature]
            if kind is None:
                return original(*args, **kwargs)
            plan = kind.leanest if current is None else current.plan(region.path, kind)
            call = Call(parameters, buffers, lambda _: _FirstOnly(region, kind, self.warned))
            return self._replay(region.path, module, kind, plan, (args, kwargs), call)

        return forward

    def _replay(
        self,
        path: str,
        module: torch.nn.Module,
        kind: TracedCall,
        plan: int,
        arguments: Arguments,
        call: Call,
    ) -> Any:
        """Run a call by one of its plans."""
        args, kwargs = as_sampled(module, kind.call, arguments)
        replay = kind.replay(plan)
        # Filled with results that a kernel lays out otherwise, which are copied in this pass.
        replay.layouts = {} if self.layouts is None else self.layouts
        if self.observer is None:
            return replay.run(module, args, kwargs, call)
        number = self.observer.begins(path, kind, plan)
        returned = replay.run(module, args, kwargs, call)
        self.observer.ended(number, outputs_of(returned), len(replay.program.backward))
        return returned

    def _meet(
        self,
        region: Region,
        module: torch.nn.Module,
        arguments: Arguments,
        signature: InputSignature,
    ) -> None:
        """Trace a call that comes for the first time."""
        others = region.alike.traced
        # Without time it runs again as a whole, and is traced once there is some.
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
            region.add(module, arguments, signature, TracedCall.of(traced, arguments, others))
        # Whatever it is, the module runs again as a whole in such calls.
        except Exception:  # noqa: BLE001
            region.alike.refused.add(signature)
        finally:
            self.time.took(time.perf_counter() - began)


class _FirstOnly:
    """The further derivatives of a region, of which there are none; see `PlainStep`."""

    def __init__(self, region: Region, kind: TracedCall, warned: set[str]) -> None:
        self._region, self._kind, self._warned = region, kind, warned

    def forward_ended(self) -> None:
        return

    def arrived(self, gradient: torch.Tensor, planned: View) -> None:
        """Note how the gradient of an output is laid out, and warn of it once in training."""
        text = other_layout(gradient, planned.stride)
        if not text:
            return
        place = self._kind.traced.captured.output_gradients.index(planned)
        order = order_of(gradient)
        if order is not None:
            # Later traces of this region expect it so.
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
