"""Exchanges in mid-way: every round of all of them is begun before one is waited for.

Ranks finish their tensors in different orders. One that waited for the second round of one
exchange, and had not begun that of another for which a second rank waits, would wait for ever. So
what is waited for is always the first round that is open, of the first exchange in it: whoever
waits has begun all that another rank can wait for before.

What has arrived is looked at whenever something else is begun, and never waited for. Encoding can
have a thread of its own, beside whatever computes the gradients. It takes exchanges in the order in
which they come, and never waits for a rank, so `complete` can wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import Executor, Future, wait
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

Opened = Generator[Any, Any, Any]  # yields what is to be exchanged, is sent what came of it


class Wire(Protocol):
    """The rim's collectives, without waiting."""

    def beside(self) -> AbstractContextManager[None]:
        """Around all that is computed."""

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
    _jobs: list[Future[None]] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Whether nothing was begun since all came to its end."""
        return not (self._underway or self._jobs)

    def begin(
        self, key: str, rounds: Callable[[], Opened], wire: Wire, thread: Executor | None = None
    ) -> None:
        """Start the first round of what `rounds` returns; with a thread, do so there.

        What fails in the thread is raised by the next `complete`.
        """
        if thread is None:
            self._first(key, rounds, wire)
        else:
            self._jobs.append(thread.submit(self._first_beside, key, rounds, wire))

    def _first(self, key: str, rounds: Callable[[], Opened], wire: Wire) -> None:
        with wire.beside():
            under_way = _Underway(rounds(), wire)
            words = next(under_way.rounds)
            under_way.handle = wire.start(f"sn0.{key}", words)
        self._underway[key] = under_way

    def _first_beside(self, key: str, rounds: Callable[[], Opened], wire: Wire) -> None:
        self._first(key, rounds, wire)
        self._look()

    def poll(self) -> None:
        """Take exchanges on whose round has arrived; what fails is raised by `complete`."""
        if not self._jobs:  # or the thread looks itself
            self._look()

    def _look(self) -> None:
        for key, under_way in self._underway.items():
            if under_way.handle is not None and under_way.wire.arrived(under_way.handle):
                try:
                    self._advance(key)
                except Exception as error:  # noqa: BLE001, raised where all ranks come to it
                    under_way.error = error

    def complete(self) -> dict[str, Any]:
        """Take all that is on its way to its end: what the rounds have returned, by key.

        If that fails, so has the step, and nothing of it is on its way any more.
        """
        try:
            self.settle()
            while left := [(it.round, key) for key, it in self._underway.items() if not it.ended]:
                self._advance(min(left)[1])
        except BaseException:
            self.drop()
            raise
        ended, self._underway = self._underway, {}
        return {key: each.result for key, each in ended.items()}

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
        for each in left.values():
            # Taken, or the framework would keep the sum for ever. Why it failed has been said.
            with suppress(Exception):
                if each.handle is not None and each.wire.arrived(each.handle):
                    each.wire.wait(each.handle)

    def _advance(self, key: str) -> None:
        under_way = self._underway[key]
        if under_way.error is not None:
            raise under_way.error
        handle, under_way.handle = under_way.handle, None  # good for one wait
        came = under_way.wire.wait(handle)
        try:
            with under_way.wire.beside():
                words = under_way.rounds.send(came)
                under_way.handle = under_way.wire.start(f"sn{under_way.round + 1}.{key}", words)
            under_way.round += 1
        except StopIteration as end:
            under_way.ended, under_way.result = True, end.value
