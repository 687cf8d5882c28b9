"""How a tensor is compressed, and what a forward pass saved in all."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...activations import Controller
from ...base.sizes import show_bytes
from . import treatments
from .treatments import Exact, Kept, Lossy, Mask, Narrow, Places, Shape, Window


@dataclass(frozen=True)
class Saved:
    """What one forward pass saved: bytes as autograd would hold them, and as they are held."""

    plain_bytes: int
    compressed_bytes: int
    elements: int

    @property
    def ratio(self) -> float:
        """Plain bytes over compressed ones."""
        return self.plain_bytes / max(self.compressed_bytes, 1)

    @property
    def saving_bytes(self) -> int:
        return self.plain_bytes - self.compressed_bytes

    def __str__(self) -> str:
        return (
            f"activations {show_bytes(self.plain_bytes)} -> {show_bytes(self.compressed_bytes)}, "
            f"{self.ratio:.1f} times less"
        )


@dataclass
class Compressor:
    """What looks at values and compresses them; each tensor draws its own random numbers."""

    controller: Controller
    form: str
    seed: int
    threads: int
    drawn: int = 0
    blank = False
    """Whether there are no values, only sizes."""

    def rounded(self, tensor: torch.Tensor, bits: int, tolerance: float, form: str) -> Lossy:
        """Return the values in these bits."""
        codec = treatments.codec(bits, tolerance, form, self.seed, self.threads)
        self.drawn += 1
        return Lossy(treatments.flat_values(tensor), codec, self.drawn - 1)

    def holds_two(self, tensor: torch.Tensor, key: str) -> bool:
        """Whether all values are 0 or one other."""
        return treatments.two_values(treatments.flat_values(tensor)) is not None

    def sign(self, tensor: torch.Tensor, key: str) -> Kept:
        """Return a bit for each value. NaN counts as above zero: it lets gradients through."""
        return Mask(~(treatments.flat_values(tensor) <= 0), 1.0)

    def exact(self, tensor: torch.Tensor, kind: str, window: Window | None, key: str) -> Kept:
        """Return what is kept of a tensor of which nothing is lost."""
        if kind == "exact":
            return Exact(tensor)
        if kind == "shape":
            return Shape()
        if kind == "integers":
            if tensor.dtype == torch.bool:
                return Mask(treatments.flat_values(tensor), 1.0)
            if window is not None and window.bits and tensor.dtype == torch.int64:
                return Places(tensor, window)
            narrow = tensor.dtype in (torch.int16, torch.int32, torch.int64)
            return Narrow(tensor.detach()) if narrow else Exact(tensor)
        values = treatments.flat_values(tensor)
        if kind == "sign":
            return Mask(values > 0, 1.0)
        return Mask(values != 0, treatments.two_values(values) or 0.0)
