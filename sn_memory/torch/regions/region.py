"""A region: the calls of one module, each traced whole and run by a plan of its own graph.

Modules that are alike share what was traced: the same class, the same tensors, and the same values
of what the trace read, as `model/guards.py` compares them for a whole model.
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
from ...plan.policies import policy
from ...run.unseen import smallest
from ..eager.replay import Replay
from ..errors import TraceError
from ..model.guards import GuardCache, Lookup
from ..model.modes import inside_checkpoint, outside_saved_tensors_hooks, transformed
from ..model.signature import Arguments, CallLayout, InputSignature, changeable
from ..model.step import detached, tensors
from ..trace.record import Layouts, View
from ..trace.trace import Given, Trace, trace
from .plans import RegionPlan, as_part, priced, useful

# So many kinds of calls are remembered for modules that are alike: rows of an expert, say.
_KINDS = 1024


# Per end whose gradient comes otherwise than the output lies, the order of its dimensions.
Arriving = dict[int, tuple[int, ...]]


@dataclass(eq=False)
class TracedCall:
    """A call that was traced, with the plans it may follow.

    traced : the region's step
    call : how its arguments were written
    plans : the fastest first
    given_bytes : of its inputs
    """

    traced: Trace
    call: CallLayout
    plans: list[RegionPlan]
    given_bytes: int
    _replays: dict[int, Replay] = field(default_factory=dict)

    def replay(self, plan: int) -> Replay:
        """Return what runs one of its plans."""
        if plan not in self._replays:
            self._replays[plan] = Replay(self.traced, self.plans[plan].plan, part=True)
        return self._replays[plan]

    def replan(self, plans: list[RegionPlan]) -> None:
        """Offer other plans from now on."""
        self.plans = plans
        self._replays.clear()

    @property
    def leanest(self) -> int:
        """The plan that keeps least between the passes, of those that which takes least."""
        places = range(len(self.plans))
        return min(places, key=lambda at: (self.plans[at].kept_bytes, max(self.plans[at].sizes)))


@dataclass
class Alike:
    """What modules that are alike share.

    guards : what of a module and its arguments the traces depend on
    kinds : per call, what was traced; None where that is not worth it.
    refused : calls that came while training and could not be traced: they run again as a whole.
    shares_inputs : whether others were seen to be given what they are given
    """

    guards: GuardCache = field(default_factory=GuardCache)
    kinds: dict[InputSignature, TracedCall | None] = field(default_factory=dict)
    refused: set[InputSignature] = field(default_factory=set)
    shares_inputs: bool = False

    @property
    def traced(self) -> list[TracedCall]:
        """What was traced."""
        return [kind for kind in self.kinds.values() if kind is not None]


class Region:
    """A module whose calls run planned.

    path : of the module
    alike : what it shares with others
    arriving : how gradients of its outputs come, as far as that was seen; of layers that are alike
        the last one may get them otherwise.
    """

    def __init__(self, path: str, alike: Alike, arriving: Arriving | None = None) -> None:
        self.path, self.alike = path, alike
        self.arriving: Arriving = dict(arriving or {})
        self._guards = GuardCache(alike.guards)

    def lookup(self, module: torch.nn.Module, arguments: Arguments) -> Lookup:
        """Return the kind of a call, and the tensors that the module has."""
        shared = self.alike.guards
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
        """Keep what was traced for a call."""
        captured, kinds = kind.traced.captured, self.alike.kinds
        added = self.alike.guards.add(signature, module, arguments, captured.reads, captured.looked)
        if len(kinds) >= _KINDS:
            del kinds[next(iter(kinds))]
        kinds[added] = kind


def structure(module: torch.nn.Module) -> Hashable:
    """Return what modules have in common that may share traces: classes, and forms of tensors."""

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
    """Trace a call of a module as a part of a step; raises TraceError where it is no region."""
    unseen = changeable(*arguments)
    if unseen:
        raise TraceError(
            f"an argument is a {', '.join(unseen)}: what it holds could change from call to call. "
            "Pass the tensors and numbers in it; of a cache of keys and values, which is for "
            "generating, use_cache=False leaves it out."
        )
    inputs = Given(*detached(arguments))
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
            # What it returns is no loss to those that go on with it.
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
        strides[dim], step = step, step * max(1, size[dim])
    return tuple(strides)


def _check_border(traced: Trace) -> None:
    """Refuse a region that hands out memory which others have as well.

    autograd follows in-place changes of views by their base, which lies on the other side.
    """
    captured = traced.captured
    views = [view for view in captured.outputs if isinstance(view, View)]
    shared = {view.storage for view in views} & set(captured.recording.roles)
    if shared or len({view.storage for view in views}) < len(views):
        raise TraceError(
            "it returns a view of what it is given, or two of one memory, which a region cannot "
            "hand out. Return a copy."
        )
    outputs = [*captured.outputs]
    if any(not isinstance(output, View) and torch.is_tensor(output) for output in outputs):
        raise TraceError("it returns a tensor that no recorded call made.")


def plans_at_once(graph: Graph, others: Sequence[TracedCall], size: int) -> list[RegionPlan]:
    """Return plans of a call that is met at once: those of the call most like it, carried over.

    others : calls of the same modules; size : bytes that it is given
    """
    plans = [priced(graph, policy("liveness")(graph, budget_bytes=None), "keeps all")]
    for other in sorted(others, key=lambda call: abs(call.given_bytes - size))[:1]:
        for plan in other.plans:
            try:
                plans.append(priced(graph, plan.plan, plan.name))
            # Other ops: it is of another course of the module.
            except PlanError:
                break
    if len(plans) == 1:
        plans.append(priced(graph, smallest(graph), ""))
    return useful(plans)


def given_bytes(arguments: Arguments) -> int:
    """Bytes of the tensors among arguments."""
    return sum({id(tensor): tensor.nbytes for tensor in tensors(arguments)}.values())


def call_layout(arguments: Arguments) -> CallLayout:
    """Return how arguments were written."""
    return len(arguments[0]), tuple(arguments[1])


def wants_gradient(module: torch.nn.Module, arguments: Arguments) -> bool:
    """Whether a call has a backward pass."""
    inputs = tensors(arguments)
    trained = any(tensor.requires_grad for tensor in module.parameters())
    return bool(inputs) and (trained or any(tensor.requires_grad for tensor in inputs))


def outputs_of(returned: Any) -> list[torch.Tensor]:
    """Return the tensors with a history in what a region returned."""
    flat = tree_flatten(returned)[0]
    return [leaf for leaf in flat if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]


def as_written() -> bool:
    """Whether what is called here runs as it was written: nothing is kept, or others look on."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or transformed():
        return True
    # A checkpoint of the user's runs what is inside again, and would not see what a plan keeps.
    return inside_checkpoint()


@dataclass(frozen=True)
class Break:
    """A module that runs as it was written.

    module : its path; empty for the model.
    why : the op and its line, and what to change
    kept_bytes : what it saves for the backward pass beside regions inside it
    """

    module: str
    why: str
    kept_bytes: int
