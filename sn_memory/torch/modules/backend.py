"""The back end for models that cannot be traced: chosen modules run again in the backward pass.

torch.utils.checkpoint does the running again, with the state of chance of the first time. Left to
the user are: which modules, whether it fits then, and what a second run does to statistics. Here
the sample is run: each module's seconds and saved bytes are measured, modules are kept where a
byte saves most, and each choice is counted, so the budget is kept on the sample or refused. For an
input that comes while training there is a safe choice, for which no step without a plan is run.
"""

from __future__ import annotations

from typing import Any

import torch

from ...base.sizes import parse_bytes
from ..step import Call, MeasuredStep
from .rerun import rerunning
from .search import Search


class ModuleStep(MeasuredStep):
    """A model whose chosen modules run again in the backward pass.

    model, args, kwargs : the plain model and a real sample; it is run, and left as it was.
    budget : as in `plan`
    resident_bytes : what counts beside the step: the optimizer's state.
    earlier_bytes : gradients that are there when a step begins; they count as well.
    safely : for an input that may not fit without a plan: the model's own step is not run, of the
        choices the one with the smallest peak stays where none keeps the budget, and seconds are
        not looked at.

    Raises BudgetError if no choice of modules keeps the budget on the sample, unless `safely`.
    """

    backend = "modules"

    def __init__(
        self,
        model: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        budget: float | str,
        *,
        resident_bytes: int = 0,
        earlier_bytes: int = 0,
        safely: bool = False,
    ) -> None:
        super().__init__()
        self.resident_bytes, self.counts_gradients = resident_bytes, bool(earlier_bytes)
        # Of the plain class: the planned model's own would come back here.
        self._forward = type(model).forward
        search = Search(model, (args, kwargs), resident_bytes + earlier_bytes)
        # Values of attributes that the forward sets make no other kind of input; those it reads do.
        self.sets, self.reads = search.sets, search.reads
        if safely:
            self.plan, self._again = search.safe(parse_bytes(budget, whole=0))
        else:
            self.plan, self._again = search.plan(budget)
        self.waiting_bytes = search.waiting_bytes

    @property
    def hidden_from_hooks(self) -> str:
        """What modules keep that run again."""
        again = self.plan.decided("recompute")
        return "do not see what modules keep that run again" if again else ""

    def run(self, model: torch.nn.Module, args: Any, kwargs: Any, call: Call | None = None) -> Any:
        """Run the model's own forward pass, with the chosen modules checkpointed."""
        with rerunning(model, self._again):
            returned = self._forward(model, *args, **kwargs)
        self.follow(model, returned)
        return returned
