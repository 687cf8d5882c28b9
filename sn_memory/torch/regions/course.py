"""The calls of one forward pass as they come, held against those that were planned for.

What a step will do is not known ahead: a layer may be left out this time, an expert may be given
more rows. So each call that is otherwise than expected changes the row of moments that the choice
was made on, and if the budget would not be kept, the calls that are still to come take leaner
plans. A pass that had more calls than any before is planned for from the next one on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .choose import Choices, Ints, Timeline
from .plans import RegionPlan
from .region import TracedCall


@dataclass(frozen=True, eq=False)
class Chosen:
    """Calls of a step, and the plan that each takes.

    calls : path of the module, and what was traced, in the order in which they come
    choices, choice : their plans and the row of moments; and which of the plans each takes.
    room_bytes : what a step may hold as it is simulated: the budget, but for what measuring has
        shown.
    """

    calls: Sequence[tuple[str, TracedCall]]
    choices: Choices
    choice: Ints
    room_bytes: int
    places: dict[tuple[str, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        seen: Counter[str] = Counter()
        for at, (path, _) in enumerate(self.calls):
            self.places[path, seen[path]] = at
            seen[path] += 1

    @property
    def plans(self) -> list[RegionPlan]:
        """What the calls follow."""
        rows = zip(self.calls, self.choice, strict=True)
        return [kind.plans[int(at)] for (_, kind), at in rows]

    def outside_bytes(self, kind: TracedCall) -> int:
        """Return what is held outside of regions more after such a call than before it."""
        timeline = self.choices.timeline
        levels = timeline.outside[timeline.forward]
        increase = np.diff(levels, append=levels[-1:])
        increases = [int(increase[i]) for i, (_, call) in enumerate(self.calls) if call is kind]
        return max(0, *increases) if increases else kind.given_bytes

    def extended(self, more: Sequence[tuple[int, str, TracedCall]]) -> Chosen:
        """Return what is chosen for a step with more calls: each after so many of these."""
        timeline, order = _with_calls(
            self.choices.timeline,
            [(after, self.outside_bytes(kind)) for after, _, kind in more],
        )
        all_calls = [*self.calls, *((path, kind) for _, path, kind in more)]
        calls = [all_calls[index] for index in order]
        choices = Choices(timeline, [kind.plans for _, kind in calls])
        return Chosen(calls, choices, choices.solve(self.room_bytes), self.room_bytes)


def _with_calls(line: Timeline, more: Sequence[tuple[int, int]]) -> tuple[Timeline, list[int]]:
    """Return a timeline with more calls, and the order of all: those that were, then these.

    more : per call after how many it comes, and what it holds outside until its backward pass
    """
    known = len(line.forward)
    outside = line.outside.tolist()
    tags: list[tuple[str, int] | None] = [None] * len(outside)
    for call in range(known):
        tags[line.forward[call]] = ("forward", call)
        if line.backward[call] < len(tags):
            tags[line.backward[call]] = ("backward", call)
    before: dict[int, int] = {}
    for number, (after, extra) in enumerate(more):
        # Behind the call it came after, and in the backward pass ahead of that.
        anchor = before.get(after, after - 1)
        before[after] = known + number
        begin = tags.index(("forward", anchor)) + 1 if anchor >= 0 else 0
        last = ("backward", anchor)
        end = tags.index(last) if anchor >= 0 and last in tags else len(tags) - 1
        level = outside[begin - 1] if begin else outside[0]
        outside[begin:end] = [level + extra for level in outside[begin:end]]
        back = outside[end] + extra
        outside[end:end] = [back, back]
        tags[end:end] = [("backward", known + number), None]
        outside[begin:begin] = [level, level]
        tags[begin:begin] = [None, ("forward", known + number)]
    place = {tag: index for index, tag in enumerate(tags) if tag is not None}
    order = sorted(range(known + len(more)), key=lambda call: place["forward", call])
    count = len(outside)
    return (
        Timeline(
            np.array(outside, dtype=np.int64),
            np.array([place["forward", call] for call in order], dtype=np.int64),
            np.array([place.get(("backward", call), count) for call in order], dtype=np.int64),
        ),
        order,
    )


class Course:
    """One forward pass.

    leaner : whether calls took leaner plans than were chosen
    more : calls that were not expected: after how many that were, the path, and what was traced.
    """

    def __init__(self, chosen: Chosen | None) -> None:
        self._chosen = chosen
        self._seen: Counter[str] = Counter()
        self._at = 0
        # Changed from the first call on that is otherwise than expected.
        self._choices = chosen.choices if chosen else None
        self._choice: Ints | None = chosen.choice if chosen else None
        # Bytes that calls were given, and those expected are given; how much of that counts by now.
        self._received, self._expected, self._scale = 1, 1, 1.0
        self._columns: dict[int, list[int]] = {}
        self.leaner = False
        self.more: list[tuple[int, str, TracedCall]] = []

    def plan(self, path: str, kind: TracedCall) -> int:
        """Return the plan that a call takes."""
        number = self._seen[path]
        self._seen[path] += 1
        chosen = self._chosen
        if chosen is None:
            return kind.leanest
        at = chosen.places.get((path, number), -1)
        if at < self._at:
            return self._unexpected(path, kind)
        if at > self._at:
            self._own().leave_out(range(self._at, at))
        self._at = at + 1
        expected = chosen.calls[at][1]
        self._received += kind.given_bytes
        self._expected += expected.given_bytes
        if kind is not expected:
            self._replace(at, kind, expected)
        self._keep_budget(at)
        assert self._choice is not None
        column = int(self._choice[at])
        if at in self._columns:
            return self._columns[at][column]
        return min(column, len(kind.plans) - 1)

    @property
    def above(self) -> bool:
        """Whether the budget is not kept, as far as can be told."""
        if self._chosen is None or self._choices is self._chosen.choices:
            return False
        assert self._choices is not None
        assert self._choice is not None
        return self._choices.peak(self._choice) > self._chosen.room_bytes

    def _own(self) -> Choices:
        assert self._chosen is not None
        assert self._choices is not None
        if self._choices is self._chosen.choices:
            self._choices, self._choice = self._choices.copied(), self._chosen.choice.copy()
        return self._choices

    def _replace(self, at: int, kind: TracedCall, expected: TracedCall) -> None:
        """Count with another kind than was expected; what comes is as much larger as what came."""
        choices = self._own()
        assert self._choice is not None
        wanted_bytes = choices.kept[at, self._choice[at]] * kind.given_bytes
        count, wide = len(kind.plans), choices.kept.shape[1]
        fits = count <= wide
        places = [*range(count)] if fits else [*np.linspace(0, count - 1, wide).astype(int)]
        self._columns[at] = [int(places[min(column, len(places) - 1)]) for column in range(wide)]
        choices.set_plans(at, [kind.plans[column] for column in self._columns[at]])
        size = max(1, expected.given_bytes)
        alike = [i for i in range(wide) if choices.kept[at, i] * size <= wanted_bytes]
        self._choice[at] = alike[0] if alike else wide - 1
        scale = self._received / self._expected
        choices.scale(at + 1, scale / self._scale)
        self._scale = scale

    def _unexpected(self, path: str, kind: TracedCall) -> int:
        chosen, choices = self._chosen, self._own()
        assert chosen is not None
        assert self._choice is not None
        self.more.append((self._at, path, kind))
        timeline = choices.timeline
        now = int(timeline.forward[self._at - 1]) + 1 if self._at else 0
        choices.hold(now, chosen.outside_bytes(kind))
        peaks = choices.peaks(self._choice)
        later = int(peaks[now:].max(initial=0))
        level = int(peaks[now]) if now < len(peaks) else 0
        taken = kind.leanest
        for index, plan in enumerate(kind.plans):
            if max(later + plan.kept_bytes, level + max(plan.sizes)) <= chosen.room_bytes:
                taken = index
                break
        self.leaner |= taken > 0
        choices.hold(now, kind.plans[taken].kept_bytes)
        self._keep_budget(self._at)
        return taken

    def _keep_budget(self, since: int) -> None:
        """Let the calls from one on take leaner plans if the budget would not be kept."""
        chosen, choices = self._chosen, self._choices
        assert chosen is not None
        assert choices is not None
        assert self._choice is not None
        # Nothing was otherwise so far.
        if choices is chosen.choices:
            return
        if choices.peak(self._choice) > chosen.room_bytes:
            leaner = choices.leaner(self._choice, chosen.room_bytes, since=since)
            self.leaner |= bool((leaner != self._choice).any())
            self._choice = leaner
