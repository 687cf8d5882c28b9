"""The engine without a framework: of ranks in one process, by each way to exchange."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from engines import (
    RANKS,
    SHAPES,
    Chosen,
    Decided,
    Scaler,
    Way,
    engines,
    noise,
    nowhere_on_host,
    step,
)
from rounds import drive_one
from samples import alike

from sn_compress import (
    AutoCompression,
    CastCompression,
    CompressError,
    FFTCompression,
    LowRankCompression,
    PayloadError,
)
from sn_compress.allreduce import exchange as shared_exchange
from sn_compress.collective import Gradient
from sn_compress.engine.engine_state import load_state_dict, state_dict
from sn_compress.schedule import Constant, Warmup

FFT = FFTCompression.using(theta=0.9)
# Large enough for three ranks or more to own pieces of it.
LARGE = {"wide": (300, 300), "kernel": (16, 8, 3, 3), "bias": (60,), "count": (9000, 3)}
SUMS = LowRankCompression.using(ratio=8, warmup=2, every=5)
WAYS = [
    Way("frequencies", FFT),
    Way("sums", SUMS),
    Way("scattered", FFT, ranks=4, shapes=LARGE),
    Way("on a device", FFT, on_device=True),
    Way("casts", CastCompression.using(dtype="fp8", min_elements=1000)),
]
DEVICE = WAYS[3]
NAMES = ("wide", "kernel", "count")  # a bias travels plain


def twice(name, words):
    """The sum over ranks that all bring the same."""
    return words * RANKS


@pytest.fixture
def elsewhere(monkeypatch):
    """No tensor is on the host: payloads are array code's."""
    nowhere_on_host(monkeypatch)


@pytest.fixture(params=WAYS, ids=lambda way: way.name)
def way(request):
    """Each way to exchange gradients."""
    if request.param.on_device:
        request.getfixturevalue("elsewhere")
    return request.param


def trained(way, steps=4, **options):
    """Engines after some steps."""
    every = way.engines(**options)
    for seed in range(steps):
        way.step(every, way.noise(seed))
    return every


def left(all_):
    """What each rank remembers of each tensor, once it is settled what became of the step."""
    for engine in all_:
        engine.transaction.settle()
    return [engine.residual(name) for engine in all_ for name in NAMES]


def test_all_that_went_in_comes_out_in_time(way):
    """Bit-equal on all ranks; a bias is exact; what is missing of a matrix is remembered."""
    both = way.engines()
    due = {name: np.zeros(int(np.prod(shape))) for name, shape in way.shapes.items()}
    paid = {name: np.zeros(int(np.prod(shape))) for name, shape in way.shapes.items()}
    kinds = []
    for seed in range(9):
        values = way.noise(seed)
        bias = np.mean([own["bias"] for own in values], axis=0)
        for name in way.shapes:
            due[name] += np.mean([own[name] for own in values], axis=0, dtype=np.float64)
        found = way.step(both, values)
        for name in way.shapes:
            paid[name] += values[0][name]
        assert "bias" in found.named["plain"]
        np.testing.assert_array_equal(values[0]["bias"], bias)
        kinds.append("d" if found.named["dense"] else "s")
        if way.name != "sums":
            in_pieces = way.ranks > 2 or way.name == "casts"
            assert found.kinds == (["alltoall", "gather"] if in_pieces else ["gather"])
    assert "".join(kinds) == ("ddssssdss" if way.name == "sums" else "s" * 9)
    for name in NAMES:
        owed = np.mean([engine.residual(name) for engine in both], axis=0)
        assert np.linalg.norm(owed) > 0.1
        # Nine float32 sums, and a transform there and back of values up to 20.
        np.testing.assert_allclose(paid[name] + owed, due[name], atol=1e-4)
    assert not both[0].remembers("bias")
    report = both[0].report()
    assert report["steps"] == 9
    assert report["plain"] == 1
    assert report["ratio"] > {"sums": 2, "casts": 3.5}.get(way.name, 4)
    if way.name != "sums":
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
        engine.begin(given)
        way = engine.sort(given, ranks=1, total=twice)
        assert [g.name for g in way.plain] == ["vector", "upright", "small", "number"]
        assert engine.report()["plain"] == 6 if way.dense else 4


