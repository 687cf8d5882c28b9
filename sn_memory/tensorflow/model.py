"""Keras models: variables, twins, training steps, restoring state, and comparing two runs.

A tensor that is zero except for rounding, such as the gradient of a bias before batch norm, differs
by 100 % when sums are computed in another order. So a difference is not taken relative to its
tensor's largest value if that value itself is rounding error. The effect of rounding is measured
by a run with weights perturbed at random in their last bit.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state  # has no public name
from keras.src.models.functional import Functional  # made by keras.Model; no public name either

from .errors import TraceError
from .guards import tensors_in

# State that Keras sets around a call; its other per-thread state is settings and seeds.
_AROUND: Final = ("current_call_ctx", "autocast_scope", "name_scope_stack", "stateless_scope")

T = TypeVar("T")


def check_model(model: Any, sample: Any) -> None:
    """Raise TraceError for a model that is not built, or whose `call` a twin would not inherit.

    Raise TypeError if a functional model of several inputs gets one tensor.
    """
    if not model.built:
        raise TraceError(
            "the model is not built, so its variables do not exist yet. Call it once, or build it "
            "with model.build(shape)."
        )
    if "call" in model.__dict__:
        raise TraceError(
            "the model's call was replaced on the instance, and a plan runs the one of its class. "
            "Put the change into a subclass."
        )
    first = sample[0] if isinstance(sample, tuple) and sample else sample
    if type(model).call is Functional.call and len(model.inputs) > 1 and _is_array(first):
        raise TypeError(
            f"got one tensor where the model takes {len(model.inputs)} inputs in one argument; "
            "expected a sample ([...],), a tuple of that argument, or a dict of the inputs. A "
            "list is several samples, and a tuple the arguments of a call."
        )


def variables_of(model: Any) -> list[Any]:
    """Return a model's variables, and the states of recurrent layers with `stateful=True`.

    Keras 3 does not count these among a model's variables, but training steps change them.
    """
    # By id: comparing two Keras variables returns a tensor.
    variables = {id(v): v for v in model.variables}
    for layer in model._flatten_layers():
        if getattr(layer, "stateful", False):
            states = tf.nest.flatten(getattr(layer, "states", None))
            variables |= {id(state): state for state in states if hasattr(state, "assign")}
    return list(variables.values())


def uncast(variables: Iterable[Any]) -> list[Any]:
    """Return TensorFlow's variables behind those of Keras.

    Under a mixed-precision policy, `value` within a model's call is a cast of the variable: a tape
    that watches it has no gradient for the weight.
    """
    return [variable._value for variable in variables]


def compute_dtypes(model: Any) -> list[Any]:
    """Return the dtypes that the layers of a model compute in."""
    dtypes = (layer.compute_dtype for layer in model._flatten_layers())
    return [dtype for dtype in dtypes if dtype is not None]


def call_arguments(sample: Any) -> tuple[Any, ...]:
    """Return the positional arguments of a sample, tensors as specifications where possible.

    A list means several samples to `plan`, and is refused here.
    """
    if isinstance(sample, list):
        raise TypeError(
            "got a list, which plan takes as several samples; expected one sample. A model whose "
            "first argument is a list takes a tuple: ([...],)."
        )
    return as_specs(sample if isinstance(sample, tuple) else (sample,))


def as_specs(arguments: Any) -> Any:
    """Return a structure with tensors and arrays replaced by tensor specifications."""

    def spec(leaf: Any) -> Any:
        if isinstance(leaf, tf.TypeSpec | tf.Variable):
            return leaf
        if _is_composite(leaf):
            return tf.type_spec_from_value(leaf)
        return tf.TensorSpec(leaf.shape, tf.as_dtype(leaf.dtype)) if _is_array(leaf) else leaf

    return tf.nest.map_structure(spec, arguments)


def as_tensors(sample: Any) -> tuple[Any, ...]:
    """Return the arguments of a sample, arrays as tensors."""
    args = sample if isinstance(sample, tuple) else (sample,)
    converted: tuple[Any, ...] = tf.nest.map_structure(
        lambda leaf: (
            tf.convert_to_tensor(leaf) if _is_array(leaf) and not _is_composite(leaf) else leaf
        ),
        args,
    )
    return converted


def has_values(sample: Any) -> bool:
    """Whether a sample can be run: it contains no tf.TensorSpec or other tf.TypeSpec."""
    return not any(isinstance(leaf, tf.TypeSpec) for leaf in tf.nest.flatten(sample))


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _is_composite(leaf: Any) -> bool:
    """Whether a leaf consists of several tensors, e.g. a RaggedTensor."""
    # Variables are composite tensors, too.
    return isinstance(leaf, tf.__internal__.CompositeTensor) and not isinstance(leaf, tf.Variable)


def twin_of(model: Any, mixin: type) -> Any:
    """Return a model that shares everything with another, its class preceded by a mixin."""
    kind: Any = type(model)

    # Keras inspects the signature of `call`, so it is the model's.
    @functools.wraps(kind.call)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return mixin.call(self, *args, **kwargs)  # type: ignore[attr-defined]

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "call": call}
    names["__doc__"] = kind.__doc__
    # Not by `__init__`, which would create new layers and variables.
    twin: Any = object.__new__(type(kind.__name__, (mixin, kind), names))
    twin.__dict__.update(model.__dict__)
    # Functions that Keras has already created call the model they were created for.
    for key in ("train_function", "test_function", "predict_function"):
        if key in twin.__dict__:
            twin.__dict__[key] = None
    return twin


def without_warning(function: Any) -> Any:
    """Suppress TensorFlow's warning that a tf.function is traced often.

    TensorFlow counts by the function's code, so functions made anew for each model or kind of input
    look like one function that is traced again and again.
    """
    function._omit_frequent_tracing_warning = True
    return function


def model_step(model: Any, *, training: bool | None = True) -> Any:
    """Return a step: a model's outputs and all gradients, for fixed gradients of the outputs."""

    @without_warning
    @tf.function(autograph=False)
    def step(*args: Any, **kwargs: Any) -> Any:
        variables = uncast(model.trainable_variables)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(variables)
            outs = _floating(model(*args, **kwargs, training=training))
        # Incoming gradients wait for all outputs, as a loss's do. They depend on none, so otherwise
        # the executor would start the backward pass of one output before another is computed.
        with tf.control_dependencies(outs):
            incoming = [_drawn(place, out) for place, out in enumerate(outs)]
        return outs, tape.gradient(outs, variables, output_gradients=incoming)

    return step


