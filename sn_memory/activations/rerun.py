"""Which parts of a model run again in the backward pass, so that what is kept fits in a budget.

An op that is not linear in what it saved needs 8 bits of it, and most of what a transformer saves
is of that kind. A part of the model that runs again needs its inputs only. Parts lie inside one
another; what several of them save, or are given, is kept once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Unit:
    """A part of a model that may run again.

    Parameters
    ----------
    name
        Its module path.
    work
        What running it costs, as a fraction of the forward pass.
    inputs
        What would be kept of it: elements by the name of the memory.
    """

    name: str
    work: float
    inputs: Mapping[str, int]


INPUT = "input"
"""Stands in a key where an op would: what a unit was given."""


def is_inside(key: str, units: Container[str]) -> bool:
    """Whether what is saved under a key is saved inside one of the units.

    What a unit was given is not, but for units around it.

    Examples
    --------
    >>> [is_inside(key, {"a.b"}) for key in ("a.b.c/relu/0", "a.b/gelu/1", "a.b/input/0", "a.bc/0")]
    [True, True, False, False]
    """
    path, *op = key.split("/")
    parts = path.split(".")
    return any(
        ".".join(parts[:depth]) in units for depth in range(1, len(parts) + (op[:1] != [INPUT]))
    )


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
            other = frozenset(it for it in chosen if not is_inside(f"{it}/", {name})) | {name}
            left = held(other)
            freed = min(now - left, now - budget_bytes)
            more = cost(other) - cost(chosen)
            if freed > 0 and (best is None or freed / max(more, 1e-9) > best[0]):
                best = freed / max(more, 1e-9), other, left
        if best is None:
            break
        _, chosen, now = best
    for name in sorted(chosen, key=lambda it: (-cost([it]), it)):
        if held(chosen - {name}) <= budget_bytes:
            chosen -= {name}
    return chosen
