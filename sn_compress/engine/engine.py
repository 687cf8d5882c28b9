"""The engine: runs compressed exchanges of one optimizer on one rank, and keeps its state.

    engine.begin(gradients)
    step = engine.sort(gradients, ranks=ranks, total=total)
    for gradient in step.dense: average engine.dense_values(gradient), pass the mean to engine.learn
    rounds = engine.rounds(step.coded, ranks=ranks, rank=rank)     # yields collectives to run

A rim passes gradients as vectors and runs the collectives that are yielded, without knowing their
contents. A step ends when a name repeats. Decisions that must be the same on all ranks are made
here, from sums over the ranks that the rim's `total` returns.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from .. import __version__
from ..allreduce.exchange import AllReduceExchange
from ..arrays import Array, asarray_like, is_used, namespace, numpy_view, on_host
from ..codecs import registry
from ..codecs.base import Codec, Floats
from ..collective import Collective, Gradient, Rounds, Routing, StepTimer
from ..consistency import Fingerprint, ParameterCheck, Total, agree, all_equal, digest_words
from ..ops import products
from ..report import PayloadStats, Traffic
from ..settings import Settings, ThetaInTime
from . import payloads
from .feedback import ErrorFeedback
from .payloads import shares_of
from .transaction import Outcomes, Transaction

if TYPE_CHECKING:
    from .casts import CastBucket

_log = logging.getLogger(__name__)


class MethodSelector(Protocol):
    """Decides whether AutoCompression compresses: a `prediction.tuning.Tuner`."""

    def method(self, name: str, shape: Sequence[int]) -> str:
        """Return the choice for the next gradient, the same on every rank."""

    def report(self) -> dict[str, float]:
        """Return what was measured and chosen."""


class Engine:
    """Compression state of one optimizer on one rank.

    Parameters
    ----------
    settings : the user's settings
    threads : number of codec threads if the settings do not say
    stock : name of the framework's own exchange, for the log
    tuner : `prediction.new_tuner`, which creates the object that measures and chooses for
        AutoCompression; None: everything is compressed
    scaler : the loss scaler, if there is one: anything with get_scale(). Gradients arrive
        multiplied by its scale, and error memories are rescaled with it. A lower scale means that
        the last step was skipped on all ranks: it is aborted, unless `outcomes` knows better
    outcomes : outcomes of the gradients of the last pass; None: all were applied
    find_unused : detect zero gradients on a device as well, which waits for it, to keep the
        memories of unused parameters; on the host this is always done
    drops_unused : whether the framework drops the mean of a parameter that no rank has used, so
        that a memory must not be sent with a zero gradient
    pauses : rounds yield an empty list, once, before they may wait for a device; the rim resumes
        them when the backward pass is over

    Attributes
    ----------
    tuner : of AutoCompression, from the first gradient on
    agreed : the number of ranks that have agreed, None before `agree`
    """

    def __init__(
        self,
        settings: Settings,
        threads: int,
        *,
        stock: str,
        tuner: Callable[..., MethodSelector] | None,
        scaler: Any = None,
        outcomes: Outcomes | None = None,
        find_unused: bool = False,
        drops_unused: bool = True,
        pauses: bool = False,
    ) -> None:
        self.settings = settings
        self.theta = ThetaInTime(settings, threads)
        self.codec = settings.codec(threads)  # of the current step
        memory_codec: Codec = self.codec
        if settings.exchange == "cast":  # only for the format of the memory; see `casts`
            memory_codec = registry.codec(settings.dtype)
        self.feedback = ErrorFeedback(memory_codec, decay=settings.decay)
        self.traffic, self.seconds = Traffic(), StepTimer()
        self.shared = AllReduceExchange(
            **settings.shared, traffic=self.traffic, find_unused=find_unused,
            drops_unused=drops_unused, pauses=pauses,
        )  # fmt: skip
        self.sameness = ParameterCheck(settings.check_every)
        self.tuner: MethodSelector | None = None
        self.agreed: int | None = None
        self._stock, self._find_unused, self._drops_unused = stock, find_unused, drops_unused
        self._make_tuner = tuner if settings.tune else None
        # Without either, gradients are never dropped, and no copies of the memories are needed.
        self.feedback.undoable = outcomes is not None or scaler is not None
        self.transaction = Transaction(
            (self.feedback, self.shared), outcomes=outcomes, scaler=scaler
        )
        self._seen: set[str | None] = set()  # names in the current step
        # Whether tensors large enough are cast; the tuner may choose that as well.
        self._casts_all = settings.exchange == "cast"

    def watch(self, scaler: Any) -> None:
        """Track a loss scaler from here on."""
        self.transaction.scaler = scaler
        self.feedback.undoable = True

    @property
    def exchange(self) -> ErrorFeedback | AllReduceExchange:
        """The store of the memories of compressed gradients."""
        return self.shared if self.settings.exchange == "shared" else self.feedback

    def report(self) -> dict[str, float]:
        """Return what this rank has sent and what the tuner chose; see Compression.report."""
        chosen = self.tuner.report() if self.tuner else {}
        return self.traffic.report() | self.seconds.report(self.traffic.steps) | chosen

    # Before the first step, and between steps

    def agree(
        self,
        tensors: Fingerprint,
        *,
        total: Total,
        rank: int,
        ranks: int,
        like: Array,
        name: str,
        do: str,
    ) -> None:
        """Raise CompressError on every rank unless all have the same settings and tensors.

        Compares once, and again after `reset`. like : an array on the device of the gradients
        """
        if self.agreed == ranks:
            return
        fingerprint = [
            *self.settings.fingerprint(),
            ("scaler", "none" if self.transaction.scaler is None else "one"),
            ("version of sn_compress", __version__),
            *tensors,
        ]
        agree(fingerprint, total=total, rank=rank, ranks=ranks, name=name, do=do)
        # The mean P Q^T is a float32 product: if ranks' processors compute different bits, it is
        # computed in float64, in a fixed order of sums (docs/decisions/0036).
        if self.settings.exchange == "shared":
            self.shared.exact = not all_equal(
                total("hardware", digest_words(products.hardware_fingerprint(numpy_view(like))))
            )
        self.agreed, self.traffic.logs = ranks, rank == 0

    def compare(
        self, parameters: Fingerprint | None, *, total: Total, rank: int, ranks: int, hint: str = ""
    ) -> None:
        """Raise CompressError on every rank if parameters differ; called when `sameness` says so.

        parameters : names and digests; None if this rank's parameters may differ from the others'
        hint : for the message
        """
        at = self.sameness.steps - 1
        if parameters is not None:
            parameters = [*self.counted(), *parameters]
        if not all_equal(total("same", digest_words(parameters))):
            raise self.sameness.error(
                at, parameters, total=total, rank=rank, ranks=ranks, hint=hint
            )
        if parameters is not None:
            self.sameness.passed(at)

    def counted(self) -> Fingerprint:
        """What each rank decides by itself, but all must decide alike; compared with parameters."""
        return [("gradients that were dropped", str(self.transaction.aborted))]

    def progress(self) -> Fingerprint:
        """The step counts of the shared state, to compare on ranks that all have all tensors.

        Each rank loads its own file: if that is of another step, its dense steps come at other
        times, and the ranks would deadlock.
        """
        steps = sorted({tensor.step for tensor in self.shared.tensors.values()})
        return [("steps of the loaded memory", ", ".join(map(str, steps)) or "none")]

    def new_step(self) -> None:
        """Begin a new step with the next gradient, however the last one ended."""
        self._seen.clear()
        self.traffic.new_step()

    def forget_step(self) -> None:
        """Discard the current step, because another state has been loaded."""
        self.feedback.commit()
        self.transaction.forget()
        self._seen.clear()

    def reset(self) -> None:
        """Agree again and restart step counts, because ranks have joined or left."""
        self.tuner = self.agreed = None  # the tuner measured other ranks
        self.transaction.aborted = 0
        self.sameness.reset()
        self.new_step()

    # A step

    def begin(self, gradients: Sequence[Gradient]) -> None:
        """Track these gradients until they are committed or aborted, on all ranks.

        In a hierarchical exchange these include gradients owned by other ranks of the node, which
        this one does not `sort`.
        """
        with payloads.on_stream_of(gradients[0].values) if gradients else nullcontext():
            self._open_step({gradient.name for gradient in gradients})
        self.transaction.begin([grad.name for grad in gradients if grad.name is not None])

    def sort(
        self,
        gradients: Sequence[Gradient],
        *,
        ranks: int,
        total: Total,
        plain_itemsize: int | None = None,
        taken: bool = False,
    ) -> Routing:
        """Decide how these gradients travel, the same on every rank, and count them; after `begin`.

        If the tuner has given up compression, their residuals are added to their values.

        plain_itemsize : bytes per element sent uncompressed; by default that of the dtype
        taken : whether the rim has already determined, while tracing, that all are compressed
        """
        step = Routing([], [], [])
        for gradient in gradients:
            n, name = gradient.elements, gradient.name
            nbytes = n * (plain_itemsize or gradient.values.dtype.itemsize)
            if not taken and (not self._takes(gradient) or self._gives_up(gradient, ranks, total)):
                step.plain.append(gradient)
                self.traffic.plain(name, n, nbytes)
            elif name and self._is_dense(name, gradient.shape):
                step.dense.append(gradient)
                self.traffic.dense(name, n, nbytes)
            else:
                step.coded.append(gradient)
        return step

    def _takes(self, gradient: Gradient) -> bool:
        name = gradient.name
        # The shared exchange has a size for each name.
        if not gradient.is_float or (name is None and self.settings.exchange == "shared"):
            return False
        if name is None:
            self.theta.refuse_unnamed()
            return self.settings.compresses(gradient.shape)
        return self.shared.takes(name, gradient.shape)

    def _is_dense(self, name: str, shape: Sequence[int]) -> bool:
        shared = self.settings.exchange == "shared" and not self._casts_all
        return shared and self.shared.dense(name, shape)

    def _gives_up(self, gradient: Gradient, ranks: int, total: Total) -> bool:
        """Return whether the tuner sends this gradient plain; if so, add its residual to it.

        The residual of an unused parameter is kept, as the framework might drop the sum.
        """
        name, values = gradient.name, gradient.values
        if self._make_tuner is None or name is None:
            return False
        if self.tuner is None:  # created at the first gradient, when the number of ranks is known
            self.tuner = self._make_tuner(
                self.settings, ranks=ranks, total=total, plain=self._stock
            )
        method = self.tuner.method(name, gradient.shape)
        self._casts_all = method == "cast"
        if method != "plain":
            return False
        self.shared.stop(name)
        if self.shared.remembers(name) and is_used(values):
            unsent = asarray_like(self.shared.release(name), values)
            values += namespace(values).astype(unsent, values.dtype)
        return True

    def dense_values(self, gradient: Gradient, *, wire: Any = None) -> Array:
        """Return what to average for a dense gradient, [n] of `wire`: gradient plus residual.

        wire : dtype; by default that of the gradient
        """
        values = gradient.values
        return self.shared.dense_values(str(gradient.name), values, wire=wire or values.dtype)

    def learn(self, name: str, mean: Array) -> None:
        """Record the mean of a dense gradient, [n]; the same on every rank."""
        self.shared.learn(name, mean)

    def rounds(self, gradients: Sequence[Gradient], *, ranks: int, rank: int) -> Rounds:
        """Average compressed gradients in place.

        All ranks run the same rounds for the same gradients, in the same order. The rim times the
        computation between two yields: see StepTimer.coding.
        """
        if self._casts_all:
            return self._scattered(self._casts(gradients, ranks, rank))
        if self.settings.exchange == "shared":
            return self.shared.rounds(gradients, ranks=ranks, rank=rank)
        codec, shares = self.codec, None
        if self.settings.scatter:
            shares = shares_of(codec, tuple(gradient.elements for gradient in gradients), ranks)
        encode = partial(
            payloads.encode,
            find_unused=self._find_unused,
            drops_unused=self._drops_unused,
        )
        feedback = self.feedback if self.settings.feedback else None
        if shares is None:
            return self._gathered(gradients, ranks, partial(encode, codec, feedback=feedback))
        return self._scattered(payloads.Bucket(gradients, shares, rank, feedback, encode))

    def _gathered(
        self, gradients: Sequence[Gradient], ranks: int, encode: Callable[..., payloads.Sent]
    ) -> Rounds:
        codec, sent = self.codec, encode(gradients)
        self._tell(gradients, [PayloadStats.of([payload]) for payload in sent.payloads])
        (gathered,) = yield [Collective("gather", sent.wire)]
        if check := payloads.decode(codec, gathered, gradients, ranks=ranks):
            self.transaction.checks.append(check)

    def _casts(self, gradients: Sequence[Gradient], ranks: int, rank: int) -> CastBucket:
        # Imported here, so that runs without casts do not load them (tests/frame/test_closure.py).
        from ..ops.casts import Cast
        from .casts import CastBucket

        dtype, looks = self.settings.dtype, self._find_unused or on_host(gradients[0].values)
        return CastBucket(
            Cast(dtype), gradients, ranks=ranks, rank=rank, looks=looks and self._drops_unused,
            feedback=self.feedback if self.settings.feedback and dtype == "fp8" else None,
        )  # fmt: skip

    def _scattered(self, bucket: payloads.Bucket | CastBucket) -> Rounds:
        (received,) = yield [Collective("alltoall", bucket.begin(), bucket.parts_bytes)]
        (received,) = yield [Collective("gather", bucket.reduce(received), bucket.means_bytes)]
        bucket.end(received)
        self._tell(bucket.gradients, bucket.stats())
        self.transaction.checks += bucket.checks

    def _open_step(self, names: set[str | None]) -> None:
        # Gradients of one step may come in several calls, bucket by bucket.
        if names & self._seen or not self._seen:
            self.transaction.settle()
            self._seen.clear()
            if self.settings.exchange == "gather":
                # One theta for all tensors of a step, determined by the step count alone.
                self.codec = self.theta.codec_at(self.theta.begin_step())
        self._seen |= names

    def _tell(self, gradients: Sequence[Gradient], stats: Sequence[PayloadStats]) -> None:
        """Count what was sent for gradients."""
        for gradient, payload in zip(gradients, stats, strict=True):
            if self.traffic.payload(gradient.name, gradient.elements, payload):
                _log.warning(
                    "%s: values beyond the fixed window were clipped; see `saturated` in the "
                    "report",
                    gradient.name,
                )

    # Residuals

    def remembers(self, name: str) -> bool:
        """Whether there is a residual of a tensor."""
        return self.exchange.remembers(name)

    def residual(self, name: str) -> Floats:
        """Return what will be added to a tensor's next gradient, [n] float32."""
        return self.exchange.residual(name) * np.float32(self.settings.decay)
