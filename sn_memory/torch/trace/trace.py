"""trace: record a training step of a model as a graph, without allocating anything.

`plan`, `estimate` and `verify` start here. capture.py records the calls, to_graph.py converts them
to a graph, op_seconds.py measures their seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.nn.utils.rnn import PackedSequence

from ...base.sizes import show_bytes
from ...cost.devices import NOMINAL, speeds
from ...graph.graph import Graph
from ...graph.liveness import peak, unplanned_bytes
from ...graph.records import Device, Storage, Workspace
from ..chunked_loss import is_chunked_loss
from ..model.sharded import is_sharded
from ..model.signature import cut_out, detached, tensors
from ..model.step import device_of, restore_rng_state
from ..model.wrapping import check_model, check_optimizer
from ..target.accelerator import working_device
from ..target.gpu import Gpu, gpu_of
from ..target.scratch import gpu_scratch_bytes
from .capture import capture
from .fake_step import fake_step, fake_step_on, optimizer_memory
from .op_seconds import Cost, known_costs, scratch_of, scratch_of_steps, timed
from .rearrange import (
    accumulate_in_place,
    defer_weight_grads,
    in_place,
    replace_shape_only_inputs,
    separate_sums,
    split_conv_backward,
)
from .record import Captured, Layouts, Recording
from .to_graph import GraphBinding, to_graph

log = logging.getLogger(__name__)

OPTIMIZER = "optimizer state"
LIBRARIES = "workspace of cuBLAS"
_NOTABLE = 1.005


@dataclass(frozen=True)
class Trace:
    """A traced training step.

    Parameters
    ----------
    named
        The graph with its names.
    captured
        The recorded calls.
    layouts
        Layouts that it was traced with.
    notes
        What is estimated, or counted in another way than the named GPU would run it.
    """

    named: GraphBinding
    captured: Captured
    layouts: Layouts | None = None
    notes: tuple[str, ...] = ()

    @property
    def graph(self) -> Graph:
        """The graph, for `plan_graph`, `check_plan` and the reports."""
        return self.named.graph

    @property
    def resident_bytes(self) -> int:
        """Resident bytes outside of the step: the optimizer's state."""
        return sum(storage.bytes for storage in self.graph.storages if storage.name == OPTIMIZER)


@dataclass(frozen=True)
class CallArguments:
    """A sample as the arguments of a call: positional and by keyword."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def call_arguments(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (args, kwargs) of a sample: a tuple is args, a mapping kwargs, anything else one arg.

    Computed tensors, e.g. results of a network before the model, become leaves: the backward pass
    of the sample ends at them. A packed sequence is one argument, though it is a tuple. A list
    means several samples to `plan`, and is refused here.
    """
    if isinstance(sample, list):
        raise TypeError(
            "got a list, which plan takes as several samples; expected one sample. A model whose "
            "first argument is a list takes a tuple: ([...],)."
        )
    if isinstance(sample, CallArguments):
        return sample.args, sample.kwargs
    if isinstance(sample, Mapping):
        return (), cut_out(detached(dict(sample)))
    if isinstance(sample, PackedSequence):
        return detached((sample,)), {}
    return cut_out(detached(sample if isinstance(sample, tuple) else (sample,))), {}


