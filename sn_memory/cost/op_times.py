"""What both rims do with times of ops: each signature is measured once, and kept in a file.

A signature says what the time of an op depends on; the rims write it, and what else it depends on:
settings of the framework, its version, the device. The rest is here.
"""

from __future__ import annotations

import hashlib
import logging
import time
import warnings
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

from ..base.clock import stage
from ..base.errors import PlanWarning
from ..base.progress import say
from .measured import TimesFile

log = logging.getLogger(__name__)

_RUNS = 3
_ENOUGH_S = 0.1
# Of the time that planning has, what timing ops may take.
_PART = 0.5

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class OpTimes:
    """The table of one device and framework.

    Parameters
    ----------
    name
        Of the file.
    valid
        Whether a value read from it is one.
    settings
        Circumstances under which the same op takes another time, as text.
    """

    def __init__(self, name: str, valid: Callable[[Any], bool], settings: str) -> None:
        self.file, self.settings = TimesFile(name, valid), settings
        self.table: dict[str, Any] = self.file.read()
        self._known = set(self.table)

    def key(self, signature: str) -> str:
        """Return what an op of this signature is found by under these settings."""
        return hashlib.sha256(f"{signature} {self.settings}".encode()).hexdigest()[:24]

    def save(self, device: object) -> None:
        """Write what was measured since the file was read.

        What could not be timed is tried again next time: memory may have been short.
        """
        new = {
            key: it for key, it in self.table.items() if key not in self._known and it is not None
        }
        if new:
            self.file.add(new)
            log.info(
                "timed %d new op signatures on %s, kept in %s", len(new), device, self.file.path
            )


def quickest(work: Callable[[], object], clock: Callable[[], float]) -> float:
    """Return the seconds of the quickest of a few runs, after one to warm up.

    `work` returns when its result is there.
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
    """Carry out what times ops, each said as progress, for half the seconds planning has.

    Returns what was carried out. A warning says how many were not, so that a roofline stands in.
    """
    found: dict[K, V] = {}
    with stage() as left_s:
        end = time.perf_counter() + left_s * _PART
        for key, work in works.items():
            if time.perf_counter() > end:
                break
            say("time ops", len(found), len(works))
            found[key] = work()
    if len(found) < len(works):
        warnings.warn(
            f"{len(works) - len(found)} of {len(works)} kinds of op were not timed within half of "
            "the time limit; a roofline stands in for their seconds. Plan again, which goes on "
            "where this ended, or raise time_limit_s.",
            PlanWarning,
            stacklevel=2,
        )
    return found


def plain_name(text: str) -> str:
    """Return text as part of a file's name."""
    return "".join(letter if letter.isalnum() else "-" for letter in text)
