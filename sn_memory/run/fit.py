"""The answer to "will it fit": the largest batch in each way to train, what it takes, how fast."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from ..base.sizes import show_bytes, table
from ..report.figure import blank
from .estimate import Estimate

PLAIN = "plain"
_COLOURS: Final = (
    "#0b6e99", "#e08e0b", "#5b8c2a", "#8e5ea2", "#a0522d",
    "#3b7dd8", "#d35d9e", "#7f8c8d", "#17a398", "#c9a227",
)  # fmt: skip
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

    def __str__(self) -> str:
        head = f"{self.device}, room {show_bytes(self.room_bytes)}"
        if self.length is not None:
            head += f", sequence {self.length}"
        per = "tokens/s" if any(it.tokens_per_s for it in self.ways) else "samples/s"
        rows: list[tuple[str, ...]] = [
            ("way", "batch", "step, s", per, "allocated", "reserved", "pinned")
        ]
        for it in self.ways:
            more = "+" if it.batch == self.most else ""
            rate = it.tokens_per_s if per == "tokens/s" else it.samples_per_s
            rows.append(
                (
                    it.name,
                    f"{it.batch}{more}" if it.batch else "none",
                    "" if it.seconds is None else f"{it.seconds:.3g}",
                    "" if rate is None else f"{rate:,.0f}",
                    *(
                        "" if size is None else show_bytes(size)
                        for size in (it.allocated_bytes, it.reserved_bytes, it.pinned_bytes)
                    ),
                )
            )
        lines = table(rows, right=True)
        plain = self.ways[0]
        held = ", ".join(f"{name} {show_bytes(size)}" for name, size in plain.bytes.items() if size)
        notes = dict.fromkeys(
            [*(f"{it.name}: {it.note}" for it in self.ways if it.note), *self.notes]
        )
        return "\n".join(
            [head, *lines, *([f"{plain.name} holds: {held}"] if held else [])]
            + [f"note: {it}" for it in notes]
        )


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
