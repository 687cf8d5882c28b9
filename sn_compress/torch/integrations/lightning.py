"""A Lightning callback that compresses gradients between the ranks of DDPStrategy.

DDPStrategy(ddp_comm_state=..., ddp_comm_hook=...) does the same on a GPU; on a CPU it ignores the
hook. And its Lightning checkpoints contain no rank's memory.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback

from ...compression import Compression
from ..ddp import CompressionState
from . import attach
from .tensorboard import named

_KEY = "sn_compress"


class LightningCompression(Callback):  # type: ignore[misc]
    """Compresses a Lightning Trainer's gradients: `Trainer(callbacks=[LightningCompression(...)])`.

    The hook is registered when training begins, on any device. Checkpoints contain the memories of
    all ranks, gathered on rank 0: as many bytes per rank as its gradients in float32. The numbers
    of report() go to the Trainer's loggers.

    Parameters
    ----------
    compression : FFTCompression, LowRankCompression or AutoCompression, bare or from `using`
    settings : of CompressionState; the GradScaler of the Trainer's precision is passed by default

    Attributes
    ----------
    state : the CompressionState, once training has begun; None in a single process, with an
        UncalledWarning
    """

    def __init__(self, compression: type[Compression], **settings: Any) -> None:
        super().__init__()
        self.state: CompressionState | None = None
        self._compression, self._settings = compression, settings
        self._model: Any = None
        self._saved: Any = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Register the hook, once per model, and load the memory of a checkpoint."""
        model = trainer.strategy.model
        if model is not self._model:
            kwargs = {"scaler": getattr(trainer.precision_plugin, "scaler", None)} | self._settings
            self.state = attach.attach(model, self._compression, "Lightning", **kwargs)
            self._model = model
        if self._saved is not None and self.state is not None:
            if self._saved:
                self.state.load_state_dict(self._saved)
            else:
                attach.start_empty(self.state, f"the checkpoint of Lightning has no {_KEY!r}")
        self._saved = None

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Gather the memories; Lightning calls it on every rank and writes rank 0's checkpoint."""
        if self.state is None:
            return
        group, first = self.state.process_group, self.state.rank == 0
        states = [None] * self.state.ranks if first else None
        to = dist.get_global_rank(group, 0) if group is not None else 0
        dist.gather_object(self.state.state_dict(), states, dst=to, group=group)
        if first:
            checkpoint[_KEY] = states

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Keep the memories of a checkpoint until there is a state to load them into."""
        self._saved = checkpoint.get(_KEY, [])

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Log report() as often as Lightning logs."""
        interval = trainer.log_every_n_steps
        if self.state is None or not trainer.loggers or trainer.global_step % interval:
            return
        for logger in trainer.loggers:
            logger.log_metrics(named(self.state.report()), step=trainer.global_step)
