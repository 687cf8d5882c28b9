"""Seconds and bytes of nodes of several ranks: by hand, and what the exchange's own code counts."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sessions import words_sent

from sn_cli.main import main
from sn_compress import CompressError, Link, LowRankCompression, predict
from sn_compress.allreduce.exchange import AllReduceExchange
from sn_compress.engine.hierarchy import Owners
from sn_compress.engine.payloads import shares_of
from sn_compress.ops.fixed_point import MAX_RANKS, Digits
from sn_compress.prediction.cost import (
    ALONE,
    INSIDE,
    Host,
    Layer,
    Route,
    collective_s,
    latency_s,
    layers,
    step,
    wire_bytes,
)
from sn_compress.prediction.predict import (
    BY_NODES,
    METHODS,
    routes_by_method,
    routes_by_nodes,
    routes_of,
)
from sn_compress.prediction.rates import FREE, RECORDED, Rates
from sn_compress.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
# Two nodes of four: 1 MB/s between them, 10 MB/s inside.
FAST = Link(1e7, latency_s=1e-4, operation_s=0.0)
LINK = Link(1e6, latency_s=1e-3, operation_s=0.5, gpus=4, inside=FAST)
TREE = replace(LINK, tree=True)
QUICK_BETWEEN = replace(LINK, bytes_per_s=1e9)
FLAT = Link(1.25e9, latency_s=20e-6, operation_s=1e-3)


@pytest.mark.parametrize(("kind", "link", "ranks", "expected"), [
    # 14 steps of a ring, one of each 4 between nodes; 2 * 7/8 of a megabyte leave each node.
    ("allreduce", LINK, 8, 0.5 + 2 * 1e-3 + 12 * 1e-4 + 1.75),
    # Up and down one level of nodes, and along three ranks inside.
    ("allreduce", TREE, 8, 0.5 + 2 * 1e-3 + 6 * 1e-4 + 1.75),
    ("allreduce", TREE, 4096, 0.5 + 20 * 1e-3 + 6 * 1e-4 + 2 * 4095 / 4096),
    ("allgather", LINK, 8, 0.5 + 1 * 1e-3 + 6 * 1e-4 + 7),
    # No tree carries these. Of 7 others 4 are on the other node, for each of 4 ranks.
    ("allgather", TREE, 8, 0.5 + 1 * 1e-3 + 6 * 1e-4 + 7),
    ("alltoall", LINK, 8, 0.5 + 4 * 1e-3 + 3 * 1e-4 + 4 * 4 / 7),
    # Three others bring an owner a megabyte each.
    ("inside", LINK, 8, 0.5 + 3 * 1e-4 + 0.3),
    # One node: nothing leaves it.
    ("allreduce", LINK, 4, 0.5 + 6 * 1e-4 + 0.15),
    ("alltoall", LINK, 4, 0.5 + 3 * 1e-4 + 0.1),
    # The slower link counts.
    ("allreduce", QUICK_BETWEEN, 8, 0.5 + 2 * 1e-3 + 12 * 1e-4 + 0.175),
    ("alltoall", QUICK_BETWEEN, 8, 0.5 + 4 * 1e-3 + 3 * 1e-4 + 0.1 * 3 / 7),
    # A rank a node: what is for others is sent once, to each its own; one rank sends nothing.
    ("allreduce", FLAT, 8, 1e-3 + 14 * 20e-6 + 2 * 7 / 8 * 1e6 / 1.25e9),
    ("allgather", FLAT, 8, 1e-3 + 7 * 20e-6 + 7 * 1e6 / 1.25e9),
    ("alltoall", FLAT, 8, 1e-3 + 7 * 20e-6 + 1e6 / 1.25e9),
    ("allreduce", FLAT, 1, 0.0),
])  # fmt: skip
def test_collectives_by_hand(kind, link, ranks, expected):
    assert collective_s(kind, 10**6, ranks, link) == pytest.approx(expected, rel=1e-12)


def test_bytes_of_a_ring_leave_a_node_once_and_those_of_an_all_to_all_for_each_rank():
    one, eight = (wire_bytes("allreduce", 800, 128, gpus=gpus) for gpus in (1, 8))
    assert one == eight == 2 * 127 / 128 * 800
    assert wire_bytes("alltoall", 127, 128, gpus=8) == 8 * 120
    assert all(
        wire_bytes(kind, 100, 8, gpus=8) == 0 for kind in ("allreduce", "allgather", "alltoall")
    )


def test_a_step_by_nodes_is_its_parts_one_after_the_other():
    """Of one tensor of 1,000 numbers, which one of four ranks of a node owns."""
    rates = Rates(bucket_s=3e-6)
    (route,) = routes_by_nodes(
        "plain", [Layer("w", (1000,))], nodes=2, gpus=4, settings=Settings(), rates=rates
    )
    assert route.rounds == (("inside", 4000), ("allreduce", 4000), ("inside", 4000))
    # Into the bucket and out of it, three passes in all; four parts are added up, a pass for each.
    assert route.codec_s == pytest.approx((1.5e-3, 4e-3, 0.0, 1.5e-3))
    found = step([route], ranks=8, link=LINK)
    inside = 0.5 + 3e-4 + 3 * 4000 / 1e7
    between = 0.5 + 2 * 1e-3 + 4000 / 1e6
    assert found.exchange_s == pytest.approx(2 * inside + between, rel=1e-12)
    assert found.seconds == pytest.approx(2 * inside + between + 7e-3, rel=1e-12)
    assert (found.wire_bytes, found.sent_bytes) == (4000, 4000)


def test_codec_work_is_divided_among_the_ranks_of_a_node():
    rates = Rates(pass_s=1e-9, whole_s=1e-9)
    model = [Layer(f"w{number}", (512, 512)) for number in range(16)]
    chosen = LowRankCompression.settings
    flat = routes_of("shared", model, ranks=2, settings=chosen, rates=rates)
    own = routes_by_nodes("shared", model, nodes=2, gpus=8, settings=chosen, rates=rates)
    both = [sum(sum(it.codec_s) for it in routes) for routes in (flat, own)]
    assert both[1] == pytest.approx(both[0] / 8, rel=1e-9)
    assert [it.rounds[1:-1] for it in own] == [it.rounds for it in flat]


def test_cores_that_ranks_share_by_hand():
    """Two nodes of four on one host of two cores: all eight compute, encode and move there."""
    host = Host(cores=2, ranks=8, move_s=1e-9, sum_s=2e-9)
    fast = replace(LINK, bytes_per_s=1e15, inside=replace(FAST, bytes_per_s=1e15))
    flat = Route("plain", (("allreduce", 10**6),), (1e-3, 2e-3), 10**6 // 4)
    found = step([flat], ranks=8, link=fast, compute_s=1.0, host=host)
    late = latency_s("allreduce", 8, fast)
    assert found.codec_s == pytest.approx(4 * 3e-3)  # eight ranks on two cores
    moved = 8 * 1.75e6 * 2e-9 / 2
    assert found.exchange_s - late == pytest.approx(moved)
    assert found.cores_s == pytest.approx(1.0 + 0.012 + moved)
    assert found.seconds == pytest.approx(found.cores_s + late)
    # By nodes: three quarters to owners, and back; between, each owner exchanges its quarter.
    sizes = ("inside", 10**6), ("allreduce", 4 * 10**6), ("inside", 10**6)
    own = Route("plain", sizes, (0.0,) * 4, 10**6)
    found = step([own], ranks=8, link=fast, host=host)
    assert found.cores_s == pytest.approx(8 * (2 * 3e6 * 1e-9 + 1e6 * 2e-9) / 2)


def test_cores_are_left_to_the_busiest_owner():
    """On cores enough the busiest owner sets the pace; on few all owners' work does."""
    rates = Rates(pass_s=1e-9, whole_s=1e-9)
    uneven = [Layer("large", (600, 500)), Layer("small", (100, 500))]
    chosen = LowRankCompression.settings

    def codec_s(host):
        routes = routes_by_nodes(
            "shared", uneven, nodes=2, gpus=2, settings=chosen, rates=rates, host=host
        )
        return step(routes, ranks=4, link=replace(LINK, gpus=2), host=host).codec_s

    all_s = sum(
        sum(it.codec_s) for it in routes_of("shared", uneven, ranks=2, settings=chosen, rates=rates)
    )
    assert codec_s(ALONE) == pytest.approx(all_s * 6 / 7, rel=0.01)
    assert codec_s(Host(2, 4)) == pytest.approx(all_s)  # two nodes' work on two cores
    assert codec_s(Host(1, 4)) == pytest.approx(2 * all_s)


