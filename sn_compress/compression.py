"""FFTCompression: the object given to an unpatched Horovod as `compression=`.

Horovod's seam is two functions, `compress(tensor) -> (tensor, ctx)` and
`decompress(tensor, ctx)`, called on whatever object is passed. What is returned gets
all-reduced, and nothing says which parameter it belongs to. So `compress` sends the payload by
an all-gather of its own and gives Horovod one zero to reduce; the rim finds out the parameter
from its caller (`docs/decisions/0004-finding-the-parameter.md`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any, ClassVar, Literal

from .errors import CompressError, MissingExtra
from .settings import Settings

_RIMS = {
    "torch": ".torch.horovod",
    "keras": ".tensorflow.keras",
    "tensorflow": ".tensorflow.tape",
}


def _as_written(method: Any) -> Any:
    """Mark a method so that AutoGraph, which rewrites what Horovod traces, leaves it alone."""
    method.autograph_info__ = {}  # what tf.autograph.experimental.do_not_convert sets
    return method


class FFTCompression:
    """Compression for `hvd.DistributedOptimizer(optimizer, compression=FFTCompression)`.

    Use it bare, or configured: `FFTCompression.using(ratio=50)`.

    Two exchanges
    -------------
    "shared", the default: all ranks send low-rank factors that Horovod's all-reduce sums, in few
    bits. What is received does not grow with the number of ranks. "gather": each rank sends what
    FFTCodec makes of its own gradient, to all others. exchange="auto" takes the one that
    the other settings belong to.

    Settings of the shared exchange
    -------------------------------
    ratio : float32 bytes over bytes sent, for the model as a whole (default 100); the ranks of the
        factors follow from it, by the energy that the tensors' gradients have in few directions
    warmup, every : dense steps at the start (default 10), and from one dense step to the next
        after that (default 2000)
    overlap : encode in a thread during the rest of the backward pass (default False; optimizers of
        torch only). Pays where gradients are not computed on the cores that encode

    Settings of the gather exchange
    -------------------------------
    theta, block, bits and all others of FFTCodec
    mode : "paper" sets block=None, positions="bitmap", half=True and feedback=False first

    Settings of both
    ----------------
    feedback : add what was dropped to the next step's gradient (default True)
    decay : factor on that memory, in (0, 1]
    min_elements : tensors below this size are not compressed; what they send counts for `ratio`
        (default 1024)
    threads : threads of the codec; by default as many as the framework uses
    tune : measure link and codec in the first steps, and go on as plain Horovod unless a step is
        faster with compression (default False; torch only). docs/cost.md says how

    check_every : steps from one comparison of the ranks' parameters, by digests, to the next;
        0 for none (default 100). If they differ, CompressError on every rank
    wait_s : seconds to wait for other ranks in what this sends beside Horovod (default 1800), then
        CompressError (optimizers of torch). docs/horovod.md has those of Horovod itself

    At the first gradient all ranks compare settings, names and shapes: CompressError on every rank
    says what differs.

    What it does not compress travels as with plain Horovod: sparse gradients (unless
    sparse_as_dense), float64 and integer tensors. What it cannot do it refuses: Adasum,
    reducescatter, operations other than Average and Sum, and, with gather, hvd.join() on a rank
    that has run out of data.
    """

    settings: ClassVar[Settings] = Settings()

    @classmethod
    def using(cls, *, mode: Literal["paper"] | None = None, **changes: Any) -> type[FFTCompression]:
        """A configured FFTCompression, to be passed wherever the bare one can."""
        settings = cls.settings.changed(mode=mode, **changes)
        return type("FFTCompression", (cls,), {"settings": settings})

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
        if getattr(tensor, "is_sparse", False):  # of torch: nobody asked how to send it
            _rim(tensor).count_sparse(sys._getframe(1))
        return tensor

    @classmethod
    def report(cls, optimizer: Any) -> dict[str, float]:
        """What this rank sent for an optimizer so far.

        steps; tensors, elements (compressed ones); dense_bytes (float32, all tensors),
        payload_bytes (this rank's contribution, uncompressed tensors included), both per step;
        ratio; relative_error, the mean over steps of |dropped| / |gradient + memory|; saturated.
        Sparse gradients count in both as what travels of them, in float32 and as it is. Beside all
        these other_bytes, so far: to agree at the start, to compare parameters, and to tune.
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
        """Take over a state saved on the same rank; with another number of ranks, see synchronize.

        Then load any of the old states on every rank, each old one on at least one rank if it
        can be, and call synchronize.
        """
        _rim(optimizer).load_state_dict(optimizer, state)

    @classmethod
    def synchronize(cls, optimizer: Any, root_rank: int = 0) -> None:
        """Give all ranks what ranks share, from one of them, and the mean of the memories.

        Called by all ranks, when the set of ranks has changed, or with exchange="shared" after
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


def _rim(thing: Any) -> ModuleType:
    """The rim for a tensor or optimizer, by the framework its type (or a base) comes from."""
    for base in type(thing).__mro__:
        if name := _RIMS.get(base.__module__.partition(".")[0]):
            try:
                return import_module(name, __package__)
            except ModuleNotFoundError as missing:
                if missing.name and missing.name.startswith("horovod"):
                    raise MissingExtra(
                        "FFTCompression needs Horovod, which is not installed; build one that "
                        "fits your frameworks with scripts/build_horovod.py of this project"
                    ) from missing
                raise
    kind = f"{type(thing).__module__}.{type(thing).__qualname__}"
    raise CompressError(
        f"FFTCompression got a {kind}; expected a tensor or optimizer of {' or '.join(_RIMS)}"
    )