@restore_rng_state()
def trace(
    model: torch.nn.Module,
    sample: Any,
    *,
    profile: bool = True,
    device: Device | str | None = None,
    optimizer: Any = None,
    overlap: bool = False,
    layouts: Layouts | None = None,
    accumulate: bool = False,
    update: str = "step",
    unplanned: bool = True,
    ends: Sequence[bool] = (),
    arriving: Sequence[tuple[int, ...] | None] = (),
    part: bool = False,
    shares_inputs: bool = False,
) -> Trace:
    """Record a training step of a model as a graph. The model is left unchanged.

    The step is forward, loss, backward. The loss is an op outside of the plan that reads the
    outputs and makes their gradients. If a model returns its loss - one element by that name, or a
    tensor without dimensions as the first of a tuple - the loss is planned as well, and the
    backward pass begins only there.
    The backward pass is rearranged to hold less, without a change to any result: gradients of
    elementwise functions are computed in place, convolutions compute their gradients one by one,
    and gradients of parameters that are larger than their operands are computed last.

    Parameters
    ----------
    model
        In the mode (train, eval) in which it is trained. A model on the meta device counts as one
        on the CPU.
    sample
        Its input: a tensor; a tuple of positional arguments; a mapping of keyword arguments. Only
        shapes, strides, dtypes and devices matter.
    profile
        Time each op once per signature; the times are kept in a file in the user's cache folder.
        Otherwise, and for a model on the meta device, seconds are estimated by a roofline.
    device
        Speeds for the roofline and for transfers; default: measured, or nominal without `profile`.
        A name, e.g. "h100", is a GPU of the table (`sn_memory.cost.devices`): a model that is not
        on a GPU is traced as that one would run it, no op is timed, and seconds are predicted.
    optimizer
        An optimizer, or its class; its state is counted as resident.
    overlap
        Compute each gradient of a parameter as early as torch does, so that it can be sent then.
    layouts
        Observed layouts of kernels' results that differ from those of fake tensors: from the trial
        of `plan`.
    accumulate
        Gradients of parameters exist when the step begins, e.g. of earlier micro-batches, and new
        ones are accumulated one by one. Those that are larger than their operands are computed last
        only if that holds less.
    update
        With `hooks`, the caller's hooks update each parameter when its gradient is complete; see
        `state="hooks"` of `plan`. Other updates are not part of the trace.
    unplanned
        Also determine the peak of the model's own step, to which a budget in percent refers. It
        takes a second run without values.
    ends
        Per output that takes a gradient, whether the backward pass begins there. Default, also if
        their number differs: at the loss if there is one, else at all.

    Raises
    ------
    TraceError
        For a model whose control flow depends on values, or that a replay could not reproduce.

    Examples
    --------
    >>> import torch
    >>> import sn_memory.torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    >>> graph = sn_memory.torch.trace(model, torch.zeros(2, 4), profile=False).graph
    >>> [op.kind for op in graph.ops][:4]
    ['addmm', 'relu', 'addmm', 'loss']
    """
    args, kwargs = call_arguments(sample)
    if part:
        # The whole model was checked; a part may have no parameters: use its inputs' device.
        place = working_device([*model.parameters(), *tensors((args, kwargs))][0])
    else:
        check_model(model)
        place = device_of(model)
    check_optimizer(optimizer)
    gpu = gpu_of(device, place)
    if gpu is not None:
        # Nothing is timed for an absent GPU.
        place, profile = gpu.place, False
    captured = capture(model, args, kwargs, layouts, gpu, ends=ends, arriving=arriving, part=part)
    # The order matters: `in_place` leaves no sums that could be separated, and the choice of
    # substitutes for shape-only arguments depends on everything before.
    if shares_inputs:
        captured = separate_sums(captured)
    captured = split_conv_backward(in_place(captured))
    if update == "hooks":
        captured = replace_shape_only_inputs(accumulate_in_place(captured, early_update=True))
    else:
        captured = _arranged(captured, overlap=overlap, accumulate=accumulate)
    # The calls are final; now their costs, measured or from the table of devices. Accumulations
    # into existing gradients run once in any plan, and there may be no memory to time them: the
    # roofline is enough.
    device_speeds, costs = timed(
        captured.recording,
        place,
        profile=profile,
        device=speeds(device),
        untimed={*captured.summed.values()},
    )
    seconds = [cost and cost[0] for cost in costs]
    ways, notes = scratch_of_calls(captured.recording, place, costs, gpu)
    held = resident_storages(model, optimizer, gpu)
    plain_bytes = None
    # With the caller's hooks there is no such step without a plan.
    if unplanned and update == "step":
        plain_bytes = _plain_bytes(
            model, (args, kwargs), captured, gpu, accumulate=accumulate, profile=profile
        )
    if plain_bytes is not None:
        plain_bytes += sum(storage.bytes for storage in held)
    if accumulate:
        held = (*held, *_other_gradients(model, captured))
    named = to_graph(
        captured,
        name=type(model).__name__,
        device=device_speeds,
        seconds=seconds,
        allocator=_allocator(place),
        extra=held,
        ways=ways,
        # For other devices the state is on the host.
        random_state_bytes=torch.get_rng_state().nbytes if place.type in ("cpu", "meta") else 0,
        unplanned_peak_bytes=plain_bytes,
    )
    own = unplanned_bytes(named.graph)
    # The traced step may hold more than the plain step.
    if plain_bytes is not None and own > _NOTABLE * plain_bytes:
        notes += (
            f"percentages of a budget refer to {show_bytes(own)}, the peak of the traced step "
            f"without recomputation; the plain step's is {show_bytes(plain_bytes)}",
        )
    return Trace(named, captured, layouts, notes)


def _plain_bytes(
    model: torch.nn.Module,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    captured: Captured,
    gpu: Gpu | None,
    *,
    accumulate: bool,
    profile: bool,
) -> int | None:
    """Return the peak of a step without a plan, as in `estimate` and `verify`."""
    if is_sharded(model):
        # FSDP2's hooks would free what they have gathered for a forward pass in progress.
        return None
    constants = list(captured.recording.constants.values())
    try:
        if gpu is not None:
            return fake_step_on(gpu, model, arguments).peak_bytes
        scratch = scratch_of_steps(device_of(model), profile=profile)
        step = fake_step(model, arguments, constants, accumulate=accumulate, scratch=scratch)
        return step.peak_bytes
    except (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedOperatorException,
    ) as error:
        # A step without values knows values of other tensors than a trace, and may read unknown
        # ones. The trace can be planned nevertheless.
        log.info("the peak without a plan is that of the traced step: %s", error)
        return None


