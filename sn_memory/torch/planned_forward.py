"""What a planned model does otherwise than its class: its forward pass runs by the plan.

Where gradients are wanted the step of the input's kind runs; one that comes for the first time gets
a step first (new_inputs.py). Otherwise it is the model's own forward, as when evaluating, and where
derivatives are asked for that no plan has (eager/higher_derivatives.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .accumulation import fitting
from .eager.higher_derivatives import PlainStep, without_plan
from .model.modes import OF_CHECKPOINT, saved_tensors_hook, transformed, warn
from .model.signature import as_sampled
from .model.wrapping import RECORD, plain_model, uninitialized
from .new_inputs import step_for
from .planned import PlanRecord, StepCache
from .step import Call, Step


class PlannedForward:
    """Stands before the class of the model; see `planned_class`."""

    def run_planned(
        self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the forward pass by the plan; as the class does where no gradient is wanted."""
        record: PlanRecord = self.__dict__[RECORD]
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
        inputs = record.inputs
        with record.lock:
            kind, parameters, buffers = record.guards.lookup(self, (args, kwargs), inputs.kept)  # type: ignore[arg-type]
            kind = inputs.known(kind)
            step = inputs.step(kind)
            if step is None:
                step = step_for(self, record, kind, (args, kwargs))  # type: ignore[arg-type]
            if step is None:
                with record.all_brought():
                    return plain(self, *args, **kwargs)
            inputs.count += 1
            kept = None if kind is None else inputs.kept.get(kind)
            if kept is not None:
                if kept.used is not None:
                    kept.used = inputs.count
                # By position or keyword as in the sample, which is how the step was recorded.
                args, kwargs = as_sampled(self, kept.call, (args, kwargs))  # type: ignore[arg-type]
            step = fitting(self, step, (args, kwargs), parameters)  # type: ignore[arg-type]
            if inputs.running is not step:
                # Two steps that take turns would else hold the arenas of both on the host.
                if inputs.running is not None:
                    inputs.running.release()
                inputs.running, step.pool = step, record.pool
            pack = saved_tensors_hook()
            if pack is not None and "hooks" not in inputs.warned:
                _warn_of_hooks(type(self).__name__, inputs, step, pack)
            arguments, plain_step = (args, kwargs), None
            if record.state is None and kind is not None:
                plain_step = partial(PlainStep, self, record, kind, arguments, parameters, buffers)
            return step.run(self, args, kwargs, Call(parameters, buffers, plain_step))  # type: ignore[arg-type]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Copies and pickles are plain: lock and recorded calls of a plan are of this process.
        plain = plain_model(self)  # type: ignore[arg-type]
        return uninitialized, (type(plain),), dict(plain.__dict__)


def _warn_of_hooks(name: str, inputs: StepCache, step: Step, pack: Callable[..., Any]) -> None:
    """Warn once where hooks of the caller's do not see what a plan keeps."""
    what, of_checkpoint = step.hidden_from_hooks, pack.__qualname__.startswith(OF_CHECKPOINT)
    if not what or (of_checkpoint and step.checkpoints_see):
        return
    inputs.warned.add("hooks")
    where = f"{pack.__module__}.{pack.__qualname__.partition('.<locals>')[0]}"
    warn(
        f"hooks for saved tensors ({where}) are on around a planned {name} and {what}. Call it "
        "outside of them, or run the model without a plan there."
    )
