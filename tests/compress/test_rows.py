"""Rows agreed a step ahead, on ranks of NumPy and torch in one process."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from sn_compress.allreduce.bucket import Bucket
from sn_compress.allreduce.methods.rows import Rows
from sn_compress.errors import CompressError
from sn_compress.ops import bits as elias_fano
from sn_compress.ops import bits as positions
from sn_compress.ops import indexed, record
from sn_compress.ops.bits import agreed_rows

LIBRARIES = [lambda array: np.array(array), lambda array: torch.from_numpy(np.array(array))]
SHAPES = {
    "table": ((60, 5), 3),
    "one row": ((1, 7), 1),
    "all rows": ((9, 4), 9),
    "one column": ((300, 1), 5),
    "one value": ((1, 1), 1),
}


def agreed(part, state, ranks):
    """The rows of a method's one tensor that all ranks send."""
    (shape,), (size,) = part.shapes, part.sizes
    count = min(size * ranks, shape[0])
    return agreed_rows(state["spread"], state["age"], state["named"], count)


def bits(array):
    return np.asarray(array).tobytes()


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_positions_travel_as_elias_fano_has_them_and_come_back(data):
    n = data.draw(st.integers(1, 400))
    count = data.draw(st.integers(1, n))
    seed = data.draw(st.integers(0, 2**32))
    ascending = np.sort(np.random.default_rng(seed).permutation(n)[:count]).astype(np.int64)
    parts = record.elias_fano(ascending[None].astype(np.uint32), n)
    expected = record.bits_to_words(np.concatenate(parts, axis=1))[0].view(np.int32)
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
        for _ in range(50):
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


class Ranks:
    """Ranks of one bucket, every other one of torch, and the all-reduce between them."""

    def __init__(self, parts, ranks, libraries=LIBRARIES):
        self.bucket, self.ranks = Bucket(parts), ranks
        self.of = [libraries[rank % len(libraries)] for rank in range(ranks)]
        self.states = [self.bucket.new_state(of(np.zeros(1, np.float32))) for of in self.of]
        self.memories = [
            [np.zeros(shape, np.float32) for shape in self.bucket.shapes] for _ in self.of
        ]

    def step(self, gradients, joined=(), damage=None):
        """gradients : by rank, then by tensor; returns the results of those that live."""
        live = [rank for rank in range(self.ranks) if rank not in joined]
        steps = {}
        for rank in live:
            pairs = zip(self.memories[rank], gradients[rank], strict=True)
            matrices = [self.of[rank](memory + gradient) for memory, gradient in pairs]
            steps[rank] = self.bucket.step(self.states[rank], matrices, ranks=self.ranks, rank=rank)
        words = {rank: next(step) for rank, step in steps.items()}
        assert {each.shape for each in words.values()} == {
            (count,) for count in self.bucket.words(self.ranks)
        }
        total = np.sum([np.asarray(each) for each in words.values()], axis=0, dtype=np.int32)
        if damage is not None:
            total[damage[0]] ^= np.int32(1 << damage[1])
        results = {}
        for rank, step in steps.items():
            with pytest.raises(StopIteration) as end:
                step.send(self.of[rank](total))
            results[rank] = end.value.value
        first = results[live[0]]
        for each in results.values():  # the same bits on all of them
            for name, value in first.state.items():
                assert bits(each.state[name]) == bits(value), name
            for mine, others in zip(each.mean, first.mean, strict=True):
                assert bits(mine) == bits(others)
        if not bool(first.lost) and not bool(first.damaged):
            for rank, each in results.items():
                self.memories[rank] = [np.asarray(left) for left in each.left]
                self.states[rank] = each.state
        for rank in joined:
            self.states[rank] = {
                name: self.of[rank](np.asarray(value)) for name, value in first.state.items()
            }
        return results


def sparse(rng, ranks, shapes, share=0.2):
    return [
        [
            (rng.standard_normal(shape) * (rng.random((shape[0], 1)) < share)).astype(np.float32)
            for shape in shapes
        ]
        for _ in range(ranks)
    ]


def naive_picks(left, size):
    """The rows of which a rank owes most, ties to the lower."""
    norms = np.square(left, dtype=np.float64).sum(axis=1)
    return sorted(range(len(left)), key=lambda row: (-norms[row], row))[:size]


