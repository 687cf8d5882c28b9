"""Rows agreed a step ahead, on ranks of NumPy and torch in one process."""

import math

import numpy as np
import pytest
import record_bits
from bucket_ranks import LIBRARIES, Ranks, bits, chance
from hypothesis import given, settings
from hypothesis import strategies as st

from sn_compress.allreduce.bucket import Bucket
from sn_compress.allreduce.methods.base import StepOptions
from sn_compress.allreduce.methods.rows import Rows
from sn_compress.errors import CompressError
from sn_compress.ops import bits as positions
from sn_compress.ops import indexed
from sn_compress.ops.bits import agreed_rows


def agreed(part, state, ranks):
    """The rows of a method's one tensor that all ranks send."""
    (shape,), (size,) = part.shapes, part.sizes
    count = min(size * ranks, shape[0])
    return agreed_rows(state["spread"], state["age"], state["named"], count)


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_positions_travel_as_elias_fano_has_them_and_come_back(data):
    n = data.draw(st.integers(1, 400))
    count = data.draw(st.integers(1, n))
    seed = data.draw(st.integers(0, 2**32))
    ascending = np.sort(np.random.default_rng(seed).permutation(n)[:count]).astype(np.int64)
    parts = record_bits.elias_fano(ascending[None].astype(np.uint32), n)
    expected = record_bits.bits_to_words(np.concatenate(parts, axis=1))[0].view(np.int32)
    for library in LIBRARIES:
        words = positions.write_positions(library(ascending), n)
        assert bits(words) == bits(expected)
        assert words.shape == (positions.slot_words(count, n),)
        # Whoever has joined adds zeros, and tells nothing.
        slots = np.stack([np.zeros_like(expected), expected, np.zeros_like(expected)])
        found = np.asarray(positions.read_positions(library(slots), count, n))
        assert (np.flatnonzero(found) == ascending).all()
        assert not np.asarray(positions.read_positions(library(slots[:1]), count, n)).any()


def test_any_words_are_read_as_something():
    rng = np.random.default_rng(0)
    for count, n in ((1, 1), (3, 40), (40, 40), (5, 1000)):
        for _ in range(20):
            slots = rng.integers(-(2**31), 2**31, (2, positions.slot_words(count, n)))
            found = [
                positions.read_positions(lib(slots.astype(np.int32)), count, n) for lib in LIBRARIES
            ]
            assert found[0].shape == (n,)
            assert bits(found[0]) == bits(found[1])


@pytest.mark.parametrize("kinds", [1, 3, 10**6])
def test_the_largest_are_those_of_a_stable_sort(kinds):
    rng = np.random.default_rng(kinds)
    for count in (1, 17, 64):
        values = (rng.integers(0, kinds, 64) / 7 * 2.0 ** rng.integers(-150, 100)).astype("f4")
        values[3] = -0.0
        expected = indexed.largest(values[None], count)[0]
        for library in LIBRARIES:
            order = positions.orders(library(values))
            assert (np.asarray(positions.largest(order, count)) == expected).all()


def naive_choice(spread, age, named, count):
    """The rows to send, in plain Python: named, then large, then those that have waited."""
    rows = range(len(spread))
    wide = np.clip(spread.astype(np.float64) * np.sqrt(age.astype(np.float64)), 2.0**-126, 2.0**127)
    expected = wide.astype(np.float32)
    waiting = math.ceil((count - sum(named)) / 5)
    large = sorted(rows, key=lambda row: (not named[row], -expected[row], row))[: count - waiting]
    rest = sorted(set(rows) - set(large), key=lambda row: (-age[row], row))
    return sorted(large + rest[:waiting])


@given(st.data())
@settings(deadline=None, max_examples=100)
def test_the_rows_are_those_of_a_plain_sort(data):
    rows, ranks = data.draw(st.integers(1, 40)), data.draw(st.sampled_from([1, 2, 8]))
    part = Rows([(rows, 3)], [data.draw(st.integers(1, rows))])
    count = min(part.sizes[0] * ranks, rows)
    few = st.lists(st.sampled_from([0.0, 1e-30, 1.0, 1.5, 3e38]), min_size=rows, max_size=rows)
    state = {
        "spread": np.array(data.draw(few), np.float32),
        "age": np.array(data.draw(st.lists(st.integers(1, 9), min_size=rows, max_size=rows)), "f4"),
        "named": np.zeros(rows, np.bool_),
    }
    named = data.draw(st.lists(st.integers(0, rows - 1), max_size=count))
    state["named"][named] = True
    expected = naive_choice(**state, count=count)
    for library in LIBRARIES:
        own = {name: library(value) for name, value in state.items()}
        assert np.asarray(agreed(part, own, ranks)).tolist() == expected


def naive_picks(left, size):
    """The rows of which a rank owes most, ties to the lower."""
    norms = np.square(left, dtype=np.float64).sum(axis=1)
    return sorted(range(len(left)), key=lambda row: (-norms[row], row))[:size]


def test_the_rows_sent_are_those_named_and_whoever_owes_most_names_the_next():
    rng = np.random.default_rng(4)
    group = Ranks([Rows([(60, 5)], [3])], 4)
    named = set()
    for _ in range(20):
        results = group.step(chance(rng, 4, [(60, 5)], 0.2))
        mean, state = results[0].mean[0], results[0].state
        sent = set(np.flatnonzero(state["0.age"] == 1))
        assert len(sent) == 3 * 4
        assert named | set(np.flatnonzero(mean.any(axis=1))) <= sent
        named = set(np.flatnonzero(state["0.named"]))
        lefts = [np.asarray(each.residuals[0]) for each in results.values()]
        assert named == {row for left in lefts for row in naive_picks(left, 3)}


def test_every_row_is_sent_in_the_end_even_if_nobody_names_it():
    loud = np.zeros((64, 2), np.float32)
    loud[:2] = 100
    group = Ranks([Rows([(64, 2)], [2])], 2, LIBRARIES[:1])
    for _ in range(130):
        group.step([[loud]] * 2)
    # Of 4 places one is free for the 62 others, which take turns.
    assert group.states[0]["0.age"].max() <= 63


def test_beginning_with_a_mean_sends_its_largest_rows_first():
    mean = np.zeros((60, 5), np.float32)
    mean[[4, 17, 30, 31, 50, 59]] = 8.0
    part = Rows([(60, 5)], [3])
    state = part.begin(part.new_state(mean), [mean])
    # Four places of six are for what is large, and ties go to the lower.
    assert set(agreed(part, state, 2).tolist()) == {0, 1, 4, 17, 30, 31}


def test_the_words_are_few():
    """Positions take as many as in Elias-Fano form, values a byte each, and a scale."""
    for (rows, columns), size, ranks in (((30000, 64), 40, 8), ((1000, 8), 3, 2)):
        (words,) = Bucket([Rows([(rows, columns)], [size])]).words(ranks)
        bits_ = size * positions.low_bits(size, rows) + positions.upper_bits(size, rows)
        assert words == 2 + 1 + size * ranks * columns / 4 + ranks * math.ceil(bits_ / 32)


def test_what_cannot_be_is_refused():
    matrix = np.ones((9, 2), np.float32)
    part = Rows([(9, 2)], [1])
    for rank in (None, -1, 2):
        with pytest.raises(CompressError, match="rank="):
            next(part.step(part.new_state(matrix), [matrix], StepOptions(2, rank)))
    for size in (0, 10):
        with pytest.raises(CompressError, match="expected 1 to 9"):
            Rows([(9, 2)], [size])
