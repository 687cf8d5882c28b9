"""What a planned model does otherwise than its class: its forward pass runs by the plan.

Where gradients are wanted the step of the input's kind runs; one that comes for the first time gets
a step first (new_inputs.py). Otherwise it is the model's own forward, as when evaluating, and where
derivatives are asked for that no plan has (higher_derivatives.py).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch

from .accumulation import fitting
from .eager.replay import Replay
from .higher_derivatives import PlainStep, without_plan
from .model.guard import transformed
from .model.kinds import as_sampled
from .model.wrapping import RECORD, bare, plain_model
from .new_inputs import step_for, without_free_arenas
from .planned import Planned


class PlannedForward:
    """Stands before the class of the model; see `planned_class`."""

    def run_planned(
        self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the forward pass by the plan; as the class does where no gradient is wanted."""
        record: Planned = self.__dict__[RECORD]
        if torch.is_grad_enabled() and transformed():
            without_plan(self, record)  # type: ignore[arg-type]
            return plain(self, *args, **kwargs)
        if not torch.is_grad_enabled():
            with record.all_brought():
                return plain(self, *args, **kwargs)
        with record.lock:
            kind, parameters, buffers = record.recent.glance(
                self,  # type: ignore[arg-type]
                (args, kwargs),
                record.noted,
                chain(record.steps, record.ones),
            )
            if kind is not None:
                kind = record.ones.kind(self, kind, (args, kwargs))  # type: ignore[arg-type]
                kind = record.known(kind)
            step = None if kind is None else record.steps.get(kind)
            if step is None or getattr(step, "layouts", None):
                step = step_for(self, record, kind, (args, kwargs))  # type: ignore[arg-type]
            if step is None:
                with record.all_brought():
                    return plain(self, *args, **kwargs)
            record.count += 1
            if kind is not None:
                if kind in record.at_sight:
                    record.at_sight[kind] = record.count
                sample = record.written.get(kind)
                if sample is not None:
                    args, kwargs = as_sampled(self, sample, (args, kwargs))  # type: ignore[arg-type]
            step = fitting(self, step, (args, kwargs), parameters)  # type: ignore[arg-type]
            if record.running is not step:
                without_free_arenas(record.running)
                record.running = step
            if isinstance(step, Replay):
                given, again = (args, kwargs), None
                if record.state is None and kind is not None:
                    again = PlainStep(self, record, kind, given, parameters, buffers, step)  # type: ignore[arg-type]
                return step.run_on(parameters, buffers, given, again)
            return step.run(self, args, kwargs)  # type: ignore[arg-type]

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = plain_model(self)  # type: ignore[arg-type]
        return bare, (type(plain),), dict(plain.__dict__)
