"""The summable exchange: digits, factors, and a model's session, on ranks in one process."""

import ast
import math
from functools import lru_cache

import numpy as np
import pytest
import sessions as ranks_of

from sn_compress.allreduce.allocate import Allocation, words_of
from sn_compress.allreduce.exchange import AllReduceExchange
from sn_compress.allreduce.methods.low_rank import LowRank
from sn_compress.allreduce.methods.rows import Rows
from sn_compress.allreduce.state import TensorState, exchange
from sn_compress.errors import CompressError, PayloadError

SHAPE = (24, 5, 3)
N = math.prod(SHAPE)


def rounds(part, values, *, ranks, rank=None, decay=1.0):
    """The rounds of one tensor that travels alone; a damaged sum is an error of its step."""
    (mean,), verdict = yield from exchange(
        [part], [values.astype(np.float32)], ranks=ranks, rank=rank, decay=decay
    )
    part.energy, part.error = verdict.read()[1:]
    return mean


def step(parts, values, *, ranks=None, joined=(), decay=1.0):
    """One exchange among parts that are ranks 0, 1, ...: the results of those that live."""
    pairs = enumerate(zip(parts, values, strict=True))
    ranks = ranks or len(parts)
    each = [rounds(p, v, ranks=ranks, rank=r, decay=decay) for r, (p, v) in pairs]
    return list(ranks_of.run(each, joined)[0].values())


def of(part, start=None):
    """A Summable that begins with a gradient that all ranks know, or with none."""
    (shape,) = part.shapes
    return TensorState.of(part, np.zeros(math.prod(shape), np.float32) if start is None else start)


def made(kind):
    """A Summable of a size, or one of rows."""
    return of(_part(kind if isinstance(kind, int) else repr(kind)))


@lru_cache
def _part(kind):
    """What does not change in a step, and so is shared by many ranks here."""
    return (
        Allocation(SHAPE, kind).part() if isinstance(kind, int) else Rows(**ast.literal_eval(kind))
    )