def test_a_step_that_the_scaler_skips_is_taken_back(way):
    """And memories are brought to the new scale; a larger scale takes nothing back."""
    scaler = Scaler()
    both = way.engines(scaler=scaler)
    # A spectrum's memory is multiplied as the values that it stands for.
    near = {"rtol": 0, "atol": 0} if way.name == "sums" else {"rtol": 1e-5, "atol": 1e-5}

    def at(scale):
        scaler.scale = scale
        return left(both)

    for seed in range(4):
        way.step(both, way.noise(seed))
    before = left(both)
    for found, kept in zip(at(16.0), before, strict=True):
        np.testing.assert_allclose(found, 2 * kept, **near)
    way.step(both, way.noise(4))
    assert np.abs(both[0].residual("wide") - 2 * before[0]).max() > 0.1
    for found, kept in zip(at(4.0), before, strict=True):
        np.testing.assert_allclose(found, kept / 2, **near)
    way.step(both, way.noise(5))  # and on it goes


def test_what_was_dropped_is_as_if_never_sent(way):
    """Over one pass and over several that were held; what was applied stays."""
    outcomes = Decided("applied")
    both = trained(way, outcomes=outcomes)
    before = left(both)
    for held in (0, 2):
        outcomes.outcome = "held"
        for seed in range(held + 1):
            way.step(both, way.noise(20 + seed))
        assert np.abs(left(both)[0] - before[0]).max() > 0.1
        outcomes.outcome = "dropped"
        alike(left(both), before)
    assert outcomes.of_last == list(way.shapes)
    outcomes.outcome = "applied"
    values = way.noise(5)
    mean = np.mean([own["wide"] for own in values], axis=0)
    way.step(both, values)
    owed, now = (np.mean(each[:: len(NAMES)], axis=0) for each in (before, left(both)))
    assert np.abs(values[0]["wide"] + now - owed - mean).max() < 1e-4


def test_a_mean_that_was_dropped_chooses_no_sizes():
    """The dense step among coded ones is thrown away: sizes and directions stay."""
    outcomes = Decided("applied")
    both = trained(WAYS[1], 6, outcomes=outcomes)

    def kept():
        shared = both[0].shared.tensors
        sizes = [it.size for it in shared.values()]
        return sizes, [np.array(e.shared.tensors["wide"].summable.state["basis"]) for e in both]

    sizes, bases = kept()
    owed = [engine.residual("wide") for engine in both]
    spoilt = [{n: np.float32(1e4) * np.sign(v) for n, v in own.items()} for own in noise(50)]
    assert step(both, spoilt).named["dense"] == list(NAMES)
    outcomes.outcome = "dropped"
    left(both)  # settles the dense step
    outcomes.outcome = "held"
    step(both, noise(7))
    outcomes.outcome = "dropped"
    left(both)
    assert kept()[0] == sizes
    alike([kept()[1], [engine.residual("wide") for engine in both]], [bases, owed])


def test_a_scaler_skips_what_was_not_applied(way):
    """One scale for two optimizers: of the one that stepped nothing goes back."""
    found = {}
    for outcome in ("applied", "held", "unknown"):
        scaler, outcomes = Scaler(), Decided("applied")
        both = trained(way, 3, outcomes=outcomes, scaler=scaler)
        before = both[0].residual("wide")
        way.step(both, way.noise(4))
        outcomes.outcome, scaler.scale = outcome, 4.0
        left(both)
        found[outcome] = np.abs(2 * both[0].residual("wide") - before).max()
    assert found["applied"] > 0.1
    assert max(found["held"], found["unknown"]) < 1e-4


def test_a_run_that_goes_on_from_its_states_is_the_one_that_never_stopped(way):
    both = trained(way)
    states = [state_dict(e, ranks=way.ranks, rank=rank) for rank, e in enumerate(both)]
    again = way.engines()
    for rank, engine in enumerate(again):
        # All ranks' states, of which each takes its own.
        load_state_dict(engine, states, ranks=way.ranks, rank=rank)
    for seed in range(4, 8):
        one, other = way.noise(seed), way.noise(seed)
        assert way.step(both, one) == way.step(again, other)
        alike(one, other)


def test_another_number_of_ranks_takes_the_mean_of_what_is_owed(way):
    both = trained(way)
    states = [state_dict(e, ranks=way.ranks, rank=rank) for rank, e in enumerate(both)]
    for now in (3, 1):
        others = engines(way.compression, now)
        for rank, engine in enumerate(others):
            load_state_dict(engine, states, ranks=now, rank=rank)
        for name in NAMES:
            owed, own = (
                np.mean([engine.residual(name) for engine in all_], axis=0)
                for all_ in (both, others)
            )
            # A transform there and back.
            np.testing.assert_allclose(own, owed, atol=1e-5)
    (alone,) = others
    before = alone.residual("wide")
    for broken in (states[1], states[:1], [], [*states, {"format": 2}], states[0] | {"scale": -1}):
        with pytest.raises(CompressError):
            load_state_dict(alone, broken, ranks=1, rank=0)
        np.testing.assert_array_equal(alone.residual("wide"), before)


