"""Payloads that go to owners: pieces, bits and memories, without a framework."""

from contextlib import suppress
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies

from sn_compress import FFTCodec, FFTCompression, PayloadError
from sn_compress.codecs import fft
from sn_compress.codecs.base import HEADER_BYTES
from sn_compress.collective import Gradient
from sn_compress.engine import payloads
from sn_compress.engine.engine import Engine
from sn_compress.engine.engine_state import load_state_dict, state_dict
from sn_compress.engine.payloads import shares_of

SHAPES = {"wide": (300, 300), "kernel": (16, 8, 3, 3), "square": (64, 64), "rows": (9000, 3)}
WAY = FFTCompression.using(theta=0.9, min_elements=1)


class Scaler:
    scale = 8.0

    def get_scale(self):
        return self.scale


def engines(ranks, way=WAY, **options):
    return [Engine(way.settings, 1, stock="DDP", tuner=None, **options) for _ in range(ranks)]


def noise(ranks, seed, shapes=SHAPES):
    rng = np.random.default_rng([3, seed])
    return [
        {name: rng.standard_normal(np.prod(shape)).astype(np.float32)
         for name, shape in shapes.items()}
        for _ in range(ranks)
    ]  # fmt: skip


def carried(asked):
    """What each rank gets for what all asked to carry."""
    words = [np.asarray(carry.words) for carry in asked]
    if asked[0].kind == "gather":
        if asked[0].sizes is not None:
            assert [each.size for each in words] == list(asked[0].sizes)
        return [np.concatenate(words) for _ in asked]
    cuts = [
        np.split(each, np.cumsum(carry.to_ranks(rank))[:-1])
        for rank, (carry, each) in enumerate(zip(asked, words, strict=True))
    ]
    came = [np.concatenate([own[rank] for own in cuts]) for rank in range(len(asked))]
    for rank, (carry, own) in enumerate(zip(asked, came, strict=True)):
        assert own.size == sum(carry.of_ranks(rank))
    return came