@pytest.mark.parametrize(
    ("kind", "ranks"), [*((kind, 2) for kind in SHAPES), ("table", 4), ("table", 8)]
)
def test_fifty_steps_have_the_same_bits_in_numpy_and_torch_and_lose_nothing(kind, ranks):
    shape, size = SHAPES[kind]
    rng = np.random.default_rng(ranks)
    group = Ranks([Rows([shape], [size])], ranks)
    given_, got = np.zeros(shape), np.zeros(shape)
    named = set()
    for _ in range(50):
        gradients = sparse(rng, ranks, [shape])
        results = group.step(gradients)
        assert not any(bool(each.lost) or bool(each.damaged) for each in results.values())
        given_ += np.mean([mine[0] for mine in gradients], axis=0, dtype=np.float64)
        mean, state = results[0].mean[0], results[0].state
        got += mean
        sent = set(np.flatnonzero(state["0.age"] == 1))
        assert len(sent) == min(size * ranks, shape[0])
        assert named | set(np.flatnonzero(mean.any(axis=1))) <= sent
        named = set(np.flatnonzero(state["0.named"]))
        lefts = [np.asarray(each.left[0]) for each in results.values()]
        assert named == {row for left in lefts for row in naive_picks(left, size)}
    left = np.mean([memory[0] for memory in group.memories], axis=0, dtype=np.float64)
    # Each step rounds vectors of norm below |given| + |memory| a handful of times.
    norm = np.linalg.norm(given_) + max(np.linalg.norm(mine[0]) for mine in group.memories)
    assert np.linalg.norm(given_ - got - left) <= 8 * 50 * 2**-24 * norm


def test_few_rows_that_change_from_step_to_step_arrive_a_step_later():
    rng = np.random.default_rng(10)
    group = Ranks([Rows([(500, 8)], [4])], 3)
    sent, given_ = np.zeros((500, 8)), np.zeros((500, 8))
    for _ in range(30):
        gradients = np.zeros((3, 1, 500, 8), np.float32)
        for rank in range(3):
            rows = rng.choice(500, 4, replace=False)
            gradients[rank, 0, rows] = rng.uniform(0.5, 1, (4, 8))
        last = gradients.mean(axis=0)[0]
        sent += group.step(gradients)[0].mean[0]
        given_ += last
    # What is outstanding is the last step and the rounding of the rows sent before: 42 levels on
    # each side of a peak, so about a hundredth of each value.
    assert np.linalg.norm(given_ - last - sent) < 0.3 * np.linalg.norm(last)


def test_every_row_is_sent_in_the_end_even_if_nobody_names_it():
    loud = np.zeros((64, 2), np.float32)
    loud[:2] = 100
    group = Ranks([Rows([(64, 2)], [2])], 2, LIBRARIES[:1])
    for _ in range(130):
        group.step([[loud]] * 2)
    # Of 4 places one is free for the 62 others, which take turns.
    assert group.states[0]["0.age"].max() <= 63


@pytest.mark.parametrize("kind", SHAPES)
def test_a_rank_that_joined_adds_nothing_and_names_nothing(kind):
    shape, size = SHAPES[kind]
    rng = np.random.default_rng(4)
    group = Ranks([Rows([shape], [size])], 4)
    for _ in range(4):
        group.step(sparse(rng, 4, [shape]))
    for _ in range(6):
        before = [mine[0].copy() for mine in group.memories]
        gradients = sparse(rng, 4, [shape])
        results = group.step(gradients, joined=(0, 2))
        kept = sum(gradients[r][0] + before[r] - group.memories[r][0] for r in (1, 3)) / 4
        mean = np.asarray(results[1].mean[0])
        assert np.allclose(mean, kept, atol=1e-5 * max(np.abs(kept).max(), 1))
        assert np.asarray(results[1].state["0.named"]).sum() <= 2 * size
        assert all((group.memories[rank][0] == before[rank]).all() for rank in (0, 2))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_step_that_one_rank_loses_is_lost_on_all_and_leaves_every_state(bad):
    rng = np.random.default_rng(3)
    shape, size = SHAPES["table"]
    groups = [Ranks([Rows([shape], [size])], 3) for _ in range(2)]
    for turn in range(6):
        gradients = sparse(rng, 3, [shape])
        if turn == 3:
            spoilt = [[mine[0].copy()] for mine in gradients]
            spoilt[1][0][7, 2] = bad
            results = groups[0].step(spoilt)
            for rank, each in results.items():
                assert bool(each.lost)
                assert np.isnan(np.asarray(each.mean[0])).all()
                for name, value in groups[0].states[rank].items():
                    assert bits(each.state[name]) == bits(value)
        first, second = (group.step(gradients) for group in groups)
        assert bits(first[0].mean[0]) == bits(second[0].mean[0])


def test_a_damaged_sum_is_known_as_one():
    rng = np.random.default_rng(9)
    shape, size = SHAPES["table"]
    group = Ranks([Rows([shape], [size])], 2)
    (words,) = group.bucket.words(2)
    for _ in range(100):
        damage = rng.integers(words), rng.integers(31)
        results = group.step(sparse(rng, 2, [shape]), damage=damage)
        assert all(bool(each.damaged) for each in results.values())


def test_tensors_travel_together_as_they_do_alone():
    rng = np.random.default_rng(5)
    kinds = [SHAPES["table"], SHAPES["one column"], SHAPES["all rows"]]
    alone = [Rows([shape], [size]) for shape, size in kinds]
    (part,) = Rows.together(alone)
    together, apart = Ranks([part], 2), [Ranks([each], 2) for each in alone]
    for _ in range(10):
        gradients = sparse(rng, 2, part.shapes)
        both = together.step(gradients)
        for place, group in enumerate(apart):
            one = group.step([[mine[place]] for mine in gradients])
            assert bits(one[0].mean[0]) == bits(both[0].mean[place])
        pieces = together.bucket.split(both[0].state)
        again = together.bucket.join(pieces)
        for name, value in both[0].state.items():
            assert bits(again[name]) == bits(value)
        for piece, group in zip(pieces, apart, strict=True):
            for name, value in piece.items():
                assert bits(group.states[0][f"0.{name}"]) == bits(value)


