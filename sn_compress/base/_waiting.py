"""Waiting for a handle of Horovod's torch without taking the processor from who does the work.

hvd.synchronize asks again and again and merely yields in between. With fewer cores than ranks the
ranks that wait so hold up the threads they wait for: a test of gossip on four ranks and two cores
took 41 to 77 s over Gloo's alltoall, and takes 20 to 22 asleep.
"""

from __future__ import annotations

import time
from typing import Any

from .errors import CompressError

# Seconds between two questions: long enough to leave the core, and short beside what was waited for
# already, so that a wait is little longer than what is waited for takes.
_SHORTEST, _LONGEST, _SHARE = 1e-4, 1e-3, 0.15
WAIT_S = 1800.0  # longer than a rank takes that validates, or writes a checkpoint, alone


def result_of(hvd: Any, handle: int, *, limit_s: float, what: str) -> Any:
    """What hvd.synchronize(handle) returns or raises; `hvd` is horovod.torch.

    what : is waited for, in words

    Raises CompressError after so many seconds: a rank does something else, and would for ever.
    """
    start = time.monotonic()
    while not hvd.poll(handle):
        waited_s = time.monotonic() - start
        time.sleep(min(max(_SHARE * waited_s, _SHORTEST), _LONGEST))
        if waited_s > limit_s:
            raise CompressError(waited(what, limit_s))
    return hvd.synchronize(handle)


def waited(what: str, limit_s: float) -> str:
    """The message after a wait that was too long."""
    return (
        f"waited {limit_s:g} s for the other ranks, for {what}. They have ended, or do not come to "
        "it: another number of optimizers or of steps, or a branch that only some take. Look where "
        "they are; if they only take long, set a larger wait_s."
    )
