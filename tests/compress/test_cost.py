"""The cost model against closed forms, against brute force, and against what is really sent."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sessions import words_sent

from sn_cli.main import main
from sn_compress import CompressError, FFTCompression, Link, LowRankCompression, predict
from sn_compress.allreduce.exchange import AllReduceExchange
from sn_compress.engine.payloads import shares_of
from sn_compress.prediction.cost import (
    FUSED_BYTES,
    Layer,
    Route,
    break_even,
    collective_s,
    layers,
    step,
    wire_bytes,
)
from sn_compress.prediction.predict import MARGIN, METHODS, routes_of
from sn_compress.prediction.rates import FREE, RECORDED, Rates, fit_link, measure_rates
from sn_compress.settings import Settings

LINK = Link(1.25e9, latency_s=20e-6, operation_s=1e-3)
SOME = Rates(1e-9, 1e-9, 1e-10, 2e-9, 1e-10, 1e-8, 1e-9, 1e-9)

sizes = st.integers(1, 10**8)
seconds = st.floats(0, 0.1)
links = st.builds(Link, st.floats(1e6, 1e10), st.floats(0, 1e-3), st.floats(0, 1e-2))


def plain(size):
    return Route("plain", (("allreduce", size),), (0.0, 0.0))


@st.composite
def options(draw):
    """Routes by three methods for up to four tensors."""
    count = draw(st.integers(1, 4))

    def routes(method, *collectives):
        return [
            Route(
                method,
                tuple((collective, draw(sizes)) for collective in collectives),
                tuple(draw(seconds) for _ in range(len(collectives) + 1)),
            )
            for _ in range(count)
        ]

    return {
        "plain": [plain(draw(sizes)) for _ in range(count)],
        "shared": routes("shared", "allreduce", "allreduce"),
        "gather": routes("gather", "alltoall", "allgather"),
    }


@pytest.mark.parametrize(("model", "elements", "tensors"), [
    ("alexnet", 62_378_344, 16),  # Krizhevsky's, without groups
    ("vgg16", 138_357_544, 32),
    ("resnet50", 25_557_032, 161),
    ("gpt2-small", 124_439_808, 148),
])  # fmt: skip
def test_layers_have_the_published_sizes(model, elements, tensors):
    found = layers(model)
    assert sum(layer.elements for layer in found) == elements
    assert len(found) == len({layer.name for layer in found}) == tensors
    assert predict(found, ranks=2, link=LINK).row("plain").speedup == 1


def test_large_tensors_are_fused_into_several_collectives_and_one_rank_exchanges_nothing():
    one, two = (step([plain(n)] * 2, ranks=4, link=LINK) for n in (400, FUSED_BYTES))
    wire = 2 * 3 / 4 * 2 * (FUSED_BYTES - 400) / LINK.bytes_per_s
    assert two.seconds - one.seconds - wire == pytest.approx(1e-3 + 6 * 20e-6, rel=1e-6)
    assert step([plain(400)], ranks=1, link=LINK, compute_s=0.5).seconds == 0.5


@given(options(), links, st.integers(2, 64), st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_no_step_beats_its_parts_or_exceeds_their_sum(routes, link, ranks, compute):
    """Overlap may even lengthen a step a little: what is ready first goes first, as in Horovod.

    A resource does one thing at a time, and a tensor goes in order.
    """
    slack = 1 + 1e-9  # one rounding of each sum
    for rows, overlap in itertools.product(routes.values(), (False, True)):
        found = step(rows, ranks=ranks, link=link, compute_s=compute, overlap=overlap)
        assert found.seconds <= (compute + found.codec_s + found.exchange_s) * slack
        for part in (compute, found.codec_s, found.exchange_s):
            assert found.seconds * slack >= part
        for what in ("codec", "link"):
            busy = [event for event in found.events if event.what == what]
            assert all(a.end <= b.start for a, b in itertools.pairwise(busy))
        for place in range(len(rows)):
            mine = [event for event in found.events if event.tensor == place]
            assert all(a.end <= b.start for a, b in itertools.pairwise(mine))


def seconds_of(route):
    return lambda link: step([route], ranks=8, link=link).seconds


def test_break_even_is_the_closed_form():
    """(V0 - V1) / (a1 + c1 - a0): bytes saved over seconds lost."""
    small = Route("gather", (("allgather", 10**6),), (0.01, 0.02))
    saved = wire_bytes("allreduce", 4 * 10**7, 8) - wire_bytes("allgather", 10**6, 8)
    lost = 0.03 + collective_s("allgather", 0, 8, LINK) - collective_s("allreduce", 0, 8, LINK)
    found = break_even(seconds_of(plain(4 * 10**7)), seconds_of(small), link=LINK)
    assert found == pytest.approx(saved / lost, rel=2e-3)  # twice its own tolerance
    # And of what always or never pays an end of what is asked about.
    fast, slow = seconds_of(plain(1000)), seconds_of(plain(10**9))
    assert break_even(slow, fast, link=LINK, high=1e12) == 1e12
    assert break_even(fast, slow, link=LINK, low=1e6) == 1e6


@given(st.floats(1e6, 1e11), st.floats(0, 1e-2), st.integers(2, 256))
def test_a_link_is_found_again_from_two_times(bytes_per_s, latency, ranks):
    link = Link(bytes_per_s, latency_s=latency, operation_s=0.0)
    times = [collective_s("allreduce", size, ranks, link) for size in (64, 10**8)]
    found = fit_link((64, 10**8), times, ranks)
    # A difference of floats near `times[1]`: their rounding, over what is left of them.
    loss = 1e-14 * times[1] / (times[1] - times[0])
    assert found.bytes_per_s == pytest.approx(bytes_per_s, rel=max(1e-9, loss))
    assert found.latency_s == pytest.approx(latency, rel=1e-6, abs=1e-9)


def test_sizes_are_those_of_the_real_exchange():
    """A trained session sends, in all, what the model says, whatever ranks it chose."""
    shapes = {"a": (256, 512), "b": (256,), "c": (300, 256), "d": (16, 9)}
    model = [Layer(name, shape) for name, shape in shapes.items()]
    chosen = LowRankCompression.using(ratio=40.0, warmup=1).settings
    ranks = 8
    sent = 4 * words_sent(AllReduceExchange(**chosen.shared), model, ranks)
    routes = routes_of("shared", model, ranks=ranks, settings=chosen, rates=FREE)
    modelled = sum(route.sent_bytes for route in routes)
    # Which direction was left out for want of budget may differ: at most the dearest of them.
    assert modelled == pytest.approx(sent, abs=4 * 2 * (2 + (512 + 256) // 4))


def test_sizes_of_two_ranks_are_those_of_the_payloads():
    codec = Settings().codec(threads=1)
    tensors = [Layer("a", (100, 100)), Layer("b", (10,))]
    route, small = routes_of("gather", tensors, ranks=2, settings=Settings(), rates=SOME)
    payload = codec.encode(np.ones(10_000, np.float32))
    assert route.rounds == (("allgather", payload.nbytes + 4),)
    assert route.codec_s == pytest.approx((10_000 * 1e-9, 10_000 * (1e-9 + 2e-10)))
    assert small.method == "plain"


@pytest.mark.parametrize("ranks", [3, 64])
def test_sizes_of_many_ranks_are_what_they_send_on_average(ranks):
    model = [Layer("a", (512, 512)), Layer("b", (10,)), Layer("c", (300, 300))]
    first, _, last = routes_of("gather", model, ranks=ranks, settings=Settings(), rates=SOME)
    shares = shares_of(Settings().codec(threads=1), (512 * 512, 300 * 300), ranks)
    sent = sum(sum(shares.sent(rank, 2)) for rank in range(ranks)) / ranks
    tokens, rounding = 4, 2
    slack = 2 * (tokens + rounding)
    assert first.sent_bytes + last.sent_bytes == pytest.approx(sent, abs=slack)
    received = (ranks - 1) * sum(shares.parts_bytes + shares.means_bytes) / ranks
    wire = first.wire_bytes(ranks) + last.wire_bytes(ranks)
    assert wire == pytest.approx(received, abs=2 * (4 + 1 + ranks))
    for route in (first, last):
        assert [kind for kind, _ in route.rounds] == ["alltoall", "allgather"]


def test_casts_are_as_many_bytes_as_a_ring_of_16_bits():
    tensors = [Layer("a", (512, 1024)), Layer("bias", (512,)), Layer("c", (1000, 512))]
    ways = {
        method: routes_of(method, tensors, ranks=8, settings=Settings(), rates=FREE)
        for method in ("cast", "fp16")
    }
    assert [route.method for route in ways["cast"]] == ["cast", "plain", "cast"]
    for ours, ring in zip(ways["cast"][::2], ways["fp16"][::2], strict=True):
        assert ours.wire_bytes(8) == pytest.approx(ring.wire_bytes(8))
    fp8 = Settings(compression="CastCompression", dtype="fp8")
    (first, *_) = routes_of("cast", tensors, ranks=8, settings=fp8, rates=FREE)
    assert first.wire_bytes(8) == pytest.approx(ways["fp16"][0].wire_bytes(8) / 2 * 257 / 256)


def test_what_is_sent_hardly_grows_with_the_ranks_but_for_the_papers_gather():
    paper = FFTCompression.using(mode="paper", theta=0.9).settings
    grown = {}
    for name, chosen in (("paper", paper), ("ours", None)):
        few, many = (
            predict(layers("alexnet"), ranks=r, link=LINK, settings=chosen) for r in (16, 1024)
        )
        grown[name] = {
            it: many.row(it).step.wire_bytes / few.row(it).step.wire_bytes for it in METHODS
        }
    assert grown["paper"]["FFTCompression"] > 60
    assert max(grown["ours"].values()) < 1.2


def test_prediction_refuses_what_it_cannot_mean():
    with pytest.raises(CompressError, match="resnet50"):  # names the models there are
        layers("lenet")
    with pytest.raises(CompressError, match="ranks"):
        predict(layers("alexnet"), ranks=0, link=LINK)
    with pytest.raises(CompressError, match="1,048,576 ranks or fewer"):
        predict(layers("alexnet"), ranks=10**9, link=LINK)
    with pytest.raises(CompressError, match="bytes_per_s"):
        Link(0)
    with pytest.raises(CompressError, match="one more"):
        Route("x", (("allreduce", 1), ("allreduce", 2)), (0.0,))


def test_layers_without_elements_are_predicted():
    for empty in ([Layer("a", (0, 4))], [Layer("a", (0,)), Layer("b", (0, 4))]):
        found = predict(empty, ranks=8, link=LINK)
        assert [row.ratio for row in found.rows] == [1.0] * len(found.rows)
        assert "0 parameters" in found.table()


def test_measured_rates_are_seconds():
    lines = []
    found = measure_rates(Settings(), repeat=1, say=lines.append)
    assert len(lines) == 2
    for name, value in vars(found).items():
        # From a thousandth of a cycle to ten microseconds for an element; a tensor may take more.
        assert 1e-13 <= value < (0.1 if name.endswith("tensor_s") else 1e-5), name


def test_auto_is_what_autocompression_settles_on():
    """Plain, unless low rank or casts are faster by its margin: never fp16, a gather, or nodes."""
    autos = []
    for gbit in (0.1, 1, 10, 100, 2400):
        found = predict(layers("alexnet"), ranks=8, link=Link.of_gbit(gbit), rates=SOME)
        seconds = {row.method: row.step.seconds for row in found.rows}
        best = min("LowRankCompression", "CastCompression", key=seconds.__getitem__)
        worth_it = seconds[best] <= (1 - MARGIN) * seconds["plain"]
        assert found.auto == (best if worth_it else "plain")
        assert f"AutoCompression comes to: {found.auto}" in found.table()
        autos.append(found.auto)
    assert autos == ["LowRankCompression"] * 2 + ["CastCompression"] + ["plain"] * 2


def test_casts_have_a_row_where_their_codec_is_known():
    link = Link.of_gbit(1)
    recorded = predict(layers("alexnet"), ranks=8, link=link, rates=RECORDED["core"])
    assert "CastCompression" not in {row.method for row in recorded.rows}
    assert "CastCompression: its codec is not among these rates" in recorded.table()
    assert "by nodes" not in recorded.table()
    free = predict(layers("alexnet"), ranks=8, link=link)
    half = free.row("fp16").step.wire_bytes
    assert free.row("CastCompression").step.wire_bytes == pytest.approx(half, rel=1e-3)


def test_the_command_prints_the_table_and_draws(tmp_path, capsys):
    picture = tmp_path / "p.png"
    flags = ["--model", "alexnet", "--ranks", "8", "--gbit", "1", "--codec", "free"]
    assert main(["compress", "predict", *flags, "--plot", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "62,378,344 parameters, 8 ranks, 1 Gbit/s" in printed
    assert all(f"\n{method} " in printed for method in METHODS)
    assert picture.read_bytes().startswith(b"\x89PNG")
