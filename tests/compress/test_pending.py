"""Exchanges in mid-way: what is begun, taken on, and waited for."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import numpy as np
import pytest

pytest.importorskip("horovod")
from sn_compress.torch.under_horovod.memory import Pending


class Wire:
    """An all-reduce of one rank: a sum is what was sent, and arrives when it is told to."""

    def __init__(self):
        self.sent, self.waited, self.here = [], [], set()

    def computing(self):
        return nullcontext()

    def start(self, name, words):
        self.sent.append(name)
        return name, words

    def arrived(self, handle):
        return handle[0] in self.here

    def wait(self, handle):
        self.waited.append(handle[0])
        return handle[1]


def as_lists(ended):
    return {key: result.tolist() for key, result in ended.items()}


def two_rounds(value):
    total = yield np.full(2, value)
    total = yield total + 1
    return total


def test_the_first_round_is_sent_at_once():
    pending, wire = Pending(), Wire()
    pending.begin("a", two_rounds(1), wire)
    assert wire.sent == ["sn0.a"]
    assert as_lists(pending.complete()) == {"a": [2, 2]}


class Spent(Wire):
    """Whose handles may be waited for once, as Horovod's; the sum of one tensor fails."""

    def __init__(self, fails=""):
        super().__init__()
        self.fails, self.spent = fails, set()

    def start(self, name, words):
        return (len(self.sent), *super().start(name, words))

    def wait(self, handle):
        number, name, words = handle
        assert number not in self.spent, f"{name} was waited for again: for ever, in Horovod"
        self.spent.add(number)
        if name == self.fails:
            self.fails = ""
            raise RuntimeError(f"{name} is damaged")
        return words


@pytest.mark.parametrize("fails", ["sn0.a", "sn1.a", "sn0.b", "sn1.b"])
def test_a_step_after_one_that_failed_waits_for_nothing_of_it(fails):
    """By the sum of one tensor, while another is on its way that does not come again."""
    pending, wire = Pending(), Spent(fails)
    for name in ("a", "b"):
        pending.begin(name, two_rounds(1), wire)
    with pytest.raises(RuntimeError, match="damaged"):
        pending.complete()
    for name in ("c", "a"):
        pending.begin(name, two_rounds(5), wire)
    assert as_lists(pending.complete()) == {"a": [6, 6], "c": [6, 6]}


def test_what_is_dropped_is_taken_if_it_is_there_and_not_waited_for():
    """A handle that nobody takes would keep its tensor in Horovod for ever."""
    pending, wire = Pending(), Spent("sn0.a")
    for name in ("a", "b", "c"):
        pending.begin(name, two_rounds(1), wire)
    wire.arrived = lambda handle: handle[1] in ("sn0.a", "sn0.b")  # and the first one fails
    pending.drop()
    assert wire.spent == {0, 1}
    pending.begin("a", two_rounds(5), wire)
    assert as_lists(pending.complete()) == {"a": [6, 6]}


def rounds_of(number):
    total = 0
    for each in range(number):
        total += yield np.full(1, each)
    return total


def test_what_has_arrived_is_taken_on_without_waiting():
    pending, wire = Pending(), Wire()
    for name in ("a", "b"):
        pending.begin(name, rounds_of(3), wire)
    wire.here = {"sn0.b", "sn1.b"}
    for _ in range(5):
        pending.poll()
    assert wire.waited == ["sn0.b", "sn1.b"]
    assert wire.sent == ["sn0.a", "sn0.b", "sn1.b", "sn2.b"]
    assert as_lists(pending.complete()) == {"a": [3], "b": [3]}


def test_what_fails_while_something_else_is_begun_is_raised_by_complete():
    """On a rank that has looked early as on one that has not."""
    pending, wire = Pending(), Spent("sn0.a")
    for name in ("a", "b"):
        pending.begin(name, two_rounds(1), wire)
    wire.arrived = lambda handle: True
    pending.poll()
    pending.poll()
    with pytest.raises(RuntimeError, match="is damaged"):
        pending.complete()


class Meeting:
    """An all-reduce of ranks in threads: a sum is there when all have started it."""

    def __init__(self, ranks):
        self.ranks, self.started, self.changed = ranks, {}, threading.Condition()

    def rank(self, sees):
        return Met(self, sees)


class Met(Wire):
    """One rank's; `sees` says what it finds arrived early."""

    def __init__(self, meeting, sees):
        super().__init__()
        self.meeting, self.sees = meeting, sees

    def start(self, name, words):
        with self.meeting.changed:
            self.meeting.started[name] = self.meeting.started.get(name, 0) + 1
            self.meeting.changed.notify_all()
        return name, words

    def _there(self, name):
        return self.meeting.started.get(name, 0) == self.meeting.ranks

    def arrived(self, handle):
        return handle[0] in self.sees and self._there(handle[0])

    def wait(self, handle):
        with self.meeting.changed:
            assert self.meeting.changed.wait_for(lambda: self._there(handle[0]), timeout=10)
        return handle[1]


def test_ranks_that_have_seen_different_rounds_arrive_do_not_wait_for_each_other():
    """One is ahead with a, the other with b, by a round each, when both begin to wait."""
    meeting = Meeting(2)
    wires = [meeting.rank({"sn0.a", "sn1.a"}), meeting.rank({"sn0.b"})]
    ranks = [Pending(), Pending()]
    for pending, wire in zip(ranks, wires, strict=True):
        for name in ("a", "b"):
            pending.begin(name, rounds_of(3), wire)
    ranks[1].poll()  # b is at its second round
    ranks[0].poll()  # a is at its second round
    with ThreadPoolExecutor(2) as pool:
        second = pool.submit(ranks[1].complete)
        with meeting.changed:  # the second one comes as far as to the second round of a
            assert meeting.changed.wait_for(lambda: meeting.started.get("sn1.a") == 2, timeout=10)
        ranks[0].poll()  # a is at its third round here; b at its first
        first = pool.submit(ranks[0].complete)
        for each in (first, second):
            assert as_lists(each.result(timeout=20)) == {"a": [3], "b": [3]}
