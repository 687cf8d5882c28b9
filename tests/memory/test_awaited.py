"""Copies that the ops wait for: the least on the device, where the lanes are slow."""

import math
from dataclasses import replace

import pytest
from graphs import unet
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import random_graph

from sn_memory import BudgetError, Device, Graph, Op, Storage, check_plan, plan_graph
from sn_memory.cost.offload import BACK, BESIDE, BOTH, OUT, lane_seconds, windows
from sn_memory.graph.liveness import holes, peak
from sn_memory.plan.bound import smallest_peak
from sn_memory.plan.search.candidates import all_moved, carried
from sn_memory.plan.simulate import emit, simulate_moved

OFFLOAD = ("keep", "offload")


def chain(speed, layers=4):
    """f0, f1, ..., loss, ..., b1, b0 of a second each; activations and gradients of 10 bytes."""
    last = layers - 1
    storages = [Storage("x", 1, "input"), Storage("end", 10)]
    storages += [Storage(f"a{n}", 10) for n in range(layers)]
    storages += [Storage(f"g{n}", 10) for n in range(layers)]
    ops = [
        Op(f"f{n}", (f"a{n - 1}" if n else "x",), (f"a{n}",), seconds=1.0) for n in range(layers)
    ]
    ops.append(Op("loss", (f"a{last}",), (f"g{last}",), seconds=1.0))
    ops += [
        Op(f"b{n}", (f"a{n}", f"g{n}"), (f"g{n - 1}" if n else "end",), seconds=1.0)
        for n in range(last, -1, -1)
    ]
    link = Device(to_host_bytes_per_s=speed, to_device_bytes_per_s=speed)
    return Graph(storages, ops, name="chain", device=link)


def test_slow_lanes_reach_the_smallest_peak():
    # At b3: a3, g3, g2 and the input. A copy takes 10 s.
    graph = chain(1.0)
    plan = plan_graph(graph, 31, techniques=OFFLOAD)
    assert plan.peak_bytes == 31
    assert smallest_peak(holes(graph), offload=True)[0] == 31
    check_plan(graph, plan)
    # f0, f1 to 2.0; a0 goes to 12.0; f2 to 13.0; a1 to 23.0; f3 to 24.0; a2 to 34.0; loss and b3 to
    # 36.0; then 10 s for a2 and b2, for a1 and b1, for a0 and b0. That is 69.0; the search
    # finds an op that need not wait.
    assert plan.seconds == 68.0
    with pytest.raises(BudgetError, match="no plan has a peak below 31 B"):
        plan_graph(graph, 30, techniques=OFFLOAD)


def test_fast_lanes_make_nobody_wait():
    graph = chain(10.0)
    plan = plan_graph(graph, 41, techniques=OFFLOAD)
    assert plan.seconds == 9.0
    assert plan.gap == 0.0


def test_what_ops_wait_for_moves_the_clock():
    # Ops of a second, copies of 2.5 s out and 1.5 s back; h0 is used by op 1 and by op 9.
    storages = [Storage("x", 1, "input"), *(Storage(f"h{n}", 10) for n in range(10))]
    ops = [Op(f"f{n}", (f"h{n - 1}" if n else "x",), (f"h{n}",), seconds=1.0) for n in range(9)]
    ops[2] = replace(ops[2], inputs=("h1", "x"))
    ops[8] = replace(ops[8], inputs=("h7", "h1"))
    ops.append(Op("f9", ("h8", "h0"), ("h9",), seconds=1.0))
    link = Device(to_host_bytes_per_s=4.0, to_device_bytes_per_s=10 / 1.5)
    graph = Graph(storages, ops, device=link)
    shape = holes(graph)
    h0, h1 = (shape.main(graph.storage_index[name]) for name in ("h0", "h1"))
    assert windows(shape, {h0: BESIDE}) == {h0: (4, 7)}
    assert windows(shape, {h0: OUT}) == {h0: (1, 7)}
    assert windows(shape, {h0: BACK}) == {h0: (4, 9)}
    assert windows(shape, {h0: BOTH}) == {h0: (1, 9)}
    # Both beside the ops: h1 goes out from 4.5 to 7.0, and has to be on its way back at 5.0.
    assert windows(shape, {h0: BESIDE, h1: BESIDE}) == {h0: (4, 7), h1: (6, 7)}
    # h0 is out before op 2, which ends at 3.0 + 2.5; h1 is at 8.0, in op 5. Op 9 waits for h0 from
    # 9.0 - 1.5, so op 8 begins at 6.5, and the copy of h1 at 5.0, in op 6.
    assert windows(shape, {h0: BOTH, h1: BESIDE}) == {h0: (1, 9), h1: (5, 6)}
    assert windows(shape, {h0: BESIDE, h1: BOTH}) == {h0: (4, 7), h1: (2, 8)}


