"""What a planned Keras model does otherwise than its class.

In training, inside a tf.function as `fit` makes it, its forward and backward pass are the planned
ones (eager.py), for a new input too (new_inputs.py). Called eagerly, where TensorFlow holds all
arguments, and under XLA, which orders ops by itself, it is the model's own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import islice
from typing import Any

import tensorflow as tf
from keras.src.backend.common.stateless_scope import in_stateless_scope  # has no public name
from tensorflow.python.eager import record as tapes  # whether one is around
from tensorflow.python.framework import ops as framework_ops
from tensorflow.python.ops import control_flow_util

from ..base.errors import PlanError, PlanWarning
from .eager import Emission, Program
from .errors import TraceError, as_it_is
from .guards import Call, call_of, refilled
from .model import uncast
from .modules.backend import LayerStep
from .new_inputs import step_for
from .planned import KINDS, RECORD, Planned
from .trace.capture import left_out


class PlannedCall:
    """What a planned Keras model does otherwise than its class."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        training = kwargs.get("training")
        if training is None:
            training = getattr(self._get_call_context(), "training", None)  # type: ignore[attr-defined]
        plainly = super().call  # type: ignore[misc]
        if training is not True:
            return plainly(*args, **kwargs)
        call = Call(args, kwargs)
        try:
            signature = self._call_signature  # type: ignore[attr-defined]
            call.key, call.tensors = call_of(signature, args, kwargs)
        except TraceError as error:
            call.why = str(error).rstrip(".")
        step = self._step(call)
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
        """Make what `fit` calls: a function for each kind of batch; see ByKind."""
        if self.train_function is None or force:  # type: ignore[has-type]

            def make() -> Any:
                super(PlannedCall, self).make_train_function(force=True)  # type: ignore[misc]
                return self.train_function  # type: ignore[has-type]

            self.train_function: Any = ByKind(self, make)
        return self.train_function

    def _step(self, call: Call) -> Program | LayerStep | None:
        """Return what runs a call; None for the model's own call, which is warned about once."""
        record: Planned = self.__dict__[RECORD]
        why = _why_plainly()
        step = None
        if not why:
            record.count += 1
            step = step_for(self, record, call)
            why = "" if step else f"it is not what was planned ({call})"
        if why:
            what = f"a training step of {type(self).__name__} runs without its plan: {why}."
            if record.strict:
                raise as_it_is(PlanError(f"strict: {what}"))
            if why not in record.refused:
                record.refused.add(why)
                warnings.warn(what, PlanWarning, stacklevel=3)
            return None
        record.running = step
        return step


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
        def second(*_: Any) -> Any:
            raise as_it_is(
                TraceError(
                    "gradients of gradients are asked for (a gradient penalty, a Hessian-vector "
                    "product) of a planned model, whose ops have first derivatives only. Plan it "
                    "with backend='layers', or the whole step: sn_memory.tensorflow.plan_step."
                )
            )

        return [tf.identity(it) for it in tensors[len(sources) :]], second

    real = [gradient for gradient in gradients if gradient is not None]
    results = iter(_as_list(first(*sources, *real)) if real else [])
    return [None if gradient is None else next(results) for gradient in gradients]


def _differentiable(program: Program, given: list[Any], variables: Sequence[Any]) -> list[Any]:
    """Put the planned passes into the graph; the tape sees one op with one gradient."""
    captured = program.captured
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
            of_targets = [incoming[place] for place in places]
            none = left_out(captured, of_targets)
            emission.backward(of_targets)
            made = iter(
                [
                    None if place in none else emission.need(value)
                    for place, value in enumerate(captured.outputs[count:])
                ]
            )
            for name in registered:
                framework_ops.gradient_registry._registry.pop(name, None)
            gradients = [next(made) if has_one else None for has_one in program.has_gradient]
            if tapes.could_possibly_record():
                gradients = _first_only(gradients, [*read, *of_targets])
            return gradients

        return outs, backward

    read = [tf.convert_to_tensor(variable) for variable in uncast(variables)]
    results = _as_list(passes(*read))
    registered += {it.op.get_attr("_gradient_op_type").decode() for it in results}
    return results


def _as_list(results: Any) -> list[Any]:
    return list(results) if isinstance(results, list | tuple) else [results]


class ByKind:
    """The training function of a planned model: one of Keras' own for each kind of batch.

    Keras traces one function for all batches. Where a dataset does not promise their sizes, as with
    a last batch that is smaller, the function is traced with sizes left open from the first step
    on, and no plan of bytes can be made for it. So batches are taken from the iterator here, and
    each kind goes to a function that has seen no other.

    make : makes a training function of Keras, each time a new one
    """

    def __init__(self, model: Any, make: Callable[[], Any]) -> None:
        self.model, self.make = model, make
        # Per kind of batch; of more than KINDS, that which was not used for longest goes.
        self.functions: dict[Hashable, Any] = {}
        # For any batch: what Keras would use.
        self.any = make()

    def __call__(self, iterator: Any) -> Any:
        """Run as many steps as Keras would at a time; return the logs of the last.

        Raises StopIteration if there is no batch.
        """
        if not self.are_told_apart(iterator):
            return self.any(iterator)
        logs = None
        for batch in islice(iterator, self.model.steps_per_execution):
            logs = self.function_for(batch)(iter([batch]))
        if logs is None:
            raise StopIteration
        return logs

    def are_told_apart(self, iterator: Any) -> bool:
        """Whether batches may differ in kind, and a plan of ops depends on it."""
        record: Planned = self.model.__dict__[RECORD]
        if record.backend != "graph" or self.model.jit_compile or self.model.run_eagerly:
            return False
        if isinstance(iterator, tf.data.Iterator):
            specs = tf.nest.flatten(iterator.element_spec)
            tensors = [spec for spec in specs if isinstance(spec, tf.TensorSpec)]
            return not all(spec.shape.is_fully_defined() for spec in tensors)
        # Of `train_on_batch`, a generator; what a strategy distributes is its own business.
        return isinstance(iterator, Iterator) and not isinstance(
            iterator, tf.distribute.DistributedIterator
        )

    def function_for(self, batch: Any) -> Any:
        """Return the function of a kind of batch."""
        kind = tuple(map(_kind, tf.nest.flatten(batch)))
        function = self.functions.pop(kind, None)
        if function is None:
            record: Planned = self.model.__dict__[RECORD]
            if not record.strict and not record.time.left():
                return self.any
            function = self.make()
            self.model.train_function = self
        self.functions[kind] = function
        while len(self.functions) > KINDS:
            del self.functions[next(iter(self.functions))]
        return function


def _kind(leaf: Any) -> Hashable:
    """What tells a batch from others that a function would be traced again for."""
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return tuple(leaf.shape), str(leaf.dtype)
    return f"{type(leaf).__module__}.{type(leaf).__qualname__}"
