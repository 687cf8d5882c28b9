"""The classes passed as `compression` to stock Horovod, and to DDP and FSDP2 hooks.

Horovod calls two functions of the class, `compress(tensor) -> (tensor, ctx)` and
`decompress(tensor, ctx)`, and all-reduces the tensor in between. It does not pass the parameter. So
`compress` runs its own collectives and returns a single zero for Horovod to reduce; the framework
code (the "rim") reads the parameter from the calling frame (docs/decisions/0009).
"""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any, ClassVar, Self, Unpack, cast

from .errors import CompressError
from .settings import AutoSettings, CastSettings, FFTSettings, LowRankSettings, Settings

_RIMS = {
    "torch": ".torch.horovod",
    "keras": ".tensorflow.keras",
    "tensorflow": ".tensorflow.tape",
}


def _as_written(method: Any) -> Any:
    """Mark a method so that AutoGraph, which rewrites what Horovod traces, does not convert it."""
    method.autograph_info__ = {}  # what tf.autograph.experimental.do_not_convert sets
    return method


class _Shown(type):
    """Metaclass of the compressions: the repr of a class is the expression that creates it."""

    def __repr__(cls) -> str:
        settings = getattr(cls, "settings", None)
        return cls.__name__ + (settings.call() if isinstance(settings, Settings) else "")


class Compression(metaclass=_Shown):
    """Base class of FFTCompression, LowRankCompression, CastCompression and AutoCompression.

    Pass the class itself, bare or configured by `using`; it is never instantiated:
    `hvd.DistributedOptimizer(optimizer, compression=FFTCompression)`.

    At the first gradient all ranks compare settings, names and shapes; if they differ, every rank
    raises a CompressError that names the differences. Sparse gradients (unless sparse_as_dense),
    float64 and integer tensors are not compressed and travel as in plain Horovod. Adasum,
    reducescatter, and operations other than Average and Sum are refused.

    Common settings
    ---------------
    feedback : add what was dropped to the next step's gradient (default True)
    decay : factor applied to that memory, in (0, 1]
    min_elements : tensors below this size are not compressed (default 1024); vectors, such as
        biases, only from 65536 elements on
    check_every : number of steps between comparisons of the ranks' parameters, by digest; 0 for
        none (default 100). If parameters differ, every rank raises CompressError
    wait_s : seconds to wait for other ranks before CompressError (default 1800; torch optimizers
        only). docs/horovod.md lists Horovod's own timeouts
    hierarchy : "auto" (the default): with several nodes of several ranks each, gradients are summed
        within each node, and only the exchange between nodes is compressed; None: all ranks
        exchange with all others. For torch's DistributedDataParallel, and Horovod with torch and
        TensorFlow
    """

    settings: ClassVar[Settings]
    _bare: ClassVar[type[Compression]]  # of a configured class: the class it was configured from

    def __new__(cls, *_: Any, **settings: Any) -> Self:
        """Raise CompressError: pass the class itself."""
        text = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        raise CompressError(
            f"{cls.__name__}({text}) cannot be instantiated; expected the class itself. Pass "
            f"{cls.__name__}, or {cls.__name__}.using({text or '...'})."
        )

    @classmethod
    def with_settings(cls, settings: Settings) -> type[Self]:
        """Return a new class with these settings."""
        # Always a subclass of the bare class, so repeated `using` builds no chain of classes.
        bare = vars(cls).get("_bare", cls)
        changed = _Shown(cls.__name__, (bare,), {"settings": settings, "_bare": bare})
        return cast("type[Self]", changed)

    @classmethod
    @_as_written
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """Called by Horovod."""
        return _rim(tensor).compress(tensor, cls.settings, sys._getframe(1))  # type: ignore[no-any-return]

    @classmethod
    @_as_written
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        """Called by Horovod."""
        if ctx is not None:
            return ctx.finish(tensor)
        # For torch, Horovod gathers sparse gradients without calling `compress`.
        if getattr(tensor, "is_sparse", False):
            _rim(tensor).count_sparse(sys._getframe(1))
        return tensor

    @classmethod
    def report(cls, optimizer: Any) -> dict[str, float]:
        """Return statistics of what this rank has sent for an optimizer so far.

        low_rank, rows, frequencies, whole, cast, plain: number of tensors by method ("whole": as
        16-bit digits); steps; tensors, elements (compressed ones only); dense_bytes (all tensors as
        float32) and payload_bytes (this rank's contribution, uncompressed tensors included), both
        per step; ratio, and ratio_after_warmup, over the steps in which something was compressed;
        relative_error, the mean over steps of |dropped| / |gradient + memory|; saturated.
        Sparse gradients count in both byte figures with the bytes that they send.
        other_bytes, in total: for the agreement at the start, comparing parameters, and tuning.
        torch only: codec_s and exchange_s, seconds per step that this rank's threads spent in the
        codec and waiting for other ranks. The backward pass may hide more of the exchange; on a
        GPU, codec_s covers only launching the kernels.
        AutoCompression only: tuned, 1 once it has decided; tuned_tensors, the tensors compressed
        since then; plain_step_s and trial_step_s, seconds of a step, 0 if none was timed.
        """
        return _rim(optimizer).report(optimizer)  # type: ignore[no-any-return]

    @classmethod
    def residuals(cls, optimizer: Any) -> dict[str, Any]:
        """Return this rank's residuals by parameter name, shaped like the parameters.

        In torch, set them as gradients before a new optimizer's first backward pass, and they are
        sent with it; that way they survive a change of shapes. For Keras they are arrays by
        variable path, to be passed to `restart`.
        """
        return _rim(optimizer).residuals(optimizer)  # type: ignore[no-any-return]

    @classmethod
    def restart(cls, optimizer: Any, residuals: Mapping[str, Any]) -> None:
        """Restart a Keras optimizer whose variables have new shapes; call it on all ranks at once.

        residuals : this rank's residuals, as `residuals` returned them, in the new shapes
        """
        _rim(optimizer).restart(optimizer, residuals)

    @classmethod
    def state_dict(cls, optimizer: Any) -> dict[str, Any]:
        """Return an optimizer's compression state, by parameter name; differs between ranks."""
        return _rim(optimizer).state_dict(optimizer)  # type: ignore[no-any-return]

    @classmethod
    def load_state_dict(cls, optimizer: Any, state: dict[str, Any]) -> None:
        """Load a state saved on the same rank.

        If the number of ranks has changed, load one of the old states on every rank (each of them
        on at least one rank, if possible), then call `synchronize`.
        """
        _rim(optimizer).load_state_dict(optimizer, state)

    @classmethod
    def synchronize(cls, optimizer: Any, root_rank: int = 0) -> None:
        """Broadcast the shared state from one rank, and give every rank the mean error memory.

        Call it on all ranks when the set of ranks has changed, or, with LowRankCompression, after
        hvd.join(), whose result is the root to use. The mean residual over all ranks is preserved.
        """
        _rim(optimizer).synchronize(optimizer, root_rank)

    @classmethod
    def elastic(cls, optimizer: Any) -> Any:
        """Return an object to pass to hvd.elastic.TorchState, under any keyword, to keep memories.

        When ranks join or leave, every rank gets the mean of the remaining memories.
        """
        return _rim(optimizer).Elastic(optimizer)

    @classmethod
    def watch(cls, optimizer: Any, scaler: Any) -> None:
        """Track a torch.amp.GradScaler, by whose scale gradients are multiplied.

        When NaN or Inf in any tensor makes the scaler skip a step, the error memories of all
        tensors are restored; when the scale changes, they are rescaled. Costs a copy of the
        memories.
        """
        _rim(optimizer).watch(optimizer, scaler)


