"""Controller: choose the bits of each saved tensor from the error that gradients may have.

Measuring sensitivities would take extra backward passes (GACT: three per tensor). The variance of
the error has a closed form (saved.py), so a sum of squares per layer, gathered every few hundred
steps, is sufficient. In between, the bits do not change.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from ..base.errors import AccuracyWarning
from ..base.sizes import show_bytes
from .saved import (
    OVERFLOWS,
    WIDTHS,
    LossyTreatment,
    Observed,
    Row,
    choose,
    compressed_bytes,
    error_tolerance,
)


class Controller:
    """Chooses bits per saved tensor; exactly one of `error`, `budget_bytes` and `bits` is given.

    Parameters
    ----------
    error
        Acceptable deviation of a gradient's error, as a fraction of the yardstick: 0.01 is 1 %
        of the momentum's mean magnitude, the paper's choice.
    budget_bytes
        The most bytes of all saved tensors together.
    bits
        The same for all inputs of linear ops and norms (at least 2 for norms); statistics are
        gathered only for the report.
    every
        Steps between two refreshes.
    start_bits
        Until the first refresh.
    nonlinear_bits
        For tensors whose op is not linear in them, and for inputs of norms unless `bits` or a
        budget requires fewer.
    least_nonlinear_bits
        The fewest bits to which a budget may reduce these, except norms. Below 8 there is an
        AccuracyWarning.

    Examples
    --------
    >>> controller = Controller(error=0.01)
    >>> controller.bits("conv1/conv2d/0")
    8
    >>> controller.observe("conv1/conv2d/0", n=1000, bits=8, variance=1e-6)
    >>> controller.observe_gradient("conv1/conv2d/0", energy=2.0, outputs=16, yardstick=1.0)
    >>> controller.refresh()
    >>> controller.bits("conv1/conv2d/0")
    4
    """

    def __init__(
        self,
        *,
        error: float | None = None,
        budget_bytes: int | None = None,
        bits: int | None = None,
        every: int = 200,
        start_bits: int = 8,
        nonlinear_bits: int = 8,
        least_nonlinear_bits: int = 8,
    ) -> None:
        goals = {"error": error, "budget_bytes": budget_bytes, "bits": bits}
        goals = {name: goal for name, goal in goals.items() if goal is not None}
        if len(goals) != 1:
            raise ValueError(
                f"Controller: got {', '.join(goals) or 'nothing'}; expected exactly one of error, "
                "budget_bytes and bits. Pass one of them."
            )
        _check("error", error, error is None or error > 0, "above 0")
        _check("budget_bytes", budget_bytes, budget_bytes is None or budget_bytes >= 0, "0 or more")
        widths = ", ".join(map(str, WIDTHS))
        _check("bits", bits, bits is None or bits in WIDTHS, widths)
        _check("every", every, every >= 1, "1 or more")
        _check("start_bits", start_bits, start_bits in WIDTHS, widths)
        _check("nonlinear_bits", nonlinear_bits, nonlinear_bits in WIDTHS, widths)
        least = least_nonlinear_bits
        _check("least_nonlinear_bits", least, least in WIDTHS, widths)
        self.error, self.budget_bytes, self.fixed_bits = error, budget_bytes, bits
        self.every, self.start_bits, self.nonlinear_bits = every, start_bits, nonlinear_bits
        self.least_nonlinear_bits = min(least, nonlinear_bits)
        self._seen = Observed()
        self._bits: dict[str, int | None] = {}
        self._warned = False

    def due(self, step: int) -> bool:
        """Whether to gather statistics in this step; the first step is 0."""
        return step % self.every == 0

    def bits(self, key: str, *, kind: LossyTreatment = "linear") -> int | None:
        """Return the bits of a tensor; None to keep it uncompressed."""
        # Until a choice was made.
        first = self.nonlinear_bits
        if kind == "linear":
            first = self.start_bits if self.fixed_bits is None else self.fixed_bits
        elif kind == "norm" and self.fixed_bits is not None:
            first = min(first, max(self.fixed_bits, 2))
        return self._bits.get(key, first)

    def tolerance(self, key: str) -> float:
        """Return the round-to-nearest tolerance that `error` allows, for the paper's codec."""
        row = self._seen.rows.get(key)
        if self.error is None or row is None or row.gradient_energy is None:
            return math.inf
        sd = self.error * row.yardstick
        return error_tolerance(sd, row.gradient_energy, row.outputs, row.nonzero, row.coverage)

    def knows(self, key: str) -> bool:
        """Whether a tensor was observed before."""
        return key in self._seen.rows

    def observe(
        self, key: str, *, n: int, bits: int | None, variance: float | None,
        nonzero: float | None = 1.0, kind: LossyTreatment = "linear", group: str = "",
    ) -> None:  # fmt: skip
        """Record a compressed tensor; without a variance, the known one is kept."""
        before = self._seen.rows.get(key, Row(key, n, bits, 0.0))
        self._seen.rows[key] = replace(
            before, n=n, bits=bits, kind=kind, group=group or key,
            # Converted to the current bits, which may differ from those it was measured at.
            variance=before.variance_at(bits) if variance is None else variance,
            nonzero=before.nonzero if nonzero is None else nonzero,
        )  # fmt: skip

    def forget(self, place: str) -> None:
        """Forget a tensor, or all tensors of a module, which saves others from now on."""
        # A key is the path of a module, a slash, and the op.
        below = (f"{place}/", f"{place}.")
        for known in (self._seen.rows, self._seen.others, self._bits):
            for key in [key for key in known if key == place or key.startswith(below)]:
                del known[key]

    def observe_other(self, key: str, *, nbytes: int) -> None:
        """Record bytes that no choice changes: masks, indices, uncompressed tensors."""
        self._seen.others[key] = nbytes

    def observe_gradient(
        self, key: str, *, energy: float, outputs: int, yardstick: float, coverage: float = 1.0
    ) -> None:
        """Record the gradient that arrived at the output of the layer that saved `key`."""
        about = {"outputs": outputs, "yardstick": yardstick, "coverage": coverage}
        self._note(key, gradient_energy=energy, **about)

    def observe_error(self, key: str, sd: float) -> None:
        """Record a measured standard deviation of the gradient's error."""
        self._note(key, measured_sd=sd)

    def timed(self, key: str, seconds: float) -> None:
        """Record the seconds of packing and unpacking a tensor."""
        self._note(key, seconds=seconds)

    def _note(self, key: str, **about: Any) -> None:
        if key in self._seen.rows:
            self._seen.rows[key] = replace(self._seen.rows[key], **about)

    def overflowed(self, key: str) -> None:
        """Record that too many elements overflowed: more bits next time, or uncompressed."""
        row = self._seen.rows.get(key, Row(key, 0, self.bits(key), 0.0))
        row = replace(row, overflows=row.overflows + 1)
        self._seen.rows[key] = row
        # None: it is already kept uncompressed.
        now = self._bits.get(key, row.bits)
        wider = [b for b in WIDTHS if now is not None and b > now]
        self._bits[key] = wider[0] if wider and row.overflows < OVERFLOWS else None

    def refresh(self) -> None:
        """Choose again from the observations. Tensors kept exactly after overflows stay so."""
        # With fixed bits nothing is chosen: statistics are only for the report.
        if self.error is not None:
            for row in self._seen.free:
                if row.kind == "linear" and row.gradient_energy is not None:
                    self._bits[row.key] = self._for_error(row, self.error)
        elif self.budget_bytes is not None and self._seen.free:
            self._for_budget(self.budget_bytes)

    def _for_error(self, row: Row, error: float) -> int:
        """The fewest bits that keep the error; with a yardstick of zero, the most."""
        # A tensor that overflowed does not go back to 1 bit.
        floor = 1 + (row.overflows > 0)
        for bits in WIDTHS[:-1]:
            sd = row.predicted_sd(bits)
            if bits >= floor and sd is not None and sd <= error * row.yardstick:
                return bits
        return WIDTHS[-1]

    def _for_budget(self, budget_bytes: int) -> None:
        choice = choose(
            self._seen,
            budget_bytes,
            nonlinear_bits=self.nonlinear_bits,
            least_nonlinear_bits=self.least_nonlinear_bits,
        )
        self._bits |= choice.bits
        # Warn once: a choice is made again every few hundred steps.
        if choice.nonlinear and choice.nonlinear_bits < self.nonlinear_bits and not self._warned:
            self._warned = True
            wanted = self._seen.held(2, 2, self.nonlinear_bits)
            warnings.warn(
                f"the budget of {show_bytes(budget_bytes)} leaves {choice.nonlinear_bits} bits for "
                f"inputs of GELU, attention and the like, {choice.nonlinear} tensors of "
                f"{choice.tensors}. On a small transformer 4 bits cost a point of accuracy and 2 "
                f"broke training. Raise the budget above {show_bytes(wanted)}, or recompute "
                "modules: plan(model, sample, budget).",
                AccuracyWarning,
                stacklevel=2,
            )

    @property
    def total_bytes(self) -> int:
        """Bytes kept for all observed tensors, with the current bits."""
        bits = {row.key: self.bits(row.key, kind=row.kind) for row in self.rows()}
        return self._seen.held_at(bits)

    def held_under(self, keys: Collection[str], bits: int | None = None) -> int:
        """Bytes kept under some keys, with these bits or those of the last observation."""
        rows = [row for row in self.rows() if row.key in keys]
        widths = [bits if bits and self._seen.is_free(row) else row.bits for row in rows]
        return sum(map(compressed_bytes, (row.n for row in rows), widths)) + sum(
            nbytes for key, nbytes in self._seen.others.items() if key in keys
        )

    def held_at(self, bits: int) -> int:
        """Bytes that would be kept with these bits for inputs of linear ops and norms."""
        return self._seen.held(bits, bits, self.nonlinear_bits)

    def rows(self) -> list[Row]:
        """The statistics of each tensor, in the order they were first saved."""
        return list(self._seen.rows.values())

    def report(self) -> str:
        """Return a table: bits, predicted and measured error of each layer's gradient."""
        lines = [
            f"{'tensor':40} {'elements':>10} {'bits':>5} {'predicted':>10} {'measured':>10} of"
        ]
        for row in self.rows():
            bits = self.bits(row.key, kind=row.kind)
            sd, measured = 0.0 if bits is None else row.predicted_sd(), row.measured_sd
            shown = "exact" if bits is None else bits
            lines.append(
                f"{row.key:40} {row.n:10,} {shown:>5} "
                f"{'-' if sd is None else f'{sd:.2e}':>10} "
                f"{'-' if measured is None else f'{measured:.2e}':>10} "
                f"{f'{row.yardstick:.2e}' if row.yardstick else '-'}"
            )
        return "\n".join(lines)


