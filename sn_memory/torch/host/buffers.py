"""Storage of parameters and optimizer state on the host: in pinned memory, or in a file."""

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

# torch rounds pinned memory up to a power of two, so it is allocated in slabs of this size.
_SLAB = 1 << 26
# Like the device's own allocator.
_ALIGNMENT = 512
# Elements copied to measure the link; the most that `measured_device` uses.
_PROBE = 1 << 24


class StateBuffers(ABC):
    """The host memory of parameters and optimizer state: a buffer for each tensor.

    device : where the ops run that use this state
    where : a description, for messages
    update : when this state is updated: `step` or `backward`
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
        """What is reserved."""

    @abstractmethod
    def lanes(self) -> Lanes:
        """Return the lanes of copies between here and the device."""

    @cached_property
    def engine(self) -> CopyEngine:
        """The engine that starts these copies."""
        return CopyEngine(self.device, self.lanes())

    def updater(self, nbytes: int) -> str:
        """Return who updates so many bytes of parameters, gradients and state; see `with_state`."""
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
        """Return a block of bytes, a storage of its own."""

    @abstractmethod
    def let_go(self) -> None:
        """Release the process's memory for this state, if possible, until it is read again."""

    @property
    def blocks(self) -> list[torch.Tensor]:
        """All state here, as bytes."""
        return [buffer.block for buffer in self._buffers.values()]

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a new tensor here in the form of a dense one, whose values are not read."""
        block = self.allocate(tensor.numel() * tensor.element_size())
        self._buffers[block.data_ptr()] = HostBuffer(block)
        return torch.empty(0, dtype=tensor.dtype).set_(
            block.untyped_storage(), 0, tensor.size(), tensor.stride()
        )

    def buffer_of(self, tensor: torch.Tensor) -> HostBuffer | None:
        """Return the buffer of a tensor; None if it is not here."""
        try:
            return self._buffers.get(tensor.data_ptr())
        except RuntimeError:  # without memory, e.g. on the meta device
            return None

    def finish(self) -> None:
        """Wait for all writes, after which the program may read."""
        for buffer in self._buffers.values():
            self.engine.finish(buffer)

    def hold(self, model: torch.nn.Module) -> torch.nn.Module:
        """Move a model's parameters to the host, or create them there for a meta model.

        Those of a meta model are zeros: initialise or load them afterwards, module by module. This
        creates models that fit nowhere else. Its buffers become zeros on the device.

        Raises PlanError for a non-persistent buffer on the meta device, which nothing would load.
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
    """Replace a model's buffers on the meta device by zeros; shared ones stay shared."""
    missing = [
        (f"{path}.{name}" if path else name, module, name, buffer)
        for path, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
        if buffer.is_meta
    ]
    for path, module, name, _ in missing:
        if name in module._non_persistent_buffers_set:
            raise PlanError(
                f"the buffer {path!r} is on the meta device and in no state dict, so that nothing "
                "would load it. Give its module a real one before (register_buffer again), as the "
                "module computes it when it is made."
            )
    real: dict[int, torch.Tensor] = {}
    for _, module, name, buffer in missing:
        module._buffers[name] = real.setdefault(id(buffer), torch.zeros_like(buffer, device=device))


def set_memory(parameter: torch.nn.Parameter, tensor: torch.Tensor) -> None:
    """Give a parameter, the same object, another tensor's memory; its gradient moves with it."""
    # Detached first: it has to follow the parameter to the other device.
    gradient, parameter.grad = parameter.grad, None
    if torch._has_compatible_shallow_copy_type(parameter, tensor):
        parameter.data = tensor
    else:
        # For devices that are not built into torch, and from the meta device.
        torch.utils.swap_tensors(parameter, torch.nn.Parameter(tensor, parameter.requires_grad))
    if gradient is not None:
        parameter.grad = gradient.to(tensor.device)


