"""The picture of "will it fit": largest batches, and what a step of them holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from ..base.sizes import show_bytes
from ..report.figure import blank
from .fit import Fit

_COLOURS: Final = (
    "#0b6e99", "#e08e0b", "#5b8c2a", "#8e5ea2", "#a0522d",
    "#3b7dd8", "#d35d9e", "#7f8c8d", "#17a398", "#c9a227",
)  # fmt: skip
_ROOM: Final = "#c0392b"


def save_fits(fits: Sequence[Fit], path: str) -> None:
    """Write a PNG of what was found for a device, at one length or at several."""
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
    axes.barh([it.name for it in ways], [it.batch for it in ways], color=_COLOURS[0])
    for at, it in enumerate(ways):
        rate = it.tokens_per_s or it.samples_per_s
        unit = "tokens/s" if it.tokens_per_s else "samples/s"
        more = "+" if it.batch == fit.most else ""
        said = f" {it.batch}{more}" if it.batch else " none"
        axes.text(it.batch, at, said + (f", {rate:,.0f} {unit}" if rate else ""), va="center")
    axes.set_xlim(0, max([1, *(it.batch for it in ways)]) * 2.1)
    at_length = "" if fit.length is None else f", sequence {fit.length}"
    axes.set_xlabel(f"largest batch per card{at_length}")


def _by_length(axes: Any, fits: Sequence[Fit]) -> None:
    names = list(dict.fromkeys(it.name for fit in fits for it in fit.ways))
    for number, name in enumerate(names):
        points = [
            (fit.length, it.batch)
            for fit in fits
            for it in fit.ways
            if it.name == name and it.batch
        ]
        if points:
            # Lines that coincide are told apart by their marks: later ones are smaller.
            axes.plot(
                *zip(*points, strict=True),
                "--o" if name.endswith("FSDP2") else "-o",
                color=_COLOURS[number % len(_COLOURS)],
                markersize=max(3, 11 - number),
                label=name,
            )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.yaxis.set_major_formatter("{x:.0f}")
    axes.set_xlabel("length of sequence")
    axes.set_ylabel("largest batch per card")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _bytes(axes: Any, fits: Sequence[Fit]) -> None:
    """Stack what the ways hold whose bytes are told by category."""
    told = [
        (it, fit)
        for fit in fits
        for it in fit.ways
        if it.bytes and (len(fits) == 1 or it.cards == 1)
    ]
    scale, unit = float(1 << 30), "GiB"
    kinds = list(dict.fromkeys(key for it, _ in told for key, size in it.bytes.items() if size))
    labels = [
        f"{it.name}\nbatch {it.batch}" + (f"\nlength {fit.length}" if len(fits) > 1 else "")
        for it, fit in told
    ]
    below = [0.0] * len(told)
    for number, kind in enumerate(kinds):
        sizes = [it.bytes.get(kind, 0) / scale for it, _ in told]
        colour = _COLOURS[number % len(_COLOURS)]
        axes.bar(range(len(told)), sizes, bottom=below, label=kind, color=colour, width=0.6)
        below = [a + b for a, b in zip(below, sizes, strict=True)]
    axes.axhline(fits[0].room_bytes / scale, color=_ROOM, linestyle="--", label="room")
    axes.set_xticks(range(len(told)), labels, fontsize=8)
    axes.set_ylabel(f"allocated on a card, {unit}")
    axes.set_ylim(0, fits[0].room_bytes / scale * 1.1)
    axes.legend(fontsize=8, bbox_to_anchor=(1.0, 1.0), loc="upper left")