ROWS = {"shapes": [(N // 15, 15)], "sizes": [2]}
VALUES = {"shapes": [(N, 1)], "sizes": [5]}
some = pytest.mark.parametrize(
    "kind", [0, 2, ROWS, VALUES], ids=["whole", "factors", "rows", "values"]
)


def gradients(rng, ranks, n=N, common=1.0):
    mean = rng.standard_normal(n)
    return [(common * mean + rng.standard_normal(n)).astype(np.float32) for _ in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 20, 100])
@pytest.mark.parametrize(
    "kind", [0, 1, 4, 15, ROWS, VALUES], ids=["whole", "1", "4", "15", "rows", "values"]
)
def test_nothing_is_lost_and_all_ranks_agree(ranks, kind):
    """Sum of means + mean of memories = sum of mean gradients, up to float32 rounding."""
    rng = np.random.default_rng(ranks)
    parts = [made(kind) for _ in range(ranks)]
    given_, got = np.zeros(N), np.zeros(N)
    steps = 12
    for _ in range(steps):
        values = gradients(rng, ranks)
        results = step(parts, values)
        assert all((r == results[0]).all() for r in results)
        given_ += np.mean(values, axis=0, dtype=np.float64)
        got += results[0]
    memory = np.mean([p.memory for p in parts], axis=0, dtype=np.float64)
    # Each step rounds vectors of norm below |given| + |memory| a handful of times.
    norm = np.linalg.norm(given_) + max(np.linalg.norm(p.memory) for p in parts)
    assert np.linalg.norm(given_ - got - memory) <= 8 * steps * 2**-24 * norm


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
@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_not_finite_on_one_rank_reaches_all_and_stays_out_of_every_state(kind, bad):
    rng = np.random.default_rng(3)
    parts = [made(kind) for _ in range(3)]
    twins = [made(kind) for _ in range(3)]
    for turn in range(6):
        values = gradients(rng, 3)
        if turn == 3:
            spoilt = [v.copy() for v in values]
            spoilt[1][5:9] = bad
            if bad == 3e38:  # finite, but its products are not
                spoilt[1][:] = bad
            results = step(parts, spoilt)
            if np.isfinite(results[0]).all():
                assert bad == 3e38  # clipped; the rest is remembered
                return
            assert all(np.isnan(r).all() for r in results)
        assert (step(parts, values)[0] == step(twins, values)[0]).all()


@pytest.mark.parametrize("kind", [0, 2, ROWS, VALUES])
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
        assert result @ mean > (0.1 if kind == 2 else 0.015) * (mean @ mean)


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
    part = made(2)
    good = part.state_dict()
    for bad in (
        {},
        {**good, "memory": good["memory"][:-1]},
        {**good, "memory": np.full(N, np.nan)},
        made(3).state_dict(),
        made(0).state_dict(),
    ):
        with pytest.raises(CompressError, match=r"saved"):
            part.load_state_dict(bad)
    assert not part.memory.any()


def test_an_embedding_goes_by_rows_and_a_dense_matrix_by_directions():
    rng = np.random.default_rng(11)
    sessions = [AllReduceExchange(ratio=20, warmup=1) for _ in range(2)]
    shapes = {"table": (800, 32), "thin": (64, 48)}
    given_, got = np.zeros(800 * 32), np.zeros(800 * 32)
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
                given_ += np.mean(vectors, axis=0)
                got += mean
        if turn in (0, 6):  # before the choice, and after
            states = [s.state_dict() for s in sessions]
            sessions = [AllReduceExchange(ratio=20, warmup=1) for _ in sessions]
            for s, state in zip(sessions, states, strict=True):
                s.load_state_dict(state)
    kinds = {name: type(t.summable.part) for name, t in sessions[0].tensors.items()}
    assert kinds == {"table": Rows, "thin": LowRank}
    spent = sum(sum(sessions[0].words(name, 2)) for name in shapes)
    assert spent <= (800 * 32 + 64 * 48) / 20
    left = np.mean([s.tensors["table"].summable.memory for s in sessions], axis=0)
    assert np.allclose(given_, got + left, atol=1e-4)


def test_without_a_rank_nothing_goes_by_rows():
    session = AllReduceExchange(ratio=20, warmup=1)
    session.dense("table", (800, 32))
    mean = np.zeros((800, 32), np.float32)
    mean[::100] = 1
    session.dense_values("table", mean.reshape(-1))
    session.learn("table", mean)
    next(ranks_of.by_hand(session, ["table"], [mean.reshape(-1)], ranks=2))
    assert isinstance(session.tensors["table"].summable.part, LowRank)


def test_a_model_begins_dense_then_shares_and_comes_back_to_dense():
    rng = np.random.default_rng(8)
    sessions = [AllReduceExchange(ratio=10, warmup=2, every=5, min_elements=200) for _ in range(2)]
    shapes = {"a": (40, 30), "b": (100,)}
    kinds, given_, got = [], np.zeros(1200), np.zeros(1200)
    for step in range(14):
        for name, shape in shapes.items():
            values = gradients(rng, 2, math.prod(shape))
            mean, dense = ranks_of.step(sessions, name, shape, values)
            if name == "a":
                kinds.append("d" if dense else "s")
                given_ += np.mean(values, axis=0)
                got += mean
        if step == 7:  # a fresh pair goes on from saved states
            states = [s.state_dict() for s in sessions]
            sessions = [
                AllReduceExchange(ratio=10, warmup=2, every=5, min_elements=200) for _ in range(2)
            ]
            for s, state in zip(sessions, states, strict=True):
                s.load_state_dict(state)
    assert "".join(kinds) == "ddssssdssssdss"
    left = np.mean([s.tensors["a"].summable.memory for s in sessions], axis=0)
    assert np.allclose(given_, got + left, atol=1e-4)


def test_what_goes_plain_counts_for_the_ratio():
    mean = np.random.default_rng(12).standard_normal(64 * 96).astype(np.float32)

    def words(small):
        session = AllReduceExchange(ratio=20, warmup=1)
        assert session.takes("large", (64, 96))
        for index in range(small):
            assert not session.takes(f"bias {index}", (64,))
            assert not session.takes(f"least {index}", (9, 7))
        session.dense("large", (64, 96))
        session.dense_values("large", mean)
        session.learn("large", mean)
        resumed = AllReduceExchange(ratio=20, warmup=1)
        resumed.load_state_dict(session.state_dict())
        for each in (session, resumed):
            next(ranks_of.by_hand(each, ["large"], [mean], ranks=2))
        assert session.words("large", 2) == resumed.words("large", 2)
        return sum(session.words("large", 2))

    for small in (0, 1):
        plain = small * (64 + 63)
        budget = (mean.size + plain) / 20 - plain
        # A direction is 2 heads, 2 scales and 160 digits: 46 words are all that may be left.
        assert budget - 46 < words(small) <= budget
    # Where nothing is left, a direction still travels.
    assert words(10) == sum(words_of((64, 96), 1, 2))


def test_after_a_restart_with_other_shapes_what_was_not_sent_travels():
    rng = np.random.default_rng(13)
    sessions = [AllReduceExchange(ratio=10, warmup=1, min_elements=200) for _ in range(2)]

    def one_step(shape):
        values = gradients(rng, 2, math.prod(shape))
        mean, _ = ranks_of.step(sessions, "a", shape, values)
        return np.mean(values, axis=0), mean

    assert not sessions[0].remembers("a")
    for _ in range(3):
        one_step((40, 30))
    cut = [s.residual("a").reshape(40, 30)[:20] for s in sessions]
    assert all(np.abs(left).max() > 0 for left in cut)
    sessions[0].takes("gone", (10,))
    for s, left in zip(sessions, cut, strict=True):
        s.restart({"a": left})
    resumed = [AllReduceExchange(ratio=10, warmup=1, min_elements=200) for _ in range(2)]
    for s, other in zip(sessions, resumed, strict=True):
        other.load_state_dict(s.state_dict())
        np.testing.assert_array_equal(other.residual("a"), s.residual("a"))
        assert not other.state_dict()["left_out"]
    sessions = resumed
    given_, got = np.mean(cut, axis=0).reshape(-1).astype(np.float64), np.zeros(600)
    for _ in range(4):
        values, mean = one_step((20, 30))
        given_ += values
        got += mean
    left = np.mean([s.residual("a") for s in sessions], axis=0)
    # Sums of five float32 vectors of numbers up to about 10.
    assert np.allclose(given_, got + left, atol=1e-4)


def test_shapes_may_not_change():
    session = AllReduceExchange(ratio=10)
    session.dense("a", (4, 4))
    with pytest.raises(CompressError, match="before it was"):
        session.dense("a", (4, 5))


@some
@pytest.mark.parametrize("round_", [0, 1])
def test_a_damaged_sum_is_an_error_and_changes_nothing(kind, round_):
    rng = np.random.default_rng(9)
    part, twin = made(kind), made(kind)
    for _ in range(200):
        before = part.state_dict()
        values = gradients(rng, 1)[0]
        steps = rounds(part, values, ranks=1, rank=0)
        words = next(steps)
        if round_ and part.part.rounds == 2:
            words = steps.send(words)
        words = words.copy()
        words[rng.integers(words.size)] ^= np.int32(1 << rng.integers(31))
        with pytest.raises(PayloadError, match="corrupt in transit"):
            steps.send(steps.send(words))
        after = part.state_dict()
        assert (after["memory"] == before["memory"]).all()
        for name, value in before["shared"].items():
            assert (after["shared"][name] == value).all()
        # And a step that is begun anew is as if there had been none before.
        assert (step([part], [values])[0] == step([twin], [values])[0]).all()
