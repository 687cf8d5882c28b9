"""The clock by which searches end: seconds of this thread's own work.

On a busy machine the clock on the wall would end a search earlier, and plans would depend on what
else is running.
"""

from __future__ import annotations

import time
from collections.abc import Callable


def now() -> float:
    """Return the CPU seconds that this thread has worked so far."""
    return time.thread_time()


def after(deadline: float) -> Callable[[], bool]:
    """Return what asks whether it is later than this moment of `now`."""
    return lambda: time.thread_time() > deadline
