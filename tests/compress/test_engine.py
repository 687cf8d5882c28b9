"""The engine without a framework: two of them in one process, and collectives that add arrays."""

from contextlib import suppress

import numpy as np
import pytest
import torch

from sn_compress import AutoCompression, CompressError, FFTCompression, LowRankCompression
from sn_compress.allreduce import exchange as shared_exchange
from sn_compress.collective import Gradient
from sn_compress.engine.engine import Engine
from sn_compress.engine.engine_state import load_state_dict, state_dict
from sn_compress.prediction.tuning import Tuner
from sn_compress.schedule import Constant, Warmup

RANKS = 2
SHAPES = {"wide": (40, 60), "kernel": (16, 8, 3, 3), "bias": (60,), "count": (3, 700)}
WAYS = {
    "frequencies": FFTCompression.using(theta=0.9),
    "sums": LowRankCompression.using(ratio=8, warmup=2, every=5),
}


class Scaler:
    scale = 8.0

    def get_scale(self):
        return self.scale


class Chosen:
    """A tuner that has settled, on what the test says."""

    settled = True

    def __init__(self, method):
        self.choice = method

    def method(self, name, shape):
        return self.choice


def engines(compression, **options):
    return [
        Engine(compression.settings, 1, stock="DDP", tuner=Tuner, **options) for _ in range(RANKS)
    ]


def twice(name, words):
    """The sum over ranks that all bring the same."""
    return words * RANKS


def noise(seed, shapes=SHAPES):
    """For each rank, a gradient of every tensor; of low rank and noise."""
    found = []
    for rank in range(RANKS):
        rng = np.random.default_rng([7, seed, rank])
        shared = np.random.default_rng([8, seed])
        values = {}
        for name, shape in shapes.items():
            rows, columns = shape[0], int(np.prod(shape[1:]))
            strong = shared.standard_normal((rows, 1)) @ shared.standard_normal((1, columns))
            small = rng.standard_normal((rows, columns)) / 4
            values[name] = (strong + small).astype(np.float32).reshape(-1)
        found.append(values)
    return found


def carried(asked):
    """What each rank is sent, for what all asked to carry."""
    results = []
    for each in zip(*asked, strict=True):
        (kind,) = {carry.kind for carry in each}
        words = [carry.words for carry in each]
        assert len({(one.dtype, one.size) for one in words}) == 1
        joined = np.concatenate(words) if kind == "gather" else np.add.reduce(words)
        results.append([joined.copy() for _ in words])
    return [list(own) for own in zip(*results, strict=True)]


def step(all_, values, shapes=SHAPES, total=twice):
    """One step: the values become the means. Returns how they travelled, and collectives."""
    given = [[Gradient(name, shape, own[name]) for name, shape in shapes.items()] for own in values]
    ways = [
        engine.sort(each, ranks=RANKS, total=total)
        for engine, each in zip(all_, given, strict=True)
    ]
    named = [
        {kind: [g.name for g in getattr(way, kind)] for kind in ("plain", "dense", "coded")}
        for way in ways
    ]
    assert all(each == named[0] for each in named)
    for place in range(len(ways[0].dense)):
        sent = [e.whole(way.dense[place]) for e, way in zip(all_, ways, strict=True)]
        for way, engine in zip(ways, all_, strict=True):
            way.dense[place].values[:] = np.mean(sent, axis=0)
            engine.learn(way.dense[place].name, way.dense[place].values)
    for place in range(len(ways[0].plain)):
        mean = np.mean([way.plain[place].values for way in ways], axis=0)
        for way in ways:
            way.plain[place].values[:] = mean
    calls = 0
    if ways[0].coded:
        rounds = [
            e.rounds(w.coded, ranks=RANKS, rank=r)
            for r, (e, w) in enumerate(zip(all_, ways, strict=True))
        ]
        asked = [next(each) for each in rounds]
        while asked:
            calls += len(asked[0])
            results = carried(asked)
            asked = []
            for each, own in zip(rounds, results, strict=True):
                with suppress(StopIteration):
                    asked.append(each.send(own))
            assert len(asked) in (0, RANKS)
    for name in shapes:
        assert all(own[name].tobytes() == values[0][name].tobytes() for own in values), name
    return named[0], calls


