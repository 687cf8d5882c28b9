"""What belongs to one optimizer on one rank: the engine, and what of a step is on its way.

Ranks complete their buckets in different orders. A rank that waited for the second round of one
exchange before it has begun that of another, for which a second rank waits, would wait for ever.
So `Pending` always waits for the earliest open round, of the first exchange by key: whoever waits
has begun all that another rank can wait for before. What has arrived is taken in whenever something
else is begun.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch

from ...collective import Buckets
from ...engine.engine import Engine
from ...engine.engine_state import NodeStates
from ...errors import CompressError
from ...prediction import new_tuner
from ...settings import Settings
from ..outcomes import Outcomes
from ..process_group import CallWatch
from .hooks import GradientHook


class SideStream:
    """A CUDA stream for the codec beside that of the backward pass, one for each device."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}

    def follow(self, tensor: torch.Tensor) -> None:
        """Have the side stream wait for what has computed this tensor."""
        if tensor.is_cuda:
            device = tensor.device
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)
            self._streams[device].wait_stream(torch.cuda.current_stream(device))
            # Where a step fails nobody holds the tensor, and its memory would be used again.
            tensor.record_stream(self._streams[device])

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Compute on the side stream."""
        if device not in self._streams:
            yield
            return
        with torch.cuda.stream(self._streams[device]):
            yield

    def join(self) -> None:
        """Have the current streams wait for the side streams."""
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)


Opened = Generator[Any, Any, Any]  # yields what is to be exchanged, is sent the results


class Wire(Protocol):
    """The rim's collectives, without waiting."""

    def computing(self) -> AbstractContextManager[None]:
        """Return the context in which the rounds compute."""

    def start(self, name: str, words: Any) -> Any:
        """Send what rounds have yielded; return the handle of its result."""

    def arrived(self, handle: Any) -> bool:
        """Whether `wait` would return at once."""

    def wait(self, handle: Any) -> Any:
        """Wait for the result, once."""


@dataclass
class _Exchange:
    rounds: Opened
    wire: Wire
    handle: Any = None
    round: int = 0
    ended: bool = False
    result: Any = None
    error: BaseException | None = None  # raised by `poll`


@dataclass
class Pending:
    """The exchanges of one optimizer that are on their way, by key: alike on all ranks."""

    _exchanges: dict[str, _Exchange] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        """Whether nothing was begun since all exchanges were completed or dropped."""
        return not self._exchanges

    def begin(self, key: str, rounds: Opened, wire: Wire) -> None:
        """Start the first round."""
        with wire.computing():
            exchange = _Exchange(rounds, wire)
            exchange.handle = wire.start(f"sn0.{key}", next(rounds))
        self._exchanges[key] = exchange

    def poll(self) -> None:
        """Advance exchanges whose round has arrived; what fails is raised by `complete`."""
        for key, exchange in self._exchanges.items():
            if exchange.handle is not None and exchange.wire.arrived(exchange.handle):
                try:
                    self._advance(key)
                except Exception as error:  # noqa: BLE001, raised where all ranks come to it
                    exchange.error = error

    def complete(self) -> dict[str, Any]:
        """Complete all exchanges; return what their rounds have returned, by key.

        If that fails, the step has failed, and all exchanges are dropped.
        """
        try:
            while open_ := [
                (one.round, key) for key, one in self._exchanges.items() if not one.ended
            ]:
                self._advance(min(open_)[1])
        except BaseException:
            self.drop()
            raise
        ended, self._exchanges = self._exchanges, {}
        return {key: exchange.result for key, exchange in ended.items()}

    def drop(self) -> None:
        """Drop all exchanges, after a step that failed, without waiting for other ranks."""
        dropped, self._exchanges = self._exchanges, {}
        for exchange in dropped.values():
            # Waited for, or the framework would keep the sum forever.
            with suppress(Exception):
                if exchange.handle is not None and exchange.wire.arrived(exchange.handle):
                    exchange.wire.wait(exchange.handle)

    def _advance(self, key: str) -> None:
        exchange = self._exchanges[key]
        if exchange.error is not None:
            raise exchange.error
        handle, exchange.handle = exchange.handle, None  # Horovod forgets a handle once waited for
        summed = exchange.wire.wait(handle)
        try:
            with exchange.wire.computing():
                words = exchange.rounds.send(summed)
                exchange.handle = exchange.wire.start(f"sn{exchange.round + 1}.{key}", words)
            exchange.round += 1
        except StopIteration as end:
            exchange.ended, exchange.result = True, end.value


# Optimizers are held weakly: a dropped optimizer takes its memory along.
_of_optimizer: weakref.WeakKeyDictionary[Any, OptimizerState] = weakref.WeakKeyDictionary()


