"""How a rank waits for Horovod's torch: asleep, with what hvd.synchronize returns or raises."""

from __future__ import annotations

import time

import pytest

from sn_compress import CompressError
from sn_compress.consistency import result_of


class Hvd:
    """Horovod with one handle that is done after some questions."""

    def __init__(self, questions, error=None):
        self.left, self.error = questions, error

    def poll(self, handle):
        self.left -= 1
        return self.left < 0

    def synchronize(self, handle):
        assert self.left < 0, "synchronize spins: it may be called only once poll has said yes"
        if self.error is not None:
            raise self.error
        return handle + 1


def waited_for(hvd, handle, limit_s=60.0):
    return result_of(hvd, handle, limit_s=limit_s, what="a sum")


def test_waits_until_done_or_too_long_then_hands_over_result_or_error():
    assert waited_for(Hvd(0), 4) == 5
    assert waited_for(Hvd(3), 4) == 5
    with pytest.raises(RuntimeError, match="rank 1 has gone"):
        waited_for(Hvd(2, RuntimeError("rank 1 has gone")), 4)
    start = time.monotonic()
    with pytest.raises(CompressError, match=r"0\.05 s for the other ranks, for a sum"):
        waited_for(Hvd(10**9), 4, limit_s=0.05)
    assert time.monotonic() - start < 5


def test_takes_next_to_nothing_of_the_processor():
    """A thousand questions are 0.1 s of naps at least; a wait that spins would be all processor."""
    spent, start = time.process_time(), time.monotonic()
    waited_for(Hvd(1000), 0)
    assert time.process_time() - spent < 0.5 * (time.monotonic() - start)
