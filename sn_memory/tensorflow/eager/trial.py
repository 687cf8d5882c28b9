"""One planned step beside the plain one, before a user's training depends on it.

A plan is checked as a list of ops (check_plan). Whether those ops, put into a graph again, are the
model's step, TensorFlow alone can say: so the planned step is put together, and run once on a real
sample. Variables and attributes are as before afterwards.
"""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import tensorflow as tf

from ...base.errors import PlanWarning
from ...base.host import smallest_limit
from ...base.sizes import show_bytes
from ...plan.plan import Plan
from ...run.measured_choice import MeasuredPlan
from ..errors import TraceError, first_line
from ..model import compare
from ..model.allocations import Allocations
from ..model.memory import has_statistics
from ..trace import kernels
from ..trace.capture import Captured
from ..trace.model import call_arguments, model_step
from ..trace.trace import main_device

log = logging.getLogger(__name__)

# What two correct steps may differ by, in steps of the least exact type: sums in another order,
# through deep networks. A step that does something else is off by more.
_ROUNDING: Final = 2.0**13
_MOST: Final = 0.25
# What counts as within the budget: kernels of other shapes than those measured alone.
_OVER: Final = 1.05


class TrialError(TraceError):
    """A planned step that is not the model's, or not within its budget."""


def try_model(
    plain: Any,
    planned: Any,
    sample: Any,
    *,
    device: str,
    variables: Sequence[Any],
    captured: Captured | None,
    base_bytes: int,
    plan: Plan | MeasuredPlan,
) -> None:
    """Run a planned model's step beside the plain one.

    With a sample without values (tf.TensorSpec), and where a step has effects beside its variables
    (other ranks, Python), the planned step is only put together. The plain one is left out where
    the device has no memory for it.

    Parameters
    ----------
    plain, planned
        The model, and the planned one.
    variables
        What a step may change.
    captured
        The ops of the step; None where the model itself runs.
    base_bytes
        What counts beside the step.
    plan
        Whose budget is to be kept.

    Raises
    ------
    TrialError
        If the planned step cannot be put together or run, holds more than the budget, or comes to
        other results.
    """
    args = sample if isinstance(sample, tuple) else (sample,)
    step = model_step(planned)
    try:
        with warnings.catch_warnings():
            # What a user would be warned about is the trial's failure.
            warnings.simplefilter("ignore", PlanWarning)
            step.get_concrete_function(*call_arguments(sample))
    except Exception as error:
        raise TrialError(f"its planned step cannot be put together: {first_line(error)}") from error
    refused = planned.__dict__["sn_memory"].refused
    if refused:
        raise TrialError(f"its step is not the planned one: {next(iter(refused))}")
    if captured is not None and not _repeatable(captured):
        return
    if any(isinstance(it, tf.TensorSpec) for it in tf.nest.flatten(args)):
        return
    args = tf.nest.map_structure(as_tensor, args)

    def run() -> Any:
        return step(*args)

    with compare.put_back(variables):
        try:
            got = compare.results_of(run, variables)
        except tf.errors.OpError as error:
            raise TrialError(f"its planned step does not run: {first_line(error)}") from error
        if captured is not None and has_statistics(device):
            with Allocations(device) as found:
                run()
            held = base_bytes + found.peak_bytes
            if plan.budget_bytes is not None and held > _OVER * plan.budget_bytes:
                raise TrialError(
                    f"its planned step holds {show_bytes(held)} on the sample; the budget is "
                    f"{show_bytes(plan.budget_bytes)}"
                )
    if _has_room(plan.baseline_peak_bytes):
        _compare(plain, args, got, variables)


def _compare(plain: Any, args: Any, got: compare.Results, variables: Sequence[Any]) -> None:
    """Raise TrialError if the plain step's results are others, but for rounding and chance."""

    def plainly() -> compare.Results:
        step = model_step(plain)
        return compare.results_of(lambda: step(*args), variables)

    def nudged() -> compare.Results:
        with compare.nudged(plain.trainable_variables, unit):
            return plainly()

    unit = compare.unit_of(compute_dtypes(plain))
    allowed = min(_MOST, _ROUNDING * unit)
    try:
        expected = plainly()
        off = compare.relative_error(expected, got, nudged, unit)
        if off <= allowed:
            return
        if compare.relative_error(expected, plainly(), nudged, unit) > allowed:
            log.info("two plain steps differ by chance: the planned one was not compared")
            return
    except tf.errors.ResourceExhaustedError:
        log.info("no memory for the plain step: the planned one was not compared")
        return
    names = ", ".join(compare.different(expected, got)[:3])
    raise TrialError(
        f"its planned step comes to other results than the plain one: {off:.1e} of the largest "
        f"value ({names})"
    )


@contextmanager
def left_alone(model: Any) -> Iterator[None]:
    """Put back what calls of a model change beside variables.

    That is attributes of layers, with what is in their lists and dicts; the losses they collected;
    and the state of Python's and NumPy's generators of chance.
    """
    layers = model._flatten_layers()
    attributes = [(it, dict(it.__dict__)) for it in layers]
    inside = [
        (it, list(it.items() if isinstance(it, dict) else it))
        for layer in layers
        for it in layer.__dict__.values()
        if isinstance(it, list | dict)
    ]
    chance, numpys = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(chance)
        np.random.set_state(numpys)  # noqa: NPY002
        for layer, before in attributes:
            layer.__dict__.clear()
            layer.__dict__.update(before)
        for value, items in inside:
            _refill(value, items)
        for layer in layers:
            layer._clear_losses()


def _refill(value: Any, before: list[Any]) -> None:
    now = list(value.items() if isinstance(value, dict) else value)
    if len(now) == len(before) and all(_alike(*it) for it in zip(now, before, strict=True)):
        return
    value.clear()
    if isinstance(value, dict):
        value.update(dict(before))
    else:
        value.extend(before)


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other) == 2:
        return all(left is right for left, right in zip(one, other, strict=True))
    return one is other


def _repeatable(captured: Captured) -> bool:
    """Whether a step may be run an extra time: it changes nothing but variables."""
    effects = [it.op for it in captured.nodes if kernels.has_effect(it.op)]
    return all(kernels.changes_variables(it) and not kernels.is_collective(it) for it in effects)


def compute_dtypes(model: Any) -> list[Any]:
    """The types that the layers of a model compute in."""
    return [it.compute_dtype for it in model._flatten_layers() if it.compute_dtype is not None]


def as_tensor(leaf: Any) -> Any:
    """Return an array as a tensor, and anything else as it is."""
    plain = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    return tf.convert_to_tensor(leaf) if plain else leaf


def _has_room(needed_bytes: int) -> bool:
    """Whether the host has so much memory left; yes, where it does not say."""
    limit = smallest_limit()
    return limit is None or needed_bytes < limit.free_bytes


def asked(run: Callable[[], Any], variables: list[Any]) -> Allocations:
    """Run once from the present state, and return what ops asked for; variables are put back."""
    with compare.put_back(variables), Allocations(main_device()) as found:
        run()
    return found
