"""The host arena: where storages wait that a plan moves off the device.

One block, laid out before the first step: which storage is on the host when is in the plan, so the
places are packed ahead and nothing is allocated while training. On the CPU a move is a plain copy
within the same memory, so that the logic runs everywhere; on a GPU the block is pinned and copies
are queued on the current stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..pool import arrange
from .recorder import View

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Trip:
    """One stay on the host: from step `start` to step `end`, `nbytes` long."""

    start: int
    end: int
    nbytes: int


class HostArena:
    """One block on the host, with a place for each trip of a plan.

    Parameters
    ----------
    trips
        Those that overlap in time get places that do not overlap.
    device
        Where storages come from and return to.
    """

    def __init__(self, trips: Sequence[Trip], device: torch.device) -> None:
        self.trips, self.device = tuple(trips), device
        rows = [(trip.start, trip.end, max(1, trip.nbytes), _ALIGNMENT) for trip in trips]
        packed = arrange(rows)
        self.offsets = packed.offsets
        self.block = torch.empty(packed.height, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def take(self, trip: int, tensor: torch.Tensor) -> None:
        """Copy the storage of a tensor to the place of a trip."""
        self._place(trip).copy_(_bytes(tensor.untyped_storage(), tensor.device), non_blocking=True)

    def give(self, trip: int, form: View) -> torch.Tensor:
        """Return a new tensor of a form with what a trip took."""
        here = torch.empty(self.trips[trip].nbytes, dtype=torch.uint8, device=self.device)
        here.copy_(self._place(trip), non_blocking=True)
        empty = torch.empty(0, dtype=form.dtype, device=self.device)
        return empty.set_(here.untyped_storage(), form.offset, form.size, form.stride)

    def _place(self, trip: int) -> torch.Tensor:
        return self.block[self.offsets[trip] : self.offsets[trip] + self.trips[trip].nbytes]


def _bytes(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
