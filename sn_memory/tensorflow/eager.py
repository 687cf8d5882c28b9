"""A plan carried out: the ops of a step put into a graph again, in the order and number planned.

The order has to hold at run time, where TensorFlow runs ops as soon as their inputs are there. So
each op waits for the one before it in the plan, by a control dependency; a buffer is freed when its
last reader has run. An op that runs twice is in the graph twice. The two have different
dependencies, so no pass that merges equal ops merges them. XLA follows data alone and orders ops by
itself; it is refused where a plan is made.

check_plan checks a plan as a list of ops. Whether those ops, put into a graph, are the model's step
only a run shows: before a user's training depends on it, it is compared with the plain step.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final

import tensorflow as tf
from tensorflow.python.eager import record as tapes  # whether one is around
from tensorflow.python.framework import ops as framework_ops

from ..base.errors import PlanError, PlanWarning
from ..base.host import smallest_limit
from ..base.sizes import show_bytes
from ..check import check_plan
from ..graph.records import LOSS
from ..plan.plan import Plan
from .errors import TraceError, as_it_is, first_line
from .guards import Call, Settings, refilled
from .memory import Allocations, has_statistics, main_device
from .model import (
    Results,
    as_tensors,
    call_arguments,
    compute_dtypes,
    different,
    has_values,
    model_step,
    nudged,
    put_back,
    relative_error,
    results_of,
    uncast,
    unit_of,
    variables_of,
)
from .trace import kernels
from .trace.capture import Node, left_out, put
from .trace.trace import Trace

log = logging.getLogger(__name__)

# Constant folding turns c op (x op y) with a constant c into (c op x) op y, within each of these.
_REORDERED = (frozenset({"Mul", "Div", "RealDiv"}), frozenset({"Add", "AddV2", "Sub"}))
# What two correct steps may differ by, in steps of the least exact type: sums in another order,
# through deep networks. A step that does something else is off by more.
_ROUNDING: Final = 2.0**13
# In bfloat16 that would allow any difference.
_MOST: Final = 0.25
# A peak of up to so many budgets passes: kernels may ask for other scratch than when run alone.
_OVER: Final = 1.05


class Program:
    """A plan for a traced step, accepted by check_plan, ready to be put into graphs.

    settings : of a model's layers, those that are constants of the step
    """

    counts_small_blocks = False

    def __init__(self, traced: Trace, plan: Plan, settings: Settings | None = None) -> None:
        self.captured, self.named, self.plan = traced.captured, traced.named, plan
        self.settings: Settings = settings or {}
        self.base_bytes = self.named.graph.base_bytes
        self.actions = [action for action in plan.actions if action.kind in ("run", "free")]
        if len(self.actions) < len(plan.actions):
            raise PlanError(
                "the plan offloads; here ops are only kept and recomputed. Plan with "
                'techniques=("keep", "recompute").'
            )
        runs = (action.target for action in plan.actions if action.kind == "run")
        # Small ops that no plan sees follow the op after which they came.
        if list(dict.fromkeys(runs)) != [op.name for op in self.named.graph.ops]:
            raise PlanError(
                "the plan changes the order of first runs; the small ops between would be out of "
                "place. Plan with the planner 'auto'."
            )
        # Of a model, the action at which its forward pass ends; a step has its loss inside.
        self.boundary = len(self.actions)
        # Of the sources of a model's gradients, which have one; and what its results look like.
        self.has_gradient: tuple[bool, ...] = ()
        self.results: Any = None
        # The sources that are no variables of the model.
        self.others: list[Any] = []
        if self.captured.placeholders:
            targets = [action.target for action in self.actions]
            self.boundary = targets.index(LOSS)
            self.has_gradient = tuple(
                gradient is not None for gradient in traced.structure["gradients"]
            )
            self.results = traced.structure["results"]
            self.others = traced.structure["others"]
        # Per storage, the values that lie in it: a buffer, and the views of it.
        self.values: dict[str, list[int]] = {}
        for value, root in self.named.buffers.root.items():
            if root in self.named.storage:
                self.values.setdefault(self.named.storage[root], []).append(value)

    @property
    def peak_op(self) -> str:
        """The op that reaches the predicted peak."""
        return self.plan.actions[check_plan(self.named.graph, self.plan).peak_action].target

    def run(self, model: Any, own_call: Callable[..., Any], call: Call) -> Any:
        """Put the planned passes of a call into the graph; return the results of the call."""
        sources = [*uncast(model.trainable_variables), *self.others]
        outs = _differentiable(self, call.tensors, sources)
        return refilled(self.results, outs)

    @property
    def changed_variables(self) -> list[Any]:
        """The variables that ops of the step change."""
        variables = self.captured.variables
        return [variables[value] for value in self.named.buffers.changes]

    @property
    def changes_variables_only(self) -> bool:
        """Whether nothing else is changed, and no other rank is met."""
        effects = [self.captured.nodes[at].op for at in self.captured.effects]
        return all(
            kernels.changes_variables(op) and not kernels.is_collective(op) for op in effects
        )


class Emission:
    """A program put into the graph that is being built, once.

    inputs : tensors for the step's arguments
    """

    def __init__(self, program: Program, inputs: list[Any]) -> None:
        self.program = program
        self.captured, self.named = program.captured, program.named
        self.buffers = self.named.buffers
        # Per value, its tensor in this graph, while the plan holds it.
        self.tensors: dict[int, Any] = dict(zip(self.captured.arguments, inputs, strict=True))
        self.tensors.update(self.captured.captures)
        self.ran: set[str] = set()
        self.previous: list[Any] = []
        self.changed: dict[int, list[Any]] = {}

    def forward(self) -> None:
        """Emit the actions before the loss; all of them, where the loss is among them."""
        for at in self.named.followers[""]:
            self.emit(at, first=True)
        self.carry_out(self.program.actions[: self.program.boundary])

    def backward(self, incoming: list[Any]) -> None:
        """Emit the actions after the loss, from the gradients of the outputs."""
        self.tensors.update(zip(self.captured.placeholders, incoming, strict=True))
        # For all of them: the plan counts them together, from the loss on.
        self.previous = [*self.previous, *(gradient.op for gradient in incoming)]
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
        # A storage that a kernel keeps besides its results (where maxima were) has no values.
        for value in self.program.values.get(storage, ()):
            self.tensors.pop(value, None)

    def emit(self, at: int, *, first: bool) -> None:
        """Put a node into the graph, after the one before it."""
        node = self.captured.nodes[at]
        inputs = [self.need(value) for value in node.inputs]
        for place in self.fences(node):
            inputs[place] = self.fenced(inputs[place])
        op = put(node, inputs, self.previous)
        if not kernels.is_collective(node.op):
            # Collectives meet their peers in the background; only their readers wait.
            self.previous = [op]
        over = self.buffers.overwritten(at)
        for value, tensor in zip(node.outputs, op.outputs, strict=True):
            name = self.named.storage.get(value)
            if name is None:
                # Small: held from the first run on, by whoever reads it later.
                if first:
                    self.tensors[value] = tensor
                continue
            if over is not None and value == node.outputs[0]:
                self.drop(name)
            # Of two results, one may be held still where the op runs again for the other.
            if not any(value in self.tensors for value in self.program.values[name]):
                self.tensors[value] = tensor
        self.forget_changed(node)

    def fences(self, node: Node) -> list[int]:
        """Which inputs of an op are to be hidden from passes that would change the order.

        oneDNN's pass merges ops by what they read and ignores the control dependencies between
        them: the result is a cycle. Constant folding turns c * (x * y) into (c * x) * y, and c * x
        waits for nothing.
        """
        kind = node.op.type
        if kind in ("BiasAdd", "BiasAddGrad"):
            return [0]
        if kind.startswith("Conv"):
            return [0] if self.source(node.inputs[0]) == "Pad" else []
        family = next((kinds for kinds in _REORDERED if kind in kinds), None)
        # What is small may come early: no plan counts it.
        if family is None or self.buffers.small(node.outputs[0]):
            return []
        known = [value in self.buffers.folded for value in node.inputs]
        return [
            place
            for place, value in enumerate(node.inputs)
            if not known[place] and known[1 - place] and self.source(value) in family
        ]

    def source(self, value: int) -> str:
        """The kind of the op that makes a value; "" for arguments and captures."""
        at = self.buffers.producer.get(value)
        return "" if at is None else str(self.captured.nodes[at].op.type)

    def fenced(self, tensor: Any) -> Any:
        """Return the same buffer under another op, which no pass sees through."""
        # EnsureShape, as Grappler removes Identity (decision 17).
        graph = framework_ops.get_default_graph()
        with graph.control_dependencies([op for op in self.previous if op.graph is graph]):
            fence = tf.raw_ops.EnsureShape(input=tensor, shape=tensor.shape)
        self.previous = [fence.op]
        return fence

    def forget_changed(self, node: Node) -> None:
        """Drop what was read of variables that a node changes: later readers read them anew."""
        if not kernels.has_effect(node.op):
            return
        for handle in (value for value in node.inputs if value in self.captured.variables):
            self.changed[handle] = self.previous
            if handle in self.named.storage:
                for value in self.program.values[self.named.storage[handle]]:
                    if value != handle:
                        self.tensors.pop(value, None)

    def need(self, value: int) -> Any:
        """Return a value; views and constants are emitted when they are first needed."""
        if value in self.tensors:
            return self.tensors[value]
        at = self.buffers.producer.get(value)
        tensor = self.captured.tensors[value]
        if at is None or not self.buffers.is_view(at):
            raise PlanError(
                f"the plan reads {tensor.name!r} where it is not. Check it with check_plan."
            )
        node = self.captured.nodes[at]
        if len(node.outputs) > 1 and node.op.type in kernels.ALIASES:
            # One by one: what the others pass on may be freed, as the input of SiLU is.
            self.tensors[value] = self.need(node.inputs[node.outputs.index(value)])
            return self.tensors[value]
        known = kernels.constant(tensor) if node.op.type in kernels.SHAPES else None
        if known is not None:
            # The tensor that has that shape may be freed.
            self.tensors[value] = tf.constant(known, tensor.dtype)
            return self.tensors[value]
        inputs = [self.need(value) for value in node.inputs]
        # A view takes no memory, so it may come at any time; a read, once the last change is done.
        after = self.changed.get(node.inputs[0], []) if node.op.type == kernels.READS else []
        op = put(node, inputs, after)
        self.tensors.update(zip(node.outputs, op.outputs, strict=True))
        return self.tensors[value]


class TrialError(TraceError):
    """A planned step fails, has other results than the model's own, or exceeds its budget."""


