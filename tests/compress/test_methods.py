"""What every method of the all-reduce promises: the same bits, nothing lost, no step half done."""

import numpy as np
import pytest
import torch
from bucket_ranks import LIBRARIES, Ranks, begin, bits, chance, new_state
from rounds import drive_one
from samples import alike
from torch.fx.experimental.proxy_tensor import make_fx

from sn_compress.allreduce.bucket import Bucket
from sn_compress.allreduce.methods.base import StepOptions
from sn_compress.allreduce.methods.dense import Dense
from sn_compress.allreduce.methods.frequencies import Frequencies, kernels_of
from sn_compress.allreduce.methods.low_rank import LowRank
from sn_compress.allreduce.methods.rows import Rows

KERNELS = [kernels_of(shape) for shape in ((8, 6, 3, 3), (3, 3, 6, 8), (5, 1, 2, 2))]
ONE_OF_EACH = {
    "low rank": LowRank([(24, 15), (40, 30), (24, 15), (9, 70)], [2, 5, 3, 1]),
    "whole": Dense([(1, 64), (1, 64), (7, 9)]),
    "rows": Rows([(60, 5)], [3]),
    "frequencies": Frequencies(KERNELS, [4] * 3),
}
TOGETHER = "all in one bucket"
METHODS = {name: [part] for name, part in ONE_OF_EACH.items()} | {
    "one row": [Rows([(1, 7)], [1])],
    "all rows": [Rows([(9, 4)], [9])],
    "one column": [Rows([(300, 1)], [5])],
    "one value": [Rows([(1, 1)], [1])],
    TOGETHER: list(ONE_OF_EACH.values()),
}
every = pytest.mark.parametrize("method", METHODS)
# Of rows most are zero, so that some are left out and some of a step come back.
SHARE = {"rows": 0.2, "one column": 0.2}


@pytest.mark.parametrize(("method", "ranks"), [
    *((method, 2) for method in METHODS), (TOGETHER, 1), (TOGETHER, 8),
    *((method, 100) for method in ("low rank", "whole", "rows")),
])  # fmt: skip
def test_libraries_share_every_bit_and_nothing_is_lost(method, ranks):
    rng = np.random.default_rng(ranks)
    group = Ranks(METHODS[method], ranks)
    shapes = group.bucket.shapes
    group.begin(chance(rng, 1, shapes)[0])
    given, got = ([np.zeros(shape) for shape in shapes] for _ in range(2))
    steps = {8: 10, 100: 3}.get(ranks, 20)
    for _ in range(steps):
        gradients = chance(rng, ranks, shapes, SHARE.get(method, 1.0))
        results = group.step(gradients)
        assert not bool(results[0].lost)
        assert not bool(results[0].damaged)
        for at, mean in enumerate(results[0].mean):
            given[at] += np.mean([own[at] for own in gradients], axis=0, dtype=np.float64)
            got[at] += np.asarray(mean)
    for at in range(len(shapes)):
        left = np.mean([own[at] for own in group.memories], axis=0, dtype=np.float64)
        # Each step rounds vectors of norm below |given| + |memory| a handful of times.
        norm = np.linalg.norm(given[at]) + max(np.linalg.norm(own[at]) for own in group.memories)
        assert np.linalg.norm(given[at] - got[at] - left) <= 8 * steps * 2**-24 * norm


@every
def test_a_state_begins_alike_in_libraries_and_a_bad_mean_changes_nothing(method):
    bucket, rng = Bucket(METHODS[method]), np.random.default_rng(7)
    (means,), states = chance(rng, 1, bucket.shapes), []
    for make in LIBRARIES:
        empty = new_state(bucket, make(np.zeros(1, np.float32)))
        for bad in (0, np.nan, np.inf, -np.inf):
            spoilt = [mean * 0 if bad == 0 else mean.copy() for mean in means]
            for mean in spoilt:
                mean[0, 0] = bad
            alike(begin(bucket, empty, [make(mean) for mean in spoilt]), empty)
        states.append(begin(bucket, empty, [make(mean) for mean in means]))
    alike(*states)
    for part, state in zip(bucket.parts, bucket._states(states[0]), strict=True):
        louder = part.rescale(state, 4)  # by an octave, in quarters
        scales = {"left", "right", "scales", "exponents"}
        for name, value in state.items():
            if name == "spread":
                value = 2 * value
            elif name in scales and not isinstance(part, Frequencies):
                value = value + 4
            alike(louder[name], value)


@every
def test_a_rank_that_joined_adds_nothing(method):
    rng = np.random.default_rng(4)
    group = Ranks(METHODS[method], 4)
    for turn in range(9):
        gradients = chance(rng, 4, group.bucket.shapes, SHARE.get(method, 1.0))
        before = [[it.copy() for it in own] for own in group.memories]
        live = range(4) if turn < 3 else (1, 3)
        joined = [rank for rank in range(4) if rank not in live]
        results = group.step(gradients, joined=joined)
        for at, mean in enumerate(results[1].mean):
            sent = sum(gradients[r][at] + before[r][at] - group.memories[r][at] for r in live) / 4
            assert np.allclose(np.asarray(mean), sent, atol=1e-5 * max(np.abs(sent).max(), 1))


