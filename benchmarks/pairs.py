"""Two ways of a training step that take turns, and how their seconds compare."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any


def paired(
    plain: Callable[[], float],
    other: Callable[[], float],
    *,
    pairs: int,
    steps: int,
    mean: Callable[[float], float],
) -> dict[str, Any]:
    """The median of the pairs' ratios, and the middle half of them.

    A pair is the medians of so many steps of each way. They take turns step by step (plain, other,
    other, plain), so that what else runs on the machine meets both alike.

    plain, other : do a step and return its seconds
    mean : over the ranks
    """
    found = []
    for _ in range(pairs):
        seconds: dict[Any, list[float]] = {plain: [], other: []}
        for number in range(steps):
            for way in (plain, other) if number % 2 else (other, plain):
                seconds[way].append(way())
        found.append(tuple(mean(statistics.median(seconds[way])) for way in (plain, other)))
    ratios = sorted(b / a for a, b in found)
    low, _, high = statistics.quantiles(ratios, n=4) if pairs > 1 else ratios * 3
    return {
        "pairs": pairs,
        "steps_per_pair": steps,
        "plain_s": statistics.median(a for a, _ in found),
        "tuned_s": statistics.median(b for _, b in found),
        "tuned_over_plain": statistics.median(ratios),
        "lower_quartile": low,
        "upper_quartile": high,
        "least": ratios[0],
        "most": ratios[-1],
    }


def line_of(row: dict[str, Any]) -> str:
    """A row as people read it."""
    return (
        f"{row['model']}: plain {1e3 * row['plain_s']:.2f} ms, {row['against']} "
        f"{1e3 * row['tuned_s']:.2f} ms, ratio {row['tuned_over_plain']:.3f} "
        f"({row['lower_quartile']:.3f} to {row['upper_quartile']:.3f}), "
        f"{', '.join(row['methods'])}"
    )
