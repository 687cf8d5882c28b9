"""What an event did: records that are returned, logged and written as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from .groups import Group
from .merge import Choice


@dataclass(frozen=True)
class Merged:
    """One group of neurons that shrank.

    Attributes
    ----------
    group
        The parameters that make the neurons, joined by " + ".
    before, after
        The number of neurons.
    pairs
        (neuron, survivor) by the numbers before; survivor None: into a bias, or into nothing.
    changes
        For each layer that reads the group: the relative change of what it puts out.
    """

    group: str
    before: int
    after: int
    pairs: tuple[tuple[int, int | None], ...]
    changes: Mapping[str, float]


def merged(group: Group, choice: Choice) -> Merged:
    """Return the record of one choice that was carried out."""
    pairs = tuple((merge.neuron, merge.survivor) for merge in choice.merges)
    changes = {s.weight: c for s, c in zip(group.sites, choice.changes, strict=True)}
    return Merged(group.name, choice.width, len(choice.kept), pairs, changes)


@dataclass(frozen=True)
class Event:
    """What one call of `Apoptosis.step` did; true if the model changed.

    Attributes
    ----------
    step
        Calls of `step` so far.
    merged
        The groups that shrank; empty in most steps.
    refused
        Groups left as they are, and why; empty in steps that look at nothing.
    seconds
        How long it took.
    """

    step: int
    merged: tuple[Merged, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.merged)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