def try_model(plain: Any, planned: Any, sample: Any, program: Program | None) -> None:
    """Run a planned model's step and the plain one, and compare.

    With a sample without values (tf.TensorSpec), and where a step has effects other than on its
    variables (other ranks, Python), the planned step is only built. The plain one is left out where
    the device has no memory for it.

    Raises TrialError if it cannot be built or run, holds more than the budget, or has other
    results.

    program : what carries the step out; None where the model itself runs, layers of it twice
    """
    step, device = model_step(planned), main_device()
    try:
        with warnings.catch_warnings():
            # What a user would be warned about is the trial's failure.
            warnings.simplefilter("ignore", PlanWarning)
            step.get_concrete_function(*call_arguments(sample))
    except Exception as error:
        raise TrialError(f"its planned step cannot be built: {first_line(error)}") from error
    refused = planned.__dict__["sn_memory"].refused
    if refused:
        raise TrialError(f"its step is not the planned one: {next(iter(refused))}")
    # Run an extra time, a step may change nothing but variables, which are put back.
    if not has_values(sample) or (program is not None and not program.changes_variables_only):
        return
    variables = variables_of(plain) if program is None else program.changed_variables
    args = as_tensors(sample)
    with put_back(variables):
        try:
            got = results_of(lambda: step(*args), variables)
        except tf.errors.OpError as error:
            raise TrialError(f"its planned step does not run: {first_line(error)}") from error
        # By layers, the budget was kept by measurement.
        if program is not None and has_statistics(device):
            with Allocations(device) as asked_for:
                step(*args)
            held, plan = program.base_bytes + asked_for.peak_bytes, program.plan
            if plan.budget_bytes is not None and held > _OVER * plan.budget_bytes:
                raise TrialError(
                    f"its planned step holds {show_bytes(held)} on the sample; the budget is "
                    f"{show_bytes(plan.budget_bytes)}"
                )
    # Beyond the limit the process may be killed, with no error to catch.
    limit, plan = smallest_limit(), planned.__dict__["sn_memory"].plan
    if limit is None or plan.baseline_peak_bytes < limit.free_bytes:
        _compare(plain, args, got, variables)


