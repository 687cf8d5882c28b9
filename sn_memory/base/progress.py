"""The clock that limits searches, and the progress output of planning.

The clock counts wall-clock seconds or work. Users wait for seconds, so those are the default; but
where a search stops then depends on the machine and its load. For the same result everywhere, work
is counted instead: each loop reports what it has done, in units whose number depends only on the
problem. `counting` selects the clock for everything inside it.

A program that is silent for a minute looks as if it hung. On a terminal, one line shows the
progress. If standard error is a file or a pipe, nothing is written unless requested: then plain
lines, at most one every two seconds per stage.
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

# Units that stand for a second when work is counted. A unit is one op of a graph simulated by the
# compiled search, which does 8 to 30 million of them in a second.
UNITS_PER_S: Final = 20_000_000

T = TypeVar("T")


@dataclass
class _Meter:
    """Whether work is counted in this context, and how much was spent."""

    counts_work: bool
    units: int = 0


@dataclass
class _Stages:
    """Wall-clock seconds that the stages of planning share, and how many they have spent."""

    limit_s: float
    spent_s: float = 0.0


# Per context, so that two threads may plan at the same time.
_METER: ContextVar[_Meter] = ContextVar("sn_memory.clock", default=_Meter(False))  # noqa: B039
_STAGES: ContextVar[_Stages | None] = ContextVar("sn_memory.stages", default=None)


@contextmanager
def counting(work: bool) -> Iterator[None]:
    """Make `now` return counted work, starting at zero, or else wall-clock seconds."""
    with _within(_METER, _Meter(work)):
        yield


@contextmanager
def sharing(limit_s: float) -> Iterator[None]:
    """Let all stages inside share `limit_s` seconds."""
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
    """Yield the seconds that a stage may take, and count what it takes; inf outside of `sharing`.

    At least a tenth of the shared seconds, for a search that begins when all are spent.
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
    """Return wall-clock seconds, or the seconds that the work counted so far stands for."""
    meter = _METER.get()
    return meter.units / UNITS_PER_S if meter.counts_work else time.perf_counter()


def spend(units: int) -> None:
    """Count work."""
    _METER.get().units += units


def late_or_units(deadline: float) -> Callable[[], bool] | int:
    """Return what stops a compiled search at `deadline`: a predicate, or the units left."""
    if not counts_work():
        return lambda: now() > deadline
    return units(deadline - now())


def counts_work() -> bool:
    """Whether `now` returns counted work."""
    return _METER.get().counts_work


def units(seconds: float) -> int:
    """Return the work that stands for `seconds`; at least 0, at most 2**62."""
    return int(min(max(seconds, 0.0) * UNITS_PER_S, 2.0**62))


# Seconds between two lines of a stage, and between two updates of the line on a terminal.
BETWEEN_S: Final = 2.0
REDRAWN_S: Final = 0.1
# Go to the beginning of the line and clear it.
_ERASE: Final = "\r\x1b[K"


@dataclass(frozen=True)
class Progress:
    """Progress of planning.

    Parameters
    ----------
    stage
        `trace`, `time ops`, `search`, `trial` or `pack`.
    done, total
        Of the stage: ops timed, and the number of ops; for the search, seconds spent, and its time
        limit, which it may not need. 0 and 1 for a stage without parts.
    seconds
        Wall-clock seconds since planning began.
    note
        The latest result, for people; may be empty.
    """

    stage: str
    done: float
    total: float
    seconds: float
    note: str = ""


# What callers pass: None (only on a terminal), False, True, or a function of the records.
ProgressOption = bool | Callable[[Progress], object] | None


# The function that receives the records, or None; and when planning began.
_LISTENER: ContextVar[tuple[Callable[[Progress], object] | None, float]] = ContextVar(
    "sn_memory.progress", default=(None, 0.0)
)


def report_progress(stage: str, done: float, total: float, note: str = "") -> None:
    """Report the progress of planning; the parameters are those of Progress."""
    show, began = _LISTENER.get()
    if show is not None:
        show(Progress(stage, done, total, time.perf_counter() - began, note))


def is_heard() -> bool:
    """Whether anything receives the records: making their notes may take time."""
    return _LISTENER.get()[0] is not None


@contextmanager
def progress_output(wanted: ProgressOption) -> Iterator[None]:
    """Set where `report_progress` goes, for all that is called inside.

    Raises TypeError if `wanted` is neither a bool, None nor callable.
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
    """Writes progress: on a terminal one line, which is erased in the end; else several lines.

    These are one when a stage begins, one every two seconds, and one at its end.
    """

    def __init__(self) -> None:
        self.terminal = sys.stderr.isatty()
        self.stage, self.last, self.began = "", 0.0, 0.0
        # The latest record that came too soon after a line; written when the stage ends.
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
        # A wrapped line could not be overwritten.
        wide = shutil.get_terminal_size().columns - 1
        sys.stderr.write(f"{_ERASE}{line[:wide]}" if self.terminal else f"{line}\n")
        sys.stderr.flush()

    def far(self, progress: Progress) -> str:
        """How much of the stage is done, and the time left at this rate."""
        done, spent = min(progress.done / progress.total, 1.0), progress.seconds - self.began
        # At the beginning of a stage its rate is unknown.
        left = f", {spent * (1 - done) / done:.0f} s left" if done > 0 and spent > 0 else ""
        return f" ({done:.0%}{left})"

    def close(self) -> None:
        if self.terminal:
            sys.stderr.write(_ERASE)
        elif self.waiting is not None:
            self.write(self.waiting)
        self.waiting = None