class PinnedState(StateBuffers):
    """State in pinned host memory, for a model on a device with separate memory.

    What an op needs is copied to the device and back on streams, parallel to the ops. Tensors here
    are CPU tensors: after the backward pass or the optimizer's step, they have the current values.

    Parameters
    ----------
    device
        Where the model's ops run, e.g. `"cuda"`.
    update
        As in `HostState`.
    """

    def __init__(self, device: torch.device | str, *, update: str = "step") -> None:
        super().__init__(update)
        # With its index, as tensors have it.
        self.device = torch.empty(0, device=torch.device(device)).device
        if not has_streams(self.device):
            raise ValueError(
                f"got device {str(device)!r}, expected one with separate memory and streams, such "
                "as 'cuda'. On the CPU, state is kept in a file: HostState."
            )
        self.where = f"pinned memory for {self.device}"
        self._slabs: list[tuple[torch.Tensor, int]] = []
        resident_for(self, self.device)

    @property
    def nbytes(self) -> int:
        """What is reserved."""
        return sum(slab.nbytes for slab, _ in self._slabs)

    def lanes(self) -> Lanes:
        """Return the streams of copies."""
        return lanes_for(self.device)

    def _measure(self) -> tuple[float, float]:
        return transfer_speeds(torch.ones(_PROBE, device=self.device))

    def let_go(self) -> None:
        """Do nothing: pinned memory cannot be released."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return a zeroed block of pinned memory."""
        wanted = -(-max(nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
        fits = (at for at, (slab, end) in enumerate(self._slabs) if slab.nbytes - end >= wanted)
        at = next(fits, len(self._slabs))
        if at == len(self._slabs):
            size = max(_SLAB, 1 << (wanted - 1).bit_length())
            self._slabs.append((torch.zeros(size, dtype=torch.uint8, pin_memory=True), 0))
        slab, begin = self._slabs[at]
        self._slabs[at] = (slab, begin + wanted)
        memory = memoryview(slab.numpy())
        # With its own storage, as whole storages are copied; it keeps the slab alive.
        return torch.frombuffer(memory, dtype=torch.uint8, count=max(nbytes, 1), offset=begin)[
            :nbytes
        ]


_PAGE = mmap.PAGESIZE
_PROBE_BYTES = 1 << 24
_PROBES = 3


class FileLanes(Lanes):
    """Two lanes, each a thread: one reads the file into memory, one writes it.

    They read and write without the interpreter lock, so ops run in parallel. A copy that has to
    come after another waits for it in its own thread; those of one lane run in the order of their
    requests, and each waits only for earlier ones, so there are no deadlocks.

    file : its descriptor
    offsets : per address of a mapped block, its offset in the file
    keep_cached : whether the system may keep pages that were read or written
    """

    def __init__(self, file: int, offsets: Mapping[int, int], *, keep_cached: bool = True) -> None:
        self.file, self.offsets, self.keep_cached = file, offsets, keep_cached
        self._out = ThreadPoolExecutor(1, "sn_memory store")
        self._back = ThreadPoolExecutor(1, "sn_memory fetch")

    def leave(self, here: torch.Tensor, host: torch.Tensor, after: Sequence[Ticket] = ()) -> Ticket:
        """Write, after the copies of `after`; on the CPU, all earlier ops have finished."""
        offset = self.offsets[host.data_ptr()]
        return self._out.submit(self._move, [here], offset, after, write=True)

    def arrive(self, host: torch.Tensor, here: torch.Tensor, after: Ticket) -> Ticket:
        """Read, after the copy that `after` stands for."""
        offset, earlier = self.offsets[host.data_ptr()], () if after is None else (after,)
        return self._back.submit(self._move, [here], offset, earlier, write=False)

    def wait(self, ticket: Ticket) -> None:
        """Wait until a copy is done; raise its error, if any."""
        if ticket is not None:
            ticket.result()

    def finish(self, ticket: Ticket) -> None:
        """Wait like ops do, on the CPU."""
        self.wait(ticket)

    def _move(
        self, only: list[torch.Tensor], offset: int, after: Sequence[Future[None]], *, write: bool
    ) -> None:
        for ticket in after:
            ticket.result()
        # Popped, because the pool holds its arguments slightly longer than anything waits for the
        # copy, so that the memory would still be allocated when the next is.
        tensor = only.pop()
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
                # Dirty pages cannot be dropped.
                os.fdatasync(self.file)
            os.posix_fadvise(self.file, begin, offset - begin, os.POSIX_FADV_DONTNEED)


class HostState(StateBuffers):
    """Parameters and optimizer state in a file.

    A tensor there is a shared mapping of its part of the file: any reader (state_dict, evaluation,
    gradient clipping) sees its values, and its pages belong to the page cache, which the system
    reclaims when memory is short. What an op needs is read from the file into memory, and written
    back. Updates may be made in place, through the mapping: then nothing is copied for them, and
    the pages that they touch become resident in the page cache.

    Parameters
    ----------
    where
        A folder, in which an unnamed file is created, which disappears with the process. Default:
        the folder for temporary files.
    keep_cached
        Whether the system may keep what was read and written in its page cache, as for any file.
        False drops it immediately: a step then waits for the disk each time, and takes no memory
        from other processes.
    in_place
        Whether parameters and state are updated in place. Default (None): if the system may keep
        the file in its page cache, and currently has memory for all of it. Otherwise they are read,
        updated and written.
    update
        When parameters are updated. `step`: by `optimizer.step()`, as usual; each gradient is
        written to the host as soon as it is complete, one parameter is updated after the other, and
        clipping, loss scalers and accumulation work with `.grad`. `backward`: each parameter in the
        backward pass, which copies less; anything that needs `.grad` raises PlanError.

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
                "for parameters and optimizer state, or make it."
            )
        self.where, self.device = str(folder), torch.device("cpu")
        self.file, name = tempfile.mkstemp(prefix="sn_memory", dir=folder)
        # Unnamed, so that it disappears with the process, however that ends.
        os.unlink(name)
        weakref.finalize(self, os.close, self.file)
        self.keep_cached, self.in_place = keep_cached, in_place
        self._end = 0
        self.files: dict[int, int] = {}
        self._mappings: list[mmap.mmap] = []

    @property
    def nbytes(self) -> int:
        """What is reserved."""
        return self._end

    def lanes(self) -> Lanes:
        """Return the lanes of copies between the file and memory."""
        return FileLanes(self.file, self.files, keep_cached=self.keep_cached)

    def updater(self, nbytes: int) -> str:
        """Return who updates so many bytes of parameters, gradients and state; see `with_state`."""
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
            # The first write allocates pages of the file, which later steps find.
            tries = []
            for _ in range(_PROBES):
                began = time.perf_counter()
                lanes.wait(copy())
                tries.append(time.perf_counter() - began)
            seconds.append(min(tries))
        return _PROBE_BYTES / seconds[0], _PROBE_BYTES / seconds[1]

    def let_go(self) -> None:
        """Release this process's memory for the state, until it is read again.

        Pages that were touched, e.g. by initialising a model, then only belong to the file.
        """
        for memory in self._mappings:
            memory.madvise(mmap.MADV_DONTNEED)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return a zeroed block of the file."""
        offset, reserved = self._end, -(-max(nbytes, 1) // _PAGE) * _PAGE
        # So a full disk raises here, instead of a SIGBUS when a page is touched later.
        os.posix_fallocate(self.file, offset, reserved)
        self._end = offset + reserved
        memory = mmap.mmap(self.file, reserved, offset=offset)
        self._mappings.append(memory)
        block = torch.frombuffer(memory, dtype=torch.uint8, count=max(nbytes, 1))[:nbytes]
        self.files[block.data_ptr()] = offset
        return block