def test_the_command_counts_cores(capsys):
    words = ["--nodes", "2", "--gpus", "8", "--gbit", "10", "--codec", "core", "--cores", "2"]
    assert main(["compress", "predict", *words, "--model", "alexnet", "--json"]) == 0
    counted = json.loads(capsys.readouterr().out)["methods"][0]["step_s"]
    link = Link.of_gbit(10, gpus=8, inside=INSIDE["nvlink"])
    plain = predict(layers("alexnet"), ranks=16, link=link).row("plain").step.seconds
    assert counted > 1.2 * plain


def test_one_rank_a_node_is_what_it_was():
    """As if nobody had heard of nodes: a tree of one rank a node is the only new choice."""
    link = Link.of_gbit(1)
    found = predict(layers("alexnet"), ranks=8, link=link)
    assert [row.method for row in found.rows] == [*METHODS]
    assert "node" not in found.table()
    tree = predict(layers("alexnet"), ranks=8, link=replace(link, tree=True))
    # Six messages in the place of fourteen, for each of AlexNet's buckets.
    saved = found.row("plain").step.seconds - tree.row("plain").step.seconds
    buckets = saved / (8 * link.latency_s)
    assert buckets == pytest.approx(round(buckets))
    assert buckets > 0


def owned(model, gpus):
    """Of each rank of a node, what it owns: as DDP's hook and Horovod's optimizer decide it."""
    owners = Owners(gpus)
    found = [[] for _ in range(gpus)]
    for layer in reversed(model):
        found[owners.of(layer.name, layer.elements)].append(layer)
    return found


