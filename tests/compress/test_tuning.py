"""The tuner: all ranks decide alike, once, and trust the clock over the model."""

import itertools
import logging
from dataclasses import replace

import numpy as np
import pytest
from test_agreement import on_ranks

from sn_compress import AutoCompression, CompressError
from sn_compress.prediction.cost import Link, collective_s
from sn_compress.prediction.rates import FREE, Rates
from sn_compress.prediction.tuning import Tuner

RANKS = 4
SHAPES = {"a": (512, 1024), "b": (512,), "c": (1000, 512)}
SLOW = Rates(*[1e-5] * 7)
CHOSEN = AutoCompression.using(warmup=3).settings


class World:
    """Ranks as threads, with a clock of its own for each."""

    def __init__(self, link, *, ranks=RANKS):
        self.link, self.now = link, [0.0] * ranks
        self.names = [[] for _ in range(ranks)]

    def run(self, body, **settings):
        """body(rank, tuner) on a thread for each rank; what they return."""
        ranks = len(self.now)

        def work(rank, total):
            def timed(name, values):
                self.names[rank].append(name)
                took = collective_s("allreduce", values.nbytes, ranks, self.link)
                # Ranks measure slightly different times.
                self.now[rank] += took * (1 + 0.01 * rank)
                return total(name, values)

            clock = lambda: self.now[rank]  # noqa: E731
            return body(rank, Tuner(CHOSEN, ranks=ranks, total=timed, clock=clock, **settings))

        return on_ranks(ranks, work)


def train(world, count, seconds_of, **settings):
    """Methods of "a" step by step, by rank, and the tuners."""

    def body(rank, tuner):
        seen = []
        for _ in range(count):
            # Ranks finish their tensors in different orders.
            names = sorted(SHAPES, reverse=bool(rank % 2))
            methods = {name: tuner.method(name, SHAPES[name]) for name in names}
            seen.append(methods)
            world.now[rank] += seconds_of(methods) * (1 + 0.02 * rank)
        return seen, tuner

    return world.run(body, **settings)


def by_bytes(link):
    """Seconds of a step in which only plain tensors cost anything."""

    def seconds(methods):
        size = sum(4 * int(np.prod(SHAPES[n])) for n, way in methods.items() if way == "plain")
        return 0.01 + collective_s("allreduce", size, RANKS, link)

    return seconds


def test_a_slow_link_is_compressed_on_all_ranks_alike_once_and_for_good(caplog):
    caplog.set_level(logging.INFO, "sn_compress.prediction.tuning")
    link = Link.of_gbit(0.1)
    world = World(link)
    found = train(world, 60, by_bytes(link), rates=FREE)
    seen, tuner = found[0]
    assert all(own == seen for own, _ in found)
    assert seen[0] == dict.fromkeys(SHAPES, "plain")
    assert all(len(set(step.values())) == 1 for step in seen), "one choice for all tensors"
    changes = sum(a != b for a, b in itertools.pairwise(seen))
    assert changes == 1, "plain at first, then compressed"
    assert tuner.settled
    assert tuner.report()["tuned_tensors"] == 2, "the vector is not worth it"
    assert tuner.decision.link.bytes_per_s == pytest.approx(link.bytes_per_s, rel=0.03)
    said = [r.message for r in caplog.records if "ms a step" in r.message]
    assert len(said) == RANKS  # one line a rank
    assert sum(name.startswith("sn.tune.rates") for name in world.names[0]) == 1


def test_a_fast_link_stays_plain_and_nothing_is_tried():
    link = Link.of_gbit(100, latency_s=1e-6, operation_s=1e-5)
    for seen, tuner in train(World(link), 30, by_bytes(link), rates=SLOW):
        assert all(methods["a"] == "plain" for methods in seen)
        assert tuner.settled


@pytest.mark.parametrize(("gbit", "expected", "options"), [
    (0.1, "shared", {"rates": FREE}),
    (1, "cast", {"rates": replace(FREE, pass_s=1e-6, whole_s=1e-6), "casts": True}),
])  # fmt: skip
def test_what_the_clock_does_not_confirm_is_given_up(caplog, gbit, expected, options):
    caplog.set_level(logging.INFO, "sn_compress.prediction.tuning")

    def seconds(methods):
        return 0.2 if methods["a"] == "plain" else 0.199

    for seen, tuner in train(World(Link.of_gbit(gbit)), 40, seconds, **options):
        assert expected in {methods["a"] for methods in seen}
        assert seen[-1] == dict.fromkeys(SHAPES, "plain")
        assert tuner.settled
        assert tuner.report()["tuned_tensors"] == 0
    assert "plain Horovod is faster here" in caplog.text


def test_the_trial_waits_for_the_dense_steps_of_the_shared_exchange():
    link = Link.of_gbit(0.1)
    seen, tuner = train(World(link), 60, by_bytes(link), rates=FREE, steps=4, skip=2)[0]
    assert tuner.settled
    # What is timed in a trial would else be the dense steps, as slow as plain.
    assert seen[-1]["a"] == "shared"


def test_settled_steps_send_nothing_of_the_tuner():
    world = World(Link.of_gbit(0.1))

    def body(rank, tuner):
        while not tuner.settled:
            tuner.method("a", SHAPES["a"])
            world.now[rank] += 0.1
        before = len(world.names[rank])
        for _ in range(50):
            tuner.method("a", SHAPES["a"])
        return len(world.names[rank]) - before

    assert world.run(body, rates=FREE) == [0] * RANKS


def test_the_codec_is_measured_where_no_rates_are_given():
    link = Link.of_gbit(0.1)
    found = train(World(link, ranks=2), 12, by_bytes(link))
    one, two = (tuner.decision for _, tuner in found)
    assert one == two
    assert all(value > 0 for value in vars(one.rates).values())


@pytest.mark.parametrize(
    ("gbit", "pass_s", "expected"),
    [(0.1, 1e-9, "shared"), (5, 1e-6, "cast"), (5, 1e-9, "shared"), (1000, 1e-6, "plain")],
)
def test_casts_are_taken_between_links_for_low_rank_and_for_plain(gbit, pass_s, expected):
    link = Link.of_gbit(gbit, latency_s=1e-6, operation_s=1e-5)
    rates = replace(FREE, pass_s=pass_s, whole_s=pass_s, owners_s=1e-10)

    def seconds(methods):
        return 1.0 if methods["a"] == "plain" else 0.5

    for seen, tuner in train(World(link), 40, seconds, rates=rates, casts=True):
        assert tuner.settled
        assert {methods["a"] for methods in seen} == {"plain", expected}
    if expected == "cast":
        seen, _ = train(World(link), 40, seconds, rates=rates)[0]
        assert "cast" not in {methods["a"] for methods in seen}, "only where a rim can"


def test_one_rank_alone_stays_plain():
    """A plain all-reduce of a process set of one: there is no link to measure."""
    world = World(Link(1e6), ranks=1)
    ((seen, tuner),) = train(world, 20, lambda methods: 1.0)
    assert seen == 20 * [dict.fromkeys(SHAPES, "plain")]
    assert tuner.settled
    assert tuner.report()["plain_step_s"] == 1.0
    with pytest.raises(CompressError, match="steps=0"):
        Tuner(CHOSEN, ranks=2, total=None, steps=0)
