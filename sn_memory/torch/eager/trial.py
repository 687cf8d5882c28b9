"""A trial: the planned step and the model's own, each run once on the sample and compared.

Plans are made from traces under fake tensors. The layouts of fake results may differ from those of
kernels, and a model may check for fake tensors and take another branch. A trace shows neither, one
real step shows both. The model is left unchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...base.host import smallest_limit
from ..errors import ReplayError, TraceError, fails_on_sample, first_line, innermost_line
from ..model.results import differences
from ..model.sharded import somewhere
from ..model.signature import tensors
from ..model.step import around, device_of, measured_step, restore_step
from ..model.tracker import is_profiled
from ..step import Step
from ..target.accelerator import free_bytes, is_apart
from ..trace.record import Layouts

# Differences up to here are explained by another order of summation: some hundred roundings.
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.02, torch.float16: 0.01}

# How many times the difference of two plain steps a planned step may differ. On CUDA two steps in
# TF32 with nondeterministic sums differ as much by chance (ResNet-50: 6.1e-3 and 6.3e-3).
NOISE = 4

# How often a step is retraced with layouts that kernels were observed to use.
_ROUNDS = 8


T = TypeVar("T", bound=Step)


@dataclass(frozen=True)
class Trial:
    """Result of a trial.

    compared : whether the planned step was compared with the model's own
    different : outputs, gradients and buffers that were not bit-equal, with their differences; see
        `results.differences`.
    failure : why the plan must not be used; empty if it may be.
    remark : other information: why nothing was compared, or what the difference is.
    layouts : results that kernels lay out differently than traced. The step has to be traced again,
        and nothing else was checked.
    plain_peak_bytes : the peak that the model's own step took from the CPU's allocator; 0 if it was
        not counted.
    """

    compared: bool
    different: dict[str, float]
    failure: str = ""
    remark: str = ""
    layouts: Layouts = field(default_factory=dict)
    plain_peak_bytes: int = 0

    @property
    def difference(self) -> float:
        """The largest difference; 0 if everything is bit-equal."""
        return max(self.different.values(), default=0.0)


def tried(
    step: Step,
    model: torch.nn.Module,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    *,
    plain_bytes: int,
    counted: bool = False,
) -> Trial:
    """Run a planned step once on the sample, and the model's own if memory allows; compare.

    plain_bytes : what the model's own step needs at its peak
    counted : whether to measure the memory of the model's own step, on the CPU

    Raises SampleError if the model's own step fails on the sample.
    """
    if not _has_memory(model, arguments):
        return Trial(False, {}, remark="the model or the sample has no memory")

    noted: Layouts = {}
    # Ranks that share parameters run the same steps.
    enough = not somewhere(model, not enough_memory(plain_bytes, device_of(model)))
    # The planned step first: if kernels lay results out differently, the model's own is not run.
    try:
        with _noting(step, noted):
            got = measured_step(around(model, step.run), model, arguments, count=False)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - any error would also occur in training
        # Recorded layouts are reason enough to trace again. Otherwise: does the plan fail, or the
        # sample?
        if enough and not noted:
            try:
                measured_step(model, model, arguments, count=False)
            except Exception as own:
                raise fails_on_sample(type(model).__name__, *arguments, own) from own
        if not noted:
            return Trial(False, {}, failure=f"{type(error).__name__}: {first_line(error)}")
    if noted:
        return Trial(False, {}, layouts=noted)
    if not enough:
        return Trial(False, {}, remark="the model's own step may not fit into the memory there is")
    # Counted by a profiler, and torch allows one at a time.
    counted = counted and device_of(model).type == "cpu" and not is_profiled()
    try:
        expected = measured_step(model, model, arguments, count=counted, kernels=counted)
        plain_peak_bytes = expected.peak_bytes if counted else 0
        different = differences(expected.results, got.results)
        if not somewhere(model, bool(different)):
            return Trial(True, {}, plain_peak_bytes=plain_peak_bytes)
        # Kernels that sum in nondeterministic order differ from run to run.
        second = differences(
            expected.results, measured_step(model, model, arguments, count=False).results
        )
    except torch.OutOfMemoryError:
        return Trial(False, {}, remark="the model's own step does not fit into memory")
    results = [result for result in expected.results.values() if result is not None]
    trial = _judged(different, second, (*model.parameters(), *results))
    if somewhere(model, bool(trial.failure)) and not trial.failure:
        return Trial(True, different, failure="on another rank its results are not the model's")
    reason = "" if step.trace is None else _reason(model, arguments)
    remark = f"{trial.remark}{reason}"
    return replace(trial, remark=remark, plain_peak_bytes=plain_peak_bytes)


def runs_on(model: torch.nn.Module, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
    """Raise SampleError if a model's forward pass, run without gradients, fails on a sample."""
    if not _has_memory(model, arguments):
        return
    args, kwargs = arguments
    try:
        with restore_step(model, arguments), torch.no_grad():
            model(*args, **kwargs)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise fails_on_sample(type(model).__name__, args, kwargs, error) from error


