"""Compressed averages between the replicas of torch's FSDP2, when it shards within a node (HSDP).

    module.set_all_reduce_hook(hsdp_hook(FFTState(replicas, exchange="gather"), name))

Everything but what FSDP2 hands over is that of the DDP hook, its state too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..errors import CompressError
from .ddp import FFTState, Part


def hsdp_hook(state: FFTState, name: str) -> Callable[[torch.Tensor], None]:
    """Make the hook for one module of FSDP2, for FSDPModule.set_all_reduce_hook.

    The module is sharded over one dimension of the mesh; `state` has the process group of the
    other one, the replicas. All the module's shards are one vector with one memory, under `name`.

    Raises CompressError for a state of the shared exchange that was not asked for by name: a vector
    has no low rank, and would travel in 16 bits whatever ratio is set.
    """
    if state.settings.exchange == "shared" and not state.asked_for_shared:
        raise CompressError(
            "hsdp_hook of a state with the shared exchange, which is the default: shards are one "
            f"vector and would travel in 16 bits, a ratio of 2 and not {state.settings.ratio:g}. "
            'Make FFTState(..., exchange="gather"), or say exchange="shared" if 16 bits will do.'
        )

    @torch.no_grad()
    def average(shards: torch.Tensor) -> None:
        for _ in state.rounds(shards, [Part(name, 0, tuple(shards.shape))]):
            pass

    return average
