"""The planners of the literature: plans that replay, and the figures and shapes of their papers.

Those that only benchmarks compare with are among them.
"""

from dataclasses import replace

import pytest
from graphs import alexnet, resnet, transformer, unet
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_graphs import LANES, chain, training_graph
from random_graphs import budget_of
from rivals.planners import PLANNERS

from sn_memory import Graph, Op, Storage, check_plan
from sn_memory.graph.liveness import baseline_seconds, holes, peak
from sn_memory.plan.policies import is_checkpoint, is_conv, names, origins, policy


def regulated(graph: Graph) -> Graph:
    """The graph as SuperNeurons counts it: without weights, their gradients, and the batch."""
    updates = {name for op in graph.ops if op.phase == "update" for name in op.inputs}
    storages = [
        replace(s, bytes=0) if s.resident or s.name in updates else s for s in graph.storages
    ]
    return Graph(storages, graph.ops, device=graph.device)


def without_lanes(graph: Graph) -> Graph:
    return Graph(graph.storages, graph.ops)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**9), share=st.floats(0, 1))
def test_every_plan_is_accepted_by_the_checker(seed, share):
    graph = training_graph(seed)
    budget = budget_of(graph, share)
    for name, planner in PLANNERS.items():
        for asked in (None, budget):
            plan = planner(graph, budget_bytes=asked)
            if name == "liveness":
                plan = replace(plan, budget_bytes=None)
            check_plan(graph, plan)
            assert plan.planner == name
            if asked is not None and plan.peak_bytes <= asked and name != "liveness":
                assert plan.budget_bytes == asked
            stored = [s.name for s in graph.storages if not s.resident]
            assert [decision.storage for decision in plan.decisions] == stored
            assert all(decision.reason for decision in plan.decisions)


@pytest.mark.parametrize("planner", PLANNERS.values(), ids=PLANNERS)
def test_decisions_say_what_the_steps_do(planner):
    graph = resnet(2).graph()
    plan = planner(graph, budget_bytes=budget_of(graph, 2 / 3))
    moved = {action.target for action in plan.actions if action.kind == "offload"}
    assert set(plan.decided("offload")) == moved
    runs = [action.target for action in plan.actions if action.kind == "run"]
    again = {op for op in runs if runs.count(op) > 1}
    makers = {name: op.name for op in graph.ops for name in op.outputs}
    for technique in ("recompute", "recompute_each"):
        assert {makers[name] for name in plan.decided(technique)} <= again
    # An inference graph has nothing to drop.
    graph = chain(5)
    graph = Graph(graph.storages, [replace(op, phase="forward") for op in graph.ops])
    plan = planner(graph, budget_bytes=None)
    assert (plan.seconds, plan.peak_bytes) == (baseline_seconds(graph), peak(graph).bytes)


# SuperNeurons.


def test_superneurons_reruns_on_alexnet_are_those_of_the_paper():
    # Recalled from the paper's table: 14 speed-centric, 23 memory-centric. Ours follow from the
    # rule: 14 layers between checkpoints; a segment of k layers rebuilt k (k + 1) / 2 times.
    graph = alexnet(200).graph()
    reruns = {
        name: check_plan(graph, policy(name)(graph, budget_bytes=None)).reruns
        for name in names()
        if name.startswith("superneurons")
    }
    assert reruns["superneurons_speed"] == 14
    assert reruns["superneurons_memory"] == 23
    assert 14 <= reruns["superneurons"] <= 23


def test_superneurons_reaches_its_l_peak_on_alexnet():
    graph = regulated(alexnet(200).graph())
    plan = policy("superneurons")(graph, budget_bytes=None)
    # The first LRN's backward op: input, output and their gradients, 200 x 96 x 55 x 55 floats.
    # The scalar loss beside them is kept to the end.
    assert plan.peak_bytes == 4 * (200 * 96 * 55 * 55 * 4) + 4
    assert check_plan(graph, plan).peak_bytes == plan.peak_bytes


@pytest.mark.parametrize("net", [alexnet(8), resnet(2), transformer(1, 3)])
def test_superneurons_keeps_checkpoints_and_drops_the_rest(net):
    graph = net.graph()
    origin = origins(holes(graph))
    kinds = {name: op.kind for op in graph.ops for name in op.outputs}
    plan = policy("superneurons_speed")(without_lanes(graph), budget_bytes=None)
    assert plan.decided("recompute_each") == ()
    for name in plan.decided("recompute"):
        assert kinds[name] not in ("conv", "linear", "join", "concat")
        assert origin.forward[graph.storage_index[name]]


def test_the_cost_aware_rule_goes_from_one_to_the_other():
    # Five cheap layers behind a convolution. Rebuilt at once they need five tensors and two
    # gradients of 10; the largest single op is worth `wide`.
    def reruns(wide: int, name: str) -> int:
        plain = chain(7, size=10)
        ops = [replace(op, kind="conv" if at in (0, 6) else op.kind)
               for at, op in enumerate(plain.ops)]  # fmt: skip
        ops.append(Op("wide", (), ("wide",), phase="backward", seconds=1.0))
        graph = Graph([*plain.storages, Storage("wide", wide)], ops)
        return check_plan(graph, policy(name)(graph, budget_bytes=None)).reruns

    assert reruns(1000, "superneurons") == reruns(1000, "superneurons_speed") == 5
    assert reruns(0, "superneurons") == reruns(0, "superneurons_memory") == 5 * 6 // 2


