"""A DistributedOptimizer for Keras 3 that actually averages, and the callbacks that go with it.

Horovod 0.28.1 hooks into methods that Keras 3 no longer calls: its Keras optimizer trains without
an error and without averaging. Wrapping an optimizer in another one would hide its settings and
variables. So the class of the optimizer passed is changed to a subclass, which averages right
before Keras clips: after accumulation and unscaling, before clipping, weight decay and update.
Everything else, including what is saved, stays the same.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from ..compression import Compression
from ..errors import CompressError
from .averaging import Averaging
from .gained import become
from .memory import OptimizerState
from .memory import memory_of as _memory_of_compression


class _Averaged:
    """Methods added to an optimizer; the first base of its new class."""

    _sn: Averaging

    def residuals(self) -> dict[str, Any]:
        """See Compression.residuals; empty without compression."""
        return residuals(self) if hasattr(self._sn.compression, "settings") else {}

    def restart(self, residuals: Mapping[str, Any]) -> None:
        """See Compression.restart; does nothing without compression."""
        if hasattr(self._sn.compression, "settings"):
            restart(self, residuals)

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> Any:
        # `_clip_gradients`, which averages, does not get the variables.
        self._sn.variables = list(trainable_variables)
        return super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: Any) -> Any:
        _refuse_scaler()
        return super()._clip_gradients(self._sn.average(grads, self))  # type: ignore[misc]

    def _filter_empty_gradients(self, grads: Any, vars: Any) -> Any:  # noqa: A002 - Keras's name
        # Keras leaves out variables without a gradient, which may differ between ranks.
        if self._sn.missing_as_zeros:
            grads = [
                tf.zeros(v.shape, v.dtype) if g is None else g
                for g, v in zip(grads, vars, strict=True)
            ]
        return super()._filter_empty_gradients(grads, vars)  # type: ignore[misc]

    def _overwrite_variables_directly_with_gradients(self, grads: Any, vars: Any) -> Any:  # noqa: A002
        if any(getattr(v, "overwrite_with_gradient", False) for v in vars):
            # Keras assigns these gradients to their variables, before anything averages them.
            raise CompressError(
                "float8 training keeps scales that are set from each rank's own gradients, so "
                "ranks would drift apart; expected variables with gradients to average. Train "
                "in float32, bfloat16 or mixed_float16."
            )
        return super()._overwrite_variables_directly_with_gradients(grads, vars)  # type: ignore[misc]

    def __setattr__(self, name: str, value: Any) -> None:
        # A MultiOptimizer sets its own factor, None by default, on each of its optimizers.
        if name == "loss_scale_factor" and value != self.loss_scale_factor:  # type: ignore[attr-defined]
            raise CompressError(
                f"{name} of a distributed optimizer was set to {value!r}; expected "
                f"{self.loss_scale_factor!r}, as it is. "  # type: ignore[attr-defined]
                "Set it before DistributedOptimizer."
            )
        if name == "loss_scale_factor":
            _refuse_scaler()
        super().__setattr__(name, value)


def _refuse_scaler() -> None:
    """Raise CompressError inside a LossScaleOptimizer that is not ours.

    The inner optimizer cannot see it, but it is among the callers when it is built (`compile` wraps
    the optimizer of a mixed_float16 model) and in each step.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, keras.optimizers.LossScaleOptimizer) and not isinstance(
            owner, _ScaledTogether
        ):
            raise CompressError(
                "a LossScaleOptimizer is around a distributed optimizer, as `compile` puts one for "
                "a mixed_float16 model: there each rank would judge by its own gradients whether "
                "to skip a step. Put it inside: "
                "DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))."
            )
        frame = frame.f_back


class _ScaledTogether:
    """Methods added to a LossScaleOptimizer: all ranks skip a step, or none.

    A skipped step sends no gradient, and so does not change error memories.
    """

    _sn: Averaging

    def check_finite(self, grads: Any) -> Any:
        return self._sn.all_true(super().check_finite(grads))  # type: ignore[misc]