class FFTCompression(Compression):
    """Sends the strongest frequencies of each rank's gradient.

    A gradient is cut into blocks, and a block into spans of 64 neighbours. Of all the FFT bins of
    a block the strongest are kept, as range floats with their positions; the rest goes to the error
    memory. Two ranks gather each other's payloads. Among more, each block has an owner, which
    receives the payloads, averages them, and sends the mean on, encoded again: what a rank receives
    does not grow with the number of ranks. hvd.join() on a rank that has run out of data is
    refused. Gradients of recurrent layers are not smooth: block=None and mode="paper" lose much of
    them.

    Settings in addition to those of Compression
    --------------------------------------------
    theta, block, span, bits, mantissa, positions, values, window, half, transform : as in
        FFTCodec. Defaults: bits 4, mantissa 1; theta, the fraction of bins dropped, 0.9, or a
        schedule from sn_compress.schedule; span 64, but None with another transform, or if block
        is None or shorter
    scatter : exchange through block owners where that means fewer bytes per rank (default True);
        False: always gather
    mode : "paper" first sets block=None, bits=8, mantissa=3, positions="bitmap", half=True,
        scatter=False and feedback=False, as published
    threads : number of codec threads; by default as many as the framework uses
    """

    settings: ClassVar[Settings] = Settings(compression="FFTCompression")

    @classmethod
    def using(cls, **settings: Unpack[FFTSettings]) -> type[Self]:
        """A configured class, to be passed wherever the bare one can."""
        return cls.with_settings(cls.settings.changed(**settings))