class OptimizerState:
    """An engine, and how far its step has come.

    of_call : for calls without an optimizer, each of which is a step of its own
    """

    unused_number: ClassVar[int] = 0  # the least that no collective's name has had on this rank

    def __init__(self, settings: Settings, *, of_call: bool = False) -> None:
        self.settings = settings
        self.outcomes = Outcomes()
        self.engine = Engine(
            settings,
            torch.get_num_threads(),
            stock="Horovod",
            tuner=None if of_call else new_tuner,
            outcomes=None if of_call else self.outcomes,
            drops_unused=False,
            pauses=True,
        )
        self.pending = Pending()
        self.side = SideStream()
        self.buckets: Buckets | None = None
        self.submission: GradientHook | None = None
        self.watch: CallWatch | None = None
        self._coded: set[str] = set()  # tensors that are coded in the step under way
        self._dense: set[str] = set()  # likewise, those that travel dense
        self._number = 0  # in names of its collectives, equal on all ranks
        self._broken = 0  # steps that broke off since it was set, on all ranks alike
        # Kinds and names of collectives since the last step that was completed.
        self.sent: set[tuple[str, str]] = set()
        # Equal on all ranks: some of these collectives may wait for a rank that never sends them.
        self.has_broken_rounds = False
        self.counts_ranks = False  # has begun to, in this step or call
        self.ranks_sum: int | None = None  # handle of the number of ranks, until it is read
        self.repeats = False  # Horovod asks again about gradients that it has averaged
        # Gradients that were sent, by id: Horovod writes the mean into the same tensor.
        self._sent_from: weakref.WeakValueDictionary[int, torch.Tensor]
        self._sent_from = weakref.WeakValueDictionary()
        self._steps = 0  # begun since the ranks agreed
        self.nodes = NodeStates(self.engine)  # with a place, gradients are summed by nodes first
        self.is_kept = False  # by an elastic run, for ranks that come later

    def begin_step(self) -> None:
        """Called before the first gradient of a step is sent."""
        self.give_up()
        self._steps += 1
        self.engine.new_step()

    def sends(self, gradient: torch.Tensor) -> None:
        """Note that a gradient is being sent; its mean will be written to the same tensor."""
        self._sent_from[id(gradient)] = gradient

    def has_sent(self, gradient: torch.Tensor | None) -> bool:
        """Whether this very tensor was sent, and not another one that has taken its place."""
        if gradient is None:
            return False
        return gradient.is_sparse or self._sent_from.get(id(gradient)) is gradient

    def uses_placeholders(self) -> bool:
        """Whether Horovod gets placeholders for gradients in buckets: the same on all ranks."""
        # The first gradient comes by `compress`, before there is a GradientHook, and needs one.
        # Which gradient it is differs between ranks, so in that step all have one.
        return self._steps <= 1

    def give_up(self) -> None:
        """Drop the exchanges of a step that broke off, without waiting for other ranks.

        The step is undone: ranks may have reached different points of it, and must end up equal.
        """
        under_way = not self.pending.empty
        self.pending.drop()
        self.counts_ranks, self.ranks_sum = False, None
        self.side.join()
        filed = self.buckets is not None and self.buckets.incomplete()
        names, self._coded, self._dense = self._coded | self._dense, set(), set()
        if filed or names or under_way:
            # Some ranks may have sent a round that others never will.
            self._broken += 1
            self.has_broken_rounds = True
        self.engine.transaction.undo(names)
        if self.buckets is not None:
            self.buckets.begin()

    def set_number(self, number: int) -> None:
        """Set the number in names of collectives, on which ranks agreed as new to all of them."""
        self._number, self._broken = number, 0
        OptimizerState.unused_number = max(OptimizerState.unused_number, number + 1)

    def forget_sent(self) -> None:
        """Forget the collectives that were sent: Horovod was restarted, or they have ended."""
        self.sent.clear()
        self.has_broken_rounds = False

    def wire_name(self, key: str) -> str:
        """Return a name for collectives under which Horovod waits for nothing.

        What one rank has sent, and no other, of a broken step or a deleted optimizer, stays there.
        """
        return f"{key}.{self._number}.{self._broken}" if self._number or self._broken else key

    def begins(self, names: Iterable[str], *, dense: bool = False) -> None:
        """Note that the engine has begun a step of these tensors."""
        (self._dense if dense else self._coded).update(names)

    def mark_all_sent(self) -> None:
        """Note that all gradients were sent; called when Horovod asks for a step's first mean."""
        self._dense.clear()

    def complete(self) -> None:
        """Complete all exchanges, for the first mean of a step that Horovod asks for.

        If that fails, the step has failed.
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

    def reset(self) -> None:
        """Let all ranks agree again and count from here, before new ranks receive a state."""
        self._broken = self._steps = 0
        self.engine.reset()


def optimizers_with_memory() -> list[Any]:
    """The optimizers that have a state."""
    return list(_of_optimizer)


def memory_of(optimizer: Any) -> OptimizerState:
    """Return an optimizer's state, created on first use; CompressError if it is not compressed."""
    compression = getattr(optimizer, "_compression", None)
    settings = getattr(compression, "settings", None)
    if not isinstance(settings, Settings):
        raise CompressError(
            f"{type(optimizer).__name__} was not made by hvd.DistributedOptimizer(..., "
            "compression=FFTCompression); pass the optimizer that it returned"
        )
    if optimizer not in _of_optimizer:
        _of_optimizer[optimizer] = OptimizerState(settings)
    return _of_optimizer[optimizer]