def test_the_tensor_cache_moves_nothing_while_all_fits_and_more_as_the_budget_falls():
    graph = resnet(8).graph()
    free = policy("superneurons")(without_lanes(graph), budget_bytes=None)
    roomy = policy("superneurons")(graph, budget_bytes=free.peak_bytes)
    assert roomy.decided("offload") == ()
    tight = policy("superneurons")(graph, budget_bytes=free.peak_bytes * 2 // 3)
    assert tight.peak_bytes <= free.peak_bytes * 2 // 3
    assert tight.decided("offload")
    assert tight.seconds > roomy.seconds


def test_superneurons_takes_the_fastest_algorithm_that_fits():
    graph = alexnet(4, workspaces=True).graph()
    huge, plain = (policy("superneurons")(graph, budget_bytes=size) for size in (1 << 40, None))
    assert max(action.way for action in huge.actions if action.kind == "run") > 0
    assert huge.seconds < plain.seconds
    used = peak(graph).bytes
    tight = policy("superneurons")(graph, budget_bytes=used)
    assert tight.peak_bytes <= used
    assert tight.seconds >= huge.seconds


# Chen et al.


def test_sqrt_n_memory_grows_with_the_root():
    for layers in (64, 256, 1024):
        graph = chain(layers)
        plan = policy("sqrt_n")(graph, budget_bytes=None)
        # One more forward pass at most, the last segment aside.
        assert layers - 2 * layers**0.5 - 2 <= check_plan(graph, plan).reruns <= layers
        # sqrt(n) checkpoints and one segment of sqrt(n), two gradients beside.
        assert plan.peak_bytes <= 10 * (2 * layers**0.5 + 5)
        assert peak(graph).bytes >= 10 * layers


def test_sqrt_n_cuts_by_bytes_where_layers_differ_and_the_budget_asks_for_it():
    """A ResNet's first stage has maps many times as large as its last."""
    graph = resnet(16, 152).graph()
    by_number = policy("sqrt_n")(graph, budget_bytes=None)
    kept = policy("sqrt_n")(graph, budget_bytes=by_number.peak_bytes)
    assert kept.actions == by_number.actions
    budget = graph.base_bytes + int(0.95 * (by_number.peak_bytes - graph.base_bytes))
    by_bytes = policy("sqrt_n")(graph, budget_bytes=budget)
    assert check_plan(graph, by_bytes).peak_bytes <= budget


# What the rules stand on.


def test_kinds_in_many_words():
    def graph(kind: str, flops: float = 0.0) -> Graph:
        storages = [Storage("x", 8, "input"), *(Storage(name, 8) for name in "pqy")]
        ops = [Op(name, ("x",), (name,)) for name in "pq"]
        return Graph(storages, [*ops, Op("op", ("p", "q"), ("y",), kind=kind, flops=flops)])

    for kind in ("conv", "Conv2D", "aten.convolution.default", "conv_transpose2d"):
        assert is_conv(graph(kind), 2)
    for kind in ("linear", "MatMul", "aten.addmm", "aten.bmm", "fc", "Dense", "aten.cat", "add",
                 "aten.add_.Tensor", "AddV2", "join", "ConcatV2"):  # fmt: skip
        assert is_checkpoint(graph(kind), 2), kind
        assert not is_conv(graph(kind), 2)
    for kind in ("relu", "batch_norm", "max_pool", "softmax", "padding", "dropout", "catch"):
        assert not is_checkpoint(graph(kind), 2), kind
    # Without a word, arithmetic decides: 24 bytes are moved here.
    assert is_checkpoint(graph("", 1000.0), 2)
    assert not is_checkpoint(graph("", 100.0), 2)


# Rivals of the benchmarks.


def test_rivals_keep_their_budgets_and_pay_more_for_less():
    graph = chain(60)
    for name in ("greedy", "dtr"):
        seconds = []
        for share in (0.4, 0.5, 0.7, 1.0):
            budget = int(share * peak(graph).bytes)
            plan = PLANNERS[name](graph, budget_bytes=budget)
            assert plan.peak_bytes <= plan.budget_bytes == budget
            seconds.append(plan.seconds)
        assert seconds == sorted(seconds, reverse=True)
        assert seconds[0] > seconds[-1] == baseline_seconds(graph)
    # Less than one op needs: the plan says what is needed instead.
    none = PLANNERS["dtr"](graph, budget_bytes=graph.base_bytes + 5)
    assert (none.budget_bytes, none.peak_bytes) == (None, peak(graph).bytes)


def test_without_transfer_speeds_nothing_leaves():
    graph = chain(6, kind="conv")
    for name in ("offload_conv", "superneurons"):
        plan = PLANNERS[name](graph, budget_bytes=None)
        assert plan.decided("offload") == ()
        assert plan.seconds == baseline_seconds(graph)
    assert PLANNERS["offload_conv"](chain(6, kind="conv", device=LANES), budget_bytes=None).decided(
        "offload"
    )


@pytest.mark.parametrize(("net", "share", "most"), [(unet(8), 0.5, 1.18), (resnet(16), 0.4, 1.15)])
def test_dtr_is_as_fast_as_counting_only_the_programs_own_accesses(net, share, most):
    """Seconds over those without a budget, by h with the staleness of the authors' simulator.

    Where rebuilds counted as accesses, and inputs were locked one by one, it was 1.272 and 1.302.
    """
    graph = net.graph()
    budget = budget_of(graph, share)
    plan = PLANNERS["dtr"](graph, budget_bytes=budget)
    assert check_plan(graph, plan).peak_bytes <= budget
    assert plan.seconds <= most * plan.baseline_seconds
