"""Sizes of tensors: chosen by energy per word, and taken by all ranks from one of them."""

import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch
from rounds import all_reduce
from sessions import dense, exchange, exchange_all, rounds_of, run, sessions_of

from sn_compress.allreduce.allocate import (
    Allocation,
    EnergyCurve,
    allocate,
    decode_sizes,
    encode_sizes,
    words_of,
)
from sn_compress.allreduce.bucket import Bucket
from sn_compress.allreduce.methods.dense import Dense
from sn_compress.allreduce.methods.low_rank import LowRank
from sn_compress.allreduce.methods.rows import Rows
from sn_compress.collective import Gradient
from sn_compress.errors import CompressError, PayloadError

SIZES = {
    "table": Allocation((800, 32), 5, "rows"),
    "thin": Allocation((64, 48), 7),
    "bias": Allocation((100,), 0),
}
SHAPES = {name: size.shape for name, size in SIZES.items()}


def test_directions_go_where_energy_is_within_the_budget():
    rng = np.random.default_rng(7)
    thin = np.outer(rng.standard_normal(64), rng.standard_normal(96)).astype(np.float32)
    noise = rng.standard_normal((64, 96)).astype(np.float32)
    curves = {
        "thin": EnergyCurve.of(thin.reshape(-1), (64, 96)),
        "noise": EnergyCurve.of(noise.reshape(-1), (64, 96)),
        "bias": EnergyCurve.of(noise[0], (96,)),
    }
    for budget in (300, 700, 2000):
        chosen = allocate(curves, budget, 8)
        spent = sum(sum(words_of(curves[n].shape, r, 8)) for n, r in chosen.items())
        assert spent <= budget
        assert chosen["bias"] == 0
        assert chosen["thin"] <= 2 <= chosen["noise"]
    assert allocate(curves, 10**6, 8) == {"thin": 64, "noise": 64, "bias": 0}


@pytest.mark.parametrize("shape", [(2000, 260), (40, 30)])  # sought at random, and exactly
def test_a_curve_shows_the_shares_of_the_singular_values(shape):
    rng = np.random.default_rng(1)
    left, right = (np.linalg.qr(rng.standard_normal((side, 12)))[0] for side in shape)
    shares = 2.0 ** -np.arange(12)
    mean = (left * np.sqrt(shares)) @ right.T
    curve = EnergyCurve.of(mean.astype(np.float32).reshape(-1), shape)
    np.testing.assert_allclose(curve.shares[:12], shares / shares.sum(), atol=1e-5)
    assert curve.shares[12:].sum() < 1e-5


def test_words_are_those_that_a_part_sends():
    sizes = [*SIZES.values(), Allocation((7, 2), 7, "rows"), Allocation((24, 5, 3), 1)]
    for size, ranks in itertools.product(sizes, (1, 2, 8, 100)):
        expected = words_of(size.shape, size.size, ranks, size.method)
        assert Bucket([size.part()]).words(ranks) == expected
    assert [type(size.part()) for size in SIZES.values()] == [Rows, LowRank, Dense]


def test_the_largest_number_of_ranks_does_not_overflow():
    ranks, name = 2047, {"table": SIZES["table"]}
    total = sum(
        encode_sizes(name, ranks=ranks, rank=rank).astype(np.int64) for rank in range(ranks)
    )
    assert np.abs(total).max() < 2**31
    assert decode_sizes(total.astype(np.int32), {"table": (800, 32)}, ranks=ranks) == name


def test_damaged_sizes_are_an_error():
    words = sum(encode_sizes(SIZES, ranks=3, rank=rank) for rank in range(3))
    for place, bit in itertools.product(range(words.size), range(32)):
        total = words.copy()
        total.view(np.uint32)[place] ^= np.uint32(1 << bit)
        with pytest.raises((PayloadError, CompressError), match=r"corrupt|different tensors"):
            decode_sizes(total, SHAPES, ranks=3)


def test_sizes_that_ranks_cannot_mean_are_refused():
    first = encode_sizes(SIZES, ranks=2, rank=0)
    other = encode_sizes({**SIZES, "thin": Allocation((48, 64), 7)}, ranks=2, rank=1)
    with pytest.raises(CompressError, match="ranks allocate different tensors"):
        decode_sizes(first + other, SHAPES, ranks=2)
    with pytest.raises(PayloadError, match="0 ranks replied"):
        decode_sizes(np.zeros_like(first), SHAPES, ranks=2)
    with pytest.raises(CompressError, match="got 9 words of sizes; expected 5"):
        decode_sizes(first, {"thin": (64, 48)}, ranks=2)
    # Two that say they are rank 0: their sizes add up to what no tensor has.
    with pytest.raises(PayloadError, match="1 were received"):
        decode_sizes(first + first, SHAPES, ranks=2)
    with pytest.raises(CompressError, match="expected 0 to 1"):
        encode_sizes(SIZES, ranks=2, rank=2)


