"""One saved tensor: what was seen of it, and what that says of the error and of bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from .rerun import INPUT
from .theory import gradient_sd

WIDTHS: Final = (1, 2, 4, 8)
_GRID_BYTES: Final = 6 / 256  # of an element, for the grid of its group


@dataclass(frozen=True)
class Row:
    """One saved tensor: what was seen of it, and what that says.

    Parameters
    ----------
    key
        Module path, op, slot.
    n
        Elements.
    bits
        Per element, of the last observation; None: kept as it is.
    variance
        Mean variance of the rounding, of the last observation.
    nonzero
        Fraction of elements that are not zero.
    gradient_energy, mean_gradient
        Sum of squares and mean magnitude of what arrives at the layer's output; None until seen.
    outputs, terms, coverage
        Of the layer: features, products summed by an entry, fraction not meeting padding.
    yardstick
        Mean magnitude of the weight's momentum, or what stands for it.
    overflows
        How often it had to be kept exactly, as too many elements escaped.
    measured_sd
        Of the gradient's error, where it was measured.
    group
        Name of the memory it lies in, where others have it too.
    linear
        Whether its op is linear in it.
    """

    key: str
    n: int
    bits: int | None
    variance: float
    nonzero: float = 1.0
    gradient_energy: float | None = None
    mean_gradient: float = 0.0
    outputs: int = 1
    terms: int = 1
    coverage: float = 1.0
    yardstick: float = 0.0
    overflows: int = 0
    measured_sd: float | None = None
    group: str = ""
    linear: bool = True

    def predicted_sd(self, bits: int | None = None) -> float | None:
        """Return the deviation of the error of dW at these bits, or those it has.

        At other bits the variance is taken to follow the square of the step. None: dY is unseen.
        """
        if self.gradient_energy is None:
            return None
        if self.bits is None:
            return 0.0
        scale = _levels(self.bits) / _levels(self.bits if bits is None else bits)
        variance = self.variance * scale**2
        return gradient_sd(variance, self.gradient_energy, self.outputs, self.coverage)

    @property
    def relative_error(self) -> float | None:
        """Predicted deviation over the yardstick."""
        sd = self.predicted_sd()
        return None if sd is None or not self.yardstick else sd / self.yardstick

    @property
    def unit(self) -> str | None:
        """The unit that was given this tensor; None: an op saved it."""
        path, _, _ = self.key.rpartition("/")
        name, _, op = path.rpartition("/")
        return name if op == INPUT else None

    def gain(self, low: int, high: int) -> float:
        """Squared relative error saved per byte, by `high` bits instead of `low`."""
        sds = [self.predicted_sd(bits) for bits in (low, high)]
        if sds[0] is None or sds[1] is None or not self.yardstick:
            return 0.0
        saved = (sds[0] ** 2 - sds[1] ** 2) / self.yardstick**2
        return saved / max(self.n * (high - low), 1)


def compressed_bytes(n: int, bits: int | None) -> int:
    """Bytes of n elements in groups of 256, the grids included; None: kept as float32.

    Examples
    --------
    >>> compressed_bytes(2560, 4), compressed_bytes(2560, None)
    (1340, 10240)
    """
    return 4 * n if bits is None else math.ceil(n * (bits / 8 + _GRID_BYTES))


def _levels(bits: int) -> int:
    return (1 << bits) - 1
