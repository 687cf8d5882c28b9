"""verify: a planned model and the plain one side by side; what was predicted, what came true."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from ..errors import PlanError
from ..sizes import show_bytes
from .apply import RECORD, Planned, plain_model, signature
from .neutral import main_device
from .replay import Replay
from .trace import OPTIMIZER, call_arguments
from .tracker import StorageTracker


@dataclass(frozen=True)
class Verification:
    """What a training step did with the plan and without.

    Parameters
    ----------
    predicted_peak_bytes, measured_peak_bytes
        Of the planned step; measured by StorageTracker.
    unplanned_peak_bytes
        The same step without the plan, measured.
    peak_op
        What ran when the planned step reached its peak.
    predicted_s, measured_s, unplanned_s
        Seconds of the step; the last two measured without the tracker, the better of two runs.
    different
        Outputs, gradients and buffers that are not bit-equal to the unplanned run's.
    """

    predicted_peak_bytes: int
    measured_peak_bytes: int
    unplanned_peak_bytes: int
    peak_op: str
    predicted_s: float
    measured_s: float
    unplanned_s: float
    different: tuple[str, ...]
    _planned: Planned = field(repr=False, compare=False)

    @property
    def equal(self) -> bool:
        """Whether all outputs, gradients and buffers are bit-equal."""
        return not self.different

    @property
    def error(self) -> float:
        """Measured peak over predicted peak, less one."""
        return self.measured_peak_bytes / self.predicted_peak_bytes - 1

    def report(self, path: str | Path) -> None:
        """Write the plan's HTML page; needs matplotlib."""
        self._planned.report(path)

    def __str__(self) -> str:
        result = "bit-equal" if self.equal else f"different: {', '.join(self.different)}"
        return (
            f"peak {show_bytes(self.measured_peak_bytes)} at {self.peak_op}, predicted "
            f"{show_bytes(self.predicted_peak_bytes)} ({self.error:+.2%}), without the plan "
            f"{show_bytes(self.unplanned_peak_bytes)}\n"
            f"{self.measured_s:.3g} s, predicted {self.predicted_s:.3g} s, without the plan "
            f"{self.unplanned_s:.3g} s\noutputs, gradients and buffers: {result}"
        )


@dataclass(frozen=True)
class _Step:
    """Results of one step, by name, and its peak."""

    results: dict[str, torch.Tensor | None]
    peak_bytes: int
    peak_op: str


def verify(model: torch.nn.Module, sample: Any) -> Verification:
    """Run a training step with the plan and without, and compare.

    In place of a loss, the outputs' gradients are random (1 for a scalar), the same in both runs.
    Buffers, gradients and the state of the random number generator are put back afterwards. The
    step without the plan needs the memory it needs.

    Parameters
    ----------
    model
        Made by `plan`.
    sample
        A real input like the one it was planned for.

    Raises
    ------
    PlanError
        If the model is not planned, or not for this input.
    """
    record = model.__dict__.get(RECORD)
    args, kwargs = call_arguments(sample)
    replay = record and record.replays.get(signature(model, args, kwargs))
    if replay is None:
        raise PlanError(
            "the model has no plan for this sample; call verify with what "
            "sn_memory.torch.plan returned, and with a sample like the one it was given."
        )
    plain = plain_model(model)
    with _restored(model, sample):
        expected = _step(plain, sample, replay)
        got = _step(model, sample, replay)
        planned_s = min(_seconds(model, sample, replay) for _ in range(2))
        plain_s = min(_seconds(plain, sample, replay) for _ in range(2))
    graph = record.trace.graph
    beside = sum(it.bytes for it in graph.storages if it.name == OPTIMIZER)
    return Verification(
        predicted_peak_bytes=record.plan.peak_bytes,
        measured_peak_bytes=got.peak_bytes + beside,
        unplanned_peak_bytes=expected.peak_bytes + beside,
        peak_op=got.peak_op,
        predicted_s=record.plan.seconds,
        measured_s=planned_s,
        unplanned_s=plain_s,
        different=tuple(
            name
            for name in expected.results.keys() | got.results.keys()
            if not _same(expected.results.get(name), got.results.get(name))
        ),
        _planned=record,
    )


