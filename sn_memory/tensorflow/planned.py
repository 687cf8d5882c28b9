"""The attribute `sn_memory` of a planned Keras model or step: what runs, and what it reports."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import tensorflow as tf

from .. import settings
from ..base.sizes import parse_bytes
from ..check import check_plan
from ..graph.graph import Graph
from ..graph.liveness import unplanned_bytes
from ..graph.records import Device
from ..plan.plan import Plan, check_techniques
from ..run.planned import KeptStep, PlannedKind, PlannedRecord
from ..run.reserved import within_reserved
from ..run.unseen import SEARCH_S, TimeToPlan
from .eager import Emission, Program
from .guards import argument_tensors, check_constants, describe, refilled
from .modules.backend import LayerStep
from .target import bfc_settings
from .trace.trace import Trace

RECORD = "sn_memory"
# Runs a call as planned: both have `plan`, `run`, `settings` and what `verify` needs.
Step = Program | LayerStep
# How many kinds of input met during training are kept: each holds a traced graph.
KINDS = 32


@dataclass(frozen=True)
class PlanOptions:
    """Options for planning graphs; the parameters are those of `plan`.

    plan_graph : that of `sn_memory`; passed in, as only plan.py imports the planner
    """

    plan_graph: Callable[..., Plan]
    planner: str
    techniques: tuple[str, ...]
    device: Device | str | None
    strict: bool = False
    profile: bool = True
    optimizer: Any = None
    time_limit_s: float = 60.0

    def __post_init__(self) -> None:
        check_techniques(self.techniques)
        if "offload" in self.techniques:
            raise ValueError(
                'got the technique "offload", expected "keep" and "recompute": under TensorFlow '
                "nothing is moved to the host."
            )

    def plan(self, graph: Graph, budget: float | str, *, from_sqrt_n: bool = True) -> Plan:
        """Return a plan within a budget of reserved bytes (on a GPU) or live bytes (elsewhere)."""
        limit_s = self.time_limit_s

        # Seconds are given if a plan exceeded its budget and a lower one is searched.
        def search(live_bytes: float | str, seconds: float | None) -> Plan:
            return self.plan_graph(
                graph,
                live_bytes,
                planner=self.planner,
                techniques=self.techniques,
                time_limit_s=limit_s if seconds is None else min(seconds, limit_s),
                deterministic=settings.deterministic,
                from_sqrt_n=from_sqrt_n and seconds is None,
            )

        allocator = bfc_settings(self.device)
        if allocator is None:
            planned = search(budget, None)
        else:
            # A share refers to live bytes: reserved ones are known only for plans.
            allowed = parse_bytes(budget, whole=unplanned_bytes(graph))
            planned = within_reserved(graph, allowed, search, allocator)
        # Whichever planner made it: every plan that is carried out has passed the check.
        check_plan(graph, planned)
        return planned

    def search(self, budget_bytes: int) -> Callable[[Graph], Plan]:
        """Return a function that plans a graph within a budget, in about SEARCH_S."""
        options = replace(self, time_limit_s=SEARCH_S)
        return lambda graph: options.plan(graph, budget_bytes, from_sqrt_n=False)


@dataclass(repr=False)
class PlanRecord(PlannedRecord[Trace, Step]):
    """The attribute `sn_memory` of a planned model or step.

    Parameters
    ----------
    backend
        The back end that runs the plan: `graph` or `layers`.
    traced, latest_plan
        Trace and plan of the last call of `plan`; for several samples, those of the largest. With
        `layers`, there is no trace.
    kept
        The steps that run, per kind of input.
    """

    backend: str
    traced: Trace | None
    latest_plan: Any
    kept: dict[Hashable, KeptStep[Step]] = field(default_factory=dict)
    # The step that recomputes layers, for any input, if `plan` chose layers.
    layers: LayerStep | None = None
    # Why calls ran unplanned; each reason is warned about once.
    refused: set[Hashable] = field(default_factory=set)
    # Options and sample of the last plan, with tf.TensorSpec in place of tensors; None for a step,
    # and until `plan` is done.
    options: PlanOptions | None = None
    sample: tuple[Any, ...] = ()
    # Choices of layers, each with the shapes it was measured on.
    measured: list[tuple[Any, LayerStep]] = field(default_factory=list)
    time: TimeToPlan = field(default_factory=TimeToPlan)
    # How often the model was traced into a function, and the step used the last time.
    count: int = 0
    running: Step | None = None

    @property
    def plan(self) -> Any:
        return self.latest_plan

    @property
    def planned_inputs(self) -> list[str]:
        if self.layers is not None:
            return ["any"]
        # A step function has no kinds: it only takes arguments like its sample's.
        return super().planned_inputs or ["as its sample"]

    @property
    def latest_trace(self) -> Trace | None:
        return self.traced

    @property
    def budget_bytes(self) -> int:
        """The budget, for every kind of input."""
        return int(self.latest_plan.budget_bytes)

    @property
    def strict(self) -> bool:
        """Whether errors are raised in place of warnings."""
        return self.options is not None and self.options.strict

    def take_over(self, before: PlanRecord | None) -> None:
        """Take over what `plan` planned for other inputs; kinds met in training are replanned."""
        if before is not None:
            self.kept |= {kind: kept for kind, kept in before.kept.items() if kept.used is None}
            self.layers = before.layers

    def keep(
        self,
        kind: Hashable,
        call: Hashable,
        step: Step,
        how: str,
        seconds: float | None = None,
    ) -> None:
        """Store the step for a kind of input; `call` is the key of its calls.

        If `seconds`, the time of planning during training, is given, it is kept while there is
        room: the least recently used kind is dropped first.
        """
        summary = PlannedKind(
            describe(call), how, step.plan.peak_bytes, self.budget_bytes, seconds=seconds or 0.0
        )
        # Inserted as the last one, even if it was kept before.
        self.kept.pop(kind, None)
        self.kept[kind] = KeptStep(step, summary, used=None if seconds is None else self.count)
        online = {kind: kept.used for kind, kept in self.kept.items() if kept.used is not None}
        if len(online) > KINDS:
            del self.kept[min(online, key=online.__getitem__)]


class PlannedStep:
    """A training step that runs as planned.

    plain : the step before planning
    sn_memory : trace, plan and report, as in a planned model
    """

    def __init__(self, plain: Any, traced: Trace, plan: Plan) -> None:
        self.plain, self._constants = plain, traced.constants
        program = Program(traced, plan)
        self.sn_memory = PlanRecord("graph", traced, plan, running=program)
        captured = traced.captured
        arguments = [captured.tensors[value] for value in captured.arguments]

        def run(*arguments: Any) -> list[Any]:
            emission = Emission(program, list(arguments))
            emission.forward()
            return [emission.need(value) for value in captured.outputs]

        # With a signature, other shapes raise; without it, they would be traced into the same ops.
        specs = [tf.TensorSpec(argument.shape, argument.dtype) for argument in arguments]
        self._run = tf.function(run, autograph=False, input_signature=specs)

    def put_together(self) -> None:
        """Build the graph of the planned ops, which otherwise the first call does."""
        self._run.get_concrete_function()

    def __call__(self, *args: Any) -> Any:
        """Run the step; arguments like the sample's, results like the plain step's."""
        check_constants(self._constants, args)
        return refilled(self.sn_memory.trace.structure, self._run(*argument_tensors(args)))


def plain_class(planned: type) -> Any:
    """Return the class of a model before it was planned."""
    return planned.__mro__[2]  # behind the twin's class and the mixin


def plain_model(model: Any) -> Any:
    """Return the model without its plan; a model that is not planned is returned unchanged."""
    if RECORD not in model.__dict__:
        return model
    plain: Any = object.__new__(plain_class(type(model)))
    plain.__dict__.update({key: value for key, value in model.__dict__.items() if key != RECORD})
    return plain