def scratch_of_calls(
    recording: Recording, place: torch.device, costs: Sequence[Cost], gpu: Gpu | None = None
) -> tuple[list[tuple[Workspace, ...]], tuple[str, ...]]:
    """Return the workspaces of each call's kernel, and notes about them."""
    sizes = []
    for call, cost in zip(recording.calls, costs, strict=True):
        if gpu is None or is_chunked_loss(call.target):
            sizes.append(scratch_of(call, recording, place, cost))
        else:
            forms = [view.form for view in call.views]
            sizes.append(gpu_scratch_bytes(call.name, forms, gpu.named))
    ways: list[tuple[Workspace, ...]] = [(Workspace(size),) if size else () for size in sizes]
    if gpu is not None:
        return ways, tuple(gpu.notes)
    by_rule = [size for size, cost in zip(sizes, costs, strict=True) if cost is None and size]
    if not by_rule:
        return ways, ()
    return ways, (
        f"scratch of {len(by_rule)} of {len(sizes)} ops, {show_bytes(max(by_rule))} at most, is "
        "by an upper rule; where ops are timed it is measured",
    )


def _arranged(captured: Captured, *, overlap: bool, accumulate: bool) -> Captured:
    """Order the backward pass such that it holds less."""
    if not accumulate:
        return replace_shape_only_inputs(captured if overlap else defer_weight_grads(captured))
    as_torch = replace_shape_only_inputs(accumulate_in_place(captured))
    if overlap:
        return as_torch
    # An accumulated gradient is not held; if it is computed last, its operands are held instead.
    return min(
        as_torch,
        replace_shape_only_inputs(accumulate_in_place(defer_weight_grads(captured))),
        key=_peak_bytes,
    )


def _peak_bytes(captured: Captured) -> int:
    seconds = [None] * len(captured.recording.calls)
    return peak(to_graph(captured, name="", device=NOMINAL, seconds=seconds).graph).bytes


def _other_gradients(model: torch.nn.Module, captured: Captured) -> tuple[Storage, ...]:
    """Return existing gradients that the step does not add to, as one storage."""
    counted = {name for name, _ in captured.earlier}
    held = sum(
        param.grad.nbytes
        for name, param in model.named_parameters()
        if param.grad is not None and name not in counted
    )
    return (Storage("gradients that stay as they are", held, "state"),) if held else ()


def trace_unplanned(
    model: torch.nn.Module, sample: Any, device: Device | None = None, gpu: Gpu | None = None
) -> Trace:
    """Record a training step as torch runs it without a plan; like `trace`, but no op is timed.

    device : speeds for the roofline; gpu : where it will run, if not on the model's device
    """
    args, kwargs = call_arguments(sample)
    captured = in_place(capture(model, args, kwargs, gpu=gpu), sums_only=True)
    place = device_of(model) if gpu is None else gpu.place
    recording, unknown = captured.recording, [None] * len(captured.recording.calls)
    # Only scratch is taken from earlier measurements; all seconds are from the roofline.
    costs = known_costs(recording, place) if gpu is None else unknown
    ways, notes = scratch_of_calls(recording, place, costs, gpu)
    named = to_graph(
        captured,
        name=type(model).__name__,
        device=device or NOMINAL,
        seconds=unknown,
        allocator=_allocator(place),
        ways=ways,
    )
    return Trace(named, captured, notes=notes)


def resident_storages(
    model: torch.nn.Module, optimizer: Any, gpu: Gpu | None = None
) -> tuple[Storage, ...]:
    """Return resident storages outside of the step: the optimizer's state.

    On a GPU that is not here, also the workspace that cuBLAS keeps from the first product on.
    """
    held = [] if gpu is None else [Storage(LIBRARIES, gpu.named.kept_bytes, "state")]
    if optimizer is not None:
        state = optimizer_memory(model, optimizer, gpu).state_bytes
        held.insert(0, Storage(OPTIMIZER, state, "state"))
    return tuple(held)


def resident_bytes(model: torch.nn.Module, optimizer: Any) -> int:
    """Return the resident bytes outside of the step."""
    return sum(storage.bytes for storage in resident_storages(model, optimizer))


def _allocator(place: torch.device) -> str:
    return "torch" if place.type == "cuda" else "none"
