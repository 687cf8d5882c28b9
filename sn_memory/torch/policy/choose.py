"""What each block saves within a budget, by the seconds that a saved byte spares.

Under torch's selective checkpointing a second run makes every op that is not saved, one after the
other, so what a saved result spares is its op's own seconds, whatever else is saved; and it is held
from its block's forward pass until that block runs again. So this is a knapsack with one bound for
each stretch of a step. The sum is a model: the executor, run without values, has the last word,
and where it holds more than the model said, the bound of that stretch is lowered by as much.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from .contexts import Saved
from .predict import Selection, Step
from .watch import Block, Result

# A block that does not run again at all.
KEPT = None
_ROUNDS = 8


@dataclass
class Choice:
    """What is saved: per block the numbers of its results, or KEPT."""

    chosen: dict[str, set[int] | None] = field(default_factory=dict)

    def copy(self) -> Choice:
        return Choice({path: it if it is None else set(it) for path, it in self.chosen.items()})


@dataclass
class Found:
    """A choice that was tried: what the executor holds then, and the seconds of second runs."""

    choice: Choice
    step: Step
    rerun_s: float


class Chooser:
    """Finds choices for the blocks of one cut.

    Parameters
    ----------
    blocks
        By path, those that may run again.
    seconds
        Per call of the recording.
    tried
        Runs the executor without values.
    """

    def __init__(
        self,
        blocks: Mapping[str, Block],
        seconds: Sequence[float],
        tried: Callable[[Selection], Step],
    ) -> None:
        self.blocks, self.seconds, self.tried = blocks, seconds, tried
        self.nothing = self.found(Choice({path: set() for path in blocks}))

    def rerun_s(self, choice: Choice) -> float:
        """Return the seconds of all second runs."""
        total = 0.0
        for path, chosen in choice.chosen.items():
            if chosen is not KEPT:
                block = self.blocks[path]
                total += sum(self.seconds[at] for at in block.calls)
                total -= block.times * sum(self.seconds[block.results[it].call] for it in chosen)
        return total

    def found(self, choice: Choice) -> Found:
        """Try a choice."""
        return Found(choice, self.tried(self.selection(choice)), self.rerun_s(choice))

    def selection(self, choice: Choice) -> Selection:
        """Return a choice as the executor takes it."""
        return {
            path: KEPT if chosen is KEPT else saved_of(self.blocks[path].results[it] for it in
                                                       sorted(chosen))
            for path, chosen in choice.chosen.items()
        }  # fmt: skip

    def within(self, budget_bytes: int) -> Found | None:
        """Return the quickest choice found that keeps a budget; None if none does."""
        if self.nothing.step.peak_bytes > budget_bytes:
            return None
        best: Found | None = None
        lowered: defaultdict[tuple[str, str, int], int] = defaultdict(int)
        start = self.nothing
        for _ in range(_ROUNDS):
            rooms = _Rooms(start.step, budget_bytes, lowered)
            choice = self.filled(start.choice, rooms)
            if choice.chosen == start.choice.chosen:
                if _is_better(start, best):
                    best = start
                break
            tried = self.found(choice)
            if tried.step.peak_bytes <= budget_bytes:
                if not _is_better(tried, best):
                    break
                best = start = tried
                continue
            for key, peak in _peaks(tried.step).items():
                if peak > budget_bytes:
                    lowered[key] += peak - budget_bytes
            start = best or self.nothing
        return best

    def filled(self, start: Choice, rooms: _Rooms) -> Choice:
        """Return a choice with what more there is room for: two ways, the quicker one."""
        made = [self._filled(start, rooms.copy(), blocks_first=first) for first in (False, True)]
        return min(made, key=self.rerun_s)

    def _filled(self, start: Choice, rooms: _Rooms, *, blocks_first: bool) -> Choice:
        choice = start.copy()
        if blocks_first:
            self._keep_whole(choice, rooms)
        items = []
        for path, chosen in choice.chosen.items():
            if chosen is KEPT:
                continue
            block = self.blocks[path]
            for number, result in enumerate(block.results):
                spared = self.seconds[result.call]
                if number not in chosen and spared > 0:
                    items.append((spared / max(1, result.bytes), rooms.first(path), path, number))
        for _, _, path, number in sorted(items, reverse=True):
            result = self.blocks[path].results[number]
            if rooms.take(path, result.bytes, result.beyond_bytes):
                saved = choice.chosen[path]
                assert saved is not None
                saved.add(number)
        self._keep_whole(choice, rooms)
        return choice

    def _keep_whole(self, choice: Choice, rooms: _Rooms) -> None:
        """Let blocks not run again at all where there is room for all that autograd saves."""
        blocks = []
        for path, chosen in choice.chosen.items():
            if chosen is not KEPT:
                block = self.blocks[path]
                spared = sum(self.seconds[at] for at in block.calls)
                blocks.append((spared / max(1, block.saved_bytes), rooms.first(path), path))
        for _, _, path in sorted(blocks, reverse=True):
            block, chosen = self.blocks[path], choice.chosen[path]
            held = [block.results[it] for it in chosen or ()]
            more = block.saved_bytes - block.times * sum(it.bytes for it in held)
            if rooms.take(path, more, -sum(it.beyond_bytes for it in held)):
                choice.chosen[path] = KEPT


class _Rooms:
    """The bytes left in each stretch of a step."""

    def __init__(
        self, step: Step, budget_bytes: int, lowered: Mapping[tuple[str, str, int], int]
    ) -> None:
        peaks = _peaks(step)
        self.room = np.array(
            [budget_bytes - peak - lowered.get(key, 0) for key, peak in peaks.items()]
        )
        # Per block, from where to where what it saves is held: one span for each of its calls.
        self._spans: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
        backward: dict[str, list[int]] = defaultdict(list)
        for at, (path, phase, _) in enumerate(peaks):
            if phase == "backward":
                backward[path].append(at)
        for at, (path, phase, _) in enumerate(peaks):
            if path and phase == "forward":
                own = backward[path].pop() if backward[path] else -1
                self._spans[path].append((at, own if own >= 0 else len(peaks), own))

    def copy(self) -> _Rooms:
        made: _Rooms = object.__new__(_Rooms)
        made.room, made._spans = self.room.copy(), self._spans
        return made

    def first(self, path: str) -> int:
        """Return where a block is first called."""
        return self._spans[path][0][0] if path in self._spans else -1

    def take(self, path: str, held_bytes: int, beyond_bytes: int) -> bool:
        """Take bytes from where they are held, if there is room for them."""
        need = np.zeros_like(self.room)
        for begin, end, own in self._spans.get(path, ()):
            need[begin:end] += held_bytes
            if own >= 0:
                need[own] += beyond_bytes
        if (need > self.room)[need > 0].any():
            return False
        self.room -= need
        return True


def _is_better(one: Found, other: Found | None) -> bool:
    return other is None or (one.rerun_s, one.step.peak_bytes) < (
        other.rerun_s,
        other.step.peak_bytes,
    )


def _peaks(step: Step) -> dict[tuple[str, str, int], int]:
    """Return the peak of each stretch, by what begins it and how often that began before."""
    numbers: defaultdict[tuple[str, str], count[int]] = defaultdict(count)
    return {
        (it.path, it.phase, next(numbers[it.path, it.phase])): it.peak_bytes
        for it in step.stretches
    }


def saved_of(results: Iterable[Result]) -> Saved:
    """Return results as a policy names them: per op the numbers of its calls."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for it in results:
        found[it.op].append(it.number)
    return {op: tuple(sorted(calls)) for op, calls in sorted(found.items())}