@pytest.mark.parametrize("way", WAYS)
def test_all_that_went_in_comes_out_in_time(way):
    """Bit-equal on all ranks; a bias is exact; what is missing of a matrix is remembered."""
    both = engines(WAYS[way])
    due = {name: np.zeros(int(np.prod(shape))) for name, shape in SHAPES.items()}
    paid = {name: np.zeros(int(np.prod(shape))) for name, shape in SHAPES.items()}
    kinds = []
    for seed in range(9):
        values = noise(seed)
        bias = np.mean([own["bias"] for own in values], axis=0)
        for name in SHAPES:
            due[name] += np.mean([own[name] for own in values], axis=0, dtype=np.float64)
        sorted_, calls = step(both, values)
        for name in SHAPES:
            paid[name] += values[0][name]
        assert "bias" in sorted_["plain"]
        np.testing.assert_array_equal(values[0]["bias"], bias)
        kinds.append("d" if sorted_["dense"] else "s")
        assert calls == (0 if kinds[-1] == "d" else 1 if way == "frequencies" else calls)
    assert "".join(kinds) == ("s" * 9 if way == "frequencies" else "ddssssdss")
    for name in ("wide", "kernel", "count"):
        left = np.mean([engine.residual(name) for engine in both], axis=0)
        assert np.linalg.norm(left) > 0.1
        # Nine float32 sums, and a transform there and back of values up to 20.
        np.testing.assert_allclose(paid[name] + left, due[name], atol=1e-4)
    assert not both[0].remembers("bias")
    report = both[0].report()
    assert report["steps"] == 9
    assert report["plain"] == 1
    assert report["ratio"] > (4 if way == "frequencies" else 2)
    if way == "frequencies":
        assert report["ratio_after_warmup"] == report["ratio"]
    else:
        # Of nine steps three are dense: bytes so far are those and six times what is settled.
        dense, settled = report["dense_bytes"], report["dense_bytes"] / report["ratio_after_warmup"]
        assert report["payload_bytes"] == pytest.approx((3 * dense + 6 * settled) / 9, rel=1e-3)
    assert report["codec_s"] > 0
    assert report["exchange_s"] == 0  # of the rim, and there is none here


def test_vectors_below_64_ki_travel_plain_and_matrices_do_not():
    shapes = {
        "vector": (65535,), "upright": (60000, 1), "long": (65536,), "matrix": (32, 32),
        "small": (31, 33), "number": (),
    }  # fmt: skip
    for compression in (FFTCompression, LowRankCompression.using(warmup=1)):
        (engine,) = engines(compression)[:1]
        given = [Gradient(n, s, np.ones(int(np.prod(s)), np.float32)) for n, s in shapes.items()]
        way = engine.sort(given, ranks=1, total=twice)
        assert [g.name for g in way.plain] == ["vector", "upright", "small", "number"]
        assert engine.report()["plain"] == 6 if way.dense else 4


@pytest.mark.parametrize("way", WAYS)
def test_a_step_that_the_scaler_skips_is_taken_back(way):
    """And memories are brought to the new scale; a larger scale takes nothing back."""
    scaler = Scaler()
    both = engines(WAYS[way], scaler=scaler)
    # A spectrum's memory is multiplied as the values that it stands for.
    near = {"rtol": 1e-5, "atol": 1e-5} if way == "frequencies" else {"rtol": 0, "atol": 0}

    def left():
        return [engine.residual(name) for engine in both for name in ("wide", "kernel", "count")]

    def at(scale):
        scaler.scale = scale
        for engine in both:
            engine.transaction.settle()
        return left()

    for seed in range(4):
        step(both, noise(seed))
    before = left()
    for found, kept in zip(at(16.0), before, strict=True):
        np.testing.assert_allclose(found, 2 * kept, **near)
    step(both, noise(4))
    assert np.abs(left()[0] - 2 * before[0]).max() > 0.1
    for found, kept in zip(at(4.0), before, strict=True):
        np.testing.assert_allclose(found, kept / 2, **near)
    step(both, noise(5))  # and on it goes


class Decided:
    """What became of each tensor's last gradient, as the test says."""

    def __init__(self, outcome):
        self.outcome, self.of_last = outcome, []

    def sent(self, names):
        self.of_last = list(names)

    def of(self, name):
        return self.outcome


