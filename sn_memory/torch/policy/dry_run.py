"""What a step holds at most when Inductor has compiled it; nothing is compiled or run for it."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch._functorch import config as functorch_config

from ...cost.devices import NOMINAL
from ...graph.graph import Graph
from ...graph.records import Storage
from ...plan.plan import Plan
from ..compile.backend import Ready, storage_bytes, until_ready
from ..errors import TraceError
from ..model.step import tensors


def _never(graph: Graph, budget_bytes: int) -> Plan:
    raise AssertionError("a budget without bound was planned for")


def compiled_peak(model: torch.nn.Module, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> int:
    """Return the most live bytes of a forward and backward pass of a model under torch.compile.

    Parameters
    ----------
    model
        On the CPU. It is traced, not run; checkpoints in it are honoured.
    arguments
        Positional and by keyword: real tensors.

    Raises
    ------
    TraceError
        If torch.compile breaks the model into several graphs, if no gradient is wanted, or if it
        is not on the CPU.
    """
    args, kwargs = arguments
    known = [*model.parameters(), *model.buffers(), *tensors(arguments)]
    if any(it.device.type != "cpu" for it in known):
        raise TraceError(
            "what a compiled step holds is known on the CPU alone: what a kernel reads and writes "
            "is read in its C++ text. Plan for the eager step, which holds no less."
        )
    # Not before it is asked for: it needs torch's hooks of 2.13.
    inductor: Any = importlib.import_module("..compile.inductor", __package__)

    peaks: list[int] = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        unused = storage_bytes(known) - storage_bytes(tensors(list(inputs)))
        extra = (Storage("unused", unused, "state"),) if unused > 0 else ()
        asked = inductor.Asked(_never, 1 << 62, False, NOMINAL, extra, None, type(model).__name__)
        # As users call backward: outside of the `with torch.autocast` of the forward pass.
        with functorch_config.patch(backward_pass_autocast="off"):
            found = inductor.planned(module, list(inputs), asked)
        if found:
            peaks.append(found[0].plan.peak_bytes)

        def ready(*_: Any) -> Any:
            raise Ready

        return ready

    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    # Many tries of one model are many compilations of its forward.
    with until_ready(), torch._dynamo.config.patch(recompile_limit=1 << 20):
        compiled(*args, **kwargs)
    if not peaks:
        raise TraceError("torch.compile found nothing to differentiate in the model.")
    return peaks[0]
