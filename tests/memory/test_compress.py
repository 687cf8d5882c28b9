"""Compression as a technique: the compressed graph, and what allowing it promises."""

from contextlib import suppress
from dataclasses import replace

import pytest
from graphs import resnet
from random_graphs import compressible, random_graph, training_chain

from sn_memory import (
    BudgetError,
    Compressed,
    Graph,
    GraphError,
    Op,
    PlanError,
    Storage,
    check_plan,
    plan_buffers,
    plan_front,
    plan_graph,
)
from sn_memory.graph.liveness import baseline_seconds, peak
from sn_memory.graph.rewrite import as_run, waits, with_compressed

RECOMPUTE = ("keep", "recompute")


def smallest(graph, techniques):
    with pytest.raises(BudgetError) as caught:
        plan_graph(graph, 1, techniques=techniques, time_limit_s=1)
    return caught.value


def test_the_packed_graph_by_hand():
    graph = Graph(
        [
            Storage("x", 8, "input"),
            Storage("h", 40, compressed=Compressed(10, 0.5, 0.25)),
            Storage("y", 4),
            Storage("dh", 40, keep=True),
        ],
        [
            Op("f", ("x",), ("h",), seconds=1.0),
            Op("g", ("view of h",), ("y",), seconds=1.0),
            Op("dg", ("view of h", "y"), ("dh",), phase="backward", seconds=1.0),
            Op("e", ("h",), phase="backward", effect=True, seconds=1.0),
        ],
        aliases={"view of h": "h"},
    )
    assert waits(graph) == {"h": (1, 2, 2)}
    found = with_compressed(graph, ["h"])
    assert [op.name for op in found.ops] == ["f", "g", "compress h", "decompress h", "dg", "e"]
    assert found.ops[1].inputs == ("view of h",)
    assert found.ops[4].inputs == ("h (restored)", "y")
    assert found.ops[5].inputs == ("h (restored)",)
    sizes = {it.name: it.bytes for it in found.storages}
    assert (sizes["h (compressed)"], sizes["h (restored)"]) == (10, 40)
    assert baseline_seconds(found) == 4.75
    assert with_compressed(graph, []) is graph
    assert as_run(graph, (op.name for op in graph.ops)) is graph
    assert [op.name for op in as_run(graph, ["f", "compress h"]).ops] == [
        op.name for op in found.ops
    ]


def test_what_is_read_as_it_is_is_not_restored():
    small = Compressed(1, 0.5, None)
    graph = Graph(
        [Storage("x", 8, "input"), Storage("h", 32, compressed=small), Storage("g", 8, keep=True)],
        [
            Op("f", ("x",), ("h",), seconds=1.0),
            Op("df", ("h",), ("g",), phase="backward", seconds=1.0),
        ],
    )
    found = with_compressed(Graph.from_json(graph.to_json()), ["h"])
    assert [op.name for op in found.ops] == ["f", "compress h", "df"]
    assert found.ops[2].inputs == ("h (compressed)",)
    assert peak(found).bytes == 8 + 32 + 1
    assert waits(graph) == {"h": (0, 1, 2)}
    # The backward op works on less than it does without: that is no floor.
    plan = plan_graph(graph, 41, techniques=(*RECOMPUTE, "compress"))
    assert check_plan(graph, plan).peak_bytes == 41
    assert smallest(graph, (*RECOMPUTE, "compress")).floor_bytes == 40
    assert smallest(graph, RECOMPUTE).floor_bytes == 48
    assert baseline_seconds(found) == 2.5


@pytest.mark.parametrize(
    ("why", "change"),
    [
        ("no form", {"h": {"compressed": None}}),
        ("kept", {"h": {"keep": True}}),
        ("resident", {"h": {"role": "input"}}),
    ],
)
def test_what_cannot_be_compressed(why, change):
    base = compressible(training_chain(2))
    name = "a0"
    ops = base.ops
    if why == "resident":
        name, change = "x", {"x": {"compressed": Compressed(1, 0.0, 0.0)}}
    else:
        change = {name: change["h"]}
    storages = [replace(it, **change.get(it.name, {})) for it in base.storages]
    graph = Graph(storages, ops)
    assert name not in waits(graph)
    with pytest.raises(GraphError, match=f"{name!r} cannot be compressed"):
        with_compressed(graph, [name])


def test_what_is_changed_in_the_backward_pass_cannot_be_compressed():
    base = compressible(training_chain(2))
    ops = [replace(op, writes=("a0",)) if op.name == "dconv1" else op for op in base.ops]
    assert "a0" in waits(base)
    assert "a0" not in waits(Graph(base.storages, ops))


def test_a_graph_without_compressed_forms_is_refused():
    with pytest.raises(PlanError, match="no storage that waits"):
        plan_graph(training_chain(3), "90%", techniques=("keep", "compress"))


