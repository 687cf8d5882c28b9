"""Copies beside the ops: one lane to the host, one back, tied to the ops by events.

A copy on the stream of the ops delays them; a synchronisation stops the program. On a GPU each lane
is a stream of its own: a copy waits, on the device, for what was queued before it, and ops wait, on
the device, for the copy they need. On the CPU a copy is done when it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from .accelerator import has_streams, module_of

# What a copy gives back to wait for.
Ticket = Any


class Lanes(Protocol):
    """Two lanes between a device and the host.

    A copy may run at any time between what it is said to come after and the `wait` for its ticket.
    Neither lane needs to keep an order of its own.
    """

    def leave(self, here: torch.Tensor, host: torch.Tensor, after: Sequence[Ticket] = ()) -> Ticket:
        """Copy from the device to the host, after all ops so far and the copies of `after`."""

    def arrive(self, host: torch.Tensor, here: torch.Tensor, after: Ticket) -> Ticket:
        """Copy back into new memory, after the copy that `after` stands for; None: after none."""

    def wait(self, ticket: Ticket) -> None:
        """Let ops from now on wait for a copy; the program does not."""

    def finish(self, ticket: Ticket) -> None:
        """Let the program wait for a copy."""


class PlainLanes:
    """Copies at once: for the CPU, where host and device are the same memory."""

    def leave(self, here: torch.Tensor, host: torch.Tensor, after: Sequence[Ticket] = ()) -> Ticket:
        """Copy now."""
        host.copy_(here)

    def arrive(self, host: torch.Tensor, here: torch.Tensor, after: Ticket) -> Ticket:
        """Copy now."""
        here.copy_(host)

    def wait(self, ticket: Ticket) -> None:
        """Nothing to wait for."""

    def finish(self, ticket: Ticket) -> None:
        """Nothing to wait for."""


class StreamLanes:
    """A stream for each direction, of a device that has streams."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.of = device, module_of(device)
        self.out, self.back = self.of.Stream(device), self.of.Stream(device)

    def leave(self, here: torch.Tensor, host: torch.Tensor, after: Sequence[Ticket] = ()) -> Ticket:
        """Queue the copy behind the ops so far, and behind those that read its place before."""
        self.out.wait_event(self.of.current_stream(self.device).record_event())
        for ticket in after:
            self.out.wait_event(ticket)
        with self.of.stream(self.out):
            host.copy_(here, non_blocking=True)
        return self.out.record_event()

    def arrive(self, host: torch.Tensor, here: torch.Tensor, after: Ticket) -> Ticket:
        """Queue the copy behind its way out, and behind ops that used this memory before."""
        if after is not None:
            self.back.wait_event(after)
        self.back.wait_event(self.of.current_stream(self.device).record_event())
        with self.of.stream(self.back):
            here.copy_(host, non_blocking=True)
        return self.back.record_event()

    def wait(self, ticket: Ticket) -> None:
        """Queue a wait for the event on the stream of the ops."""
        self.of.current_stream(self.device).wait_event(ticket)

    def finish(self, ticket: Ticket) -> None:
        """Wait for the event."""
        ticket.synchronize()


def lanes_for(device: torch.device) -> Lanes:
    """Return streams where a device has them, copies that are done when asked for elsewhere."""
    return StreamLanes(device) if has_streams(device) else PlainLanes()
