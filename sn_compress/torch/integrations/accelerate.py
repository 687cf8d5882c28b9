"""accelerate: compress a prepared model; save and load every rank's memory with its checkpoints.

`accelerator.register_for_checkpointing` would write a single file, by the main process: the memory
of rank 0 for all. Hooks of save_state run on every rank.
"""

from __future__ import annotations

from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from accelerate import Accelerator

from ...compression import Compression
from ..ddp import CompressionState
from . import attach

# States of each accelerator by number; held weakly, so they are freed with their models.
_states: WeakKeyDictionary[Accelerator, WeakValueDictionary[int, CompressionState]]
_states = WeakKeyDictionary()


def compress_accelerated(
    accelerator: Accelerator, model: Any, compression: type[Compression], **settings: Any
) -> CompressionState | None:
    """Compress the gradients of a model that `accelerator.prepare` returned.

    `save_state` and `load_state` then write and read `compression-rank<n>.pt` for every rank in the
    checkpoint's folder; for a second model `compression-1-rank<n>.pt`, in the order of these calls.
    Returns the state, for report(); None, with a warning, in a single process.

    Parameters
    ----------
    settings : of CompressionState; the accelerator's GradScaler is passed by default

    Raises CompressError if several ranks train the model without DDP.
    """
    settings.setdefault("scaler", accelerator.scaler)
    state = attach.attach(model, compression, "accelerate", **settings)
    if state is None:
        return None
    if accelerator not in _states:
        states = _states[accelerator] = WeakValueDictionary()

        def save(models: Any, weights: Any, folder: str) -> None:
            for number, saved in sorted(states.items()):
                attach.save(saved, folder, number)

        def load(models: Any, folder: str) -> None:
            for number, loaded in sorted(states.items()):
                attach.load(loaded, folder, number)

        accelerator.register_save_state_pre_hook(save)
        accelerator.register_load_state_pre_hook(load)
    states = _states[accelerator]
    states[next(number for number in count() if number not in states)] = state
    return state
