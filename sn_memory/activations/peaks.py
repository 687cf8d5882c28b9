"""What a step's peak was said to be, and what it was: one record for both frameworks."""

from __future__ import annotations

from dataclasses import dataclass

from ..base.sizes import show_bytes


@dataclass(frozen=True)
class Peaks:
    """Peaks of a step in bytes: parameters, input and gradients included.

    Parameters
    ----------
    plain_bytes, measured_bytes
        Without compression and with it, as `verify` measured them.
    predicted_bytes
        With compression, before it ran.
    base_bytes
        Of these: parameters, buffers and input.

    Examples
    --------
    >>> from sn_memory.activations import Peaks
    >>> Peaks(plain_bytes=1000, predicted_bytes=600, measured_bytes=640, base_bytes=100).kept_to
    0.9
    """

    plain_bytes: int
    predicted_bytes: int
    measured_bytes: int
    base_bytes: int

    @property
    def kept_to(self) -> float:
        """Measured saving over predicted saving."""
        predicted = self.plain_bytes - self.predicted_bytes
        return (self.plain_bytes - self.measured_bytes) / predicted if predicted else 1.0

    def __str__(self) -> str:
        return (
            f"peak {show_bytes(self.plain_bytes)} -> {show_bytes(self.measured_bytes)}, predicted "
            f"{show_bytes(self.predicted_bytes)}: {self.kept_to:.0%} of the predicted saving"
        )
