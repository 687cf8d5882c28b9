"""The calls of a planned Keras model, including those for inputs that were not planned for.

In training, inside a tf.function such as `fit`'s, its forward and backward pass are the planned
ones (eager.py). Called eagerly, where TensorFlow holds all arguments, and under XLA, which orders
ops by itself, they are the model's own.

A call of a kind that was not planned for is traced separately from the function that is being
built; ops have the same names at any size, so that plans can be reused. If there is no plan of ops,
or a size is unknown, layers are recomputed, chosen by steps measured on synthetic values. See
run/unseen.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator
from inspect import getclosurevars
from itertools import islice
from typing import Any

import tensorflow as tf
from keras.src.backend.common.stateless_scope import in_stateless_scope  # has no public name
from tensorflow.python.eager import record as tape
from tensorflow.python.ops import control_flow_util

from ..base.errors import PlanError
from ..run.unseen import UnseenInput
from .eager import Program
from .errors import TraceError, as_it_is, first_line, warn
from .guards import (
    Call,
    call_of,
    changed,
    describe,
    is_open,
    settings_of,
    signature_of,
    steady,
    tensors_in,
)
from .model import as_specs, model_step, restore_model, run_outside, without_warning
from .modules.backend import LayerStep, layer_step
from .planned import KINDS, RECORD, PlanOptions, PlanRecord, Step, plain_class, plain_model
from .target import bfc_settings
from .trace.trace import OPTIMIZER, trace_like

AGAIN = "layers run again"
Shapes = list[tuple[int, ...]]


def step_for(model: Any, record: PlanRecord, call: Call) -> Step | None:
    """Return the step for a call that is being traced, and keep it; None until `plan` is done.

    Warns if the step is slower than a plan of ops, or above the budget.
    """
    kind: Hashable = call.why or signature_of(call.key, model.trainable_variables)
    # A plan of ops computes no gradients of inputs: a tape that watches them would get None.
    wants_input = tape.should_record_backprop(
        [tensor for tensor in call.tensors if tensor.dtype.is_floating]
    )
    if wants_input:
        kind = (kind, "a gradient of its input")
    kept = record.kept.get(kind)
    # A rate is a constant of the traced step: if it has changed since, another step is planned.
    if kept is not None and not changed(kept.step.settings, settings_of(model)):
        if kept.used is not None:
            kept.used = record.count
        return kept.step
    if record.backend == "layers" or record.options is None:
        return record.layers
    return _UnseenCall(model, record, record.options, call, kind, wants_input=wants_input).step()


class _UnseenCall(UnseenInput[Step]):
    """A call of a new kind; its step is kept under `kind`."""

    log = logging.getLogger(__name__)
    line = "model = sn_memory.tensorflow.plan(model, [sample, another], budget)"
    first_line = staticmethod(first_line)

    def __init__(
        self,
        model: Any,
        record: PlanRecord,
        options: PlanOptions,
        call: Call,
        kind: Hashable,
        *,
        wants_input: bool,
    ) -> None:
        super().__init__(
            type(model).__name__, record.budget_bytes, strict=options.strict, clock=record.time
        )
        self.model, self.record, self.options, self.call = model, record, options, call
        self.kind, self.wants_input = kind, wants_input
        self.plain = plain_model(model)

    def described(self) -> str:
        return str(self.call)

    def refusal(self) -> str:
        if self.call.why:
            return self.call.why
        if is_open(self.call.key):
            return (
                "a size is unknown (None) when its function is traced, and bytes depend on it: "
                "leave reduce_retracing and the input_signature out, or pass drop_remainder=True"
            )
        if self.wants_input:
            return (
                "a gradient of its input is wanted, as where it is part of another model, and a "
                "plan of its ops computes none"
            )
        return ""

    def by_ops(self) -> Program:
        try:
            return run_outside(self._by_ops)
        except Exception:
            # It was stored before it was built; later calls must not run it.
            self.record.kept.pop(self.kind, None)
            raise

    def _by_ops(self) -> Program:
        before = self.record.traced
        assert before is not None
        args, kwargs = self.arguments()
        training = self.call.training
        with restore_model(self.plain):
            then = settings_of(self.plain)
            traced = trace_like(self.plain, args, kwargs, before, training=training)
            settings = steady(then, settings_of(self.plain))
            if traced.structure["key"] != self.call.key:
                raise TraceError(f"its trace is of {describe(traced.structure['key'])}")
            if traced.uncounted:
                raise TraceError(traced.uncounted)
            search = self.options.search(self.budget_bytes)
            allocator = bfc_settings(self.options.device)
            kept = self.record.kept.values()
            plan = self.planned(traced.graph, search, self.budget_bytes, kept, allocator)
            program = Program(traced, plan, settings)
            if self.over is None:
                # Stored first, as the model takes it from the record. Traced in a separate graph,
                # so that failures do not occur in the one that is being built.
                self.kept(program)
                step = model_step(self.model, training=training)
                step.get_concrete_function(*args, **kwargs)
        return program

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the call's arguments with tf.TensorSpec in place of tensors."""
        kwargs = {key: value for key, value in self.call.kwargs.items() if key != "training"}
        return as_specs(self.call.args), as_specs(kwargs)

    def by_parts(self, why: str, by_ops: Step | None, *, keep: bool) -> Step:
        step: Step | None = None
        try:
            step = self.layers()
        except TraceError as error:
            if by_ops is None:
                raise
            self.log.info("%s: %s", self.name, error)
        # If neither keeps the budget, the one with the smaller peak runs.
        if by_ops is not None and (step is None or by_ops.plan.peak_bytes < step.plan.peak_bytes):
            step = by_ops
        else:
            self.how = AGAIN
        assert step is not None
        shapes = ", ".join(str(list(shape)) for shape in self.shapes())
        warn(self.warning(step, why, f"on {shapes}: "))
        return self.kept(step) if keep else step

    def kept(self, step: Step) -> Step:
        self.record.keep(self.kind, self.call.key or (), step, self.how, self.seconds)
        return step

    def error(self, why: str) -> Exception:
        return as_it_is(super().error(why))

    def sample(self) -> tuple[Any, ...]:
        """Return arguments with known shapes: the call's, or those of the sample of `plan`."""
        args, kwargs = self.arguments()
        known = not self.call.why and not is_open(self.call.key)
        plain = all(leaf is None for leaf in tf.nest.flatten(kwargs))
        return args if known and plain else self.record.sample

    def shapes(self) -> Shapes:
        leaves = tf.nest.flatten(self.sample())
        return [tuple(leaf.shape) for leaf in leaves if hasattr(leaf, "shape")]

    def layers(self) -> LayerStep:
        """Return a choice of layers measured on an input at least as large, or measure one."""
        if self.record.layers is not None:
            return self.record.layers
        shapes, traced = self.shapes(), self.record.traced
        for measured, step in self.record.measured:
            if _covers(measured, shapes):
                return step
        # Only `plan` knows the optimizer; its state is in the trace.
        storages = traced.graph.storages if traced is not None else ()
        resident = sum(storage.bytes for storage in storages if storage.name == OPTIMIZER)
        step = run_outside(
            lambda: layer_step(
                self.plain, self.sample(), self.budget_bytes, resident_bytes=resident, safely=True
            )
        )
        # The new choice replaces those for inputs that it covers.
        rest = [measured for measured in self.record.measured if not _covers(shapes, measured[0])]
        self.record.measured = [*rest, (shapes, step)]
        return step