@pytest.mark.parametrize("way", WAYS)
def test_what_was_dropped_is_as_if_never_sent(way):
    """Over one pass and over several that were held; what was applied stays."""
    outcomes = Decided("applied")
    both = engines(WAYS[way], outcomes=outcomes)

    def left():
        for engine in both:
            engine.transaction.settle()
        return [engine.residual(name) for engine in both for name in ("wide", "kernel", "count")]

    for seed in range(4):
        step(both, noise(seed))
    before = left()
    for held in (0, 2):
        outcomes.outcome = "held"
        for seed in range(held + 1):
            step(both, noise(20 + seed))
        assert np.abs(left()[0] - before[0]).max() > 0.1
        outcomes.outcome = "dropped"
        for found, kept in zip(left(), before, strict=True):
            np.testing.assert_array_equal(found, kept)
    assert outcomes.of_last == list(SHAPES)
    outcomes.outcome = "applied"
    values = noise(5)
    means = [np.mean([own[name] for own in values], axis=0) for name in SHAPES]
    before = [engine.residual("wide") for engine in both]
    step(both, values)
    after = [engine.residual("wide") for engine in both]
    error = values[0]["wide"] + np.mean(after, axis=0) - np.mean(before, axis=0) - means[0]
    assert np.abs(error).max() < 1e-4


def test_a_mean_that_was_dropped_chooses_no_sizes():
    """The dense step among coded ones is thrown away: sizes and directions stay."""
    outcomes = Decided("applied")
    both = engines(LowRankCompression.using(ratio=8, warmup=2, every=5), outcomes=outcomes)
    for seed in range(6):
        step(both, noise(seed))
    sizes = {name: it.size for name, it in both[0].shared.tensors.items()}
    states = [np.array(e.shared.tensors["wide"].summable.state["basis"]) for e in both]
    left = [engine.residual("wide") for engine in both]
    spoilt = [{n: np.float32(1e4) * np.sign(v) for n, v in own.items()} for own in noise(50)]
    assert step(both, spoilt)[0]["dense"] == ["wide", "kernel", "count"]
    outcomes.outcome = "dropped"
    for engine, own in zip(both, left, strict=True):
        engine.transaction.settle()
        np.testing.assert_array_equal(engine.residual("wide"), own)
    outcomes.outcome = "held"
    step(both, noise(7))
    outcomes.outcome = "dropped"
    for engine, state, own in zip(both, states, left, strict=True):
        engine.transaction.settle()
        assert {name: it.size for name, it in engine.shared.tensors.items()} == sizes
        np.testing.assert_array_equal(engine.shared.tensors["wide"].summable.state["basis"], state)
        np.testing.assert_array_equal(engine.residual("wide"), own)


def test_what_is_owed_comes_back_with_a_plain_gradient_that_was_dropped():
    outcomes = Decided("applied")
    both = engines(AutoCompression.using(warmup=1, ratio=8), outcomes=outcomes)
    for engine in both:
        engine.tuner = Chosen("shared")
    for seed in range(4):
        step(both, noise(seed))
    left = both[0].residual("wide")
    for engine in both:
        engine.tuner = Chosen("plain")
    for outcome in ("dropped", "dropped", "applied"):
        step(both, noise(9))
        outcomes.outcome = outcome
        both[0].transaction.settle()
        both[1].transaction.settle()
        if outcome == "dropped":
            np.testing.assert_array_equal(both[0].residual("wide"), left)
    assert not both[0].remembers("wide")


@pytest.mark.parametrize("way", WAYS)
def test_a_scaler_skips_what_was_not_applied(way):
    """One scale for two optimizers: of the one that stepped nothing goes back."""
    found = {}
    for outcome in ("applied", "held", "unknown"):
        scaler, outcomes = Scaler(), Decided("applied")
        both = engines(WAYS[way], outcomes=outcomes, scaler=scaler)
        for seed in range(4):
            step(both, noise(seed))
        before = both[0].residual("wide")
        step(both, noise(4))
        outcomes.outcome, scaler.scale = outcome, 4.0
        for engine in both:
            engine.transaction.settle()
        found[outcome] = np.abs(2 * both[0].residual("wide") - before).max()
    assert found["applied"] > 0.1
    assert max(found["held"], found["unknown"]) < 1e-4


def bits(values):
    return [own[name].tobytes() for own in values for name in SHAPES]


