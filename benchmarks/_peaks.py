"""Columns of peaks, as the benchmarks of both frameworks show them."""

from __future__ import annotations

from typing import Any

from sn_memory.activations import Peaks


def columns(found: Peaks) -> dict[str, Any]:
    """What was verified, beyond parameters and input, as columns of a row."""
    return {
        "plain_peak_bytes": found.plain_bytes - found.base_bytes,
        "predicted_peak_bytes": found.predicted_bytes - found.base_bytes,
        "measured_peak_bytes": found.measured_bytes - found.base_bytes,
        "kept_to": round(found.kept_to, 4),
    }


def cells(row: dict[str, Any]) -> str:
    """The last cells of a table: three peaks in MiB, how well they held, milliseconds a step."""
    peaks = ", ".join(
        f"{row[f'{kind}_peak_bytes'] / 2**20:.2f}" for kind in ("plain", "predicted", "measured")
    )
    times = f"{1e3 * row['plain_step_s']:.0f}, {1e3 * row['step_s']:.0f}"
    return f"{peaks} | {row['kept_to']:.0%} | {times} |"
