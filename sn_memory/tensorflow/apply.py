"""plan: a Keras model that keeps a budget. It is the model: same class, variables and settings.

What changes is its `call`. In training, inside a tf.function as `fit` makes it, its forward and
backward pass are the planned ones (program.py); else it is the model's own. The model passed in
stays as it is; both share layers and variables.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common.stateless_scope import in_stateless_scope  # has no public name
from tensorflow.python.eager import record
from tensorflow.python.ops import control_flow_util

from ..check import check_plan
from ..errors import PlanError, PlanWarning
from ..graph import Device
from ..measured_choice import summary
from ..planner import plan_graph
from .errors import TraceError
from .layers import LayerStep
from .model import check_model, twin_of
from .program import Emission, Program
from .trace import Trace, main_device, optimizer_bytes, trace

log = logging.getLogger(__name__)

BACKENDS = ("auto", "graph", "layers")
RECORD = "sn_memory"


@dataclass
class Planned:
    """What a planned model or step carries as `sn_memory`.

    Parameters
    ----------
    backend
        What carries the plan out: `graph` or `layers`.
    traced, plan
        What was planned last, and how; with `layers`, there is no trace.
    programs
        The planned steps, per kind of input.
    layers
        What runs layers again, for any input that no program is for.
    refused
        Kinds of input that were run plainly; each is warned about once.
    """

    backend: str
    traced: Trace | None
    plan: Any
    programs: dict[Hashable, Program] = field(default_factory=dict)
    layers: LayerStep | None = None
    refused: set[Hashable] = field(default_factory=set)

    @property
    def trace(self) -> Trace:
        """The trace planned last. Raises PlanError with `layers`, which needs none."""
        if self.traced is None:
            raise PlanError(
                "the model was planned by layers, because it cannot be traced, so there is no "
                "graph of it. Its plan lists the layers."
            )
        return self.traced

    def report(self, path: str | Path) -> None:
        """Write one HTML page with pictures and tables; needs matplotlib."""
        from ..report import report

        report(self.trace.graph, self.plan).write_html(path)


def plan(
    model: Any,
    sample: Any,
    budget: int | str,
    *,
    planner: str = "auto",
    actions: Sequence[str] = ("keep", "recompute"),
    backend: str = "auto",
    profile: bool = True,
    device: Device | None = None,
    optimizer: Any = None,
    time_limit_s: float = 60.0,
) -> Any:
    """Return a Keras model as one that trains within a budget of bytes, with the same gradients.

    Parameters
    ----------
    model
        Built, not necessarily compiled. It stays as it is. One that is planned already keeps its
        plans for other inputs.
    sample
        An input like those of training, as in `trace`. Other shapes or types run without the plan;
        a warning says so once for each.
    budget
        The most live bytes: a number, "6GiB", or "60%" of the unplanned peak. Variables, gradients
        and the input count.
    planner, actions, time_limit_s
        As in `sn_memory.plan_graph`; `offload` is not among the actions here.
    backend
        `graph` runs the traced ops one by one as planned. `layers` runs chosen layers again in the
        backward pass; it takes any model and a real sample, on which it measures. `auto` is
        `graph`, and `layers` with a warning for a model that cannot be traced.
    profile, device
        As in `trace`.
    optimizer
        A Keras optimizer; its state counts as well.

    Returns
    -------
    A model of the same class that shares variables and layers with `model`. Its `sn_memory` tells
    back end, trace and plan and writes the report.

    Raises
    ------
    TraceError
        For a model that cannot be traced, with the back end `graph`; the message says where. For
        one that no back end takes: not built, or with a `call` of its own on the instance.
    BudgetError
        If no plan keeps the budget; carries the smallest peak found and its op.

    Notes
    -----
    Compile the returned model with `jit_compile=False`, or leave Keras' default: "auto" is taken as
    False here. Called eagerly, outside of any tf.function, the model runs plainly and warns: eager
    TensorFlow holds all arguments of what it calls.

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
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"got a {type(model).__name__}, expected a Keras model. For a step function there is "
            "sn_memory.tensorflow.plan_step."
        )
    if backend not in BACKENDS:
        raise ValueError(f"got backend {backend!r}, expected one of {', '.join(BACKENDS)}.")
    check_actions(actions)
    before: Planned | None = model.__dict__.get(RECORD)
    plain = plain_model(model)
    check_model(plain)

    def by_graph() -> Planned:
        traced = trace(plain, sample, profile=profile, device=device, optimizer=optimizer)
        made = plan_graph(
            traced.graph, budget, planner=planner, actions=actions, time_limit_s=time_limit_s
        )
        check_plan(traced.graph, made)
        program = Program(traced.captured, traced.named, made)
        program.has_gradient = tuple(it is not None for it in traced.structure["gradients"])
        program.results = traced.structure["results"]
        programs = {**(before.programs if before else {}), signature(traced): program}
        return Planned("graph", traced, made, programs, before.layers if before else None)

    def by_layers() -> Planned:
        held = 0 if optimizer is None else optimizer_bytes(plain, optimizer)
        step = LayerStep(plain, sample, budget, device=main_device(), resident_bytes=held)
        return Planned("layers", None, step.plan, dict(before.programs) if before else {}, step)

    refusal = None
    try:
        record = by_layers() if backend == "layers" else by_graph()
    except TraceError as error:
        if backend != "auto":
            raise
        refusal = error
    if refusal is not None:
        record = by_layers()
        warnings.warn(
            f"{type(plain).__name__} is planned by layers, which saves less than a plan of its "
            f"ops, because it cannot be traced: {refusal}",
            PlanWarning,
            stacklevel=2,
        )
    log.info("%s planned by %s: %s", type(plain).__name__, record.backend, summary(record.plan))
    twin = twin_of(plain, _PlannedCall)
    twin.__dict__[RECORD] = record
    return twin


