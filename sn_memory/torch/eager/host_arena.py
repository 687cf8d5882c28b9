"""The pool of storages that leave the device: a block on the host, with places for copies.

SuperNeurons' unified tensor pool (Wang et al., PPoPP 2018, section 3.3) allocates on the host up
front and moves when memory runs out, least recently used first. A plan knows ahead who is away
when: so the places are packed ahead, copies start where the plan says, and of the host copies that
the planned peak has room for none is made (`needless`). Nothing is allocated while training.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...base.errors import PlanError
from ...graph.graph import Ints
from ...pool.pack import arrange
from ..target.accelerator import Lanes, Ticket, is_apart, lanes_for
from ..trace.record import View

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class HostCopy:
    """One stay on the host, in actions of the plan.

    Parameters
    ----------
    storage
        Its number.
    start, freed, end
        It is copied out from `start`; its device memory is free from `freed` until `end`, where
        it is taken again. A host copy without return ends with the plan.
    nbytes
        Its size.
    """

    storage: int
    start: int
    freed: int
    end: int
    nbytes: int


def needless(host_copies: Sequence[HostCopy], live_bytes: Ints, room_bytes: int) -> set[int]:
    """Return the host copies whose storages may as well stay: there is room for them all the while.

    Parameters
    ----------
    host_copies
        Those of a plan.
    live_bytes
        [actions] on the device, with all host copies made.
    room_bytes
        What may be live: the plan's peak.

    Notes
    -----
    The smallest and shortest stays come first, as most of those fit. The least recently used leave
    first in SuperNeurons because they are needed last; here that is in the length of the stay.
    """
    live = np.array(live_bytes, dtype=np.int64)
    staying: set[int] = set()
    cost = {
        at: host_copy.nbytes * (host_copy.end - host_copy.freed)
        for at, host_copy in enumerate(host_copies)
    }
    for at in sorted(cost, key=lambda it: (cost[it], it)):
        host_copy = host_copies[at]
        away = live[host_copy.freed : host_copy.end]
        if away.size == 0 or int(away.max()) + host_copy.nbytes <= room_bytes:
            away += host_copy.nbytes
            staying.add(at)
    return staying


class HostArena:
    """One block on the host, with a place for each host copy that is made.

    Parameters
    ----------
    host_copies
        By number. Those that overlap in time get places that do not overlap.
    device
        Where storages come from and return to.
    lanes
        What copies; default: streams on a GPU, plain copies on the CPU.
    pinned_bytes
        The most that the block may take; None: any.

    Raises
    ------
    PlanError
        If the places take more than `pinned_bytes`.

    Notes
    -----
    A place is taken from a host copy's copy out to the start of its copy back, as the plan counts.
    The next copy to that place waits for the copy back, on the lane; the ops do not.
    """

    def __init__(
        self,
        host_copies: dict[int, HostCopy],
        device: torch.device,
        lanes: Lanes | None = None,
        *,
        pinned_bytes: int | None = None,
    ) -> None:
        self.host_copies, self.device = dict(host_copies), device
        self.lanes = lanes_for(device) if lanes is None else lanes
        # Sizes rounded as places are: so the packing knows when it cannot be any lower.
        rows = [
            (it.start, it.end + 1, max(1, -(-it.nbytes // _ALIGNMENT)) * _ALIGNMENT, _ALIGNMENT)
            for it in host_copies.values()
        ]
        packed = arrange(rows)
        if pinned_bytes is not None and packed.height > pinned_bytes:
            raise PlanError(
                f"the places on the host of what the plan moves, multiples of {_ALIGNMENT} bytes "
                f"that lie side by side, take {packed.height} bytes; device.pinned_bytes is "
                f"{pinned_bytes}. Allow {packed.height}, or plan with a smaller pinned_bytes."
            )
        self.offsets = dict(zip(host_copies, packed.offsets, strict=True))
        self.block = torch.empty(packed.height, dtype=torch.uint8, pin_memory=is_apart(device))
        self._left: dict[int, Ticket] = {}
        self._arriving: dict[int, Ticket] = {}

    def copied(self) -> HostArena:
        """Return another block that holds what this one does, once it has arrived here."""
        for ticket in self._left.values():
            self.lanes.finish(ticket)
        other = copy.copy(self)
        other.block = torch.empty_like(self.block, pin_memory=is_apart(self.device))
        other.block.copy_(self.block)
        other._left, other._arriving = dict(self._left), dict(self._arriving)
        return other

    def take(self, host_copy: int, tensor: torch.Tensor) -> None:
        """Start to copy the storage of a tensor to the place of a host copy."""
        memory = tensor.untyped_storage()
        here = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(memory)
        # A place is given away when the copy back is asked for; it may still be read from.
        reading = [
            ticket for other, ticket in self._arriving.items() if self._share(host_copy, other)
        ]
        self._left[host_copy] = self.lanes.leave(here, self._place(host_copy), reading)

    def left(self, host_copy: int) -> None:
        """Let ops wait until a copy out has ended: its device memory is given back now."""
        self.lanes.wait(self._left[host_copy])

    def give(self, host_copy: int, form: View) -> torch.Tensor:
        """Return a new tensor of a form, into which what a host copy took is being copied."""
        here = torch.empty(
            self.host_copies[host_copy].nbytes, dtype=torch.uint8, device=self.device
        )
        self._arriving[host_copy] = self.lanes.arrive(
            self._place(host_copy), here, self._left.pop(host_copy)
        )
        empty = torch.empty(0, dtype=form.dtype, device=self.device)
        return empty.set_(here.untyped_storage(), form.offset, form.size, form.stride)

    def arrived(self, host_copy: int) -> None:
        """Let ops wait until a host copy's copy back has ended: it is used next."""
        self.lanes.wait(self._arriving.pop(host_copy))

    def settle(self) -> None:
        """Let ops wait for all copies under way: their memory is given back, whatever happened."""
        for ticket in (*self._left.values(), *self._arriving.values()):
            self.lanes.wait(ticket)
        self._left.clear()
        self._arriving.clear()

    def _share(self, one: int, other: int) -> bool:
        first, second = sorted((one, other), key=self.offsets.__getitem__)
        return self.offsets[second] < self.offsets[first] + self.host_copies[first].nbytes

    def _place(self, host_copy: int) -> torch.Tensor:
        return self.block[
            self.offsets[host_copy] : self.offsets[host_copy] + self.host_copies[host_copy].nbytes
        ]