@pytest.mark.parametrize(("method", "bad"), [
    *zip(METHODS, [np.nan, np.inf, -np.inf] * 3, strict=True),
    *((method, 3e38) for method in ONE_OF_EACH),
])  # fmt: skip
def test_a_step_that_one_rank_loses_is_lost_on_all_and_leaves_every_state(method, bad):
    rng = np.random.default_rng(3)
    groups = [Ranks(METHODS[method], 3) for _ in range(2)]
    for turn in range(5):
        gradients = chance(rng, 3, groups[0].bucket.shapes, SHARE.get(method, 1.0))
        if turn == 2:
            spoilt = [[own.copy() for own in mine] for mine in gradients]
            spoilt[1][-1].reshape(-1)[slice(None) if bad == 3e38 else -1] = bad
            results = groups[0].step(spoilt)
            if bad == 3e38 and not bool(results[0].lost):
                assert method != "frequencies"  # whose products are not finite
                assert all(np.isfinite(np.asarray(mean)).all() for mean in results[0].mean)
                return  # clipped, and the rest is remembered
            for rank, each in results.items():
                assert bool(each.lost)
                assert all(np.isnan(np.asarray(mean)).all() for mean in each.mean)
                alike(each.state, groups[0].states[rank])
        first, second = (group.step(gradients) for group in groups)
        assert bits(first[0].mean[0]) == bits(second[0].mean[0])


@every
def test_a_damaged_sum_is_known_as_one(method):
    rng = np.random.default_rng(9)
    group = Ranks(METHODS[method], 2)
    words = group.bucket.words(2)
    for turn in range(20):
        round_ = turn % len(words)
        damage = round_, rng.integers(words[round_]), rng.integers(31)
        results = group.step(chance(rng, 2, group.bucket.shapes), damage=damage)
        assert all(bool(each.damaged) for each in results.values())


@pytest.mark.parametrize("alone", [
    [Rows([(60, 5)], [3]), Rows([(300, 1)], [5]), Rows([(9, 4)], [9])],
    [Frequencies([kernels], [4]) for kernels in KERNELS],
], ids=["rows", "frequencies"])  # fmt: skip
def test_tensors_travel_together_as_they_do_alone(alone):
    rng = np.random.default_rng(5)
    part = type(alone[0]).together(alone)
    together, apart = Ranks([part], 2), [Ranks([each], 2) for each in alone]
    for _ in range(6):
        gradients = chance(rng, 2, part.shapes, 0.5)
        both = together.step(gradients)
        pieces = together.bucket.split(both[0].state)
        for place, group in enumerate(apart):
            one = group.step([[mine[place]] for mine in gradients])
            assert bits(one[0].mean[0]) == bits(both[0].mean[place])
            for name, value in pieces[place].items():
                assert bits(group.states[0][f"0.{name}"]) == bits(value)
        alike(together.bucket.join(pieces), both[0].state)


@pytest.mark.parametrize(("method", "exact"), [
    *((method, False) for method in METHODS), (TOGETHER, True),
])  # fmt: skip
def test_nothing_is_read_from_a_device(method, exact):
    """Torch's device `meta` has shapes and no values: whatever asks for one raises."""
    bucket = Bucket(METHODS[method])

    def zeros():
        return [torch.zeros(shape, device="meta") for shape in bucket.shapes]

    state = begin(bucket, new_state(bucket, zeros()[0]), zeros())
    pairs = zip(bucket.parts, bucket._states(state), strict=True)
    state = bucket._named(part.rescale(own, 4) for part, own in pairs)
    before = {name: (it.shape, it.dtype) for name, it in state.items()}
    for outs in (zeros(), None):
        rounds = bucket.step(state, zeros(), StepOptions(4, 3, exact=exact), outs=outs)
        sent, result = drive_one(rounds, lambda _, words: torch.zeros_like(words))
        assert [words.shape[0] for words in sent] == bucket.words(4)
        assert all(words.dtype == torch.int32 for words in sent)
        for arrays in (result.mean, result.residuals, [result.lost, result.damaged, result.sent]):
            assert all(it.device.type == "meta" for it in arrays)
        assert outs is None or all(m is out for m, out in zip(result.mean, outs, strict=True))
        assert [tuple(it.shape) for it in result.mean] == bucket.shapes
        state = result.state
        assert {name: (it.shape, it.dtype) for name, it in state.items()} == before


@pytest.mark.parametrize(("part", "near"), [
    (Rows([(30, 4)], [3]), {"rtol": 0, "atol": 0}),
    # The compiled kernels and torch's products have another order of sums.
    (Frequencies(KERNELS[:1], [4]), {"rtol": 1e-4, "atol": 1e-5}),
], ids=["rows", "frequencies"])  # fmt: skip
def test_the_ops_of_a_step_do_not_depend_on_the_numbers(part, near):
    """Recorded on zeros and run again on others, they make of those what a step makes."""
    bucket = Bucket([part])
    (shape,), count = bucket.shapes, len(bucket.words(2))
    empty = new_state(bucket, torch.zeros(1))

    def step(matrix, *others):
        named = dict(zip(empty, others[count:], strict=True))
        rounds = bucket.step(named, [matrix.clone()], StepOptions(2, 1))
        words, result = drive_one(rounds, lambda round_, _: others[round_])
        return *words, *result.residuals, *result.mean, *result.state.values(), result.lost

    zeros = [torch.zeros(words, dtype=torch.int32) for words in bucket.words(2)]
    recorded = make_fx(step)(torch.zeros(shape), *zeros, *empty.values())
    rng, state = np.random.default_rng(6), list(empty.values())
    for turn in range(5):
        values = chance(rng, 1, [shape])[0][0]
        if turn == 3:
            values[7, 1] = np.nan
        totals = list(zeros)
        for round_ in range(count):
            totals[round_] = 2 * step(torch.from_numpy(values), *totals, *state)[round_]
        given = torch.from_numpy(values), *totals, *state
        plain, replayed = step(*given), recorded(*given)
        for one, other in zip(plain, replayed, strict=True):
            assert torch.allclose(one.double(), other.double(), equal_nan=True, **near)
        assert bool(plain[-1]) == (turn == 3)
        state = list(plain[count + 2 : -1])
