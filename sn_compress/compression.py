"""The classes that are passed as `compression` to an unpatched Horovod, and to DDP and FSDP2 hooks.

Horovod calls two functions on what it is passed, `compress(tensor) -> (tensor, ctx)` and
`decompress(tensor, ctx)`, and all-reduces the tensor in between; nothing tells which parameter it
belongs to. So `compress` runs collectives of its own and returns one zero for Horovod to reduce;
the rim reads the parameter from the calling frame (docs/decisions/0009).
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
    """Mark a method so that AutoGraph, which rewrites what Horovod traces, leaves it alone."""
    method.autograph_info__ = {}  # what tf.autograph.experimental.do_not_convert sets
    return method


class _Shown(type):
    """The metaclass of compressions: the repr of a class is the expression that creates it."""

    def __repr__(cls) -> str:
        settings = getattr(cls, "settings", None)
        return cls.__name__ + (settings.call() if isinstance(settings, Settings) else "")


class Compression(metaclass=_Shown):
    """What FFTCompression, LowRankCompression, CastCompression and AutoCompression have in common.

    Each is passed as a class, bare or configured by `using`, and never called:
    `hvd.DistributedOptimizer(optimizer, compression=FFTCompression)`.

    At the first gradient all ranks compare settings, names and shapes: CompressError on every rank
    says what differs. What is not compressed travels as with plain Horovod: sparse gradients
    (unless sparse_as_dense), float64 and integer tensors. What cannot be done is refused: Adasum,
    reducescatter, operations other than Average and Sum.

    Settings of all
    ---------------
    feedback : add what was dropped to the next step's gradient (default True)
    decay : factor on that memory, in (0, 1]
    min_elements : tensors below this size are not compressed (default 1024); vectors, such as
        biases, only from 65536 elements on
    check_every : steps from one comparison of the ranks' parameters, by digests, to the next;
        0 for none (default 100). If they differ, CompressError on every rank
    wait_s : seconds to wait for other ranks (default 1800), then CompressError (optimizers of
        torch). docs/horovod.md has those of Horovod itself
    hierarchy : "auto" (the default): with several nodes of several ranks each, gradients are summed
        inside a node, and exchanged compressed between nodes only; None: all ranks exchange with
        all others. In torch's DistributedDataParallel, and in Horovod's torch and TensorFlow
    """

    settings: ClassVar[Settings]
    _bare: ClassVar[type[Compression]]  # of a configured one: the class that was configured

    def __new__(cls, *_: Any, **settings: Any) -> Self:
        """Always CompressError: the class itself is passed."""
        text = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        raise CompressError(
            f"{cls.__name__}({text}) cannot be instantiated; expected the class itself. Pass "
            f"{cls.__name__}, or {cls.__name__}.using({text or '...'})."
        )

    @classmethod
    def with_settings(cls, settings: Settings) -> type[Self]:
        """Return a new class with these settings."""
        # A subclass of the bare class, also where this one is configured: no chain of classes.
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
        # Horovod gathers sparse gradients of torch without a call of `compress`.
        if getattr(tensor, "is_sparse", False):
            _rim(tensor).count_sparse(sys._getframe(1))
        return tensor

    @classmethod
    def report(cls, optimizer: Any) -> dict[str, float]:
        """What this rank sent for an optimizer so far.

        low_rank, rows, frequencies, whole, cast, plain: tensors by the way they travel, "whole" in
        digits of 16 bits; steps; tensors, elements (compressed ones); dense_bytes (float32, all
        tensors), payload_bytes (this rank's contribution, uncompressed tensors included), both per
        step; ratio, and ratio_after_warmup, of the steps in which something was compressed;
        relative_error, the mean over steps of |dropped| / |gradient + memory|; saturated.
        Of torch also codec_s and exchange_s, seconds a step that this rank's threads spent in the
        codec and waiting for other ranks; the backward pass may hide more of an exchange, and on a
        GPU the codec is only started in that time.
        Sparse gradients count in both as what travels of them, in float32 and as it is. Beside all
        these other_bytes, so far: to agree at the start, to compare parameters, and to tune.
        Of AutoCompression: tuned, 1 when it is decided; tuned_tensors, those that
        are compressed since; plain_step_s and trial_step_s, seconds of a step, 0 if none was timed.
        """
        return _rim(optimizer).report(optimizer)  # type: ignore[no-any-return]

    @classmethod
    def residuals(cls, optimizer: Any) -> dict[str, Any]:
        """What this rank has yet to send, by parameter name, shaped like the parameters.

        Set as gradients of torch before the first backward pass of a new optimizer, they travel
        with it: so they outlive a change of shapes. Those of Keras are arrays by the variables'
        paths, and `restart` takes them back.
        """
        return _rim(optimizer).residuals(optimizer)  # type: ignore[no-any-return]

    @classmethod
    def restart(cls, optimizer: Any, residuals: Mapping[str, Any]) -> None:
        """Let a Keras optimizer begin anew, when variables have new shapes; on all ranks at once.

        residuals : what this rank has yet to send, as `residuals` returned it, in the new shapes
        """
        _rim(optimizer).restart(optimizer, residuals)

    @classmethod
    def state_dict(cls, optimizer: Any) -> dict[str, Any]:
        """The state of an optimizer's exchange, by parameter name. It differs between ranks."""
        return _rim(optimizer).state_dict(optimizer)  # type: ignore[no-any-return]

    @classmethod
    def load_state_dict(cls, optimizer: Any, state: dict[str, Any]) -> None:
        """Load a state saved on the same rank; with another number of ranks, see synchronize.

        Then load any of the old states on every rank, each old one on at least one rank if it
        can be, and call synchronize.
        """
        _rim(optimizer).load_state_dict(optimizer, state)

    @classmethod
    def synchronize(cls, optimizer: Any, root_rank: int = 0) -> None:
        """Give all ranks what ranks share, from one of them, and the mean of the memories.

        Called by all ranks, when the set of ranks has changed, or with LowRankCompression after
        hvd.join(), whose result is the root to take. The mean of what all ranks have yet to send
        stays what it was.
        """
        _rim(optimizer).synchronize(optimizer, root_rank)

    @classmethod
    def elastic(cls, optimizer: Any) -> Any:
        """What to hand hvd.elastic.TorchState, as any keyword, so that it keeps the memories too.

        After ranks came or went every rank gets the mean of the memories that are left.
        """
        return _rim(optimizer).Elastic(optimizer)

    @classmethod
    def watch(cls, optimizer: Any, scaler: Any) -> None:
        """Follow a torch.amp.GradScaler: gradients arrive multiplied by its scale.

        When NaN or Inf in any tensor makes the scaler skip a step, the memories of all tensors go
        back to before it, and they change with the scale. Costs a copy of the memories.
        """
        _rim(optimizer).watch(optimizer, scaler)


class FFTCompression(Compression):
    """Each rank's strongest frequencies.

    A gradient is cut into blocks, a block into spans of 64 neighbours; of all FFTs of a block the
    strongest bins are kept, as range floats with their positions, and what is dropped is
    remembered. Two ranks gather each other's payloads. Among more, payloads go to the ranks that
    own the blocks, who send the means on, encoded again: what a rank receives does not grow with
    their number. hvd.join() on a rank that has run out of data is refused. Gradients of recurrent
    layers are not smooth: with block=None, and in mode "paper", much of them is lost.

    Settings beside those of Compression
    ------------------------------------
    theta, block, span, bits, mantissa, positions, values, window, half, transform : those of
        FFTCodec; bits are 4 by default, with a mantissa of 1, and theta, the fraction of bins
        dropped (default 0.9), may be a schedule of sn_compress.schedule. span is 64 by default,
        and None with another transform, or a block that is None or shorter
    scatter : by way of owners, where that brings a rank fewer bytes (default True); False: always
        gathered
    mode : "paper" sets block=None, bits=8, mantissa=3, positions="bitmap", half=True,
        scatter=False and feedback=False first, as published
    threads : of the codec; by default as many as the framework uses
    """

    settings: ClassVar[Settings] = Settings(compression="FFTCompression")

    @classmethod
    def using(cls, **settings: Unpack[FFTSettings]) -> type[Self]:
        """A configured class, to be passed wherever the bare one can."""
        return cls.with_settings(cls.settings.changed(**settings))


class LowRankCompression(Compression):
    """Low-rank factors, and rows of embeddings, in digits of few bits that an all-reduce sums.

    What is received does not grow with the number of ranks, and ranks that ran out of data may
    hvd.join(). The ranks of the factors follow from `ratio`, by the energy that the tensors'
    gradients have in few directions.

    Settings beside those of Compression
    ------------------------------------
    ratio : float32 bytes over bytes sent, for the model as a whole, what travels plain
        included (default 100)
    warmup, every : dense steps at the start (default 10), and from one dense step to the next
        after that (default 2000)
    """

    settings: ClassVar[Settings] = Settings(compression="LowRankCompression")

    @classmethod
    def using(cls, **settings: Unpack[LowRankSettings]) -> type[Self]:
        """A configured class, to be passed wherever the bare one can."""
        return cls.with_settings(cls.settings.changed(**settings))


class CastCompression(Compression):
    """All of each gradient in 16 or 8 bits, added up in float32.

    Each rank casts its gradients and sends every other one the part that this one adds up; the
    means, rounded once, are gathered. As many bytes as in an all-reduce of such floats, which
    rounds once for each rank. NaN and Inf come through, and in "fp8" make NaN of the 256 elements
    around them. hvd.join() is refused, as with FFTCompression.

    Settings beside those of Compression
    ------------------------------------
    dtype : "bf16" (the default), with the range of float32; "fp16", with three more bits of
        precision, up to 65504; "fp8", e4m3 with a scale for every 256 elements, off by up to a
        sixteenth. Only what "fp8" has rounded off is remembered: feedback and decay are its own
    """

    settings: ClassVar[Settings] = Settings(compression="CastCompression")

    @classmethod
    def using(cls, **settings: Unpack[CastSettings]) -> type[Self]:
        """A configured class, to be passed wherever the bare one can."""
        return cls.with_settings(cls.settings.changed(**settings))


class AutoCompression(Compression):
    """LowRankCompression where it pays, by measurement; else plain.

    A convolution may also travel by directions of single frequencies of its kernels, where these
    catch more of its gradient in as many bytes. In torch's DistributedDataParallel casts to bf16,
    as of CastCompression, are weighed, too, and taken where they are faster than both.

    Link and codec are measured in the first steps, a model chooses for all tensors together, and
    unless a step is then faster by the clock, all goes on plain; docs/cost.md says how. In
    TensorFlow it is for a step inside a tf.function and for Keras; elsewhere CompressError.

    Settings are those of LowRankCompression.
    """

    settings: ClassVar[Settings] = Settings(compression="AutoCompression")

    @classmethod
    def using(cls, **settings: Unpack[AutoSettings]) -> type[Self]:
        """A configured class, to be passed wherever the bare one can."""
        return cls.with_settings(cls.settings.changed(**settings))


def _reduced(compression: type[Compression]) -> Any:
    """Pickle a class by its bare class and settings: a configured one has no name to import."""
    if "_bare" in vars(compression):
        return compression._bare.with_settings, (compression.settings,)
    return compression.__qualname__


copyreg.pickle(_Shown, _reduced)  # type: ignore[arg-type]


def settings_of(compression: Any, where: str) -> Settings:
    """Return the settings of an argument `compression`; CompressError if it is none of ours."""
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
    """The rim for a tensor or optimizer, by the framework that its type or a base comes from."""
    for base in type(thing).__mro__:
        if name := _RIMS.get(base.__module__.partition(".")[0]):
            return import_module(name, __package__)
    kind = f"{type(thing).__module__}.{type(thing).__qualname__}"
    raise CompressError(
        f"compression got a {kind}; expected a tensor or optimizer of {' or '.join(_RIMS)}"
    )
