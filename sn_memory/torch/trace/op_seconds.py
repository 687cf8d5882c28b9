"""Seconds of each call: measured once per signature, kept in a file.

A signature is the op, and of each tensor its shape, strides and type. Tensors of that form are made
anew, so that one op's working set is all the memory needed; a model too large to run can be timed.
What may not be timed so (timeable.py) or cannot (an op that checks its values) is left to the
roofline, and the plan says how many ops are.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch

from ...cost.devices import NOMINAL
from ...cost.measured import is_seconds
from ...cost.op_times import OpTimes, plain_name, quickest, while_time_lasts
from ...graph.records import Device
from ..device.accelerator import is_apart, module_of, synchronize
from .record import Call, Recording, View
from .timeable import timeable

log = logging.getLogger(__name__)

# Per device and settings, with how many elements its speeds were measured, and the speeds.
_MEASURED: dict[tuple[str, str], tuple[int, Device]] = {}
_TRAINING: ContextVar[bool] = ContextVar("sn_memory.training", default=False)


@contextmanager
def while_training() -> Iterator[None]:
    """Let nothing be measured inside: what is not known yet takes memory that a budget lacks."""
    token = _TRAINING.set(True)
    try:
        yield
    finally:
        _TRAINING.reset(token)


class NotMeasured(Exception):  # noqa: N818 - says that something else stands in
    """A model trains, and what is asked for was not measured before."""


def not_while_training() -> None:
    """Raise NotMeasured within `while_training`."""
    if _TRAINING.get():
        raise NotMeasured


def measured_seconds(recording: Recording, device: torch.device) -> list[float | None]:
    """Return seconds per call on a device; None for calls that could not or may not be timed."""
    calls = {at: call for at, call in enumerate(recording.calls) if timeable(call)}
    works = [(signature(it), partial(_time, it, recording, device)) for it in calls.values()]
    found = dict(zip(calls, cached_seconds(works, device), strict=True))
    return [found.get(at) for at in range(len(recording.calls))]


def cached_seconds(
    works: Sequence[tuple[str, Callable[[], float | None]]], device: torch.device
) -> list[float | None]:
    """Return seconds per (signature, function that measures them), from the file where it can."""
    times = OpTimes(cache_name(device), is_seconds, circumstances())
    keys = [times.key(text) for text, _ in works]
    missing = {
        key: measure
        for key, (_, measure) in zip(keys, works, strict=True)
        if key not in times.table
    }
    if not _TRAINING.get():
        times.table.update(while_time_lasts(missing))
        times.save(device)
    return [times.table.get(key) for key in keys]


def circumstances() -> str:
    """Settings of torch under which the same call takes another time, or runs another kernel."""
    backends: Any = torch.backends
    products = backends.cuda.matmul
    settings = {
        "float32": _precisions(),
        "reduced": (
            products.allow_fp16_reduced_precision_reduction,
            products.allow_bf16_reduced_precision_reduction,
        ),
        "cudnn": (
            backends.cudnn.enabled,
            backends.cudnn.benchmark,
            backends.cudnn.deterministic,
        ),
        "mkldnn": getattr(backends.mkldnn, "enabled", None),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
    }
    return str(settings)


def _precisions() -> list[Any]:
    """How products in float32 are rounded, by library."""
    backends: Any = torch.backends
    try:
        places = (
            backends.cuda.matmul,
            *(backends.cudnn.conv, backends.cudnn.rnn),
            *(backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn),
        )
        # Not by allow_tf32 and its kin, which raise when somebody has set these.
        return [it.fp32_precision for it in places]
    except AttributeError:  # before torch 2.9
        flags = backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32
        return [torch.get_float32_matmul_precision(), *flags]


def cache_name(device: torch.device) -> str:
    """Name of the file of times for a device, this torch and this number of threads."""
    if is_apart(device):
        what = module_of(device).get_device_name(device)
    else:
        what = f"{device.type}-{torch.get_num_threads()}-{torch.backends.cpu.get_cpu_capability()}"
    return f"op-seconds-2-{plain_name(what)}-torch-{torch.__version__}.json"


def signature(call: Call) -> str:
    """What the time of a call depends on, as text."""
    numbers: dict[int, int] = {}
    parts = []
    for arg in call.flat:
        if isinstance(arg, View):
            # Whether two arguments share their storage matters: an op in place reads less.
            same = numbers.setdefault(arg.storage, len(numbers))
            parts.append(f"{arg.dtype}{arg.size}{arg.stride}@{same}")
        else:
            parts.append(repr(arg))
    return f"{call.target}({', '.join(parts)}){call.spec}"


def measured_device(device: torch.device, room_bytes: int) -> Device:
    """Return the speeds of a device, measured: matrix products, copies, transfers.

    They are measured once in a process, anew only with more room; while a model trains never.

    room_bytes : what the largest op takes that is timed, so that this takes no more
    """
    count = max(min(1 << 24, room_bytes // 12), 1 << 12)
    key = (str(device), circumstances())
    measured, speeds = _MEASURED.get(key, (0, NOMINAL))
    if measured >= count or _TRAINING.get():
        return speeds
    side = min(8192 if is_apart(device) else 1024, math.isqrt(count))
    left = torch.rand(side, side, device=device)
    product_s = best_seconds(partial(torch.mm, left, left), device)
    del left
    block = torch.rand(count, device=device)
    target = torch.empty_like(block)
    copy_s = best_seconds(partial(target.copy_, block), device)
    del target
    to_host, back = transfer_speeds(block)
    speeds = Device(
        str(device), 2 * side**3 / product_s, 2 * block.nbytes / copy_s, to_host, back, 1e-5
    )
    _MEASURED[key] = (count, speeds)
    return speeds


def largest_bytes(recording: Recording) -> int:
    """Return the bytes of what the largest call reads, makes and writes."""
    touched = ({*it.reads, *it.makes, *it.writes} for it in recording.calls)
    return max((sum(recording.nbytes[it] for it in each) for each in touched), default=0)


def transfer_speeds(block: torch.Tensor) -> tuple[float, float]:
    """Return bytes per second from a block's device to the host, pinned memory, and back."""
    device = block.device
    host = torch.empty_like(block, device="cpu", pin_memory=is_apart(device))
    to_host_s = best_seconds(lambda: host.copy_(block), device)
    back_s = best_seconds(lambda: block.copy_(host), device)
    return block.nbytes / to_host_s, block.nbytes / back_s


