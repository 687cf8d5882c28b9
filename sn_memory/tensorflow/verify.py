"""verify: comparison of a planned step with the plain one, and of predictions with measurements."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import tensorflow as tf

from ..base.errors import PlanError
from ..run.planned import Verification
from .memory import Allocations, main_device
from .model import (
    Results,
    as_tensors,
    compute_dtypes,
    different,
    model_step,
    nudged,
    put_back,
    relative_error,
    results_of,
    unit_of,
    update_step,
    variables_of,
    wait_for,
)
from .planned import RECORD, PlannedStep, PlanRecord, plain_model
from .trace.small_blocks import small_bytes


def verify(model: Any, sample: Any) -> Verification:
    """Run a training step with and without the plan, and compare.

    For a model, results, gradients and variables are compared after a step with a loss (the squared
    distance from fixed values) and an update by `keras.optimizers.SGD(1.0)`; bytes and seconds are
    those of a step with random gradients of the outputs in place of a loss. For a step function,
    results and all variables it touches are compared. Variables are restored afterwards. The plain
    step has to fit into the device's memory.

    Parameters
    ----------
    model
        Planned by `plan` or `plan_step`.
    sample
        A real input of a kind that it was planned for; for any other kind it is planned first.

    Raises
    ------
    PlanError
        If it is not planned.
    TraceError
        If the device's allocator has no statistics, or a profiler runs.
    """
    record: PlanRecord | None = getattr(model, "__dict__", {}).get(RECORD)
    if record is None:
        raise PlanError(
            "this has no plan; call verify with what sn_memory.tensorflow.plan or plan_step "
            "returned."
        )
    # The plain one first, then the planned one. For a model, `whole` are steps with an update, as
    # only those show an op that reads a weight too late.
    if isinstance(model, PlannedStep):
        args = sample if isinstance(sample, tuple) else (sample,)
        plain = model.plain if hasattr(model.plain, "python_function") else tf.function(model.plain)
        runs: list[Callable[[], Any]] = [lambda: plain(*args), lambda: model(*args)]
        whole = runs
    else:
        args = as_tensors(sample)
        models = (plain_model(model), model)
        steps = [model_step(model) for model in models]
        runs = [partial(step, *args) for step in steps]
        whole = [partial(update_step(model), *args) for model in models]
    if record.traced is None:
        touched, dtypes = variables_of(model), compute_dtypes(model)
    else:
        touched = list(record.traced.captured.variables.values())
        dtypes = [tensor.dtype for tensor in record.traced.captured.tensors]
    # Each once: restored twice, a variable would end with an intermediate value.
    variables = list({id(v): v for v in touched}.values())
    unit = unit_of(dtypes)

    def with_nudged_weights() -> Results:
        with nudged([v for v in variables if v.trainable], unit):
            return results_of(whole[0], variables)

    with put_back(variables):
        expected, got = (results_of(run, variables) for run in whole)
        error = relative_error(expected, got, with_nudged_weights, unit)
        # Before bytes are counted: the first call of a function also traces and folds constants.
        seconds = [min(_seconds(run, variables) for _ in range(2)) for run in runs]
        unplanned, measured = (_allocations(run, variables) for run in runs)
    # The program or layer choice that the planned step was last built from.
    step = record.running
    assert step is not None
    plan, base = step.plan, step.base_bytes
    small = [0, 0]
    if step.counts_small_blocks:
        graphs = [step.get_concrete_function(*args).graph for step in steps]
        small = [small_bytes(graph, main_device()) for graph in graphs]
    return Verification(
        predicted_peak_bytes=plan.peak_bytes,
        measured_peak_bytes=base + measured.peak_bytes + small[1],
        unplanned_peak_bytes=base + unplanned.peak_bytes + small[0],
        allocated_peak_bytes=base + measured.allocated_peak_bytes + small[1],
        peak_op=step.peak_op,
        predicted_s=plan.seconds,
        measured_s=seconds[1],
        unplanned_s=seconds[0],
        different=different(expected, got),
        difference=error,
        _planned=record,
    )


def _allocations(run: Callable[[], Any], variables: list[Any]) -> Allocations:
    with put_back(variables), Allocations(main_device()) as asked_for:
        run()
    return asked_for


def _seconds(run: Callable[[], Any], variables: list[Any]) -> float:
    with put_back(variables):
        began = time.perf_counter()
        wait_for(run())
        return time.perf_counter() - began
