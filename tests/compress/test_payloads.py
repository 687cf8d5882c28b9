"""Payloads in the engine where no compiled code reaches: as array code, damage told a step late.

Tensors of torch on the host stand for those of a device: they are taken for such.
"""

from contextlib import suppress

import numpy as np
import pytest
import torch
from test_engine import RANKS, SHAPES, Scaler, noise, twice

from sn_compress import FFTCompression, PayloadError
from sn_compress.codecs import fft
from sn_compress.collective import Gradient
from sn_compress.engine import payloads
from sn_compress.engine.engine import Engine
from sn_compress.engine.engine_state import load_state_dict, state_dict

NAMES = ("wide", "kernel", "count")  # a bias travels plain
WAY = FFTCompression.using(theta=0.9)


@pytest.fixture
def elsewhere(monkeypatch):
    """No tensor is on the host."""
    for module in (payloads, fft):
        monkeypatch.setattr(module, "on_host", lambda values: isinstance(values, np.ndarray))


def engines(compression=WAY, **options):
    return [
        Engine(compression.settings, 1, stock="DDP", tuner=None, **options) for _ in range(RANKS)
    ]


def tensors(seed, dtype=torch.float32):
    return [
        {name: torch.from_numpy(own[name].copy()).to(dtype) for name in NAMES}
        for own in noise(seed)
    ]


def step(all_, values, spoil=None, total=twice):
    """One step: values become the means. spoil : changes what each rank has gathered"""
    rounds = []
    for rank, (engine, own) in enumerate(zip(all_, values, strict=True)):
        given = [Gradient(name, SHAPES[name], own[name]) for name in NAMES]
        way = engine.sort(given, ranks=RANKS, total=total)
        rounds.append(engine.rounds(way.coded, ranks=RANKS, rank=rank))
    sent = [carry.words for each in rounds for carry in next(each)]
    assert all((it.dtype, it.ndim) == (torch.uint8, 1) for it in sent)
    gathered = torch.cat(sent)
    if spoil is not None:
        spoil(gathered)
    for each in rounds:
        with suppress(StopIteration):
            each.send([gathered.clone()])
    return values


def turn_a_bit(gathered):
    gathered[40] ^= 4  # in the first record of the first rank


def test_it_is_the_step_of_the_host(elsewhere):
    """Means and memories, over some steps; the FFTs differ in their last bits."""
    other = engines()
    with pytest.MonkeyPatch.context() as patch:
        for module in (payloads, fft):
            patch.setattr(module, "on_host", lambda values: True)
        hosts = [step(other, tensors(seed)) for seed in range(4)]
    both = engines()
    for seed in range(4):
        found = step(both, tensors(seed))
        for name in NAMES:
            assert torch.equal(found[0][name], found[1][name])
            # What is at the threshold in one block of a step may be kept in one and not the other.
            missed = torch.linalg.norm(found[0][name] - hosts[seed][0][name])
            assert missed < 0.02 * torch.linalg.norm(found[0][name])
    for engine, host in zip(both, other, strict=True):
        for name in NAMES:
            one, two = engine.residual(name), host.residual(name)
            assert np.linalg.norm(one - two) < 0.02 * np.linalg.norm(one)
    assert all(isinstance(part, torch.Tensor) for part in both[0].feedback._memory["wide"][1])
    differ = dict.fromkeys(("relative_error", "codec_s", "exchange_s"), 0)
    assert both[0].report() | differ == other[0].report() | differ


def test_all_that_went_in_comes_out_in_time(elsewhere):
    both = engines()
    due, paid = ({name: np.zeros(int(np.prod(SHAPES[name]))) for name in NAMES} for _ in range(2))
    for seed in range(6):
        values = tensors(seed)
        for name in NAMES:
            due[name] += np.mean([own[name].numpy() for own in values], axis=0, dtype=np.float64)
        step(both, values)
        for name in NAMES:
            paid[name] += values[0][name].numpy()
    for name in NAMES:
        left = np.mean([engine.residual(name) for engine in both], axis=0)
        assert np.linalg.norm(left) > 0.1
        np.testing.assert_allclose(paid[name] + left, due[name], atol=1e-4)


