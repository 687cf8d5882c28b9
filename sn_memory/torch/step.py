"""The planned step: what replaces the forward pass of a planned model, whatever the back end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch.utils._pytree import tree_leaves

from ..base.sizes import show_bytes
from ..plan.plan import Plan
from .errors import ReplayError
from .model.guards import Reads
from .model.modes import inside_checkpoint, warn_once
from .model.signature import Name
from .model.snapshot import StateSnapshot
from .model.wrapping import plain_class
from .target.allocator import StepPool
from .trace.record import Layouts
from .trace.trace import Trace


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a planned model, as passed to its step.

    parameters, buffers : of the model in this forward pass; `functional_call` swaps in others.
    plain : for a step, returns the plain step, which computes derivatives that plans do not cover
        (eager/higher_derivatives.py); None where there is none.
    """

    parameters: list[torch.nn.Parameter]
    buffers: list[torch.Tensor]
    plain: Callable[[Any], Any] | None


class Step(Protocol):
    """A planned step, for one kind of input.

    backend : `graph`, `regions`, `compile` or `modules`
    plan : a Plan, a RegionsPlan or a MeasuredPlan
    trace : the trace it was planned on; None if there is none.
    known, ignored : tensors it holds between steps, besides the model's: those that count as live,
        and those on the host.
    resident_bytes : held outside of the step: the optimizer's state.
    counts_gradients : whether it was planned for parameters that already have gradients
    layouts : of results whose layout in a trial differed from the trace
    pool : where it allocates; none during the trial, which also runs the model's own step.
    waiting : how many forward passes still wait for their backward pass
    runs_here : whether it can run on this machine
    rounds_alike : whether it runs the ops of the model's own step, so that results can be compared
    by_allocator : whether only the device's allocator sees all that it allocates
    reads, looked : what the forward pass read from modules during planning, None if unknown; and
        the positions of inputs whose values it read.
    sets : attributes that the forward pass sets: their values make no other kind of input.
    hidden_from_hooks : what the caller's hooks for saved tensors miss, or see instead; empty if
        they see everything.
    checkpoints_see : whether a checkpoint around it sees everything
    covers_smaller : whether it was measured, and runs any input that is no larger within the same
        bytes
    setting : share and solver of torch's memory budget
    """

    backend: str
    plan: Any
    trace: Trace | None = None
    known: Sequence[torch.Tensor] = ()
    resident_bytes: int = 0
    counts_gradients: bool = False
    layouts: Layouts | None = None
    pool: StepPool | None = None
    runs_here: bool = True
    rounds_alike: bool = True
    by_allocator: bool = False
    reads: Reads | None = None
    looked: Collection[int] = ()
    sets: Set[Name] = frozenset()
    checkpoints_see: bool = False
    covers_smaller: bool = False

    @property
    def setting(self) -> tuple[float, str] | None:
        return None

    @property
    def ignored(self) -> Sequence[torch.Tensor]:
        return ()

    @property
    def waiting(self) -> int:
        return 0

    @property
    def hidden_from_hooks(self) -> str:
        return ""

    def run(self, model: torch.nn.Module, args: Any, kwargs: Any, call: Call | None = None) -> Any:
        """Run the forward pass; the rest of the plan runs in the backward pass."""

    def release(self) -> None:
        """Free host memory that no pass uses; it is allocated again when the step runs."""
        return

    def is_outdated(self, ends: Sequence[bool]) -> bool:
        """Whether it has to be planned again, because other gradients are needed by now."""
        return False


class _Pass:
    """A forward pass that waits for its backward pass; it lives as long as its autograd graph."""

    consumed = False


class MeasuredStep(Step):
    """A step that runs the model's own forward pass, parts of it planned; was run and measured.

    warned : keys of the warnings already given; each is given once
    waiting_bytes : what a forward pass holds until its backward pass, and the part of it that the
        caller holds: input and output.
    """

    covers_smaller = True
    checkpoints_see = True  # inside a checkpoint the model's own forward runs unchanged
    warned: set[str]
    waiting_bytes = (0, 0)

    def __init__(self) -> None:
        self.warned, self._passes = set(), WeakSet[_Pass]()

    @property
    def waiting(self) -> int:
        return sum(not one.consumed for one in self._passes)

    @property
    def adding_peak_bytes(self) -> int:
        """Upper bound of a backward pass's peak when its gradients are added to earlier ones."""
        peak: int = self.plan.peak_bytes
        return peak

    def follow(self, model: torch.nn.Module, returned: Any) -> None:
        """Track by autograd hooks when the graph of a forward pass is freed, used, or kept."""
        if inside_checkpoint():
            return  # nothing is held
        one = _Pass()
        for tensor in StateSnapshot([("returned", tree_leaves(returned))]).tensors():
            # A hook lives as long as its node, and the pass as long as a hook.
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(partial(self._begins_back, model, one))
                self._passes.add(one)

    def _begins_back(self, model: torch.nn.Module, one: _Pass, _: Any) -> None:
        keeps = torch._C._autograd._get_current_graph_task_keep_graph()
        one.consumed |= not keeps
        if not keeps or "measured" in self.warned:
            return
        # Enabled in a backward pass only with create_graph.
        differentiated = torch.is_grad_enabled()
        if differentiated and self.backend != "modules":
            return  # regions refuse to be differentiated, by an error
        need, budget = self.plan.peak_bytes + self.waiting_bytes[0], self.plan.budget_bytes
        if need > budget or differentiated:
            text = keeps_graph(model, need, budget, differentiated=differentiated)
            warn_once(self.warned, "retained", text)


def keeps_graph(
    model: torch.nn.Module, need: int, budget: int, *, differentiated: bool = False
) -> str:
    """Return the warning about a backward pass that keeps its graph; need, budget : in bytes.

    differentiated : whether it creates a graph of its own
    """
    how = ("create_graph", "more than") if differentiated else ("retain_graph", "up to")
    return (
        f"a backward pass through a planned {plain_class(type(model)).__name__} keeps its graph "
        f"({how[0]}=True), and with it what the plan would free: it takes {how[1]} "
        f"{show_bytes(need)}, and the budget is {show_bytes(budget)}. Leave {how[0]} out where no "
        "second backward pass follows."
    )


class EstimateOnlyStep(Step):
    """The step of a model planned for a GPU that is not here: its plan can be read but not run."""

    backend = "graph"
    runs_here = False

    def __init__(self, trace: Trace, plan: Plan, device: str) -> None:
        self.trace, self.plan, self.device = trace, plan, device
        self.counts_gradients = bool(trace.captured.earlier)
        self.reads = trace.captured.reads

    def run(self, model: torch.nn.Module, args: Any, kwargs: Any, call: Call | None = None) -> Any:
        """Raise ReplayError for any input: the planned calls cannot run on this machine."""
        raise ReplayError(
            f"the model was planned for {self.device}, which is not here: its sn_memory has the "
            "plan and writes the report, but a step cannot run. To train, plan on that machine "
            "with the model there, and without device."
        )