@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_goes_on_from_its_states_is_the_one_that_never_stopped(way):
    both = engines(WAYS[way])
    for seed in range(4):
        step(both, noise(seed))
    states = [state_dict(e, ranks=RANKS, rank=rank) for rank, e in enumerate(both)]
    again = engines(WAYS[way])
    for rank, engine in enumerate(again):
        # All ranks' states, of which each takes its own.
        load_state_dict(engine, states, ranks=RANKS, rank=rank)
    for seed in range(4, 8):
        one, other = noise(seed), noise(seed)
        assert step(both, one) == step(again, other)
        assert bits(one) == bits(other)


@pytest.mark.parametrize("way", WAYS)
def test_another_number_of_ranks_takes_the_mean_of_what_is_owed(way):
    both = engines(WAYS[way])
    for seed in range(4):
        step(both, noise(seed))
    states = [state_dict(e, ranks=RANKS, rank=rank) for rank, e in enumerate(both)]
    (alone,) = engines(WAYS[way])[:1]
    load_state_dict(alone, states, ranks=1, rank=0)
    for name in ("wide", "kernel", "count"):
        mean = np.mean([engine.residual(name) for engine in both], axis=0)
        # A transform there and back.
        np.testing.assert_allclose(alone.residual(name), mean, atol=1e-5)
    before = alone.residual("wide")
    for broken in (states[1], states[:1], [], [*states, {"format": 2}], states[0] | {"scale": -1}):
        with pytest.raises(CompressError):
            load_state_dict(alone, broken, ranks=1, rank=0)
        np.testing.assert_array_equal(alone.residual("wide"), before)


def test_what_the_tuner_gives_up_leaves_with_a_plain_gradient():
    both = engines(AutoCompression.using(warmup=1, ratio=8))
    owed = np.zeros(2400)
    for engine in both:
        engine.tuner = Chosen("shared")
    for seed in range(4):
        values = noise(seed)
        owed += np.mean([own["wide"] for own in values], axis=0)
        step(both, values)
        owed -= values[0]["wide"]
    for engine in both:
        engine.tuner = Chosen("plain")
    unused = noise(8)
    for own in unused:
        own["wide"][:] = 0  # a framework may drop the mean of what nobody has used
    step(both, unused)
    assert not unused[0]["wide"].any()
    assert all(engine.remembers("wide") for engine in both)
    values = noise(9)
    mean = np.mean([own["wide"] for own in values], axis=0)
    assert step(both, values) == ({"plain": list(SHAPES), "dense": [], "coded": []}, 0)
    np.testing.assert_allclose(values[0]["wide"] - mean, owed, atol=2e-5)
    assert np.linalg.norm(owed) > 1
    assert not both[0].remembers("wide")


def test_what_a_run_before_has_left_leaves_once():
    """With a plain gradient, where the tuner measures first."""
    both = engines(AutoCompression.using(warmup=1, ratio=8))
    for engine in both:
        engine.tuner = Chosen("plain")
        engine.shared.restart({"wide": np.ones((40, 60), np.float32)})
    for seed, owed in ((1, 1.0), (2, 0.0)):
        values = noise(seed)
        mean = np.mean([own["wide"] for own in values], axis=0)
        step(both, values)
        np.testing.assert_allclose(values[0]["wide"] - mean, owed, atol=1e-5)
    assert not both[0].remembers("wide")


def copied(values):
    return {name: value.copy() for name, value in values.items()}


@pytest.mark.parametrize("way", WAYS)
def test_the_memory_of_what_a_rank_did_not_use_waits(way):
    both = engines(WAYS[way])
    for seed in range(4):
        step(both, noise(seed))
    before = [engine.residual("wide") for engine in both]
    values = noise(4)
    values[1]["wide"][:] = 0
    step(both, values)
    np.testing.assert_array_equal(both[1].residual("wide"), before[1])
    assert np.any(both[0].residual("wide") != before[0])


def test_a_step_given_up_in_its_middle_loses_no_memory():
    """An error elsewhere ends the step: the rounds are dropped, and the next step is as any."""
    both = engines(WAYS["sums"])
    for seed in range(4):
        step(both, noise(seed))
    values = noise(4)
    values[0]["wide"][:] = 0  # its memory sits this step out
    before = both[0].residual("wide")
    given = [Gradient(name, shape, values[0][name]) for name, shape in SHAPES.items()]
    way = both[0].sort(given, ranks=RANKS, total=twice)
    rounds = both[0].rounds(way.coded, ranks=RANKS, rank=0)
    next(rounds)
    rounds.close()
    both[0].new_step()
    np.testing.assert_array_equal(both[0].residual("wide"), before)