def DistributedOptimizer(  # noqa: N802 - Horovod's name for it
    optimizer: Any,
    *,
    compression: Any = None,
    op: Any = hvd.Average,
    backward_passes_per_step: int = 1,
    gradient_predivide_factor: float = 1.0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    sparse_as_dense: bool = False,
    missing_as_zeros: bool = False,
    process_set: Any = hvd.global_process_set,
) -> Any:
    """Make a Keras 3 optimizer average its gradients over all ranks.

    Parameters
    ----------
    optimizer : a Keras optimizer. It is changed in place, keeps its variables and settings, and
        is returned. A saved model contains the original optimizer, which has to be made distributed
        again after loading. For mixed precision use
        `DistributedOptimizer(LossScaleOptimizer(optimizer))`.
    compression : FFTCompression, LowRankCompression, AutoCompression, hvd.Compression.fp16, or None
    op : hvd.Average or hvd.Sum; others, such as hvd.Min, if `compression` allows them
    backward_passes_per_step : average and update only every this many steps, with the mean of their
        gradients; sets Keras's own gradient_accumulation_steps
    gradient_predivide_factor : divide by this before summing, by the rest after; for hvd.Average
    groups : reduce gradients together: the number of groups, or lists of variables
    sparse_as_dense : convert gradients that are tf.IndexedSlices to dense tensors
    missing_as_zeros : treat missing gradients as zeros, for gradients that may be missing on some
        ranks only; otherwise their variables are left out, and must be so on every rank
    process_set : average over these ranks only

    Raises CompressError if the optimizer is not a Keras 3 optimizer, is already distributed, or was
    built before accumulation could be set up.
    """
    scaler: Any = None
    _check(optimizer, op, backward_passes_per_step, gradient_predivide_factor)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        # The inner optimizer averages, as it gets unscaled gradients.
        scaler, optimizer = optimizer, optimizer.inner_optimizer
        _check(optimizer, op, backward_passes_per_step, gradient_predivide_factor)
    if backward_passes_per_step > 1:
        optimizer.gradient_accumulation_steps = backward_passes_per_step
    if isinstance(compression, type) and issubclass(compression, Compression):
        # A separate class, as memories and reports are per class.
        compression = compression.with_settings(compression.settings)
    averaging = Averaging(
        compression=hvd.Compression.none if compression is None else compression,
        op=op,
        process_set=process_set,
        predivide=gradient_predivide_factor,
        groups=groups,
        sparse_as_dense=sparse_as_dense,
        missing_as_zeros=missing_as_zeros,
    )
    become(optimizer, _Averaged, averaging)
    return optimizer if scaler is None else become(scaler, _ScaledTogether, averaging)


def _check(optimizer: Any, op: Any, passes: int, predivide: float) -> None:
    kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    if not isinstance(optimizer, keras.optimizers.Optimizer) or isinstance(optimizer, tf.Module):
        raise CompressError(
            f"got a {kind}; expected an optimizer of Keras 3 (keras.optimizers) on TensorFlow"
        )
    if hasattr(optimizer, "_sn"):
        raise CompressError(f"this {kind} is distributed already; call DistributedOptimizer once")
    if hasattr(optimizer, "_inner_optimizers"):
        raise CompressError(
            f"got a {kind}; expected a single optimizer. Make each of its inner optimizers "
            "distributed instead."
        )
    # Keras creates accumulators when it builds the optimizer.
    if passes < 1 or (passes > 1 and (optimizer.built or optimizer.gradient_accumulation_steps)):
        raise CompressError(
            f"backward_passes_per_step={passes!r}; expected at least 1, and above 1 an optimizer "
            "that is not built yet and has no gradient_accumulation_steps. Set it in one place."
        )
    if predivide != 1.0 and op != hvd.Average:
        raise CompressError(
            f"gradient_predivide_factor={predivide!r} needs op=hvd.Average; got another operation"
        )


def memory_of(optimizer: Any) -> OptimizerState:
    """Return the error memory of a distributed optimizer, for tf.train.Checkpoint; one per rank."""
    averaging = getattr(optimizer, "_sn", None)
    if not isinstance(averaging, Averaging) or not hasattr(averaging.compression, "settings"):
        raise CompressError(
            f"{type(optimizer).__name__} has no error memory; expected what "
            "sn_compress.tensorflow.keras.DistributedOptimizer(..., compression=FFTCompression) "
            "returned"
        )
    return _memory_of_compression(averaging.compression)


