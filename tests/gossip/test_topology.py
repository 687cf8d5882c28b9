"""Topologies and their mixing matrices, for every number of ranks up to 64."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sn_compress.errors import CompressError
from sn_compress.gossip import (
    NAMES,
    Meeting,
    consensus_distance,
    spectral_gap,
    steps_to_exact,
    topology,
)
from sn_compress.gossip.topology import product

POWERS = [1, 2, 4, 8, 16, 32, 64]


def is_doubly_stochastic(matrix):
    # Each sum of r terms is rounded r times at most.
    slack = len(matrix) * np.finfo(float).eps
    sums = np.concatenate([matrix.sum(0), matrix.sum(1)])
    return matrix.min() >= 0 and abs(sums - 1).max() <= slack


def each(most=64):
    return [(n, r) for n in NAMES for r in range(1, most + 1) if n != "hypercube" or r in POWERS]


@pytest.mark.parametrize("name", NAMES)
def test_every_step_is_doubly_stochastic_and_moves_one_model(name):
    for _, ranks in [pair for pair in each() if pair[0] == name]:
        graph = topology(name, ranks)
        for step in range(graph.steps):
            meeting = graph.at(step)
            assert is_doubly_stochastic(meeting.matrix), (graph, step)
            # One entry beside the diagonal in a row and in a column: one model in, one out.
            away = meeting.matrix - np.diag(np.diag(meeting.matrix)) > 0
            assert max(away.sum(0).max(initial=0), away.sum(1).max(initial=0)) <= 1


@given(st.sampled_from(each(24)), st.integers(0, 40), st.integers(0, 5))
def test_rotated_steps_keep_what_steps_promise(case, step, seed):
    name, ranks = case
    graph = topology(name, ranks, rotate=True, seed=seed)
    assert is_doubly_stochastic(graph.matrix(step))
    assert graph.at(step) == topology(name, ranks, rotate=True, seed=seed).at(step)
    for rank in range(ranks):
        partner = graph.partner(rank, step)
        assert graph.partner(partner.source, step).target == rank
        assert graph.partner(partner.target, step).source == rank


@pytest.mark.parametrize("name", ["dissemination", "exponential", "hypercube", "exact"])
@pytest.mark.parametrize("power", range(7))
def test_powers_of_two_are_exact_after_log2_steps(name, power):
    graph = topology(name, 2**power)
    assert graph.exact
    assert graph.steps == max(power, 1)
    assert steps_to_exact(graph) == power
    # Halves of powers of two: not a single rounding.
    assert (product(graph) == 2.0**-power).all()


@pytest.mark.parametrize("ranks", range(1, 65))
def test_the_exact_graph_is_exact_in_its_steps(ranks):
    graph = topology("exact", ranks)
    twos = (ranks & -ranks).bit_length() - 1  # how often two divides it
    odd = ranks >> twos
    stated = twos + (2 * (odd.bit_length() - 1) + 1 if odd > 1 else 0)
    assert graph.steps == max(stated, 1)
    assert steps_to_exact(graph) == stated
    # Each step rounds a value of at most 1 twice.
    assert abs(product(graph) - 1 / ranks).max() <= 4 * graph.steps * np.finfo(float).eps


@given(st.integers(1, 64), st.integers(0, 3), st.integers(0, 2**32 - 1))
def test_rotation_keeps_exactness_in_every_period(ranks, cycle, seed):
    graph = topology("exact", ranks, rotate=True, seed=seed)
    found = np.eye(ranks)
    for step in range(cycle * graph.steps, (cycle + 1) * graph.steps):
        found = graph.at(step).mix(found)
    assert abs(found - 1 / ranks).max() <= 4 * graph.steps * np.finfo(float).eps


def test_rotation_reaches_everyone_in_time():
    met = {topology("dissemination", 16, rotate=True).partner(0, s).source for s in range(400)}
    assert met == set(range(1, 16))
    fixed = {topology("dissemination", 16).partner(0, s).source for s in range(400)}
    assert fixed == {15, 14, 12, 8}


@pytest.mark.parametrize("ranks", [3, 5, 6, 7, 12, 24, 63])
def test_what_is_not_exact_says_so(ranks):
    for name in ("dissemination", "exponential", "ring"):
        graph = topology(name, ranks)
        assert not graph.exact
        assert steps_to_exact(graph) is None
        assert 0 < spectral_gap(graph) < 1
    # Dissemination has passed everything on after its period, the ring after ranks - 1 steps.
    assert (product(topology("dissemination", ranks)) > 0).all()
    ring = topology("ring", ranks)
    assert (product(ring, ranks - 1) > 0).all()
    assert not (product(ring, ranks - 2) > 0).all()


@given(st.sampled_from(each(32)), st.integers(0, 9), st.integers(0, 2**32 - 1))
def test_mixing_keeps_the_mean_and_brings_ranks_no_further_apart(case, step, seed):
    meeting = topology(*case).at(step)
    values = np.random.default_rng(seed).normal(size=(case[1], 5))
    mixed = meeting.mix(values)
    slack = 32 * np.finfo(float).eps * abs(values).max()
    assert abs(mixed - meeting.matrix @ values).max() <= slack
    assert abs(mixed.mean(0) - values.mean(0)).max() <= slack
    assert consensus_distance(mixed) <= consensus_distance(values) + slack


def test_gaps_order_topologies_as_they_mix():
    gaps = {name: spectral_gap(topology(name, 64)) for name in NAMES}
    assert gaps["exact"] == gaps["hypercube"] == gaps["dissemination"] == 1
    assert gaps["ring"] < 0.002
    assert spectral_gap(topology("dissemination", 48)) > spectral_gap(topology("ring", 48))


def test_what_cannot_be_is_refused():
    with pytest.raises(CompressError, match=r"'exact' or 'dissemination'"):
        topology("hypercube", 6)
    with pytest.raises(CompressError, match="dissemination, exponential"):
        topology("torus", 4)
    with pytest.raises(CompressError, match="1 or more"):
        topology("ring", 0)
    with pytest.raises(CompressError, match="each rank once"):
        Meeting((1, 1), (0.5, 0.5))
    with pytest.raises(CompressError, match="a rank sends"):
        Meeting((1, 0), (0.5, 0.25))


def test_at_1024_ranks_it_is_still_quick_and_exact():
    graph = topology("exact", 1023)
    values = np.arange(1023.0)[:, None]
    for step in range(graph.steps):
        values = graph.at(step).mix(values)
    assert graph.steps == 19
    assert abs(values - 511).max() < 1e-9  # 19 steps of a few ulps of 1,022
