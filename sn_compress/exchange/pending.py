"""Tensors in mid-exchange: every round of all of them is begun before one is waited for.

Ranks finish their tensors in different orders. One that waited for the second round of one
tensor, and had not begun that of another for which a second rank waits, would wait for ever.

Encoding can have a thread of its own, beside whatever computes the gradients. It takes tensors in
the order in which they come, and behind each one the rounds of others that have arrived. It never
waits for a rank, so `finish` can wait for it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..codecs.base import Floats
from ..sums.base import Array as Words
from ..sums.session import Rounds


class Wire(Protocol):
    """The rim's all-reduce, without waiting."""

    def start(self, name: str, words: Words) -> Any:
        """Send words off; the handle of their sum."""

    def arrived(self, handle: Any) -> bool:
        """Whether `wait` would return at once."""

    def wait(self, handle: Any) -> Words:
        """The sum."""


@dataclass
class _Underway:
    rounds: Rounds
    wire: Wire
    handle: Any
    round: int = 0
    mean: Floats | None = None


@dataclass
class Pending:
    """The tensors of one optimizer that are on their way, by name."""

    _underway: dict[str, _Underway] = field(default_factory=dict)
    _jobs: list[Future[None]] = field(default_factory=list)

    def begin(
        self, name: str, rounds: Callable[[], Rounds], wire: Wire, thread: Executor | None = None
    ) -> None:
        """Start the first round of what `rounds` returns; with a thread, do so there.

        What fails in the thread is raised by the next `finish`.
        """
        if thread is None:
            self._first(name, rounds, wire)
        else:
            self._jobs.append(thread.submit(self._first_beside, name, rounds, wire))

    def _first(self, name: str, rounds: Callable[[], Rounds], wire: Wire) -> None:
        opened = rounds()
        words = next(opened)
        self._underway[name] = _Underway(opened, wire, wire.start(f"sn0.{name}", words))

    def _first_beside(self, name: str, rounds: Callable[[], Rounds], wire: Wire) -> None:
        self._first(name, rounds, wire)
        for other, tensor in self._underway.items():
            if tensor.mean is None and wire.arrived(tensor.handle):
                self._advance(other)

    def finish(self, name: str) -> Floats:
        """The mean of a tensor, [n]; takes all others as far as it has to.

        If that fails, so has the step, and nothing of it is on its way any more.
        """
        self.complete()
        mean = self._underway.pop(name).mean
        assert mean is not None
        return mean

    def complete(self) -> None:
        """Take all that is on its way as far as its mean; see `finish`."""
        try:
            self.settle()
            while any(other.mean is None for other in self._underway.values()):
                for each in sorted(self._underway):
                    self._advance(each)
        except BaseException:
            self.drop()
            raise

    def settle(self) -> None:
        """Wait until the thread has done what it was given; raises what failed there."""
        jobs, self._jobs = self._jobs, []
        wait(jobs)
        for job in jobs:
            job.result()

    def drop(self) -> None:
        """Forget what is on its way, after a step that failed; waits for no other rank."""
        wait(self._jobs)
        self._jobs.clear()
        left, self._underway = self._underway, {}
        for tensor in left.values():
            # Taken, or the framework would keep the sum for ever. Why it failed has been said.
            with suppress(Exception):
                if tensor.handle is not None and tensor.wire.arrived(tensor.handle):
                    tensor.wire.wait(tensor.handle)

    def _advance(self, name: str) -> None:
        tensor = self._underway[name]
        if tensor.mean is not None:
            return
        handle, tensor.handle = tensor.handle, None  # good for one wait
        total = tensor.wire.wait(handle)
        try:
            words = tensor.rounds.send(total)
        except StopIteration as end:
            tensor.mean = end.value
        else:
            tensor.round += 1
            tensor.handle = tensor.wire.start(f"sn{tensor.round}.{name}", words)