def _covers(large: Shapes, small: Shapes) -> bool:
    """Whether each size in one list of shapes is at least the corresponding one in the other."""
    return len(large) == len(small) and all(
        len(shape) == len(other) and all(a >= b for a, b in zip(shape, other, strict=True))
        for shape, other in zip(large, small, strict=True)
    )


class PlannedCall:
    """The mixin of a planned Keras model."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # `from_config` and `clone_model` build another model, which is not planned.
        return plain_class(cls)(*args, **kwargs)

    def __reduce__(self) -> Any:
        # Pickled and copied as the model's own class, like in a `.keras` file.
        return plain_model(self).__reduce__()

    def call(self, *args: Any, **kwargs: Any) -> Any:
        training = kwargs.get("training")
        if training is None:
            # If `call` takes no such argument, Keras has it in the call context.
            training = getattr(self._get_call_context(), "training", None)  # type: ignore[attr-defined]
        plainly = super().call  # type: ignore[misc]
        if not (training is True or (training is None and _trains((args, kwargs)))):
            return plainly(*args, **kwargs)
        call = Call(args, kwargs, training)
        try:
            signature = self._call_signature  # type: ignore[attr-defined]
            call.key, call.tensors = call_of(signature, args, kwargs, training)
        except TraceError as error:
            # For such calls layers may still be recomputed.
            call.why = str(error).rstrip(".")
        step = self._step(call)
        return plainly(*args, **kwargs) if step is None else step.run(self, plainly, call)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        # Keras' "auto" would choose XLA, which orders ops by itself.
        if kwargs.get("jit_compile", "auto") == "auto":
            kwargs["jit_compile"] = False
        super().compile(*args, **kwargs)  # type: ignore[misc]

    def make_train_function(self, force: bool = False) -> Any:
        """Make the training function of `fit`, with one function per kind of batch; see ByKind."""
        if self.train_function is None or force:  # type: ignore[has-type]

            def make() -> Any:
                super(PlannedCall, self).make_train_function(force=True)  # type: ignore[misc]
                return self.train_function  # type: ignore[has-type]

            self.train_function: Any = ByKind(self, make)
        return self.train_function

    def _step(self, call: Call) -> Step | None:
        """Return the step for a call; None for the model's own call, which is warned about once."""
        record: PlanRecord = self.__dict__[RECORD]
        why = _why_plainly()
        if not why:
            record.count += 1
            step = step_for(self, record, call)
            if step is not None:
                record.running = step
                return step
            why = f"it is not what was planned ({call})"
        what = f"a training step of {type(self).__name__} runs without its plan: {why}."
        if record.strict:
            raise as_it_is(PlanError(f"strict: {what}"))
        if why not in record.refused:
            record.refused.add(why)
            warn(what)
        return None