def test_damage_is_an_error_of_the_next_step_on_every_rank(elsewhere):
    both = engines()
    step(both, tensors(0))
    values = step(both, tensors(1), spoil=turn_a_bit)
    for own in values:
        assert own["wide"].isnan().all()
        assert not own["kernel"].isnan().any()
    for rank, engine in enumerate(both):
        given = [Gradient("wide", SHAPES["wide"], tensors(2)[rank]["wide"])]
        with pytest.raises(PayloadError, match=r"step is corrupt.*the mean of its tensor was NaN"):
            engine.sort(given, ranks=RANKS, total=twice)
    found = step(both, tensors(2))  # told once; who goes on all the same may
    assert not found[0]["wide"].isnan().any()
    step(both, tensors(3))


def test_damage_in_the_last_step_is_not_saved(elsewhere):
    both = engines()
    step(both, tensors(0), spoil=turn_a_bit)
    with pytest.raises(PayloadError, match="previous step is corrupt"):
        state_dict(both[0], ranks=RANKS, rank=0)
    load_state_dict(both[1], state_dict(engines()[1], ranks=RANKS, rank=1), ranks=RANKS, rank=1)
    step(both, tensors(1))  # another state has been taken over


def test_a_run_goes_on_from_its_states(elsewhere):
    both = engines()
    for seed in range(3):
        step(both, tensors(seed))
    states = [state_dict(e, ranks=RANKS, rank=rank) for rank, e in enumerate(both)]
    again = engines()
    for rank, engine in enumerate(again):
        load_state_dict(engine, states, ranks=RANKS, rank=rank)
    for seed in range(3, 5):
        one, other = step(both, tensors(seed)), step(again, tensors(seed))
        assert all(torch.equal(one[0][name], other[0][name]) for name in NAMES)


def test_a_step_that_the_scaler_skips_is_taken_back(elsewhere):
    scaler = Scaler()
    both = engines(scaler=scaler)
    step(both, tensors(0))
    before = [engine.residual("wide") for engine in both]
    bad = tensors(1)
    bad[0]["wide"][7] = float("inf")
    assert step(both, bad)[1]["wide"].isnan().any()
    scaler.scale /= 2
    for engine, left in zip(both, before, strict=True):
        engine.transaction.settle()
        np.testing.assert_allclose(engine.residual("wide"), left / 2, rtol=1e-5, atol=1e-5)
    assert not step(both, tensors(2))[0]["wide"].isnan().any()


def test_half_precision_and_what_was_not_used(elsewhere):
    both = engines()
    step(both, tensors(0, torch.bfloat16))
    before = both[1].residual("wide")
    values = tensors(1, torch.bfloat16)
    values[1]["wide"].zero_()
    step(both, values)
    assert values[0]["wide"].dtype == torch.bfloat16
    np.testing.assert_array_equal(both[1].residual("wide"), before)
    assert (both[0].residual("wide") != before).any()


def test_a_step_reads_no_value():
    """Tensors of torch's device `meta` have none."""
    engine = engines()[0]
    given = [
        Gradient(name, SHAPES[name], torch.zeros(int(np.prod(SHAPES[name])), device="meta"))
        for name in NAMES
    ]
    way = engine.sort(given, ranks=RANKS, total=twice)
    rounds = engine.rounds(way.coded, ranks=RANKS, rank=0)
    ((carry,),) = [next(rounds)]
    assert (carry.kind, carry.words.dtype, carry.words.device.type) == (
        "gather", torch.uint8, "meta",
    )  # fmt: skip
    with pytest.raises(StopIteration):
        rounds.send([torch.cat([carry.words] * RANKS)])
    assert engine.report()["steps"] == 1