@contextmanager
def after_first(model: torch.nn.Module, arguments: Any) -> Iterator[None]:
    """Put a model into the state after a first forward pass inside; restore it afterwards."""
    if not _has_memory(model, arguments):
        raise TraceError(
            "the forward pass sets attributes in its first run, which needs a model and a sample "
            "with memory. Pass these."
        )
    args, kwargs = arguments
    with restore_step(model, arguments) as written:
        with torch.no_grad():
            model(*args, **kwargs)
        if written.weights():
            raise TraceError(
                "the forward pass sets attributes and writes into parameters in its first run, as "
                "one that initialises them does. Run one step before planning."
            )
        yield


class _Reads(TorchDispatchMode):
    """Records where the forward pass reads a tensor's value."""

    def __init__(self) -> None:
        super().__init__()
        self.place = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and not self.place:
            self.place = innermost_line(sys._getframe(1))
        return func(*args, **(kwargs or {}))


def _reason(model: torch.nn.Module, arguments: Any) -> str:
    """Return what may make a replay round differently, if it is known."""
    args, kwargs = arguments
    with restore_step(model, arguments), torch.no_grad(), _Reads() as reads:
        model(*args, **kwargs)
    if not reads.place:
        return ""
    return (
        f"; with real tensors the model reads values ({reads.place}) and may take another "
        "branch than under fake ones"
    )


def until_laid_out(
    first: Layouts, planned_with: Callable[[Layouts], T], run: Callable[[T], None]
) -> tuple[T, Layouts]:
    """Plan and run a step until all kernels use the traced layouts; return it, and the layouts.

    Results computed from one with another layout may have other layouts too, so steps are planned
    and run until none is new.
    """
    seen = dict(first)
    step = planned_with(seen)
    for _ in range(_ROUNDS):
        new: Layouts = {}
        try:
            with _noting(step, new):
                run(step)
        except ReplayError:
            # A kernel may fail on the traced layout of its input; that layout was recorded.
            if not new:
                raise
        if not new.keys() - seen.keys():
            break
        seen |= new
        step = planned_with(seen)
    return step, seen


@contextmanager
def _noting(step: Step, layouts: Layouts) -> Iterator[None]:
    step.layouts = layouts
    try:
        yield
    finally:
        step.layouts = None


def _judged(
    different: dict[str, float], alone: dict[str, float], seen: Sequence[torch.Tensor]
) -> Trial:
    if not different:
        return Trial(True, {})
    worst = max(different, key=lambda name: different[name])
    says = f"{len(different)} results differ, at most {worst} by {different[worst]:.1e} of its size"
    # Before tolerances of dtypes: nondeterminism explains a difference of any size.
    if NOISE * max(alone.values(), default=0.0) >= different[worst]:
        return Trial(True, different, remark=f"{says}, as two steps without the plan do")
    if different[worst] > max(ROUNDING.get(tensor.dtype, 0.0) for tensor in seen):
        return Trial(True, different, failure=f"its results are not those of the model: {says}")
    return Trial(True, different, remark=says)


def _has_memory(model: torch.nn.Module, arguments: Any) -> bool:
    return is_real((*tensors(arguments), *model.parameters(), *model.buffers()))


def is_real(held: Sequence[torch.Tensor]) -> bool:
    """Whether these tensors have memory and values."""
    return not any(tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in held)


def enough_memory(nbytes: int, device: torch.device) -> bool:
    """Whether a step of this peak fits into free memory; twice on a host, as a full one stalls."""
    if is_apart(device):
        free = free_bytes(device)
        return free is not None and nbytes < free
    limit = smallest_limit()
    return limit is not None and 2 * nbytes < limit.free_bytes
