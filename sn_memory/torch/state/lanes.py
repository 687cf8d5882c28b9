"""Lanes between memory and a file: a thread that reads, and one that writes.

While they read and write, the interpreter's lock is free, so ops run beside them. A copy that has
to come after another waits for it in its own thread; those of one lane run in the order in which
they were asked for, and each waits only for earlier ones, so no two wait for each other.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from ..device.streams import Ticket


class FileLanes:
    """Lanes whose host end is a part of a file.

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
        return self._out.submit(self._write, here, self.offsets[host.data_ptr()], after)

    def arrive(self, host: torch.Tensor, here: torch.Tensor, after: Ticket) -> Ticket:
        """Read, after the copy that `after` stands for."""
        return self._back.submit(self._read, here, self.offsets[host.data_ptr()], after)

    def wait(self, ticket: Ticket) -> None:
        """Wait until a copy is done; raises what went wrong in it."""
        if ticket is not None:
            ticket.result()

    def _write(self, here: torch.Tensor, offset: int, after: Sequence[Future[None]]) -> None:
        for ticket in after:
            ticket.result()
        rest = memoryview(here.numpy())
        begin = offset
        while rest:
            done = os.pwrite(self.file, rest, offset)
            rest, offset = rest[done:], offset + done
        if not self.keep_cached:
            # Pages that are not written back yet cannot be dropped.
            os.fdatasync(self.file)
            os.posix_fadvise(self.file, begin, offset - begin, os.POSIX_FADV_DONTNEED)

    def _read(self, here: torch.Tensor, offset: int, after: Future[None] | None) -> None:
        if after is not None:
            after.result()
        rest = memoryview(here.numpy())
        begin = offset
        while rest:
            done = os.preadv(self.file, [rest], offset)
            if not done:
                raise OSError(f"the file of the state ends at {offset}, within a tensor.")
            rest, offset = rest[done:], offset + done
        if not self.keep_cached:
            os.posix_fadvise(self.file, begin, offset - begin, os.POSIX_FADV_DONTNEED)
