"""From a budget to the bits of each saved tensor, and to the units that run again.

An op that is not linear in what it saved needs 8 bits of it, and most of what a transformer saves
is of that kind; a unit, a part of the model, that runs again needs its inputs only. Units are taken
until 4 bits are left for inputs of linear ops; if there are not enough, 2 or 1.
These then get bits from 1 up, where a bit helps most. The error of a tensor falls with each width
by more than its bytes grow, so the greedy order is the best one, but for the last step taken.
If it is allowed, what is not linear gives way next, to 4 and 2 bits, all alike, until at least 2
bits are left for the linear ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from ..plan.plan import BudgetError
from .saved import WIDTHS, Groups, Observed, Unit, compressed_bytes, is_inside

# Of linear ones. Where a budget leaves fewer, running again comes first.
WANTED_BITS: Final = 4


@dataclass(frozen=True)
class Choice:
    """What a budget allows.

    Attributes
    ----------
    bits
        By key.
    again
        Units that run again.
    nonlinear_bits
        Of what is not linear.
    nonlinear, tensors
        How many memories are of that kind, and of all kinds.
    """

    bits: dict[str, int]
    again: frozenset[str]
    nonlinear_bits: int
    nonlinear: int
    tensors: int


def choose(
    seen: Observed,
    budget_bytes: int,
    again: frozenset[str],
    *,
    choosing: bool,
    nonlinear_bits: int,
    least_nonlinear_bits: int,
) -> Choice:
    """Return bits with which all that is kept takes at most a budget.

    Parameters
    ----------
    seen
        What there is to keep.
    again
        Units that run again now.
    choosing
        Whether others may, if these do not suffice.
    nonlinear_bits, least_nonlinear_bits
        Of what is not linear: wanted, and where the budget asks for it.

    Raises
    ------
    BudgetError
        With the bytes at the fewest bits.
    """
    if choosing and seen.held(again, WANTED_BITS, nonlinear_bits) > budget_bytes:
        again = _units(seen, budget_bytes, nonlinear_bits)
    widths = [width for width in reversed(WIDTHS) if width <= nonlinear_bits]
    for width in (width for width in widths if width >= max(2, least_nonlinear_bits)):
        if seen.held(again, 2, width) <= budget_bytes:
            break
    linear, rest = seen.groups(again)
    least = seen.held(again, 1, width)
    if least > budget_bytes:
        raise BudgetError(
            f"saved tensors take {least} bytes at the fewest bits; expected "
            f"{budget_bytes} at most. Raise the budget, give a smaller batch, or allow fewer "
            f"bits for what is not linear (least_nonlinear_bits, {width} now).",
            peak_bytes=least,
            budget_bytes=budget_bytes,
            op=max(seen.rows.values(), key=lambda row: row.n).key,
        )
    bits = {row.key: width for rows in rest.values() for row in rows}
    bits |= _shared_out(linear, budget_bytes - least)
    # What is saved inside is there for a moment only.
    bits |= {
        row.key: WANTED_BITS if row.linear else nonlinear_bits
        for row in seen.free
        if is_inside(row.key, again)
    }
    return Choice(bits, again, width, len(rest), len(rest) + len(linear))


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


def _units(seen: Observed, budget_bytes: int, nonlinear_bits: int) -> frozenset[str]:
    """Units that leave the bits wanted for linear inputs; or the fewer bits that fit."""
    inside = {name: seen.inside(name, WANTED_BITS, nonlinear_bits) for name in seen.units}
    for bits in (width for width in reversed(WIDTHS) if width <= WANTED_BITS):

        def held(again: frozenset[str], at: int = bits) -> int:
            return seen.held(again, at, nonlinear_bits)

        chosen = choose_again(seen.units, held, budget_bytes, inside)
        if held(chosen) <= budget_bytes:
            break
    return chosen


def choose_again(
    units: Mapping[str, Unit],
    held: Callable[[frozenset[str]], int],
    budget_bytes: int,
    inside: Mapping[str, int],
) -> frozenset[str]:
    """Return units that, run again, leave at most `budget_bytes`, and cost little.

    One after the other the unit that frees most per cost is taken, where more than is missing
    counts for nothing; one that holds others takes their place. Those that turn out not to be
    needed are dropped. If no choice fits, the one that leaves least is returned.

    What a unit saves is all there while it runs again. So its cost is its work, and as much again
    for each budget that its inside takes.

    Parameters
    ----------
    units
        By name.
    held
        Bytes that are kept if these units run again.
    inside
        Bytes that each unit's inside takes while it runs again.

    Examples
    --------
    >>> units = {name: Unit(name, work, {}) for name, work in (("a", 0.5), ("a.b", 0.1))}
    >>> left, inside = {(): 100, ("a.b",): 60, ("a",): 20}, {"a": 80, "a.b": 40}
    >>> [
    ...     sorted(choose_again(units, lambda s: left[tuple(s)], most, inside))
    ...     for most in (100, 70, 30)
    ... ]
    [[], ['a.b'], ['a']]
    """

    def cost(chosen: Collection[str]) -> float:
        return sum(units[name].work * (1 + inside[name] / max(budget_bytes, 1)) for name in chosen)

    chosen: frozenset[str] = frozenset()
    now = held(chosen)
    candidates = [name for name in units if now > budget_bytes and held(frozenset({name})) < now]
    while now > budget_bytes:
        best: tuple[float, frozenset[str], int] | None = None
        for name in candidates:
            if is_inside(f"{name}/", chosen):
                continue
            apart = [unit for unit in chosen if not is_inside(f"{unit}/", {name})]
            other = frozenset({name, *apart})
            left = held(other)
            freed = min(now - left, now - budget_bytes)
            more = cost(other) - cost(chosen)
            if freed > 0 and (best is None or freed / max(more, 1e-9) > best[0]):
                best = freed / max(more, 1e-9), other, left
        if best is None:
            break
        _, chosen, now = best
    for name in sorted(chosen, key=lambda name: (-cost([name]), name)):
        if held(chosen - {name}) <= budget_bytes:
            chosen -= {name}
    return chosen
