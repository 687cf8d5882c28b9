"""A stream of its own for the codec, beside the one of the backward pass; nothing on the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class SideStream:
    """One for each CUDA device of which gradients come."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}

    def follow(self, tensor: torch.Tensor) -> None:
        """What is done on the side from now on comes behind what made this tensor."""
        if tensor.is_cuda:
            device = tensor.device
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)
            self._streams[device].wait_stream(torch.cuda.current_stream(device))
            tensor.record_stream(self._streams[device])  # where a step fails, nobody holds it

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Work on the side."""
        if device not in self._streams:
            yield
            return
        with torch.cuda.stream(self._streams[device]):
            yield

    def join(self) -> None:
        """What is done on the current streams from now on comes behind what is on the side."""
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)