def given_up(**options):
    """Engines whose tuner has given compression up, and what they all owe of "wide"."""
    both = engines(AutoCompression.using(warmup=1, ratio=8), **options)
    for method in ("shared", "plain"):
        for engine in both:
            engine.tuner = Chosen(method)
        for seed in range(4 if method == "shared" else 0):
            step(both, noise(seed))
    owed = np.mean([engine.residual("wide") for engine in both], axis=0)
    assert np.linalg.norm(owed) > 1
    return both, owed


def beyond_the_mean(both, seed):
    """What a step sends of "wide" that is not of its own gradients."""
    values = noise(seed)
    mean = np.mean([own["wide"] for own in values], axis=0)
    assert step(both, values).named == {"plain": list(SHAPES), "dense": [], "coded": []}
    return values[0]["wide"] - mean


def unused(both):
    """A step in which nobody has used "wide": a framework may drop its mean."""
    values = noise(8)
    for own in values:
        own["wide"][:] = 0
    step(both, values)
    assert not values[0]["wide"].any()


def test_memories_of_unused_parameters_wait_in_dense_steps_and_behind_them():
    both = engines(LowRankCompression.using(ratio=8, warmup=1, every=2))
    for seed in range(2):
        step(both, noise(seed))
    owed = [engine.residual("wide") for engine in both]
    assert all(own.any() for own in owed)
    for seed, kind in ((2, "dense"), (3, "coded")):
        values = noise(seed)
        for own in values:
            own["wide"][:] = 0
        assert "wide" in step(both, values).named[kind]
        assert not values[0]["wide"].any()
        alike([engine.residual("wide") for engine in both], owed)


def test_a_memory_that_waited_on_one_rank_in_a_dense_step_goes_on_in_torch_as_in_numpy():
    """There the memory was an array of NumPy, and the mean that directions begin from a tensor."""
    each = [engines(LowRankCompression.using(ratio=8, warmup=1, every=2)) for _ in range(2)]
    for seed in range(4):
        means = []
        for both, make in zip(each, (np.asarray, torch.from_numpy), strict=True):
            values = noise(seed)
            if seed == 2:
                values[1]["wide"][:] = 0
            step(both, values, make=make)
            means.append(values[0])
        alike(*means)


def test_what_the_tuner_gives_up_leaves_with_a_plain_gradient_once():
    both, owed = given_up()
    unused(both)
    assert all(engine.remembers("wide") for engine in both)
    np.testing.assert_allclose(beyond_the_mean(both, 9), owed, atol=2e-5)
    assert not both[0].remembers("wide")
    np.testing.assert_allclose(beyond_the_mean(both, 10), 0, atol=1e-6)
    for engine in both:  # and compression can be taken up again
        engine.tuner = Chosen("shared")
    step(both, noise(11))
    assert both[0].remembers("wide")


def test_what_is_owed_comes_back_with_a_plain_gradient_that_was_dropped():
    outcomes = Decided("applied")
    both, _ = given_up(outcomes=outcomes)
    owed = both[0].residual("wide")
    for outcome in ("dropped", "dropped", "applied"):
        step(both, noise(9))
        outcomes.outcome = outcome
        for engine in both:
            engine.transaction.settle()
        if outcome == "dropped":
            np.testing.assert_array_equal(both[0].residual("wide"), owed)
    assert not both[0].remembers("wide")


@pytest.mark.parametrize("waits", [False, True])
def test_a_step_that_the_scaler_skips_owes_it_again(waits):
    """And in the scaler's new unit."""
    scaler = Scaler()
    both, owed = given_up(scaler=scaler)
    if waits:
        unused(both)
    step(both, noise(9))  # nobody has applied it
    scaler.scale /= 2
    np.testing.assert_allclose(beyond_the_mean(both, 10), owed / 2, atol=2e-5)
    np.testing.assert_allclose(beyond_the_mean(both, 11), 0, atol=1e-6)


