"""Cache of op times for both framework rims: each signature is measured once, and kept in a file.

A signature contains what the time of an op depends on; the rims define it, together with the other
circumstances: settings of the framework, its version, the device. The rest is here.

The file is in the user's cache folder and must never prevent a plan. The folder is shared: by
processes that measure at the same time, by versions of this package, by people who edit files. So
any problem with it is logged once, in one line, and the times are measured again or not kept; and a
writer merges with what the file contains by then. There is no lock: of two that write at the same
moment, one may lose its times, and measures them again next time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
import warnings
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ..base.errors import PlanWarning
from ..base.progress import report_progress, stage

log = logging.getLogger(__name__)

# Runs per timed op; fewer once they have taken this many seconds.
_RUNS = 3
_ENOUGH_S = 0.1
# The share of the planning time that timing ops may take.
_PART = 0.5

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def cache_folder() -> Path | None:
    """Return the folder of this package's files; None if the user has no home."""
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(home) if home else Path.home() / ".cache") / "sn_memory"
    except RuntimeError:
        return None


def is_seconds(value: Any) -> bool:
    """Whether a value read from a file is an op's seconds: not negative, under 30 years."""
    return type(value) in (int, float) and 0 <= value < 1e9


class OpTimes:
    """The table of one device and framework, in a file.

    name : of the file, in `cache_folder`
    valid : whether a value read is valid; others are treated as missing
    settings : circumstances under which the same op takes another time, as text
    """

    def __init__(self, name: str, valid: Callable[[Any], bool], settings: str = "") -> None:
        folder = cache_folder()
        self.path = None if folder is None else folder / name
        self.settings, self._valid, self._warned = settings, valid, False
        self.table = self.read()
        self._known = set(self.table)

    def key(self, signature: str) -> str:
        """Return the key of an op with this signature under these settings."""
        return hashlib.sha256(f"{signature} {self.settings}".encode()).hexdigest()[:24]

    def save(self, device: object) -> None:
        """Write the times measured since the file was read.

        Ops that could not be timed are tried again next time: memory may have been short.
        """
        new = {
            key: seconds
            for key, seconds in self.table.items()
            if key not in self._known and seconds is not None
        }
        if new:
            self.add(new)
            log.info("timed %d new op signatures on %s, kept in %s", len(new), device, self.path)

    def read(self) -> dict[str, Any]:
        """Return the contents of the file; empty if it is missing or cannot be read."""
        if self.path is None:
            return {}
        try:
            rows = json.loads(self.path.read_text(encoding="utf-8"))
            if not isinstance(rows, dict):
                raise TypeError(f"a {type(rows).__name__}")
        except (FileNotFoundError, NotADirectoryError):
            return {}
        # JSON that is nested too deeply is a RecursionError.
        except (OSError, ValueError, TypeError, RecursionError) as error:
            self._tell("is no table of times and is ignored", error)
            return {}
        table = {key: value for key, value in rows.items() if self._valid(value)}
        if len(table) < len(rows):
            count = len(rows) - len(table)
            self._tell(f"has {count} entries that are no times; they are ignored", "")
        return table

    def add(self, entries: Mapping[str, Any]) -> None:
        """Add to the file, keeping what others have added since it was read."""
        if self.path is None or not entries:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps({**self.read(), **entries}, allow_nan=False)
            # Atomically: a reader must find a complete file.
            part = self.path.with_suffix(f".{os.getpid()}.part")
            try:
                part.write_text(text, encoding="utf-8")
                os.replace(part, self.path)
            finally:
                part.unlink(missing_ok=True)
        except (OSError, ValueError) as error:
            self._tell("cannot be written, so times are measured again next time", error)

    def _tell(self, what: str, why: object) -> None:
        if not self._warned:
            log.warning("%s %s%s", self.path, what, f" ({why})" if why else "")
        self._warned = True


def quickest(work: Callable[[], object], clock: Callable[[], float]) -> float:
    """Return the seconds of the fastest of a few runs, after one to warm up.

    `work` returns when its result is available.
    """
    work()
    best, spent = float("inf"), 0.0
    for _ in range(_RUNS):
        began = clock()
        work()
        took = clock() - began
        best, spent = min(best, took), spent + took
        if spent > _ENOUGH_S:
            break
    return best


def while_time_lasts(works: Mapping[K, Callable[[], V]]) -> dict[K, V]:
    """Run functions that time ops, reporting progress, for half of the planning time.

    Returns their results. A warning says how many did not run and are estimated by a roofline.
    """
    values: dict[K, V] = {}
    with stage() as left_s:
        end = time.perf_counter() + left_s * _PART
        for key, work in works.items():
            if time.perf_counter() > end:
                break
            report_progress("time ops", len(values), len(works))
            values[key] = work()
    if len(values) < len(works):
        warnings.warn(
            f"{len(works) - len(values)} of {len(works)} distinct ops were not timed within half "
            "of the time limit; their seconds are estimated by a roofline. Plan again, which "
            "continues from here, or raise time_limit_s.",
            PlanWarning,
            stacklevel=2,
        )
    return values


def plain_name(text: str) -> str:
    """Return text as part of a file's name."""
    return "".join(letter if letter.isalnum() else "-" for letter in text)