def _step(model: torch.nn.Module, sample: Any, replay: Replay) -> _Step:
    """Run one step from the present state of random numbers and buffers; put both back."""
    args, kwargs = call_arguments(sample)
    device = main_device(replay.captured)
    inputs = _drop_gradients(model, sample)
    chance = torch.get_rng_state()
    buffers = {name: it.clone() for name, it in model.named_buffers()}
    known = [*model.parameters(), *model.buffers(), *inputs]
    known += list(replay.captured.recording.constants.values())
    tracker = StorageTracker(
        known,
        device=device,
        allocator="torch" if device.type == "cuda" else "none",
        ignored=[arena.block for arena in replay.program.arenas],
    )
    with tracker:
        outputs = tree_flatten(model(*args, **kwargs))[0]
    ends, tangents = _tangents(outputs)
    for tangent in tangents:
        tracker.meet(tangent)
    with tracker:
        torch.autograd.backward(ends, tangents)
    results = {f"output {place}": it for place, it in enumerate(outputs) if _is_tensor(it)}
    results |= {f"gradient of {name}": it.grad for name, it in model.named_parameters()}
    results |= {f"gradient of input {place}": it.grad for place, it in enumerate(inputs)}
    results |= {f"buffer {name}": it.clone() for name, it in model.named_buffers()}
    for name, buffer in model.named_buffers():
        buffer.data.copy_(buffers[name])
    torch.set_rng_state(chance)
    return _Step(results, tracker.peak_bytes, tracker.peak_op)


def _drop_gradients(model: torch.nn.Module, sample: Any) -> list[torch.Tensor]:
    """Drop all gradients, not fill them: others may hold the tensors. Returns the input tensors."""
    inputs = [it for it in tree_flatten(call_arguments(sample))[0] if _is_tensor(it)]
    for leaf in (*model.parameters(), *inputs):
        if leaf.is_leaf:
            leaf.grad = None
    return inputs


def _seconds(model: torch.nn.Module, sample: Any, replay: Replay) -> float:
    args, kwargs = call_arguments(sample)
    _drop_gradients(model, sample)
    began = _now(replay)
    ends, tangents = _tangents(tree_flatten(model(*args, **kwargs))[0])
    torch.autograd.backward(ends, tangents)
    return _now(replay) - began


def _now(replay: Replay) -> float:
    device = main_device(replay.captured)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _tangents(outputs: list[Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the outputs that take gradients, and gradients for them, always the same."""
    ends = [it for it in outputs if _is_tensor(it) and it.requires_grad]
    tangents = []
    for place, end in enumerate(ends):
        tangent = torch.empty_like(end)
        generator = torch.Generator(end.device).manual_seed(place)
        tangents.append(tangent.normal_(generator=generator) if end.dim() else tangent.fill_(1.0))
    return ends, tangents


@contextmanager
def _restored(model: torch.nn.Module, sample: Any) -> Iterator[None]:
    """Put back gradients, buffers and the random number generator."""
    leaves = [*model.parameters(), *(it for it in tree_flatten(sample)[0] if _is_tensor(it))]
    gradients = [(it, it.grad) for it in leaves if it.is_leaf]
    buffers = [(it, it.clone()) for it in model.buffers()]
    chance = torch.get_rng_state()
    try:
        yield
    finally:
        for leaf, gradient in gradients:
            leaf.grad = gradient
        for buffer, value in buffers:
            buffer.data.copy_(value)
        torch.set_rng_state(chance)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _same(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    return left.dtype == right.dtype and torch.equal(
        left.detach().contiguous().view(-1).view(torch.uint8) if left.numel() else left,
        right.detach().contiguous().view(-1).view(torch.uint8) if right.numel() else right,
    )