def test_what_is_owed_is_saved_and_shared_by_another_number_of_ranks():
    """Of two ranks one has sent it already: the one that goes on owes half."""
    both, _ = given_up()
    unused(both)
    states = [state_dict(engine, ranks=RANKS, rank=rank) for rank, engine in enumerate(both)]
    again = engines(AutoCompression.using(warmup=1, ratio=8))
    for rank, engine in enumerate(again):
        engine.tuner = Chosen("plain")
        load_state_dict(engine, states[rank], ranks=RANKS, rank=rank)
    owed = both[0].residual("wide")
    np.testing.assert_array_equal(beyond_the_mean(again, 9), beyond_the_mean(both, 9))
    sent = state_dict(both[1], ranks=RANKS, rank=1)
    (alone,) = engines(AutoCompression.using(warmup=1, ratio=8), 1)
    for every in ([states[0], sent], [sent | {"rank": 0}, states[0] | {"rank": 1}]):
        load_state_dict(alone, every, ranks=1, rank=0)
        np.testing.assert_array_equal(alone.residual("wide"), owed / 2)


def test_what_a_run_before_has_left_leaves_once():
    """With a plain gradient, where the tuner measures first."""
    both = engines(AutoCompression.using(warmup=1, ratio=8))
    for engine in both:
        engine.tuner = Chosen("plain")
        engine.shared.restart({"wide": np.ones((40, 60), np.float32)})
    for seed, owed in ((1, 1.0), (2, 0.0)):
        np.testing.assert_allclose(beyond_the_mean(both, seed), owed, atol=1e-5)
    assert not both[0].remembers("wide")


# An owner of pieces takes up what is left of their means.
@pytest.mark.parametrize(
    "way", [replace(it, shapes=LARGE) for it in WAYS if it.name != "scattered"], indirect=True
)
def test_the_memory_of_what_a_rank_did_not_use_waits(way):
    both = trained(way)
    before = [engine.residual("wide") for engine in both]
    values = way.noise(4)
    values[0]["wide"][:-1] = 0  # used, if only at its end
    values[1]["wide"][:] = 0
    way.step(both, values)
    np.testing.assert_array_equal(both[1].residual("wide"), before[1])
    assert np.mean(both[0].residual("wide") != before[0]) > 0.5  # in all of its blocks


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_reaches_all_and_no_memory(way, bad):
    all_ = trained(way)
    before = all_[1].residual("kernel")
    values = way.noise(4)
    values[1]["kernel"][5] = bad  # whose 1,152 elements are one block of a transform
    way.step(all_, values)
    assert not np.isfinite(values[0]["kernel"][5])
    if way.name in ("frequencies", "scattered", "on a device"):
        assert np.isnan(values[0]["kernel"]).all()
        np.testing.assert_array_equal(all_[1].residual("kernel"), before)
    if way.name != "sums":  # where tensors travel in one bucket
        assert np.isfinite(values[0]["wide"]).all()
    assert np.isfinite(left(all_)[0]).all()
    following = way.noise(5)
    way.step(all_, following)
    assert all(np.isfinite(following[0][name]).all() for name in NAMES)


def test_a_step_given_up_in_its_middle_loses_no_memory():
    """An error elsewhere ends the step: the rounds are dropped, and the next step is as any."""
    both = trained(WAYS[1])
    values = noise(4)
    values[0]["wide"][:] = 0  # its memory sits this step out
    before = both[0].residual("wide")
    given = [Gradient(name, shape, values[0][name]) for name, shape in SHAPES.items()]
    both[0].begin(given)
    way = both[0].sort(given, ranks=RANKS, total=twice)
    rounds = both[0].rounds(way.coded, ranks=RANKS, rank=0)
    next(rounds)
    rounds.close()
    both[0].new_step()
    np.testing.assert_array_equal(both[0].residual("wide"), before)


def test_sums_of_half_precision_are_written_in_place():
    """As payloads are: test_scattered.py."""
    both = engines(SUMS)
    for seed in range(3):
        halves = [{n: v.astype(np.float16) for n, v in own.items()} for own in noise(seed)]
        found = step(both, halves)
        assert halves[0]["wide"].dtype == np.float16
    assert found.named["coded"] == list(NAMES)


def test_what_is_no_float_travels_plain():
    for compression in (FFT, SUMS):
        (engine,) = engines(compression, 1)
        for kind in ("f8", "i4"):
            other = [Gradient("w", (64, 64), np.ones(4096, kind))]
            engine.begin(other)
            assert engine.sort(other, ranks=1, total=twice).plain == other
        nameless = [Gradient(None, (64, 64), np.ones(4096, np.float32))]
        engine.begin(nameless)
        way = engine.sort(nameless, ranks=1, total=twice)
        gather = compression.settings.exchange == "gather"
        assert (way.coded if gather else way.plain) == nameless
    (changing,) = engines(FFTCompression.using(theta=Warmup(4, Constant(0.9))), 1)
    changing.begin(nameless)
    with pytest.raises(CompressError, match="without a name"):
        changing.sort(nameless, ranks=1, total=twice)


