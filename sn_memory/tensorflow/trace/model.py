"""A Keras model's forward and backward pass as one captured step, without its loss.

The model is called as training calls it, on symbolic inputs. Inside, at `call`, a tape is opened:
what Keras does around that (casts, checks) stays outside of the plan. In place of the gradients of
the outputs, which the loss will make, there are stand-ins.
"""

from __future__ import annotations

import functools
from typing import Any

import keras
import tensorflow as tf

from ..errors import TraceError, first_line
from ..model.arguments import call_of, check_results
from ..model.variables import uncast
from .capture import Captured, TapeLog, flat


def call_arguments(sample: Any) -> tuple[Any, ...]:
    """Return the positional arguments of a sample, as tensor specifications where they can be.

    A list is several samples to `plan`, and refused here.
    """
    if isinstance(sample, list):
        raise TypeError(
            "got a list, which stands for several samples of plan; expected one. A model whose "
            "first argument is a list takes a tuple: ([...],)."
        )
    args = sample if isinstance(sample, tuple) else (sample,)
    return as_specs(args)


def as_specs(arguments: Any) -> Any:
    """Return a structure with tensor specifications in the place of tensors and arrays."""

    def spec(leaf: Any) -> Any:
        if isinstance(leaf, tf.TensorSpec | tf.Variable):
            return leaf
        if isinstance(leaf, tf.Tensor):
            return tf.TensorSpec(leaf.shape, leaf.dtype)
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
            return tf.TensorSpec(leaf.shape, tf.as_dtype(leaf.dtype))
        return leaf

    return tf.nest.map_structure(spec, arguments)


def twin_of(model: Any, mixin: type) -> Any:
    """Return a model that shares everything with another and whose class has a mixin first."""
    kind: Any = type(model)

    @functools.wraps(kind.call)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return mixin.call(self, *args, **kwargs)  # type: ignore[attr-defined]

    # Whoever asks for the signature of `call` gets that of the model.
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "call": call}
    names["__doc__"] = kind.__doc__
    made: Any = object.__new__(type(kind.__name__, (mixin, kind), names))
    made.__dict__.update(model.__dict__)
    # What Keras has compiled calls the model it was compiled for.
    for key in ("train_function", "test_function", "predict_function"):
        if key in made.__dict__:
            made.__dict__[key] = None
    return made