def step(all_, values, shapes=SHAPES, spoil=None, like=np.asarray):
    """One step: values become the means. Returns the kinds of collectives and bytes received."""
    ranks, kinds, received = len(all_), [], np.zeros(len(all_))
    rounds = []
    for rank, (engine, own) in enumerate(zip(all_, values, strict=True)):
        mine = [Gradient(name, shape, own[name]) for name, shape in shapes.items()]
        way = engine.sort(mine, ranks=ranks, total=None)
        assert len(way.coded) == len(shapes)
        rounds.append(engine.rounds(way.coded, ranks=ranks, rank=rank))
    asked = [next(each)[0] for each in rounds]
    while asked:
        kinds.append(asked[0].kind)
        came = carried(asked)
        if spoil == len(kinds):
            for own in came:
                own[own.size // 2] ^= 4
        own = [carry.words.nbytes if asked[0].kind == "gather" else 0 for carry in asked]
        received += [each.size - mine for each, mine in zip(came, own, strict=True)]
        asked = []
        for each, own in zip(rounds, came, strict=True):
            with suppress(StopIteration):
                asked.append(each.send([like(own.copy())])[0])
    for name in shapes:
        first = np.asarray(values[0][name].float() if like is not np.asarray else values[0][name])
        assert np.isfinite(first).all() or spoil
        assert all(
            torch.equal(own[name], values[0][name])
            if like is not np.asarray
            else np.array_equal(own[name], values[0][name])
            for own in values
        ), name
    return kinds, received


@settings(max_examples=150, deadline=None)
@given(
    strategies.lists(strategies.integers(1, 60_000), min_size=1, max_size=8),
    strategies.integers(1, 40),
    strategies.sampled_from([64, 1024, 4096]),
    strategies.sampled_from(["fft", "dct", "identity"]),
)
def test_pieces_are_all_blocks_once_and_shares_are_even(sizes, ranks, block, transform):
    codec = FFTCodec(theta=0.9, block=block, transform=transform)
    shares = shares_of(codec, tuple(sizes), ranks)
    whole = sum(map(codec.payload_bytes, sizes))
    if shares is None:
        assert ranks < 3 or len([s for n in sizes for s in codec.sections(n)]) < 3 or whole < 2000
        return
    assert len(shares.pieces) == ranks > 2
    for at, n in enumerate(sizes):
        own = [it for part in shares.pieces for it in part if it.tensor == at]
        assert own[0].start == 0
        assert own[-1].stop == n
        assert all(a.stop == b.start for a, b in pairwise(own))
        assert all(it.start % block == 0 for it in own)
    most = max(s.layout.words for n in sizes for s in codec.sections(n)) * 4
    for own, nbytes in zip(shares.pieces, shares.means_bytes, strict=True):
        assert nbytes == sum(codec.payload_bytes(it.elements) for it in own)
        # A block more than the mean, and a header and padding of each piece.
        assert nbytes <= whole / ranks + most + (HEADER_BYTES + 16) * len(own)
    sent = [sum(shares.sent(rank, len(sizes))) for rank in range(ranks)]
    parts = sum(shares.parts_bytes)
    for rank, nbytes in enumerate(sent):
        assert nbytes == parts - shares.parts_bytes[rank] + shares.means_bytes[rank]


@pytest.mark.parametrize(
    "unfit", [{"block": None}, {"window": "payload"}, {"transform": "axes"}], ids=str
)
def test_what_cannot_be_cut_is_gathered(unfit):
    if "transform" in unfit:
        unfit = {**unfit, "shape": (64, 64, 3, 3), "axes": (2, 3)}
    assert shares_of(FFTCodec(theta=0.9, **unfit), (64 * 64 * 9,), 8) is None


@pytest.mark.parametrize("ranks", [3, 5, 8, 40])
def test_what_is_sent_and_what_is_kept_is_what_there_was(ranks):
    all_ = engines(ranks)
    for t in range(4):
        values = noise(ranks, t)
        there = {
            name: np.mean(
                [own[name] + (e.residual(name) if e.remembers(name) else 0)
                 for e, own in zip(all_, values, strict=True)], axis=0
            )
            for name in SHAPES
        }  # fmt: skip
        kinds, _ = step(all_, values)
        assert kinds == ["alltoall", "gather"]
        for name, wanted in there.items():
            kept = np.mean([engine.residual(name) for engine in all_], axis=0)
            # Transforms there and back of numbers of size about 1, rounded to 2**-24.
            assert abs(values[0][name] + kept - wanted).max() < 4e-6, name
            assert np.linalg.norm(kept) > 0.3 * np.linalg.norm(wanted)
    report = all_[0].report()
    assert (report["steps"], report["frequencies"]) == (4, len(SHAPES))
    assert 0.5 < report["relative_error"] < 1


def test_two_ranks_gather_and_so_do_all_who_ask_for_it():
    assert step(engines(2), noise(2, 0))[0] == ["gather"]
    assert step(engines(5, WAY.using(scatter=False)), noise(5, 0))[0] == ["gather"]
    paper = FFTCompression.using(mode="paper", min_elements=1)
    assert step(engines(5, paper), noise(5, 0))[0] == ["gather"]


def test_what_a_rank_receives_does_not_grow_with_ranks():
    shapes = {"wide": (1024, 1024)}
    scattered = {n: step(engines(n), noise(n, 0, shapes), shapes)[1].max() for n in (4, 8, 16)}
    gathered = step(engines(16, WAY.using(scatter=False)), noise(16, 0, shapes), shapes)[1].max()
    assert scattered[16] < 1.3 * scattered[4]
    assert scattered[16] < 0.14 * gathered  # 2 / 16, and headers


def test_the_bits_are_those_of_a_host_wherever_it_runs(monkeypatch):
    # Of each library's own FFT the last bit may be another.
    ranks, way = 4, WAY.using(transform="hadamard")
    there, here = engines(ranks, way), engines(ranks, way)
    for t in range(3):
        values = noise(ranks, t)
        tensors = [
            {name: torch.from_numpy(it.copy()) for name, it in own.items()} for own in values
        ]
        step(here, values)
        with monkeypatch.context() as patch:
            for module in (payloads, fft):
                patch.setattr(module, "on_host", lambda it: isinstance(it, np.ndarray))
            step(there, tensors, like=torch.from_numpy)
        for name in SHAPES:
            assert np.array_equal(tensors[0][name].numpy(), values[0][name]), name
        for one, other in zip(there, here, strict=True):
            assert np.array_equal(one.residual("wide"), other.residual("wide"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_read_and_written_in_place(dtype):
    ranks = 4
    values = [
        {name: (1000 * torch.from_numpy(it)).to(dtype) for name, it in own.items()}
        for own in noise(ranks, 1)
    ]
    sums = {name: torch.stack([own[name].float() for own in values]).sum(0) for name in SHAPES}
    assert max(float(it.abs().max()) for it in sums.values()) > 8000  # sums that halves may lose
    step(engines(ranks, WAY.using(theta=0.0, bits=12, mantissa=8)), values, like=torch.from_numpy)
    for name, total in sums.items():
        assert values[0][name].dtype == dtype
        error = (values[0][name].float() - total / ranks).abs().max()
        assert float(error) < 0.02 * float(total.abs().max() / ranks)


def test_a_step_that_the_scaler_skips_is_taken_back():
    ranks, scaler = 4, Scaler()
    all_ = engines(ranks, scaler=scaler)
    step(all_, noise(ranks, 0))
    for engine in all_:
        engine.transaction.settle()
    before = [{name: engine.residual(name) for name in SHAPES} for engine in all_]
    step(all_, noise(ranks, 1))
    scaler.scale = 4.0
    for engine, kept in zip(all_, before, strict=True):
        engine.transaction.settle()
        for name, values in kept.items():
            # Rescaled by way of its values, and transformed anew.
            assert abs(engine.residual(name) - values / 2).max() < 2e-6


def test_a_run_that_goes_on_from_its_states_is_the_one_that_never_stopped():
    ranks = 5
    all_ = engines(ranks)
    for t in range(3):
        step(all_, noise(ranks, t))
    again = engines(ranks)
    states = [state_dict(e, ranks=ranks, rank=r) for r, e in enumerate(all_)]
    for rank, engine in enumerate(again):
        load_state_dict(engine, states, ranks=ranks, rank=rank)
    first, second = noise(ranks, 9), noise(ranks, 9)
    step(all_, first)
    step(again, second)
    assert all(np.array_equal(first[0][name], second[0][name]) for name in SHAPES)


@pytest.mark.parametrize("now", [2, 3, 7])
def test_another_number_of_ranks_takes_the_mean_of_what_is_owed(now):
    ranks = 5
    all_ = engines(ranks)
    step(all_, noise(ranks, 0))
    owed = np.mean([engine.residual("wide") for engine in all_], axis=0)
    states = [state_dict(e, ranks=ranks, rank=r) for r, e in enumerate(all_)]
    fewer = engines(now)
    for rank, engine in enumerate(fewer):
        load_state_dict(engine, states, ranks=now, rank=rank)
    assert abs(np.mean([e.residual("wide") for e in fewer], axis=0) - owed).max() < 1e-6
    step(fewer, noise(now, 1))


def test_without_memory_or_names_nothing_is_kept():
    ranks = 4
    all_ = engines(ranks, WAY.using(feedback=False))
    step(all_, noise(ranks, 0))
    assert not any(engine.remembers(name) for engine in all_ for name in SHAPES)


def test_what_is_not_finite_reaches_all_and_no_memory():
    ranks = 4
    all_ = engines(ranks)
    step(all_, noise(ranks, 0))
    values = noise(ranks, 1)
    values[2]["square"][5] = np.nan
    before = all_[2].residual("square")
    for own in values:  # what is compared below is not a number
        own["square"] = own["square"].copy()
    rounds = [
        engine.rounds(
            [Gradient(name, shape, own[name]) for name, shape in SHAPES.items()],
            ranks=ranks, rank=rank,
        )
        for rank, (engine, own) in enumerate(zip(all_, values, strict=True))
    ]  # fmt: skip
    asked = [next(each)[0] for each in rounds]
    for _ in range(2):
        came = carried(asked)
        asked = []
        for each, own in zip(rounds, came, strict=True):
            with suppress(StopIteration):
                asked.append(each.send([own])[0])
    assert all(np.isnan(own["square"]).all() for own in values)
    assert all(np.isfinite(own["wide"]).all() for own in values)
    assert np.array_equal(all_[2].residual("square"), before)
    assert all(np.isfinite(engine.residual("square")).all() for engine in all_)


@pytest.mark.parametrize("round_", [1, 2])
def test_damage_in_either_round_is_an_error(round_):
    with pytest.raises(PayloadError, match="checksum"):
        step(engines(4), noise(4, 0), spoil=round_)
