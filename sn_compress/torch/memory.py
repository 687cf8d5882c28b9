"""What belongs to one optimizer on one rank: exchange, memories, counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..codecs.base import Payload
from ..codecs.fft import FFTCodec
from ..exchange.pending import Pending
from ..feedback import ErrorFeedback
from ..prediction.tuning import SumOfRanks, Tuner
from ..report import Traffic
from ..sameness import Sameness
from ..settings import Settings
from ..sums.session import SharedExchange
from ..theta import ThetaInTime
from .aside import Aside


class Memory:
    """What belongs to one optimizer: codec, error memory, counts."""

    def __init__(self, settings: Settings, threads: int) -> None:
        self.settings = settings
        self.feedback = ErrorFeedback(settings.codec(threads), decay=settings.decay)
        self.theta = ThetaInTime(settings, threads)
        self.shared = settings.shared()
        self.pending = Pending()
        self.traffic = Traffic()
        self.sameness = Sameness(settings.check_every)
        self.agreed: int | None = None  # with how many ranks
        self.tuner: Tuner | None = None  # of AutoCompression
        self.aside: Aside | None = None  # where the tuner has settled on plain
        self.scaler: Any = None  # watched, see Compression.watch
        self._scale = 1.0
        self._seen: set[str | None] = set()
        self._lost = False

    def enter(self, name: str | None) -> None:
        """A gradient arrives; that of a name seen before begins a new step."""
        if self.scaler is None:
            return
        if name in self._seen:
            self._seen.clear()
        if not self._seen:
            self._follow_scaler()
        self._seen.add(name)

    def check(self, mean: Any) -> None:
        """Note a mean that a watched loss scaler will skip."""
        if self.scaler is not None and not np.isfinite(mean).all():
            self._lost = True

    def watch(self, scaler: Any) -> None:
        """See Compression.watch."""
        self.scaler, self._scale = scaler, scaler.get_scale()
        self.feedback.undoable = True

    def _follow_scaler(self) -> None:
        if self._lost:
            # A step with NaN in any tensor was skipped on all ranks: what the other tensors
            # sent in it has reached nobody.
            self.feedback.undo()
            self.shared.undo()
            self._lost = False
        self.feedback.settle()
        self.shared.settle()
        scale = self.scaler.get_scale()
        if scale != self._scale:  # the memories are of scaled gradients
            self.feedback.rescale(scale / self._scale)
            self.shared.rescale(scale / self._scale)
            self._scale = scale

    def plain(self, name: str, shape: Sequence[int], *, ranks: int, total: SumOfRanks) -> bool:
        """Whether the next gradient of a tensor travels as without compression."""
        if not self.settings.tune:
            return False
        if self.tuner is None:
            methods = (self.settings.exchange,)
            self.tuner = Tuner(self.settings, ranks=ranks, total=total, methods=methods)
        return self.tuner.method(name, shape) == "plain"

    def stand_aside(self, optimizer: Any) -> None:
        """Leave the optimizer to stock Horovod for as long as the tuner has nothing to do.

        Called when a tensor goes plain by the tuner's choice.
        """
        steps = self.tuner.idle_steps if self.tuner and self.aside is None else 0
        steps = min(steps, self.sameness.free_steps)
        tensors, under_way = self.traffic.tensors
        # A tensor that only some steps ask about would make ranks lose count of each other.
        if steps and tensors == len(optimizer._requires_update):
            self.aside = Aside(
                optimizer, tensors=tensors, under_way=under_way, steps=steps, wake=self._awake
            )
            self.traffic.finish_step()

    def _awake(self, steps: int) -> None:
        self.count()
        self.aside = None
        self.sameness.pass_by(steps)
        if self.tuner:
            self.tuner.pass_by(steps)

    def count(self) -> None:
        """Take into the traffic what has been sent while standing aside."""
        if self.aside:
            self.traffic.plain_steps(self.aside.take())

    def come_back(self) -> None:
        """Before a state is loaded or shared: ask about every tensor again."""
        if self.aside:
            self.aside.end()

    def begin_anew(self) -> None:
        """Before ranks that came share a state: all agree again, and count from here."""
        self.come_back()
        self.tuner = None  # it counted the steps of other ranks
        self.agreed = None
        self.sameness.begin_anew()

    def release(self, name: str) -> Any:
        """What was not sent of a tensor that travels plain from now on, [n]; None for nothing."""
        if not self.exchange.remembers(name):
            return None
        return self.exchange.release(name)

    @property
    def exchange(self) -> ErrorFeedback | SharedExchange:
        """The one in use: where the memories are."""
        return self.shared if self.settings.exchange == "shared" else self.feedback

    def encode(self, name: str | None, values: Any) -> tuple[FFTCodec, Payload]:
        """The payload of the gather exchange, and the codec to read it with."""
        codec = self.theta.codec_for(name)
        # Without a name there is nothing to key a memory by.
        if name is None or not self.settings.feedback:
            return codec, codec.encode(values)
        return codec, self.feedback.encode(name, values, codec=codec)