def test_nothing_is_read_from_a_device():
    """Torch's device `meta` has shapes and no values: whatever asks for one raises."""
    part = Rows([(60, 5), (300, 1)], [3, 5])
    bucket = Bucket([part])
    like = torch.zeros(1, device="meta")
    means = [torch.zeros(shape, device="meta") for shape in part.shapes]
    state = bucket.begin(bucket.new_state(like), means)
    state = bucket.rescale(state, 4)
    for _ in range(2):
        matrices = [torch.zeros(shape, device="meta") for shape in part.shapes]
        outs = [torch.zeros(shape, device="meta") for shape in part.shapes]
        step = bucket.step(state, matrices, ranks=4, rank=3, outs=outs)
        words = next(step)
        assert words.shape == tuple(bucket.words(4))
        with pytest.raises(StopIteration) as end:
            step.send(torch.zeros_like(words))
        result = end.value.value
        assert all(mean is out for mean, out in zip(result.mean, outs, strict=True))
        assert {n: (v.shape, v.dtype) for n, v in state.items()} == {
            n: (v.shape, v.dtype) for n, v in result.state.items()
        }
        state = result.state


def test_the_ops_of_a_step_do_not_depend_on_the_numbers():
    """Recorded on zeros and run again on others, they make of those what a step makes."""
    bucket = Bucket([Rows([(30, 4)], [3])])
    empty = bucket.new_state(torch.zeros(1))

    def step(matrix, total, *state):
        names = zip(empty, state, strict=True)
        rounds = bucket.step(dict(names), [matrix.clone()], ranks=2, rank=1)
        words = next(rounds)
        with pytest.raises(StopIteration) as end:
            rounds.send(total)
        result = end.value.value
        return words, *result.left, *result.mean, *result.state.values(), result.lost

    zeros = torch.zeros(30, 4)
    words = step(zeros, torch.zeros(bucket.words(2), dtype=torch.int32), *empty.values())[0]
    recorded = make_fx(step)(zeros, torch.zeros_like(words), *empty.values())
    rng = np.random.default_rng(6)
    state = empty.values()
    for turn in range(5):
        ((values,),) = sparse(rng, 1, [(30, 4)])
        values[7, 1] = np.nan if turn == 3 else 0
        own = step(torch.from_numpy(values), torch.zeros_like(words), *state)[0]
        plain = step(torch.from_numpy(values), own * 2, *state)
        replayed = recorded(torch.from_numpy(values), own * 2, *state)
        assert [bits(each) for each in plain] == [bits(each) for each in replayed]
        assert bool(plain[-1]) == (turn == 3)
        state = plain[3:-1]


def test_beginning_with_a_mean_sends_its_largest_rows_first_and_a_bad_one_says_nothing():
    mean = np.zeros((60, 5), np.float32)
    mean[[4, 17, 30, 31, 50, 59]] = 8.0
    part = Rows([(60, 5)], [3])
    states = []
    for library in LIBRARIES:
        empty = part.new_state(library(np.zeros(1, np.float32)))
        states.append(part.begin(empty, [library(mean)]))
        for bad in (np.nan, np.inf):
            spoilt = mean.copy()
            spoilt[0, 0] = bad
            same = part.begin(empty, [library(spoilt)])
            assert all(bits(same[name]) == bits(value) for name, value in empty.items())
        doubled = part.rescale(states[-1], 4)
        assert bits(doubled["spread"]) == bits(np.asarray(states[-1]["spread"]) * 2)
        assert int(doubled["exponents"][0]) == int(states[-1]["exponents"][0]) + 4
    for name, value in states[0].items():
        assert bits(states[1][name]) == bits(value)
    # Four places of six are for what is large, and ties go to the lower.
    assert set(agreed(part, states[0], 2).tolist()) == {0, 1, 4, 17, 30, 31}


def test_the_words_are_few():
    """Positions take as many as in Elias-Fano form, values a byte each, and a scale."""
    for (rows, columns), size, ranks in (((30000, 64), 40, 8), ((1000, 8), 3, 2)):
        (words,) = Bucket([Rows([(rows, columns)], [size])]).words(ranks)
        bits_ = size * elias_fano.low_bits(size, rows) + elias_fano.upper_bits(size, rows)
        assert words == 2 + 1 + size * ranks * columns / 4 + ranks * math.ceil(bits_ / 32)


def test_what_cannot_be_is_refused():
    matrix = np.ones((9, 2), np.float32)
    part = Rows([(9, 2)], [1])
    for rank in (None, -1, 2):
        with pytest.raises(CompressError, match="rank="):
            next(part.step(part.new_state(matrix), [matrix], ranks=2, rank=rank))
    for size in (0, 10):
        with pytest.raises(CompressError, match="expected 1 to 9"):
            Rows([(9, 2)], [size])