def report(optimizer: Any) -> dict[str, float]:
    """See Compression.report."""
    return memory_of(optimizer).report()


def residuals(optimizer: Any) -> dict[str, Any]:
    """See Compression.residuals."""
    memory = memory_of(optimizer)
    return {
        path: memory.residual(key).reshape(variable.shape)
        for path, (variable, key) in optimizer._sn.keys(optimizer).items()
        if memory.remembers(key)
    }


def restart(optimizer: Any, residuals: Mapping[str, Any]) -> None:
    """See Compression.restart."""
    memory, keys = memory_of(optimizer), optimizer._sn.keys(optimizer)
    for path, residual in residuals.items():
        shape = tuple(keys[path][0].shape) if path in keys else "nothing of that path"
        if tuple(residual.shape) != shape:
            raise CompressError(
                f"a residual of {path!r} has shape {tuple(residual.shape)}; expected {shape}, as "
                "the optimizer trains it. Cut it as the variable was."
            )
    memory.restart({keys[path][1]: np.asarray(r, "f4") for path, r in residuals.items()})


def state_dict(optimizer: Any) -> dict[str, Any]:
    """See Compression.state_dict; keyed by the index of the variable in the optimizer."""
    return memory_of(optimizer).state_dict()


def load_state_dict(optimizer: Any, state: dict[str, Any]) -> None:
    """Load what state_dict returned."""
    memory_of(optimizer).load_state_dict(state)


def synchronize(optimizer: Any, root_rank: int) -> None:
    """See Compression.synchronize."""
    memory_of(optimizer).synchronize(root_rank, process_set=optimizer._sn.process_set)


def watch(optimizer: Any, scaler: Any) -> NoReturn:
    """Raise CompressError: Keras's loss scaler is an optimizer."""
    raise CompressError(
        f"got a {type(optimizer).__name__} and a {type(scaler).__name__}; expected optimizers of "
        "torch. In Keras: DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer)), "
        "and nothing else."
    )


def Elastic(optimizer: Any) -> NoReturn:  # noqa: N802 - as in the rim of torch
    """Raise CompressError: Horovod's elastic state for Keras supports Keras 2 only."""
    raise CompressError(
        f"got a {type(optimizer).__name__}; expected an optimizer of torch. In Keras, save the "
        "state, and call synchronize of the compression when ranks have come or gone."
    )


class BroadcastVariables(keras.callbacks.Callback):  # type: ignore[misc]
    """Broadcast the weights and optimizer variables of one rank at the start of every `fit`.

    If a model is built by its first batch, this happens after that batch. Seeds of random layers
    are not broadcast: ranks should drop out different units.
    """

    def __init__(self, root_rank: int = 0, *, process_set: Any = hvd.global_process_set) -> None:
        super().__init__()
        self.root_rank, self.process_set = root_rank, process_set
        self._waits = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Called by Keras."""
        # Without an Input layer a model has no variables before its first batch.
        self._waits = not self.model.built
        if not self._waits:
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Called by Keras."""
        if self._waits:
            self._waits = False
            self._broadcast()

    def _broadcast(self) -> None:
        optimizer = self.model.optimizer
        if not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        variables = [v.value for v in (*self.model.weights, *optimizer.variables)]
        if not self.process_set.included():
            return
        # Horovod has no bfloat16.
        narrow = [v for v in variables if v.dtype == tf.bfloat16]
        wide = [tf.Variable(tf.cast(v, tf.float32), trainable=False) for v in narrow]
        others = [v for v in variables if v.dtype != tf.bfloat16]
        hvd.broadcast_variables([*others, *wide], self.root_rank, process_set=self.process_set)
        for variable, value in zip(narrow, wide, strict=True):
            variable.assign(tf.cast(value, tf.bfloat16))


