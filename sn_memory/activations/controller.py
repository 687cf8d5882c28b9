"""Controller: from the error a gradient may have to the bits of each saved tensor.

Asking the network would take extra backward passes (GACT: three per tensor). The variance of the
error has a closed form (theory.py), so a sum of squares per layer, gathered every few hundred
steps, is all that is needed. Between two of these the bits stay what they are.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from ..base.errors import AccuracyWarning
from ..base.sizes import show_bytes, table
from .budget import choose
from .saved import WIDTHS, Observed, Row, Unit, is_inside
from .theory import PAPER_CONSTANT, error_tolerance, paper_sd


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
        Of tensors whose op is not linear in them.
    least_nonlinear_bits
        What a budget may take of these, if running again does not suffice. Below 8 comes an
        AccuracyWarning.
    recompute
        "auto": under a budget, units that were observed may run again. "never": none does. Or
        names of those that do, and no others.
    theory
        "exact", or "paper": its formula and constant, for comparison. It gives a tolerance, which
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
        least_nonlinear_bits: int = 8,
        recompute: Literal["auto", "never"] | Sequence[str] = "auto",
        theory: Literal["exact", "paper"] = "exact",
        constant: float = PAPER_CONSTANT,
        overflow_limit: int = 3,
    ) -> None:
        targets = {"error": error, "budget_bytes": budget_bytes, "bits": bits}
        given = [name for name, value in targets.items() if value is not None]
        if len(given) != 1:
            raise ValueError(
                f"Controller: got {', '.join(given) or 'nothing'}; expected exactly one of error, "
                "budget_bytes and bits. Give the one that matters to you."
            )
        least, widths = least_nonlinear_bits, ", ".join(map(str, WIDTHS))
        words = not isinstance(recompute, str) or recompute in ("auto", "never")
        for name, got, valid, expected in (
            ("error", error, error is None or error > 0, "above 0"),
            ("budget_bytes", budget_bytes, budget_bytes is None or budget_bytes >= 0, "0 or more"),
            ("bits", bits, bits is None or bits in WIDTHS, widths),
            ("every", every, every >= 1, "1 or more"),
            ("start_bits", start_bits, start_bits in WIDTHS, widths),
            ("nonlinear_bits", nonlinear_bits, nonlinear_bits in WIDTHS, widths),
            ("least_nonlinear_bits", least, least in WIDTHS, widths),
            ("recompute", recompute, words, "auto, never, or names of modules in a list"),
            ("theory", theory, theory in ("exact", "paper"), "exact or paper"),
            ("constant", constant, constant > 0, "above 0"),
            ("overflow_limit", overflow_limit, overflow_limit >= 1, "1 or more"),
        ):
            if not valid:
                raise ValueError(f"Controller: {name}={got!r}; expected {expected}")
        self.error, self.budget_bytes, self.fixed_bits = error, budget_bytes, bits
        self.every, self.start_bits, self.nonlinear_bits = every, start_bits, nonlinear_bits
        self.least_nonlinear_bits = min(least, nonlinear_bits)
        self.recompute = recompute
        self.again = frozenset[str]() if isinstance(recompute, str) else frozenset(recompute)
        self.theory, self.constant, self.overflow_limit = theory, constant, overflow_limit
        self._seen = Observed(overflow_limit)
        self._bits: dict[str, int | None] = {}
        self._warned = False

    def due(self, step: int) -> bool:
        """Whether statistics are wanted of this step; the first is 0."""
        return step % self.every == 0

    @property
    def choosing(self) -> bool:
        """Whether units are wanted: some may be chosen."""
        return self.recompute == "auto" and self.budget_bytes is not None

    def bits(self, key: str, *, linear: bool = True) -> int | None:
        """Return the bits of a tensor; None: keep it as it is."""
        first = self.start_bits if self.fixed_bits is None else self.fixed_bits
        return self._bits.get(key, first if linear else self.nonlinear_bits)

    def tolerance(self, key: str) -> float:
        """Return the widest step its grid may have: infinite, but for the paper's theory."""
        row = self._seen.rows.get(key)
        if self.theory == "exact" or self.error is None or row is None:
            return math.inf
        unit = paper_sd(1.0, row.mean_gradient, row.terms, row.nonzero, self.constant)
        sd = self.error * row.yardstick
        return sd / unit if unit and sd else math.inf

    def exact_tolerance(self, key: str) -> float:
        """Return the tolerance of errors to nearest that `error` allows, for the paper's codec."""
        row = self._seen.rows.get(key)
        if self.error is None or row is None or row.gradient_energy is None:
            return math.inf
        sd = self.error * row.yardstick
        return error_tolerance(sd, row.gradient_energy, row.outputs, row.nonzero, row.coverage)

    def observe(
        self, key: str, *, n: int, bits: int | None, variance: float, nonzero: float = 1.0,
        linear: bool = True, group: str = "",
    ) -> None:  # fmt: skip
        """Take note of a compressed tensor."""
        before = self._seen.rows.get(key, Row(key, n, bits, variance))
        self._seen.rows[key] = replace(
            before, n=n, bits=bits, variance=variance, nonzero=nonzero, linear=linear,
            group=group or key,
        )  # fmt: skip

    def observe_unit(self, unit: Unit) -> None:
        """Take note of a part of the model that may run again."""
        self._seen.units[unit.name] = unit

    def observe_other(self, key: str, *, nbytes: int) -> None:
        """Take note of bytes that no choice changes: masks, indices, what is kept exactly."""
        self._seen.others[key] = nbytes

    def other_bytes(self, key: str) -> int | None:
        """Return what was noted of it so; None: nothing was."""
        return self._seen.others.get(key)

    def observe_gradient(
        self, key: str, *, energy: float, outputs: int, yardstick: float, mean: float = 0.0,
        terms: int = 1, coverage: float = 1.0,
    ) -> None:  # fmt: skip
        """Take note of what arrived at the output of the layer that saved `key`."""
        if key in self._seen.rows:
            self._seen.rows[key] = replace(
                self._seen.rows[key], gradient_energy=energy, outputs=outputs, yardstick=yardstick,
                mean_gradient=mean, terms=terms, coverage=coverage,
            )  # fmt: skip

    def observe_error(self, key: str, sd: float) -> None:
        """Take note of a measured deviation of the gradient's error."""
        if key in self._seen.rows:
            self._seen.rows[key] = replace(self._seen.rows[key], measured_sd=sd)

    def overflowed(self, key: str) -> None:
        """Take note that too many elements escaped: wider next time, or kept as it is."""
        row = self._seen.rows.get(key, Row(key, 0, self.bits(key), 0.0))
        row = replace(row, overflows=row.overflows + 1)
        self._seen.rows[key] = row
        now = self._bits.get(key, row.bits)
        wider = [b for b in WIDTHS if now is not None and b > now]
        self._bits[key] = wider[0] if wider and row.overflows < self.overflow_limit else None

    def refresh(self) -> None:
        """Choose again from what was observed. Tensors kept exactly after overflows stay so."""
        if self.error is not None:
            for row in self._seen.free:
                if row.linear and row.gradient_energy is not None:
                    self._bits[row.key] = self._for_error(row, self.error)
        elif self.budget_bytes is not None and self._seen.free:
            self._for_budget(self.budget_bytes)

    def _for_error(self, row: Row, error: float) -> int:
        """The least bits that keep to the error; with a yardstick of zero, all."""
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
            self.again,
            choosing=self.choosing,
            nonlinear_bits=self.nonlinear_bits,
            least_nonlinear_bits=self.least_nonlinear_bits,
        )
        self.again = choice.again
        self._bits |= choice.bits
        if choice.nonlinear and choice.nonlinear_bits < self.nonlinear_bits and not self._warned:
            self._warned = True
            wanted = self._seen.held(self.again, 2, self.nonlinear_bits)
            warnings.warn(
                f"the budget of {show_bytes(budget_bytes)} leaves {choice.nonlinear_bits} bits for "
                f"what norms, attention and the like read, {choice.nonlinear} tensors of "
                f"{choice.tensors}. On a small transformer 4 bits cost a point of accuracy and 2 "
                f"broke training. Raise the budget above {show_bytes(wanted)}, or let such ops run "
                "again.",
                AccuracyWarning,
                stacklevel=2,
            )

    @property
    def total_bytes(self) -> int:
        """What is kept of all tensors seen, at the bits chosen now."""
        bits = {row.key: self.bits(row.key, linear=row.linear) for row in self.rows()}
        return self._seen.held_at(self.again, bits)

    @property
    def work(self) -> float | None:
        """What running units again costs, as a fraction of the forward pass; None: not known."""
        if not self.again <= self._seen.units.keys():
            return None
        return sum(self._seen.units[name].work for name in self.again)

    def rows(self) -> list[Row]:
        """What is known of each tensor, in the order they were first saved."""
        return list(self._seen.rows.values())

    def report(self) -> str:
        """Return a table: bits, predicted and measured error of each layer's gradient."""
        rows = [("tensor", "elements", "bits", "predicted", "measured", "of")]
        for row in self._seen.rows.values():
            if row.unit is not None and row.unit not in self.again:
                continue
            bits = self.bits(row.key, linear=row.linear)
            told = "again" if is_inside(row.key, self.again) else "exact" if bits is None else bits
            errors = (row.predicted_sd(), row.measured_sd, row.yardstick or None)
            shown = ["-" if error is None else f"{error:.2e}" for error in errors]
            rows.append((row.key, f"{row.n:,}", str(told), shown[0], shown[1], shown[2]))
        lines = table(rows, right=True)
        for name in sorted(self.again):
            unit = self._seen.units.get(name)
            cost = f", {unit.work:.0%} of the forward pass" if unit else ""
            lines.append(f"runs again: {name}{cost}")
        return "\n".join(lines)
