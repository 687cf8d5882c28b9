"""How long planning may take, and how far it is: the clock of searches, and what is shown of it.

The clock is the one on the wall, or work that is counted. People ask for seconds that they wait, so
those are the default. A search that they end depends on the machine and on what else runs on it.
Where the same answer is wanted everywhere, work is counted instead: each loop reports what it has
done, in steps whose number depends on the problem alone. `counting` sets which, for all inside it.

A program that is silent for a minute looks as if it hung. On a terminal tqdm draws a bar, where it
is installed; else there are plain lines, no more than one in two seconds for a stage. Where
standard error is a file or a pipe nothing is written, unless it is asked for.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, TypeVar

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


BETWEEN_S: Final = 2.0


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
    printer: _Bar | _Lines | None = None
    if wanted is True or (wanted is None and sys.stderr.isatty()):
        printer = _printer()
    shown = printer.show if printer else wanted if callable(wanted) else None
    token = _LISTENER.set((shown, time.perf_counter()))
    try:
        yield
    finally:
        _LISTENER.reset(token)
        if printer:
            printer.close()


def _printer() -> _Bar | _Lines:
    if not sys.stderr.isatty():
        return _Lines("")
    try:
        from tqdm import tqdm
    except ImportError:
        return _Lines(
            "sn_memory: tqdm is not installed, so progress comes as lines. "
            "For a bar: pip install 'superneurons[progress]'"
        )
    return _Bar(tqdm)


class _Bar:
    """A bar for each stage, which goes when the stage is over."""

    def __init__(self, kind: Any) -> None:
        self.kind, self.stage = kind, ""
        self.bar: Any = None

    def show(self, progress: Progress) -> None:
        if progress.stage != self.stage or self.bar is None:
            self.close()
            self.stage = progress.stage
            # Of seconds and of ops alike; what has no parts shows how long it takes.
            parts = "{percentage:3.0f} %|{bar}| {elapsed}, {remaining} left{postfix}"
            whole = "{bar} {elapsed}{postfix}"
            form = f"sn_memory {{desc}}: {whole if progress.total == 1 else parts}"
            self.bar = self.kind(
                total=progress.total, desc=progress.stage, file=sys.stderr, leave=False,
                bar_format=form,
            )  # fmt: skip
        # A search that has found a plan may get more time, which moves the end of the bar.
        self.bar.total = progress.total
        self.bar.n = min(progress.done, progress.total)
        self.bar.set_postfix_str(progress.note, refresh=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
        self.bar = None


class _Lines:
    """A line when a stage begins, every two seconds of it, and at its end."""

    def __init__(self, first: str) -> None:
        self.first, self.stage, self.last, self.began = first, "", 0.0, 0.0
        # The latest that came too soon after a line: written when the stage ends.
        self.unsaid: Progress | None = None

    def show(self, progress: Progress) -> None:
        if progress.stage == self.stage and progress.seconds - self.last < BETWEEN_S:
            self.unsaid = progress
            return
        if progress.stage != self.stage:
            self.close()
            self.began = progress.seconds
        if self.first:
            sys.stderr.write(f"{self.first}\n")
        self.first, self.stage, self.last, self.unsaid = "", progress.stage, progress.seconds, None
        self.write(progress)

    def write(self, progress: Progress) -> None:
        note = f": {progress.note}" if progress.note else ""
        far = self.far(progress) if progress.total != 1 else ""
        done = f"{progress.stage} {progress.done:.3g} of {progress.total:.3g}{far}"
        sys.stderr.write(f"sn_memory: {progress.seconds:.1f} s, {done}{note}\n")

    def far(self, progress: Progress) -> str:
        """How much of the stage is done, and the time that the rest takes at this rate."""
        done, spent = min(progress.done / progress.total, 1.0), progress.seconds - self.began
        # Of a stage that has just begun nothing is known.
        left = f", {spent * (1 - done) / done:.0f} s left" if done > 0 and spent > 0 else ""
        return f" ({done:.0%}{left})"

    def close(self) -> None:
        if self.unsaid is not None:
            self.write(self.unsaid)
        self.unsaid = None
