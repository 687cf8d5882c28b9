"""What a step holds at most when torch.compile has compiled it: compiled, and run once."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch._functorch import config as functorch_config

from ..compile.backend import Ready, storage_bytes, until_ready
from ..errors import TraceError
from ..model.step import tensors


def compiled_peak(model: torch.nn.Module, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> int:
    """Return the most live bytes of a forward and backward pass of a model under torch.compile.

    Parameters
    ----------
    model
        It is compiled and run once, and stays as it is; checkpoints in it are honoured.
    arguments
        Positional and by keyword: real tensors.

    Raises
    ------
    TraceError
        If torch.compile breaks the model into several graphs, or if no gradient is wanted.
    """
    args, kwargs = arguments
    known = [*model.parameters(), *model.buffers(), *tensors(arguments)]
    # Not before it is asked for: it needs torch's hooks of 2.13.
    search: Any = importlib.import_module("..compile.search", __package__)
    peaks: list[int] = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        inputs = list(inputs)
        unused = storage_bytes(known) - storage_bytes(tensors(inputs))
        request = search.Request(1 << 62, max(0, unused), False, False, ())
        # As users call backward: outside of the `with torch.autocast` of the forward pass.
        with functorch_config.patch(backward_pass_autocast="off"):
            found = search.Search(module, inputs, request)
        if found.plain is not None:
            peaks.append(found.peak_bytes(found.plain))

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
