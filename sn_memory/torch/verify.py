"""verify: compare a planned model with the plain one, and predictions with measurements."""

from __future__ import annotations

from typing import Any

import torch

from ..base.errors import PlanError
from ..run.planned import Verification
from .model.results import differences
from .model.step import Loss, Measured, device_of, measured_step, wanted_bytes
from .model.wrapping import RECORD, plain_model
from .planned import PlanRecord
from .step import Step
from .trace.trace import call_arguments


def verify(
    model: torch.nn.Module, sample: Any, *, loss: Loss | None = None, accumulate: bool = False
) -> Verification:
    """Run a training step with the plan and without it, and compare.

    Call it where the training loop calls the forward pass, inside `torch.autocast` if the loop does
    so; the backward pass runs outside of it. Buffers, gradients and the state of the random number
    generator are restored afterwards. The step without the plan needs its full memory.

    Parameters
    ----------
    model
        Made by `plan`.
    sample
        A real input like the one it was planned for.
    loss
        Computes the loss from what the model returns. By default it is the `loss` that the model
        returns; if it returns none, the outputs' gradients are random (1 for a scalar), the same in
        both runs.
    accumulate
        Run both steps with existing gradients of parameters (zeros), as later micro-batches do.

    Raises
    ------
    PlanError
        If the model is not planned, or not for this input; or if its step updates parameters: with
        its state on the host, where the step without the plan has no room, or by hooks.
    """
    record: PlanRecord | None = model.__dict__.get(RECORD)
    arguments = call_arguments(sample)
    kind = step = None
    if record is not None:
        kind = record.inputs.known(record.guards.signature_of(model, arguments))
        step = None if kind is None else record.steps.get(kind)
    if record is None or step is None:
        why = "" if record is None or kind is None else f": {record.inputs.unlike(kind, model)}"
        raise PlanError(
            f"the model has no plan for this sample{why}; call verify with what "
            "sn_memory.torch.plan returned, and with a sample like the one it was given."
        )
    if record.options.state is not None:
        raise PlanError(
            "verify runs a training step, and a step of a model with its state on the host updates "
            "parameters. Compare losses of a few steps with those of a copy that is not planned."
        )
    if record.options.update == "hooks":
        raise PlanError(
            "the model was planned with state='hooks', and in verify no hook frees the gradients, "
            "so all of them would be held. Compare some steps of your own, inside a StorageTracker "
            "for the peak."
        )
    running: Step = step
    # On the CPU, host memory and device memory have the same allocator, so the arenas for copies,
    # which are allocated in the first step, would count.
    copies = bool(running.ignored or running.plan.decided("offload"))
    kernels = device_of(model).type == "cpu" and not copies
    by_allocator = running.by_allocator
    # Known from the plain step, which runs first.
    written: list[torch.Tensor] | None = None

    def plain(*args: Any, **kwargs: Any) -> Any:
        # Made in each call, so that it has the attributes that the model has at that time.
        return plain_model(model)(*args, **kwargs)

    def measured(run: Any, *, count: bool) -> Measured:
        return measured_step(
            run,
            model,
            arguments,
            written=written,
            known=running.known,
            ignored=running.ignored,
            count=count,
            loss=loss,
            accumulate=accumulate,
            by_allocator=run is model and by_allocator,
            kernels=count and kernels,
        )

    expected = measured(plain, count=True)
    named = model.named_parameters()
    written = [param for name, param in named if f"parameter {name}" in expected.results]
    earlier_bytes = 0
    if accumulate:
        # The first such step plans for existing gradients, if they need a plan of their own.
        measured(model, count=False)
        running = record.inputs.later.get(running, running)
        earlier_bytes = 0 if running.counts_gradients else wanted_bytes(model)
    got = measured(model, count=True)
    different = differences(expected.results, got.results)
    # Without counting, which itself takes time; the shorter of two, as other processes only add.
    planned_s = min(measured(model, count=False).seconds for _ in range(2))
    plain_s = min(measured(plain, count=False).seconds for _ in range(2))
    return Verification(
        predicted_peak_bytes=running.plan.peak_bytes + earlier_bytes,
        measured_peak_bytes=got.peak_bytes + running.resident_bytes,
        unplanned_peak_bytes=expected.peak_bytes + running.resident_bytes,
        peak_op=got.peak_op,
        predicted_s=running.plan.seconds,
        measured_s=planned_s,
        unplanned_s=plain_s,
        different=tuple(different),
        difference=max(different.values(), default=0.0),
        _planned=record,
    )
