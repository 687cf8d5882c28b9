"""State in pinned memory of the host, for a model on a device with memory of its own.

What an op needs is copied to the device and back on streams beside the ops. A tensor at rest is one
of the CPU: whoever looks at it after the backward pass or the optimizer's step sees its values.
"""

from __future__ import annotations

import torch

from ..target.accelerator import Lanes, has_streams, lanes_for
from ..target.host_resident import rests_for
from ..trace.op_seconds import transfer_speeds
from .arena import StateArena

# torch rounds pinned memory up to a power of two, so it is asked for in such pieces.
_SLAB = 1 << 26
# As the device's own allocator aligns.
_ALIGNMENT = 512
# Elements that are copied to measure the way, as many as the trace of a step takes.
_PROBE = 1 << 24


class PinnedState(StateArena):
    """The pinned host memory of parameters and optimizer state.

    Parameters
    ----------
    device
        Where the model's ops run, as `"cuda"`.
    """

    def __init__(self, device: torch.device | str) -> None:
        super().__init__()
        found = torch.device(device)
        # With its number, as tensors say it.
        self._device = torch.empty(0, device=found).device
        if not has_streams(self._device):
            raise ValueError(
                f"got device {str(device)!r}, expected one with memory and streams of its own, as "
                "'cuda'. On the CPU state lies in a file: HostState."
            )
        self._slabs: list[tuple[torch.Tensor, int]] = []
        self._lanes: Lanes | None = None
        self._speeds: tuple[float, float] | None = None
        rests_for(self, self._device)

    @property
    def nbytes(self) -> int:
        """What is reserved."""
        return sum(slab.nbytes for slab, _ in self._slabs)

    @property
    def where(self) -> str:
        """Pinned memory."""
        return f"pinned memory for {self._device}"

    @property
    def device(self) -> torch.device:
        """Where ops run on what rests here."""
        return self._device

    def lanes(self) -> Lanes:
        """Return the streams of copies."""
        if self._lanes is None:
            self._lanes = lanes_for(self._device)
        return self._lanes

    def updater(self, nbytes: int) -> str:
        """Return who updates what rests here: the device."""
        return "device"

    def speeds(self) -> tuple[float, float]:
        """Return bytes per second (to the host, back), measured once."""
        if self._speeds is None:
            self._speeds = transfer_speeds(torch.ones(_PROBE, device=self._device))
        return self._speeds

    def let_go(self) -> None:
        """Nothing: pinned memory is taken for good."""

    def reserved(self, size: int) -> torch.Tensor:
        """Return a block of pinned memory, of zeros."""
        wanted = -(-max(size, 1) // _ALIGNMENT) * _ALIGNMENT
        fits = (at for at, (slab, end) in enumerate(self._slabs) if slab.nbytes - end >= wanted)
        at = next(fits, len(self._slabs))
        if at == len(self._slabs):
            nbytes = max(_SLAB, 1 << (wanted - 1).bit_length())
            self._slabs.append((torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True), 0))
        slab, begin = self._slabs[at]
        self._slabs[at] = (slab, begin + wanted)
        memory = memoryview(slab.numpy())
        # A storage of its own, which holds the slab.
        return torch.frombuffer(memory, dtype=torch.uint8, count=max(size, 1), offset=begin)[:size]
