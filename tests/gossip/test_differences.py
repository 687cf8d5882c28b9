"""Compressed differences: both ends hold the same, and it goes to what the sender holds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sn_compress import CompressError, PayloadError, codec
from sn_compress.gossip.differences import Differences

SHAPES = [(40, 50), (7,), (1500,)]
N = 2000 + 7 + 1500
CODECS = {
    "top-k": codec("topk", theta=0.95),
    "fft": codec("fft", theta=0.8),
    "by shape": lambda shape: codec("axes", theta=0.9, shape=shape, axes=(0,)),
}


def ends(name="top-k", start=None):
    pair = Differences(SHAPES, CODECS[name]), Differences(SHAPES, CODECS[name])
    for end in pair:
        end.restart(np.zeros(N, np.float32) if start is None else start)
    return pair


@pytest.mark.parametrize("name", list(CODECS))
def test_both_ends_hold_the_same_bits_and_come_to_hold_the_values(name):
    sender, receiver = ends(name)
    values = np.random.default_rng(0).normal(size=N).astype(np.float32)
    left = []
    for _ in range(25):
        wire = sender.pack(values, 3)
        assert wire.dtype == np.uint8
        assert wire.size == sender.wire_bytes == receiver.wire_bytes
        found = receiver.unpack(wire, 1)
        assert (found == sender.sent_to(3)).all()
        assert (found == receiver.heard(1)).all()
        left.append(np.linalg.norm(found - values) / np.linalg.norm(values))
    # The small tensor is exact at once. Each message takes a share of what is left: top-k, the
    # slowest here, 5 % of the entries, the largest of them.
    assert (found[2000:2007] == values[2000:2007]).all()
    assert left[-1] < 0.3
    assert left[-1] < left[10] < left[0]


@settings(max_examples=20)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 99)), min_size=1, max_size=8))
def test_every_pair_of_ranks_has_a_copy_of_its_own(visits):
    """One sender, several targets in any order: each target holds what the sender thinks it does"""
    start = np.random.default_rng(7).normal(size=N).astype(np.float32)
    sender = Differences(SHAPES, CODECS["top-k"])
    sender.restart(start)
    receivers = [ends(start=start)[0] for _ in range(4)]
    for target, seed in visits:
        values = start + np.random.default_rng(seed).normal(size=N).astype(np.float32)
        receivers[target].unpack(sender.pack(values, target), 9)
    for target, receiver in enumerate(receivers):
        assert (receiver.heard(9) == sender.sent_to(target)).all()


def test_nan_reaches_the_partner_and_leaves_the_copies_clean():
    sender, receiver = ends()
    bad = np.ones(N, np.float32)
    bad[[3, 2003, 2500]] = np.nan, np.inf, -np.inf
    found = receiver.unpack(sender.pack(bad, 0), 0)
    for stretch in (slice(0, 2000), slice(2000, 2007), slice(2007, N)):
        assert not np.isfinite(found[stretch]).all()
    good = np.ones(N, np.float32)
    for _ in range(60):
        found = receiver.unpack(sender.pack(good, 0), 0)
    assert (found == sender.sent_to(0)).all()
    assert abs(found - 1).max() < 0.01


def test_saved_copies_go_on_bit_by_bit():
    sender, receiver = ends()
    values = np.random.default_rng(1).normal(size=N).astype(np.float32)
    receiver.unpack(sender.pack(values, 2), 5)
    fresh = Differences(SHAPES, CODECS["top-k"]), Differences(SHAPES, CODECS["top-k"])
    fresh[0].load_state_dict(sender.state_dict())
    fresh[1].load_state_dict(receiver.state_dict())
    expected = receiver.unpack(sender.pack(values, 2), 5)
    assert (fresh[1].unpack(fresh[0].pack(values, 2), 5) == expected).all()


def test_what_is_not_a_message_is_refused():
    sender, receiver = ends()
    wire = sender.pack(np.ones(N, np.float32), 0)
    with pytest.raises(PayloadError, match="same codec"):
        receiver.unpack(wire[:-16], 0)
    damaged = wire.copy()
    damaged[100] ^= 4
    with pytest.raises(PayloadError, match="checksum"):
        receiver.unpack(damaged, 0)
    with pytest.raises(CompressError, match="restart"):
        Differences(SHAPES, CODECS["top-k"]).pack(np.ones(N, np.float32), 0)
    with pytest.raises(CompressError, match="saved copy has shape"):
        Differences([(3,)], CODECS["top-k"]).load_state_dict(sender.state_dict())