def _compare(plain: Any, args: Any, got: Results, variables: Sequence[Any]) -> None:
    """Raise TrialError if the plain step's results differ by more than rounding and chance."""

    def plainly() -> Results:
        step = model_step(plain)
        return results_of(lambda: step(*args), variables)

    def on_nudged_weights() -> Results:
        with nudged(plain.trainable_variables, unit):
            return plainly()

    unit = unit_of(compute_dtypes(plain))
    allowed = min(_MOST, _ROUNDING * unit)
    try:
        expected = plainly()
        off = relative_error(expected, got, on_nudged_weights, unit)
        if off <= allowed:
            return
        # The plain step against itself: kernels that add in any order differ by chance.
        if relative_error(expected, plainly(), on_nudged_weights, unit) > allowed:
            log.info("two plain steps differ by chance: the planned one was not compared")
            return
    except tf.errors.ResourceExhaustedError:
        log.info("no memory for the plain step: the planned one was not compared")
        return
    names = ", ".join(different(expected, got)[:3])
    raise TrialError(
        f"its planned step and the plain one differ in results: by {off:.1e} of the largest value "
        f"({names})"
    )


def _first_only(gradients: list[Any], made_of: list[Any]) -> list[Any]:
    """Return gradients that raise TraceError where an outer tape asks for theirs.

    made_of : what they depend on; through the ops of a plan no tape would see that
    """
    sources = [tensor for tensor in made_of if tensor is not None]

    @tf.custom_gradient
    def first(*tensors: Any) -> Any:
        def second(*_: Any) -> Any:
            raise as_it_is(
                TraceError(
                    "gradients of gradients are requested (a gradient penalty, a Hessian-vector "
                    "product) of a planned model, whose ops have first derivatives only. Plan it "
                    "with backend='layers', or the whole step: sn_memory.tensorflow.plan_step."
                )
            )

        return [tf.identity(tensor) for tensor in tensors[len(sources) :]], second

    real = [gradient for gradient in gradients if gradient is not None]
    results = iter(_as_list(first(*sources, *real)) if real else [])
    return [None if gradient is None else next(results) for gradient in gradients]


