"""What belongs to one optimizer on one rank: exchange, memories, counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..codecs.base import Payload
from ..codecs.fft import FFTCodec
from ..exchange.pending import Pending
from ..exchange.session import SharedExchange
from ..feedback import ErrorFeedback
from ..prediction.tuning import SumOfRanks, Tuner
from ..report import Traffic
from ..sameness import Sameness
from ..settings import Settings
from ..theta import ThetaInTime
from .aside import Aside
from .buckets import Buckets
from .streams import SideStream


class Memory:
    """What belongs to one optimizer: codec, error memory, counts."""

    def __init__(self, settings: Settings, threads: int) -> None:
        self.settings = settings
        self.feedback = ErrorFeedback(settings.codec(threads), decay=settings.decay)
        self.theta = ThetaInTime(settings, threads)
        self.shared = settings.shared()
        self.pending = Pending()
        self.side = SideStream()
        self.buckets: Buckets | None = None
        self._failed_steps = 0  # that broke off, on all ranks alike
        self._coded: set[str] = set()  # of which the exchange has begun this step, until its end
        self._dense: set[str] = set()  # likewise, where it is dense
        self.traffic = Traffic()
        self.sameness = Sameness(settings.check_every)
        self.agreed: int | None = None  # with how many ranks
        self.tuner: Tuner | None = None  # of AutoCompression
        self.aside: Aside | None = None  # where the tuner has settled on plain
        self.scaler: Any = None  # watched, see Compression.watch
        self._scale = 1.0
        self._broken = 0  # steps that broke off, on all ranks alike

    def begin_step(self) -> None:
        """The first gradient of a step is about to be sent."""
        self.give_up()
        self.settle()

    def give_up(self) -> None:
        """Forget what is on its way, of a step that broke off; waits for no other rank.

        It is taken back: ranks may have come to different places of it, and have to be alike.
        """
        self.pending.drop()
        self.side.join()
        filed = self.buckets is not None and self.buckets.rest()
        begun, self._coded, self._dense = self._coded | self._dense, set(), set()
        if filed or begun:
            # Some ranks may have sent a round off that others never will.
            self._broken += 1
        if self.settings.exchange == "shared":
            self.shared.undo(begun)
        if self.buckets is not None:
            self.buckets.begin()

    def wire_name(self, key: str) -> str:
        """That of collectives, under which nothing of a step that broke off is still waiting."""
        return f"{key}.{self._broken}" if self._broken else key

    def begins(self, names: Iterable[str], *, dense: bool = False) -> None:
        """The exchange begins a step of these tensors."""
        (self._dense if dense else self._coded).update(names)

    def comes_back(self) -> None:
        """The framework hands out its first mean of this step: all gradients were sent."""
        self._dense.clear()

    def complete(self) -> None:
        """All that is on its way comes to its end; if that fails, so has the step."""
        try:
            self.pending.complete()
        except BaseException:
            self.give_up()
            raise
        self.side.join()
        self._coded.clear()

    def watch(self, scaler: Any) -> None:
        """See Compression.watch."""
        self.scaler, self._scale = scaler, scaler.get_scale()
        self.feedback.undoable = True

    def settle(self) -> None:
        """Keep what was done so far; take a step back that a watched scaler has skipped."""
        if self.scaler is None:
            return
        scale = self.scaler.get_scale()
        if scale < self._scale:  # that is how a scaler says so, on all ranks alike
            self.feedback.undo()
            self.shared.undo()
        self.feedback.settle()
        self.shared.settle()
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
        self._broken = 0
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