MODEL = [
    layer
    for number in range(16)
    for layer in (Layer(f"w{number}", (384, 256)), Layer(f"b{number}", (384,)))
]
NODES, GPUS = 128, 8


def test_low_rank_of_a_thousand_ranks_sends_what_the_formula_says():
    """128 nodes of 8: sessions of the eight owners, as if they were among 1,024 ranks."""
    chosen = LowRankCompression.using(ratio=40.0, warmup=1).settings
    sent = 0
    for own in owned(MODEL, GPUS):
        sent += 4 * words_sent(AllReduceExchange(**chosen.shared), own, NODES)
    routes = routes_by_nodes("shared", MODEL, nodes=NODES, gpus=GPUS, settings=chosen, rates=FREE)
    assert sum(it.sent_bytes for it in routes) / GPUS == pytest.approx(sent / GPUS, rel=0.05)


def test_payloads_of_a_thousand_ranks_are_what_the_formula_says():
    settings, model = Settings(), layers("gpt2-small")
    codec = settings.codec(threads=1)
    left = 0.0  # of a node, to others
    for own in owned(model, GPUS):
        sizes = tuple(it.elements for it in own if settings.compresses(it.shape))
        shares = shares_of(codec, sizes, NODES)
        # What others send an owner leaves them; a mean leaves its owner for all others.
        left += (NODES - 1) * sum(shares.parts_bytes + shares.means_bytes) / NODES
        plain = sum(4 * it.elements for it in own if not settings.compresses(it.shape))
        left += wire_bytes("allreduce", plain, NODES)
    routes = routes_by_nodes("gather", model, nodes=NODES, gpus=GPUS, settings=settings, rates=FREE)
    said = sum(it.wire_bytes(NODES * GPUS, GPUS) for it in routes)
    assert said / GPUS == pytest.approx(left / GPUS, rel=0.05)


def test_digits_take_a_byte_up_to_42_nodes_of_any_size():
    assert [Digits.of(nodes).bits for nodes in (42, 43)] == [8, 16]
    # So flat 336 ranks send digits of two bytes where 42 nodes of eight send one.
    matrices = [layer for layer in MODEL if len(layer.shape) == 2]
    found = routes_by_method(matrices, ranks=336, gpus=8, settings=Settings(ratio=1000), rates=FREE)
    flat, own = (
        sum(it.sent_bytes for it in found[way])
        for way in ("LowRankCompression", "LowRankCompression by nodes")
    )
    assert 1.5 < flat / own < 2


