"""What belongs to one optimizer on one rank: the engine, and what of a step is on its way."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, ClassVar

import torch

from ...base.errors import CompressError
from ...engine.buckets import Buckets
from ...engine.engine import Engine
from ...prediction.tuning import Tuner
from ...settings import Settings
from ..outcomes import Outcomes
from .aside import Aside
from .pending import Pending
from .streams import SideStream
from .submission import Submission

# Optimizers are held weakly: a dropped optimizer takes its memory along.
_of_optimizer: weakref.WeakKeyDictionary[Any, Memory] = weakref.WeakKeyDictionary()


class Memory:
    """An engine, and how far its step has come.

    alone : of calls without an optimizer, each of which is a step of its own
    """

    unused_number: ClassVar[int] = 0  # that no names of collectives have had on this rank

    def __init__(self, settings: Settings, *, alone: bool = False) -> None:
        self.settings = settings
        self.outcomes = Outcomes()
        self.engine = Engine(
            settings,
            torch.get_num_threads(),
            stock="Horovod",
            tuner=None if alone else Tuner,
            outcomes=None if alone else self.outcomes,
            drops_unused=False,
            pauses=True,
        )
        self.pending = Pending()
        self.side = SideStream()
        self.buckets: Buckets | None = None
        self.submission: Submission | None = None
        self.aside: Aside | None = None  # where the tuner has settled on plain
        self._coded: set[str] = set()  # of which the engine has begun this step, until its end
        self._dense: set[str] = set()  # likewise, where it is dense
        self._number = 0  # of its names, on all ranks alike
        self._broken = 0  # steps that broke off since it has that, on all ranks alike
        # Kinds and names of collectives since the last step that came to its end.
        self.sent: set[tuple[str, str]] = set()
        # On all ranks alike: some of these may wait for a rank that never sends them.
        self.leaves_some = False
        self.counts_ranks = False  # in this step, or call
        self.ranks_sum: int | None = None  # the handle of their number, until it was read
        self.repeats = False  # Horovod asks again about what it has averaged
        # Gradients that were sent: Horovod writes the mean into the same tensor.
        self._sent_from: weakref.WeakValueDictionary[int, torch.Tensor]
        self._sent_from = weakref.WeakValueDictionary()
        self._steps = 0  # begun in a row, since ranks came or this stood aside

    def begin_step(self) -> None:
        """The first gradient of a step is about to be sent."""
        self.give_up()
        self._steps += 1
        self.engine.new_step()

    def sends(self, gradient: torch.Tensor) -> None:
        """A gradient is on its way, and its mean will be in the same tensor."""
        self._sent_from[id(gradient)] = gradient

    def has_sent(self, gradient: torch.Tensor | None) -> bool:
        """Whether a tensor was sent; not one of zeros, or by hand, that came in its place."""
        if gradient is None:
            return False
        return gradient.is_sparse or self._sent_from.get(id(gradient)) is gradient

    def stands_in(self) -> bool:
        """Whether Horovod is handed a stand-in for what travels in buckets: alike on all ranks."""
        return self._steps <= 1

    def give_up(self) -> None:
        """Forget what is on its way, of a step that broke off; waits for no other rank.

        It is taken back: ranks may have come to different places of it, and have to be alike.
        """
        under_way = not self.pending.empty
        self.pending.drop()
        self.counts_ranks, self.ranks_sum = False, None
        self.side.join()
        filed = self.buckets is not None and self.buckets.rest()
        begun, self._coded, self._dense = self._coded | self._dense, set(), set()
        if filed or begun or under_way:
            # Some ranks may have sent a round off that others never will.
            self._broken += 1
            self.leaves_some = True
        if self.settings.exchange == "shared":
            self.engine.shared.undo(begun)
        if self.buckets is not None:
            self.buckets.begin()

    def take_number(self, number: int) -> None:
        """Ranks have agreed on a number that no names had before on any of them."""
        self._number, self._broken = number, 0
        Memory.unused_number = max(Memory.unused_number, number + 1)

    def forget_sent(self) -> None:
        """Nothing waits any more: Horovod was started anew, or it was brought to its end."""
        self.sent.clear()
        self.leaves_some = False

    def wire_name(self, key: str) -> str:
        """That of collectives, under which nothing of a step that broke off is still waiting.

        Of no optimizer that is gone, either: what one rank had sent, and no other, waits for ever.
        """
        return f"{key}.{self._number}.{self._broken}" if self._number or self._broken else key

    def begins(self, names: Iterable[str], *, dense: bool = False) -> None:
        """The engine begins a step of these tensors."""
        (self._dense if dense else self._coded).update(names)

    def comes_back(self) -> None:
        """The framework hands out its first mean of this step: all gradients were sent."""
        self._dense.clear()

    def complete(self) -> None:
        """All that is on its way comes to its end; if that fails, so has the step.

        For the first mean that is asked for in a step, and nothing for those behind it.
        """
        if not self._coded and self.pending.empty:
            return
        try:
            self.pending.complete()
        except BaseException:
            self.give_up()
            raise
        self.side.join()
        self._coded.clear()
        self.sent.clear()

    def rest(self) -> None:
        """Nothing is being computed any more, in whatever thread or stream."""
        self.pending.settle()
        self.side.join()

    def stand_aside(self, optimizer: Any) -> None:
        """Leave the optimizer to stock Horovod for as long as the tuner has nothing to do.

        Called when a tensor goes plain by the tuner's choice.
        """
        engine = self.engine
        steps = engine.tuner.idle_steps if engine.tuner and self.aside is None else 0
        steps = min(steps, engine.sameness.free_steps)
        tensors, under_way = engine.traffic.tensors
        # A tensor that only some steps ask about would make ranks lose count of each other.
        if steps and tensors == len(optimizer._requires_update):
            self.aside = Aside(
                optimizer, tensors=tensors, under_way=under_way, steps=steps, wake=self._awake
            )
            engine.traffic.finish_step()
            self._steps = 0
            if self.submission is not None:
                self.submission.end()

    def _awake(self, steps: int) -> None:
        self.count()
        self.aside = None
        self.engine.sameness.pass_by(steps)
        if self.engine.tuner:
            self.engine.tuner.pass_by(steps)

    def count(self) -> None:
        """Take into the traffic what has been sent while standing aside."""
        if self.aside:
            self.engine.traffic.plain_steps(self.aside.take())

    def come_back(self) -> None:
        """Before a state is loaded or shared: ask about every tensor again."""
        if self.aside:
            self.aside.end()

    def begin_anew(self) -> None:
        """Before ranks that came share a state: all agree again, and count from here."""
        self.come_back()
        self._broken = self._steps = 0
        self.engine.begin_anew()


def memory_of(optimizer: Any) -> Memory:
    """That of an optimizer, made when first asked for; CompressError if it has none of ours."""
    compression = getattr(optimizer, "_compression", None)
    settings = getattr(compression, "settings", None)
    if not isinstance(settings, Settings):
        raise CompressError(
            f"{type(optimizer).__name__} was not made by hvd.DistributedOptimizer(..., "
            "compression=FFTCompression); pass the optimizer that it returned"
        )
    if optimizer not in _of_optimizer:
        _of_optimizer[optimizer] = Memory(settings)
    return _of_optimizer[optimizer]
