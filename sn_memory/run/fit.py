"""The answer to "will it fit": the largest batch in each way to train, what it takes, how fast."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..base.sizes import show_bytes
from .estimate import Estimate

PLAIN = "plain"


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
        ways = [
            {key: getattr(it, key) for key in Way.__dataclass_fields__ if key != "bytes"}
            | {"bytes": dict(it.bytes)}
            for it in self.ways
        ]
        return {
            "device": self.device,
            "room_bytes": self.room_bytes,
            "sequence": self.length,
            "most": self.most,
            "ways": ways,
            "notes": list(self.notes),
        }

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
        wide = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
        lines = [
            "  ".join(
                f"{cell:<{width}}" if at == 0 else f"{cell:>{width}}"
                for at, (cell, width) in enumerate(zip(row, wide, strict=True))
            ).rstrip()
            for row in rows
        ]
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
