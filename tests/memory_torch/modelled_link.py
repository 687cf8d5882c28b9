"""A link to the host that is not there: threads that copy at a set rate.

On the CPU host and device are one memory, so copies cost what a memcpy costs and are done when they
are asked for. These lanes copy in a thread each way, no faster than so many bytes per second, and
note when each copy ran and when the ops waited for one. What a plan hides behind its ops can so be
measured without a GPU; seconds of the link are those of the model, and whoever shows them says so.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from sn_memory.torch.target.accelerator import Ticket

# A copy goes in pieces of so many bytes, between which it keeps to the rate.
_PIECE = 1 << 18


@dataclass
class Link:
    """What passed: copies both ways and waits of ops, (begin, end) in seconds, and bytes in all."""

    copies: list[tuple[float, float]] = field(default_factory=list)
    waits: list[tuple[float, float]] = field(default_factory=list)
    nbytes: int = 0

    @property
    def copies_s(self) -> float:
        """Seconds in which copies ran, those of both lanes added."""
        return sum(end - begin for begin, end in self.copies)

    @property
    def waits_s(self) -> float:
        """Seconds in which ops waited."""
        return sum(end - begin for begin, end in self.waits)

    @property
    def hidden(self) -> float:
        """The share of the copies' seconds that passed beside ops; 1 where nothing was copied."""
        return 1.0 - min(1.0, self.waits_s / self.copies_s) if self.copies else 1.0


class LinkLanes:
    """Lanes over a modelled link of a rate each way; see `Lanes` in `sn_memory.torch.target`.

    latency_s : before each copy
    """

    def __init__(self, bytes_per_s: float, latency_s: float = 0.0) -> None:
        if not bytes_per_s > 0:
            raise ValueError(f"got bytes_per_s {bytes_per_s!r}, expected a number above 0.")
        self.bytes_per_s, self.latency_s = bytes_per_s, latency_s
        self.link = Link()
        self._out = ThreadPoolExecutor(1, "sn_memory out")
        self._back = ThreadPoolExecutor(1, "sn_memory back")

    def leave(self, here: torch.Tensor, host: torch.Tensor, after: Sequence[Ticket] = ()) -> Ticket:
        """Copy to the host; ops so far are done on the CPU."""
        return self._out.submit(self._copy, here, host, after)

    def arrive(self, host: torch.Tensor, here: torch.Tensor, after: Ticket) -> Ticket:
        """Copy back, after the copy that `after` stands for."""
        return self._back.submit(self._copy, host, here, () if after is None else (after,))

    def wait(self, ticket: Ticket) -> None:
        """Wait for a copy, and note how long that took."""
        if ticket.done():
            ticket.result()
            return
        begin = time.perf_counter()
        ticket.result()
        self.link.waits.append((begin, time.perf_counter()))

    def finish(self, ticket: Ticket) -> None:
        """Wait for a copy; on the CPU ops and the program wait alike."""
        self.wait(ticket)

    def _copy(
        self, source: torch.Tensor, target: torch.Tensor, after: Sequence[Future[None]]
    ) -> None:
        for ticket in after:
            ticket.result()
        link, pause = self.link, self.latency_s
        begin = time.perf_counter()
        sleep_until(begin + pause)
        for first in range(0, source.numel(), _PIECE):
            piece = slice(first, first + _PIECE)
            target[piece].copy_(source[piece])
            done = min(first + _PIECE, source.numel())
            sleep_until(begin + pause + done / self.bytes_per_s)
        link.copies.append((begin, time.perf_counter()))
        link.nbytes += source.numel()


def sleep_until(moment: float) -> None:
    """Sleep until a moment of `time.perf_counter`, if it has not come."""
    left = moment - time.perf_counter()
    if left > 0:
        time.sleep(left)
