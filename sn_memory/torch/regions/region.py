"""A region: the calls of one module, each traced as a whole and run by a plan of its own graph.

Modules that are alike share traces: they have the same class, tensors of the same forms, and the
same values of what the trace read, compared as `model/guards.py` does for a whole model.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten

from ...base.errors import PlanError
from ...graph.graph import Graph
from ...run.unseen import smallest
from ..eager.replay import Replay
from ..errors import TraceError
from ..model.guards import GuardCache, Lookup
from ..model.modes import inside_checkpoint, outside_saved_tensors_hooks, transformed
from ..model.signature import (
    Arguments,
    CallLayout,
    InputSignature,
    call_layout,
    changeable,
    detached,
    tensors,
)
from ..trace.record import Layouts, View
from ..trace.trace import CallArguments, Trace, trace
from .plans import RegionPlan, as_part, keeping_all, priced, useful

# How many kinds of calls are remembered for modules that are alike: an expert, for example, gets
# another number of rows each time.
_KINDS = 1024
# By index of the output, for gradients with another layout: the order of dimensions.
Arriving = dict[int, tuple[int, ...]]


@dataclass(eq=False)
class TracedCall:
    """A traced call, with the plans it may follow.

    traced : the region's step
    call : layout of its arguments
    plans : the fastest first
    given_bytes : bytes of its inputs
    """

    traced: Trace
    call: CallLayout
    plans: list[RegionPlan]
    given_bytes: int
    _replays: dict[int, Replay] = field(default_factory=dict)

    @classmethod
    def of(
        cls, traced: Trace, arguments: Arguments, others: Sequence[TracedCall] = ()
    ) -> TracedCall:
        """Return a call with plans made without a search; others : calls of the same modules."""
        size = given_bytes(arguments)
        plans = plans_at_once(traced.graph, others, size)
        return cls(traced, call_layout(arguments), plans, size)

    def replay(self, plan: int) -> Replay:
        """Return the Replay of one of its plans."""
        # Cached: a Replay checks its first run, and generates code for the next ones.
        if plan not in self._replays:
            self._replays[plan] = Replay(self.traced, self.plans[plan].plan, part=True)
        return self._replays[plan]

    def replan(self, plans: list[RegionPlan]) -> None:
        """Replace the plans."""
        self.plans = plans
        self._replays.clear()

    @property
    def leanest(self) -> int:
        """Index of the plan that keeps least between the passes; ties: the smallest peak."""
        indices = range(len(self.plans))
        return min(indices, key=lambda i: (self.plans[i].kept_bytes, max(self.plans[i].sizes)))


@dataclass
class Alike:
    """State shared by modules that are alike.

    guards : what the traces depend on
    kinds : per call signature, what was traced; None for calls that keep too little.
    refused : calls during training that could not be traced: they run again as a whole.
    shares_inputs : whether other ops were observed to use the same inputs
    """

    guards: GuardCache = field(default_factory=GuardCache)
    kinds: dict[InputSignature, TracedCall | None] = field(default_factory=dict)
    refused: set[InputSignature] = field(default_factory=set)
    shares_inputs: bool = False

    @property
    def traced(self) -> list[TracedCall]:
        """The calls that may run planned."""
        return [kind for kind in self.kinds.values() if kind is not None]


class Region:
    """A module whose calls run planned.

    path : of the module
    alike : state shared with modules that are alike
    arriving : observed layouts of the gradients of its outputs, which may differ between layers
        that are alike.
    """

    def __init__(self, path: str, alike: Alike, arriving: Arriving | None = None) -> None:
        self.path, self.alike = path, alike
        self.arriving: Arriving = dict(arriving or {})
        self._guards = GuardCache(alike.guards)

    def lookup(self, module: torch.nn.Module, arguments: Arguments) -> Lookup:
        """Return the kind of a call, and the module's tensors."""
        shared = self.alike.guards
        # A trace of another module of the group may have added reads.
        if (
            self._guards.reads is not shared.reads
            or self._guards.value_guards != shared.value_guards
        ):
            self._guards = GuardCache(shared)
        return self._guards.lookup(module, arguments, self.alike.kinds)

    def add(
        self,
        module: torch.nn.Module,
        arguments: Arguments,
        signature: InputSignature,
        kind: TracedCall,
    ) -> None:
        """Store what was traced for a call."""
        captured, kinds = kind.traced.captured, self.alike.kinds
        added = self.alike.guards.add(signature, module, arguments, captured.reads, captured.looked)
        if len(kinds) >= _KINDS:
            del kinds[next(iter(kinds))]
        kinds[added] = kind


def structure(module: torch.nn.Module) -> Hashable:
    """Return what modules must have in common to share traces: classes, and forms of tensors."""

    def forms(named: Any) -> tuple[Hashable, ...]:
        return tuple(
            (name, tuple(t.size()), t.stride(), t.dtype, t.device, t.requires_grad)
            for name, t in named
        )

    classes = tuple(map(type, module.modules()))
    return classes, forms(module.named_parameters()), forms(module.named_buffers())


