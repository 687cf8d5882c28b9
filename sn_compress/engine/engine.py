"""All tensors of one optimizer on one rank: what each step does with them, and what is kept.

    step = engine.sort(gradients, ranks=ranks, total=total)
    for gradient in step.dense: send engine.whole(gradient), and tell engine.learn the mean
    rounds = engine.rounds(step.coded, ranks=ranks, rank=rank)     # yields what to carry

A rim brings gradients as vectors, does the collectives it is asked for, and knows nothing of what
they carry. Steps are told apart by names: one that comes again begins the next step. What ranks
have to decide alike is decided here, from sums that the rim's `total` brings.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np

from .. import __version__
from ..base.agreement import Said, Total, agree, alike, question
from ..base.sameness import Sameness
from ..codecs.base import Floats
from ..devices.arrays import Array, Later, like_of, namespace, quickest
from ..report import Told, Traffic
from ..settings import Settings
from ..sums.session import SharedExchange
from . import hardware, payloads, scattered
from .carry import Carry, Gradient, Rounds, Sorted
from .feedback import ErrorFeedback
from .outcome import Outcome, Outcomes
from .owed import Owed
from .scattered import shares_of
from .seconds import Seconds
from .summed import Sums
from .theta import ThetaInTime

_log = logging.getLogger(__name__)
_STEP = "step"  # what theta is counted by: all tensors have the same


class Chooser(Protocol):
    """What says of each tensor of AutoCompression how it travels: a `prediction.tuning.Tuner`."""

    def method(self, name: str, shape: Sequence[int]) -> str:
        """How the next gradient of a tensor travels, the same on every rank: "plain", or not."""

    def report(self) -> dict[str, float]:
        """What was measured and chosen last."""

    @property
    def idle_steps(self) -> int:
        """Steps from the next one on that need not ask."""

    def pass_by(self, steps: int) -> None:
        """Take note of steps that have not asked."""


class MakesChooser(Protocol):
    """`prediction.tuning.Tuner`, called with the first gradient."""

    def __call__(
        self,
        settings: Settings,
        *,
        ranks: int,
        total: Total,
        methods: Sequence[Literal["gather", "shared"]],
        plain: str,
    ) -> Chooser:
        """For one optimizer; `plain` is what the framework's own way is called in the log."""


