"""Storage for parameters and optimizer state off the device: pinned memory, or a file."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import torch

from ...base.errors import PlanError
from ...base.host import available_bytes
from ...graph.hosted import UPDATES
from ..target.accelerator import Lanes, Ticket, has_streams, lanes_for, resident_for
from ..trace.op_seconds import transfer_speeds
from .copies import CopyEngine, HostBuffer

# torch rounds pinned allocations up to a power of two, so they are made in such sizes.
_SLAB = 1 << 26
# The alignment of the device's own allocator.
_ALIGNMENT = 512
# Elements copied to measure the link; the most that `measured_device` uses.
_PROBE = 1 << 24


class StateBuffers(ABC):
    """Host memory for parameters and optimizer state: a buffer for each tensor.

    device : where ops on these tensors run
    where : description of this memory, for messages
    update : when these tensors are updated: `step` or `backward`
    """

    device: torch.device
    where: str

    def __init__(self, update: str) -> None:
        if update not in UPDATES:
            raise ValueError(f"got update {update!r}, expected one of {', '.join(UPDATES)}.")
        self.update = update
        self._buffers: dict[int, HostBuffer] = {}
        self._speeds: tuple[float, float] | None = None

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Reserved bytes."""

    @abstractmethod
    def lanes(self) -> Lanes:
        """Return the lanes that copy between this memory and the device."""

    @cached_property
    def engine(self) -> CopyEngine:
        """Engine that starts these copies."""
        return CopyEngine(self.device, self.lanes())

    def updater(self, nbytes: int) -> str:
        """Return what updates `nbytes` of parameters, gradients and state; see `with_state`."""
        return "device"

    def speeds(self) -> tuple[float, float]:
        """Return bytes per second (to the host, back), measured once."""
        if self._speeds is None:
            self._speeds = self._measure()
        return self._speeds

    @abstractmethod
    def _measure(self) -> tuple[float, float]: ...

    @abstractmethod
    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return a block of bytes with its own storage."""

    @abstractmethod
    def let_go(self) -> None:
        """Release the process memory of these tensors until they are read, where possible."""

    @property
    def blocks(self) -> list[torch.Tensor]:
        """All buffers, as bytes."""
        return [buffer.block for buffer in self._buffers.values()]

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor here with the form of a dense tensor, whose values are not read."""
        block = self.allocate(tensor.numel() * tensor.element_size())
        self._buffers[block.data_ptr()] = HostBuffer(block)
        return torch.empty(0, dtype=tensor.dtype).set_(
            block.untyped_storage(), 0, tensor.size(), tensor.stride()
        )

    def buffer_of(self, tensor: torch.Tensor) -> HostBuffer | None:
        """Return the buffer of a tensor; None if it is not here."""
        try:
            return self._buffers.get(tensor.data_ptr())
        except RuntimeError:  # no memory, e.g. on the meta device
            return None

    def finish(self) -> None:
        """Wait until all writes have completed: from now on the program may read the buffers."""
        for buffer in self._buffers.values():
            self.engine.finish(buffer)

    def hold(self, model: torch.nn.Module) -> torch.nn.Module:
        """Move the parameters of a model to the host; allocate those on the meta device there.

        Parameters of a meta model become zeros: initialise or load them afterwards, module by
        module. This creates models that fit nowhere else. Its buffers become zeros on the device.

        Raises PlanError for a buffer on the meta device that is in no state dict: nothing would
        load it.
        """
        _materialize_buffers(model, self.device)
        for parameter in dict.fromkeys(model.parameters()):
            self.move_here(parameter)
        return model

    def move_here(self, parameter: torch.nn.Parameter) -> None:
        """Move one parameter to the host, unless it is already there."""
        if self.buffer_of(parameter) is not None:
            return
        moved = self.empty_like(parameter)
        if not parameter.is_meta:
            with torch.no_grad():
                moved.copy_(parameter)
        set_memory(parameter, moved)


def _materialize_buffers(model: torch.nn.Module, device: torch.device) -> None:
    """Replace the meta buffers of a model by zeros; shared buffers stay shared."""
    missing = [
        (f"{path}.{name}" if path else name, module, name, buffer)
        for path, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
        if buffer.is_meta
    ]
    for path, module, name, _ in missing:
        if name in module._non_persistent_buffers_set:
            raise PlanError(
                f"the buffer {path!r} is on the meta device and in no state dict, so nothing would "
                "load it. Register a real one first (register_buffer again), computed as in the "
                "module's constructor."
            )
    real: dict[int, torch.Tensor] = {}
    for _, module, name, buffer in missing:
        module._buffers[name] = real.setdefault(id(buffer), torch.zeros_like(buffer, device=device))


