"""accelerate: a prepared model, and a memory for each rank in save_state and load_state.

`accelerator.register_for_checkpointing` would write one file, by the main process: the memory of
rank 0 for all. Hooks of save_state run on every rank.
"""

from __future__ import annotations

from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from accelerate import Accelerator

from ...compression import Compression
from ..ddp import CompressionState
from . import attach

# Of each accelerator by number; a model that was let go of takes its state along.
_states: WeakKeyDictionary[Accelerator, WeakValueDictionary[int, CompressionState]]
_states = WeakKeyDictionary()


def compress_accelerated(
    accelerator: Accelerator, model: Any, compression: type[Compression], **settings: Any
) -> CompressionState | None:
    """Compress the gradients of a model that `accelerator.prepare` returned.

    `save_state` and `load_state` then write and read `compression-rank<n>.pt` of every rank in the
    checkpoint's folder, of a second model `compression-1-rank<n>.pt`, in the order of these calls.
    Returns the state, for report(); None, with a warning, in one process.

    Parameters
    ----------
    settings : of CompressionState; the accelerator's GradScaler is given already

    Raises CompressError for a model that several ranks train other than by DDP.
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
