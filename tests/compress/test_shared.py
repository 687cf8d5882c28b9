"""The summable exchange: digits, factors, and a model's session, on ranks in one process."""

import math

import numpy as np
import pytest
import sessions as ranks_of
from rounds import all_reduce, drive
from samples import alike

from sn_compress.allreduce.allocate import Allocation, words_of
from sn_compress.allreduce.methods.base import StepOptions
from sn_compress.allreduce.methods.low_rank import LowRank
from sn_compress.allreduce.methods.rows import Rows
from sn_compress.allreduce.state import TensorState, exchange
from sn_compress.errors import CompressError, PayloadError

SHAPE = (24, 5, 3)
N = math.prod(SHAPE)


def rounds(part, values, *, ranks, rank=None, decay=1.0):
    """The rounds of one tensor that travels alone; a damaged sum is an error of its step."""
    options = StepOptions(ranks, rank, decay)
    (mean,), verdict = yield from exchange([part], [values.astype(np.float32)], options)
    part.energy, part.error = verdict.read()[1:]
    return mean


def step(parts, values, decay=1.0):
    """One exchange among parts that are ranks 0, 1, ...: their results."""
    pairs = enumerate(zip(parts, values, strict=True))
    each = [rounds(p, v, ranks=len(parts), rank=r, decay=decay) for r, (p, v) in pairs]
    return ranks_of.run(each)[0]


def of(part):
    """A Summable that begins without a gradient."""
    (shape,) = part.shapes
    return TensorState.of(part, np.zeros(math.prod(shape), np.float32))


