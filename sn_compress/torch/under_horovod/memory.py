"""State of one optimizer on one rank: the engine, and the exchanges in flight.

Ranks complete their buckets in different orders. If a rank waited for round 2 of one exchange
before starting another exchange's round that a second rank is waiting for, they would deadlock. So
`Pending` always waits for the earliest open round, and among those for the first exchange by key:
a waiting rank has then started everything that another rank can be waiting for. Results that have
arrived are processed whenever something else is started.
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
    """Runs the codec on a CUDA stream parallel to the backward pass's, one per device."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}

    def follow(self, tensor: torch.Tensor) -> None:
        """Make the side stream wait for the computation of this tensor."""
        if tensor.is_cuda:
            device = tensor.device
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)
            self._streams[device].wait_stream(torch.cuda.current_stream(device))
            # If a step fails, the tensor may be freed, and its memory reused too early.
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
        """Make the current streams wait for the side streams."""
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)


Opened = Generator[Any, Any, Any]  # yields what to exchange, and is sent the results


class Wire(Protocol):
    """The rim's collectives, non-blocking."""

    def computing(self) -> AbstractContextManager[None]:
        """Return the context in which the rounds compute."""

    def start(self, name: str, words: Any) -> Any:
        """Send what rounds have yielded; return a handle of the result."""

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
    """The exchanges of one optimizer in flight, by key; keys are the same on all ranks."""

    _exchanges: dict[str, _Exchange] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        """Whether nothing has begun since all exchanges were completed or dropped."""
        return not self._exchanges

    def begin(self, key: str, rounds: Opened, wire: Wire) -> None:
        """Start the first round."""
        with wire.computing():
            exchange = _Exchange(rounds, wire)
            exchange.handle = wire.start(f"sn0.{key}", next(rounds))
        self._exchanges[key] = exchange

    def poll(self) -> None:
        """Advance exchanges whose round has arrived; errors are raised by `complete`."""
        for key, exchange in self._exchanges.items():
            if exchange.handle is not None and exchange.wire.arrived(exchange.handle):
                try:
                    self._advance(key)
                except Exception as error:  # noqa: BLE001, raised where all ranks reach it
                    exchange.error = error

    def complete(self) -> dict[str, Any]:
        """Complete all exchanges; return the results of their rounds, by key.

        If that fails, the step has failed, and all exchanges are dropped.
        """
        try:
            while open_ := [
                (exchange.round, key)
                for key, exchange in self._exchanges.items()
                if not exchange.ended
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
            # Must be waited for, or the framework would keep the result forever.
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


# Optimizers are held weakly: the state is freed with its optimizer.
_of_optimizer: weakref.WeakKeyDictionary[Any, OptimizerState] = weakref.WeakKeyDictionary()


class OptimizerState:
    """An engine, and the progress of its current step.

    of_call : for calls without an optimizer, each of which is a separate step
    """

    unused_number: ClassVar[int] = 0  # lowest number not used in a collective's name on this rank

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
        self._coded: set[str] = set()  # tensors compressed in the current step
        self._dense: set[str] = set()  # tensors sent dense in the current step
        self._number = 0  # part of the names of its collectives, equal on all ranks
        self._broken = 0  # steps aborted since _number was set, equal on all ranks
        # Kinds and names of collectives sent since the last completed step.
        self.sent: set[tuple[str, str]] = set()
        # Whether some of them may wait for a rank that never sends them; equal on all ranks.
        self.has_broken_rounds = False
        self.counts_ranks = False  # whether this step or call has started to count ranks
        self.ranks_sum: int | None = None  # handle of the number of ranks, until it is read
        self.repeats = False  # whether Horovod passes gradients again that it has averaged
        # Gradients that were sent, by id: Horovod writes the mean into the same tensor.
        self._sent_from: weakref.WeakValueDictionary[int, torch.Tensor]
        self._sent_from = weakref.WeakValueDictionary()
        self._steps = 0  # begun since the ranks agreed
        self.nodes = NodeStates(self.engine)  # if it has a place, nodes sum gradients first
        self.is_kept = False  # by an elastic run, for ranks that join later

    def begin_step(self) -> None:
        """Called before the first gradient of a step is sent."""
        self.give_up()
        self._steps += 1
        self.engine.new_step()

    def sends(self, gradient: torch.Tensor) -> None:
        """Note that a gradient is being sent; its mean will be written to the same tensor."""
        self._sent_from[id(gradient)] = gradient

    def has_sent(self, gradient: torch.Tensor | None) -> bool:
        """Whether this very tensor object was sent, not another one that has replaced it."""
        if gradient is None:
            return False
        return gradient.is_sparse or self._sent_from.get(id(gradient)) is gradient

    def uses_placeholders(self) -> bool:
        """Whether Horovod gets placeholders for gradients in buckets; the same on all ranks."""
        # The first gradient arrives through `compress`, before there is a GradientHook, and needs a
        # placeholder. Which gradient that is differs between ranks, so in that step all have one.
        return self._steps <= 1

    def give_up(self) -> None:
        """Drop the exchanges of an aborted step, without waiting for other ranks.

        The step is undone, as ranks may have reached different points of it and must end up equal.
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
        """Set the number in names of collectives, which ranks have agreed is unused on all."""
        self._number, self._broken = number, 0
        OptimizerState.unused_number = max(OptimizerState.unused_number, number + 1)

    def forget_sent(self) -> None:
        """Clear the record of sent collectives: Horovod was restarted, or they have ended."""
        self.sent.clear()
        self.has_broken_rounds = False

    def wire_name(self, key: str) -> str:
        """Return a name for a collective that is not pending in Horovod.

        Collectives that only some ranks sent, from an aborted step or a deleted optimizer, remain.
        """
        return f"{key}.{self._number}.{self._broken}" if self._number or self._broken else key

    def begins(self, names: Iterable[str], *, dense: bool = False) -> None:
        """Note that the engine has begun a step of these tensors."""
        (self._dense if dense else self._coded).update(names)

    def mark_all_sent(self) -> None:
        """Note that all gradients were sent; called when Horovod requests a step's first mean."""
        self._dense.clear()

    def complete(self) -> None:
        """Complete all exchanges; called when Horovod requests a step's first mean.

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
        """Make all ranks agree again and restart counts, before new ranks receive a state."""
        self._broken = self._steps = 0
        self.engine.reset()


def optimizers_with_memory() -> list[Any]:
    """Return the optimizers that have a state."""
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
