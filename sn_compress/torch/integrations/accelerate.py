"""accelerate: a prepared model, and a memory for each rank in save_state and load_state.

`accelerator.register_for_checkpointing` would write one file, by the main process: the memory of
rank 0 for all. Hooks of save_state run on every rank.
"""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator

from ...compression import Compression
from ..ddp import CompressionState
from . import attach


def compress_accelerated(
    accelerator: Accelerator, model: Any, compression: type[Compression], **settings: Any
) -> CompressionState | None:
    """Compress the gradients of a model that `accelerator.prepare` returned.

    `save_state` and `load_state` then write and read `compression-rank<n>.pt` of every rank in the
    checkpoint's folder. Returns the state, for report(); None, with a warning, in one process.

    Parameters
    ----------
    settings : of CompressionState; the accelerator's GradScaler is given already

    Raises CompressError for a model that several ranks train other than by DDP.
    """
    settings.setdefault("scaler", accelerator.scaler)
    state = attach.attach(model, compression, "accelerate", **settings)
    accelerator.register_save_state_pre_hook(lambda models, weights, to: attach.save(state, to))
    accelerator.register_load_state_pre_hook(lambda models, of: attach.load(state, of))
    return state
