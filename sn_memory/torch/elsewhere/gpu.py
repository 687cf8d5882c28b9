"""A GPU that is not here: what a capture, and a step run without values, ask of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from ...cost.devices import NamedDevice, is_here, named
from ...graph.records import Device
from .device_guard import fake_gpus
from .kernels import GPU, Kernels, flags_of_autocast, no_flattening
from .walk import Take, Walk


@dataclass
class Gpu:
    """A GPU of the table, as fake tensors are on it.

    Parameters
    ----------
    named
        Its figures.
    notes
        What of a step is estimated or counted otherwise than the GPU would run it, once it ran.
    """

    named: NamedDevice
    notes: dict[str, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        fake_gpus()
        self._walk = Walk()

    place = GPU

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around a forward pass."""
        kernels = Kernels(self.named.capability)
        try:
            with flags_of_autocast(), no_flattening(), self._walk.saving(), kernels.chosen():
                yield
        finally:
            self.notes.update(kernels.notes)

    def gradients(
        self,
        ends: Sequence[torch.Tensor],
        wanted: Sequence[torch.Tensor],
        output_gradients: Sequence[torch.Tensor],
    ) -> list[torch.Tensor | None]:
        """Return the gradients of leaves, None where there is none."""
        found: dict[int, torch.Tensor] = {}

        def take(leaf: torch.Tensor, gradient: torch.Tensor) -> None:
            found[id(leaf)] = gradient

        self.back(ends, output_gradients, take)
        return [found.get(id(leaf)) for leaf in wanted]

    def back(
        self, ends: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], take: Take
    ) -> None:
        """Run the backward pass; `take` is called with each leaf and its gradient."""
        with torch.no_grad(), Kernels(self.named.capability).chosen():
            self._walk.back(ends, gradients, take)


def gpu_of(device: Device | str | None, place: torch.device) -> Gpu | None:
    """Return the GPU that a name stands for; None for a model that is on one, or for no name."""
    if not isinstance(device, str) or is_here(device):
        return None
    found = named(device)
    return None if place.type == "cuda" else Gpu(found)