def exact_sessions(ranks, **settings):
    """The last product has the same bits in NumPy and in torch."""
    sessions = sessions_of(ranks, **settings)
    for own in sessions:
        own.exact = True
    return sessions


def dense_step(sessions, gradients, shapes):
    for name, shape in shapes.items():
        assert all(each.dense(name, shape) for each in sessions)
        dense(sessions, name, [values[name] for values in gradients])


def gradients_of(rng, ranks, shapes, *, torch_too=True):
    """Ranks of NumPy and of torch by turns; a table of few rows among the tensors."""
    found = []
    for rank in range(ranks):
        values = {}
        for name, shape in shapes.items():
            dense = rng.standard_normal((shape[0], math.prod(shape[1:])))
            if name == "table":
                dense *= rng.random((shape[0], 1)) < 0.005
            if name == "thin":
                dense = dense * 0.1 + np.outer(np.arange(shape[0]), np.arange(dense.shape[1]))
            flat = dense.astype(np.float32).reshape(-1)
            values[name] = torch.from_numpy(flat) if torch_too and rank % 2 else flat
        found.append(values)
    return found


@pytest.fixture
def disturbed(monkeypatch):
    """Curves that differ from session to session, far more than rounding would make them."""
    plain, rng = EnergyCurve.of, np.random.default_rng(3)

    def of(mean, shape):
        curve = plain(mean, shape)
        shares = np.sort(curve.shares * rng.uniform(0.1, 10, curve.shares.size))[::-1]
        return EnergyCurve(curve.shape, shares * (curve.shares.sum() / shares.sum()), curve.method)

    monkeypatch.setattr(EnergyCurve, "of", of)


def note_proposed(tensors, proposed):
    proposed += [tensor.proposed for tensor in tensors]


def test_ranks_that_compute_other_sizes_agree_on_one_ranks(disturbed):
    rng = np.random.default_rng(4)
    ranks = 4
    noise = {"wide": (30, 200), "tall": (200, 30), "square": (80, 75)}
    shapes = {"table": (800, 32), "thin": (64, 48), **noise, "bias": (100,)}
    sessions = exact_sessions(ranks, every=4, min_elements=200)
    sizes_told, apart, kinds = 3 + ranks, 0, set()
    for turn in range(6):
        gradients = gradients_of(rng, ranks, shapes)
        if turn in (0, 4):
            dense_step(sessions, gradients, shapes)
            continue
        for name, shape in shapes.items():
            assert not any(own.dense(name, shape) for own in sessions)
            rounds = rounds_of(sessions, name, [values[name] for values in gradients])
            proposed = []
            tensors = [own.tensors[name] for own in sessions]
            means, seen = run(rounds, begun=partial(note_proposed, tensors, proposed))
            assert len({np.asarray(mean).tobytes() for mean in means}) == 1
            (size,) = {own.tensors[name].size for own in sessions}
            if turn in (1, 5):
                assert size == proposed[0]
                apart += len(set(proposed)) > 1
            assert seen == sessions[0].words(name, ranks)
            plain = words_of(shape, size.size, ranks, size.method)
            assert seen == ([sizes_told] if turn in (1, 5) else []) + plain
            kind = type(sessions[0].tensors[name].summable.part)
            kinds.add(kind)
            method = {Rows: "rows", LowRank: "low_rank", Dense: "whole"}[kind]
            assert sessions[0].method(name) == method
    assert apart > 3  # or this would show nothing
    assert kinds == {Rows, LowRank, Dense}


def test_many_tensors_agree_in_one_round(disturbed):
    rng = np.random.default_rng(5)
    shapes = {"table": (800, 32), "thin": (64, 48), "wide": (30, 200)}
    sessions = exact_sessions(3)
    dense_step(sessions, gradients_of(rng, 3, shapes), shapes)
    for turn in range(2):
        _, seen = exchange_all(sessions, list(shapes), gradients_of(rng, 3, shapes))
        assert len(seen) == (3 if turn == 0 else 2)
        assert turn or seen[0] == 3 + 3 * 3
    assert len({tuple(own.tensors[name].size for name in shapes) for own in sessions}) == 1


