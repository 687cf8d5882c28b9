"""What a planned Keras model does otherwise than its class.

In training, inside a tf.function as `fit` makes it, its forward and backward pass are the planned
ones (program.py), for a new input too (new_inputs.py). Called eagerly, where TensorFlow holds all
arguments, and under XLA, which orders ops by itself, it is the model's own.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from keras.src.backend.common.stateless_scope import in_stateless_scope  # has no public name
from tensorflow.python.eager import record as tapes  # whether one is around
from tensorflow.python.framework import ops as framework_ops
from tensorflow.python.ops import control_flow_util

from ..base.errors import PlanError, PlanWarning
from .batches import ByKind
from .eager.program import Emission, Program
from .errors import TraceError, as_it_is
from .model.arguments import Call, call_of, refilled
from .model.variables import uncast
from .modules.backend import LayerStep
from .new_inputs import step_for
from .planned import RECORD, Planned
from .trace.reached import left_out


class PlannedCall:
    """What a planned Keras model does otherwise than its class."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        training = kwargs.get("training")
        if training is None:
            training = getattr(self._get_call_context(), "training", None)  # type: ignore[attr-defined]
        step: Program | LayerStep | None = None
        call = Call(args, kwargs)
        if training is True:
            self._read(call)
            step = self._step(call)
        plainly = super().call  # type: ignore[misc]
        if step is None:
            return plainly(*args, **kwargs)
        if isinstance(step, LayerStep):
            return step.run(self, plainly, args, kwargs)
        outs = _differentiable(step, call.tensors, self.trainable_variables)  # type: ignore[attr-defined]
        return refilled(step.results, outs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        # Keras' "auto" would choose XLA, which orders ops by itself.
        if kwargs.get("jit_compile", "auto") == "auto":
            kwargs["jit_compile"] = False
        super().compile(*args, **kwargs)  # type: ignore[misc]

    def make_train_function(self, force: bool = False) -> Any:
        """Make what `fit` calls: a function for each kind of batch; see batches.py."""
        if self.train_function is None or force:  # type: ignore[has-type]

            def made() -> Any:
                super(PlannedCall, self).make_train_function(force=True)  # type: ignore[misc]
                return self.train_function  # type: ignore[has-type]

            self.train_function: Any = ByKind(self, made)
        return self.train_function

    def _read(self, call: Call) -> None:
        """Note the key of a call and its tensors, or why it has none."""
        try:
            signature = self._call_signature  # type: ignore[attr-defined]
            call.key, call.tensors = call_of(signature, call.args, call.kwargs)
        except TraceError as error:
            call.why = str(error).rstrip(".")

    def _step(self, call: Call) -> Program | LayerStep | None:
        """Return what runs a call; None for the model's own call, which is warned about once."""
        record: Planned = self.__dict__[RECORD]
        why = self._why_plainly()
        step = None
        if not why:
            record.count += 1
            step = step_for(self, record, call)
            why = "" if step else f"it is not what was planned ({call})"
        if why:
            what = f"a training step of {type(self).__name__} runs without its plan: {why}."
            if record.planning is not None and record.planning.strict:
                raise as_it_is(PlanError(f"strict: {what}"))
            if why not in record.refused:
                record.refused.add(why)
                warnings.warn(what, PlanWarning, stacklevel=3)
            return None
        record.running = step
        return step

    @staticmethod
    def _why_plainly() -> str:
        if tf.executing_eagerly():
            return "it was called eagerly; put the training step into a tf.function"
        if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
            return "it is compiled by XLA, which schedules by itself; pass jit_compile=False"
        if in_stateless_scope():
            return "it is called in Keras' stateless scope, which is gone in the backward pass"
        return ""


def _first_only(gradients: list[Any], made_of: list[Any]) -> list[Any]:
    """Return gradients that raise TraceError where a tape around asks for theirs.

    made_of : what they would have gradients by; the ops of a plan have none
    """
    sources = [it for it in made_of if it is not None]

    @tf.custom_gradient
    def first(*tensors: Any) -> Any:
        def again(*_: Any) -> Any:
            raise as_it_is(
                TraceError(
                    "gradients of gradients are asked for (a gradient penalty, a Hessian-vector "
                    "product) of a planned model, whose ops have first derivatives only. Plan it "
                    "with backend='layers', or the whole step: sn_memory.tensorflow.plan_step."
                )
            )

        return [tf.identity(it) for it in tensors[len(sources) :]], again

    there = [it for it in gradients if it is not None]
    results = first(*sources, *there) if there else []
    made = iter(results if isinstance(results, list | tuple) else [results])
    return [None if it is None else next(made) for it in gradients]


def _differentiable(program: Program, given: list[Any], variables: Sequence[Any]) -> list[Any]:
    """Put the planned passes into the graph; the tape sees one op with one gradient."""
    captured = program.captured
    wanted = uncast(variables)
    # TensorFlow keeps the gradient of each op that has one of its own under a name, for good, and
    # with it both graphs. What comes after the forward pass is put there once only.
    registered: list[str] = []

    @tf.custom_gradient
    def passes(*_: Any) -> Any:
        emission = Emission(program, given)
        emission.forward()
        count = len(captured.outputs) - len(captured.gradients)
        outs = [emission.need(value) for value in captured.outputs[:count]]
        places = [captured.outputs.index(value) for value in captured.targets]

        def backward(*incoming: Any) -> Any:
            given = [incoming[place] for place in places]
            none = left_out(captured, given)
            emission.backward(given)
            made = [
                None if place in none else emission.need(value)
                for place, value in enumerate(captured.outputs[count:])
            ]
            found = iter(made)
            for name in registered:
                framework_ops.gradient_registry._registry.pop(name, None)
            gradients = [next(found) if there else None for there in program.has_gradient]
            if tapes.could_possibly_record():
                gradients = _first_only(gradients, [*read, *given])
            return gradients

        return outs, backward

    read = [tf.convert_to_tensor(it) for it in wanted]
    results = passes(*read)
    found = list(results) if isinstance(results, list | tuple) else [results]
    registered += {it.op.get_attr("_gradient_op_type").decode() for it in found}
    return found
