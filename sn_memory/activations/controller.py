"""Controller: from the error a gradient may have to the bits of each saved tensor.

Asking the network would take extra backward passes (GACT: three per tensor). The variance of the
error has a closed form (theory.py), so a sum of squares per layer, gathered every few hundred
steps, is all that is needed. Between two of these the bits stay what they are.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, Literal

from ..errors import AccuracyWarning, BudgetError
from ..sizes import show_bytes
from .theory import PAPER_CONSTANT, acceptable_bound, gradient_sd, paper_sd

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


class Controller:
    """Chooses bits per saved tensor; exactly one of `error`, `budget_bytes` and `bits` is given.

    Parameters
    ----------
    error
        Acceptable deviation of a gradient's error, as a fraction of the yardstick: 0.01 is 1 %
        of the momentum's mean magnitude, the paper's choice.
    budget_bytes
        What saved tensors may take together.
    bits
        For all inputs of linear ops alike; statistics are gathered for the report only.
    every
        Steps between two refreshes.
    start_bits
        Until the first.
    nonlinear_bits
        Of tensors whose op is not linear in them. A budget may take fewer, 2 at the least, with an
        AccuracyWarning.
    theory
        "exact", or "paper": its formula and constant, for comparison. It gives a bound, which
        becomes the widest step of the grid.
    constant
        The paper's a.
    overflow_limit
        Overflows after which a tensor is kept as it is, for good.

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
        theory: Literal["exact", "paper"] = "exact",
        constant: float = PAPER_CONSTANT,
        overflow_limit: int = 3,
    ) -> None:
        given = [name for name, v in _named(error, budget_bytes, bits) if v is not None]
        if len(given) != 1:
            raise ValueError(
                f"Controller: got {', '.join(given) or 'nothing'}; expected exactly one of error, "
                "budget_bytes and bits. Give the one that matters to you."
            )
        _check("error", error, error is None or error > 0, "above 0")
        _check("budget_bytes", budget_bytes, budget_bytes is None or budget_bytes >= 0, "0 or more")
        widths = ", ".join(map(str, WIDTHS))
        _check("bits", bits, bits is None or bits in WIDTHS, widths)
        _check("every", every, every >= 1, "1 or more")
        _check("start_bits", start_bits, start_bits in WIDTHS, widths)
        _check("nonlinear_bits", nonlinear_bits, nonlinear_bits in WIDTHS, widths)
        _check("theory", theory, theory in ("exact", "paper"), "exact or paper")
        _check("constant", constant, constant > 0, "above 0")
        _check("overflow_limit", overflow_limit, overflow_limit >= 1, "1 or more")
        self.error, self.budget_bytes, self.fixed_bits = error, budget_bytes, bits
        self.every, self.start_bits, self.nonlinear_bits = every, start_bits, nonlinear_bits
        self.theory, self.constant, self.overflow_limit = theory, constant, overflow_limit
        self._rows: dict[str, Row] = {}
        self._linear: dict[str, bool] = {}
        self._others: dict[str, int] = {}
        self._bits: dict[str, int | None] = {}
        self._warned = False

    def due(self, step: int) -> bool:
        """Whether statistics are wanted of this step; the first is 0."""
        return step % self.every == 0

    def bits(self, key: str, *, linear: bool = True) -> int | None:
        """Return the bits of a tensor; None: keep it as it is."""
        first = self.start_bits if self.fixed_bits is None else self.fixed_bits
        return self._bits.get(key, first if linear else self.nonlinear_bits)

    def bound(self, key: str) -> float:
        """Return the widest step its grid may have: infinite, but for the paper's theory."""
        row = self._rows.get(key)
        if self.theory == "exact" or self.error is None or row is None:
            return math.inf
        unit = paper_sd(1.0, row.mean_gradient, row.terms, row.nonzero, self.constant)
        sd = self.error * row.yardstick
        return sd / unit if unit and sd else math.inf

    def exact_bound(self, key: str) -> float:
        """Return the bound of errors to nearest that `error` allows, for the paper's codec."""
        row = self._rows.get(key)
        if self.error is None or row is None or row.gradient_energy is None:
            return math.inf
        sd = self.error * row.yardstick
        return acceptable_bound(sd, row.gradient_energy, row.outputs, row.nonzero, row.coverage)

    def observe(
        self, key: str, *, n: int, bits: int | None, variance: float, nonzero: float = 1.0,
        linear: bool = True,
    ) -> None:  # fmt: skip
        """Take note of a packed tensor."""
        before = self._rows.get(key, Row(key, n, bits, variance))
        self._rows[key] = replace(before, n=n, bits=bits, variance=variance, nonzero=nonzero)
        self._linear[key] = linear

    def observe_other(self, key: str, *, nbytes: int) -> None:
        """Take note of bytes that no choice changes: masks, indices, what is kept exactly."""
        self._others[key] = nbytes

    def observe_gradient(
        self, key: str, *, energy: float, outputs: int, yardstick: float, mean: float = 0.0,
        terms: int = 1, coverage: float = 1.0,
    ) -> None:  # fmt: skip
        """Take note of what arrived at the output of the layer that saved `key`."""
        if key in self._rows:
            self._rows[key] = replace(
                self._rows[key], gradient_energy=energy, outputs=outputs, yardstick=yardstick,
                mean_gradient=mean, terms=terms, coverage=coverage,
            )  # fmt: skip

    def observe_error(self, key: str, sd: float) -> None:
        """Take note of a measured deviation of the gradient's error."""
        if key in self._rows:
            self._rows[key] = replace(self._rows[key], measured_sd=sd)

    def overflowed(self, key: str) -> None:
        """Take note that too many elements escaped: wider next time, or kept as it is."""
        row = self._rows.get(key, Row(key, 0, self.bits(key), 0.0))
        row = replace(row, overflows=row.overflows + 1)
        self._rows[key] = row
        now = self._bits.get(key, row.bits)
        wider = [b for b in WIDTHS if now is not None and b > now]
        self._bits[key] = wider[0] if wider and row.overflows < self.overflow_limit else None

    def refresh(self) -> None:
        """Choose again from what was observed. Tensors kept exactly after overflows stay so."""
        free = {
            key: row
            for key, row in self._rows.items()
            if row.bits is not None and row.overflows < self.overflow_limit
        }
        if self.error is not None:
            for key, row in free.items():
                if self._linear.get(key, True) and row.gradient_energy is not None:
                    self._bits[key] = self._for_error(row, self.error)
        elif self.budget_bytes is not None and free:
            self._for_budget(free, self.budget_bytes)

    def _for_error(self, row: Row, error: float) -> int:
        """The least bits that keep to the error; with a yardstick of zero, all."""
        floor = 1 + (row.overflows > 0)
        for bits in WIDTHS[:-1]:
            sd = row.predicted_sd(bits)
            if bits >= floor and sd is not None and sd <= error * row.yardstick:
                return bits
        return WIDTHS[-1]

    def _for_budget(self, free: dict[str, Row], budget_bytes: int) -> None:
        """Linear inputs from 1 bit up, the next where it lowers the squared error most per byte.

        The error of a tensor falls with each width by more than its bytes grow, so the greedy order
        is the best one, but for the last step taken. What is not linear gives way first from 8
        to 4 and 2 bits, all alike, until at least 2 bits are left for the linear ones.
        """
        linear = {k: r for k, r in free.items() if self._linear.get(k, True)}
        rest = {k: r for k, r in free.items() if k not in linear}
        fixed = sum(self._others.values()) + sum(
            4 * row.n for key, row in self._rows.items() if key not in free
        )
        least = sum(_bytes(row.n, 2) for row in linear.values())
        wanted = fixed + least + sum(_bytes(row.n, self.nonlinear_bits) for row in rest.values())
        for width in (w for w in reversed(WIDTHS) if 2 <= w <= self.nonlinear_bits):
            held = fixed + sum(_bytes(row.n, width) for row in rest.values())
            if held + least <= budget_bytes:
                break
        if rest and width < self.nonlinear_bits and not self._warned:
            self._warned = True
            warnings.warn(
                f"the budget of {show_bytes(budget_bytes)} leaves {width} bits for what norms, "
                f"attention and the like read, {len(rest)} tensors of {len(free)}. On a small "
                "transformer 4 bits cost a point of accuracy and 2 broke training. Raise the "
                f"budget above {show_bytes(wanted)}, or run such ops again: sn_memory.torch.plan.",
                AccuracyWarning,
                stacklevel=2,
            )
        for key in rest:
            self._bits[key] = width
        ones = sum(_bytes(row.n, 1) for row in linear.values())
        if (left := budget_bytes - held - ones) < 0:
            raise BudgetError(
                f"saved tensors take {held + ones} bytes at the fewest bits; expected "
                f"{budget_bytes} at most. Raise the budget, or give a smaller batch.",
                peak_bytes=held + ones,
                budget_bytes=budget_bytes,
                op=max(free.values(), key=lambda row: row.n).key,
            )
        chosen = dict.fromkeys(linear, 1)
        steps = sorted(
            ((self._gain(row, low, high), key, low, high)
             for key, row in linear.items() for low, high in pairwise(WIDTHS)),
            key=lambda step: (-step[0], step[2]),
        )  # fmt: skip
        for _, key, low, high in steps:
            cost = _bytes(linear[key].n, high) - _bytes(linear[key].n, low)
            if chosen[key] == low and cost <= left:
                chosen[key], left = high, left - cost
        self._bits |= chosen

    def _gain(self, row: Row, low: int, high: int) -> float:
        """Squared relative error saved per byte, by `high` bits instead of `low`."""
        sds = [row.predicted_sd(bits) for bits in (low, high)]
        if sds[0] is None or sds[1] is None or not row.yardstick:
            return 0.0
        saved = (sds[0] ** 2 - sds[1] ** 2) / row.yardstick**2
        return saved / max(row.n * (high - low), 1)

    @property
    def total_bytes(self) -> int:
        """What all tensors seen take, at the bits chosen now."""
        held = sum(self._others.values())
        for key, row in self._rows.items():
            bits = self.bits(key, linear=self._linear.get(key, True))
            held += 4 * row.n if bits is None else _bytes(row.n, bits)
        return held

    def rows(self) -> list[Row]:
        """What is known of each tensor, in the order they were first saved."""
        return list(self._rows.values())

    def report(self) -> str:
        """Return a table: bits, predicted and measured error of each layer's gradient."""
        lines = [
            f"{'tensor':40} {'elements':>10} {'bits':>5} {'predicted':>10} {'measured':>10} of"
        ]
        for row in self._rows.values():
            sd, measured = row.predicted_sd(), row.measured_sd
            bits = self.bits(row.key, linear=self._linear.get(row.key, True))
            lines.append(
                f"{row.key:40} {row.n:10,} {'exact' if bits is None else bits:>5} "
                f"{'-' if sd is None else f'{sd:.2e}':>10} "
                f"{'-' if measured is None else f'{measured:.2e}':>10} "
                f"{f'{row.yardstick:.2e}' if row.yardstick else '-'}"
            )
        return "\n".join(lines)


def _named(
    error: float | None, budget_bytes: int | None, bits: int | None
) -> list[tuple[str, float | None]]:
    return [("error", error), ("budget_bytes", budget_bytes), ("bits", bits)]


def _check(name: str, got: object, ok: bool, expected: str) -> None:
    if not ok:
        raise ValueError(f"Controller: {name}={got!r}; expected {expected}")


def _levels(bits: int) -> int:
    return (1 << bits) - 1


def _bytes(n: int, bits: int) -> int:
    """Bytes of n elements in groups of 256, the grids included."""
    return math.ceil(n * (bits / 8 + _GRID_BYTES))
