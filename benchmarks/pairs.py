"""Two ways of a training step that take turns, and how their seconds compare."""

from __future__ import annotations

import statistics
import time
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
    """The median of the pairs' ratios, and the middle half of them; in seconds, and in CPU seconds.

    A pair is the medians of so many steps of each way. They take turns step by step (plain, other,
    other, plain), so that what else runs on the machine meets both alike.

    plain, other : do a step and return its seconds
    mean : over the ranks
    """
    walls, cpus = [], []
    for _ in range(pairs):
        wall: dict[Any, list[float]] = {plain: [], other: []}
        cpu: dict[Any, list[float]] = {plain: [], other: []}
        for number in range(steps):
            for way in (plain, other) if number % 2 else (other, plain):
                start = time.process_time()
                wall[way].append(way())
                cpu[way].append(time.process_time() - start)
        for medians, seconds in ((walls, wall), (cpus, cpu)):
            medians.append([mean(statistics.median(seconds[way])) for way in (plain, other)])
    ratios = sorted(b / a for a, b in walls)
    cpu_ratios = sorted(b / a for a, b in cpus)
    low, _, high = statistics.quantiles(ratios, n=4) if pairs > 1 else ratios * 3
    cpu_low, _, cpu_high = statistics.quantiles(cpu_ratios, n=4) if pairs > 1 else cpu_ratios * 3
    return {
        "pairs": pairs,
        "steps_per_pair": steps,
        "plain_s": statistics.median(a for a, _ in walls),
        "tuned_s": statistics.median(b for _, b in walls),
        "tuned_over_plain": statistics.median(ratios),
        "lower_quartile": low,
        "upper_quartile": high,
        "least": ratios[0],
        "most": ratios[-1],
        "plain_cpu_s": statistics.median(a for a, _ in cpus),
        "tuned_over_plain_cpu": statistics.median(cpu_ratios),
        "lower_quartile_cpu": cpu_low,
        "upper_quartile_cpu": cpu_high,
    }


def line_of(row: dict[str, Any]) -> str:
    """A row as people read it."""
    return (
        f"{row['model']}: plain {1e3 * row['plain_s']:.2f} ms, {row['against']} "
        f"{1e3 * row['tuned_s']:.2f} ms, ratio {row['tuned_over_plain']:.3f} "
        f"({row['lower_quartile']:.3f} to {row['upper_quartile']:.3f}), of "
        f"{1e3 * row['plain_cpu_s']:.2f} CPU ms {row['tuned_over_plain_cpu']:.3f} "
        f"({row['lower_quartile_cpu']:.3f} to {row['upper_quartile_cpu']:.3f}), "
        f"{', '.join(row['methods'])}"
    )