class Engine:
    """What belongs to one optimizer on one rank.

    Parameters
    ----------
    settings : the user's
    threads : of the codec, where the settings leave it open
    stock : what the framework's own way is called in the log
    tuner : makes what measures and chooses for AutoCompression; None: all is compressed
    scaler : the loss scaler, if there is one: whatever has get_scale(). Gradients arrive multiplied
        by its scale. A scale smaller than before says that the last step was skipped, on all ranks
        alike: it is aborted, unless `outcomes` knows better. A changed one changes the memories
    outcomes : what became of the gradients of the last pass; None: all were applied
    find_unused : look for gradients of zeros on a device, too, which waits for it: the memory of
        what was not used then stays; on the host it always does
    drops_unused : the framework drops the mean of what no rank has used, so nothing may be sent for
        a gradient of zeros, and its memory waits; where means of all are kept, it travels
    pauses : rounds ask for nothing, once, before what may wait for a device: the rim goes on when
        the backward pass is over

    Attributes
    ----------
    tuner : of AutoCompression, from the first gradient on
    agreed : with how many ranks, None before `agree`
    """

    def __init__(
        self,
        settings: Settings,
        threads: int,
        *,
        stock: str,
        tuner: MakesChooser | None,
        scaler: Any = None,
        outcomes: Outcomes | None = None,
        find_unused: bool = False,
        drops_unused: bool = True,
        pauses: bool = False,
    ) -> None:
        self.settings = settings
        self.theta = ThetaInTime(settings, threads)
        self.codec = settings.codec(threads)  # of the step under way
        self.feedback = ErrorFeedback(self.codec, decay=settings.decay)
        self.shared = SharedExchange(**settings.shared)
        self.owed = Owed()  # of tensors that the tuner lets travel plain
        self.traffic = Traffic()
        self.seconds = Seconds()
        self.sameness = Sameness(settings.check_every)
        self.tuner: Chooser | None = None
        self.agreed: int | None = None
        self.scale: float | None = None  # the unit of the memories
        self.lost = 0.0, 0.0  # energy and error of this step on this rank, if theta follows them
        self._stock, self._find_unused, self._drops_unused = stock, find_unused, drops_unused
        self._make_tuner = tuner if settings.tune else None
        self._sums = Sums(
            self.shared, self.traffic, find_unused=find_unused, drops_unused=drops_unused,
            pauses=pauses,
        )  # fmt: skip
        self._outcomes = outcomes
        self.feedback.undoable = outcomes is not None
        self._open: set[str] = set()  # tensors that were sent and not committed since
        self._aborted = 0  # gradients so far that were sent, and dropped
        self._seen: set[str | None] = set()  # in this step
        # Of the last step on a device: what it lost, and whether what came was damaged.
        self._numbers: list[Later] = []
        self._arrivals: list[payloads.Arrival] = []
        self._scaler: Any = None
        if scaler is not None:
            self.watch(scaler)

    def watch(self, scaler: Any) -> None:
        """Follow a loss scaler from here on."""
        self._scaler = scaler
        self.feedback.undoable = True

    @property
    def exchange(self) -> ErrorFeedback | SharedExchange:
        """Where the memories are of what is compressed."""
        return self.shared if self.settings.exchange == "shared" else self.feedback

    def report(self) -> dict[str, float]:
        """What this rank sent so far, and what the tuner chose; see Compression.report."""
        chosen = self.tuner.report() if self.tuner else {}
        return self.traffic.report() | self.seconds.report(self.traffic.steps) | chosen

    # Before the first step, and between steps

    def agree(
        self, tensors: Said, *, total: Total, rank: int, ranks: int, like: Array, name: str, do: str
    ) -> None:
        """Raise CompressError on every rank unless all have the same settings and tensors.

        Asked once, and anew after `begin_anew`. like : an array where the gradients are
        """
        if self.agreed == ranks:
            return
        said = [
            *self.settings.said(),
            ("scaler", "none" if self._scaler is None else "one"),
            ("version of sn_compress", __version__),
            *tensors,
        ]
        agree(said, total=total, rank=rank, ranks=ranks, name=name, do=do)
        if self.settings.exchange == "shared":
            self.shared.exact = not alike(
                total("hardware", question(hardware.said(quickest(like))))
            )
        self.agreed, self.traffic.speaks = ranks, rank == 0

    def compare(
        self, parameters: Said | None, *, total: Total, rank: int, ranks: int, hint: str = ""
    ) -> None:
        """CompressError, on every rank, if parameters differ; where `sameness.step()` said so.

        parameters : their names and digests; None where this rank's need not be those of others
        hint : for the message
        """
        at = self.sameness.steps - 1
        if parameters is not None:
            parameters = [*self.counted(), *parameters]
        if not alike(total("same", question(parameters))):
            raise self.sameness.apart(
                at, parameters, total=total, rank=rank, ranks=ranks, hint=hint
            )
        if parameters is not None:
            self.sameness.found(at)

    def counted(self) -> Said:
        """What ranks decide by themselves, and have to decide alike, to be compared."""
        return [("gradients that were dropped", str(self._aborted))]

    def new_step(self) -> None:
        """The next gradient begins a step, whatever has become of the last one."""
        self._seen.clear()

    def forget_step(self) -> None:
        """As before the first gradient: another state has been taken over."""
        self.feedback.commit()
        self._open.clear()
        self._seen.clear()
        self._numbers.clear()
        self._arrivals.clear()

    def begin_anew(self) -> None:
        """When ranks have come or gone: all agree again, and count steps from here."""
        self.tuner = self.agreed = None  # it counted the steps of other ranks
        self._aborted = 0
        self.sameness.begin_anew()
        self.new_step()

    # A step

    def sort(
        self,
        gradients: Sequence[Gradient],
        *,
        ranks: int,
        total: Total,
        plain_itemsize: int | None = None,
    ) -> Sorted:
        """How these gradients travel, the same on every rank; they are counted as that.

        What is owed of them is added to their values.

        plain_itemsize : bytes of an element where it travels plain; by default as it is
        """
        with payloads.on_stream_of(gradients[0].values):
            self._open_step({gradient.name for gradient in gradients}, total)
        self._begin([gradient.name for gradient in gradients if gradient.name is not None])
        step = Sorted([], [], [])
        for gradient in gradients:
            n, name = gradient.elements, gradient.name
            nbytes = n * (plain_itemsize or gradient.values.dtype.itemsize)
            if not self._takes(gradient) or self._gives_up(gradient, ranks, total):
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
        # Without a name no rank knows what another one has agreed to.
        if not gradient.is_float or (name is None and self.settings.exchange == "shared"):
            return False
        if name is None:
            self.theta.codec_for(None)  # an error if theta has steps to count
            return self.settings.compresses(gradient.shape)
        return self.shared.takes(name, gradient.shape)

    def _is_dense(self, name: str, shape: Sequence[int]) -> bool:
        return self.settings.exchange == "shared" and self.shared.dense(name, shape)

    def _gives_up(self, gradient: Gradient, ranks: int, total: Total) -> bool:
        """Whether the tuner has this tensor travel plain; what is owed of it goes along."""
        name, values = gradient.name, gradient.values
        if self._make_tuner is None or name is None:
            return False
        if self.tuner is None:
            methods = (self.settings.exchange,)
            self.tuner = self._make_tuner(
                self.settings, ranks=ranks, total=total, methods=methods, plain=self._stock
            )
        plain = self.tuner.method(name, gradient.shape) == "plain"
        if plain:
            self.owed.take(name, self.exchange)
        if name in self.owed and payloads.is_used(values):
            left = like_of(self.owed.pay(name, gradient.elements), values)
            values += namespace(values).astype(left, values.dtype)
        return plain

    def whole(self, gradient: Gradient, *, wire: Any = None) -> Array:
        """What to average of a dense gradient, [n] of `wire`: with all that was not sent yet.

        wire : a dtype of its library; by default that of the gradient
        """
        values = gradient.values
        return self.shared.whole(str(gradient.name), values, wire=wire or values.dtype)

    def learn(self, name: str, mean: Array) -> None:
        """The mean that a dense gradient has got, [n]; the same on every rank."""
        self.shared.learn(name, mean)

    def rounds(self, gradients: Sequence[Gradient], *, ranks: int, rank: int) -> Rounds:
        """Average gradients that are coded, in their place.

        All ranks take the same gradients through their rounds, in the same order.
        """
        return self.seconds.of_codec(self._rounds(gradients, ranks=ranks, rank=rank))

    def _rounds(self, gradients: Sequence[Gradient], *, ranks: int, rank: int) -> Rounds:
        if self.settings.exchange == "shared":
            return self._sums.rounds(gradients, ranks=ranks, rank=rank)
        codec, shares = self.codec, None
        if self.settings.scatter:
            shares = shares_of(codec, tuple(each.elements for each in gradients), ranks)
        encode = partial(
            payloads.encode,
            find_unused=self._find_unused,
            drops_unused=self._drops_unused,
            tally=self.theta.learns,
        )
        feedback = self.feedback if self.settings.feedback else None
        if shares is None:
            return self._gathered(gradients, ranks, partial(encode, codec, feedback=feedback))
        return self._scattered(scattered.Bucket(gradients, shares, rank, feedback, encode))

    def _gathered(
        self, gradients: Sequence[Gradient], ranks: int, encode: Callable[..., payloads.Sent]
    ) -> Rounds:
        codec, sent = self.codec, encode(gradients)
        self._tell(gradients, [sent], [Told.of([payload]) for payload in sent.payloads])
        (gathered,) = yield [Carry("gather", sent.wire)]
        if arrival := payloads.decode(codec, gathered, gradients, ranks=ranks):
            self._arrivals.append(arrival)

    def _scattered(self, bucket: scattered.Bucket) -> Rounds:
        shares = bucket.shares
        (came,) = yield [Carry("alltoall", bucket.begin(), shares.parts_bytes)]
        (came,) = yield [Carry("gather", bucket.own(came), shares.means_bytes)]
        bucket.end(came)
        self._tell(bucket.gradients, bucket.sent, bucket.told())
        self._arrivals += bucket.arrivals

    def _open_step(self, names: set[str | None], total: Total) -> None:
        if names & self._seen or not self._seen:
            self.settle()
            self._seen.clear()
            if self.settings.exchange == "gather":
                self._next_theta(total)
        self._seen |= names

    def _next_theta(self, total: Total) -> None:
        """The codec of the step that begins, the same for all tensors and on all ranks."""
        for numbers in self._numbers:
            energy, error, _ = numbers.read()
            self.lost = self.lost[0] + energy, self.lost[1] + error
            self.traffic.lost(energy, error)
        self._numbers.clear()
        energy, error = self.lost
        if self.theta.learns:
            energy, error = total("lost", np.array(self.lost)).tolist()
        self.codec = self.theta.codec_at(self.theta.begin_step(_STEP, energy, error))
        self.lost = 0.0, 0.0

    def _tell(
        self, gradients: Sequence[Gradient], sent: Sequence[payloads.Sent], told: Sequence[Told]
    ) -> None:
        """Count what was sent of gradients, and what was lost for a theta that follows it."""
        later = [each.numbers for each in sent if each.numbers is not None]
        self._numbers += later
        for gradient, each in zip(gradients, told, strict=True):
            if self.theta.learns and not later:
                energy, error = self.theta.tell(each)
                self.lost = self.lost[0] + energy, self.lost[1] + error
            if self.traffic.payload(gradient.name, gradient.elements, each):
                _log.warning(
                    "%s: values beyond the fixed window were clipped; see `saturated` in the "
                    "report",
                    gradient.name,
                )

    # Of gradients that were sent and never applied, nothing is sent later

    def _begin(self, names: Sequence[str]) -> None:
        self._open.update(names)
        if self._outcomes is not None:
            self._outcomes.sent(names)

    def commit(self, names: Collection[str]) -> None:
        """Keep what was sent of tensors: it was applied, or its sums go on in gradients."""
        self._open.difference_update(names)
        for part in (self.feedback, self.shared, self.owed):
            part.commit(names)

    def abort(self, names: Collection[str]) -> None:
        """Remember of tensors what was remembered when they were committed last."""
        self._open.difference_update(names)
        self._aborted += len(names)
        for part in (self.shared, self.feedback, self.owed):
            part.abort(names)

    def settle(self) -> None:
        """Between passes: commit what was applied, abort what was thrown away; follow the scale.

        Raises PayloadError if a payload of the last step was damaged, on a device.
        """
        arrivals, self._arrivals = self._arrivals, []
        for arrival in arrivals:
            arrival.conclude()
        factor = self._scale_factor()
        outcomes = {name: self._outcome(name) for name in self._open}
        # A scaler that has skipped a step lowers its scale. Of another scale, held gradients and
        # those of the pass that begins add up to nothing.
        gone = ("dropped",) if factor >= 1 else ("dropped", "held", "unknown")
        kept = ("applied", "unknown") if factor == 1 else ("applied", "unknown", "held")
        self.abort([name for name, outcome in outcomes.items() if outcome in gone])
        self.commit([name for name in self._open if outcomes[name] in kept])
        if factor != 1:
            for part in (self.feedback, self.shared, self.owed):
                part.rescale(factor)

    def _scale_factor(self) -> float:
        """The scaler's scale now over that before."""
        if self._scaler is None:
            return 1.0
        before, self.scale = self.scale, float(self._scaler.get_scale())
        return 1.0 if before is None else self.scale / before

    def _outcome(self, name: str) -> Outcome:
        return "unknown" if self._outcomes is None else self._outcomes.of(name)

    # What this rank has yet to send

    def remembers(self, name: str) -> bool:
        """Whether anything of a tensor has yet to be sent."""
        return self.exchange.remembers(name) or name in self.owed

    def residual(self, name: str) -> Floats:
        """What of a tensor travels with its next gradient, [n] float32."""
        if not self.exchange.remembers(name):
            return self.owed.left(name)
        left = self.exchange.residual(name) * np.float32(self.settings.decay)
        return left + self.owed.left(name) if name in self.owed else left
