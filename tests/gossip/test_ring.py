"""The ring of samples: none lost, none doubled, every one on every rank in turn."""

from collections import Counter
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sn_compress import CompressError, PayloadError
from sn_compress.gossip.ring import Ring


def rings_of(counts, batch_size, seed=0):
    """Shards of numbered samples: a matrix of floats and a label in bytes."""
    starts = np.cumsum([0, *counts])
    rings = []
    for rank, count in enumerate(counts):
        numbers = np.arange(starts[rank], starts[rank] + count)
        x = np.stack([numbers, -numbers], 1).astype(np.float32)
        labels = (numbers % 251).astype(np.uint8)
        rings.append(Ring([x, labels], counts=counts, rank=rank, batch_size=batch_size, seed=seed))
    return rings


def epoch(rings, upto=None):
    """One epoch in lock step; the samples each rank used, by number."""
    for ring in rings:
        ring.begin()
    used = [[] for _ in rings]
    for step in range(rings[0].steps if upto is None else upto):
        batches = [ring.batch(step) for ring in rings]
        wires = [ring.pack(batch) for ring, batch in zip(rings, batches, strict=True)]
        for rank, (ring, (x, labels)) in enumerate(zip(rings, batches, strict=True)):
            assert (x[:, 0] == -x[:, 1]).all()
            assert (x[:, 0].astype(int) % 251 == labels).all()
            used[rank] += x[:, 0].astype(int).tolist()
            ring.take(step, wires[rank - 1])
    if upto is None:
        for ring in rings:
            ring.end()
    return used


SHARDS = st.integers(1, 6).flatmap(
    lambda ranks: st.tuples(
        st.lists(st.integers(20, 40), min_size=ranks, max_size=ranks), st.integers(2, 45)
    )
)


@settings(max_examples=60, deadline=None)
@given(SHARDS, st.integers(0, 99))
def test_no_sample_is_lost_or_doubled_and_each_sees_every_rank(shards, seed):
    counts, batch_size = shards
    rings = rings_of(counts, batch_size, seed)
    everything = Counter(range(sum(counts)))
    seen = Counter()
    for number in range(len(counts)):
        used = epoch(rings)
        assert Counter(n for of_rank in used for n in of_rank) == everything
        seen.update((rank, n) for rank, of_rank in enumerate(used) for n in of_rank)
        assert all(ring.epoch == number + 1 for ring in rings)
    assert set(seen.values()) == {1}
    assert len(seen) == len(counts) * sum(counts)


def test_an_epoch_given_up_moves_nothing():
    rings = rings_of([9, 10, 8], 3)
    epoch(rings)
    before = [ring.state_dict() for ring in rings]
    epoch(rings, upto=2)
    for ring, state in zip(rings, before, strict=True):
        for now, then in zip(ring.fields, state["fields"], strict=True):
            assert (now == then).all()
    assert Counter(chain(*epoch(rings))) == Counter(range(27))


def test_a_saved_ring_goes_on_as_it_would_have():
    rings, later = rings_of([9, 10, 8], 3), rings_of([9, 10, 8], 3)
    epoch(rings)
    for ring, saved in zip(later, rings, strict=True):
        ring.load_state_dict(saved.state_dict())
    assert epoch(rings) == epoch(later)
    with pytest.raises(CompressError, match="saved shard"):
        later[0].load_state_dict({"epoch": 0, "fields": [np.zeros((3, 2), np.float32)]})


def test_what_cannot_go_round_is_refused():
    with pytest.raises(CompressError, match="each of 3 samples"):
        Ring([np.zeros(3), np.zeros(4)], counts=[3], rank=0, batch_size=2)
    with pytest.raises(CompressError, match="more equal"):
        Ring([np.zeros(2)], counts=[2, 40], rank=0, batch_size=4)
    (ring,) = rings_of([6], 3)
    ring.begin()
    with pytest.raises(PayloadError, match="iterate the same fields"):
        ring.take(1, ring.pack(ring.batch(0)))
    with pytest.raises(CompressError, match="0 of 2"):
        ring.end()


def test_workers_of_a_loader_are_refused():
    torch = pytest.importorskip("torch")
    from local_peers import Hall

    from sn_compress.torch.gossip import ring_shuffle

    def work(peers):
        stage = ring_shuffle(torch.arange(8), batch_size=4, group=peers)
        loader = torch.utils.data.DataLoader(
            stage, batch_size=None, num_workers=1, multiprocessing_context="fork"
        )
        with pytest.raises(CompressError, match="num_workers=0"):
            list(loader)

    Hall(1).run(work)
