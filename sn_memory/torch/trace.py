"""trace: a training step of a model as a neutral graph, with nothing allocated.

Everything that follows (plan, estimate, verify) starts here. What the calls are is in capture.py,
how they become a graph in neutral.py, where seconds come from in seconds.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..graph import Device, Graph, Storage
from .capture import Captured, capture
from .neutral import Named, neutral
from .optimizer import optimizer_memory
from .seconds import NOMINAL, measured_device, measured_seconds

OPTIMIZER = "optimizer state"


@dataclass(frozen=True)
class Trace:
    """A traced training step.

    Parameters
    ----------
    named
        The graph with its names.
    captured
        The calls behind it.
    """

    named: Named
    captured: Captured

    @property
    def graph(self) -> Graph:
        """The neutral graph, for `plan_graph`, `check_plan` and the reports."""
        return self.named.graph


def call_arguments(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (args, kwargs) of a sample: a tuple is args, a mapping kwargs, the rest one arg."""
    if isinstance(sample, Mapping):
        return (), dict(sample)
    return (sample if isinstance(sample, tuple) else (sample,)), {}


def trace(
    model: torch.nn.Module,
    sample: Any,
    *,
    profile: bool = True,
    device: Device | None = None,
    optimizer: Any = None,
) -> Trace:
    """Record a training step of a model as a graph. The model is left as it was.

    The step is forward, loss, backward. The loss is an op outside of the plan that reads the
    outputs and makes their gradients; a model that returns its loss has that planned as well.

    Parameters
    ----------
    model
        In the modes (train, eval) it is to be trained in. On the meta device, it counts as one on
        the CPU.
    sample
        Its input: a tensor; a tuple of positional arguments; a mapping of keyword arguments. Only
        shapes, strides, types and devices matter.
    profile
        Time each op once per signature; the times are kept in a file in the user's cache folder.
        Otherwise, and for a model on the meta device, a roofline.
    device
        Speeds for the roofline and for transfers; default: measured, or nominal where nothing is.
    optimizer
        An optimizer, or its class; its state is counted as resident.

    Raises
    ------
    TraceError
        For a model whose course depends on values, or that a replay would not do justice to.

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
    captured = capture(model, args, kwargs)
    place = next(iter(model.parameters())).device
    profile = profile and place.type != "meta"
    if device is None:
        device = measured_device(place) if profile else NOMINAL
    calls = captured.recording.calls
    seconds = measured_seconds(captured.recording, place) if profile else [None] * len(calls)
    extra = []
    if optimizer is not None:
        state = optimizer_memory(model, optimizer).state_bytes
        extra.append(Storage(OPTIMIZER, state, "state"))
    named = neutral(
        captured,
        name=type(model).__name__,
        device=device,
        seconds=seconds,
        allocator="torch" if place.type == "cuda" else "none",
        extra=extra,
    )
    return Trace(named, captured)