def traced_call(
    module: torch.nn.Module,
    arguments: Arguments,
    *,
    layouts: Layouts | None,
    profile: bool,
    device: Any,
    arriving: Arriving | None = None,
    shares_inputs: bool = False,
) -> Trace:
    """Trace a call of a module as part of a step; raises TraceError if it is not a region."""
    unseen = changeable(*arguments)
    if unseen:
        raise TraceError(
            f"an argument is a {', '.join(unseen)}: what it holds could change from call to call. "
            "Pass the tensors and numbers in it; of a cache of keys and values, which is for "
            "generating, use_cache=False leaves it out."
        )
    inputs = CallArguments(*detached(arguments))
    settings: dict[str, Any] = {
        "profile": profile,
        "device": device,
        "layouts": layouts or {},
        "unplanned": False,
        "part": True,
        "shares_inputs": shares_inputs,
    }
    with _disable_current_modes(), outside_saved_tensors_hooks(), torch.enable_grad():
        traced = trace(module, inputs, **settings)
        if not all(traced.captured.ends):
            # By default only an output named loss gets a gradient; here others may as well.
            ends = (True,) * len(traced.captured.ends)
            traced = trace(module, inputs, ends=ends, **settings)
        if arriving:
            sizes = [view.size for view in traced.captured.output_gradients]
            strides = [
                _strides(size, arriving[place]) if place in arriving else None
                for place, size in enumerate(sizes)
            ]
            ends = (True,) * len(sizes)
            traced = trace(module, inputs, ends=ends, arriving=strides, **settings)
    _check_border(traced)
    return as_part(traced)


def order_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the order of a tensor's dimensions in memory; None if it has gaps."""
    order = sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim))
    return tuple(order) if _strides(tensor.size(), order) == tensor.stride() else None


def _strides(size: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    strides, step = [0] * len(size), 1
    for dim in reversed(order):
        # An empty dimension counts as one, as in torch.
        strides[dim], step = step, step * max(1, size[dim])
    return tuple(strides)


def _check_border(traced: Trace) -> None:
    """Refuse a region that returns memory which is used outside as well.

    Autograd tracks in-place changes of views by their base, which would be outside of the region.
    """
    captured = traced.captured
    views = [view for view in captured.outputs if isinstance(view, View)]
    shared = {view.storage for view in views} & set(captured.recording.roles)
    if shared or len({view.storage for view in views}) < len(views):
        raise TraceError(
            "it returns a view of an input, or two tensors that share memory, which a region "
            "cannot return. Return a copy."
        )
    outputs = [*captured.outputs]
    if any(not isinstance(output, View) and torch.is_tensor(output) for output in outputs):
        raise TraceError("it returns a tensor that no recorded call made.")


def plans_at_once(graph: Graph, others: Sequence[TracedCall], size: int) -> list[RegionPlan]:
    """Return plans of a call without a search: those of the most similar call.

    others : calls of the same modules; size : bytes of its inputs
    """
    plans = [keeping_all(graph)]
    if others:
        nearest = min(others, key=lambda call: abs(call.given_bytes - size))
        for plan in nearest.plans:
            try:
                plans.append(priced(graph, plan.plan))
            # The graphs have different ops: the module took another branch.
            except PlanError:
                break
    if len(plans) == 1:
        plans.append(priced(graph, smallest(graph)))
    return useful(plans)


def given_bytes(arguments: Arguments) -> int:
    """Bytes of the tensors among arguments."""
    return sum({id(tensor): tensor.nbytes for tensor in tensors(arguments)}.values())


def wants_gradient(module: torch.nn.Module, arguments: Arguments) -> bool:
    """Whether a call has inputs and a backward pass."""
    inputs = tensors(arguments)
    trained = any(tensor.requires_grad for tensor in module.parameters())
    return bool(inputs) and (trained or any(tensor.requires_grad for tensor in inputs))


def outputs_of(returned: Any) -> list[torch.Tensor]:
    """Return the tensors with a `grad_fn` among what a region returned."""
    flat = tree_flatten(returned)[0]
    return [leaf for leaf in flat if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]


def as_written() -> bool:
    """Whether a call here runs unplanned: nothing is saved, or it is compiled or transformed."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or transformed():
        return True
    # A user's checkpoint runs everything inside again, and cannot drop what a plan keeps.
    return inside_checkpoint()


@dataclass(frozen=True)
class Break:
    """A module that runs unplanned.

    module : its path; empty for the model.
    why : the op and its line, and what to change
    kept_bytes : bytes it saves for the backward pass outside of its regions
    """

    module: str
    why: str
    kept_bytes: int
