"""The parameters of a model as units of the planner: what an optimizer keeps and does for each."""

from __future__ import annotations

from typing import Any

import torch

from ...graph.hosted import Unit
from ..trace.record import View
from ..trace.trace import Trace
from .optimizer import check_optimizer, update_bytes


class StateUnits:
    """The units of models that one optimizer updates.

    Parameters
    ----------
    optimizer
        Which; PlanError if it does not update parameter by parameter.

    Attributes
    ----------
    groups
        The group of each of its parameters, by id.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        check_optimizer(optimizer)
        self.optimizer = optimizer
        self.groups = {id(it): group for group in optimizer.param_groups for it in group["params"]}
        self._bytes: dict[Any, tuple[int, int, int]] = {}

    def of(
        self, model: torch.nn.Module, traced: Trace, host_bytes_per_s: float | None = None
    ) -> list[Unit]:
        """Return the units of a model.

        Parameters
        ----------
        model
            The plain model.
        traced
            Its step, without an optimizer.
        host_bytes_per_s
            What the host's memory moves; None if host and device are one processor.
        """
        parameters = dict(model.named_parameters())
        captured = traced.captured
        names = {number: name for name, number in traced.named.storage_of.items()}
        gradients = dict(captured.gradients)
        outside = {it.storage for it in captured.outputs if isinstance(it, View)}
        kept = {it.storage for it in captured.output_gradients} | set(captured.recording.given)
        speed = traced.graph.device.bytes_per_s
        host_speed = speed if host_bytes_per_s is None else host_bytes_per_s
        found = []
        for name, form in captured.parameters:
            parameter, view = parameters[name], gradients.get(name)
            trained = view is not None and id(parameter) in self.groups
            size = state = counts = scratch = 0
            if trained:
                assert view is not None
                state, counts, scratch = self._update_bytes(parameter)
                size = parameter.numel() * parameter.element_size()
                scratch += 0 if view.stride == form.stride else size
            moved = 3 * size + 2 * state
            found.append(
                Unit(
                    names[form.storage],
                    names[view.storage] if trained and view is not None else None,
                    state,
                    scratch,
                    moved / speed if speed else 0.0,
                    movable=_is_whole(parameter, form) and form.storage not in outside,
                    used_up=view is not None and view.storage not in kept,
                    counts_bytes=counts,
                    host_update_s=moved / host_speed if host_speed else 0.0,
                )
            )
        return found

    def _update_bytes(self, parameter: torch.nn.Parameter) -> tuple[int, int, int]:
        group = self.groups[id(parameter)]
        key = (tuple(parameter.size()), parameter.stride(), parameter.dtype, id(group))
        if key not in self._bytes:
            self._bytes[key] = update_bytes(self.optimizer, group, parameter)
        return self._bytes[key]


def _is_whole(parameter: torch.nn.Parameter, form: View) -> bool:
    """Whether a parameter has a storage of its own, all of it, without gaps."""
    return (
        parameter.numel() > 0
        and form.offset == 0
        and (torch.empty_like(parameter, device="meta").stride() == parameter.stride())
        and (
            parameter.is_meta
            or parameter.untyped_storage().nbytes() >= parameter.numel() * parameter.element_size()
        )
    )
