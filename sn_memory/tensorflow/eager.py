"""Execution of a plan: emits the ops of a step into a graph, as often and in the order planned.

The order has to hold at run time, when TensorFlow runs ops as soon as their inputs are ready. So
each op waits for the previous one in the plan, by a control dependency; a buffer is freed when its
last reader has run. An op that runs twice is in the graph twice. The two have different control
dependencies, so no pass that merges equal ops merges them. XLA ignores control dependencies and
schedules ops itself, so planning refuses it.

check_plan checks a plan as a list of ops. Only a run shows whether those ops, put into a graph, are
the model's step: before a user's training depends on it, it is compared with the plain step.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final

import tensorflow as tf
from tensorflow.python.eager import record as tapes  # to ask whether a tape is active
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

# Constant folding turns c op (x op y) with a constant c into (c op x) op y, within each set.
_REORDERED = (frozenset({"Mul", "Div", "RealDiv"}), frozenset({"Add", "AddV2", "Sub"}))
# Allowed difference of two correct steps, in rounding units of the least precise dtype: sums in
# another order, through deep networks. A step that computes something else is off by more.
_ROUNDING: Final = 2.0**13
# An upper bound, as in bfloat16 that would allow any difference.
_MOST: Final = 0.25
# Allowed peak, in budgets: kernels may request other scratch memory than when run alone.
_OVER: Final = 1.05


class Program:
    """A plan for a traced step, accepted by check_plan, ready to be emitted into graphs.

    settings : settings of a model's layers that are constants of the step
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
        # Small ops outside of the plan follow the op that they followed in the trace.
        if list(dict.fromkeys(runs)) != [op.name for op in self.named.graph.ops]:
            raise PlanError(
                "the plan changes the order of first runs; the small ops between would be out of "
                "place. Plan with the planner 'auto'."
            )
        # For a model, the action at which its forward pass ends; a step contains its loss.
        self.boundary = len(self.actions)
        # For a model: which sources have a gradient; and the structure of its results.
        self.has_gradient: tuple[bool, ...] = ()
        self.results: Any = None
        # Sources of gradients that are not variables of the model.
        self.others: list[Any] = []
        if self.captured.placeholders:
            targets = [action.target for action in self.actions]
            self.boundary = targets.index(LOSS)
            self.has_gradient = tuple(
                gradient is not None for gradient in traced.structure["gradients"]
            )
            self.results = traced.structure["results"]
            self.others = traced.structure["others"]
        # Per storage, the values in it: a buffer and its views.
        self.values: dict[str, list[int]] = {}
        for value, root in self.named.buffers.root.items():
            if root in self.named.storage:
                self.values.setdefault(self.named.storage[root], []).append(value)

    @property
    def peak_op(self) -> str:
        """The op that reaches the predicted peak."""
        return self.plan.actions[check_plan(self.named.graph, self.plan).peak_action].target

    def run(self, model: Any, own_call: Callable[..., Any], call: Call) -> Any:
        """Emit the planned passes of a call into the graph; return the results of the call."""
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
        """Whether the step has no other effects, such as communication with other ranks."""
        effects = [self.captured.nodes[at].op for at in self.captured.effects]
        return all(
            kernels.changes_variables(op) and not kernels.is_collective(op) for op in effects
        )


