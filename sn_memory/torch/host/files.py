"""State in a file, for a model on the CPU.

A tensor there is a shared mapping of its part of the file: whoever reads it (state_dict,
evaluation, gradient clipping) sees values, and its pages belong to the page cache, which the system
takes back when memory is short. What an op needs is read from the file into memory, and written
back. Updates may be made in place, through the mapping: then nothing is copied for them, and the
pages that they touch become resident, of the page cache.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from ...base.errors import PlanError
from ...base.host import available_bytes
from ..target.accelerator import Lanes, Ticket
from .buffers import StateBuffers

_PAGE = mmap.PAGESIZE
_PROBE_BYTES = 1 << 24
_PROBES = 3


class FileLanes:
    """A lane that reads a file into memory, and one that writes: a thread each.

    While they read and write, the interpreter's lock is free, so ops run beside them. A copy that
    has to come after another waits for it in its own thread; those of one lane run in the order in
    which they were asked for, and each waits only for earlier ones, so no two wait for each other.

    Parameters
    ----------
    file
        Its descriptor.
    offsets
        Per address of a mapped block, where in the file it lies.
    keep_cached
        Whether the system may keep pages that were read or written.
    """

    def __init__(self, file: int, offsets: Mapping[int, int], *, keep_cached: bool = True) -> None:
        self.file, self.offsets, self.keep_cached = file, offsets, keep_cached
        self._out = ThreadPoolExecutor(1, "sn_memory store")
        self._back = ThreadPoolExecutor(1, "sn_memory fetch")

    def leave(self, here: torch.Tensor, host: torch.Tensor, after: Sequence[Ticket] = ()) -> Ticket:
        """Write, after the copies of `after`; all ops so far are done on the CPU."""
        offset = self.offsets[host.data_ptr()]
        return self._out.submit(self._move, here, offset, after, write=True)

    def arrive(self, host: torch.Tensor, here: torch.Tensor, after: Ticket) -> Ticket:
        """Read, after the copy that `after` stands for."""
        offset, earlier = self.offsets[host.data_ptr()], () if after is None else (after,)
        return self._back.submit(self._move, here, offset, earlier, write=False)

    def wait(self, ticket: Ticket) -> None:
        """Wait until a copy is done; raises what went wrong in it."""
        if ticket is not None:
            ticket.result()

    def finish(self, ticket: Ticket) -> None:
        """Wait until a copy is done; on the CPU ops and the program wait alike."""
        self.wait(ticket)

    def _move(
        self, tensor: torch.Tensor, offset: int, after: Sequence[Future[None]], *, write: bool
    ) -> None:
        for ticket in after:
            ticket.result()
        rest, begin = memoryview(tensor.numpy()), offset
        while rest:
            if write:
                done = os.pwrite(self.file, rest, offset)
            elif not (done := os.preadv(self.file, [rest], offset)):
                raise OSError(f"the file of the state ends at {offset}, within a tensor.")
            rest, offset = rest[done:], offset + done
        if not self.keep_cached:
            if write:
                # Pages that are not written back yet cannot be dropped.
                os.fdatasync(self.file)
            os.posix_fadvise(self.file, begin, offset - begin, os.POSIX_FADV_DONTNEED)


class HostState(StateBuffers):
    """The host memory of parameters and optimizer state.

    Parameters
    ----------
    where
        A folder, in which a file without a name is made: it goes with the process. Default: the
        folder of temporary files.
    keep_cached
        Whether the system may keep what was read and written in its page cache, as it does with any
        file. False drops it at once: a step then waits for the disk each time, and takes no memory
        from others.
    in_place
        Whether updates are made where parameters and state lie. Default (None): where the system
        may keep the file in its page cache, and has memory for all of it now. Otherwise they are
        read, updated and written.

    Notes
    -----
    Space is reserved when a tensor is placed, so a full disk is an error then and not in a step.
    """

    def __init__(
        self,
        where: str | os.PathLike[str] | None = None,
        *,
        keep_cached: bool = True,
        in_place: bool | None = None,
    ) -> None:
        super().__init__()
        folder = Path(tempfile.gettempdir() if where is None else where)
        if not folder.is_dir():
            raise PlanError(
                f"state: got {str(folder)!r}, which is no folder. Pass one on a disk with room for "
                "parameters and optimizer state, or make it."
            )
        self.folder, self.where, self.device = folder, str(folder), torch.device("cpu")
        self.file, name = tempfile.mkstemp(prefix="sn_memory", dir=folder)
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
        """Return what copies between the file and memory."""
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
            # The first time pages of the file are made; later steps find them.
            tries = []
            for _ in range(_PROBES):
                began = time.perf_counter()
                lanes.wait(copy())
                tries.append(time.perf_counter() - began)
            seconds.append(min(tries))
        return _PROBE_BYTES / seconds[0], _PROBE_BYTES / seconds[1]

    def let_go(self) -> None:
        """Take no memory of this process for what lies here, until somebody reads it.

        Pages that were touched, as by initialising a model, are the file's alone from then on.
        """
        for memory in self._mappings:
            memory.madvise(mmap.MADV_DONTNEED)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return a block of the file, of zeros."""
        offset, reserved = self._end, -(-max(nbytes, 1) // _PAGE) * _PAGE
        os.posix_fallocate(self.file, offset, reserved)
        self._end = offset + reserved
        memory = mmap.mmap(self.file, reserved, offset=offset)
        self._mappings.append(memory)
        block = torch.frombuffer(memory, dtype=torch.uint8, count=max(nbytes, 1))[:nbytes]
        self.files[block.data_ptr()] = offset
        return block
