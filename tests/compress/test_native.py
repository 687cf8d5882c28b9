"""Work shared between threads: every item once, errors come out, scratch is a share's own."""

import threading
from itertools import chain

import pytest

from sn_compress import _native


@pytest.mark.parametrize(("items", "threads"), [(0, 2), (1, 1), (2, 5), (200, 1), (200, 5)])
def test_every_item_is_taken_once(items, threads):
    shares = _native.parallel(list, range(items), threads)
    assert sorted(chain.from_iterable(shares)) == list(range(items))
    assert 1 <= len(shares) <= max(1, min(threads, items))


def test_a_thread_that_is_held_up_leaves_its_items_to_the_other():
    emptied = threading.Event()

    def work(items):
        mine = []
        for item in items:
            if item == 0:
                assert emptied.wait(30)
            mine.append(item)
            if item == 19:
                emptied.set()
        return mine

    shares = _native.parallel(work, range(20), 2)
    assert sorted(shares) == [[0], list(range(1, 20))]


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_in_one_share_comes_out(threads):
    def work(items):
        for item in items:
            if item == 7:
                raise KeyError(item)

    with pytest.raises(KeyError, match="7"):
        _native.parallel(work, range(30), threads)
    assert sum(map(len, _native.parallel(list, range(30), threads))) == 30  # and goes on