def update_step(model: Any) -> Any:
    """Return a step of a model with a loss and an optimizer's update, as in `fit`.

    The loss is the squared distance from fixed values. Reading a weight after its update gives
    different results. A Keras optimizer is used because its gradients pass through one IdentityN:
    Grappler concludes that reads and updates are ordered, drops the control edges, and then removes
    the IdentityN.
    """
    # The error of a late read is proportional to the learning rate.
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build(model.trainable_variables)

    @without_warning
    @tf.function(autograph=False)
    def step(*args: Any) -> Any:
        variables = model.trainable_variables
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(uncast(variables))
            outs = _floating(model(*args, training=True))
            losses = [
                tf.reduce_sum(tf.square(out - _drawn(place, out))) / 2
                for place, out in enumerate(outs)
            ]
        gradients = tape.gradient(losses, uncast(variables))
        pairs = [pair for pair in zip(gradients, variables, strict=True) if pair[0] is not None]
        if pairs:
            optimizer.apply(*map(list, zip(*pairs, strict=True)))
        return outs, gradients

    return step


def _floating(results: Any) -> list[Any]:
    return [leaf for leaf in tensors_in(results) if leaf.dtype.is_floating]


def _drawn(place: int, like: Any) -> Any:
    """Return random values of a tensor's shape, the same for a place in every step and graph."""
    return tf.random.stateless_normal(tf.shape(like), (place, 0), dtype=like.dtype)


