"""The forward of a planned model, which runs by the plan.

With gradients enabled, the step for the input's kind runs; a new kind gets a step first
(new_inputs.py). Otherwise the model's own forward runs: in evaluation, and for derivatives that
plans do not cover (eager/higher_derivatives.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from multiprocessing.context import get_spawning_popen
from typing import Any

import torch

from ..base.errors import PlanError
from ..plan.plan import BudgetError
from .accumulation import fitting
from .eager.higher_derivatives import PlainStep, without_plan
from .errors import ReplayError, TraceError, out_of_memory
from .model.modes import (
    OF_CHECKPOINT,
    caches_weights,
    saved_tensors_hook,
    transformed,
    warn,
    warn_once,
)
from .model.signature import as_sampled
from .model.wrapping import RECORD, exported, plain_class, plain_model, uninitialized
from .new_inputs import step_for
from .planned import PlanRecord, StepCache
from .step import Call, Step

_OF_PLANNING = (BudgetError, PlanError, ReplayError, TraceError)


class PlannedForward:
    """The first base of a planned model's class; see `planned_class`."""

    def run_planned(
        self: Any, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the forward pass by the plan, or by `plain`, the class's own, if there is none."""
        record: PlanRecord = self.__dict__[RECORD]
        if record.state is not None:
            args, kwargs = record.state.with_inputs((args, kwargs))
        if torch.is_grad_enabled() and (why := _reason_against_plan(self, record)):
            without_plan(self, record, why)
            with record.lock:
                return plain(self, *args, **kwargs)
        if not torch.is_grad_enabled():
            # Locked, because a thread that plans temporarily replaces parameters.
            with record.lock, record.all_brought():
                return plain(self, *args, **kwargs)
        inputs = record.inputs
        with record.lock:
            kind, parameters, buffers = record.guards.lookup(self, (args, kwargs), inputs.kept)
            kind = inputs.known(kind)
            step = inputs.step(kind)
            failure = None
            if step is None:
                try:
                    step = step_for(self, record, kind, (args, kwargs))
                except Exception as error:
                    if isinstance(error, _OF_PLANNING) or out_of_memory(error):
                        raise
                    # Most often the model's own error. Planning leaves no trace, but a forward pass
                    # that raises changes buffers and the random state, and a caller who skips the
                    # batch continues from there.
                    failure = error
            if step is None:
                with record.all_brought():
                    result = plain(self, *args, **kwargs)
                if failure is not None:
                    raise failure
                return result
            inputs.count += 1
            kept = None if kind is None else inputs.kept.get(kind)
            if kept is not None:
                if kept.used is not None:
                    kept.used = inputs.count
                # By position or keyword as in the sample, because the step was recorded so.
                args, kwargs = as_sampled(self, kept.call, (args, kwargs))
            step = fitting(self, step, (args, kwargs), parameters)
            if inputs.running is not step:
                # Otherwise two steps that alternate would hold two arenas on the host.
                if inputs.running is not None:
                    inputs.running.release()
                inputs.running, step.pool = step, record.pool
            if (pack := saved_tensors_hook()) is not None:
                _warn_of_hooks(type(self).__name__, inputs, step, pack)
            arguments, plain_step = (args, kwargs), None
            if record.state is None and kind is not None:
                plain_step = partial(PlainStep, self, record, kind, arguments, parameters, buffers)
            return step.run(self, args, kwargs, Call(parameters, buffers, plain_step))

    def __prepare_scriptable__(self: Any) -> Any:
        # torch.jit.script calls this to get what it compiles: our forward is not TorchScript.
        raise exported(plain_class(type(self)))

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        # Copies and pickles are plain: a plan's lock and recorded calls belong to this process.
        plain = plain_model(self)
        if get_spawning_popen() is not None:
            warn(
                f"a planned {type(plain).__name__} is passed to a new process, where it has no "
                "plan: its steps need as much memory as without one. Call plan there, too."
            )
        return uninitialized, (type(plain),), dict(plain.__dict__)


def _reason_against_plan(model: torch.nn.Module, record: PlanRecord) -> str:
    """Return why the model's own forward has to run; empty if the plan may run."""
    if transformed():
        return "inside torch.func or forward-mode AD"
    # `modules` runs the model's own modules, which use cached weights as the model does.
    if record.backend != "modules" and caches_weights(model):
        return "inside parametrize.cached(), with weights whose computation changes buffers"
    return ""


def _warn_of_hooks(name: str, inputs: StepCache, step: Step, pack: Callable[..., Any]) -> None:
    """Warn once if the caller's hooks for saved tensors do not see all that a plan keeps."""
    what, of_checkpoint = step.hidden_from_hooks, pack.__qualname__.startswith(OF_CHECKPOINT)
    if not what or (of_checkpoint and step.checkpoints_see):
        return
    where = f"{pack.__module__}.{pack.__qualname__.partition('.<locals>')[0]}"
    text = (
        f"hooks for saved tensors ({where}) are on around a planned {name} and {what}. Call it "
        "outside of them, or run the model without a plan there."
    )
    warn_once(inputs.warned, "hooks", text)
