"""plan: make a Keras model, or a training step, that trains within a budget.

A planned model has the same class name, variables and settings; only its `call` changes
(planned_call.py). The model passed in stays as it is; both share layers and variables.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from .. import settings
from ..base.errors import core
from ..base.host import return_freed
from ..base.progress import progress_output, report_progress, sharing
from ..graph.records import Device
from ..plan.api import plan_graph
from ..plan.plan import BudgetError
from ..run.measured_choice import summary
from ..run.reserved import LIMIT
from ..run.unseen import PLANNED
from .eager import Program, try_model
from .errors import TraceError, first_line, warn
from .guards import settings_of, signature_of, steady
from .memory import main_device
from .model import call_arguments, check_model, restore_model, twin_of
from .modules.backend import layer_step
from .planned import RECORD, PlannedStep, PlanOptions, PlanRecord, plain_model
from .planned_call import PlannedCall
from .target import limit_budget
from .trace.trace import Trace, optimizer_bytes, trace

log = logging.getLogger(__name__)

BACKENDS = ("auto", "graph", "layers")


def plan(
    model: Any,
    sample: Any,
    budget: float | str = LIMIT,
    *,
    planner: str = "auto",
    techniques: Sequence[str] = ("keep", "recompute"),
    backend: str = "auto",
    profile: bool = True,
    device: Device | str | None = None,
    optimizer: Any = None,
    state: Any = None,
    time_limit_s: float = 60.0,
    strict: bool = False,
) -> Any:
    """Return a Keras model that trains within a memory budget, with the same gradients.

    Parameters
    ----------
    model
        Built, not necessarily compiled. It stays as it is. A model that is already planned keeps
        its plans for other inputs.
    sample
        An input like those of training, as in `trace`. Or a list of such inputs, each planned for:
        the smallest and the largest, say. An input of another kind (shapes, types, flags, rates)
        gets a plan when it first occurs: the fastest existing plan that keeps the budget, a new
        plan, or layers that are recomputed.
    budget
        The most live bytes: a number, "6GiB", or "60%" of the unplanned peak (of the largest
        sample, if there are several). Variables, gradients and the input count. For a GPU, present
        or named, the memory reserved by TensorFlow's allocator stays within it as well. "limit",
        the default: what this process may still allocate on the model's device.
    planner, techniques
        As in `sn_memory.plan_graph`; the technique `offload` is not available here.
    time_limit_s
        Wall-clock seconds, kept to within a tenth, shared by timing ops and searching; timing gets
        at most half of them. Tracing, the trial, and the steps that `layers` measures come on top.
    backend
        `graph` runs the traced ops one by one as planned. `layers` recomputes chosen layers in the
        backward pass; it takes any model, and measures on a real sample. `auto` is `graph`, or
        `layers` with a warning if tracing or the trial fails.
    profile, device
        As in `trace`.
    optimizer
        A Keras optimizer; its state counts as well.
    state
        Only None; see `sn_memory.torch.plan`.
    strict
        In a call, raise PlanError or BudgetError where a warning would otherwise say that what runs
        is slower than a plan of its ops, exceeds the budget, or is the model without a plan.

    Returns
    -------
    A model of the same class that shares variables and layers with `model`. Its `sn_memory` holds
    the back end, trace, plan and the `kinds` of input seen so far, and writes the report.

    Raises
    ------
    TraceError
        With `graph`, for a model that cannot be traced; the message says where. With any back end,
        for a model that is not built, or whose `call` was replaced on the instance.
    BudgetError
        If no plan keeps the budget; has the smallest peak found and its op.
    PlanError
        Without a budget, if no source says how much memory is free; names the sources read.

    Notes
    -----
    The planned step is built here. With a real sample it also runs once and is compared with the
    plain step; the model is left as it was.

    Compile the returned model with `jit_compile=False`, or leave Keras' default: "auto" is taken as
    False here. Called eagerly, outside of any tf.function, the model runs without its plan and
    warns: eager TensorFlow holds all arguments of the functions it calls.

    `fit` and `train_on_batch` use a separate function for each kind of batch, so that its shape is
    known when it is planned. In a tf.function with unknown sizes (reduce_retracing, an
    input_signature with None), layers are recomputed instead.

    Examples
    --------
    >>> import keras
    >>> import tensorflow as tf
    >>> import sn_memory.tensorflow
    >>> layers = [keras.layers.Dense(256, "gelu") for _ in range(6)]
    >>> model = keras.Sequential([keras.Input((256,)), *layers])
    >>> sample = tf.TensorSpec((1024, 256))
    >>> planned = sn_memory.tensorflow.plan(model, sample, "80%", profile=False)
    >>> planned.compile("sgd", "mse")
    >>> history = planned.fit(tf.ones((1024, 256)), tf.ones((1024, 256)), 1024, verbose=0)
    >>> planned.sn_memory.plan.peak_bytes <= 0.8 * planned.sn_memory.plan.baseline_peak_bytes
    True
    """
    if state is not None:
        raise ValueError(
            "got state, which only sn_memory.torch.plan takes. A variable of TensorFlow keeps its "
            "memory as long as it lives and its shape cannot become empty, and a tape returns all "
            "gradients together: neither parameters nor optimizer state can leave the device "
            "between their uses. Leave state out, or train the model with the backend torch."
        )
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"got a {type(model).__name__}, expected a Keras model. For a step function there is "
            "sn_memory.tensorflow.plan_step."
        )
    if backend not in BACKENDS:
        raise ValueError(f"got backend {backend!r}, expected one of {', '.join(BACKENDS)}.")
    options = PlanOptions(
        plan_graph, planner, tuple(techniques), device, strict, profile, optimizer, time_limit_s
    )
    settings.check_profile(profile=profile, backend=backend, measuring="layers")
    core()  # without the extension there is no plan: raised before anything is traced

    with progress_output(settings.progress):
        if isinstance(sample, list):
            return _for_several(model, sample, budget, options, backend)
        return _ModelPlanner(model, sample, budget, options).twin(backend)


def _for_several(
    model: Any, samples: list[Any], budget: float | str, options: PlanOptions, backend: str
) -> Any:
    """Plan for the largest sample, whose step a percentage refers to, then for the others."""
    if not samples:
        raise ValueError("got an empty list of samples, expected at least one.")
    largest, *others = sorted(samples, key=_elements, reverse=True)
    model = _ModelPlanner(model, largest, budget, options).twin(backend)
    first: PlanRecord = model.__dict__[RECORD]
    if first.traced is None:
        # Smaller inputs use the same choice of layers.
        return model
    for sample in others:
        model = _ModelPlanner(model, sample, first.budget_bytes, options).twin(backend)
    record: PlanRecord = model.__dict__[RECORD]
    # The model reports the plan of its largest sample.
    record.backend, record.traced = first.backend, first.traced
    record.latest_plan, record.options = first.latest_plan, first.options
    record.sample = first.sample
    return model


class _ModelPlanner:
    """Plans a model for one sample, within a budget."""

    def __init__(self, model: Any, sample: Any, budget: float | str, options: PlanOptions) -> None:
        self.before: PlanRecord | None = model.__dict__.get(RECORD)
        self.plain = plain_model(model)
        self.name = type(self.plain).__name__
        self.sample, self.budget, self.options = sample, budget, options
        check_model(self.plain, sample)
        # First, because malloc returns only blocks that it allocates from then on.
        return_freed()
        if budget == LIMIT:
            self.budget = limit_budget(
                self.plain, sample, optimizer=options.optimizer, device=options.device
            )

    def twin(self, backend: str) -> Any:
        """Return the model, planned."""
        with sharing(self.options.time_limit_s), restore_model(self.plain):
            if backend == "graph" or settings.deterministic:
                twin = self.by_graph(all_counted=backend == "auto")
            elif backend == "layers":
                twin = self.by_layers()
            else:
                twin = self.by_either()
        record: PlanRecord = twin.__dict__[RECORD]
        # Not earlier: without options, an input other than the planned one fails in the trial
        # instead of being planned for.
        record.options, record.sample = self.options, call_arguments(self.sample)
        log.info("%s planned by %s: %s", self.name, record.backend, summary(record.plan))
        return twin

    def by_graph(self, *, all_counted: bool) -> Any:
        """Return the model planned by its ops; raise if some are uncounted and `all_counted`."""
        then = settings_of(self.plain)
        with _as_trace_error():
            report_progress("trace", 0, 1)
            traced = trace(
                self.plain,
                self.sample,
                profile=self.options.profile,
                device=self.options.device,
                optimizer=self.options.optimizer,
            )
            read = steady(then, settings_of(self.plain))
        if traced.uncounted and all_counted:
            raise TraceError(f"{traced.uncounted}, and layers are measured")
        _warn_of_uncounted(traced)
        # Outside of `_as_trace_error`: a budget that cannot be kept is not a tracing failure.
        plan = self.options.plan(traced.graph, self.budget)
        with _as_trace_error():
            program = Program(traced, plan, read)
            record, key = PlanRecord("graph", traced, plan), traced.structure["key"]
            record.take_over(self.before)
            record.keep(signature_of(key, traced.structure["variables"]), key, program, PLANNED)
            report_progress("trial", 0, 1)
            # Near the process's memory limit, malloc has to return what the step frees.
            if main_device() == "CPU:0":
                return_freed(plan.peak_bytes)
            return self.tried(record, program)

    def by_layers(self) -> Any:
        optimizer = self.options.optimizer
        resident = 0 if optimizer is None else optimizer_bytes(self.plain, optimizer)
        step = layer_step(self.plain, self.sample, self.budget, resident_bytes=resident)
        record = PlanRecord("layers", None, step.plan)
        record.take_over(self.before)
        record.layers = step
        return self.tried(record, None)

    def tried(self, record: PlanRecord, program: Program | None) -> Any:
        """Return a model with this record, after a trial of its step."""
        twin = twin_of(self.plain, PlannedCall)
        twin.__dict__[RECORD] = record
        try_model(self.plain, twin, self.sample, program)
        return twin

    def by_either(self) -> Any:
        """Return the model planned by its ops; if that fails, by layers, with a warning why."""
        try:
            return self.by_graph(all_counted=True)
        except TraceError as error:
            refusal = error
        try:
            twin = self.by_layers()
        # The error's message is about layers; the note says why layers were tried.
        except BudgetError as error:
            error.add_note(f"It was planned by layers, because as a list of ops: {refusal}")
            raise
        except Exception as error:
            raise TraceError(
                f"{self.name} can be planned neither as a list of ops ({refusal}) nor by layers "
                f"({first_line(error)}). Pass a sample of the shapes and types it is trained on, "
                "plan its training step with sn_memory.tensorflow.plan_step, or train it without a "
                "plan."
            ) from error
        warn(
            f"{self.name} is planned by layers, which saves less than a plan of its ops, because "
            f"no plan of its ops could be made: {refusal}"
        )
        return twin


def plan_step(
    step: Any,
    sample: Any,
    budget: float | str,
    *,
    planner: str = "auto",
    techniques: Sequence[str] = ("keep", "recompute"),
    profile: bool = True,
    device: Device | str | None = None,
    time_limit_s: float = 60.0,
) -> PlannedStep:
    """Return a training step that computes the same within a memory budget.

    Parameters
    ----------
    step
        A function, with or without tf.function, that contains the gradient tape, and the update if
        that is to be planned too.
    sample
        Its arguments: a tuple of tensors, arrays or tf.TensorSpec, or a single one.
    budget, planner, techniques, profile, device, time_limit_s
        As in `plan`. The state of optimizers is among the step's variables, so it counts.

    Returns
    -------
    A callable for arguments like the sample's; its `sn_memory` has the trace and the plan, and
    writes the report. It raises for other shapes or types, and for other values of arguments that
    are not tensors (numbers, flags, models, variables): those are constants of the plan.

    Raises
    ------
    TraceError
        For a step that cannot be traced.
    BudgetError
        If no plan keeps the budget.

    Examples
    --------
    >>> import tensorflow as tf
    >>> import sn_memory.tensorflow
    >>> weights = [tf.Variable(tf.ones((64, 64)) / 64) for _ in range(6)]
    >>> @tf.function
    ... def step(x):
    ...     with tf.GradientTape() as tape:
    ...         h = x
    ...         for weight in weights:
    ...             h = tf.tanh(h @ weight)
    ...         loss = tf.reduce_sum(h)
    ...     for weight, gradient in zip(weights, tape.gradient(loss, weights)):
    ...         weight.assign_sub(1e-4 * gradient)
    ...     return loss
    >>> planned = sn_memory.tensorflow.plan_step(step, tf.ones((512, 64)), "85%", profile=False)
    >>> bool(planned(tf.ones((512, 64))) > 0)
    True
    """
    options = PlanOptions(
        plan_graph, planner, tuple(techniques), device, profile=profile, time_limit_s=time_limit_s
    )
    settings.check_profile(profile=profile, backend="graph", measuring="layers")
    core()  # without the extension there is no plan: raised before anything is traced
    if getattr(step, "_jit_compile", None):
        raise TraceError(
            "the step is compiled by XLA (jit_compile=True), which chooses its own schedule. Plan "
            "it without jit_compile."
        )
    if isinstance(step, PlannedStep):
        step = step.plain
    with progress_output(settings.progress), sharing(time_limit_s):
        report_progress("trace", 0, 1)
        traced = trace(step, sample, profile=profile, device=device)
        plan = options.plan(traced.graph, budget)
    _warn_of_uncounted(traced)
    planned = PlannedStep(step, traced, plan)
    with _as_trace_error("the planned step cannot be built"):
        planned.put_together()
    return planned


@contextmanager
def _as_trace_error(what: str = "the step could not be made a list of ops") -> Iterator[None]:
    """Raise any exception during tracing or building as a TraceError."""
    try:
        yield
    except TraceError:
        raise
    except Exception as error:
        raise TraceError(f"{what}: {first_line(error)}") from error


def _warn_of_uncounted(traced: Trace) -> None:
    if traced.uncounted:
        warn(f"The peak may be higher: {traced.uncounted}.")


def _elements(sample: Any) -> int:
    leaves = tf.nest.flatten(call_arguments(sample))
    return sum(int(leaf.shape.num_elements() or 0) for leaf in leaves if hasattr(leaf, "shape"))
