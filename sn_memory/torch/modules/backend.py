"""The back end for models that cannot be traced: chosen modules run again in the backward pass.

torch.utils.checkpoint runs modules again, with the random numbers of the first run. It leaves to
users which modules, whether that fits, and what a second run does to statistics. Here the sample is
run: each module's seconds and saved bytes are measured, those stay that save most seconds for a
byte, and the bytes of each choice are counted, so the budget is kept on the sample or refused. For
an input that comes while training there is a safe choice, without a step that has no plan.
"""

from __future__ import annotations

from typing import Any

import torch

from ...base.sizes import parse_bytes
from ..model.signature import Arguments
from ..step import Call, MeasuredStep
from .rerun import rerunning
from .search import Search


class ModuleStep(MeasuredStep):
    """A model whose chosen modules run again in the backward pass.

    model, arguments : the plain model and a real sample; it is run, and left as it was.
    budget : as in `plan`
    resident_bytes : what counts besides the step: the optimizer's state.
    earlier_bytes : of gradients that exist when a step begins; they count as well.
    safely : for an input that may not fit without a plan: the model's own step is not run, seconds
        do not count, and if no choice keeps the budget the one with the smallest peak is taken.

    Raises BudgetError if no choice of modules keeps the budget on the sample, unless `safely`.
    """

    backend = "modules"

    def __init__(
        self,
        model: torch.nn.Module,
        arguments: Arguments,
        budget: float | str,
        *,
        resident_bytes: int = 0,
        earlier_bytes: int = 0,
        safely: bool = False,
    ) -> None:
        super().__init__()
        self.resident_bytes, self.counts_gradients = resident_bytes, bool(earlier_bytes)
        # Of the plain class: the planned model's own forward calls this step.
        self._forward = type(model).forward
        search = Search(model, arguments, resident_bytes + earlier_bytes)
        # Values that the forward sets make no other kind of input; those it only reads do.
        self.sets, self.reads = search.sets, search.reads
        if safely:
            self.plan, self._again = search.safe(parse_bytes(budget, whole=0))
        else:
            self.plan, self._again = search.plan(budget)
        self.waiting_bytes = search.waiting_bytes

    @property
    def hidden_from_hooks(self) -> str:
        """That of modules which run again; empty if there are none."""
        again = self.plan.decided("recompute")
        return "do not see what modules keep that run again" if again else ""

    def run(self, model: torch.nn.Module, args: Any, kwargs: Any, call: Call | None = None) -> Any:
        """Run the model's own forward pass, with the chosen modules checkpointed."""
        with rerunning(model, self._again):
            returned = self._forward(model, *args, **kwargs)
        self.follow(model, returned)
        return returned