def _check(name: str, got: object, ok: bool, expected: str) -> None:
    if not ok:
        raise ValueError(f"Controller: {name}={got!r}; expected {expected}")


@dataclass(frozen=True)
class BatchSuggestion:
    """The largest batches that fit, and their throughput.

    batch : the largest that fits with compressed activations
    plain_batch : the largest that fits without
    samples_per_s, plain_samples_per_s : expected with each; None if seconds were not passed
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
    """Return the largest batch that fits, with compressed activations and without.

    The paper's second half (Jin et al., arXiv 2011.09017): the freed memory is used for a larger
    batch, which keeps the device busier. A step's time is affine in the batch as long as the device
    is busy, so two measured batches predict the throughput of a third.

    Parameters
    ----------
    budget_bytes
        Memory of the device.
    fixed_bytes
        Bytes that do not grow with the batch: parameters, gradients, the optimizer's state.
    sample_bytes, compressed_sample_bytes
        Activations saved per sample, plain and compressed.
    transient_sample_bytes
        Further bytes per sample, in both cases: the largest layer's working set.
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
    sizes = min(sample_bytes, compressed_sample_bytes)
    if sizes <= 0 or transient_sample_bytes < 0 or multiple < 1:
        raise ValueError(
            f"suggest_batch: got {sample_bytes} and {compressed_sample_bytes} bytes per sample, "
            f"{transient_sample_bytes} besides, multiples of {multiple}; expected sizes above zero"
        )
    # Transient bytes are the same with and without compression.
    batches = [
        int((budget_bytes - fixed_bytes) // (held + transient_sample_bytes)) // multiple * multiple
        for held in (compressed_sample_bytes, sample_bytes)
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
