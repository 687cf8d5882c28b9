"""Which gradients travel together: from the order of the parameters, whatever comes first."""

import random

import pytest

from sn_compress.collective import Buckets

NAMES = [f"t{number}" for number in range(10)]


def buckets(full=25, devices=("cpu",) * 10):
    return Buckets(((n, 10, d) for n, d in zip(NAMES, devices, strict=True)), full=full)


def test_a_bucket_is_full_from_so_many_elements_on():
    assert buckets().members == [NAMES[:3], NAMES[3:6], NAMES[6:9], NAMES[9:]]
    assert buckets(full=1).members == [[name] for name in NAMES]
    assert buckets(full=10**9).members == [NAMES]
    # None spans devices.
    assert buckets(100, ["a"] * 4 + ["b"] * 6).members == [NAMES[:4], NAMES[4:]]


@pytest.mark.parametrize("seed", range(5))
def test_what_comes_in_any_order_is_handed_out_in_one(seed):
    """Every second tensor travels by itself: it only counts as come."""
    order = random.Random(seed).sample(NAMES, 10)
    held, taken = buckets(), {}
    for _ in range(2):  # steps
        held.begin()
        taken.clear()
        for name in order:
            full = held.add(name, name.upper() if int(name[1:]) % 2 else None)
            if full is not None:
                taken[full] = held.take(full)
        assert taken == {
            0: [("t1", "T1")],
            1: [("t3", "T3"), ("t5", "T5")],
            2: [("t7", "T7")],
            3: [("t9", "T9")],
        }
        assert held.incomplete() == []


def test_what_is_never_asked_about_holds_its_bucket_back():
    held = buckets()
    full = [held.add(name, name) for name in NAMES if name not in ("t0", "t4")]
    assert [number for number in full if number is not None] == [2, 3]
    held.take(2), held.take(3)
    assert held.incomplete() == [0, 1]
    assert [name for name, _ in held.take(0)] == ["t1", "t2"]
    held.begin()
    assert held.incomplete() == []