def wait_for(results: Any) -> None:
    """Wait until results are computed; on a GPU, work is only queued when a call returns."""
    tensors = tensors_in(results)
    # The value of the last one suffices: all work was queued in order.
    if tensors and "GPU" in tensors[-1].device:
        np.asarray(tf.reshape(tensors[-1], (-1,))[:1])


@contextmanager
def put_back(variables: Sequence[Any]) -> Iterator[None]:
    """Restore the values of variables at the end, also after an exception."""
    before = [variable.numpy() for variable in variables]
    try:
        yield
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)


@contextmanager
def restore_model(model: Any) -> Iterator[None]:
    """Restore at the end everything but variables that calls of a model change.

    That is: attributes of layers, with the contents of their lists and dicts; the losses they
    collected; and the state of Python's and NumPy's random number generators.
    """
    layers = model._flatten_layers()
    # By `__dict__`: setattr would have Keras track each value a second time.
    attributes = [(layer, dict(layer.__dict__)) for layer in layers]
    contents = [
        (value, list(value.items() if isinstance(value, dict) else value))
        for layer in layers
        for value in layer.__dict__.values()
        if isinstance(value, list | dict)
    ]
    rng_state, numpy_rng_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(rng_state)
        np.random.set_state(numpy_rng_state)  # noqa: NPY002
        for layer, before in attributes:
            layer.__dict__.clear()
            layer.__dict__.update(before)
        for value, items in contents:
            _refill(value, items)
        for layer in layers:
            layer._clear_losses()


def _refill(value: Any, before: list[Any]) -> None:
    """Restore the contents of a list or dict, if they changed."""
    now = list(value.items() if isinstance(value, dict) else value)
    if [_identity(value) for value in now] == [_identity(value) for value in before]:
        return
    value.clear()
    if isinstance(value, dict):
        value.update(dict(before))
    else:
        value.extend(before)


def _identity(item: Any) -> Any:
    """Return an item's identity; dict.items() returns new pairs, so that of key and value."""
    return tuple(map(id, item)) if isinstance(item, tuple) and len(item) == 2 else id(item)


def run_outside(function: Callable[[], T]) -> T:
    """Run a function as if nothing were being traced: no graph, no tape, no enclosing Keras call.

    All of these are per thread, so the function runs in another thread, which is waited for.
    tf.init_scope would leave the graph as well, but it stops all tapes of the thread, including
    those opened inside.
    """
    # A new thread lacks Keras' settings, e.g. mixed precision and seeds.
    held: dict[str, Any] = vars(global_state.GLOBAL_STATE_TRACKER)
    settings = {key: value for key, value in held.items() if key not in _AROUND}

    def run() -> T:
        for name, value in settings.items():
            global_state.set_global_attribute(name, value)
        return function()

    with ThreadPoolExecutor(1, thread_name_prefix="sn_memory") as pool:
        return pool.submit(run).result()


Results = dict[str, Any]
# Prefix of the names of results; all other names are variables'.
_RESULT: Final = "result "
# Rounding error above this share of a tensor's largest value: the tensor is rounding error itself.
_ROUNDING_SHARE: Final = 0.1
# A difference of up to this many times the effect of the weights' last bit is rounding, too: deep
# networks on few values amplify it, ResNet50 on 64 pixels to a tenth of a gradient.
_LIKE_ROUNDING: Final = 8
# Differences below this many last bits need no run with nudged weights.
_FEW: Final = 16
# Distance from 1 to the next number, from the bits of each dtype's mantissa.
_UNITS: Final = {
    tf.bfloat16: 2.0**-7, tf.float16: 2.0**-10, tf.float32: 2.0**-23, tf.float64: 2.0**-52,
}  # fmt: skip


