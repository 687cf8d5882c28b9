"""A callback of transformers' Trainer that compresses gradients between its ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ...compression import Compression
from ..ddp import CompressionState
from . import attach
from .tensorboard import named


class TrainerCompression(TrainerCallback):  # type: ignore[misc]
    """Compresses a Trainer's gradients: `trainer.add_callback(TrainerCompression(...))`.

    The hook is registered when training begins. Checkpoints get one file per rank with its memory,
    `compression-rank<n>.pt`, and the Trainer's logs include the numbers of report().

    Parameters
    ----------
    trainer : the Trainer this callback is added to
    compression : FFTCompression, LowRankCompression or AutoCompression, bare or from `using`
    resume_from : folder of the checkpoint that `trainer.train` resumes from, if it is not
        `checkpoint-<step>` in the Trainer's output_dir
    settings : of CompressionState; the Trainer's GradScaler is passed by default

    Attributes
    ----------
    state : the CompressionState, once training has begun; None in a single process, with an
        UncalledWarning
    """

    def __init__(
        self,
        trainer: Any,
        compression: type[Compression],
        *,
        resume_from: str | Path | None = None,
        **settings: Any,
    ) -> None:
        self.state: CompressionState | None = None
        self._trainer, self._compression = trainer, compression
        self._settings, self._resume_from = settings, resume_from
        self._model: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Register the hook, once per model, and load the memory of a checkpoint."""
        model = self._trainer.model_wrapped
        if model is not self._model:  # already hooked if training continues in the same process
            settings = {"scaler": self._trainer.accelerator.scaler} | self._settings
            self.state = attach.attach(model, self._compression, "the Trainer", **settings)
            self._model = model
        if state.global_step:
            folder = self._resume_from or Path(args.output_dir) / f"checkpoint-{state.global_step}"
            attach.load(self.state, folder)
        # This callback must come first, so that its numbers are in the logs before other callbacks
        # write them. A new list, as the Trainer is iterating over the old one.
        handler = self._trainer.callback_handler
        handler.callbacks = [self, *(other for other in handler.callbacks if other is not self)]

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write this rank's memory next to the weights; the Trainer calls it on every rank."""
        attach.save(self.state, Path(args.output_dir) / f"checkpoint-{state.global_step}")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Add the numbers of report() to what is logged during training."""
        if logs is not None and "loss" in logs and self.state is not None:
            logs.update(named(self.state.report()))
