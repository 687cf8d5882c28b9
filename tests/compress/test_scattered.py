"""Payloads that go to owners: pieces, bits and memories, without a framework."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from engines import Way, engines, noise, nowhere_on_host, step
from hypothesis import given, settings, strategies
from samples import alike

from sn_compress import FFTCodec, FFTCompression, PayloadError
from sn_compress.codecs.base import HEADER_BYTES
from sn_compress.engine.payloads import shares_of

SHAPES = {"wide": (300, 300), "kernel": (16, 8, 3, 3), "square": (64, 64), "rows": (9000, 3)}
FFT = FFTCompression.using(theta=0.9, min_elements=1)


def way_of(ranks, compression=FFT, shapes=SHAPES, **options):
    return Way("scattered", compression, ranks, shapes, **options)


@settings(max_examples=80, deadline=None)
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


def test_what_cannot_be_cut_and_two_ranks_gather_and_so_do_all_who_ask_for_it():
    axes = {"transform": "axes", "shape": (64, 64, 3, 3), "axes": (2, 3)}
    for unfit in ({"block": None}, {"window": "payload"}, axes):
        assert shares_of(FFTCodec(theta=0.9, **unfit), (64 * 64 * 9,), 8) is None
    paper = FFTCompression.using(mode="paper", min_elements=1)
    for ranks, compression in ((2, FFT), (5, FFT.using(scatter=False)), (5, paper)):
        way = way_of(ranks, compression)
        assert way.step(way.engines(), way.noise(0)).kinds == ["gather"]


@pytest.mark.parametrize("ranks", [3, 8, 40])
def test_what_is_sent_and_what_is_kept_is_what_there_was(ranks):
    way = way_of(ranks)
    all_ = way.engines()
    for t in range(3):
        values = way.noise(t)
        there = {
            name: np.mean(
                [own[name] + (e.residual(name) if e.remembers(name) else 0)
                 for e, own in zip(all_, values, strict=True)], axis=0
            )
            for name in SHAPES
        }  # fmt: skip
        assert way.step(all_, values).kinds == ["alltoall", "gather"]
        for name, wanted in there.items():
            kept = np.mean([engine.residual(name) for engine in all_], axis=0)
            # Transforms there and back of numbers of size about 1, rounded to 2**-24.
            assert abs(values[0][name] + kept - wanted).max() < 4e-6, name
            assert np.linalg.norm(kept) > 0.3 * np.linalg.norm(wanted)
    report = all_[0].report()
    assert (report["steps"], report["frequencies"]) == (3, len(SHAPES))
    assert 0.5 < report["relative_error"] < 1


def test_what_a_rank_receives_does_not_grow_with_ranks():
    def most(ranks, compression=FFT):
        way = way_of(ranks, compression, {"wide": (1024, 1024)})
        return max(way.step(way.engines(), way.noise(0)).received)

    few, many, gathered = most(4), most(16), most(16, FFT.using(scatter=False))
    assert many < 1.3 * few
    assert many < 0.14 * gathered  # 2 / 16, and headers


def test_the_bits_are_those_of_a_host_wherever_it_runs(monkeypatch):
    # Of each library's own FFT the last bit may be another.
    compression = FFT.using(transform="hadamard")
    ways = [way_of(4, compression, on_device=on_device) for on_device in (False, True)]
    here, there = (way.engines() for way in ways)
    for t in range(3):
        values, others = ways[0].noise(t), ways[1].noise(t)
        ways[0].step(here, values)
        with monkeypatch.context() as patch:
            nowhere_on_host(patch)
            ways[1].step(there, others)
        alike(others[0], values[0])
        alike(*([engine.residual("wide") for engine in own] for own in (there, here)))


@pytest.mark.parametrize(("ranks", "dtype", "on_device"), [
    (2, torch.float16, False), (4, torch.float16, False), (4, torch.bfloat16, True),
])  # fmt: skip
def test_half_precision_is_read_and_written_in_place(monkeypatch, ranks, dtype, on_device):
    if on_device:
        nowhere_on_host(monkeypatch)
    values = [
        {name: (1200 / ranks * torch.from_numpy(it)).to(dtype) for name, it in own.items()}
        for own in noise(1, ranks, SHAPES)
    ]
    sums = {name: torch.stack([own[name].float() for own in values]).sum(0) for name in SHAPES}
    assert max(float(it.abs().max()) for it in sums.values()) > 8000  # sums that halves may lose
    step(engines(FFT.using(theta=0.0, bits=12, mantissa=8), ranks), values, SHAPES)
    for name, total in sums.items():
        assert values[0][name].dtype == dtype
        error = (values[0][name].float() - total / ranks).abs().max()
        assert float(error) < 0.02 * float(total.abs().max() / ranks)


def test_there_may_be_no_memory():
    way = way_of(4, FFT.using(feedback=False))
    all_ = way.engines()
    way.step(all_, way.noise(0))
    assert not any(engine.remembers(name) for engine in all_ for name in SHAPES)


@pytest.mark.parametrize("round_", [1, 2])
def test_damage_in_either_round_is_an_error(round_):
    way = way_of(4)
    with pytest.raises(PayloadError, match="checksum"):
        step(way.engines(), way.noise(0), SHAPES, spoil=(round_, None))