# What does not change in a step, and so is shared by many ranks here.
PARTS = {
    "whole": Allocation(SHAPE, 0).part(),
    "factors": Allocation(SHAPE, 2).part(),
    "rows": Rows([(N // 15, 15)], [2]),
    "values": Rows([(N, 1)], [5]),
}
some = pytest.mark.parametrize("kind", PARTS)


def made(kind):
    return of(PARTS[kind])


def gradients(rng, ranks, n=N):
    mean = rng.standard_normal(n)
    return [(mean + rng.standard_normal(n)).astype(np.float32) for _ in range(ranks)]


def reloaded(sessions, **settings):
    """A fresh pair that goes on from these sessions' states."""
    fresh = ranks_of.sessions_of(2, **settings)
    for own, saved in zip(fresh, sessions, strict=True):
        own.load_state_dict(saved.state_dict())
    return fresh


class Sums:
    """What a tensor's gradients and what its means came to, and whether nothing was lost."""

    def __init__(self, begun=0.0):
        self.given, self.got = begun, 0.0

    def add(self, values, mean):
        self.given = self.given + np.mean(values, axis=0, dtype=np.float64)
        self.got = self.got + np.asarray(mean)

    def check(self, sessions, name):
        left = np.mean([own.residual(name) for own in sessions], axis=0)
        # Sums of some float32 vectors of numbers up to about 10.
        assert np.allclose(self.given, self.got + left.reshape(-1), atol=1e-4)


def test_a_fixed_gradient_of_low_rank_is_found_and_sent_whole():
    rng = np.random.default_rng(2)
    matrix = (rng.standard_normal((30, 3)) @ rng.standard_normal((3, 50))).astype(np.float32)
    parts = [of(LowRank([(30, 50)], [3])) for _ in range(4)]
    sent = np.zeros(1500)
    for _ in range(20):
        sent += step(parts, [matrix.reshape(-1)] * 4)[0]
    # 31 levels on each side tilt each direction by some hundredths, which the next step makes good:
    # of 20 gradients less than a quarter of one is outstanding.
    assert np.linalg.norm(sent - 20 * matrix.reshape(-1)) < 0.25 * np.linalg.norm(matrix)


@some
def test_zeros_stay_zero_and_scales_survive_them(kind):
    rng = np.random.default_rng(5)
    parts = [made(kind) for _ in range(2)]
    assert not step(parts, [np.zeros(N, np.float32)] * 2)[0].any()
    for scale in (1e-9, 1.0, 1e9):
        for _ in range(4):
            values = [scale * v for v in gradients(rng, 2)]
            result = step(parts, values, decay=0.0)[0]
        mean = np.mean(values, axis=0)
        # Two directions of 15 hold more than 2/15 of any matrix, once they are the leading ones.
        # Ten values of 360, or 4 rows of 24, named a step earlier for numbers without a likeness:
        # a thirty-sixth at least, less what clipping takes.
        assert result @ mean > (0.1 if kind == "factors" else 0.015) * (mean @ mean)


@some
def test_undo_and_resume_give_the_same_bits(kind):
    rng = np.random.default_rng(6)
    parts = [made(kind) for _ in range(2)]
    for _ in range(4):
        step(parts, gradients(rng, 2))
    saved = [p.state_dict() for p in parts]
    coming = [gradients(rng, 2) for _ in range(3)]
    first = step(parts, coming[0])[0]
    for p in parts:
        p.undo()
    expected = [step(parts, values)[0] for values in coming]
    assert (expected[0] == first).all()
    resumed = [made(kind) for _ in range(2)]
    for p, state in zip(resumed, saved, strict=True):
        p.load_state_dict(state)
    for values, result in zip(coming, expected, strict=True):
        assert (step(resumed, values)[0] == result).all()


def test_states_that_do_not_fit_change_nothing():
    part = made("factors")
    good = part.state_dict()
    for bad in (
        {},
        {**good, "memory": good["memory"][:-1]},
        {**good, "memory": np.full(N, np.nan)},
        of(Allocation(SHAPE, 3).part()).state_dict(),
        made("whole").state_dict(),
    ):
        with pytest.raises(CompressError, match=r"saved"):
            part.load_state_dict(bad)
    assert not part.memory.any()


def test_an_embedding_goes_by_rows_and_a_dense_matrix_by_directions():
    rng = np.random.default_rng(11)
    sessions, sums = ranks_of.sessions_of(2), Sums()
    shapes = {"table": (800, 32), "thin": (64, 48)}
    for turn in range(12):
        table = [np.zeros((800, 32), np.float32) for _ in sessions]
        for t in table:
            t[rng.choice(800, 12, replace=False)] = rng.standard_normal((12, 32))
        base = np.outer(rng.standard_normal(64), rng.standard_normal(48))
        thin = [base + 0.1 * rng.standard_normal(base.shape) for _ in sessions]
        for name, values in (("table", table), ("thin", thin)):
            vectors = [v.astype(np.float32).reshape(-1) for v in values]
            mean, _ = ranks_of.step(sessions, name, shapes[name], vectors)
            if name == "table":
                sums.add(vectors, mean)
        if turn in (0, 6):  # before the choice, and after
            sessions = reloaded(sessions)
    kinds = {name: type(t.summable.part) for name, t in sessions[0].tensors.items()}
    assert kinds == {"table": Rows, "thin": LowRank}
    spent = sum(sum(sessions[0].words(name, 2)) for name in shapes)
    assert spent <= (800 * 32 + 64 * 48) / 20
    sums.check(sessions, "table")


def begun(shape, mean, **settings):
    """A session whose one tensor has had a dense step with this mean."""
    (session,) = ranks_of.sessions_of(1, **settings)
    session.dense("w", shape)
    session.dense_values("w", mean)
    session.learn("w", mean)
    return session


def test_without_a_rank_nothing_goes_by_rows_and_shapes_may_not_change():
    mean = np.zeros((800, 32), np.float32)
    mean[::100] = 1
    session = begun((800, 32), mean.reshape(-1))
    next(ranks_of.by_hand(session, ["w"], [mean.reshape(-1)], ranks=2))
    assert isinstance(session.tensors["w"].summable.part, LowRank)
    with pytest.raises(CompressError, match="before it was"):
        session.dense("w", (800, 31))


def test_what_goes_plain_counts_for_the_ratio():
    mean = np.random.default_rng(12).standard_normal(64 * 96).astype(np.float32)

    def words(small):
        session = begun((64, 96), mean)
        for index in range(small):
            assert not session.takes(f"bias {index}", (64,))
            assert not session.takes(f"least {index}", (9, 7))
        sent = []
        for each in (session, *reloaded([session] * 2)):
            next(ranks_of.by_hand(each, ["w"], [mean], ranks=2))
            sent.append(sum(each.words("w", 2)))
        assert len(set(sent)) == 1
        return sent[0]

    for small in (0, 1):
        plain = small * (64 + 63)
        budget = (mean.size + plain) / 20 - plain
        # A direction is 2 heads, 2 scales and 160 digits: 46 words are all that may be left.
        assert budget - 46 < words(small) <= budget
    # Where nothing is left, a direction still travels.
    assert words(10) == sum(words_of((64, 96), 1, 2))


def test_after_a_restart_with_other_shapes_what_was_not_sent_travels():
    rng = np.random.default_rng(13)
    how = {"ratio": 10, "min_elements": 200}
    sessions = ranks_of.sessions_of(2, **how)

    def one_step(shape):
        values = gradients(rng, 2, math.prod(shape))
        mean, _ = ranks_of.step(sessions, "a", shape, values)
        return values, mean

    assert not sessions[0].remembers("a")
    for _ in range(3):
        one_step((40, 30))
    cut = [s.residual("a").reshape(40, 30)[:20] for s in sessions]
    assert all(np.abs(left).max() > 0 for left in cut)
    sessions[0].takes("gone", (10,))
    for s, left in zip(sessions, cut, strict=True):
        s.restart({"a": left})
    before, sessions = sessions, reloaded(sessions, **how)
    for s, other in zip(before, sessions, strict=True):
        np.testing.assert_array_equal(other.residual("a"), s.residual("a"))
        assert not other.state_dict()["left_out"]
    sums = Sums(np.mean(cut, axis=0).reshape(-1).astype(np.float64))
    for _ in range(4):
        sums.add(*one_step((20, 30)))
    sums.check(sessions, "a")


@some
def test_a_damaged_sum_is_an_error_and_changes_nothing(kind):
    rng = np.random.default_rng(9)
    part, twin = made(kind), made(kind)
    for turn in range(30):
        before = part.state_dict()
        values = gradients(rng, 1)[0]
        spoilt = turn % part.part.rounds

        def combine(round_, words, spoilt=spoilt):
            flip = rng.integers(words[0].size), rng.integers(31)
            return all_reduce(words, flip if round_ == spoilt else None)

        with pytest.raises(PayloadError, match="corrupt in transit"):
            drive([rounds(part, values, ranks=1, rank=0)], combine)
        alike(part.state_dict(), before)
        # And a step that is begun anew is as if there had been none before.
        assert (step([part], [values])[0] == step([twin], [values])[0]).all()
    # As is one of NaN, which is an error of nobody's.
    lost, values = gradients(rng, 2)
    lost[5] = np.nan
    assert np.isnan(step([part], [lost])[0]).all()
    assert (step([part], [values])[0] == step([twin], [values])[0]).all()