def set_memory(parameter: torch.nn.Parameter, tensor: torch.Tensor) -> None:
    """Replace the memory of a parameter in place by another tensor's; move its gradient as well."""
    # Detached first: it has to follow the parameter to the other device.
    gradient, parameter.grad = parameter.grad, None
    if torch._has_compatible_shallow_copy_type(parameter, tensor):
        parameter.data = tensor
    else:
        # Between devices whose tensors cannot exchange data, and from the meta device.
        torch.utils.swap_tensors(parameter, torch.nn.Parameter(tensor, parameter.requires_grad))
    if gradient is not None:
        parameter.grad = gradient.to(tensor.device)


class PinnedState(StateBuffers):
    """State in pinned host memory, for a model on a device with separate memory.

    What an op needs is copied to the device and back on separate streams. A tensor here is a CPU
    tensor: code that reads it after the backward pass or the optimizer's step sees its values.

    Parameters
    ----------
    device
        Where the model's ops run, e.g. `"cuda"`.
    update
        See `HostState`.
    """

    def __init__(self, device: torch.device | str, *, update: str = "step") -> None:
        super().__init__(update)
        # With its index, as in `tensor.device`.
        self.device = torch.empty(0, device=torch.device(device)).device
        if not has_streams(self.device):
            raise ValueError(
                f"got device {str(device)!r}, expected one with separate memory and streams, such "
                "as 'cuda'. On the CPU, state is kept in a file: use HostState."
            )
        self.where = f"pinned memory for {self.device}"
        self._slabs: list[tuple[torch.Tensor, int]] = []
        resident_for(self, self.device)

    @property
    def nbytes(self) -> int:
        """Reserved bytes."""
        return sum(slab.nbytes for slab, _ in self._slabs)

    def lanes(self) -> Lanes:
        """Return the streams that copy."""
        return lanes_for(self.device)

    def _measure(self) -> tuple[float, float]:
        return transfer_speeds(torch.ones(_PROBE, device=self.device))

    def let_go(self) -> None:
        """Do nothing: pinned memory cannot be released."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return a zeroed block of pinned memory."""
        padded = -(-max(nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
        fits = (i for i, (slab, end) in enumerate(self._slabs) if slab.nbytes - end >= padded)
        index = next(fits, len(self._slabs))
        if index == len(self._slabs):
            size = max(_SLAB, 1 << (padded - 1).bit_length())
            self._slabs.append((torch.zeros(size, dtype=torch.uint8, pin_memory=True), 0))
        slab, begin = self._slabs[index]
        self._slabs[index] = (slab, begin + padded)
        memory = memoryview(slab.numpy())
        # With its own storage, since whole storages are copied; it keeps the slab alive.
        return torch.frombuffer(memory, dtype=torch.uint8, count=max(nbytes, 1), offset=begin)[
            :nbytes
        ]


_PAGE = mmap.PAGESIZE
_PROBE_BYTES = 1 << 24
_PROBES = 3


class FileLanes(Lanes):
    """Two lanes with one thread each: one reads a file into memory, one writes it.

    They release the GIL while they read and write, so ops run concurrently. A copy that has to
    follow another waits for it in its own thread. Copies of one lane run in the order in which they
    were submitted, and each waits only for earlier ones, so there is no deadlock.

    file : its descriptor
    offsets : offset in the file of each mapped block, by the block's address
    keep_cached : whether the system may keep pages that were read or written
    """

    def __init__(self, file: int, offsets: Mapping[int, int], *, keep_cached: bool = True) -> None:
        self.file, self.offsets, self.keep_cached = file, offsets, keep_cached
        self._out = ThreadPoolExecutor(1, "sn_memory store")
        self._back = ThreadPoolExecutor(1, "sn_memory fetch")

    def leave(self, here: torch.Tensor, host: torch.Tensor, after: Sequence[Ticket] = ()) -> Ticket:
        """Write, after the copies in `after`; on the CPU all earlier ops are done already."""
        offset = self.offsets[host.data_ptr()]
        return self._out.submit(self._move, [here], offset, after, write=True)

    def arrive(self, host: torch.Tensor, here: torch.Tensor, after: Ticket) -> Ticket:
        """Read, after the copy whose ticket is `after`."""
        offset, earlier = self.offsets[host.data_ptr()], () if after is None else (after,)
        return self._back.submit(self._move, [here], offset, earlier, write=False)

    def wait(self, ticket: Ticket) -> None:
        """Wait until a copy is done; raise its exception if it failed."""
        if ticket is not None:
            ticket.result()

    def finish(self, ticket: Ticket) -> None:
        """Wait for a copy; on the CPU the same as `wait`."""
        self.wait(ticket)

    def _move(
        self, box: list[torch.Tensor], offset: int, after: Sequence[Future[None]], *, write: bool
    ) -> None:
        for ticket in after:
            ticket.result()
        # Popped: the thread pool holds its arguments a moment longer than the copy takes, so the
        # tensor would still be allocated when the next one is made.
        tensor = box.pop()
        rest, begin = memoryview(tensor.numpy()), offset
        while rest:
            if write:
                done = os.pwrite(self.file, rest, offset)
            elif not (done := os.preadv(self.file, [rest], offset)):
                raise OSError(f"the file of the state ends at {offset}, within a tensor.")
            # The system may transfer less than requested (2 GiB at most on Linux).
            rest, offset = rest[done:], offset + done
        if not self.keep_cached:
            if write:
                # Pages not yet written back cannot be dropped.
                os.fdatasync(self.file)
            os.posix_fadvise(self.file, begin, offset - begin, os.POSIX_FADV_DONTNEED)


class HostState(StateBuffers):
    """Parameters and optimizer state of a CPU model, in a file.

    Each tensor is a shared mapping of its part of the file: code that reads it (state_dict,
    evaluation, gradient clipping) sees its values, and its pages belong to the page cache, which
    the system reclaims when memory is short. What an op needs is read from the file into memory,
    and written back. Updates may be made in place, through the mapping: then nothing is copied for
    them, and the page cache pages that they touch become resident.

    Parameters
    ----------
    where
        Folder for an unnamed file, which disappears with the process. Default: the folder for
        temporary files.
    keep_cached
        Whether the system may keep what was read and written in its page cache, as it does with any
        file. False drops it at once: a step then waits for the disk each time, and takes no memory
        from other processes.
    in_place
        Whether parameters and state are updated through the mapping. Default (None): if the system
        may keep the file in its page cache, and has memory for all of it now. Otherwise they are
        read, updated and written.
    update
        When parameters are updated. `step`: by `optimizer.step()`, as usual; each gradient is
        written to the host as soon as it is complete, parameters are updated one after another, and
        clipping, loss scalers and accumulation work on `.grad`. `backward`: each parameter in the
        backward pass, which moves less; anything that would use `.grad` raises PlanError.

    Notes
    -----
    Space is reserved when a tensor is placed, so a full disk raises then and not during a step.
    """

    def __init__(
        self,
        where: str | os.PathLike[str] | None = None,
        *,
        keep_cached: bool = True,
        in_place: bool | None = None,
        update: str = "step",
    ) -> None:
        super().__init__(update)
        folder = Path(tempfile.gettempdir() if where is None else where)
        if not folder.is_dir():
            raise PlanError(
                f"state: got {str(folder)!r}, which is not a folder. Pass one on a disk with room "
                "for parameters and optimizer state, or create it."
            )
        self.where, self.device = str(folder), torch.device("cpu")
        self.file, name = tempfile.mkstemp(prefix="sn_memory", dir=folder)
        # Unlinked, so the file disappears with the process, however that ends.
        os.unlink(name)
        weakref.finalize(self, os.close, self.file)
        self.keep_cached, self.in_place = keep_cached, in_place
        self._end = 0
        self.files: dict[int, int] = {}
        self._mappings: list[mmap.mmap] = []

    @property
    def nbytes(self) -> int:
        """Reserved bytes."""
        return self._end

    def lanes(self) -> Lanes:
        """Return the lanes that copy between the file and memory."""
        return FileLanes(self.file, self.files, keep_cached=self.keep_cached)

    def updater(self, nbytes: int) -> str:
        """Return what updates `nbytes` of parameters, gradients and state; see `with_state`."""
        in_place = self.in_place
        if in_place is None:
            in_place = self.keep_cached and nbytes < (available_bytes() or 0)
        return "in place" if in_place else "device"

    def _measure(self) -> tuple[float, float]:
        tensor = torch.ones(_PROBE_BYTES, dtype=torch.uint8)
        buffer = self.buffer_of(self.empty_like(tensor))
        assert buffer is not None
        block, lanes, seconds = buffer.block, self.engine.lanes, []
        for copy in (lambda: lanes.leave(tensor, block), lambda: lanes.arrive(block, tensor, None)):
            # The first copy creates pages of the file; later steps reuse them.
            tries = []
            for _ in range(_PROBES):
                began = time.perf_counter()
                lanes.wait(copy())
                tries.append(time.perf_counter() - began)
            seconds.append(min(tries))
        return _PROBE_BYTES / seconds[0], _PROBE_BYTES / seconds[1]

    def let_go(self) -> None:
        """Release the process memory of these tensors until they are read.

        Pages touched before, e.g. while a model was initialised, are then held by the file alone.
        """
        for memory in self._mappings:
            memory.madvise(mmap.MADV_DONTNEED)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return a zeroed block of the file."""
        offset, reserved = self._end, -(-max(nbytes, 1) // _PAGE) * _PAGE
        # A full disk then raises here, instead of a SIGBUS when a page is touched later.
        os.posix_fallocate(self.file, offset, reserved)
        self._end = offset + reserved
        memory = mmap.mmap(self.file, reserved, offset=offset)
        self._mappings.append(memory)
        block = torch.frombuffer(memory, dtype=torch.uint8, count=max(nbytes, 1))[:nbytes]
        self.files[block.data_ptr()] = offset
        return block
