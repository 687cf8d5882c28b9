"""Where parameters and optimizer state lie when they are not on the device.

That is a file. A tensor at rest is a shared mapping of its part of the file: whoever looks at it
(state_dict, evaluation, gradient clipping) sees values, and its pages belong to the page cache,
which the system takes back when memory is short. What an op needs is read from the file into
memory, and written back. Updates may be made in place, through the mapping: then nothing is copied
for them, and the pages that they touch become resident, of the page cache.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
import weakref
from dataclasses import dataclass
from pathlib import Path

import torch

from ...base.errors import PlanError
from ...base.host import available_bytes
from ..device.streams import Lanes, Ticket
from .lanes import FileLanes

_PAGE = mmap.PAGESIZE
_PROBE_BYTES = 1 << 24
_PROBES = 3


@dataclass(eq=False)
class Place:
    """Where one tensor rests.

    Parameters
    ----------
    block
        [bytes] uint8, its bytes on the host.
    written
        The copy that changes them, as long as somebody has to wait for it.
    """

    block: torch.Tensor
    written: Ticket = None


class HostState:
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
        Whether updates are made where parameters and state rest. Default (None): where the system
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
        folder = Path(tempfile.gettempdir() if where is None else where)
        if not folder.is_dir():
            raise PlanError(
                f"state: got {str(folder)!r}, which is no folder. Pass one on a disk with room for "
                "parameters and optimizer state, or make it."
            )
        self.folder = folder
        self.file, name = tempfile.mkstemp(prefix="sn_memory", dir=folder)
        os.unlink(name)
        weakref.finalize(self, os.close, self.file)
        self.keep_cached, self.in_place = keep_cached, in_place
        self._end = 0
        self._places: dict[int, Place] = {}
        self.files: dict[int, int] = {}
        self._lanes: Lanes | None = None

    @property
    def nbytes(self) -> int:
        """What is reserved."""
        return self._end

    @property
    def blocks(self) -> list[torch.Tensor]:
        """All that rests, as bytes."""
        return [place.block for place in self._places.values()]

    def resting(self, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor at rest, of zeros, in the form of a dense one, which is not read."""
        block = self._mapped(like.numel() * like.element_size())
        self._places[block.data_ptr()] = Place(block)
        return torch.empty(0, dtype=like.dtype).set_(
            block.untyped_storage(), 0, like.size(), like.stride()
        )

    def place(self, tensor: torch.Tensor) -> Place | None:
        """Return where a tensor rests; None if it is none of this arena's."""
        try:
            return self._places.get(tensor.data_ptr())
        except RuntimeError:  # no memory, as on the meta device
            return None

    def lanes(self) -> Lanes:
        """Return what copies between the file and memory."""
        if self._lanes is None:
            self._lanes = FileLanes(self.file, self.files, keep_cached=self.keep_cached)
        return self._lanes

    def hold(self, model: torch.nn.Module) -> torch.nn.Module:
        """Move the parameters of a model to the host; of one on the meta device, make them there.

        Those of a meta model are zeros: initialise or load them afterwards, module by module. So a
        model is made that fits nowhere else.
        """
        for parameter in dict.fromkeys(model.parameters()):
            self.take(parameter)
        return model

    def take(self, parameter: torch.nn.Parameter) -> Place:
        """Move one parameter to the host, if it is not there; return its place."""
        found = self.place(parameter)
        if found is not None:
            return found
        made = self.resting(parameter)
        if parameter.is_meta:
            fresh = torch.nn.Parameter(made, parameter.requires_grad)
            torch.utils.swap_tensors(parameter, fresh)
        else:
            with torch.no_grad():
                made.copy_(parameter)
            parameter.data = made
        found = self.place(parameter)
        assert found is not None
        return found

    def updater(self, nbytes: int) -> str:
        """Return who updates so many bytes of parameters, gradients and state; see `with_state`."""
        in_place = self.in_place
        if in_place is None:
            in_place = self.keep_cached and nbytes < (available_bytes() or 0)
        return "in place" if in_place else "device"

    def speeds(self) -> tuple[float, float]:
        """Return bytes per second (to the host, back), measured once with the file."""
        if not hasattr(self, "_speeds"):
            buffer = torch.ones(_PROBE_BYTES, dtype=torch.uint8)
            resting = self.resting(buffer)
            place = self.place(resting)
            assert place is not None
            lanes, times = self.lanes(), []
            for copy in (
                lambda: lanes.leave(buffer, place.block),
                lambda: lanes.arrive(place.block, buffer, None),
            ):
                # The first time pages of the file are made; later steps find them.
                each = []
                for _ in range(_PROBES):
                    began = time.perf_counter()
                    lanes.wait(copy())
                    each.append(time.perf_counter() - began)
                times.append(min(each))
            self._speeds = (_PROBE_BYTES / times[0], _PROBE_BYTES / times[1])
        return self._speeds

    def _mapped(self, size: int) -> torch.Tensor:
        offset, reserved = self._end, -(-max(size, 1) // _PAGE) * _PAGE
        os.posix_fallocate(self.file, offset, reserved)
        self._end = offset + reserved
        memory = mmap.mmap(self.file, reserved, offset=offset)
        block = torch.frombuffer(memory, dtype=torch.uint8, count=max(size, 1))[:size]
        self.files[block.data_ptr()] = offset
        return block
