"""How long planning may take, and how far it is: the clock of searches, and what is shown of it.

The clock is the one on the wall, or work that is counted. People ask for seconds that they wait, so
those are the default. A search that they end depends on the machine and on what else runs on it.
Where the same answer is wanted everywhere, work is counted instead: each loop reports what it has
done, in steps whose number depends on the problem alone. `counting` sets which, for all inside it.

A program that is silent for a minute looks as if it hung. On a terminal one line says how far it
is. Where standard error is a file or a pipe nothing is written, unless it is asked for: then plain
lines, no more than one in two seconds for a stage.
"""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, TypeVar

# What stands for a second where work is counted. A unit is one op of a graph that the compiled
# search carries out on paper; it does 8 to 30 million of them in a second.
UNITS_PER_S: Final = 20_000_000

T = TypeVar("T")


@dataclass
class _Meter:
    """Whether work counts in this context, and how much of it was spent."""

    counts_work: bool
    units: int = 0


@dataclass
class _Stages:
    """Seconds on the wall that stages of planning share, and what they have spent of them."""

    limit_s: float
    spent_s: float = 0.0


# Per context, so that two threads may plan at the same time.
_METER: ContextVar[_Meter] = ContextVar("sn_memory.clock", default=_Meter(False))  # noqa: B039
_STAGES: ContextVar[_Stages | None] = ContextVar("sn_memory.stages", default=None)


@contextmanager
def counting(work: bool) -> Iterator[None]:
    """Let `now` tell counted work from here on, from nothing; or else seconds on the wall."""
    with _within(_METER, _Meter(work)):
        yield


@contextmanager
def sharing(limit_s: float) -> Iterator[None]:
    """Let all stages inside share so many seconds."""
    with _within(_STAGES, _Stages(limit_s)):
        yield


@contextmanager
def _within(variable: ContextVar[T], value: T) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def stage() -> Iterator[float]:
    """Yield the seconds that a stage may take, and count them; outside of `sharing`, inf.

    A tenth at least of what all share, for a search that comes when all is spent.
    """
    stages, began = _STAGES.get(), time.perf_counter()
    if stages is None:
        yield math.inf
        return
    try:
        yield max(stages.limit_s - stages.spent_s, stages.limit_s / 10)
    finally:
        stages.spent_s += time.perf_counter() - began


def now() -> float:
    """Return the seconds on the wall, or what was counted so far in place of them."""
    meter = _METER.get()
    return meter.units / UNITS_PER_S if meter.counts_work else time.perf_counter()


def spend(units: int) -> None:
    """Count work."""
    _METER.get().units += units


def late_or_units(deadline: float) -> Callable[[], bool] | int:
    """Return what ends a compiled search at a moment of `now`: a question, or the units left."""
    if not counts_work():
        return lambda: now() > deadline
    return units(deadline - now())


def counts_work() -> bool:
    """Whether `now` tells counted work."""
    return _METER.get().counts_work


def units(seconds: float) -> int:
    """Return the work that stands for so many seconds, 0 at least, 2**62 at most."""
    return int(min(max(seconds, 0.0) * UNITS_PER_S, 2.0**62))


# Seconds between two lines of a stage, and between two states of the line of a terminal.
BETWEEN_S: Final = 2.0
REDRAWN_S: Final = 0.1
# To the beginning of the line, and nothing in it.
_ERASE: Final = "\r\x1b[K"


@dataclass(frozen=True)
class Progress:
    """How far planning is.

    Parameters
    ----------
    stage
        `trace`, `time ops`, `search`, `trial` or `pack`.
    done, total
        Of the stage: ops timed, and how many there are; of the search, what it has spent of its
        time limit, in seconds. It may end long before. 0 and 1 for what has no parts.
    seconds
        On the wall since planning began.
    note
        What was found last, for people; it may be empty.
    """

    stage: str
    done: float
    total: float
    seconds: float
    note: str = ""


# What callers pass: None for a terminal only, False, True, or what takes the records.
ProgressOption = bool | Callable[[Progress], object] | None


# What takes the records, None where none are wanted; and when planning began.
_LISTENER: ContextVar[tuple[Callable[[Progress], object] | None, float]] = ContextVar(
    "sn_memory.progress", default=(None, 0.0)
)


def report_progress(stage: str, done: float, total: float, note: str = "") -> None:
    """Say how far planning is; the parameters are those of Progress."""
    show, began = _LISTENER.get()
    if show is not None:
        show(Progress(stage, done, total, time.perf_counter() - began, note))


def is_heard() -> bool:
    """Whether records are taken: their notes may cost time to make."""
    return _LISTENER.get()[0] is not None


@contextmanager
def progress_output(wanted: ProgressOption) -> Iterator[None]:
    """Let `report_progress` be heard in the way that is wanted, by all that is called inside.

    Raises TypeError for what is neither a bool, None nor callable.
    """
    if not (wanted is None or isinstance(wanted, bool) or callable(wanted)):
        raise TypeError(
            f"got progress {wanted!r}, expected False, True, None, or a function of a Progress."
        )
    is_shown = wanted is True or (wanted is None and sys.stderr.isatty())
    printer = _Printer() if is_shown else None
    shown = printer.show if printer else wanted if callable(wanted) else None
    token = _LISTENER.set((shown, time.perf_counter()))
    try:
        yield
    finally:
        _LISTENER.reset(token)
        if printer:
            printer.close()


class _Printer:
    """Writes how far a stage is: on a terminal one line, which goes in the end; else some lines.

    These are one when the stage begins, one every two seconds of it, and one at its end.
    """

    def __init__(self) -> None:
        self.terminal = sys.stderr.isatty()
        self.stage, self.last, self.began = "", 0.0, 0.0
        # The latest that came too soon after a line: written when the stage ends.
        self.waiting: Progress | None = None

    def show(self, progress: Progress) -> None:
        between_s = REDRAWN_S if self.terminal else BETWEEN_S
        if progress.stage == self.stage and progress.seconds - self.last < between_s:
            self.waiting = progress
            return
        if progress.stage != self.stage:
            self.close()
            self.began = progress.seconds
        self.stage, self.last, self.waiting = progress.stage, progress.seconds, None
        self.write(progress)

    def write(self, progress: Progress) -> None:
        note = f": {progress.note}" if progress.note else ""
        far = self.far(progress) if progress.total != 1 else ""
        done = f"{progress.stage} {progress.done:.3g} of {progress.total:.3g}{far}"
        line = f"sn_memory: {progress.seconds:.1f} s, {done}{note}"
        # A line that is wrapped could not be written over.
        wide = shutil.get_terminal_size().columns - 1
        sys.stderr.write(f"{_ERASE}{line[:wide]}" if self.terminal else f"{line}\n")
        sys.stderr.flush()

    def far(self, progress: Progress) -> str:
        """How much of the stage is done, and the time that the rest takes at this rate."""
        done, spent = min(progress.done / progress.total, 1.0), progress.seconds - self.began
        # Of a stage that has just begun nothing is known.
        left = f", {spent * (1 - done) / done:.0f} s left" if done > 0 and spent > 0 else ""
        return f" ({done:.0%}{left})"

    def close(self) -> None:
        if self.terminal:
            sys.stderr.write(_ERASE)
        elif self.waiting is not None:
            self.write(self.waiting)
        self.waiting = None