def results_of(run: Callable[[], Any], variables: Sequence[Any]) -> Results:
    """Run once from the current state; return results and variables, and restore the latter."""
    with put_back(variables):
        flat = tf.nest.flatten(run(), expand_composites=True)
        results = {
            f"{_RESULT}{place}": np.asarray(value)
            for place, value in enumerate(flat)
            if value is not None
        }
        return results | {
            f"{variable.name} #{place}": variable.numpy()
            for place, variable in enumerate(variables)
        }


def different(expected: Results, got: Results) -> tuple[str, ...]:
    """Return the names of values that are not bit-equal."""
    shared = expected.keys() & got.keys()
    same = {name for name in shared if expected[name].tobytes() == got[name].tobytes()}
    return tuple(sorted((expected.keys() | got.keys()) - same))


def relative_error(
    expected: Results, got: Results, nudged: Callable[[], Results], unit: float
) -> float:
    """Return the largest difference, relative to the largest value of its tensor.

    If a tensor differs by no more than a few times the effect of the weights' last bit on it, the
    difference counts as a multiple of that effect, times `unit`. A larger difference of a tensor
    that is zero except for rounding is relative to the largest of all results, or all variables.

    nudged : returns the results with weights that differ in their last bit; called only if needed
    unit : relative difference of that last bit
    """
    names = different(expected, got)
    if not names:
        return 0.0
    if any(
        name not in expected or name not in got or expected[name].shape != got[name].shape
        for name in names
    ):
        return float("inf")
    gaps = {name: _gap(expected[name], got[name]) for name in names}
    errors = {name: gap / (_largest(expected[name]) or 1.0) for name, gap in gaps.items()}
    # Saves the run with nudged weights.
    if max(errors.values()) < _FEW * unit:
        return max(errors.values())
    other = nudged()
    for name in names:
        rounding = _gap(expected[name], other[name])
        if gaps[name] <= _LIKE_ROUNDING * rounding:
            errors[name] = unit * gaps[name] / rounding
        elif rounding > _ROUNDING_SHARE * _largest(expected[name]):
            is_result = name.startswith(_RESULT)
            peers = [
                value for key, value in expected.items() if key.startswith(_RESULT) == is_result
            ]
            errors[name] = gaps[name] / (max(map(_largest, peers)) or 1.0)
    return max(errors.values())


@contextmanager
def nudged(variables: Sequence[Any], unit: float) -> Iterator[None]:
    """Change variables by a relative `unit` up or down, at random; restore them at the end."""
    # Seeded, so that a step gets the same verdict each time.
    generator = np.random.default_rng(0)
    with put_back(variables):
        for variable in variables:
            value = variable.numpy()
            if tf.as_dtype(variable.dtype).is_floating:
                signs = generator.choice(np.array([-1.0, 1.0]), value.shape)
                wide = value.astype(np.float64) * (1 + unit * signs)
                variable.assign(wide.astype(value.dtype))
        yield


def unit_of(dtypes: Iterable[Any]) -> float:
    """Return the relative rounding unit of the least precise of the floating dtypes."""
    return max(
        (_UNITS[dtype] for dtype in map(tf.as_dtype, dtypes) if dtype in _UNITS), default=2.0**-23
    )


def _wide(value: Any) -> Any:
    """Return numbers as float64; NaN for text and objects, which cannot be subtracted."""
    return value.astype(np.float64) if value.dtype.kind not in "OSU" else np.full(1, np.nan)


def _largest(value: Any) -> float:
    return float(np.abs(np.nan_to_num(_wide(value))).max()) if value.size else 0.0


def _gap(one: Any, other: Any) -> float:
    """Return the largest difference; infinite for a value that is NaN in one run only."""
    if one.tobytes() == other.tobytes():
        return 0.0
    left, right = _wide(one), _wide(other)
    alike = (left == right) | (np.isnan(left) & np.isnan(right) & (one.dtype.kind not in "OSU"))
    return float(np.nan_to_num(np.where(alike, 0.0, np.abs(left - right)), nan=np.inf).max())