def _differentiable(program: Program, inputs: list[Any], variables: Sequence[Any]) -> list[Any]:
    """Put the planned passes into the graph; the tape sees one op with one gradient."""
    captured = program.captured
    # TensorFlow registers each custom gradient under a name for good, and with it keeps both graphs
    # alive. The backward pass is emitted once only, so its name can go then.
    registered: list[str] = []

    @tf.custom_gradient
    def passes(*_: Any) -> Any:
        emission = Emission(program, inputs)
        emission.forward()
        # A model's outputs are its results and after them its gradients.
        count = len(captured.outputs) - len(captured.gradients)
        outs = [emission.need(value) for value in captured.outputs[:count]]
        places = [captured.outputs.index(value) for value in captured.targets]
        asked = False

        def backward(*incoming: Any) -> Any:
            nonlocal asked
            if asked:
                raise as_it_is(
                    TraceError(
                        "a second gradient is requested of one forward pass of a planned model (by "
                        "a persistent tape, or another one), and its plan has let go of what it "
                        "kept. Sum the losses, call the model once for each, plan it with "
                        "backend='layers', or the whole step: sn_memory.tensorflow.plan_step."
                    )
                )
            asked = True
            of_targets = [incoming[place] for place in places]
            none = left_out(captured, of_targets)
            emission.backward(of_targets)
            results = iter(
                [
                    None if place in none else emission.need(value)
                    for place, value in enumerate(captured.outputs[count:])
                ]
            )
            for name in registered:
                # Private, as TensorFlow has no call that removes a name.
                framework_ops.gradient_registry._registry.pop(name, None)
            gradients = [next(results) if has_one else None for has_one in program.has_gradient]
            if tapes.could_possibly_record():
                gradients = _first_only(gradients, [*read, *of_targets])
            return gradients

        return outs, backward

    # Arguments only so that the tape asks for their gradients: the planned ops read the variables.
    read = [tf.convert_to_tensor(variable) for variable in variables]
    results = _as_list(passes(*read))
    registered += {result.op.get_attr("_gradient_op_type").decode() for result in results}
    return results


def _as_list(results: Any) -> list[Any]:
    """Return the results of a custom gradient, which returns a single one as it is."""
    return list(results) if isinstance(results, list | tuple) else [results]
