"""What belongs to one optimizer on one rank: the engine, and what of a step is on its way.

A stream of its own for the codec, beside the one of the backward pass; nothing on the host.

Exchanges in mid-way: every round of all of them is begun before one is waited for.

Ranks finish their tensors in different orders. One that waited for the second round of one
exchange, and had not begun that of another for which a second rank waits, would wait for ever. So
what is waited for is always the first round that is open, of the first exchange in it: whoever
waits has begun all that another rank can wait for before.

What has arrived is looked at whenever something else is begun, and never waited for.
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
from ...engine.hierarchy import Place
from ...errors import CompressError
from ...prediction import new_tuner
from ...settings import Settings
from ..outcomes import Outcomes
from .hooks import GradientHook


class SideStream:
    """One for each CUDA device of which gradients come."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}

    def follow(self, tensor: torch.Tensor) -> None:
        """What is done on the side from now on comes behind what made this tensor."""
        if tensor.is_cuda:
            device = tensor.device
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)
            self._streams[device].wait_stream(torch.cuda.current_stream(device))
            tensor.record_stream(self._streams[device])  # where a step fails, nobody holds it

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Work on the side."""
        if device not in self._streams:
            yield
            return
        with torch.cuda.stream(self._streams[device]):
            yield

    def join(self) -> None:
        """What is done on the current streams from now on comes behind what is on the side."""
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)


Opened = Generator[Any, Any, Any]  # yields what is to be exchanged, is sent what came of it


class Wire(Protocol):
    """The rim's collectives, without waiting."""

    def computing(self) -> AbstractContextManager[None]:
        """Return the context in which the rounds compute."""

    def start(self, name: str, words: Any) -> Any:
        """Send off what rounds have yielded; the handle of what comes of it."""

    def arrived(self, handle: Any) -> bool:
        """Whether `wait` would return at once."""

    def wait(self, handle: Any) -> Any:
        """What came of it."""


@dataclass
class _Underway:
    rounds: Opened
    wire: Wire
    handle: Any = None
    round: int = 0
    ended: bool = False
    result: Any = None
    error: BaseException | None = None  # found while something else was begun


@dataclass
class Pending:
    """The exchanges of one optimizer that are on their way, by key: alike on all ranks."""

    _underway: dict[str, _Underway] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        """Whether nothing was begun since all came to its end."""
        return not self._underway

    def begin(self, key: str, rounds: Opened, wire: Wire) -> None:
        """Start the first round."""
        with wire.computing():
            under_way = _Underway(rounds, wire)
            under_way.handle = wire.start(f"sn0.{key}", next(rounds))
        self._underway[key] = under_way

    def poll(self) -> None:
        """Take exchanges on whose round has arrived; what fails is raised by `complete`."""
        for key, under_way in self._underway.items():
            if under_way.handle is not None and under_way.wire.arrived(under_way.handle):
                try:
                    self._advance(key)
                except Exception as error:  # noqa: BLE001, raised where all ranks come to it
                    under_way.error = error

    def complete(self) -> dict[str, Any]:
        """Complete all exchanges; return what their rounds have returned, by key.

        If that fails, the step has failed, and all exchanges are dropped.
        """
        try:
            while open_ := [(u.round, key) for key, u in self._underway.items() if not u.ended]:
                self._advance(min(open_)[1])
        except BaseException:
            self.drop()
            raise
        ended, self._underway = self._underway, {}
        return {key: exchange.result for key, exchange in ended.items()}

    def drop(self) -> None:
        """Drop all exchanges, after a step that failed, without waiting for other ranks."""
        dropped, self._underway = self._underway, {}
        for exchange in dropped.values():
            # Waited for, or the framework would keep the sum forever.
            with suppress(Exception):
                if exchange.handle is not None and exchange.wire.arrived(exchange.handle):
                    exchange.wire.wait(exchange.handle)

    def _advance(self, key: str) -> None:
        under_way = self._underway[key]
        if under_way.error is not None:
            raise under_way.error
        handle, under_way.handle = under_way.handle, None  # good for one wait
        summed = under_way.wire.wait(handle)
        try:
            with under_way.wire.computing():
                words = under_way.rounds.send(summed)
                under_way.handle = under_way.wire.start(f"sn{under_way.round + 1}.{key}", words)
            under_way.round += 1
        except StopIteration as end:
            under_way.ended, under_way.result = True, end.value


