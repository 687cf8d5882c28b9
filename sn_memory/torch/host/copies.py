"""Copies between a device and the host: what is offloaded when, to which buffer, and what waits.

This module makes all such copies: of activations that a plan offloads, and of parameters, gradients
and optimizer state that live on the host. Each copy reads or writes a `HostBuffer`, which knows its
copies in flight.

SuperNeurons' unified tensor pool (Wang et al., PPoPP 2018, section 3.3) allocates on the host up
front and moves tensors when memory runs out, least recently used first. A plan knows in advance
what is offloaded when: so buffers are packed in advance, copies start where the plan says, and
copies of tensors that fit below the planned peak are skipped (`unneeded`). Nothing is allocated
while training.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ...base.errors import PlanError
from ...graph.graph import Ints
from ...pool.pack import arrange
from ..target.accelerator import Lanes, Ticket, is_apart, lanes_for
from ..trace.record import View

# Of buffers in a block: a cache line, so that no two copies write to the same one.
_ALIGNMENT = 64

# Makes all later ops wait for a copy.
Wait = Callable[[], None]


def no_wait() -> None:
    """Wait for nothing."""


@dataclass(eq=False, slots=True)
class HostBuffer:
    """Host memory for one storage while that is off the device.

    block : [bytes] uint8
    written : the copy that fills it
    read : the copy that reads it, until something has waited for that copy
    overlapping : buffers that use some of the same bytes at other times
    """

    block: torch.Tensor
    written: Ticket = None
    read: Ticket = None
    overlapping: list[HostBuffer] = field(default_factory=list)


class CopyEngine:
    """Starts copies of whole storages.

    device : where storages come from and return to
    lanes : what copies; default: streams if the device has them, plain copies on the CPU
    """

    def __init__(self, device: torch.device, lanes: Lanes | None = None) -> None:
        self.device = device
        self.lanes = lanes_for(device) if lanes is None else lanes

    def to_host(self, tensor: torch.Tensor, buffer: HostBuffer) -> Wait:
        """Start to copy the storage of a tensor; return a function that waits for the copy."""
        memory = tensor.untyped_storage()
        # The whole storage as bytes: other views of it must be valid once it is back.
        here = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(memory)
        # A buffer is reused once its copy back has been requested, which may still be reading.
        reading = [copy.read for copy in buffer.overlapping if copy.read is not None]
        buffer.written = ticket = self.lanes.leave(here, buffer.block, reading)
        return lambda: self.lanes.wait(ticket)

    def to_device(self, buffer: HostBuffer, form: View) -> tuple[torch.Tensor, Wait]:
        """Start to copy into a new tensor of a form; return it, and a function that waits."""
        here = torch.empty(buffer.block.numel(), dtype=torch.uint8, device=self.device)
        buffer.read = ticket = self.lanes.arrive(buffer.block, here, buffer.written)

        def wait() -> None:
            self.lanes.wait(ticket)
            # Another copy back may have been requested meanwhile; that one is still in flight.
            if buffer.read is ticket:
                buffer.read = None

        empty = torch.empty(0, dtype=form.dtype, device=self.device)
        return empty.set_(here.untyped_storage(), form.offset, form.size, form.stride), wait

    def finish(self, buffer: HostBuffer) -> None:
        """Block until a buffer is filled: from now on the program may read it."""
        if buffer.written is not None:
            self.lanes.finish(buffer.written)
            buffer.written = None


@dataclass(frozen=True, slots=True)
class HostCopy:
    """One stay of a storage on the host; times are indices of the plan's actions.

    storage : its number
    start, freed, end : the copy out begins at `start`; the device memory is free from `freed` until
        `end`, where it is allocated again. A copy that never returns ends with the plan.
    nbytes : its size
    """

    storage: int
    start: int
    freed: int
    end: int
    nbytes: int


def unneeded(copies: Sequence[HostCopy], live_bytes: Ints, room_bytes: int) -> set[int]:
    """Return the host copies that can be skipped: their storages fit on the device throughout.

    copies : all host copies of a plan
    live_bytes : [actions] on the device, if all host copies are made
    room_bytes : the most that may be live: the plan's peak

    The smallest and shortest stays are considered first, as most of those fit. SuperNeurons evicts
    the least recently used first because they are needed last; here the length of the stay
    expresses that.
    """
    live = np.array(live_bytes, dtype=np.int64)
    staying: set[int] = set()
    # Cheap ones first, so that as many as possible stay on the device.
    cost = [copy.nbytes * (copy.end - copy.freed) for copy in copies]
    for number in sorted(range(len(copies)), key=cost.__getitem__):
        away = live[copies[number].freed : copies[number].end]
        if away.size == 0 or int(away.max()) + copies[number].nbytes <= room_bytes:
            away += copies[number].nbytes
            staying.add(number)
    return staying


class OffloadBuffers:
    """Buffers for what a step offloads, in one block.

    copies : host copies that are made, by number. Copies that overlap in time get disjoint buffers.
    engine : starts the copies
    pinned_bytes : the most that the block may take; None: no limit.

    Raises PlanError if the buffers take more than `pinned_bytes`.

    A buffer is in use from a storage's copy out to the start of its copy back, as in the plan. The
    next copy to those bytes waits for the copy back, on the lane; the ops do not.
    """

    def __init__(
        self,
        copies: Mapping[int, HostCopy],
        engine: CopyEngine,
        *,
        pinned_bytes: int | None = None,
    ) -> None:
        self.engine = engine
        self._nbytes = {number: copy.nbytes for number, copy in copies.items()}
        # Sizes are rounded like offsets, so that the packer recognizes the optimum.
        rows = []
        for away in copies.values():
            nbytes = max(1, -(-away.nbytes // _ALIGNMENT)) * _ALIGNMENT
            rows.append((away.start, away.end + 1, nbytes, _ALIGNMENT))
        packed = arrange(rows)
        if pinned_bytes is not None and packed.height > pinned_bytes:
            raise PlanError(
                f"the host buffers for what the plan offloads, each a multiple of {_ALIGNMENT} "
                f"bytes, take {packed.height} bytes in all; device.pinned_bytes is "
                f"{pinned_bytes}. Allow {packed.height}, or plan with a smaller pinned_bytes."
            )
        self.offsets = dict(zip(copies, packed.offsets, strict=True))
        self._carve(packed.height)

    def _carve(self, nbytes: int) -> None:
        # A device can copy concurrently with ops only from and to pinned memory.
        pinned = is_apart(self.engine.device)
        self.block = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        self.buffers: dict[int, HostBuffer] = {}
        # In order of offsets: a buffer shares bytes with earlier ones that end after it begins.
        before: list[tuple[int, HostBuffer]] = []
        for number, offset in sorted(self.offsets.items(), key=lambda entry: entry[1]):
            end = offset + self._nbytes[number]
            buffer = self.buffers[number] = HostBuffer(self.block[offset:end])
            before = [entry for entry in before if entry[0] > offset]
            for _, other in before:
                other.overlapping.append(buffer)
                buffer.overlapping.append(other)
            before.append((end, buffer))

    def copied(self) -> OffloadBuffers:
        """Return a copy of these buffers with their contents, once all copies to them are done."""
        for buffer in self.buffers.values():
            self.engine.finish(buffer)
        other = copy.copy(self)
        other._carve(self.block.numel())
        other.block.copy_(self.block)
        return other

    def offload(self, number: int, tensor: torch.Tensor) -> Wait:
        """Start to copy the storage of a tensor to its buffer; return a function that waits."""
        return self.engine.to_host(tensor, self.buffers[number])

    def prefetch(self, number: int, form: View) -> tuple[torch.Tensor, Wait]:
        """Start to copy back; return the tensor that is being filled, and a function that waits."""
        return self.engine.to_device(self.buffers[number], form)

    def forget(self) -> None:
        """Drop all tickets, once everything in flight has been waited for."""
        for buffer in self.buffers.values():
            buffer.written = buffer.read = None
