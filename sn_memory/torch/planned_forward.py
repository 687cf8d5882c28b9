"""What a planned model does otherwise than its class: its forward pass runs by the plan.

Where gradients are wanted the step of the input's kind runs; one that comes for the first time gets
a step first (new_inputs.py). Otherwise it is the model's own forward, as when evaluating, and where
derivatives are asked for that no plan has (eager/higher_derivatives.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from ..base.errors import PlanWarning
from .accumulation import fitting
from .eager.higher_derivatives import PlainStep, without_plan
from .eager.replay import Replay
from .model.modes import OF_CHECKPOINT, saved_tensors_hook, transformed
from .model.signature import as_sampled
from .model.wrapping import RECORD, plain_model, uninitialized
from .modules.backend import ModuleStep
from .new_inputs import step_for, without_free_arenas
from .planned import Planned
from .planning import Step


class PlannedForward:
    """Stands before the class of the model; see `planned_class`."""

    def run_planned(
        self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the forward pass by the plan; as the class does where no gradient is wanted."""
        record: Planned = self.__dict__[RECORD]
        if record.state is not None:
            args, kwargs = record.state.with_inputs((args, kwargs))
        if torch.is_grad_enabled() and transformed():
            without_plan(self, record)  # type: ignore[arg-type]
            with record.lock:
                return plain(self, *args, **kwargs)
        if not torch.is_grad_enabled():
            # Not while another thread plans, and has other tensors in the place of parameters.
            with record.lock, record.all_brought():
                return plain(self, *args, **kwargs)
        with record.lock:
            kind, parameters, buffers = record.guards.lookup(
                self,  # type: ignore[arg-type]
                (args, kwargs),
                record.steps,
            )
            kind = record.known(kind)
            step = None if kind is None else record.steps.get(kind)
            if record.is_to_plan(step):
                step = step_for(self, record, kind, (args, kwargs))  # type: ignore[arg-type]
            if step is None:
                with record.all_brought():
                    return plain(self, *args, **kwargs)
            record.count += 1
            if kind is not None:
                if kind in record.planned_online:
                    record.planned_online[kind] = record.count
                sample = record.written.get(kind)
                if sample is not None:
                    args, kwargs = as_sampled(self, sample, (args, kwargs))  # type: ignore[arg-type]
            step = fitting(self, step, (args, kwargs), parameters)  # type: ignore[arg-type]
            if record.running is not step:
                without_free_arenas(record.running)
                record.about_to_run(step)
            if (pack := saved_tensors_hook()) is not None and not record.told_of_hooks:
                record.told_of_hooks = _warn_of_hooks(type(self).__name__, step, pack)
            if isinstance(step, Replay):
                given, again = (args, kwargs), None
                if record.state is None and kind is not None:
                    again = PlainStep(self, record, kind, given, parameters, buffers, step)  # type: ignore[arg-type]
                return step.run_on(parameters, buffers, given, again)
            return step.run(self, args, kwargs)  # type: ignore[arg-type]

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = plain_model(self)  # type: ignore[arg-type]
        return uninitialized, (type(plain),), dict(plain.__dict__)


def _warn_of_hooks(name: str, step: Step, pack: Callable[..., Any]) -> bool:
    """Warn where hooks of the caller's do not see what a plan keeps; whether they do not."""
    of_checkpoint = pack.__qualname__.startswith(OF_CHECKPOINT)
    if isinstance(step, ModuleStep) and (of_checkpoint or not step.plan.decided("recompute")):
        return False
    where = f"{pack.__module__}.{pack.__qualname__.partition('.<locals>')[0]}"
    what = "do not see what its plan keeps for the backward pass within the budget"
    if isinstance(step, ModuleStep):
        what = "do not see what modules keep that run again"
    elif not isinstance(step, Replay):
        what = "see what its compiled code keeps, in place of what its ops would"
    warnings.warn(
        f"hooks for saved tensors ({where}) are on around a planned {name} and {what}. Call it "
        "outside of them, or run the model without a plan there.",
        PlanWarning,
        stacklevel=7,
    )
    return True