# Optimizers are held weakly: a dropped optimizer takes its memory along.
_of_optimizer: weakref.WeakKeyDictionary[Any, OptimizerState] = weakref.WeakKeyDictionary()


class OptimizerState:
    """An engine, and how far its step has come.

    alone : of calls without an optimizer, each of which is a step of its own
    """

    unused_number: ClassVar[int] = 0  # that no names of collectives have had on this rank

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
        self._coded: set[str] = set()  # of which the engine has begun this step, until its end
        self._dense: set[str] = set()  # likewise, where it is dense
        self._number = 0  # of its names, on all ranks alike
        self._broken = 0  # steps that broke off since it has that, on all ranks alike
        # Kinds and names of collectives since the last step that came to its end.
        self.sent: set[tuple[str, str]] = set()
        # On all ranks alike: some of these may wait for a rank that never sends them.
        self.has_broken_rounds = False
        self.counts_ranks = False  # in this step, or call
        self.ranks_sum: int | None = None  # the handle of their number, until it was read
        self.repeats = False  # Horovod asks again about what it has averaged
        # Gradients that were sent: Horovod writes the mean into the same tensor.
        self._sent_from: weakref.WeakValueDictionary[int, torch.Tensor]
        self._sent_from = weakref.WeakValueDictionary()
        self._steps = 0  # begun in a row, since ranks came
        self.nodes: Place | None = None  # where gradients are summed by nodes first
        # States, until it is known which nodes there are; None: all ranks have the same of all.
        self.loaded: list[dict[str, Any]] | None = []

    def begin_step(self) -> None:
        """Begin a step: its first gradient is about to be sent."""
        self.give_up()
        self._steps += 1
        self.engine.new_step()

    def sends(self, gradient: torch.Tensor) -> None:
        """Note that a gradient is being sent; its mean will be written to the same tensor."""
        self._sent_from[id(gradient)] = gradient

    def has_sent(self, gradient: torch.Tensor | None) -> bool:
        """Whether a tensor was sent; not one of zeros, or by hand, that came in its place."""
        if gradient is None:
            return False
        return gradient.is_sparse or self._sent_from.get(id(gradient)) is gradient

    def uses_placeholders(self) -> bool:
        """Whether Horovod gets placeholders for gradients in buckets: the same on all ranks."""
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
        """Set the number of this rank's names, on which ranks agreed as new to all of them."""
        self._number, self._broken = number, 0
        OptimizerState.unused_number = max(OptimizerState.unused_number, number + 1)

    def forget_sent(self) -> None:
        """Forget the collectives that were sent: Horovod was restarted, or they have ended."""
        self.sent.clear()
        self.has_broken_rounds = False

    def wire_name(self, key: str) -> str:
        """Return a name for collectives under which nothing of a broken step is still waiting.

        Nor of a deleted optimizer: what one rank had sent, and no other, waits forever.
        """
        return f"{key}.{self._number}.{self._broken}" if self._number or self._broken else key

    def begins(self, names: Iterable[str], *, dense: bool = False) -> None:
        """The engine begins a step of these tensors."""
        (self._dense if dense else self._coded).update(names)

    def mark_all_sent(self) -> None:
        """Note that all gradients were sent, as the framework asks for the step's first mean."""
        self._dense.clear()

    def complete(self) -> None:
        """Complete all exchanges; if that fails, the step has failed.

        Does so for the first mean that is asked for in a step, and nothing for later ones.
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
