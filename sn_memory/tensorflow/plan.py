"""plan: a Keras model that keeps a budget. It is the model: same class, variables and settings.

What changes is its `call` (planned.py). The model passed in stays as it is; both share layers and
variables.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from ..base.clock import sharing
from ..base.errors import PlanWarning
from ..base.host import return_freed
from ..base.native import core
from ..base.progress import Wanted, say, speaking
from ..check.replay import check_plan
from ..graph.records import Device
from ..plan.api import plan_graph
from ..plan.plan import BudgetError
from ..run.at_once import PLANNED
from ..run.measured_choice import summary
from ..run.process import LIMIT
from .card import bfc_settings, plan_on_card
from .eager.trial import left_alone, try_model
from .errors import TraceError, first_line
from .limit import limit_budget
from .model.settings import settings_of, steady
from .model.variables import variables_of
from .modules.backend import LayerStep
from .planned import (
    RECORD,
    Planned,
    check_deterministic,
    check_techniques,
    kind_of,
    plain_model,
    planned_kind,
)
from .planned_call import PlannedCall
from .planning import Planning, put_together
from .trace.model import call_arguments, check_model, twin_of
from .trace.trace import main_device, optimizer_bytes, trace, uncounted

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
    time_limit_s: float = 60.0,
    deterministic: bool = False,
    progress: Wanted = None,
    strict: bool = False,
    state: Any = None,
) -> Any:
    """Return a Keras model as one that trains within a budget of bytes, with the same gradients.

    Parameters
    ----------
    model
        Built, not necessarily compiled. It stays as it is. One that is planned already keeps its
        plans for other inputs.
    sample
        An input like those of training, as in `trace`. Or a list of such inputs, each planned for:
        the smallest and the largest, say. An input of another kind (shapes, types, flags, rates)
        gets a plan when it comes: of the plans there are the fastest that keeps the budget, or a
        new one, or layers that run again.
    budget
        The most live bytes: a number, "6GiB", or "60%" of the unplanned peak, of several samples
        that of the largest. Variables, gradients and the input count. For a GPU, present or named,
        what TensorFlow's allocator reserves keeps it as well. "limit", as where it is left
        out: what is free where the model is, for all that one process may have of it.
    planner, techniques
        As in `sn_memory.plan_graph`; `offload` is not among the techniques here.
    time_limit_s
        Seconds on the wall, kept to a tenth, that timing ops and searching share; timing has half
        of them at most. Tracing and the trial come on top; so do steps that `layers` measures.
    backend
        `graph` runs the traced ops one by one as planned. `layers` runs chosen layers again in the
        backward pass; it takes any model and a real sample, on which it measures. `auto` is
        `graph`, and `layers` with a warning where tracing or the trial fails.
    profile, device
        As in `trace`.
    optimizer
        A Keras optimizer; its state counts as well.
    deterministic
        Count work in place of seconds, as `plan_graph` does: the same plan on any machine. With
        `profile=False` and not with `layers`, whose seconds are measured; `auto` does not fall back
        to them.
    progress
        None writes to standard error how far planning is, where that is a terminal: a bar if tqdm
        is installed, else lines. True writes in any case, False never. A function takes a
        `sn_memory.Progress` each time.
    strict
        Raise PlanError or BudgetError, when a call comes, where a warning would say that what runs
        is slower than a plan of its ops, above the budget, or the model's own.
    state
        Refused, but for None: see `sn_memory.torch.plan`.

    Returns
    -------
    A model of the same class that shares variables and layers with `model`. Its `sn_memory` tells
    back end, trace and plan, the `kinds` of input by now, and writes the report.

    Raises
    ------
    TraceError
        For a model that cannot be traced, with the back end `graph`; the message says where. For
        one that no back end takes: not built, or with a `call` of its own on the instance.
    BudgetError
        If no plan keeps the budget; carries the smallest peak found and its op.
    PlanError
        Without a budget, where nothing says what is free; names what was read.

    Notes
    -----
    The planned step is put together here and, with a real sample, run once beside the plain one
    (trial.py); the model is left as it was.

    Compile the returned model with `jit_compile=False`, or leave Keras' default: "auto" is taken as
    False here. Called eagerly, outside of any tf.function, the model runs plainly and warns: eager
    TensorFlow holds all arguments of what it calls.

    `fit` and `train_on_batch` put each kind of batch into a function of its own, so that its shape
    is known when it is planned. In a tf.function that leaves sizes open (reduce_retracing, an
    input_signature with None), layers run again.

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
            "memory as long as it lives and its shape cannot become empty, and a tape hands all "
            "gradients over at once: neither parameters nor optimizer state can leave the device "
            "between their uses. Leave state out, or train the model with the backend torch."
        )
    given = {**locals()}
    settings = {it: given[it] for it in given if it not in ("model", "sample", "budget", "state")}
    if isinstance(sample, list):
        return _for_several(model, sample, budget, settings)
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"got a {type(model).__name__}, expected a Keras model. For a step function there is "
            "sn_memory.tensorflow.plan_step."
        )
    if backend not in BACKENDS:
        raise ValueError(f"got backend {backend!r}, expected one of {', '.join(BACKENDS)}.")
    check_techniques(techniques)
    check_deterministic(deterministic, profile=profile, backend=backend)
    before: Planned | None = model.__dict__.get(RECORD)
    plain = plain_model(model)
    core()  # without it there is no plan: said before anything is traced
    check_model(plain)
    return_freed()
    if budget == LIMIT:
        budget = limit_budget(plain, sample, optimizer=optimizer, device=device)

    def by_graph() -> Any:
        then = settings_of(plain)
        with _as_trace_error():
            say("trace", 0, 1)
            traced = trace(plain, sample, profile=profile, device=device, optimizer=optimizer)
            held = steady(then, settings_of(plain))
        unknown = uncounted(traced.named)
        if unknown and backend == "auto":
            raise TraceError(f"{unknown}, and layers are measured")
        if unknown:
            warnings.warn(f"The peak may be higher: {unknown}.", PlanWarning, stacklevel=3)
        made = plan_on_card(
            plan_graph,
            traced.graph,
            budget,
            device=device,
            planner=planner,
            techniques=techniques,
            time_limit_s=time_limit_s,
            deterministic=deterministic,
        )
        check_plan(traced.graph, made)
        with _as_trace_error():
            program = put_together(traced, made, held)
            record = Planned("graph", traced, made)
            record.take_over(before)
            kind = kind_of(traced.structure["key"], traced.structure["variables"])
            record.keep(
                kind,
                program,
                planned_kind(traced.structure["key"], PLANNED, made, record.budget_bytes),
            )
            twin = _twin(plain, record)
            say("trial", 0, 1)
            if main_device() == "CPU:0":
                return_freed(made.peak_bytes)
            try_model(
                plain,
                twin,
                sample,
                device=main_device(),
                variables=program.changed_variables,
                captured=traced.captured,
                base_bytes=traced.graph.base_bytes,
                plan=made,
            )
        return twin

    def by_layers() -> Any:
        held = 0 if optimizer is None else optimizer_bytes(plain, optimizer)
        step = LayerStep(plain, sample, budget, device=main_device(), resident_bytes=held)
        record = Planned("layers", None, step.plan)
        record.take_over(before)
        record.layers = step
        twin = _twin(plain, record)
        try_model(
            plain,
            twin,
            sample,
            device=main_device(),
            variables=variables_of(plain),
            captured=None,
            base_bytes=step.base_bytes,
            plan=step.plan,
        )
        return twin

    with left_alone(plain), speaking(progress), sharing(time_limit_s):
        if backend == "graph" or deterministic:
            twin = by_graph()
        elif backend == "layers":
            twin = by_layers()
        else:
            twin = _first_that_works(type(plain).__name__, by_graph, by_layers)
    record = twin.__dict__[RECORD]
    # Not before: what comes otherwise than planned is a failure of the trial.
    record.planning = Planning(
        planner,
        tuple(techniques),
        strict,
        deterministic,
        call_arguments(sample),
        partial(plan_on_card, plan_graph, device=device),
        bfc_settings(device),
    )
    log.info("%s planned by %s: %s", type(plain).__name__, record.backend, summary(record.plan))
    return twin


