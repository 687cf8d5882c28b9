"""A plan carried out: the ops of a step put into a graph again, in the order and number planned.

What runs when, and what is given back when, has to hold at run time, where TensorFlow runs ops as
soon as their inputs are there. So each op waits for the one before it in the plan, by a control
dependency; a buffer goes when its last reader has run. An op that runs twice is there twice. The
two have different dependencies, so no pass that merges equal ops merges them. XLA looks at data
only and orders ops by itself; it is refused where a plan is made.

A plan is checked as a list of ops (check_plan). Whether those ops, put into a graph again, are the
model's step, TensorFlow alone can say: so a planned step is run once on a real sample beside the
plain one, before a user's training depends on it.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final

import tensorflow as tf
from tensorflow.python.framework import ops as framework_ops

from ..base.errors import PlanError, PlanWarning
from ..base.host import smallest_limit
from ..base.sizes import show_bytes
from ..plan.plan import Plan
from ..run.loss import LOSS
from ..run.measured_choice import MeasuredPlan
from . import compare
from .errors import TraceError, first_line
from .guards import Settings
from .memory import Allocations, has_statistics, main_device
from .model import as_tensors, call_arguments, compute_dtypes, model_step, put_back
from .trace import kernels
from .trace.capture import Captured, Node
from .trace.trace import Trace

log = logging.getLogger(__name__)

# Of c op (x op y) with a constant c, constant folding makes (c op x) op y, within each of these.
_REORDERED = (frozenset({"Mul", "Div", "RealDiv"}), frozenset({"Add", "AddV2", "Sub"}))
# What two correct steps may differ by, in steps of the least exact type: sums in another order,
# through deep networks. A step that does something else is off by more.
_ROUNDING: Final = 2.0**13
_MOST: Final = 0.25
# What counts as within the budget: kernels of other shapes than those measured alone.
_OVER: Final = 1.05


class Program:
    """A plan for a traced step, accepted by check_plan, ready to be put into graphs.

    settings : of a model's layers, those that are constants of the step
    """

    def __init__(self, traced: Trace, plan: Plan, settings: Settings | None = None) -> None:
        self.captured, self.named, self.plan = traced.captured, traced.named, plan
        self.settings: Settings = settings or {}
        self.actions = [action for action in plan.actions if action.kind in ("run", "free")]
        if len(self.actions) < len(plan.actions):
            raise PlanError(
                "the plan offloads; here ops are only kept and recomputed. Plan with "
                'techniques=("keep", "recompute").'
            )
        firsts = list(dict.fromkeys(it.target for it in plan.actions if it.kind == "run"))
        if firsts != [op.name for op in self.named.graph.ops]:
            raise PlanError(
                "the plan changes the order of first runs; the small ops between would be out of "
                "place. Plan with the planner 'auto'."
            )
        self.boundary = len(self.actions)
        # Of the sources of a model's gradients, which have one; and what its results look like.
        self.has_gradient: tuple[bool, ...] = ()
        self.results: Any = None
        if self.captured.placeholders:
            targets = [action.target for action in self.actions]
            self.boundary = targets.index(LOSS)
            self.has_gradient = tuple(it is not None for it in traced.structure["gradients"])
            self.results = traced.structure["results"]
        self.values: dict[str, list[int]] = {}
        for value, root in self.named.buffers.root.items():
            if root in self.named.storage:
                self.values.setdefault(self.named.storage[root], []).append(value)

    @property
    def changed_variables(self) -> list[Any]:
        """The variables that ops of the step change."""
        variables = self.captured.variables
        return [variables[value] for value in self.named.buffers.changes]


class Emission:
    """One time a program is put into the graph that is being built.

    given : tensors for the step's arguments
    """

    def __init__(self, program: Program, given: list[Any]) -> None:
        self.program = program
        self.captured, self.named = program.captured, program.named
        self.buffers = self.named.buffers
        self.made: dict[int, Any] = dict(zip(self.captured.arguments, given, strict=True))
        self.made.update(self.captured.captures)
        self.ran: set[str] = set()
        self.previous: list[Any] = []
        self.changed: dict[int, list[Any]] = {}

    def forward(self) -> None:
        """Put the actions before the loss there; all of them, where the loss is among them."""
        for at in self.named.followers[""]:
            self.emit(at, first=True)
        self.carry_out(self.program.actions[: self.program.boundary])

    def backward(self, incoming: list[Any]) -> None:
        """Put the actions after the loss there, given the gradients of the outputs."""
        for value, tensor in zip(self.captured.placeholders, incoming, strict=True):
            self.made[value] = tensor
        self.previous = [*self.previous, *(it.op for it in incoming)]
        for at in self.named.followers[LOSS]:
            self.emit(at, first=True)
        self.carry_out(self.program.actions[self.program.boundary + 1 :])

    def carry_out(self, actions: Any) -> None:
        for kind, target, _ in actions:
            if kind == "free":
                self.drop(target)
                continue
            first = target not in self.ran
            self.ran.add(target)
            self.emit(self.named.node_of[target], first=first)
            if first:
                for at in self.named.followers[target]:
                    self.emit(at, first=True)

    def drop(self, storage: str) -> None:
        # What a kernel keeps for another beside its results has no value.
        for value in self.program.values.get(storage, ()):
            self.made.pop(value, None)

    def emit(self, at: int, *, first: bool) -> None:
        """Put a node there, after what came before it."""
        node = self.captured.nodes[at]
        inputs = [self.need(value) for value in node.inputs]
        for place in self.fences(node):
            inputs[place] = self.fenced(inputs[place])
        op = put(node, inputs, self.previous)
        if not kernels.is_collective(node.op):
            # Collectives meet their peers in the background; only who reads them waits.
            self.previous = [op]
        over = self.buffers.overwritten(at)
        for value, tensor in zip(node.outputs, op.outputs, strict=True):
            name = self.named.storage.get(value)
            if name is None:
                if first:
                    self.made[value] = tensor
                continue
            if over is not None and value == node.outputs[0]:
                self.drop(name)
            if not any(it in self.made for it in self.program.values[name]):
                self.made[value] = tensor
        self.forget_changed(node)

    def fences(self, node: Node) -> list[int]:
        """Which inputs of an op are to be hidden from passes that change what runs when.

        oneDNN's pass merges ops by what they read, blind to what waits between them: the result is
        a cycle. Constant folding makes c * (x * y) into (c * x) * y, and c * x waits for nothing.
        """
        kind = node.op.type
        if kind in ("BiasAdd", "BiasAddGrad"):
            return [0]
        if kind.startswith("Conv"):
            return [0] if self.source(node.inputs[0]) == "Pad" else []
        family = next((kinds for kinds in _REORDERED if kind in kinds), None)
        if family is None or self.buffers.small(node.outputs[0]):
            return []
        known = [value in self.buffers.folded for value in node.inputs]
        return [
            place
            for place, value in enumerate(node.inputs)
            if not known[place] and known[1 - place] and self.source(value) in family
        ]

    def source(self, value: int) -> str:
        """The kind of the op that makes a value; "" for what is given."""
        at = self.buffers.producer.get(value)
        return "" if at is None else str(self.captured.nodes[at].op.type)

    def fenced(self, tensor: Any) -> Any:
        """Return the same buffer under another op, which no pass sees through."""
        graph = framework_ops.get_default_graph()
        with graph.control_dependencies([it for it in self.previous if it.graph is graph]):
            fence = tf.raw_ops.EnsureShape(input=tensor, shape=tensor.shape)
        self.previous = [fence.op]
        return fence

    def forget_changed(self, node: Node) -> None:
        """What was read from a variable before it changed is not read for what comes after."""
        if not kernels.has_effect(node.op):
            return
        for handle in (it for it in node.inputs if it in self.captured.variables):
            self.changed[handle] = self.previous
            if handle in self.named.storage:
                for value in self.program.values[self.named.storage[handle]]:
                    if value != handle:
                        self.made.pop(value, None)

    def need(self, value: int) -> Any:
        """Return a value; views and constants are made when first asked for."""
        if value in self.made:
            return self.made[value]
        at = self.buffers.producer.get(value)
        tensor = self.captured.tensors[value]
        if at is None or not self.buffers.is_view(at):
            raise PlanError(
                f"the plan reads {tensor.name!r} where it is not. Check it with check_plan."
            )
        node = self.captured.nodes[at]
        if len(node.outputs) > 1 and node.op.type in kernels.ALIASES:
            # One by one: what the others pass on may be gone, as the input of SiLU is.
            self.made[value] = self.need(node.inputs[node.outputs.index(value)])
            return self.made[value]
        known = kernels.constant(tensor) if node.op.type in kernels.SHAPES else None
        if known is not None:
            # What has that shape may be gone.
            self.made[value] = tf.constant(known, tensor.dtype)
            return self.made[value]
        inputs = [self.need(it) for it in node.inputs]
        # A view takes no memory, so it may come at any time; a read, once the last change is done.
        after = self.changed.get(node.inputs[0], []) if node.op.type == kernels.READS else []
        op = put(node, inputs, after)
        self.made.update(zip(node.outputs, op.outputs, strict=True))
        return self.made[value]


def put(node: Node, inputs: list[Any], after: list[Any]) -> Any:
    """Put a copy of an op into the graph that is being built."""
    op, graph = node.op, framework_ops.get_default_graph()
    attrs = {}
    for key, value in op.node_def.attr.items():
        if key in ("_class", "_gradient_op_type", "_output_shapes"):
            continue
        attrs[key] = value
        for called in (value.func.name, *(it.name for it in value.list.func)):
            if called and not graph._is_function(called):
                graph._add_function_recursive(op.graph._get_function(called))
    waits = [it for it in after if it.graph is graph]
    with tf.device(op.device or None), graph.control_dependencies(waits):
        return graph._create_op_internal(
            op.type,
            inputs,
            [it.dtype for it in op.outputs],
            name=op.name,
            attrs=attrs,
            op_def=op.op_def,
        )


class TrialError(TraceError):
    """A planned step that is not the model's, or not within its budget."""


