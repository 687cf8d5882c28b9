"""Tensors in mid-exchange, encoded in a thread beside whatever computes them."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from sn_compress.exchange.pending import Pending


class Wire:
    """An all-reduce of one rank: a sum is what was sent, and arrives when it is told to."""

    def __init__(self):
        self.sent, self.waited, self.here = [], [], set()

    def start(self, name, words):
        self.sent.append(name)
        return name, words

    def arrived(self, handle):
        return handle[0] in self.here

    def wait(self, handle):
        self.waited.append((handle[0], threading.current_thread() is threading.main_thread()))
        return handle[1]


def two_rounds(value):
    total = yield np.full(2, value)
    total = yield total + 1
    return total


@pytest.fixture
def thread():
    with ThreadPoolExecutor(1) as pool:
        yield pool


def test_begin_does_not_wait_for_the_encoding(thread):
    pending, wire, gate = Pending(), Wire(), threading.Event()

    def slow():
        gate.wait(timeout=20)
        return two_rounds(1)

    pending.begin("a", slow, wire, thread)
    pending.begin("b", lambda: two_rounds(5), wire, thread)
    assert not wire.sent
    gate.set()
    np.testing.assert_array_equal(pending.finish("b"), [6, 6])
    np.testing.assert_array_equal(pending.finish("a"), [2, 2])
    assert wire.sent[:2] == ["sn0.a", "sn0.b"], "in the order in which they came"


def test_the_thread_takes_up_what_has_arrived_and_waits_for_nothing_else(thread):
    pending, wire = Pending(), Wire()
    wire.here = {"sn0.a", "sn1.a"}
    for name in ("a", "b", "c"):
        pending.begin(name, lambda: two_rounds(1), wire, thread)
    pending.settle()
    assert wire.waited == [("sn0.a", False), ("sn1.a", False)]
    for name in ("c", "a", "b"):
        np.testing.assert_array_equal(pending.finish(name), [2, 2])
    assert all(in_main for _, in_main in wire.waited[2:])


def test_what_fails_in_the_thread_is_raised_by_finish(thread):
    pending, wire = Pending(), Wire()

    def broken():
        raise ValueError("cannot encode")

    pending.begin("a", broken, wire, thread)
    pending.begin("b", lambda: two_rounds(1), wire, thread)
    with pytest.raises(ValueError, match="cannot encode"):
        pending.finish("b")
    # Afterwards a step can be given up, and another one begun.
    pending.drop()
    pending.begin("a", lambda: two_rounds(3), wire, thread)
    np.testing.assert_array_equal(pending.finish("a"), [4, 4])


def test_without_a_thread_it_is_sent_at_once():
    pending, wire = Pending(), Wire()
    pending.begin("a", lambda: two_rounds(1), wire)
    assert wire.sent == ["sn0.a"]
    np.testing.assert_array_equal(pending.finish("a"), [2, 2])


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
        pending.begin(name, lambda: two_rounds(1), wire)
    with pytest.raises(RuntimeError, match="damaged"):
        pending.finish("a")
    for name in ("c", "a"):
        pending.begin(name, lambda: two_rounds(5), wire)
    np.testing.assert_array_equal(pending.finish("a"), [6, 6])
    np.testing.assert_array_equal(pending.finish("c"), [6, 6])


def test_what_is_dropped_is_taken_if_it_is_there_and_not_waited_for():
    """A handle that nobody takes would keep its tensor in Horovod for ever."""
    pending, wire = Pending(), Spent("sn0.a")
    for name in ("a", "b", "c"):
        pending.begin(name, lambda: two_rounds(1), wire)
    wire.arrived = lambda handle: handle[1] in ("sn0.a", "sn0.b")  # and the first one fails
    pending.drop()
    assert wire.spent == {0, 1}
    pending.begin("a", lambda: two_rounds(5), wire)
    np.testing.assert_array_equal(pending.finish("a"), [6, 6])


def test_what_failed_in_the_thread_is_told_once(thread):
    pending, wire = Pending(), Wire()

    def fails():
        raise RuntimeError("cannot be encoded")

    pending.begin("a", fails, wire, thread)
    pending.begin("b", lambda: two_rounds(1), wire, thread)
    with pytest.raises(RuntimeError, match="cannot be encoded"):
        pending.finish("b")
    pending.begin("b", lambda: two_rounds(5), wire, thread)
    np.testing.assert_array_equal(pending.finish("b"), [6, 6])