def _trains(arguments: Any) -> bool:
    """Whether a call that does not state `training` may be differentiated for training.

    Keras' `fit` does not state it to a model whose `call` takes no `training`. A call for a
    gradient of the arguments (a saliency map) is not training.
    """
    floating = [tensor for tensor in tensors_in(arguments) if tensor.dtype.is_floating]
    return (
        not tf.executing_eagerly()
        and tape.could_possibly_record()
        and not tape.should_record_backprop(floating)
    )


def _why_plainly() -> str:
    if tf.executing_eagerly():
        return "it was called eagerly; put the training step into a tf.function"
    if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        return "it is compiled by XLA, which chooses its own schedule; pass jit_compile=False"
    if in_stateless_scope():
        return "it is called in Keras' stateless scope, which is gone in the backward pass"
    return ""


class ByKind:
    """The training function of a planned model: one Keras function for each kind of batch.

    Keras traces one function for all batches. If a dataset does not guarantee their sizes, e.g.
    because the last batch is smaller, the function is traced with unknown sizes from the first step
    on, and its bytes cannot be planned. So batches are taken from the iterator here, and each kind
    gets its own function.

    make : returns a new training function of Keras
    """

    def __init__(self, model: Any, make: Callable[[], Any]) -> None:
        self.model, self.make = model, make
        # Per kind of batch; of more than KINDS, the least recently used one is dropped.
        self.functions: dict[Hashable, Any] = {}
        # For any batch: the function that Keras would use.
        self.any = make()

    def __call__(self, iterator: Any) -> Any:
        """Run as many steps as Keras runs per call; return the logs of the last one.

        Raises StopIteration if there is no batch.
        """
        if not self.kinds_matter(iterator):
            return self.any(iterator)
        logs = None
        for batch in islice(iterator, self.model.steps_per_execution):
            # For an iterator of one batch Keras' function is traced with the batch's sizes.
            logs = self.function_for(batch)(iter([batch]))
        if logs is None:
            raise StopIteration
        return logs

    def kinds_matter(self, iterator: Any) -> bool:
        """Whether batches may differ in kind, and a plan of ops depends on it."""
        record: PlanRecord = self.model.__dict__[RECORD]
        if record.backend != "graph" or self.model.jit_compile or self.model.run_eagerly:
            return False
        # A dataset that guarantees all sizes has one kind of batch, traced with these by Keras.
        if isinstance(iterator, tf.data.Iterator):
            specs = tf.nest.flatten(iterator.element_spec)
            tensors = [spec for spec in specs if isinstance(spec, tf.TensorSpec)]
            return not all(spec.shape.is_fully_defined() for spec in tensors)
        # `train_on_batch` passes a generator; distributed iterators are left to their strategy.
        return isinstance(iterator, Iterator) and not isinstance(
            iterator, tf.distribute.DistributedIterator
        )

    def function_for(self, batch: Any) -> Any:
        """Return the function of a kind of batch."""
        kind = tuple(map(_kind, tf.nest.flatten(batch)))
        # Removed and appended again: the first one is then the least recently used.
        function = self.functions.pop(kind, None)
        if function is None:
            record: PlanRecord = self.model.__dict__[RECORD]
            # Without time to plan for it, layers are recomputed, for which sizes may be unknown.
            if not record.strict and not record.time.left():
                return self.any
            function = self.make()
            # Keras' tf.functions; each kind has its own.
            for value in getclosurevars(function).nonlocals.values():
                traced = getattr(value, "__wrapped__", value)
                if isinstance(traced, tf.types.experimental.PolymorphicFunction):
                    without_warning(traced)
            # `make` has replaced `train_function` by Keras' own.
            self.model.train_function = self
        self.functions[kind] = function
        while len(self.functions) > KINDS:
            del self.functions[next(iter(self.functions))]
        return function


def _kind(leaf: Any) -> Hashable:
    """Return what determines whether a function is retraced for a leaf of a batch."""
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return tuple(leaf.shape), str(leaf.dtype)
    return f"{type(leaf).__module__}.{type(leaf).__qualname__}"
