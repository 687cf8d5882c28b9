"""Waiting for a handle of Horovod's torch without taking the processor from who does the work.

hvd.synchronize asks again and again and merely yields in between. With fewer cores than ranks the
ranks that wait so hold up the threads they wait for: a test of gossip on four ranks and two cores
took 41 to 77 s over Gloo's alltoall, and takes 20 to 22 asleep.
"""

from __future__ import annotations

import time
from typing import Any

# Seconds between two questions: long enough to leave the core, short beside any collective.
_NAP = 1e-4


def result_of(hvd: Any, handle: int) -> Any:
    """What hvd.synchronize(handle) returns or raises; `hvd` is horovod.torch."""
    while not hvd.poll(handle):
        time.sleep(_NAP)
    return hvd.synchronize(handle)
