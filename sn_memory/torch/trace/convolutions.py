"""Ways to carry a convolution out, and which of them a plan has room for.

SuperNeurons times cuDNN's algorithms whose workspace fits the bytes that are free at that moment.
A plan knows what is free at each op, so the core chooses (`sn_memory.cost.schedule`); here is
what there is to choose from. torch names no algorithm, only switches: cuDNN's heuristic choice, its
search for the fastest (`benchmark`), its deterministic ones, or torch's own kernels without cuDNN.
Each is timed, and its workspace is what the allocator hands out beyond the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ...graph.records import Workspace
from ..device.accelerator import COUNTED
from ..model.allocations import measured_bytes
from .op_seconds import NotMeasured, best_seconds, not_while_training, rebuilt, signature
from .record import Call, Recording

# Switches of torch.backends.cudnn, by the name a Workspace carries. The first is the default.
WAYS: Mapping[str, Mapping[str, bool]] = {
    "heuristic": {"enabled": True, "benchmark": False, "deterministic": False},
    "search": {"enabled": True, "benchmark": True, "deterministic": False},
    "deterministic": {"enabled": True, "benchmark": False, "deterministic": True},
    "native": {"enabled": False, "benchmark": False, "deterministic": False},
}
_KINDS = ("convolution", "convolution_backward", "cudnn_convolution")

# Seconds and workspace bytes of a call carried out in a way.
Measure = Callable[[Call, str], tuple[float, int]]
# Those that were measured, by device, signature and way.
_FOUND: dict[str, dict[tuple[str, str], tuple[float, int]]] = {}


def ways_of(recording: Recording, measure: Measure) -> list[tuple[Workspace, ...]]:
    """Return, per call, the ways to carry it out; none for what is no convolution.

    A way that is neither faster nor smaller than another is left out; the default always stays
    first, as a plan without this would take it.
    """

    def ways(call: Call) -> tuple[Workspace, ...]:
        try:
            return _worthwhile(call, measure) if call.name in _KINDS else ()
        except NotMeasured:
            return ()

    return [ways(call) for call in recording.calls]


def measured_on(recording: Recording, device: torch.device) -> Measure:
    """Return what measures ways on a GPU; equal calls are measured once, while training never."""
    found = _FOUND.setdefault(str(device), {})

    def measure(call: Call, way: str) -> tuple[float, int]:
        key = (signature(call), way)
        if key not in found:
            not_while_training()
            with carried_out(way), torch.no_grad():
                run = rebuilt(call, recording)
                run()  # cuDNN's search takes workspaces of its own, once
                space = measured_bytes(run, device)
                found[key] = best_seconds(run, device), space
        return found[key]

    return measure


@contextmanager
def carried_out(way: str) -> Iterator[None]:
    """Set cuDNN's switches to a way's, and back."""
    switches: Any = torch.backends.cudnn
    before = {name: getattr(switches, name) for name in WAYS[way]}
    try:
        for name, value in WAYS[way].items():
            setattr(switches, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(switches, name, value)


def _worthwhile(call: Call, measure: Measure) -> tuple[Workspace, ...]:
    # cuDNN's search asks torch's allocator for its largest free block, which only its own tells.
    names = [name for name in WAYS if name != "search" or "cuda" not in COUNTED]
    rows = [(name, *measure(call, name)) for name in names]
    kept: list[tuple[str, float, int]] = rows[:1]
    for name, seconds, space in rows[1:]:
        if not any(other <= seconds and less <= space for _, other, less in kept):
            kept.append((name, seconds, space))
    return tuple(Workspace(space, seconds, name) for name, seconds, space in kept)
