"""The bound holds for every element, zeros are zeros, sizes are as said, the mean is right."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import random, vectors

from sn_compress import CompressError, Payload, codec

FORMS = st.one_of(
    st.builds(
        lambda bits, group, escapes: {"bits": bits, "group": group, "escapes": escapes},
        st.sampled_from([1, 2, 4, 8]),
        st.sampled_from([32, 64, 256, 65536]),
        st.sampled_from([0.0, 1 / 512, 0.1, 1.0]),
    ),
    st.just({"form": "paper"}),
)
BOUNDS = st.floats(2.0**-100, 2.0**100)


@given(vectors(), BOUNDS, FORMS, st.integers(0, 2**32 - 1))
def test_every_element_is_within_the_bound_and_zeros_are_zeros(backend, x, bound, settings, seed):
    x = x.copy()
    if seed % 2:
        x[np.random.default_rng(seed).random(x.size) < 0.3] = 0
    made = codec("bounded", bound=bound, **settings)
    payload = made.encode(x)
    y = made.decode(Payload.from_bytes(payload.to_bytes()))
    off = np.abs(y.astype(np.float64) - x)
    # None is further off, or so many, and no more.
    assert (off > bound).sum() <= payload.saturated
    if settings.get("bits") != 1 or payload.saturated == 0:
        assert not y[x == 0].any()
    # What is kept without a payload has room for all escapes.
    kept = made.restore(made.quantise(x), x.size)
    assert (np.abs(kept.astype(np.float64) - x) <= bound).all()
    assert not kept[x == 0].any()


@given(vectors(), st.floats(2.0**-100, 2.0**60), FORMS)
def test_not_finite_stays_where_it_is(backend, x, bound, settings):
    x = x.copy()
    x[3::70], x[5::91] = np.nan, -np.inf
    made = codec("bounded", bound=bound, **settings)
    kept, bad = made.restore(made.quantise(x), x.size), ~np.isfinite(x)
    assert np.array_equal(~np.isfinite(kept), bad)
    assert np.array_equal(kept[bad], x[bad], equal_nan=True)
    assert not np.isfinite(made.decode(made.encode(x))[bad]).any()


@given(st.integers(0, 2**40), FORMS)
def test_size_is_bits_and_a_grid_per_group_and_the_escapes(n, settings):
    made = codec("bounded", bound=1.0, **settings)
    if "form" in settings:
        with pytest.raises(CompressError, match="depends on the data"):
            made.payload_bytes(n)
        return
    groups = -(-n // made.group)
    index = 4 if n < 2**32 else 8
    body = -(-n * made.bits // 8) + 6 * groups + 8 + (index + 4) * made.room(n)
    assert made.payload_bytes(n) == 32 + -(-body // 16) * 16
    assert made.room(n) == min(n, n * int(made.escapes * (2**32 - 1)) // 2**32 + 1)


def test_two_bits_reach_the_ratio_of_the_paper():
    """13.5 times less than float32 is 2.37 bits; the paper form depends on the data."""
    n = 2**20
    assert 4 * n / codec("bounded", preset="actnn").payload_bytes(n) > 13.5
    x = np.maximum(np.random.default_rng(0).standard_normal(n), 0).astype(np.float32)
    sizes = [codec("bounded", bound=b, form="paper").encode(x).nbytes for b in (0.05, 0.25, 0.5)]
    assert sizes == sorted(sizes, reverse=True)
    # The entropy of half zeros and a half-normal distribution at steps of 0.1, 0.5 and 1 is 3.08,
    # 1.74 and 1.16 bits. Neighbours tell nothing of each other here, so differences have a
    # larger entropy, by a bit at most, and deflate takes up to a bit more than the entropy.
    for size, entropy in zip(sizes, (3.08, 1.74, 1.16), strict=True):
        assert entropy <= 8 * size / n <= entropy + 2


@pytest.mark.parametrize(
    ("bits", "bound"), [(1, 0.02), (1, math.inf), (2, math.inf), (4, 0.02), (8, math.inf)]
)
def test_expectation_is_the_vector(bits, bound):
    """Hoeffding: the mean of t numbers from a range of one step is off by more than
    step * sqrt(log(2 n / a) / 2 t) in any of n places with probability a at most, here 10**-9."""
    n, t, alarm = 96, 1500, 1e-9
    x = np.concatenate([np.maximum(random(n // 3, 1), 0), np.abs(random(2 * n // 3, 2)) + 3])
    made = codec("bounded", bound=bound, bits=bits, group=32, escapes=1.0, measure=False)
    state = made.new_state(n)
    total = np.zeros(n)
    for _ in range(t):
        total += made.decode(made.encode(x, state=state))
    assert state[0][0] == t
    step = np.minimum(np.ptp(x.reshape(-1, 32), axis=1) / (2**bits - 1) * (1 + 2.0**-7), bound)
    # Each decoded value is itself rounded to float32.
    slack = np.repeat(step, 32) * math.sqrt(math.log(2 * n / alarm) / (2 * t)) + 2.0**-24 * x
    assert (np.abs(total / t - x) <= slack).all()


def test_escapes_beyond_the_room_are_counted_and_broken_groups_are_nan():
    x = np.zeros(1024, np.float32)
    x[:1024:2] = 100 * random(512, 0)
    made = codec("bounded", bound=0.01, bits=2, group=32, escapes=0.01)
    payload = made.encode(x)
    room = made.room(1024)
    wrong = np.abs(made.decode(payload).astype(float) - x) > 0.01
    assert 0 < wrong.sum() <= payload.saturated
    assert made.quantise(x).at.size == payload.saturated + room
    x[32 * np.arange(room + 1) + 5] = np.nan
    y = made.decode(made.encode(x))
    assert (np.isnan(y).reshape(-1, 32).all(axis=1) == (np.arange(32) <= room)).all()


def test_steps_and_seeds_change_the_chance_and_nothing_else():
    x = random(1000, 3)
    made = codec("bounded", bound=math.inf, bits=4)
    first, second = made.quantise(x, step=0), made.quantise(x, step=1)
    assert np.array_equal(first.bases, second.bases)
    assert not np.array_equal(first.codes, second.codes)
    again = codec("bounded", bound=math.inf, bits=4, seed=1).quantise(x)
    assert not np.array_equal(first.codes, again.codes)


def test_what_was_lost_is_known_unless_it_is_not_asked_for():
    x = random(5000, 0)
    for settings in ({"bits": 4}, {"form": "paper"}):
        payload = codec("bounded", bound=0.1, **settings).encode(x)
        y = codec("bounded", bound=0.1, **settings).decode(payload)
        assert payload.error == pytest.approx(np.square(y.astype(float) - x).sum(), rel=1e-9)
        quick = codec("bounded", bound=0.1, measure=False, **settings).encode(x)
        assert quick.error is None
        assert quick.to_bytes() == payload.to_bytes()
