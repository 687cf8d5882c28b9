"""What a planned Keras model carries, and does otherwise than its class.

In training, inside a tf.function as `fit` makes it, its forward and backward pass are the planned
ones (program.py); else it is the model's own.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf
from keras.src.backend.common.stateless_scope import in_stateless_scope  # has no public name
from tensorflow.python.eager import record
from tensorflow.python.ops import control_flow_util

from ..base.errors import PlanWarning
from ..run.planned import PlannedRecord
from .eager.program import Emission, Program
from .errors import TraceError
from .model.arguments import call_of, describe, refilled
from .model.settings import changed, settings_of
from .modules.backend import LayerStep
from .trace.trace import Trace

RECORD = "sn_memory"


@dataclass(repr=False)
class Planned(PlannedRecord[Trace]):
    """What a planned model or step carries as `sn_memory`.

    Parameters
    ----------
    backend
        What carries the plan out: `graph` or `layers`.
    traced, made
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
    made: Any
    programs: dict[Hashable, Program] = field(default_factory=dict)
    layers: LayerStep | None = None
    refused: set[Hashable] = field(default_factory=set)

    @property
    def plan(self) -> Any:
        return self.made

    @property
    def planned_inputs(self) -> list[str]:
        if self.layers is not None:
            return ["any"]
        # The only one of a step function has no key: it takes arguments like its sample's alone.
        keys = [key[0] if isinstance(key, tuple) else None for key in self.programs]
        return ["as its sample" if it is None else describe(it) for it in keys]

    @property
    def latest_trace(self) -> Trace | None:
        return self.traced


def signature(traced: Trace) -> Hashable:
    """What a plan of a model depends on: the arguments of its `call`, and what trains."""
    return _key(traced.structure["key"], traced.structure["variables"])


def _key(call: Hashable, variables: Sequence[Any]) -> Hashable:
    return call, tuple(id(it) for it in variables)


class PlannedCall:
    """What a planned Keras model does otherwise than its class."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        training = kwargs.get("training")
        if training is None:
            training = getattr(self._get_call_context(), "training", None)  # type: ignore[attr-defined]
        program: Program | LayerStep | None = None
        given: list[Any] = []
        if training is True:
            program, given = self._program(args, kwargs)
        plainly = super().call  # type: ignore[misc]
        if program is None:
            return plainly(*args, **kwargs)
        if isinstance(program, LayerStep):
            return program.run(self, plainly, args, kwargs)
        outs = _differentiable(program, given, self.trainable_variables)  # type: ignore[attr-defined]
        return refilled(program.results, outs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        # Keras' "auto" would choose XLA, which orders ops by itself.
        if kwargs.get("jit_compile", "auto") == "auto":
            kwargs["jit_compile"] = False
        super().compile(*args, **kwargs)  # type: ignore[misc]

    def _program(self, args: Any, kwargs: Any) -> tuple[Program | LayerStep | None, list[Any]]:
        """Return what runs a call, if anything planned does, and its tensors."""
        planned: Planned = self.__dict__[RECORD]
        program: Program | LayerStep | None = None
        given: list[Any] = []
        what = ""
        try:
            key, given = call_of(self._call_signature, args, kwargs)  # type: ignore[attr-defined]
            what = f"its input is {describe(key)}, or its trainable variables are others, than"
            if not tf.executing_eagerly():
                program = planned.programs.get(_key(key, self.trainable_variables))  # type: ignore[attr-defined]
        except TraceError as error:
            what = f"{error} That is not what"
        if program is None:
            # Running layers again is right for any input; the budget was kept on the sample.
            program = planned.layers
        why = self._why_not(given, program, what)
        if why is None and isinstance(program, Program):
            other = changed(program.settings, settings_of(self))
            if other is not None:
                why = f"{other} when it was planned; plan it again"
        if why is None:
            return program, given
        if why not in planned.refused:
            planned.refused.add(why)
            warnings.warn(
                f"a training step of {type(self).__name__} runs without its plan: {why}.",
                PlanWarning,
                stacklevel=2,
            )
        return None, given

    @staticmethod
    def _why_not(
        given: Sequence[Any], program: Program | LayerStep | None, what: str
    ) -> str | None:
        if tf.executing_eagerly():
            return "it was called eagerly; put the training step into a tf.function"
        if program is None:
            return (
                f"{what} it was planned with. Drop the last partial batch (drop_remainder=True), "
                "or plan it for these too: model = sn_memory.tensorflow.plan(model, sample, budget)"
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


def plain_model(model: Any) -> Any:
    """Return a planned model as it was before; any other as it is."""
    if RECORD not in model.__dict__:
        return model
    plain: Any = object.__new__(type(model).__mro__[2])
    plain.__dict__.update({key: it for key, it in model.__dict__.items() if key != RECORD})
    return plain


def check_techniques(techniques: Sequence[str]) -> None:
    """Raise ValueError for techniques that are not carried out here."""
    if "offload" in techniques:
        raise ValueError(
            'got the technique "offload", expected "keep" and "recompute": under TensorFlow '
            "nothing is moved to the host."
        )


def check_deterministic(deterministic: bool, *, profile: bool, backend: str) -> None:
    """Raise ValueError for what measures seconds, where the plan is to be the same anywhere."""
    if deterministic and (profile or backend == "layers"):
        got = "profile=True" if profile else "backend='layers'"
        raise ValueError(
            f"got deterministic=True with {got}, which measures seconds: they differ from run to "
            "run. Pass profile=False, a device whose speeds are to count, and another back end."
        )


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
