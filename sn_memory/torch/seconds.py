"""Seconds of each call: measured once per signature, kept in a file.

A signature is the op, and of each tensor its shape, strides and type. Tensors of that form are made
anew, so that one op's working set is all the memory needed; a model too large to run can be timed.
What cannot be timed so (an op that checks its values) is left to the roofline, and the plan says
how many ops are.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..graph import Device
from .recorder import Call, Recording, View

log = logging.getLogger(__name__)

_RUNS = 3
_ENOUGH_S = 0.1
# Speeds of a present accelerator, for the roofline where nothing is measured: only ratios count.
NOMINAL = Device("nominal", 1e14, 2e12, 2.5e10, 2.5e10, 1e-5)


def measured_seconds(recording: Recording, device: torch.device) -> list[float | None]:
    """Return seconds per call on a device; None for calls that could not be timed."""
    return cached_seconds(
        [(signature(call), partial(_time, call, recording, device)) for call in recording.calls],
        device,
    )


def cached_seconds(
    works: Sequence[tuple[str, Callable[[], float | None]]], device: torch.device
) -> list[float | None]:
    """Return seconds per (signature, function that measures them), from the file where it can."""
    path = cache_path(device)
    table = _read(path)
    known, result = len(table), []
    for text, measure in works:
        key = hashlib.sha256(text.encode()).hexdigest()[:24]
        if key not in table:
            table[key] = measure()
        result.append(table[key])
    if len(table) > known:
        _write(path, table)
        log.info("timed %d new op signatures on %s, kept in %s", len(table) - known, device, path)
    return result


def cache_path(device: torch.device) -> Path:
    """The file of times for a device, this torch and this number of threads."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    if device.type == "cuda":
        what = torch.cuda.get_device_name(device)
    else:
        what = f"{device.type}-{torch.get_num_threads()}-{torch.backends.cpu.get_cpu_capability()}"
    plain = "".join(letter if letter.isalnum() else "-" for letter in what)
    return Path(home) / "sn_memory" / f"op-seconds-{plain}-torch-{torch.__version__}.json"


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


def measured_device(device: torch.device) -> Device:
    """Return the speeds of a device, measured: matrix products, copies, transfers."""
    side = 1024 if device.type == "cpu" else 8192
    left = torch.rand(side, side, device=device)
    product_s = best_seconds(lambda: left @ left, device)
    block = torch.rand(1 << 24, device=device)
    target = torch.empty_like(block)
    copy_s = best_seconds(lambda: target.copy_(block), device)
    host = torch.empty(1 << 24, pin_memory=device.type == "cuda")
    up_s = best_seconds(lambda: host.copy_(block), device)
    down_s = best_seconds(lambda: block.copy_(host), device)
    size = block.nbytes
    return Device(
        str(device), 2 * side**3 / product_s, 2 * size / copy_s, size / up_s, size / down_s, 1e-5
    )


def rebuilt(call: Call, recording: Recording) -> Callable[[], Any]:
    """Return a call on tensors made anew in the form of those it was recorded with."""
    storages: dict[int, torch.UntypedStorage] = {}

    def made(view: View) -> torch.Tensor:
        place = recording.device[view.storage]
        if view.storage not in storages:
            storages[view.storage] = _filled(recording.nbytes[view.storage], view.dtype, place)
        empty = torch.empty(0, dtype=view.dtype, device=place)
        return empty.set_(storages[view.storage], view.offset, view.size, view.stride)

    args, kwargs = call.arguments(made)
    return lambda: call.target(*args, **kwargs)


def _time(call: Call, recording: Recording, device: torch.device) -> float | None:
    try:
        with torch.no_grad():
            return best_seconds(rebuilt(call, recording), device)
    except (RuntimeError, IndexError, ValueError, NotImplementedError) as error:
        log.info("%s could not be timed (%s); a roofline stands in", call.target, error)
        return None


def _filled(nbytes: int, dtype: torch.dtype, device: torch.device) -> torch.UntypedStorage:
    count = nbytes // dtype.itemsize
    if dtype.is_floating_point:
        # Not zeros: denormals and zeros are slower or faster than what training sees.
        return torch.rand(count, device=device).to(dtype).untyped_storage()
    # Indices: 0 is in every range.
    return torch.zeros(count, dtype=dtype, device=device).untyped_storage()


def best_seconds(work: Any, device: torch.device) -> float:
    """Seconds of the quickest of a few runs, after one to warm up."""
    # One thread's own seconds do not count what a busy machine takes from it; several threads wait
    # for each other, and only the clock on the wall sees that.
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time if alone else time.perf_counter
    work()
    best, spent = float("inf"), 0.0
    for _ in range(_RUNS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = clock()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took = clock() - began
        best, spent = min(best, took), spent + took
        if spent > _ENOUGH_S:
            break
    return best


def _read(path: Path) -> dict[str, float | None]:
    try:
        table: dict[str, float | None] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError:
        log.warning("%s is no table of times; it is written anew", path)
        return {}
    return table


def _write(path: Path, table: dict[str, float | None]) -> None:
    """Write in one go: two processes may time at once, and a reader must find a whole file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(table, file)
    os.replace(name, path)
