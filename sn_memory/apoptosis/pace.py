"""When to look, how much may be merged, and what an event did: `Apoptosis` without a framework.

    quick        early: at `every` steps, then at gaps that double; at most half of a layer
    adaptive     every `every` steps; while nothing is found, gaps double up to 16 times that; at
                 most a quarter of a layer
    aggressive   every `every` steps, always; at most three quarters of a layer

Siegel, Daily, Vishnu 2016 name variants by how often and how far they merge; the numbers are ours.

A look costs time, which is lost if nothing can be merged. So gaps also grow until a look takes at
most `overhead` of the training time between two looks; ten times that after one that merged, as the
next one is then likely to merge as well. The cost of the first look is a guess.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .groups import SAMPLES, Group, Seen, Site, most_alike
from .merge import Choice, Merges, Reader, choose

StateShapes = Iterable[tuple[str, Sequence[int]]]


def unknown_state(shape: Sequence[int], states: StateShapes) -> str | None:
    """Return the name of a state tensor that is neither a scalar nor shaped like its parameter."""
    for key, held in states:
        # Step counts are scalars, whatever the parameter's shape.
        if tuple(held) != tuple(shape) and math.prod(held) > 1:
            return key
    return None


class AgreementError(RuntimeError):
    """Ranks came to different decisions; raised on all of them, and nothing was changed."""


class Ranks:
    """All ranks of a run, here a single one; subclasses implement `_sum` and `_gather`."""

    size, rank = 1, 0

    def _sum(self, flat: NDArray[Any]) -> NDArray[Any]:
        """Return the sum over ranks of an array [n], the same bits on each."""
        return flat

    def _gather(self, row: NDArray[np.uint8]) -> Iterable[NDArray[np.uint8]]:
        """Return the bytes [n] of every rank, in the order of ranks."""
        return [row]

    def sums(self, values: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Return arrays of one dtype summed over ranks, with one message for all of them."""
        if not values:
            return []
        flat = self._sum(np.concatenate([np.ravel(value) for value in values]))
        parts = np.split(flat, np.cumsum([value.size for value in values])[:-1])
        return [part.reshape(value.shape) for part, value in zip(parts, values, strict=True)]

    def stacked(self, values: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Return rows [size x rows, ...] of all ranks; arrays must have as many rows on each."""
        arrays = []
        for value in values:
            # A sum of each rank's own rows, padded with zeros, is a gather.
            every = np.zeros((self.size, *value.shape), value.dtype)
            every[self.rank] = value
            arrays.append(every)
        return [every.reshape(-1, *every.shape[2:]) for every in self.sums(arrays)]

    def largest(self, values: Sequence[float]) -> list[float]:
        """Return the largest of each value over all ranks."""
        # As bytes, because `_gather` only transfers bytes.
        mine = np.frombuffer(np.array(values, np.float64).tobytes(), np.uint8)
        every = [np.frombuffer(row.tobytes(), np.float64) for row in self._gather(mine)]
        return [float(value) for value in np.max(every, axis=0)]

    def fingerprint(self, values: Iterable[NDArray[Any]]) -> str:
        """Return a hash of the bits of arrays; empty on a single rank."""
        if self.size == 1:
            return ""
        digest = hashlib.sha256()
        for value in values:
            digest.update(np.ascontiguousarray(value).tobytes())
        return digest.hexdigest()

    def require_same(self, what: str, text: str) -> None:
        """Raise AgreementError on every rank unless all ranks pass the same text."""
        mine = hashlib.sha256(text.encode()).digest()
        every = [row.tobytes() for row in self._gather(np.frombuffer(mine, np.uint8))]
        ours = [rank for rank, other in enumerate(every) if other == mine]
        if len(ours) < len(every):
            others = sorted(set(range(len(every))) - set(ours))
            raise AgreementError(
                f"Apoptosis: {what} of this rank is the same on ranks {ours} and different on "
                f"ranks {others}; expected the same on all. Nothing was changed. Ranks must hold "
                "the same weights and settings, and call step() the same number of times. The "
                "wrapper that exchanges gradients (DistributedDataParallel) has to be recreated "
                f"after each event that merged: an old one exchanges none. Here: {text[:300]}"
            )


class HorovodRanks(Ranks):
    """The ranks of Horovod.

    hvd : Horovod's module for a framework, initialised
    tensor : converts an array to a tensor of that framework
    """

    def __init__(self, hvd: Any, tensor: Callable[[NDArray[Any]], Any]) -> None:
        self.size, self.rank = hvd.size(), hvd.rank()
        self._hvd, self._tensor = hvd, tensor

    def _sum(self, flat: NDArray[Any]) -> NDArray[Any]:
        name = "sn_memory.apoptosis.statistics"
        every = self._hvd.allreduce(self._tensor(flat), op=self._hvd.Sum, name=name)
        return np.asarray(every.numpy())

    def _gather(self, row: NDArray[np.uint8]) -> Iterable[NDArray[np.uint8]]:
        name = "sn_memory.apoptosis.bytes"
        every = self._hvd.allgather(self._tensor(row[None].copy()), name=name)
        return list(every.numpy())


def horovod_ranks(module: str, tensor: Callable[[NDArray[Any]], Any]) -> Ranks:
    """Return the ranks of Horovod for a framework; a single one if it is not in use."""
    # Only if the program has already imported Horovod.
    hvd = sys.modules.get(module)
    if hvd is None or not hvd.is_initialized() or hvd.size() == 1:
        return Ranks()
    return HorovodRanks(hvd, tensor)


@dataclass(frozen=True)
class Merged:
    """One group of neurons that shrank.

    group : the parameters that produce the neurons, joined by " + "
    before, after : the number of neurons
    pairs : (neuron, survivor), numbered as before; survivor None: replaced by a bias, or nothing
    changes : for each layer that reads the group: the relative change of its output
    """

    group: str
    before: int
    after: int
    pairs: Merges
    changes: Mapping[str, float]


def merged(group: Group, choice: Choice) -> Merged:
    """Return the record of one choice that was carried out."""
    changes = {s.weight: c for s, c in zip(group.sites, choice.changes, strict=True)}
    return Merged(group.name, choice.width, len(choice.kept), choice.merges, changes)


@dataclass(frozen=True)
class Event:
    """What one call of `Apoptosis.step` did; true if the model changed.

    step : calls of `step` so far
    merged : the groups that shrank; empty in most steps
    refused : groups left unchanged, and why; empty in steps without a look
    seconds : how long it took
    """

    step: int
    merged: tuple[Merged, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.merged)


# The largest share of a layer's neurons that may be merged in one event.
_SHARE: Final = MappingProxyType({"quick": 0.5, "adaptive": 0.25, "aggressive": 0.75})
# The longest gap of `adaptive`, in multiples of `every`.
_LONGEST = 16
# How many times more training time a look may take after one that merged.
_PROMISING = 10.0


@dataclass(frozen=True)
class Schedule:
    """The state of a schedule, immutable; `after` returns the next one.

    Parameters
    ----------
    name
        "quick", "adaptive" or "aggressive".
    every
        Steps before the first event, at least 1.
    overhead
        The share of training time that looks may take, in (0, 1); None: gaps follow from the name
        alone, without a clock.

    Examples
    --------
    >>> schedule = Schedule("adaptive", 100)
    >>> schedule.is_due(99), schedule.is_due(100)
    (False, True)
    >>> schedule.after(100, merged=False).next_step
    300
    """

    name: str
    every: int
    gap: int = 1
    last_step: int = 0
    overhead: float | None = None
    least: int = 0

    def __post_init__(self) -> None:
        if self.name not in _SHARE:
            raise ValueError(
                f"schedule: got {self.name!r}, expected one of {', '.join(_SHARE)}. Choose one."
            )
        if self.every < 1:
            raise ValueError(f"every: got {self.every}, expected 1 or more steps. Raise it.")
        if self.overhead is not None and not 0 < self.overhead < 1:
            raise ValueError(
                f"overhead: got {self.overhead}, expected above 0 and below 1, or None. By default "
                "evaluations may take 0.02 of training time."
            )

    @property
    def next_step(self) -> int:
        return self.last_step + max(self.gap * self.every, self.least)

    @property
    def share(self) -> float:
        return _SHARE[self.name]

    def is_due(self, step: int) -> bool:
        return step >= self.next_step

    @property
    def is_open(self) -> bool:
        """Whether the wait before the first look has yet to be computed."""
        return self.overhead is not None and self.last_step == self.least == 0

    def before_first(self, cost_steps: float) -> Schedule:
        """Return the schedule whose first look waits until its cost is within `overhead`.

        `cost_steps` is how many training steps fit into the time that the look may take.
        """
        assert self.overhead is not None
        return replace(self, least=max(1, math.ceil(cost_steps / self.overhead)))

    def after(self, step: int, *, merged: bool, cost_steps: float = 0.0) -> Schedule:
        """Return the schedule after the event at `step`.

        `cost_steps` is how many training steps would have fit into the time that it took.
        """
        gap = 1
        if self.name == "quick":
            gap = 2 * self.gap
        elif self.name == "adaptive" and not merged:
            gap = min(2 * self.gap, _LONGEST)
        least = 0
        if self.overhead is not None:
            least = math.ceil(cost_steps / (self.overhead * (_PROMISING if merged else 1.0)))
        return replace(self, gap=gap, last_step=step, least=least)


# Format of the JSON next to an exported model.
FORMAT: Final = "sn_memory.apoptosis"
_log = logging.getLogger(__name__)
_SAVED = ("gap", "last_step", "least")
# Durations of this many steps are kept; their median is the duration of a step.
_DURATIONS = 32
# Batches that are kept for decisions.
BATCHES: Final = 8
# Measured on small nets; larger ones need more, but also train for longer.
_FIRST_LOOK_S: Final = 0.05


class StepClock:
    """Ticks once per step; the median ignores evaluations, pauses and the first compilation."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._seconds: deque[float] = deque(maxlen=_DURATIONS)

    def tick(self) -> None:
        """Record the end of a step."""
        now = time.perf_counter()
        if self._last is not None:
            self._seconds.append(now - self._last)
        self._last = now

    def forget(self) -> None:
        """Ignore the time up to the next tick, and the steps before: a look comes between."""
        # After a merge, steps take another time than before.
        self._last = None
        self._seconds.clear()

    def steps_in(self, seconds: float) -> float:
        """Return how many steps take `seconds`; 0 before the second tick."""
        if not self._seconds:
            return 0.0
        return seconds / max(median(self._seconds), 1e-9)


class BaseApoptosis(ABC):
    """Counts steps, looks when the schedule says so, and decides what merges.

    A rim says what a model's groups are, measures them and merges neurons.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        *,
        tolerance: float = 0.02,
        every: int = 500,
        min_width: int = 8,
        round_to: int = 8,
        schedule: str = "adaptive",
        overhead: float | None = 0.02,
    ) -> None:
        """Start merging neurons of a model.

        Parameters
        ----------
        model, optimizer
            The model to train, and its torch or Keras optimizer; see the class.
        tolerance
            The relative change of each layer's output that one event may cause, in (0, 1), at the
            largest learning rate so far. It is scaled down with the learning rate.
        every
            Steps from one look to the next; see `schedule`.
        min_width
            The fewest neurons left in each group.
        round_to
            Widths that change become a multiple of this.
        schedule
            "quick", "adaptive" or "aggressive" (sn_memory.apoptosis.pace).
        overhead
            The share of training time that looks may take, in (0, 1): gaps grow until it is kept.
            They then depend on the clock (of the slowest rank), and two runs may differ. None: gaps
            do not depend on a clock.
        """
        if not 0 < tolerance < 1:
            raise ValueError(
                f"tolerance: got {tolerance}, expected above 0 and below 1. 0.01 is mild."
            )
        for name, value in (("min_width", min_width), ("round_to", round_to)):
            if value < 1:
                raise ValueError(f"{name}: got {value}, expected 1 or more. Raise it.")
        self.tolerance, self.min_width, self.round_to = tolerance, min_width, round_to
        self.schedule = Schedule(schedule, every, overhead=overhead)
        self.steps = 0
        self.events: list[Event] = []
        self._largest_rate, self._allowed = 0.0, tolerance
        self._clock = StepClock()
        self._batches: deque[Any] = deque(maxlen=BATCHES)
        self.model, self.optimizer = model, optimizer
        self._begin()

    @property
    def is_near(self) -> bool:
        """Whether current batches may still be kept at the next look."""
        return self.steps + BATCHES >= self.schedule.next_step

    def step(self) -> Event:
        """Count one training step; when the schedule says so, look, and merge neurons.

        Returns
        -------
        Event
            True if the model changed: recreate wrappers and recorded functions then.

        Raises AgreementError on all ranks if their decisions differ; nothing is changed.
        """
        self.steps += 1
        self._clock.tick()
        rate = self._rate()
        self._largest_rate = max(self._largest_rate, rate)
        if self._largest_rate > 0:
            # Further training repairs a change, and a small rate repairs little.
            self._allowed = self.tolerance * rate / self._largest_rate
        if not (self._allowed and self.schedule.is_due(self.steps)):
            return Event(self.steps)
        # Only now are there durations of steps to compare with.
        if self.schedule.is_open:
            cost = self._slowest(_FIRST_LOOK_S)
            self.schedule = self.schedule.before_first(cost)
            if not self.schedule.is_due(self.steps):
                return Event(self.steps)
        start = time.perf_counter()
        merged, refused = self._look()
        event = Event(self.steps, merged, refused, time.perf_counter() - start)
        cost = 0.0
        if self.schedule.overhead is not None:
            # From the slowest rank, so that all look again at the same step.
            cost = self._slowest(event.seconds)
        self._clock.forget()
        self.schedule = self.schedule.after(self.steps, merged=bool(merged), cost_steps=cost)
        if event:
            self.events.append(event)
            widths = ", ".join(f"{one.group} {one.before} -> {one.after}" for one in merged)
            _log.info("step %d: %s, in %.2f s", self.steps, widths, event.seconds)
        return event

    def state_dict(self) -> dict[str, Any]:
        """Return where the schedule stands; the model and its optimizer are saved separately."""
        where = {name: getattr(self.schedule, name) for name in _SAVED}
        return {"steps": self.steps, "largest_rate": self._largest_rate, **where}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from where `state_dict` was taken."""
        self.steps, self._largest_rate = state["steps"], state["largest_rate"]
        self.schedule = replace(self.schedule, **{name: state[name] for name in _SAVED})

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write the model to `path`, and what was merged to the same name with .json."""
        path = Path(path)
        record = {
            "format": FORMAT,
            **self._write(path),
            "events": [asdict(event) for event in self.events],
        }
        path.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")

    def _slowest(self, seconds: float) -> float:
        """Return how many steps `seconds` amount to, the most of all ranks."""
        return self._ranks().largest([self._clock.steps_in(seconds)])[0]

    def _look(self) -> tuple[tuple[Merged, ...], dict[str, str]]:
        """Look now; return the merges, and which groups were left unchanged and why."""
        ranks = self._ranks()
        batches = most_alike(self._batches, self._shapes)
        groups: list[Group] = []
        failure = self._no_batch
        if batches:
            groups, failure = self._groups(batches[0])
            for group in groups:
                self._refuse_unknown_state(group)
        # A rank that cannot look says so in the compared text: otherwise the others would wait.
        described = [f"{group.name}: {group.width} {group.reason or ''}" for group in groups]
        ranks.require_same("the model", failure + "; ".join(described))
        if failure:
            return (), {"the model": failure}
        able = [group for group in groups if group.reason is None]
        refused = {group.name: group.reason for group in groups if group.reason is not None}
        choices = self._decide(able, batches, ranks)
        weights = ranks.fingerprint(self._weights())
        decided = [choice and choice.text() for choice in choices]
        ranks.require_same("weights or decision", f"{weights} {decided}")
        # From here on all ranks do the same, each with its own model.
        chosen = []
        for group, choice in zip(able, choices, strict=True):
            if choice is None:
                refused[group.name] = "its activations are not finite"
            elif choice.merges:
                chosen.append((group, choice))
        done, undone = self._merge(chosen, batches[0]) if chosen else ([], {})
        return tuple(merged(group, choice) for group, choice in done), refused | undone

    def _decide(
        self, groups: Sequence[Group], batches: Sequence[Any], ranks: Ranks
    ) -> list[Choice | None]:
        """Return the choice for each group; None if activations are not finite."""
        statistics = self._measure(groups, batches, SAMPLES // ranks.size)
        every = [seen for row in statistics for seen in row]
        if not every:
            return []
        # All ranks have to contribute the same size; the last batch may be smaller on one.
        sizes = ranks.largest([-sum(map(len, seen.squares)) for seen in every])
        cuts = [int(-size) for size in sizes]
        cut = [np.concatenate(seen.samples)[:n] for seen, n in zip(every, cuts, strict=True)]
        squares = [
            np.concatenate(seen.squares)[:n].sum() for seen, n in zip(every, cuts, strict=True)
        ]
        *fits, totals = ranks.sums([*(seen.fit for seen in every), np.array(squares)])
        seen_by = zip(fits, ranks.stacked(cut), np.sqrt(totals).tolist(), strict=True)
        choices: list[Choice | None] = []
        for group in groups:
            readers = [
                Reader(site.call, self._offsets(site, group), *next(seen_by), site.takes_constant)
                for site in group.sites
            ]
            # Sums and samples are of all ranks, so non-finite values show on every rank.
            arrays = [values for one in readers for values in (one.fit, one.samples)]
            if not all(np.isfinite(values).all() for values in arrays):
                choices.append(None)
                continue
            # Limits are in channels; a neuron may be a head of several channels.
            least, multiple = -(-self.min_width // group.block), -(-self.round_to // group.block)
            choices.append(
                choose(
                    readers, tolerance=self._allowed, share=self.schedule.share, min_width=least,
                    round_to=multiple,
                )
            )  # fmt: skip
        return choices

    def _refuse_unknown_state(self, group: Group) -> None:
        """Refuse a group with optimizer state that is neither a scalar nor parameter-shaped."""
        for name in group.parameters:
            if key := unknown_state(*self._state_shapes(name)):
                group.refuse(f"the optimizer's {key!r} of {name} is not shaped like it")

    # The message, in the rim's terms, if a rank has seen no batch.
    _no_batch: str

    @abstractmethod
    def _begin(self) -> None:
        """Check model and optimizer, and start observing them."""

    @abstractmethod
    def _write(self, path: Path) -> dict[str, Any]:
        """Write the model; return the record that `rebuild` needs, with its version."""

    @abstractmethod
    def _ranks(self) -> Ranks:
        """Return the ranks that train this model now."""

    @abstractmethod
    def _rate(self) -> float:
        """Return the current learning rate, the largest if there are several."""

    @abstractmethod
    def _shapes(self, batch: Any) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of all arrays of a batch."""

    @abstractmethod
    def _groups(self, batch: Any) -> tuple[list[Group], str]:
        """Return the model's groups; if there are none, also the reason."""

    @abstractmethod
    def _state_shapes(self, name: str) -> tuple[Sequence[int], StateShapes]:
        """Return the shapes of a parameter and of its optimizer state, by the parameter's name."""

    @abstractmethod
    def _measure(
        self, groups: Sequence[Group], batches: Sequence[Any], samples: int
    ) -> list[list[Seen]]:
        """Return statistics of each reader of each group in batches, of about `samples` outputs."""

    @abstractmethod
    def _offsets(self, site: Site, group: Group) -> NDArray[np.float64]:
        """Return a reader's weight as [offsets, outputs, n]."""

    @abstractmethod
    def _weights(self) -> Iterable[NDArray[Any]]:
        """Yield the bits of all weights as arrays."""

    @abstractmethod
    def _merge(
        self, chosen: Sequence[tuple[Group, Choice]], batch: Any
    ) -> tuple[list[tuple[Group, Choice]], dict[str, str]]:
        """Merge neurons; return the merges made, and why others had to be undone."""