class Emission:
    """Emits a program once, into the graph being built.

    inputs : tensors for the step's arguments
    """

    def __init__(self, program: Program, inputs: list[Any]) -> None:
        self.program = program
        self.captured, self.named = program.captured, program.named
        self.buffers = self.named.buffers
        # Per value, its tensor in this graph, as long as the plan holds it.
        self.tensors: dict[int, Any] = dict(zip(self.captured.arguments, inputs, strict=True))
        self.tensors.update(self.captured.captures)
        self.ran: set[str] = set()
        self.previous: list[Any] = []
        self.changed: dict[int, list[Any]] = {}

    def forward(self) -> None:
        """Emit the actions before the loss; all of them if the step contains its loss."""
        for at in self.named.followers[""]:
            self.emit(at, first=True)
        self.carry_out(self.program.actions[: self.program.boundary])

    def backward(self, incoming: list[Any]) -> None:
        """Emit the actions after the loss, from the gradients of the outputs."""
        self.tensors.update(zip(self.captured.placeholders, incoming, strict=True))
        # Wait for all incoming gradients: the plan counts them together, from the loss on.
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
        # A storage that a kernel keeps besides its results (positions of maxima) has no values.
        for value in self.program.values.get(storage, ()):
            self.tensors.pop(value, None)

    def emit(self, at: int, *, first: bool) -> None:
        """Put a node into the graph, after the previous one."""
        node = self.captured.nodes[at]
        inputs = [self.need(value) for value in node.inputs]
        for place in self.fences(node):
            inputs[place] = self.fenced(inputs[place])
        op = put(node, inputs, self.previous)
        if not kernels.is_collective(node.op):
            # Collectives run in the background; only their readers wait for them.
            self.previous = [op]
        over = self.buffers.overwritten(at)
        for value, tensor in zip(node.outputs, op.outputs, strict=True):
            name = self.named.storage.get(value)
            if name is None:
                # Small: held from its first run for all later readers.
                if first:
                    self.tensors[value] = tensor
                continue
            if over is not None and value == node.outputs[0]:
                self.drop(name)
            # One of two results may still be held when the op is recomputed for the other.
            if not any(value in self.tensors for value in self.program.values[name]):
                self.tensors[value] = tensor
        self.forget_changed(node)

    def fences(self, node: Node) -> list[int]:
        """Return the inputs of an op to hide from graph passes that would change the order.

        oneDNN's pass fuses ops along data edges and ignores the control dependencies between them:
        the result is a cycle. Constant folding turns c * (x * y) into (c * x) * y, and c * x waits
        for nothing.
        """
        kind = node.op.type
        if kind in ("BiasAdd", "BiasAddGrad"):
            return [0]
        if kind.startswith("Conv"):
            return [0] if self.source(node.inputs[0]) == "Pad" else []
        family = next((kinds for kinds in _REORDERED if kind in kinds), None)
        # Small values may be computed early: plans do not count them.
        if family is None or self.buffers.small(node.outputs[0]):
            return []
        known = [value in self.buffers.folded for value in node.inputs]
        return [
            place
            for place, value in enumerate(node.inputs)
            if not known[place] and known[1 - place] and self.source(value) in family
        ]

    def source(self, value: int) -> str:
        """Return the type of the op that produces a value; "" for arguments and captures."""
        at = self.buffers.producer.get(value)
        return "" if at is None else str(self.captured.nodes[at].op.type)

    def fenced(self, tensor: Any) -> Any:
        """Return the same buffer as the output of an op that passes do not see through."""
        # EnsureShape, because Grappler removes Identity (decision 17).
        graph = framework_ops.get_default_graph()
        with graph.control_dependencies([op for op in self.previous if op.graph is graph]):
            fence = tf.raw_ops.EnsureShape(input=tensor, shape=tensor.shape)
        self.previous = [fence.op]
        return fence

    def forget_changed(self, node: Node) -> None:
        """Drop the values read from variables that a node changes, so that they are read again."""
        if not kernels.has_effect(node.op):
            return
        for handle in (value for value in node.inputs if value in self.captured.variables):
            self.changed[handle] = self.previous
            if handle in self.named.storage:
                for value in self.program.values[self.named.storage[handle]]:
                    if value != handle:
                        self.tensors.pop(value, None)

    def need(self, value: int) -> Any:
        """Return a value's tensor; views and constants are emitted when first needed."""
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
            # Each output separately: inputs behind the others may be freed, e.g. that of SiLU.
            self.tensors[value] = self.need(node.inputs[node.outputs.index(value)])
            return self.tensors[value]
        known = kernels.constant(tensor) if node.op.type in kernels.SHAPES else None
        if known is not None:
            # A constant, as the tensor with that shape may be freed.
            self.tensors[value] = tf.constant(known, tensor.dtype)
            return self.tensors[value]
        inputs = [self.need(value) for value in node.inputs]
        # A view takes no memory, so it may run at any time; a read only after the last change.
        after = self.changed.get(node.inputs[0], []) if node.op.type == kernels.READS else []
        op = put(node, inputs, after)
        self.tensors.update(zip(node.outputs, op.outputs, strict=True))
        return self.tensors[value]