def try_model(
    plain: Any,
    planned: Any,
    sample: Any,
    *,
    variables: Sequence[Any],
    captured: Captured | None,
    base_bytes: int,
    plan: Plan | MeasuredPlan,
) -> None:
    """Run a planned model's step beside the plain one.

    With a sample without values (tf.TensorSpec), and where a step has effects beside its variables
    (other ranks, Python), the planned step is only put together. The plain one is left out where
    the device has no memory for it.

    Raises TrialError if it cannot be put together or run, holds more than the budget, or comes to
    other results.

    Parameters
    ----------
    variables
        What a step may change.
    captured
        The ops of the step; None where the model itself runs.
    base_bytes
        What counts beside the step.
    """
    step, device = model_step(planned), main_device()
    try:
        with warnings.catch_warnings():
            # What a user would be warned about is the trial's failure.
            warnings.simplefilter("ignore", PlanWarning)
            step.get_concrete_function(*call_arguments(sample))
    except Exception as error:
        raise TrialError(f"its planned step cannot be put together: {first_line(error)}") from error
    refused = planned.__dict__["sn_memory"].refused
    if refused:
        raise TrialError(f"its step is not the planned one: {next(iter(refused))}")
    if captured is not None and not _repeatable(captured):
        return
    if any(isinstance(leaf, tf.TensorSpec) for leaf in tf.nest.flatten(sample)):
        return
    args = as_tensors(sample)
    with put_back(variables):
        try:
            got = compare.results_of(lambda: step(*args), variables)
        except tf.errors.OpError as error:
            raise TrialError(f"its planned step does not run: {first_line(error)}") from error
        if captured is not None and has_statistics(device):
            with Allocations(device) as asked_for:
                step(*args)
            held = base_bytes + asked_for.peak_bytes
            if plan.budget_bytes is not None and held > _OVER * plan.budget_bytes:
                raise TrialError(
                    f"its planned step holds {show_bytes(held)} on the sample; the budget is "
                    f"{show_bytes(plan.budget_bytes)}"
                )
    limit = smallest_limit()
    if limit is None or plan.baseline_peak_bytes < limit.free_bytes:
        _compare(plain, args, got, variables)