class LowRankCompression(Compression):
    """Sends low-rank factors, and embedding rows, as few-bit integers that an all-reduce sums.

    What a rank receives does not grow with the number of ranks, and ranks that run out of data may
    call hvd.join(). The ranks of the factors follow from `ratio` and from how much of each tensor's
    gradient energy lies in few directions.

    Settings in addition to those of Compression
    --------------------------------------------
    ratio : float32 bytes over bytes sent, for the whole model, uncompressed tensors included
        (default 100)
    warmup, every : number of dense steps at the start (default 10), and the interval between dense
        steps after that (default 2000)
    """

    settings: ClassVar[Settings] = Settings(compression="LowRankCompression")

    @classmethod
    def using(cls, **settings: Unpack[LowRankSettings]) -> type[Self]:
        """A configured class, to be passed wherever the bare one can."""
        return cls.with_settings(cls.settings.changed(**settings))


class CastCompression(Compression):
    """Sends all of each gradient in 16 or 8 bits, and sums in float32.

    Each rank casts its gradients and sends every other rank the part that rank sums; the means,
    rounded once, are gathered. This takes as many bytes as an all-reduce of such floats, which
    rounds once per rank. NaN and Inf are preserved; in "fp8" they turn the 256 elements around them
    into NaN. hvd.join() is refused, as with FFTCompression.

    Settings in addition to those of Compression
    --------------------------------------------
    dtype : "bf16" (the default), with the range of float32; "fp16", with three more bits of
        precision, up to 65504; "fp8", e4m3 with a scale for every 256 elements, off by up to a
        sixteenth. Only "fp8" has error feedback, so feedback and decay apply to it alone
    """

    settings: ClassVar[Settings] = Settings(compression="CastCompression")

    @classmethod
    def using(cls, **settings: Unpack[CastSettings]) -> type[Self]:
        """A configured class, to be passed wherever the bare one can."""
        return cls.with_settings(cls.settings.changed(**settings))


class AutoCompression(Compression):
    """Uses LowRankCompression if measurements show that it pays; else sends plain gradients.

    A convolution may also be sent as low-rank factors per frequency of its kernels, where these
    capture more of its gradient in as many bytes. In torch's DistributedDataParallel, casts to bf16
    (as in CastCompression) are considered as well, and used where they are faster than both.

    Link and codec are measured in the first steps; a cost model then decides for all tensors
    together, and unless measured steps get faster, training continues uncompressed (docs/cost.md).
    In TensorFlow it works for steps inside a tf.function and for Keras; elsewhere it raises
    CompressError.

    Settings are those of LowRankCompression.
    """

    settings: ClassVar[Settings] = Settings(compression="AutoCompression")

    @classmethod
    def using(cls, **settings: Unpack[AutoSettings]) -> type[Self]:
        """A configured class, to be passed wherever the bare one can."""
        return cls.with_settings(cls.settings.changed(**settings))


def _reduced(compression: type[Compression]) -> Any:
    """Pickle a class as its bare class and settings: a configured class cannot be imported."""
    if "_bare" in vars(compression):
        return compression._bare.with_settings, (compression.settings,)
    return compression.__qualname__


copyreg.pickle(_Shown, _reduced)  # type: ignore[arg-type]


def settings_of(compression: Any, where: str) -> Settings:
    """Return the settings of a `compression` argument; CompressError if it is not one of ours."""
    if isinstance(compression, type) and issubclass(compression, Compression):
        settings = getattr(compression, "settings", None)
        if isinstance(settings, Settings):
            return settings
    raise CompressError(
        f"{where} got {_kind(compression)} as compression; expected FFTCompression, "
        "LowRankCompression, CastCompression or AutoCompression, the class itself or what its "
        "using(...) returned"
    )


def _kind(thing: Any) -> str:
    if isinstance(thing, str):
        return repr(thing)
    return (
        f"the class {thing.__qualname__}"
        if isinstance(thing, type)
        else f"a {type(thing).__qualname__}"
    )


def _rim(thing: Any) -> ModuleType:
    """Return the rim for a tensor or optimizer, by the framework of its type or a base class."""
    for base in type(thing).__mro__:
        if name := _RIMS.get(base.__module__.partition(".")[0]):
            return import_module(name, __package__)
    kind = f"{type(thing).__module__}.{type(thing).__qualname__}"
    raise CompressError(
        f"compression got a {kind}; expected a tensor or optimizer of {' or '.join(_RIMS)}"
    )