def rebuilt(call: Call, recording: Recording) -> Callable[[], Any]:
    """Return a call on tensors made anew in the form of those it was recorded with."""
    storages: dict[int, torch.UntypedStorage] = {}
    # One storage may be looked at as floats and as integers, where only the shape of the floats is
    # asked for; the integers decide, as they are places in memory.
    types = {it.storage: it.dtype for it in call.flat if isinstance(it, View)}
    types |= {
        it.storage: it.dtype
        for it in call.flat
        if isinstance(it, View) and not it.dtype.is_floating_point
    }

    def made(view: View) -> torch.Tensor:
        place = recording.device[view.storage]
        if view.storage not in storages:
            kind = types[view.storage]
            storages[view.storage] = _filled(recording.nbytes[view.storage], kind, place)
        empty = torch.empty(0, dtype=view.dtype, device=place)
        return empty.set_(storages[view.storage], view.offset, view.size, view.stride)

    args, kwargs = call.arguments(made)
    return lambda: call.target(*args, **kwargs)


def _time(call: Call, recording: Recording, device: torch.device) -> float | None:
    try:
        with torch.no_grad():
            return best_seconds(rebuilt(call, recording), device)
    except Exception as error:  # noqa: BLE001 - whatever an op says to values that are made up
        log.info("%s could not be timed (%s); a roofline stands in", call.target, error)
        return None


def _filled(nbytes: int, dtype: torch.dtype, device: torch.device) -> torch.UntypedStorage:
    count = nbytes // dtype.itemsize
    if dtype.is_floating_point:
        # Not zeros: denormals and zeros are slower or faster than what training sees.
        return torch.rand(count, device=device).to(dtype).untyped_storage()
    # Indices: 0 is in every range.
    return torch.zeros(count, dtype=dtype, device=device).untyped_storage()


def clock_of(device: torch.device) -> Callable[[], float]:
    """Return the clock by which work on a device is timed."""
    # One thread's own seconds do not count what a busy machine takes from it; several threads wait
    # for each other, and only the clock on the wall sees that.
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if alone else time.perf_counter


def best_seconds(work: Any, device: torch.device) -> float:
    """Seconds of the quickest of a few runs, after one to warm up."""
    clock = clock_of(device)

    def done() -> None:
        work()
        synchronize(device)

    return quickest(done, clock)
