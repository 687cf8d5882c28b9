"""The calls of one forward pass as they occur, compared with the planned ones.

What a step will do is not known in advance: a layer may be skipped this time, an expert may get
more rows. So each call that differs from the expected one changes the timeline that the choice was
made for, and if the budget would be exceeded, later calls take leaner plans. If a pass has more
calls than any before, the next pass is planned with them.
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

    calls : path of the module, and what was traced, in the order of the calls
    choices, choice : their plans and the timeline; the index of the plan that each takes.
    room_bytes : limit for the simulated peak: the budget, corrected by measurements.
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
        """The plans that the calls follow."""
        rows = zip(self.calls, self.choice, strict=True)
        return [kind.plans[int(at)] for (_, kind), at in rows]

    def outside_bytes(self, kind: TracedCall) -> int:
        """Return by how much a call of a kind raises the bytes held outside of regions."""
        timeline = self.choices.timeline
        levels = timeline.outside[timeline.forward]
        increase = np.diff(levels, append=levels[-1:])
        increases = [int(increase[i]) for i, (_, call) in enumerate(self.calls) if call is kind]
        return max(0, *increases) if increases else kind.given_bytes

    def extended(self, more: Sequence[tuple[int, str, TracedCall]]) -> Chosen:
        """Return a choice for a step with more calls, each after a given number of these."""
        timeline, order = _with_calls(
            self.choices.timeline,
            [(after, self.outside_bytes(kind)) for after, _, kind in more],
        )
        all_calls = [*self.calls, *((path, kind) for _, path, kind in more)]
        calls = [all_calls[index] for index in order]
        choices = Choices(timeline, [kind.plans for _, kind in calls])
        return Chosen(calls, choices, choices.solve(self.room_bytes), self.room_bytes)


def _with_calls(line: Timeline, more: Sequence[tuple[int, int]]) -> tuple[Timeline, list[int]]:
    """Return a timeline with more calls, and the order of all calls: known numbers, then new ones.

    more : per new call, the number of calls before it, and the bytes that it adds outside of
        regions until its backward pass
    """
    known = len(line.forward)
    outside = line.outside.tolist()
    # Pass and call of each moment: indices shift as moments are inserted, tags do not.
    tags: list[tuple[str, int] | None] = [None] * len(outside)
    for call in range(known):
        tags[line.forward[call]] = ("forward", call)
        if line.backward[call] < len(tags):
            tags[line.backward[call]] = ("backward", call)
    before: dict[int, int] = {}
    for number, (after, extra) in enumerate(more):
        # After its predecessor in the forward pass, and so before it in the backward pass.
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


class ForwardPass:
    """One forward pass, and the plans that were chosen for it.

    leaner : whether calls took leaner plans than were chosen
    more : unexpected calls: the number of expected ones before it, the path, what was traced.
    """

    def __init__(self, chosen: Chosen) -> None:
        self._chosen = chosen
        self._seen: Counter[str] = Counter()
        self._at = 0
        # Replaced by copies at the first call that differs from the expected one.
        self._choices, self._choice = chosen.choices, chosen.choice
        # Input bytes of the calls so far and of those expected, and the ratio by which later calls
        # are already scaled. Starts at 1, as inputs may have no bytes.
        self._received, self._expected, self._scale = 1, 1, 1.0
        self.leaner = False
        self.more: list[tuple[int, str, TracedCall]] = []

    def plan(self, path: str, kind: TracedCall) -> int:
        """Return the plan that a call takes."""
        number = self._seen[path]
        self._seen[path] += 1
        chosen = self._chosen
        at = chosen.places.get((path, number), -1)
        # One more call of this module than expected, or calls in another order.
        if at < self._at:
            return self._unexpected(path, kind)
        # The calls expected before it did not occur.
        if at > self._at:
            self._own().leave_out(range(self._at, at))
        self._at = at + 1
        expected = chosen.calls[at][1]
        self._received += kind.given_bytes
        self._expected += expected.given_bytes
        if kind is not expected:
            self._replace(at, kind, expected)
        self._keep_budget(at)
        return min(int(self._choice[at]), len(kind.plans) - 1)

    @property
    def above(self) -> bool:
        """Whether the simulated peak is above the budget."""
        if self._choices is self._chosen.choices:
            return False
        return self._choices.peak(self._choice) > self._chosen.room_bytes

    def _own(self) -> Choices:
        """Return this pass's own copy of the choices."""
        if self._choices is self._chosen.choices:
            self._choices, self._choice = self._choices.copied(), self._chosen.choice.copy()
        return self._choices

    def _replace(self, at: int, kind: TracedCall, expected: TracedCall) -> None:
        """Count a call of another kind; later calls are expected to grow like those so far."""
        choices = self._own()
        # Of the other kind's plans, the one that keeps as much per byte of its inputs.
        wanted_bytes = choices.kept[at, self._choice[at]] * kind.given_bytes
        choices.set_plans(at, kind.plans)
        size = max(1, expected.given_bytes)
        alike = [i for i, plan in enumerate(kind.plans) if plan.kept_bytes * size <= wanted_bytes]
        self._choice[at] = alike[0] if alike else len(kind.plans) - 1
        scale = self._received / self._expected
        choices.scale(at + 1, scale / self._scale)
        self._scale = scale

    def _unexpected(self, path: str, kind: TracedCall) -> int:
        """Return the plan of an unexpected call: the fastest that the budget allows."""
        chosen, choices = self._chosen, self._own()
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
        """Choose leaner plans for the calls from `since` on if the budget would be exceeded."""
        if self.above:
            leaner = self._choices.leaner(self._choice, self._chosen.room_bytes, since=since)
            self.leaner |= bool((leaner != self._choice).any())
            self._choice = leaner