def test_a_cluster_has_rows_by_nodes_and_says_what_cannot_be():
    link = Link.of_gbit(25, gpus=8, inside=INSIDE["nvlink"], tree=True)
    found = predict(MODEL, ranks=16_384, link=link)
    assert [row.method for row in found.rows] == [
        "plain", "fp16", "CastCompression", "FFTCompression", "plain by nodes",
        "CastCompression by nodes", "FFTCompression by nodes",
    ]  # fmt: skip
    assert (
        f"LowRankCompression: no sum is of 16,384 ranks; expected {MAX_RANKS:,} or fewer"
        in found.table()
    )
    with pytest.raises(CompressError, match=r"no sum is of 2,048 ranks"):
        found.row("LowRankCompression by nodes")
    with pytest.raises(CompressError, match="no row 'zip'"):
        found.row("zip")
    one = predict(MODEL, ranks=8, link=link)
    assert not set(BY_NODES) & {row.method for row in one.rows}  # there is nothing between nodes
    assert one.row("plain").step.wire_bytes == 0


def test_accuracy_is_told_of_what_an_owner_receives():
    """An all-to-all of 8 ranks through one card makes no tensor lose more."""
    many = Link.of_gbit(25, gpus=8, inside=INSIDE["nvlink"])
    flat = predict(layers("alexnet"), ranks=16, link=Link.of_gbit(25))
    found = predict(layers("alexnet"), ranks=128, link=many)
    assert flat.table().splitlines()[-4:] == found.table().splitlines()[-4:]


@pytest.mark.parametrize(("wrong", "said"), [
    (lambda: Host(cores=0, ranks=1), "a core and a rank or more"),
    (lambda: Host(cores=1, ranks=0), "a core and a rank or more"),
    (lambda: Host(cores=1, ranks=1, move_s=-1.0), "a core and a rank or more"),
    (lambda: Link(1e9, gpus=8), "a link inside a node where it has several"),
    (lambda: Link(1e9, gpus=0), "expected one or more"),
    (lambda: Link(1e9, inside=FAST), "gpus=1"),
    (lambda: predict(MODEL, ranks=9, link=LINK), "ranks=9, 4 a node"),
])  # fmt: skip
def test_what_no_cluster_is_is_refused(wrong, said):
    with pytest.raises(CompressError, match=said):
        wrong()


def test_rates_of_the_h200_are_those_of_the_recorded_steps():
    """Two models give so much for each element and for each compressed tensor."""
    rows = json.loads((ROOT / "benchmarks/results/gpu/exchange_steps.json").read_text())["rows"]
    took = {(row["model"], row["way"]): row["added_ms"] / 1e3 for row in rows}
    rates = RECORDED["h200"]
    names = {"resnet50": "resnet50", "gpt2": "gpt2-small"}
    for way, settings, each, tensor in [
        ("low rank 100", LowRankCompression.settings, rates.pass_s, rates.shared_tensor_s),
        ("gather", Settings(), rates.encode_s + rates.decode_s, rates.gather_tensor_s),
    ]:
        taken = [
            [it for it in layers(name) if settings.compresses(it.shape)] for name in names.values()
        ]
        factors = [[sum(it.elements for it in of), len(of)] for of in taken]
        solved = np.linalg.solve(factors, [took[model, way] for model in names])
        assert (each, tensor) == pytest.approx(solved, rel=0.01)
    rows = json.loads((ROOT / "benchmarks/results/gpu/codec_seconds.json").read_text())["rows"]
    eight, one = (
        next(row for row in rows if row.get("method") == method)
        for method in ("fft theta 0.98", "fft theta 0.98, one rank")
    )
    assert rates.bucket_s == pytest.approx(3 * eight["copy_s"] / eight["n"], rel=0.01)
    added = (eight["decode_s"] - one["decode_s"]) / 7 / eight["n"]
    assert rates.add_s == pytest.approx(added, rel=0.03)
