"""A step in which regions run planned, and the code between them runs unchanged.

The forwards of the regions' modules are replaced during one forward pass. A call takes the plan
that was chosen for it. If the step takes another path than planned - a layer is not skipped this
time, an expert gets more rows - additional bytes are counted call by call, and calls take leaner
plans as soon as the budget would be exceeded.
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

    outside_bytes : bytes held outside of regions when the backward pass begins
    """

    def __init__(self, message: str, *, outside_bytes: int, **rest: Any) -> None:
        super().__init__(message, **rest)
        self.outside_bytes = outside_bytes


@dataclass(frozen=True, repr=False)
class RegionsPlan(MeasuredPlan):
    """The plan that each call of a region takes, and what a step with all of them needs.

    choices : per call of a region: whether part of it runs again, bytes it keeps, seconds of
        reruns.
    baseline_peak_bytes : simulated if the step without the plan was not run
    predicted_peak_bytes : simulated
    lower_bound_seconds : of any choice of these plans within the budget, for the observed calls
    breaks : modules that are not regions, and why
    outside_bytes : bytes held outside of regions when the backward pass begins, parameters
        included
    leaner_steps, over_steps : steps on another path in which calls took leaner plans; those of
        them that exceeded the budget nevertheless.
    notes : what users should know about the plan
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
        """Relative distance of its seconds to the lower bound."""
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
    # Returns a step for parameters whose gradients take this many bytes when it begins.
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
        # From the plain class: the planned model's own forward calls this step.
        self._forward = type(model).forward
        # The plans of the calls; None: all take their leanest.
        self.chosen: Chosen | None = None
        self.observer: StepObserver | None = None
        self.time = TimeToPlan()
        # "measured" suppresses warnings while steps are measured.
        self.warned = {"measured"}

    @property
    def known(self) -> list[torch.Tensor]:  # type: ignore[override]
        """Constants of the traces: tensors that are not held by any module."""
        kinds = {id(kind): kind for region in self.regions.values() for kind in region.alike.traced}
        return [
            tensor
            for kind in kinds.values()
            for tensor in kind.traced.captured.recording.constants.values()
        ]

    def copied(self) -> RegionStep:
        """Return a step with the same regions, which may follow other plans."""
        other = copy(self)
        # Pending forward passes of this step do not count for the other.
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
                # The next such pass is planned from its first call on.
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
            # Another thread that calls the module has its own pass.
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
        # Filled with layouts of results that differ from the trace; they are copied in this pass.
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
        """Trace a call that occurs for the first time."""
        others = region.alike.traced
        # Without time left it runs again as a whole, and is traced in a later step.
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
        # On any error, the module runs again as a whole in such calls.
        except Exception:  # noqa: BLE001
            region.alike.refused.add(signature)
        finally:
            self.time.took(time.perf_counter() - began)


class _FirstOnly:
    """Stand-in for `PlainStep`: a region has no higher derivatives."""

    def __init__(self, region: Region, kind: TracedCall, warned: set[str]) -> None:
        self._region, self._kind, self._warned = region, kind, warned

    def forward_ended(self) -> None:
        return

    def arrived(self, gradient: torch.Tensor, planned: View) -> None:
        """Record the layout of an output's gradient, and warn about it once in training."""
        text = other_layout(gradient, planned.stride)
        if not text:
            return
        place = self._kind.traced.captured.output_gradients.index(planned)
        order = order_of(gradient)
        if order is not None:
            # Later traces of this region expect this layout.
            self._region.arriving.setdefault(place, order)
        if "measured" not in self._warned and "layout" not in self._warned:
            self._warned.add("layout")
            warn(f"in {self._region.path}, {text}")

    def retained(self) -> None:
        return

    def gradients(self, wanted: Any, arrived: Any) -> Any:
        raise ReplayError(
            "gradients of gradients or several at a time (create_graph=True, vmap, forward-mode "
            f"AD) are requested, but {self._region.path!r} ran as a planned region, which "
            "computes one gradient. Plan with backend='modules', or call the model as it was "
            "before planning."
        )
