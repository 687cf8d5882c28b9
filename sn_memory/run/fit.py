"""The answer to "will it fit": the largest batch in each way to train, what it takes, how fast."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np

from ..base.sizes import show_bytes, table
from ..report.figure import blank
from .estimate import Estimate

PLAIN = "plain"
_ROOM: Final = "#c0392b"


@dataclass(frozen=True)
class Way:
    """One way to train, at the largest batch that fits.

    Parameters
    ----------
    name
        As `plain`, `plan, +10 % time`, `4 cards`.
    batch
        Per card; 0 where not even one sample fits.
    seconds, samples_per_s, tokens_per_s
        Of a step with its update, on all cards together; predicted.
    allocated_bytes, reserved_bytes, pinned_bytes
        On one card, as torch's allocator counts; the last on the host. None where not modelled.
    bytes
        Of what is allocated, by category.
    note
        Why there is nothing, or what is not in it.
    """

    name: str
    batch: int
    cards: int = 1
    seconds: float | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    pinned_bytes: int | None = None
    bytes: Mapping[str, int] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Fit:
    """All ways at one length of sequence.

    Parameters
    ----------
    device, room_bytes
        Its name, and what torch's allocator can have there.
    length
        Of the sequence; None where the sample has its own.
    most
        The largest batch that was asked for.
    notes
        What is estimated or left out.
    """

    device: str
    room_bytes: int
    length: int | None
    most: int
    ways: tuple[Way, ...]
    notes: tuple[str, ...] = ()

    def as_data(self) -> dict[str, Any]:
        """Return it as JSON takes it."""
        data = asdict(self)
        return {"sequence" if key == "length" else key: value for key, value in data.items()}

    def shown_batch(self, way: Way) -> str:
        """The largest batch of a way as text; with a plus where no larger one was asked for."""
        return f"{way.batch}{'+' if way.batch == self.most else ''}" if way.batch else "none"

    def __str__(self) -> str:
        head = f"{self.device}, room {show_bytes(self.room_bytes)}"
        if self.length is not None:
            head += f", sequence {self.length}"
        per = "tokens/s" if any(way.tokens_per_s for way in self.ways) else "samples/s"
        rows: list[tuple[str, ...]] = [
            ("way", "batch", "step, s", per, "allocated", "reserved", "pinned")
        ]
        for way in self.ways:
            rate = way.tokens_per_s if per == "tokens/s" else way.samples_per_s
            sizes = (way.allocated_bytes, way.reserved_bytes, way.pinned_bytes)
            rows.append(
                (
                    way.name,
                    self.shown_batch(way),
                    "" if way.seconds is None else f"{way.seconds:.3g}",
                    "" if rate is None else f"{rate:,.0f}",
                    *("" if size is None else show_bytes(size) for size in sizes),
                )
            )
        lines = [head, *table(rows, right=True)]
        plain = self.ways[0]
        held = ", ".join(f"{name} {show_bytes(size)}" for name, size in plain.bytes.items() if size)
        if held:
            lines.append(f"{plain.name} holds: {held}")
        notes = [f"{way.name}: {way.note}" for way in self.ways if way.note] + list(self.notes)
        return "\n".join(lines + [f"note: {note}" for note in dict.fromkeys(notes)])


def categories(found: Estimate) -> dict[str, int]:
    """Bytes of an estimate's peak by category; what is live then beside them is `other`."""
    held = {
        "parameters": found.parameters_bytes,
        "gradients": found.gradients_bytes,
        "optimizer": found.optimizer_bytes,
        "activations": found.activations_bytes - found.logits_bytes,
        "logits": found.logits_bytes,
        "buffers and input": found.buffers_bytes + found.inputs_bytes,
        "workspace": found.workspace_bytes,
    }
    # At the peak of a backward pass some activations are gone and some gradients are not there.
    over = sum(held.values()) - found.peak_bytes
    if over > 0:
        held["gradients"] = max(0, held["gradients"] - over)
    other = found.peak_bytes - sum(held.values())
    return {**held, "other": other} if other > 0 else held


def largest(fits: Callable[[int], bool], least: int, most: int, start: int = 0) -> int:
    """Return the largest batch from `least` to `most` that fits, to a thirtieth; 0 if none does.

    start : one that is known to fit, where to look from
    """
    low = max(start, 0)
    if not low:
        if not fits(least):
            return 0
        low = least
    high = low
    while True:
        if low >= most:
            return most
        high = min(2 * low, most)
        if not fits(high):
            break
        low = high
    while high - low > max(1, low // 30):
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


@dataclass(frozen=True)
class Units:
    """Bytes of parameters by what gathers them: the largest block, and all that is in none."""

    block_bytes: int
    root_bytes: int


@dataclass(frozen=True)
class Held:
    """Bytes on one card.

    Parameters
    ----------
    parameters_bytes, gradients_bytes, optimizer_bytes
        Its part of each.
    gathered_bytes
        Whole parameters of units that are gathered at once, and whole gradients of one.
    rest_bytes
        Everything else at its highest: buffers, input, activations, workspaces.
    """

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    gathered_bytes: int
    rest_bytes: int

    @property
    def state_bytes(self) -> int:
        """The parts of parameters, gradients and optimizer."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def peak_bytes(self) -> int:
        """All of them: no less than any moment of the step needs."""
        return self.state_bytes + self.gathered_bytes + self.rest_bytes


def on_cards(
    cards: int,
    *,
    parameters_bytes: int,
    gradients_bytes: int,
    optimizer_bytes: int,
    rest_bytes: int,
    units: Units,
) -> Held:
    """Return what one of so many cards holds when a step is sharded as by FSDP2 (`fully_shard`).

    Parameters, gradients and the optimizer's state lie on all cards in equal parts. The blocks of a
    model are units of their own, the rest is the root's, which stays gathered from the first use
    on; while a block runs, the next one is gathered too. A gradient is whole until it is reduced.
    On a single card nothing is gathered.
    """
    if cards < 1:
        raise ValueError(f"got {cards} cards, expected 1 or more.")

    def part(size: int) -> int:
        return -(-size // cards)

    gathered = 2 * units.block_bytes + units.root_bytes + max(units.block_bytes, units.root_bytes)
    return Held(
        part(parameters_bytes),
        part(gradients_bytes),
        part(optimizer_bytes),
        gathered if cards > 1 else 0,
        rest_bytes,
    )


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
        # Lines that coincide are told apart by their marks: later ones are smaller.
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
    """Stack what the ways hold whose bytes are told by category."""
    bars: dict[str, Mapping[str, int]] = {}
    for fit in fits:
        for way in fit.ways:
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