def plain_model(model: Any) -> Any:
    """Return a planned model as it was before; any other as it is."""
    if RECORD not in model.__dict__:
        return model
    plain: Any = object.__new__(type(model).__mro__[2])
    plain.__dict__.update({key: it for key, it in model.__dict__.items() if key != RECORD})
    return plain


def signature(traced: Trace) -> Hashable:
    """What a plan of a model depends on: the inputs of its `call`, and what trains."""
    given = [traced.captured.tensors[value] for value in traced.captured.arguments]
    return _key(given, traced.structure["variables"])


def _key(given: Sequence[Any], variables: Sequence[Any]) -> Hashable:
    shapes = tuple((tuple(it.shape.as_list()), it.dtype.name) for it in given)
    return shapes, tuple(id(it) for it in variables)


class _PlannedCall:
    """What a planned Keras model does otherwise than its class."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        training = kwargs.get("training")
        if training is None:
            training = getattr(self._get_call_context(), "training", None)  # type: ignore[attr-defined]
        program, given = None, []
        if training is True:
            given = [it for it in tf.nest.flatten((args, kwargs)) if isinstance(it, tf.Tensor)]
            program = self._program(given)
        plainly = super().call  # type: ignore[misc]
        if program is None:
            return plainly(*args, **kwargs)
        if isinstance(program, LayerStep):
            return program.run(self, plainly, args, kwargs)
        outs = _differentiable(program, given, self.trainable_variables)  # type: ignore[attr-defined]
        return tf.nest.pack_sequence_as(program.results, outs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        # Keras' "auto" would choose XLA, which orders ops by itself.
        if kwargs.get("jit_compile", "auto") == "auto":
            kwargs["jit_compile"] = False
        super().compile(*args, **kwargs)  # type: ignore[misc]

    def _program(self, given: Sequence[Any]) -> Program | LayerStep | None:
        planned: Planned = self.__dict__[RECORD]
        symbolic = not tf.executing_eagerly() and not any(
            None in (it.shape.as_list() if it.shape.rank is not None else [None]) for it in given
        )
        key = _key(given, self.trainable_variables) if symbolic else None  # type: ignore[attr-defined]
        program: Program | LayerStep | None = planned.programs.get(key) if key else None
        if program is None:
            # Running layers again is right for any input; the budget was kept on the sample.
            program = planned.layers
        why = self._why_not(given, program)
        if why is None:
            return program
        if why not in planned.refused:
            planned.refused.add(why)
            warnings.warn(
                f"a training step of {type(self).__name__} runs without its plan: {why}.",
                PlanWarning,
                stacklevel=2,
            )
        return None

    @staticmethod
    def _why_not(given: Sequence[Any], program: Program | LayerStep | None) -> str | None:
        if tf.executing_eagerly():
            return "it was called eagerly; put the training step into a tf.function"
        if program is None:
            shapes = ", ".join(f"{it.dtype.name}{it.shape}" for it in given)
            return (
                f"its input is {shapes}, or its trainable variables are others, than it was "
                "planned with. Drop the last partial batch (drop_remainder=True), or plan it for "
                "these too: model = sn_memory.tensorflow.plan(model, sample, budget)"
            )
        if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
            return "it is compiled by XLA, which schedules by itself; pass jit_compile=False"
        if isinstance(program, LayerStep):
            stateless = "it is called in Keras' stateless scope, which is gone in the backward pass"
            return stateless if in_stateless_scope() else None
        if record.should_record_backprop([it for it in given if it.dtype.is_floating]):
            return (
                "a gradient of its input is wanted, as where it is part of another model. Plan the "
                "whole model, or the step: sn_memory.tensorflow.plan_step"
            )
        return None


def _differentiable(program: Program, given: list[Any], variables: Sequence[Any]) -> list[Any]:
    """Put the planned passes into the graph; the tape sees one op with one gradient."""
    captured = program.captured
    wanted = [it.value for it in variables]

    @tf.custom_gradient
    def passes(*_: Any) -> Any:
        emission = Emission(program, given)
        emission.forward()
        count = len(captured.outputs) - len(captured.gradients)
        outs = [emission.need(value) for value in captured.outputs[:count]]
        places = [captured.outputs.index(value) for value in captured.targets]

        def backward(*incoming: Any) -> Any:
            emission.backward([incoming[place] for place in places])
            found = iter([emission.need(value) for value in captured.outputs[count:]])
            return [next(found) if there else None for there in program.has_gradient]

        return outs, backward

    results = passes(*[tf.convert_to_tensor(it) for it in wanted])
    return list(results) if isinstance(results, list | tuple) else [results]


def check_actions(actions: Sequence[str]) -> None:
    """Raise ValueError for actions that are not carried out here."""
    if "offload" in actions:
        raise ValueError(
            'got the action "offload", expected "keep" and "recompute": under TensorFlow '
            "nothing is moved to the host."
        )
