"""What compressed activations are worth: the peak, predicted and measured, and a larger batch.

The paper's second half (Jin et al., arXiv 2011.09017): memory that is free again is spent on a
larger batch, which keeps the device busier. What a step costs is affine in the batch as long as it
is busy, so two measured batches tell the throughput of a third.
"""

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


@dataclass(frozen=True)
class BatchSuggestion:
    """What fits and what it brings.

    Parameters
    ----------
    batch
        The largest that fits with compressed activations.
    plain_batch
        The largest that fits without.
    samples_per_s, plain_samples_per_s
        Expected with each, or None where seconds were not given.
    """

    batch: int
    plain_batch: int
    samples_per_s: float | None = None
    plain_samples_per_s: float | None = None

    @property
    def speedup(self) -> float | None:
        """Throughput over that of the plain batch; below 1, the larger batch does not pay."""
        if not self.samples_per_s or not self.plain_samples_per_s:
            return None
        return self.samples_per_s / self.plain_samples_per_s


def suggest_batch(
    budget_bytes: int,
    *,
    fixed_bytes: int,
    sample_bytes: float,
    compressed_sample_bytes: float,
    transient_sample_bytes: float = 0.0,
    step_s: tuple[float, float] | None = None,
    compressed_step_s: tuple[float, float] | None = None,
    multiple: int = 1,
) -> BatchSuggestion:
    """Return the largest batch that fits, compressed and plain.

    Parameters
    ----------
    budget_bytes
        Memory of the device.
    fixed_bytes
        What does not grow with the batch: parameters, gradients, the optimizer's state.
    sample_bytes, compressed_sample_bytes
        Activations saved per sample, plain and compressed.
    transient_sample_bytes
        What a sample needs besides, in both: the largest layer's working set.
    step_s, compressed_step_s
        Seconds of a step as (constant, per sample), plain and compressed.
    multiple
        Batches are multiples of this.

    Raises
    ------
    ValueError
        If sizes are not above zero, or not even one multiple fits compressed.

    Examples
    --------
    >>> found = suggest_batch(
    ...     1_000_000, fixed_bytes=200_000, sample_bytes=10_000, compressed_sample_bytes=1_000,
    ...     step_s=(0.01, 0.0001), compressed_step_s=(0.01, 0.00011),
    ... )
    >>> found.batch, found.plain_batch, round(found.speedup, 2)
    (800, 80, 1.84)
    """
    if (
        min(sample_bytes, compressed_sample_bytes) <= 0
        or transient_sample_bytes < 0
        or multiple < 1
    ):
        raise ValueError(
            f"suggest_batch: got {sample_bytes} and {compressed_sample_bytes} bytes per sample, "
            f"{transient_sample_bytes} besides, multiples of {multiple}; expected sizes above zero"
        )
    batches = [
        int((budget_bytes - fixed_bytes) // (each + transient_sample_bytes)) // multiple * multiple
        for each in (compressed_sample_bytes, sample_bytes)
    ]
    if batches[0] < multiple:
        raise ValueError(
            f"suggest_batch: a budget of {budget_bytes} bytes, of which {fixed_bytes} do not "
            f"depend on the batch, has no room for {multiple} samples of {compressed_sample_bytes}"
        )
    batch, plain = batches[0], max(batches[1], 0)
    return BatchSuggestion(
        batch, plain, _throughput(batch, compressed_step_s), _throughput(plain, step_s)
    )


def _throughput(batch: int, step_s: tuple[float, float] | None) -> float | None:
    if step_s is None or not batch:
        return None
    return batch / (step_s[0] + step_s[1] * batch)