def test_half_precision_is_read_and_written_in_place():
    both = engines(WAYS["sums"])
    for seed in range(5):
        exact = noise(seed)
        halves = [{n: v.astype(np.float16) for n, v in own.items()} for own in exact]
        sorted_, _ = step(both, halves)
        assert halves[0]["wide"].dtype == np.float16
    assert sorted_["coded"] == ["wide", "kernel", "count"]
    other = engines(FFTCompression.using(theta=0.5))
    halves = [{n: v.astype(np.float16) for n, v in own.items()} for own in exact]
    mean = np.mean([own["wide"] for own in halves], axis=0, dtype=np.float64)
    step(other, halves)
    assert np.linalg.norm(halves[0]["wide"] - mean) < 0.5 * np.linalg.norm(mean)


def test_what_is_no_float_travels_plain():
    for compression in WAYS.values():
        (engine,) = engines(compression)[:1]
        given = [Gradient("w", (64, 64), np.ones(4096, kind)) for kind in ("f8", "i4")]
        for each in given:
            assert engine.sort([each], ranks=1, total=twice).plain == [each]
        nameless = [Gradient(None, (64, 64), np.ones(4096, np.float32))]
        way = engine.sort(nameless, ranks=1, total=twice)
        gather = compression.settings.exchange == "gather"
        assert (way.coded if gather else way.plain) == nameless
    changing = Engine(
        FFTCompression.using(theta=Warmup(4, Constant(0.9))).settings, 1, stock="DDP", tuner=Tuner
    )
    with pytest.raises(CompressError, match="without a name"):
        changing.sort(nameless, ranks=1, total=twice)


def test_ranks_that_differ_are_told():
    settings = WAYS["sums"].settings
    (engine,) = [Engine(settings, 1, stock="DDP", tuner=Tuner)]
    like, asked = np.zeros(1, np.float32), []

    def alike(name, words):
        asked.append(name)
        return words * RANKS

    def apart(name, words):
        return words * RANKS + (words.size == 17) * np.arange(17)

    engine.agree([], total=alike, rank=0, ranks=RANKS, like=like, name="start", do="Do.")
    assert engine.agreed == RANKS
    assert not engine.shared.exact
    engine.agree([], total=alike, rank=0, ranks=RANKS, like=like, name="start", do="Do.")
    assert asked == ["start", "hardware"]
    engine.begin_anew()

    def unlike_hardware(name, words):
        return apart(name, words) if name == "hardware" else alike(name, words)

    engine.agree([], total=unlike_hardware, rank=0, ranks=RANKS, like=like, name="start", do="Do.")
    assert engine.shared.exact


def test_a_step_of_sums_reads_no_value():
    """Tensors of torch's device `meta` have none; what a step has lost is asked for in the next."""
    both = engines(LowRankCompression.using(ratio=8, warmup=1))
    for seed in range(3):
        step(both, noise(seed))
    engine, before = both[0], both[0].report()
    given = [
        Gradient(name, shape, torch.zeros(int(np.prod(shape)), device="meta"))
        for name, shape in SHAPES.items()
    ]
    way = engine.sort(given, ranks=RANKS, total=twice)
    assert [each.name for each in way.coded] == ["wide", "kernel", "count"]
    rounds, calls = engine.rounds(way.coded, ranks=RANKS, rank=0), 0
    asked = next(rounds)
    while asked:
        (carry,) = asked
        assert (carry.kind, carry.words.dtype) == ("sum", torch.int32)
        calls += 1
        asked = next(iter_of(rounds, [carry.words]), None)
    assert calls == 2
    assert engine.report()["steps"] == before["steps"] + 1


def iter_of(rounds, results):
    """What comes behind these results, if anything."""
    with suppress(StopIteration):
        yield rounds.send(results)


def test_what_a_device_has_lost_is_told_one_step_late():
    both = engines(LowRankCompression.using(ratio=8, warmup=1))
    for seed in range(3):
        step(both, noise(seed))
    told = both[0].report()["relative_error"]
    assert 0 < told < 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_exchange, "on_host", lambda values: False)
        late = engines(LowRankCompression.using(ratio=8, warmup=1))
        for seed in range(4):
            step(late, noise(seed))
    assert late[0].report()["relative_error"] == told