@pytest.mark.parametrize(
    ("waits", "seconds"), [(BESIDE, 10), (OUT, 12.5), (BACK, 11.5), (BOTH, 14)]
)
def test_each_wait_costs_its_copy(waits, seconds):
    storages = [Storage("x", 1, "input"), *(Storage(f"h{n}", 10) for n in range(10))]
    ops = [Op(f"f{n}", (f"h{n - 1}" if n else "x",), (f"h{n}",), seconds=1.0) for n in range(9)]
    ops.append(Op("f9", ("h8", "h0"), ("h9",), seconds=1.0))
    device = Device(to_host_bytes_per_s=4.0, to_device_bytes_per_s=10 / 1.5)
    shape = holes(Graph(storages, ops, device=device))
    hole = shape.main(shape.graph.storage_index["h0"])
    schedule, _ = simulate_moved(shape, shape.natural(), {hole: waits})
    assert lane_seconds(shape, schedule) == seconds
    plan = emit(shape, schedule, planner="test")
    assert check_plan(shape.graph, plan).seconds == seconds


def test_slow_lanes_do_not_lead_away_from_recomputation():
    graph = unet(1, granularity="call").graph()
    slow = Device("slow", 1e13, 7e11, 1e8, 1e8)
    graph = Graph(graph.storages, graph.ops, name="slow", device=slow)
    base = graph.base_bytes
    budget = base + (peak(graph).bytes - base) // 2
    settled = {"time_limit_s": 2, "deterministic": True}
    alone = plan_graph(graph, budget, techniques=("keep", "recompute"), **settled)
    both = plan_graph(graph, budget, **settled)
    assert both.seconds <= alone.seconds * 1.05


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10_000), st.floats(0.3, 1.0), st.sampled_from([0.5, 5.0, 50.0]), st.booleans()
)
def test_any_plan_keeps_the_budget(seed, share, speed, recompute):
    graph = random_graph(seed, most_ops=10)
    link = Device(to_host_bytes_per_s=speed, to_device_bytes_per_s=speed)
    graph = Graph(graph.storages, graph.ops, name=graph.name, device=link)
    base, floor = graph.base_bytes, smallest_peak(holes(graph, lean=True), offload=True)[0]
    budget = base + int((peak(graph).bytes - base) * share)
    techniques = ("keep", "recompute", "offload") if recompute else OFFLOAD
    refused = False
    try:
        plan = plan_graph(
            graph, budget, techniques=techniques, time_limit_s=0.2, deterministic=True
        )
    except BudgetError as error:
        plan, refused = error.plan, True
    # Where all may leave, only what no plan can do is refused.
    stays = any(it.held or it.keep for it in graph.storages)
    assert not refused or budget < floor or stays
    found = check_plan(graph, plan)
    assert found.peak_bytes == plan.peak_bytes >= floor
    assert found.seconds == pytest.approx(plan.seconds)


def test_all_moved_is_the_bound_where_all_may_leave():
    for seed in range(100):
        graph = random_graph(seed, plain=True)
        storages = [replace(it, keep=False) for it in graph.storages]
        shape = holes(Graph(storages, graph.ops, device=graph.device))
        found = all_moved(shape)
        assert found.schedule.peak_bytes == smallest_peak(shape, offload=True)[0]
        assert math.isfinite(found.seconds)
        assert carried(shape, found.choice, found.moved).seconds == found.seconds