def test_where_the_first_rank_has_joined_the_next_one_decides(disturbed):
    rng, shapes = np.random.default_rng(6), {"wide": (30, 200)}
    sessions = exact_sessions(3, ratio=5)
    dense_step(sessions, gradients_of(rng, 3, shapes), shapes)
    rounds = rounds_of(sessions, "wide", [it["wide"] for it in gradients_of(rng, 3, shapes)])
    second = []
    run(rounds[1:], begun=partial(note_proposed, [sessions[1].tensors["wide"]], second))
    assert [own.tensors["wide"].size for own in sessions[1:]] == second * 2


def test_what_is_sent_is_what_the_caller_handed_over(disturbed):
    """A rim may lend its buffer: by the time of the second round it may hold other numbers."""
    rng = np.random.default_rng(8)
    shapes = {"wide": (30, 200)}
    pairs = [exact_sessions(2, ratio=5) for _ in range(2)]
    first, second = gradients_of(rng, 2, shapes), gradients_of(rng, 2, shapes)
    found = []
    for spoil, sessions in enumerate(pairs):
        # The same choice of both pairs, by their rank 0.
        dense_step(sessions, first, shapes)
        lent = [{"wide": np.array(np.asarray(values["wide"]))} for values in second]
        rounds = [
            own.rounds([Gradient("wide", (6000,), values["wide"].reshape(-1))], ranks=2, rank=rank)
            for rank, (own, values) in enumerate(zip(sessions, lent, strict=True))
        ]
        for own in sessions:
            own.tensors["wide"].proposed = Allocation((30, 200), 6)
        totals = all_reduce([next(each)[0].words for each in rounds])
        if spoil:
            for values in lent:
                values["wide"][:] = 7
        words = [r.send([total])[0].words for r, total in zip(rounds, totals, strict=True)]
        found.append([np.asarray(each).tobytes() for each in words])
    assert found[0] == found[1]


def test_a_step_taken_back_behind_the_choice_is_chosen_again(disturbed):
    rng, shapes = np.random.default_rng(9), {"thin": (64, 48), "wide": (30, 200)}
    sessions = exact_sessions(2)
    dense_step(sessions, gradients_of(rng, 2, shapes), shapes)
    for own in sessions:
        own.commit()
    gradients = gradients_of(rng, 2, shapes)
    for turn, rounds in enumerate((3, 3, 2)):
        for name in shapes:
            _, seen = exchange(sessions, name, [values[name] for values in gradients])
            assert len(seen) == rounds
        assert sessions[0].tensors["wide"].size == sessions[1].tensors["wide"].size
        for own in sessions:
            own.commit() if turn else own.undo()


def test_a_tensor_without_energy_travels_whole_until_it_has_some():
    """As where a loss starts late: then dense steps begin, and sizes are chosen, on all ranks."""
    rng, shapes = np.random.default_rng(9), {"early": (128, 96), "late": (96, 64)}
    sessions = exact_sessions(2)

    def gradients(started):
        found = gradients_of(rng, 2, shapes, torch_too=False)
        if not started:
            for own in found:
                own["late"] = np.zeros_like(own["late"])
        return found

    dense_step(sessions, gradients(False), shapes)
    for step in range(3):
        values = gradients(step == 2)
        for name in shapes:
            assert not any(own.dense(name, shapes[name]) for own in sessions), (step, name)
        found, _ = exchange_all(sessions, list(shapes), values)
        for own in sessions:
            own.commit()
        assert [own.method("late") for own in sessions] == ["whole"] * 2
        assert sessions[0].tensors["early"].size.size > 0
        # What is beyond the window of words for zeros goes along with the dense step.
        left = np.mean([own.residual("late") for own in sessions], axis=0)
        true = np.mean([own["late"] for own in values], axis=0)
        np.testing.assert_allclose(found[0][1] + left, true, atol=1e-5)
    values = gradients(True)
    assert not sessions[0].dense("early", shapes["early"])
    dense_step(sessions, [{"late": own["late"]} for own in values], {"late": shapes["late"]})
    for own in sessions:
        assert not own.dense("late", shapes["late"])
    exchange_all(sessions, list(shapes), gradients(True))
    assert {own.method("late") for own in sessions} == {"low_rank"}
    assert not any(own.dense("late", shapes["late"]) for own in sessions)