class TrialError(TraceError):
    """A planned step fails, has results other than the model's own, or exceeds its budget."""


def try_model(plain: Any, planned: Any, sample: Any, program: Program | None) -> None:
    """Run a planned model's step and the plain one, and compare their results.

    If the sample has no values (tf.TensorSpec), or the step has effects other than on its variables
    (other ranks, Python), the planned step is only built. The plain one is skipped if the device
    has too little memory for it.

    Raises TrialError if the planned step cannot be built or run, exceeds the budget, or has other
    results.

    program : the planned ops; None if the model's own call runs, with layers recomputed
    """
    step, device = model_step(planned), main_device()
    try:
        with warnings.catch_warnings():
            # Anything to warn about makes the trial fail below.
            warnings.simplefilter("ignore", PlanWarning)
            step.get_concrete_function(*call_arguments(sample))
    except Exception as error:
        raise TrialError(f"its planned step cannot be built: {first_line(error)}") from error
    refused = planned.__dict__["sn_memory"].refused
    if refused:
        raise TrialError(f"its step is not the planned one: {next(iter(refused))}")
    # As it runs an extra time, the step may change only variables, which are restored.
    if not has_values(sample) or (program is not None and not program.changes_variables_only):
        return
    variables = variables_of(plain) if program is None else program.changed_variables
    args = as_tensors(sample)
    with put_back(variables):
        try:
            got = results_of(lambda: step(*args), variables)
        except tf.errors.OpError as error:
            raise TrialError(f"its planned step does not run: {first_line(error)}") from error
        # A plan by layers was measured against the budget already.
        if program is not None and has_statistics(device):
            with Allocations(device) as asked_for:
                step(*args)
            held, plan = program.base_bytes + asked_for.peak_bytes, program.plan
            if plan.budget_bytes is not None and held > _OVER * plan.budget_bytes:
                raise TrialError(
                    f"its planned step holds {show_bytes(held)} on the sample; the budget is "
                    f"{show_bytes(plan.budget_bytes)}"
                )
    # Above the limit the process may be killed, with no error to catch.
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
        # The plain step against itself: results of kernels that sum in any order vary.
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
    """Return gradients that raise TraceError if an outer tape differentiates them.

    made_of : tensors they depend on; tapes do not see that through the ops of a plan
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
    """Emit the planned passes into the graph; the tape sees one op with one gradient."""
    captured = program.captured
    # TensorFlow registers each custom gradient under a name permanently, which keeps both graphs
    # alive. The backward pass is emitted only once, so the name can be removed then.
    registered: list[str] = []

    @tf.custom_gradient
    def passes(*_: Any) -> Any:
        emission = Emission(program, inputs)
        emission.forward()
        # The captured outputs are the model's results followed by its gradients.
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

    # Passed only so that the tape requests their gradients: the planned ops read the variables.
    read = [tf.convert_to_tensor(variable) for variable in variables]
    results = _as_list(passes(*read))
    registered += {result.op.get_attr("_gradient_op_type").decode() for result in results}
    return results


def _as_list(results: Any) -> list[Any]:
    """Return the results of a custom gradient as a list; it returns a single one bare."""
    return list(results) if isinstance(results, list | tuple) else [results]