def _for_several(
    model: Any, samples: list[Any], budget: float | str, settings: dict[str, Any]
) -> Any:
    """Plan for the largest sample first, whose own step percent are of, and then for the others."""
    if not samples:
        raise ValueError("got an empty list of samples, expected at least one.")
    largest, *others = sorted(samples, key=_elements, reverse=True)
    planned = plan(model, largest, budget, **settings)
    first: Planned = planned.__dict__[RECORD]
    if first.traced is None:
        # Smaller inputs take the same layers.
        return planned
    for sample in others:
        planned = plan(planned, sample, first.budget_bytes, **settings)
    record: Planned = planned.__dict__[RECORD]
    record.backend, record.traced, record.made = first.backend, first.traced, first.made
    record.planning = first.planning
    return planned


def _elements(sample: Any) -> int:
    leaves = tf.nest.flatten(call_arguments(sample))
    return sum(int(it.shape.num_elements() or 0) for it in leaves if hasattr(it, "shape"))


def _first_that_works(name: str, by_graph: Callable[[], Any], by_layers: Callable[[], Any]) -> Any:
    """Return the model planned by its ops, or else by layers, and say why."""
    try:
        return by_graph()
    except TraceError as error:
        refusal = error
    try:
        twin = by_layers()
    except BudgetError as error:
        error.add_note(f"It was planned by layers, because as a list of ops: {refusal}")
        raise
    except Exception as error:
        raise TraceError(
            f"{name} can be planned neither as a list of ops ({refusal}) nor by layers "
            f"({first_line(error)}). Pass a sample of the shapes and types it is trained on, plan "
            "its training step with sn_memory.tensorflow.plan_step, or train it without a plan."
        ) from error
    warnings.warn(
        f"{name} is planned by layers, which saves less than a plan of its ops, because that one "
        f"did not come about: {refusal}",
        PlanWarning,
        stacklevel=3,
    )
    return twin


@contextmanager
def _as_trace_error() -> Iterator[None]:
    """Whatever fails while a step is traced or put together is a TraceError."""
    try:
        yield
    except TraceError:
        raise
    except Exception as error:
        raise TraceError(
            f"the step could not be made a list of ops: {first_line(error)}"
        ) from error


def _twin(plain: Any, record: Planned) -> Any:
    twin = twin_of(plain, PlannedCall)
    twin.__dict__[RECORD] = record
    return twin