@pytest.mark.slow
def test_never_slower_than_without_and_smaller_in_the_same_time():
    graph = compressible(training_chain(6), ratio=16)
    low, whole = 500, peak(graph).bytes
    pairs = []
    for share in (1.0, 0.25, 0.1, 0.06):
        budget = low + int((whole - low) * share)
        plain = plan_graph(
            graph, budget, techniques=RECOMPUTE, time_limit_s=0.05, deterministic=True
        )
        plan = plan_graph(
            graph,
            budget,
            techniques=(*RECOMPUTE, "compress"),
            time_limit_s=0.1,
            deterministic=True,
        )
        assert check_plan(graph, plan).peak_bytes <= budget
        assert plan.seconds <= plain.seconds
        assert plan.lower_bound_seconds <= plan.seconds
        assert plan.baseline_seconds == baseline_seconds(graph)
        pairs.append((plain, plan))
    assert not pairs[0][1].decided("compress")
    assert pairs[-1][1].decided("compress")
    # The smallest of these budgets, in less time than rebuilding alone takes for a larger one.
    assert pairs[-1][1].seconds < pairs[-2][0].seconds


def test_it_reaches_what_cannot_be_rebuilt():
    base = compressible(training_chain(5), ratio=16)
    graph = Graph(base.storages, [replace(op, once=True) for op in base.ops])
    without = smallest(graph, ("keep", "recompute"))
    allowed = smallest(graph, (*RECOMPUTE, "compress"))
    assert without.peak_bytes == peak(graph).bytes
    assert allowed.floor_bytes <= allowed.peak_bytes < 0.6 * without.peak_bytes
    assert check_plan(graph, allowed.plan).peak_bytes == allowed.peak_bytes
    assert allowed.plan.decided("compress")


def test_compress_alone_says_what_it_does():
    graph = compressible(training_chain(5))
    error = smallest(graph, ("keep", "compress"))
    plan = plan_graph(
        graph, error.peak_bytes, techniques=("keep", "compress"), time_limit_s=1, deterministic=True
    )
    names = plan.decided("compress")
    assert names
    runs = [action.target for action in plan.actions if action.kind == "run"]
    assert len(runs) == len(set(runs)) == len(graph.ops) + 2 * len(names)
    cost = sum(it.cost_s for it in plan.decisions if it.technique == "compress")
    assert plan.seconds == pytest.approx(baseline_seconds(graph) + cost, rel=1e-12)
    known = {it.name for it in graph.storages}
    assert {it.storage for it in plan.decisions} <= known
    buffers = plan_buffers(graph, plan)
    assert {f"{name} (compressed)" for name in names} <= set(buffers.names)


def test_with_transfers_and_on_random_graphs_the_checker_accepts_it():
    planned = 0
    for seed in range(24):
        base = random_graph(seed, most_ops=9, plain=seed % 2 == 0)
        half = len(base.ops) // 2
        ops = [
            replace(op, phase="backward") if at >= half else op for at, op in enumerate(base.ops)
        ]
        graph = compressible(
            Graph(base.storages, ops, name=base.name, device=base.device, aliases=base.aliases)
        )
        if not waits(graph):
            continue
        budget = graph.base_bytes + int((peak(graph).bytes - graph.base_bytes) * 0.8)
        techniques = ("keep", "recompute", "offload")
        with suppress(BudgetError, PlanError):
            plan = plan_graph(
                graph,
                budget,
                techniques=(*techniques, "compress"),
                time_limit_s=0.05,
                deterministic=True,
            )
            assert check_plan(graph, plan).peak_bytes <= budget
            planned += bool(plan.decided("compress"))
    assert planned > 2


def test_fronts_are_monotone():
    graph = compressible(resnet(batch=2, stages=(1, 1, 1, 1)).graph(), ratio=4, speed=2e9)
    base, whole = graph.base_bytes, peak(graph).bytes
    sizes = [base + int((whole - base) * share) for share in (1.0, 0.7, 0.5)]
    techniques = (*RECOMPUTE, "compress")
    # The search without it has half of the time, so that is what to compare with.
    settings = {"deterministic": True}
    plans = plan_front(graph, sizes, techniques=techniques, time_limit_s=1.0, **settings)
    plain = plan_front(graph, sizes, techniques=RECOMPUTE, time_limit_s=0.5, **settings)
    for budget, plan, other in zip(sizes, plans, plain, strict=True):
        check_plan(graph, plan)
        assert plan.peak_bytes <= budget
        assert plan.seconds <= other.seconds * (1 + 1e-12)
    assert plans[0].seconds <= plans[1].seconds <= plans[2].seconds
    assert plans[0].peak_bytes >= plans[1].peak_bytes >= plans[2].peak_bytes