class _Listening:
    """A model whose `call` is taped."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        seen: dict[str, Any] = self.__dict__["_sn_memory_seen"]
        key, given = call_of(self._call_signature, args, kwargs)  # type: ignore[attr-defined]
        variables = uncast(self.trainable_variables)  # type: ignore[attr-defined]
        tape = tf.GradientTape(watch_accessed_variables=False)
        with tape:
            tape.watch(variables)
            results = super().call(*args, **kwargs)  # type: ignore[misc]
        check_results(results)
        outs = [it for it in tf.nest.flatten(results) if isinstance(it, tf.Tensor)]
        ends = [it for it in outs if it.dtype.is_floating]
        seen["open"] = [it for it in ends if not it.shape.is_fully_defined()]
        if seen["open"]:
            return results
        stand_ins = [tf.raw_ops.Empty(shape=it.shape.as_list(), dtype=it.dtype) for it in ends]
        gradients = tape.gradient(ends, variables, output_gradients=stand_ins)
        seen.update(
            key=key, given=given, results=results, outs=outs, ends=ends, stand_ins=stand_ins,
            gradients=gradients, variables=self.trainable_variables,  # type: ignore[attr-defined]
        )  # fmt: skip
        return results


def capture_model(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> tuple[Captured, dict[str, Any]]:
    """Trace a Keras model in training; returns the step and what was seen at its `call`."""
    check_model(model)
    twin = twin_of(model, _Listening)
    seen: dict[str, Any] = {}
    twin.__dict__["_sn_memory_seen"] = seen
    log = TapeLog()

    def called(*inputs: Any, **named: Any) -> Any:
        return twin(*inputs, **named, training=True)

    try:
        with log.listening():
            concrete = tf.function(called, autograph=False).get_concrete_function(
                *args, **(kwargs or {})
            )
    except TraceError as error:
        raise TraceError(first_line(error)) from error
    except Exception as error:  # whatever the model's own code raises
        said = f"{type(model).__name__} could not be traced: {first_line(error)}"
        raise TraceError(said) from error
    for end in seen["open"]:
        raise TraceError(
            f"an output of the model, {end.name!r}, has the shape {end.shape}, which depends on "
            "values or on an unknown batch. Give a sample of full shape; ops whose shape depends "
            "on values (boolean masks, tf.unique, tf.where with one argument) cannot be planned."
        )
    _check_results(model, seen)
    gradients = seen["gradients"]
    log.targets[:] = seen["ends"]
    log.results[:] = [it for it in gradients if it is not None]
    captured = flat(
        concrete.graph,
        log,
        given=seen["given"],
        results=[*seen["outs"], *log.results],
        stand_ins=seen["stand_ins"],
    )
    return captured, seen


def model_step(model: Any) -> Any:
    """A step of a model: its outputs and all gradients, given fixed gradients of the outputs."""

    @tf.function(autograph=False)
    def step(*args: Any, **kwargs: Any) -> Any:
        variables = uncast(model.trainable_variables)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(variables)
            outs = _floating(model(*args, **kwargs, training=True))
        # As a loss's would be: an executor in parallel begins the backward pass with them.
        with tf.control_dependencies(outs):
            incoming = [_drawn(place, it) for place, it in enumerate(outs)]
        return outs, tape.gradient(outs, variables, output_gradients=incoming)

    return step


def update_step(model: Any) -> Any:
    """A step of a model with a loss and an optimizer's update, as where `fit` runs.

    The loss is the squared distance from fixed values. What reads a weight after its update comes
    to other results. The optimizer is one of Keras: where all gradients pass through one IdentityN,
    as in there, Grappler takes it for the order of reads and updates, and then takes it apart.
    """
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build(model.trainable_variables)

    @tf.function(autograph=False)
    def step(*args: Any) -> Any:
        variables = model.trainable_variables
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(uncast(variables))
            outs = _floating(model(*args, training=True))
            losses = [
                tf.reduce_sum(tf.square(it - _drawn(place, it))) / 2
                for place, it in enumerate(outs)
            ]
        gradients = tape.gradient(losses, uncast(variables))
        pairs = [it for it in zip(gradients, variables, strict=True) if it[0] is not None]
        if pairs:
            optimizer.apply(*map(list, zip(*pairs, strict=True)))
        return outs, gradients

    return step


def _floating(results: Any) -> list[Any]:
    return [
        it for it in tf.nest.flatten(results) if isinstance(it, tf.Tensor) and it.dtype.is_floating
    ]


def _drawn(place: int, like: Any) -> Any:
    return tf.random.stateless_normal(tf.shape(like), (place, 0), dtype=like.dtype)


def check_model(model: Any) -> None:
    """Raise TraceError for a model whose call would not be the whole of it."""
    if not model.built:
        raise TraceError(
            "the model is not built, so its variables do not exist yet. Call it once, or build it "
            "with model.build(shape)."
        )
    if "call" in model.__dict__:
        raise TraceError(
            "the model's call was replaced on the instance, so that of its class would not be the "
            "whole of it. Put the change into a subclass."
        )


def _check_results(model: Any, seen: dict[str, Any]) -> None:
    if any(layer._losses for layer in model._flatten_layers()):
        for layer in model._flatten_layers():
            layer._clear_losses()
        raise TraceError(
            "a layer adds a loss while it is called (add_loss, activity regularizers), which would "
            "be lost. Plan the whole training step: sn_memory.tensorflow.plan_step."
        )
    if any(hasattr(it, "_keras_mask") for it in seen["outs"]):
        raise TraceError(
            "the model's output carries a mask for the loss, which would be lost. Plan the whole "
            "training step: sn_memory.tensorflow.plan_step."
        )
    for gradient, variable in zip(seen["gradients"], seen["variables"], strict=True):
        if isinstance(gradient, tf.IndexedSlices):
            raise TraceError(
                f"the gradient of {variable.path} is sparse (an embedding). Plan the whole "
                "training step: sn_memory.tensorflow.plan_step."
            )
