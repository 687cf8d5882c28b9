"""A link that is modelled: copies at a set rate beside the program, waits noted."""

import time

import pytest
import torch
from modelled_link import Link, LinkLanes


def test_copies_keep_to_the_rate_and_run_beside():
    lanes = LinkLanes(1e7, 0.01)
    here, host, back = (torch.full((10**6,), it, dtype=torch.uint8) for it in (7, 0, 1))
    began = time.perf_counter()
    ticket = lanes.leave(here, host)
    asked = time.perf_counter() - began
    lanes.wait(ticket)
    took = time.perf_counter() - began
    assert asked < 0.05
    # 10 ms, and 10**6 bytes at 10**7 a second; a sleep never ends early.
    assert took >= 0.11
    assert torch.equal(host, here)
    assert lanes.link.nbytes == 10**6
    assert lanes.link.copies_s >= 0.11
    assert lanes.link.waits_s <= took
    # A copy back comes after its way out.
    lanes.wait(lanes.arrive(host.zero_(), back, lanes.leave(here, host)))
    assert torch.equal(back, here)
    assert len(lanes.link.copies) == 3


def test_what_is_hidden():
    assert Link().hidden == 1.0
    assert Link([(0.0, 2.0), (1.0, 3.0)], [(1.5, 2.5)]).hidden == 0.75
    assert Link([(0.0, 1.0)], [(0.0, 5.0)]).hidden == 0.0
    with pytest.raises(ValueError, match="bytes_per_s"):
        LinkLanes(0.0)
