"""A plan for a GPU that is not here: there to be read, and to be refused where it would run."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from ..plan.plan import Plan
from .errors import ReplayError
from .trace.trace import Trace


class EstimateOnlyStep:
    """The step of a model that was planned for another device than it is on."""

    resident_bytes = 0

    def __init__(self, trace: Trace, plan: Plan, device: str) -> None:
        self.trace, self.plan, self.device = trace, plan, device
        self.known: list[torch.Tensor] = []
        self.ignored: list[torch.Tensor] = []

    def run(
        self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> NoReturn:
        """Refuse: the kernels that were planned are not those of this machine."""
        raise self.refusal()

    def refusal(self) -> ReplayError:
        """Return what a training step says, whatever its input."""
        return ReplayError(
            f"the model was planned for {self.device}, which is not here: its sn_memory tells the "
            "plan and writes the report, and a step cannot run it. To train, plan on that machine "
            "with the model there, and without device."
        )