def _compare(plain: Any, args: Any, got: compare.Results, variables: Sequence[Any]) -> None:
    """Raise TrialError if the plain step's results are others, but for rounding and chance."""

    def plainly() -> compare.Results:
        step = model_step(plain)
        return compare.results_of(lambda: step(*args), variables)

    def nudged() -> compare.Results:
        with compare.nudged(plain.trainable_variables, unit):
            return plainly()

    unit = compare.unit_of(compute_dtypes(plain))
    allowed = min(_MOST, _ROUNDING * unit)
    try:
        expected = plainly()
        off = compare.relative_error(expected, got, nudged, unit)
        if off <= allowed:
            return
        if compare.relative_error(expected, plainly(), nudged, unit) > allowed:
            log.info("two plain steps differ by chance: the planned one was not compared")
            return
    except tf.errors.ResourceExhaustedError:
        log.info("no memory for the plain step: the planned one was not compared")
        return
    names = ", ".join(compare.different(expected, got)[:3])
    raise TrialError(
        f"its planned step comes to other results than the plain one: {off:.1e} of the largest "
        f"value ({names})"
    )


def _repeatable(captured: Captured) -> bool:
    """Whether a step may be run an extra time: it changes nothing but variables."""
    effects = [node.op for node in captured.nodes if kernels.has_effect(node.op)]
    return all(kernels.changes_variables(op) and not kernels.is_collective(op) for op in effects)


def asked(run: Callable[[], Any], variables: Sequence[Any]) -> Allocations:
    """Run once from the present state, and return what ops asked for; variables are put back."""
    with put_back(variables), Allocations(main_device()) as asked_for:
        run()
    return asked_for
