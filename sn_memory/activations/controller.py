"""Controller: from the error a gradient may have to the bits of each saved tensor.

Asking the network would take extra backward passes (GACT: three per tensor). The variance of the
error has a closed form (theory.py), so a sum of squares per layer, gathered every few hundred
steps, is all that is needed. Between two of these the bits stay what they are.

Over 300 lines: what was seen of each tensor, and the two ways to choose from all of it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, Literal

from ..errors import AccuracyWarning, BudgetError
from ..sizes import show_bytes
from .again import INPUT, Unit, choose_again, is_inside
from .theory import PAPER_CONSTANT, acceptable_bound, gradient_sd, paper_sd

WIDTHS: Final = (1, 2, 4, 8)
_GRID_BYTES: Final = 6 / 256  # of an element, for the grid of its group
# Of linear ones. Where a budget leaves fewer, running again comes first.
_WANTED_BITS: Final = 4


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
        Of tensors whose op is not linear in them.
    least_nonlinear_bits
        What a budget may take of these, if running again does not suffice. Below 8 comes an
        AccuracyWarning.
    recompute
        "auto": under a budget, units that were observed may run again. "never": none does. Or
        names of those that do, and no others.
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
        least_nonlinear_bits: int = 8,
        recompute: Literal["auto", "never"] | Sequence[str] = "auto",
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
        least = least_nonlinear_bits
        _check("least_nonlinear_bits", least, least in WIDTHS, widths)
        words = not isinstance(recompute, str) or recompute in ("auto", "never")
        _check("recompute", recompute, words, "auto, never, or names of modules in a list")
        _check("theory", theory, theory in ("exact", "paper"), "exact or paper")
        _check("constant", constant, constant > 0, "above 0")
        _check("overflow_limit", overflow_limit, overflow_limit >= 1, "1 or more")
        self.error, self.budget_bytes, self.fixed_bits = error, budget_bytes, bits
        self.every, self.start_bits, self.nonlinear_bits = every, start_bits, nonlinear_bits
        self.least_nonlinear_bits = min(least, nonlinear_bits)
        self.recompute = recompute
        self.again = frozenset[str]() if isinstance(recompute, str) else frozenset(recompute)
        self._units: dict[str, Unit] = {}
        self.theory, self.constant, self.overflow_limit = theory, constant, overflow_limit
        self._rows: dict[str, Row] = {}
        self._linear: dict[str, bool] = {}
        self._others: dict[str, int] = {}
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
        linear: bool = True, group: str = "",
    ) -> None:  # fmt: skip
        """Take note of a packed tensor."""
        before = self._rows.get(key, Row(key, n, bits, variance))
        self._rows[key] = replace(
            before, n=n, bits=bits, variance=variance, nonzero=nonzero, group=group or key
        )
        self._linear[key] = linear

    def observe_unit(self, unit: Unit) -> None:
        """Take note of a part of the model that may run again."""
        self._units[unit.name] = unit

    def observe_other(self, key: str, *, nbytes: int) -> None:
        """Take note of bytes that no choice changes: masks, indices, what is kept exactly."""
        self._others[key] = nbytes

    def other_bytes(self, key: str) -> int | None:
        """Return what was noted of it so; None: nothing was."""
        return self._others.get(key)

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
        if self.error is not None:
            for key, row in self._rows.items():
                known = self._linear.get(key, True) and row.gradient_energy is not None
                if known and self._is_free(row):
                    self._bits[key] = self._for_error(row, self.error)
        elif self.budget_bytes is not None and any(map(self._is_free, self._rows.values())):
            self._for_budget(self.budget_bytes)

    def _is_free(self, row: Row) -> bool:
        return row.bits is not None and row.overflows < self.overflow_limit

    def _for_error(self, row: Row, error: float) -> int:
        """The least bits that keep to the error; with a yardstick of zero, all."""
        floor = 1 + (row.overflows > 0)
        for bits in WIDTHS[:-1]:
            sd = row.predicted_sd(bits)
            if bits >= floor and sd is not None and sd <= error * row.yardstick:
                return bits
        return WIDTHS[-1]

    def _for_budget(self, budget_bytes: int) -> None:
        """Units that run again, then linear inputs from 1 bit up where a bit helps most.

        Units are taken until 4 bits are left for linear inputs; if there are not enough, 2 or 1.
        The error of a tensor falls with each width by more than its bytes grow, so the greedy order
        is the best one, but for the last step taken. If it is allowed, what is not linear gives way
        next, to 4 and 2 bits, all alike, until at least 2 bits are left for the linear ones.
        """
        fits = self._held(self.again, _WANTED_BITS, self.nonlinear_bits) <= budget_bytes
        if self.choosing and not fits:
            self.again = self._units_for(budget_bytes)
        widths = [w for w in reversed(WIDTHS) if w <= self.nonlinear_bits]
        for width in (w for w in widths if w >= max(2, self.least_nonlinear_bits)):
            if self._held(self.again, 2, width) <= budget_bytes:
                break
        linear, rest = self._groups(self.again)
        if rest and width < self.nonlinear_bits and not self._warned:
            self._warned = True
            wanted = self._held(self.again, 2, self.nonlinear_bits)
            warnings.warn(
                f"the budget of {show_bytes(budget_bytes)} leaves {width} bits for what norms, "
                f"attention and the like read, {len(rest)} tensors of {len(rest) + len(linear)}. "
                "On a small transformer 4 bits cost a point of accuracy and 2 broke training. "
                f"Raise the budget above {show_bytes(wanted)}, or let such ops run again.",
                AccuracyWarning,
                stacklevel=2,
            )
        if (left := budget_bytes - self._held(self.again, 1, width)) < 0:
            raise BudgetError(
                f"saved tensors take {budget_bytes - left} bytes at the fewest bits; expected "
                f"{budget_bytes} at most. Raise the budget, give a smaller batch, or allow fewer "
                f"bits for what is not linear (least_nonlinear_bits, {width} now).",
                peak_bytes=budget_bytes - left,
                budget_bytes=budget_bytes,
                op=max(self._rows.values(), key=lambda row: row.n).key,
            )
        self._bits |= {row.key: width for rows in rest.values() for row in rows}
        chosen_bits = dict.fromkeys(linear, 1)
        steps = sorted(
            ((sum(self._gain(row, low, high) for row in rows), group, low, high)
             for group, rows in linear.items() for low, high in pairwise(WIDTHS)),
            key=lambda step: (-step[0], step[2]),
        )  # fmt: skip
        for _, group, low, high in steps:
            n = linear[group][0].n
            cost = _bytes(n, high) - _bytes(n, low)
            if chosen_bits[group] == low and cost <= left:
                chosen_bits[group], left = high, left - cost
        self._bits |= {row.key: chosen_bits[group] for group in linear for row in linear[group]}
        # What is saved inside is there for a moment only.
        self._bits |= {
            row.key: _WANTED_BITS if self._linear.get(row.key, True) else self.nonlinear_bits
            for row in self._rows.values()
            if self._is_free(row) and is_inside(row.key, self.again)
        }

    def _units_for(self, budget_bytes: int) -> frozenset[str]:
        """Units that leave the bits wanted for linear inputs; or the fewer bits that fit."""
        inside = {name: self._inside(name) for name in self._units}
        for bits in (width for width in reversed(WIDTHS) if width <= _WANTED_BITS):

            def held(again: frozenset[str], at: int = bits) -> int:
                return self._held(again, at, self.nonlinear_bits)

            chosen = choose_again(self._units, held, budget_bytes, inside)
            if held(chosen) <= budget_bytes:
                break
        return chosen

    def _groups(self, again: frozenset[str]) -> tuple[dict[str, list[Row]], dict[str, list[Row]]]:
        """What is packed if these units run again, by memory: linear in all its rows, and not."""
        groups: dict[str, list[Row]] = {}
        for row in self._rows.values():
            if self._is_free(row) and not self._is_input(row) and not is_inside(row.key, again):
                groups.setdefault(row.group, []).append(row)
        inputs = {group: n for name in again for group, n in self._inputs(name)}
        linear, rest = {}, {group: [Row(group, n, 8, 0.0)] for group, n in inputs.items()}
        for group, rows in groups.items():
            if group in rest or not all(self._linear.get(row.key, True) for row in rows):
                rest[group] = rows
            else:
                linear[group] = rows
        return linear, rest

    def _inputs(self, name: str) -> Iterable[tuple[str, int]]:
        """What a unit was given: as it was observed or, without, as it was packed."""
        if name in self._units:
            return self._units[name].inputs.items()
        keys = (key for key in self._rows if key.startswith(f"{name}/{INPUT}/"))
        return [(self._rows[key].group, self._rows[key].n) for key in keys]

    def _inside(self, name: str) -> int:
        """Bytes of what a unit saves, while it runs again."""
        others = sum(size for key, size in self._others.items() if is_inside(key, {name}))
        groups: dict[str, int] = {}
        for row in self._rows.values():
            if is_inside(row.key, {name}) and not self._is_input(row):
                bits = _WANTED_BITS if self._linear.get(row.key, True) else self.nonlinear_bits
                size = _bytes(row.n, bits if self._is_free(row) else 32)
                groups[row.group] = max(groups.get(row.group, 0), size)
        return others + sum(groups.values())

    def _is_input(self, row: Row) -> bool:
        return row.key.split("/")[-2:-1] == [INPUT]

    def _held(self, again: frozenset[str], linear_bits: int, nonlinear_bits: int) -> int:
        """Bytes kept if these units run again."""
        others = sum(size for key, size in self._others.items() if not is_inside(key, again))
        exact = {
            row.group: 4 * row.n
            for key, row in self._rows.items()
            if not self._is_free(row) and not is_inside(key, again)
        }
        linear, rest = self._groups(again)
        return (
            others
            + sum(exact.values())
            + sum(
                _bytes(rows[0].n, bits)
                for groups, bits in ((linear, linear_bits), (rest, nonlinear_bits))
                for rows in groups.values()
            )
        )

    def _gain(self, row: Row, low: int, high: int) -> float:
        """Squared relative error saved per byte, by `high` bits instead of `low`."""
        sds = [row.predicted_sd(bits) for bits in (low, high)]
        if sds[0] is None or sds[1] is None or not row.yardstick:
            return 0.0
        saved = (sds[0] ** 2 - sds[1] ** 2) / row.yardstick**2
        return saved / max(row.n * (high - low), 1)

    @property
    def total_bytes(self) -> int:
        """What is kept of all tensors seen, at the bits chosen now."""
        held = sum(n for key, n in self._others.items() if not is_inside(key, self.again))
        groups: dict[str, int] = {}
        for key, row in self._rows.items():
            if is_inside(key, self.again) or (self._is_input(row) and not self._is_kept(key)):
                continue
            bits = self.bits(key, linear=self._linear.get(key, True))
            size = 4 * row.n if bits is None else _bytes(row.n, bits)
            groups[row.group] = max(groups.get(row.group, 0), size)
        return held + sum(groups.values())

    def _is_kept(self, key: str) -> bool:
        return key.rsplit(f"/{INPUT}/", 1)[0] in self.again

    @property
    def work(self) -> float | None:
        """What running units again costs, as a fraction of the forward pass; None: not known."""
        if not self.again <= self._units.keys():
            return None
        return sum(self._units[name].work for name in self.again)

    def rows(self) -> list[Row]:
        """What is known of each tensor, in the order they were first saved."""
        return list(self._rows.values())

    def report(self) -> str:
        """Return a table: bits, predicted and measured error of each layer's gradient."""
        lines = [
            f"{'tensor':40} {'elements':>10} {'bits':>5} {'predicted':>10} {'measured':>10} of"
        ]
        for row in self._rows.values():
            if self._is_input(row) and not self._is_kept(row.key):
                continue
            sd, measured = row.predicted_sd(), row.measured_sd
            bits = self.bits(row.key, linear=self._linear.get(row.key, True))
            told = "again" if is_inside(row.key, self.again) else "exact" if bits is None else bits
            lines.append(
                f"{row.key:40} {row.n:10,} {told:>5} "
                f"{'-' if sd is None else f'{sd:.2e}':>10} "
                f"{'-' if measured is None else f'{measured:.2e}':>10} "
                f"{f'{row.yardstick:.2e}' if row.yardstick else '-'}"
            )
        for name in sorted(self.again):
            unit = self._units.get(name)
            cost = f", {unit.work:.0%} of the forward pass" if unit else ""
            lines.append(f"runs again: {name}{cost}")
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
