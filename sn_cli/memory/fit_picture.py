"""The picture of what fits a device: the largest batch by training method, and its bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from sn_memory.base.sizes import show_bytes
from sn_memory.report.figure import blank
from sn_memory.run.estimate import Fit

_ROOM: Final = "#c0392b"


def save_fits(fits: Sequence[Fit], path: str) -> None:
    """Write a PNG of the results for a device, at one sequence length or at several."""
    chart = blank(
        (11, 4.6), "a picture needs matplotlib, which is not installed; the table does not."
    )
    left, right = chart.subplots(1, 2)
    if len(fits) > 1:
        _by_length(left, fits)
    else:
        _by_way(left, fits[0])
    _bytes(right, fits)
    room = show_bytes(fits[0].room_bytes)
    chart.suptitle(
        f"{fits[0].device}, room {room}: predicted, not measured", fontsize=13, fontweight="bold"
    )
    chart.savefig(path, dpi=120)


def _by_way(axes: Any, fit: Fit) -> None:
    ways = fit.ways[::-1]
    axes.barh([way.name for way in ways], [way.batch for way in ways])
    for at, way in enumerate(ways):
        rate = way.tokens_per_s or way.samples_per_s
        unit = "tokens/s" if way.tokens_per_s else "samples/s"
        text = f" {fit.shown_batch(way)}" + (f", {rate:,.0f} {unit}" if rate else "")
        axes.text(way.batch, at, text, va="center")
    axes.set_xlim(0, max(1, *(way.batch for way in ways)) * 2.1)
    at_length = "" if fit.length is None else f", sequence {fit.length}"
    axes.set_xlabel(f"largest batch per card{at_length}")


def _by_length(axes: Any, fits: Sequence[Fit]) -> None:
    lines: dict[str, list[tuple[int | None, int]]] = {}
    for fit in fits:
        for way in fit.ways:
            lines.setdefault(way.name, []).extend([(fit.length, way.batch)] if way.batch else [])
    for number, (name, points) in enumerate(lines.items()):
        style = "--o" if name.endswith("FSDP2") else "-o"
        # Markers distinguish lines that coincide: later ones are smaller.
        axes.plot(*np.array(points).reshape(-1, 2).T, style, markersize=max(3, 11 - number),
                  label=name if points else None)  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.yaxis.set_major_formatter("{x:.0f}")
    axes.set_xlabel("length of sequence")
    axes.set_ylabel("largest batch per card")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _bytes(axes: Any, fits: Sequence[Fit]) -> None:
    """Stack the bytes of the methods that have bytes by category."""
    bars: dict[str, Mapping[str, int]] = {}
    for fit in fits:
        for way in fit.ways:
            # At several lengths, bars for cards too would be too many to read.
            if way.bytes and (len(fits) == 1 or way.cards == 1):
                length = f"\nlength {fit.length}" if len(fits) > 1 else ""
                bars[f"{way.name}\nbatch {way.batch}{length}"] = way.bytes
    room, gib = fits[0].room_bytes / (1 << 30), float(1 << 30)
    below = np.zeros(len(bars))
    for kind in dict.fromkeys(kind for held in bars.values() for kind in held if held[kind]):
        sizes = np.array([held.get(kind, 0) / gib for held in bars.values()])
        axes.bar(range(len(bars)), sizes, bottom=below, label=kind, width=0.6)
        below += sizes
    axes.axhline(room, color=_ROOM, linestyle="--", label="room")
    axes.set_xticks(range(len(bars)), bars, fontsize=8)
    axes.set_ylabel("allocated on a card, GiB")
    axes.set_ylim(0, room * 1.1)
    axes.legend(fontsize=8, bbox_to_anchor=(1.0, 1.0), loc="upper left")