def test_ranks_of_other_hardware_compute_exact_sums():
    (engine,) = engines(SUMS, 1)
    asked = []

    def agree(apart=None):
        def total(name, words):
            asked.append(name)
            return words * RANKS + (name == apart) * np.arange(words.size)

        like = np.zeros(1, np.float32)
        engine.agree([], total=total, rank=0, ranks=RANKS, like=like, name="start", do="Do.")

    agree()
    assert engine.agreed == RANKS
    assert not engine.shared.exact
    agree()
    assert asked == ["start", "hardware"]
    engine.reset()
    agree(apart="hardware")
    assert engine.shared.exact


@pytest.mark.parametrize(("of", "steps", "kinds"), [
    (WAYS[0], 0, [("gather", torch.uint8)]), (WAYS[1], 3, [("sum", torch.int32)] * 2),
], ids=["frequencies", "sums"])  # fmt: skip
def test_a_step_reads_no_value(of, steps, kinds):
    """Tensors of torch's device `meta` have none; what a step has lost is asked for in the next."""
    engine, _ = trained(of, steps)
    given = [
        Gradient(name, shape, torch.zeros(int(np.prod(shape)), device="meta"))
        for name, shape in SHAPES.items()
    ]
    engine.begin(given)
    coded = engine.sort(given, ranks=RANKS, total=twice).coded
    assert [each.name for each in coded] == list(NAMES)
    copies = {"gather": RANKS, "sum": 1}
    asked, result = drive_one(
        engine.rounds(coded, ranks=RANKS, rank=0),
        lambda _, carries: [torch.cat([it.words] * copies[it.kind]) for it in carries],
    )
    assert result is None
    assert [(carry.kind, carry.words.dtype) for (carry,) in asked] == kinds
    assert all(carry.words.device.type == "meta" for (carry,) in asked)
    assert engine.report()["steps"] == steps + 1


def test_what_a_device_has_lost_is_told_one_step_late():
    now, _ = trained(WAYS[1], 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_exchange, "on_host", lambda values: False)
        late, _ = trained(WAYS[1], 4)
    assert late.report()["relative_error"] == now.report()["relative_error"]
    assert 0 < now.report()["relative_error"] < 1


def test_array_code_makes_the_step_of_the_host(elsewhere):
    """Means and memories, over some steps; the FFTs differ in their last bits."""
    there, here = DEVICE.engines(), WAYS[0].engines()
    for seed in range(4):
        found, expected = DEVICE.noise(seed), WAYS[0].noise(seed)
        DEVICE.step(there, found)
        WAYS[0].step(here, expected)
        for name in NAMES:
            # What is at the threshold in one block of a step may be kept in one and not the other.
            missed = np.linalg.norm(found[0][name] - expected[0][name])
            assert missed < 0.02 * np.linalg.norm(expected[0][name])
    for one, other in zip(left(there), left(here), strict=True):
        assert np.linalg.norm(one - other) < 0.02 * np.linalg.norm(other)
    differ = dict.fromkeys(("relative_error", "codec_s", "exchange_s"), 0)
    assert there[0].report() | differ == here[0].report() | differ


def means(all_, seed, **how):
    """Of one step of array code, by rank, as tensors."""
    values = [{name: torch.from_numpy(v) for name, v in own.items()} for own in noise(seed)]
    step(all_, values, **how)
    return values


DAMAGE = (1, 40)  # a bit in the first record of the first rank


def test_damage_on_a_device_is_an_error_of_the_next_step_on_every_rank(elsewhere):
    both = DEVICE.engines()
    means(both, 0)
    for own in means(both, 1, spoil=DAMAGE):
        assert own["wide"].isnan().all()
        assert not own["kernel"].isnan().any()
    for rank, engine in enumerate(both):
        given = [Gradient("wide", SHAPES["wide"], torch.from_numpy(noise(2)[rank]["wide"]))]
        with pytest.raises(PayloadError, match=r"step is corrupt.*the mean of its tensor was NaN"):
            engine.begin(given)
    # Told once; who goes on all the same may.
    assert not means(both, 2)[0]["wide"].isnan().any()
    means(both, 3)


def test_damage_in_the_last_step_on_a_device_is_not_saved(elsewhere):
    both = DEVICE.engines()
    means(both, 0, spoil=DAMAGE)
    with pytest.raises(PayloadError, match="previous step is corrupt"):
        state_dict(both[0], ranks=RANKS, rank=0)
    fresh = state_dict(DEVICE.engines()[1], ranks=RANKS, rank=1)
    load_state_dict(both[1], fresh, ranks=RANKS, rank=1)
    means(both, 1)  # another state has been taken over
