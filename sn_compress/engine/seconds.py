"""Where the seconds of a step go on this rank's threads: into the codec, and into waiting.

Rounds are a generator that comes back whenever something has to travel. What it takes between two
of its yields is the codec; what the rim takes to wait for a collective is the exchange, so far as
no backward pass hid it. Both are of the host: on a GPU the codec's kernels are only started in that
time, and NCCL makes the stream wait, not the thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from .carry import Rounds


class Seconds:
    """Sums over all steps of one optimizer; threads may add to them."""

    def __init__(self) -> None:
        self._codec = self._waited = 0.0
        self._lock = threading.Lock()

    def of_codec(self, rounds: Rounds) -> Rounds:
        """The same rounds, with the time they take counted."""
        with self._coding():
            asked = next(rounds, None)
        while asked is not None:
            came = yield asked
            with self._coding():
                try:
                    asked = rounds.send(came)
                except StopIteration:
                    asked = None

    @contextmanager
    def _coding(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._codec += time.perf_counter() - began

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what waits for other ranks."""
        began = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._waited += time.perf_counter() - began

    def report(self, steps: int) -> dict[str, float]:
        """Seconds a step; see Compression.report."""
        steps = max(steps, 1)
        return {"codec_s": self._codec / steps, "exchange_s": self._waited / steps}
