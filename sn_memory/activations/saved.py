"""What a model saves: per tensor the error and bytes at given bits, and the bits a budget allows.

Several saved tensors may lie in one memory, which is counted once. Under a budget, inputs of linear
ops get bits from 1 up, where a bit helps most. The error of a tensor falls with each width by more
than its bytes grow, so the greedy order is the best one, but for the last step taken. If it is
allowed, what is not linear gives way, to 4 and 2 bits, all alike, until at least 2 bits are left
for the linear ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from ..plan.plan import BudgetError
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


Groups = dict[str, list[Row]]


class Observed:
    """Rows by key, and bytes that no choice changes by key.

    Parameters
    ----------
    overflow_limit
        Overflows after which a tensor is kept as it is.
    """

    def __init__(self, overflow_limit: int) -> None:
        self.overflow_limit = overflow_limit
        self.rows: dict[str, Row] = {}
        self.others: dict[str, int] = {}

    def is_free(self, row: Row) -> bool:
        """Whether its bits can be chosen."""
        return row.bits is not None and row.overflows < self.overflow_limit

    @property
    def free(self) -> list[Row]:
        return [row for row in self.rows.values() if self.is_free(row)]

    def groups(self) -> tuple[Groups, Groups]:
        """Groups of rows that are compressed: those linear in all their rows, and the rest."""
        found: Groups = {}
        for row in self.free:
            found.setdefault(row.group, []).append(row)
        linear: Groups = {}
        rest: Groups = {}
        for group, rows in found.items():
            (linear if all(row.linear for row in rows) else rest)[group] = rows
        return linear, rest

    def held(self, linear_bits: int, nonlinear_bits: int) -> int:
        """Bytes kept at these bits."""
        exact = {
            row.group: compressed_bytes(row.n, None)
            for row in self.rows.values()
            if not self.is_free(row)
        }
        linear, rest = self.groups()
        compressed = (
            compressed_bytes(rows[0].n, bits)
            for groups, bits in ((linear, linear_bits), (rest, nonlinear_bits))
            for rows in groups.values()
        )
        return sum(self.others.values()) + sum(exact.values()) + sum(compressed)

    def held_at(self, bits: Mapping[str, int | None]) -> int:
        """Bytes kept at bits by key: each memory once, at the most bits any row of it has."""
        sizes: dict[str, int] = {}
        for row in self.rows.values():
            size = compressed_bytes(row.n, bits[row.key])
            sizes[row.group] = max(sizes.get(row.group, 0), size)
        return sum(self.others.values()) + sum(sizes.values())


@dataclass(frozen=True)
class Choice:
    """What a budget allows.

    Attributes
    ----------
    bits
        By key.
    nonlinear_bits
        Of what is not linear.
    nonlinear, tensors
        How many memories are of that kind, and of all kinds.
    """

    bits: dict[str, int]
    nonlinear_bits: int
    nonlinear: int
    tensors: int


def choose(
    seen: Observed, budget_bytes: int, *, nonlinear_bits: int, least_nonlinear_bits: int
) -> Choice:
    """Return bits with which all that is kept takes at most a budget.

    Parameters
    ----------
    seen
        What there is to keep.
    nonlinear_bits, least_nonlinear_bits
        Of what is not linear: wanted, and where the budget asks for it.

    Raises
    ------
    BudgetError
        With the bytes at the fewest bits.
    """
    widths = [width for width in reversed(WIDTHS) if width <= nonlinear_bits]
    for width in (width for width in widths if width >= max(2, least_nonlinear_bits)):
        if seen.held(2, width) <= budget_bytes:
            break
    linear, rest = seen.groups()
    least = seen.held(1, width)
    if least > budget_bytes:
        raise BudgetError(
            f"saved tensors take {least} bytes at the fewest bits; expected "
            f"{budget_bytes} at most. Raise the budget, give a smaller batch, allow fewer "
            f"bits for what is not linear (least_nonlinear_bits, {width} now), or let modules run "
            "again: plan(model, sample, budget).",
            peak_bytes=least,
            budget_bytes=budget_bytes,
            op=max(seen.rows.values(), key=lambda row: row.n).key,
        )
    bits = {row.key: width for rows in rest.values() for row in rows}
    bits |= _shared_out(linear, budget_bytes - least)
    return Choice(bits, width, len(rest), len(rest) + len(linear))


def _shared_out(linear: Groups, left_bytes: int) -> dict[str, int]:
    """Widen from 1 bit, where a byte saves the most error, while bytes are left."""
    chosen = dict.fromkeys(linear, 1)
    steps = sorted(
        ((sum(row.gain(low, high) for row in rows), group, low, high)
         for group, rows in linear.items() for low, high in pairwise(WIDTHS)),
        key=lambda step: (-step[0], step[2]),
    )  # fmt: skip
    for _, group, low, high in steps:
        n = linear[group][0].n
        cost = compressed_bytes(n, high) - compressed_bytes(n, low)
        if chosen[group] == low and cost <= left_bytes:
            chosen[group], left_bytes = high, left_bytes - cost
    return {row.key: chosen[group] for group, rows in linear.items() for row in rows}