class AverageMetrics(keras.callbacks.Callback):  # type: ignore[misc]
    """Average an epoch's metrics over the ranks; put it before callbacks that read them."""

    def __init__(self, *, process_set: Any = hvd.global_process_set) -> None:
        super().__init__()
        self.process_set = process_set

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Called by Keras."""
        if not logs or not self.process_set.included():
            return
        # In the same order on all ranks: values are sent without their names.
        names = sorted(logs)
        values = tf.constant([float(logs[name]) for name in names], tf.float64)
        means = hvd.allreduce(values, name="metrics", process_set=self.process_set).numpy()
        logs.update(zip(names, map(float, means), strict=True))


class CompressionLogs(keras.callbacks.Callback):  # type: ignore[misc]
    """Add the numbers of report() to the logs of each epoch, as `compression/ratio` etc.

    Put it before the callbacks that read the logs: `keras.callbacks.TensorBoard`, `CSVLogger`.
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Called by Keras."""
        if logs is not None:
            numbers = report(self.model.optimizer)
            logs.update({f"compression/{name}": float(value) for name, value in numbers.items()})


class CompressionBackup(keras.callbacks.BackupAndRestore):  # type: ignore[misc]
    """BackupAndRestore in a separate folder for each rank, including its error memory.

    Keras's own callback saves weights and optimizer variables, which are equal on all ranks; the
    error memory differs between ranks and would be lost. A process may die while it is writing, or
    before another rank has written: so an epoch's backup is written atomically, and all ranks
    resume from the last epoch that all have.

    Parameters
    ----------
    backup_dir : rank n writes `backup_dir/rank<n>/<epochs>` at the end of each epoch; keeps two
    options : of BackupAndRestore, except save_freq, which is "epoch"

    Raises CompressError for another save_freq; and, on every rank, if there is no epoch of which
    all ranks have a backup.
    """

    def __init__(self, backup_dir: str | Path, **options: Any) -> None:
        if options.get("save_freq", "epoch") != "epoch":
            raise CompressError(
                f"save_freq={options['save_freq']!r}; expected 'epoch': within an epoch Keras "
                "resumes from the beginning of the epoch. Leave it out."
            )
        self._folder = Path(backup_dir) / f"rank{hvd.rank()}"
        super().__init__(str(self._folder), **options)

    def on_train_begin(self, logs: Any = None) -> None:
        """Called by Keras."""
        if (epochs := self._common()) is None:
            return
        # Later backups would be mistaken for those this run will write for the same epochs.
        for later in self._saved():
            if later > epochs:
                shutil.rmtree(self._folder / str(later))
        folder = self._folder / str(epochs)
        self._of_keras(folder).on_train_begin(logs)
        memory = memory_of(self.model.optimizer)
        tf.train.Checkpoint(memory=memory).read(str(folder / "memory"))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Called by Keras."""
        new, saved = self._folder / "new", self._folder / str(epoch + 1)
        for old in (new, saved):  # left by a process that died, or an earlier `fit`
            shutil.rmtree(old, ignore_errors=True)
        self._of_keras(new).on_epoch_end(epoch, logs)
        memory = memory_of(self.model.optimizer)
        tf.train.Checkpoint(memory=memory).write(str(new / "memory"))
        new.rename(saved)
        # No rank is more than an epoch ahead of another: each step waits for all.
        for epochs in self._saved()[:-2]:
            shutil.rmtree(self._folder / str(epochs), ignore_errors=True)

    def _of_keras(self, folder: Path) -> keras.callbacks.BackupAndRestore:
        """Return Keras's own callback for one epoch's folder."""
        callback = keras.callbacks.BackupAndRestore(str(folder))
        callback.set_model(self.model)
        return callback

    def _saved(self) -> list[int]:
        """Return the epoch counts for which this rank has a backup, sorted."""
        return sorted(int(path.name) for path in self._folder.glob("[0-9]*"))

    def _common(self) -> int | None:
        """Return the last epoch count for which all ranks have a backup; None without backups."""
        memory_of(self.model.optimizer)  # raises for an optimizer without an error memory
        process_set = self.model.optimizer._sn.process_set
        if not process_set.included():
            return None
        mine = self._saved()
        by_rank = hvd.allgather(
            tf.constant([[0, 0, *mine][-2:]]), name="backups", process_set=process_set
        ).numpy()
        common = set.intersection(*map(set, by_rank.tolist()))
        if not common or (common == {0} and by_rank.any()):
            raise CompressError(
                f"{self._folder.parent} has backups after {by_rank.tolist()} epochs, by rank, and "
                "none of all ranks after the same number; expected one, as CompressionBackup "
                "writes them. Remove the folder, on every machine, to start over."
            )
        return max(common) or None
