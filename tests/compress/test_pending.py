"""Exchanges in mid-way: what is begun, taken on, and waited for."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import numpy as np
import pytest

pytest.importorskip("horovod.torch")
from sn_compress.torch.under_horovod.memory import Pending


class Wire:
    """An all-reduce of one rank, whose sums are what was sent.

    here : names of the sums that have arrived
    fails : the one that is damaged, once

    A handle may be waited for once, as Horovod's.
    """

    def __init__(self, fails="", here=()):
        self.fails, self.here, self.sent, self.waited = fails, here, [], []

    def computing(self):
        return nullcontext()

    def start(self, name, words):
        self.sent.append(name)
        return len(self.sent), name, words

    def arrived(self, handle):
        return handle[1] in self.here

    def wait(self, handle):
        _, name, words = handle
        assert handle[0] not in [it[0] for it in self.waited], f"{name}: for ever, in Horovod"
        self.waited.append(handle[:2])
        if name == self.fails:
            self.fails = ""
            raise RuntimeError(f"{name} is damaged")
        return words


def as_lists(ended):
    return {key: result.tolist() for key, result in ended.items()}


def two_rounds(value):
    total = yield np.full(2, value)
    total = yield total + 1
    return total


def three_rounds():
    total = 0
    for each in range(3):
        total += yield np.full(1, each)
    return total


@pytest.mark.parametrize("fails", ["sn0.a", "sn1.a", "sn0.b", "sn1.b"])
def test_a_step_after_one_that_failed_waits_for_nothing_of_it(fails):
    """By the sum of one tensor, while another is on its way that does not come again."""
    pending, wire = Pending(), Wire(fails)
    for name in ("a", "b"):
        pending.begin(name, two_rounds(1), wire)
    assert wire.sent == ["sn0.a", "sn0.b"]  # the first rounds are sent at once
    with pytest.raises(RuntimeError, match="damaged"):
        pending.complete()
    for name in ("c", "a"):
        pending.begin(name, two_rounds(5), wire)
    assert as_lists(pending.complete()) == {"a": [6, 6], "c": [6, 6]}


def test_what_is_dropped_is_taken_if_it_is_there_and_not_waited_for():
    """A handle that nobody takes would keep its tensor in Horovod for ever."""
    pending, wire = Pending(), Wire("sn0.a", here=("sn0.a", "sn0.b"))  # and the first one fails
    for name in ("a", "b", "c"):
        pending.begin(name, two_rounds(1), wire)
    pending.drop()
    assert wire.waited == [(1, "sn0.a"), (2, "sn0.b")]
    pending.begin("a", two_rounds(5), wire)
    assert as_lists(pending.complete()) == {"a": [6, 6]}


def test_what_has_arrived_is_taken_on_without_waiting():
    pending, wire = Pending(), Wire(here=("sn0.b", "sn1.b"))
    for name in ("a", "b"):
        pending.begin(name, three_rounds(), wire)
    for _ in range(5):
        pending.poll()
    assert [name for _, name in wire.waited] == ["sn0.b", "sn1.b"]
    assert wire.sent == ["sn0.a", "sn0.b", "sn1.b", "sn2.b"]
    assert as_lists(pending.complete()) == {"a": [3], "b": [3]}


def test_what_fails_while_something_else_is_begun_is_raised_by_complete():
    """On a rank that has looked early as on one that has not."""
    pending, wire = Pending(), Wire("sn0.a", here=("sn0.a", "sn0.b", "sn1.b"))
    for name in ("a", "b"):
        pending.begin(name, two_rounds(1), wire)
    pending.poll()
    pending.poll()
    with pytest.raises(RuntimeError, match="is damaged"):
        pending.complete()


class Met(Wire):
    """Of one rank of two in threads: a sum is there when both have started it.

    here : what it finds arrived early
    """

    started, changed = {}, threading.Condition()

    def start(self, name, words):
        with self.changed:
            self.started[name] = self.started.get(name, 0) + 1
            self.changed.notify_all()
        return super().start(name, words)

    def started_by_both(self, name):
        return self.started.get(name, 0) == 2

    def arrived(self, handle):
        return super().arrived(handle) and self.started_by_both(handle[1])

    def wait(self, handle):
        with self.changed:
            assert self.changed.wait_for(lambda: self.started_by_both(handle[1]), timeout=10)
        return super().wait(handle)


def test_ranks_that_have_seen_different_rounds_arrive_do_not_wait_for_each_other():
    """One is ahead with a, the other with b, by a round each, when both begin to wait."""
    wires = [Met(here=("sn0.a", "sn1.a")), Met(here=("sn0.b",))]
    ranks = [Pending(), Pending()]
    for pending, wire in zip(ranks, wires, strict=True):
        for name in ("a", "b"):
            pending.begin(name, three_rounds(), wire)
    ranks[1].poll()  # b is at its second round
    ranks[0].poll()  # a is at its second round
    with ThreadPoolExecutor(2) as pool:
        second = pool.submit(ranks[1].complete)
        with Met.changed:  # the second one comes as far as to the second round of a
            assert Met.changed.wait_for(lambda: Met.started.get("sn1.a") == 2, timeout=10)
        ranks[0].poll()  # a is at its third round here; b at its first
        first = pool.submit(ranks[0].complete)
        for each in (first, second):
            assert as_lists(each.result(timeout=20)) == {"a": [3], "b": [3]}
