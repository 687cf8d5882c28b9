"""Callbacks for Keras `fit`: the numbers of report() in its logs, the memory of a rank in a backup."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from ..base.errors import CompressError
from .keras import memory_of, report


class CompressionLogs(keras.callbacks.Callback):  # type: ignore[misc]
    """Add the numbers of report() to the logs of each epoch, as `compression/ratio` and so on.

    Put it before the callbacks that read the logs: `keras.callbacks.TensorBoard`, `CSVLogger`.
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Called by Keras."""
        if logs is not None:
            found = report(self.model.optimizer)
            logs.update({f"compression/{name}": float(value) for name, value in found.items()})


class CompressionBackup(keras.callbacks.BackupAndRestore):  # type: ignore[misc]
    """BackupAndRestore of each rank in a folder of its own, with what the rank has yet to send.

    Keras's own saves weights and optimizer variables, which all ranks have alike; the memory of
    compressed gradients differs between ranks and would be lost.

    Parameters
    ----------
    backup_dir : rank n writes `backup_dir/rank<n>`, at the end of each epoch
    others : of BackupAndRestore, but save_freq, which is "epoch"

    Raises CompressError for another save_freq, and for a folder with weights and without a memory.
    """

    def __init__(self, backup_dir: str | Path, **others: Any) -> None:
        if others.get("save_freq", "epoch") != "epoch":
            raise CompressError(
                f"save_freq={others['save_freq']!r}; expected 'epoch': within one, Keras goes on "
                "from the epoch's beginning. Leave it out."
            )
        self._own = Path(backup_dir) / f"rank{hvd.rank()}"
        super().__init__(str(self._own), **others)

    def on_train_begin(self, logs: Any = None) -> None:
        """Called by Keras."""
        saved = self._own.exists() and any(self._own.glob("*.weights.h5"))
        super().on_train_begin(logs)
        if not saved:
            return
        memory = self._own / "memory"
        if not memory.with_suffix(".index").exists():
            raise CompressError(
                f"{self._own} has weights and no memory of compressed gradients; expected both, "
                "as CompressionBackup writes them. Remove the folder to begin anew."
            )
        tf.train.Checkpoint(memory=memory_of(self.model.optimizer)).read(str(memory))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Called by Keras."""
        super().on_epoch_end(epoch, logs)
        memory = memory_of(self.model.optimizer)
        tf.train.Checkpoint(memory=memory).write(str(self._own / "memory"))
