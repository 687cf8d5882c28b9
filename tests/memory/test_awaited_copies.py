"""Copies beside the ops and copies that ops wait for: windows, what they cost, and budgets kept."""

from dataclasses import replace

import pytest
from graphs import unet
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import budget_of, random_graph

from sn_memory import BudgetError, Device, Graph, Op, Storage, check_plan, plan_graph
from sn_memory.cost.offload import BACK, BESIDE, BOTH, OUT, lane_seconds, windows
from sn_memory.graph.liveness import holes
from sn_memory.plan.bound import smallest_peak
from sn_memory.plan.simulate import emit, simulate_moved

OFFLOAD = ("keep", "offload")


def link(out, back=None):
    return Device(to_host_bytes_per_s=out, to_device_bytes_per_s=back or out)


def chain(speed, layers=4):
    """f0, f1, ..., loss, ..., b1, b0 of a second each; activations and gradients of 10 bytes."""
    last = layers - 1
    storages = [Storage("x", 1, "input"), Storage("end", 10)]
    storages += [Storage(f"{kind}{n}", 10) for kind in "ag" for n in range(layers)]
    ops = [
        Op(f"f{n}", (f"a{n - 1}" if n else "x",), (f"a{n}",), seconds=1.0) for n in range(layers)
    ]
    ops.append(Op("loss", (f"a{last}",), (f"g{last}",), seconds=1.0))
    ops += [
        Op(f"b{n}", (f"a{n}", f"g{n}"), (f"g{n - 1}" if n else "end",), seconds=1.0)
        for n in range(last, -1, -1)
    ]
    return Graph(storages, ops, name="chain", device=link(speed))


def test_slow_lanes_reach_the_smallest_peak():
    # At b3: a3, g3, g2 and the input. A copy takes 10 s.
    graph = chain(1.0)
    plan = plan_graph(graph, 31, techniques=OFFLOAD)
    assert plan.peak_bytes == smallest_peak(holes(graph), offload=True)[0] == 31
    check_plan(graph, plan)
    # f0, f1 to 2.0; a0 goes to 12.0; f2 to 13.0; a1 to 23.0; f3 to 24.0; a2 to 34.0; loss and b3 to
    # 36.0; then 10 s for a2 and b2, for a1 and b1, for a0 and b0. That is 69.0; the search
    # finds an op that need not wait.
    assert plan.seconds == 68.0
    with pytest.raises(BudgetError, match="no plan has a peak below 31 B"):
        plan_graph(graph, 30, techniques=OFFLOAD)


def test_fast_lanes_make_nobody_wait():
    plan = plan_graph(chain(10.0), 41, techniques=OFFLOAD)
    assert (plan.seconds, plan.gap) == (9.0, 0.0)


def ladder(device=None, **inputs):
    """f0 .. f9 in a row, a second each; h0 is used by op 1 and by op 9, and more as `inputs` say.

    A copy takes 2.5 s out and 1.5 s back if no other device is asked for.
    """
    storages = [Storage("x", 1, "input"), *(Storage(f"h{n}", 10) for n in range(10))]
    ops = [Op(f"f{n}", (f"h{n - 1}" if n else "x",), (f"h{n}",), seconds=1.0) for n in range(9)]
    ops.append(Op("f9", ("h8", "h0"), ("h9",), seconds=1.0))
    ops = [replace(op, inputs=inputs.get(op.name, op.inputs)) for op in ops]
    graph = Graph(storages, ops, device=device or link(4.0, 10 / 1.5))
    shape = holes(graph)

    def longest(name):
        inner = shape.of(graph.storage_index[name])[:-1]
        return max(inner, key=lambda hole: shape.end[hole] - shape.start[hole])

    return shape, longest("h0"), longest("h1")


def test_what_ops_wait_for_moves_the_clock():
    shape, h0, h1 = ladder(f2=("h1", "x"), f8=("h7", "h1"))
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
    ("device", "waits", "seconds"),
    [
        (None, BESIDE, 10), (None, OUT, 12.5), (None, BACK, 11.5), (None, BOTH, 14),
        # Slow: out from 2.0 to 12.0, back from 12.0 to 22.0, the last op after it.
        (link(1.0), BESIDE, 23),
    ],
)  # fmt: skip
def test_each_wait_costs_its_copy(device, waits, seconds):
    shape, h0, _ = ladder(device)
    schedule, _ = simulate_moved(shape, shape.natural(), {h0: waits})
    assert lane_seconds(shape, schedule) == pytest.approx(seconds)
    replay = check_plan(shape.graph, emit(shape, schedule, planner="test"))
    assert replay.seconds == pytest.approx(seconds)
    assert device or waits != BESIDE or replay.live_bytes.max() == 31


def test_slow_lanes_do_not_lead_away_from_recomputation():
    graph = unet(1, granularity="call").graph()
    graph = Graph(graph.storages, graph.ops, device=Device("slow", 1e13, 7e11, 1e8, 1e8))
    budget, settled = budget_of(graph, 0.5), {"time_limit_s": 2, "deterministic": True}
    alone = plan_graph(graph, budget, techniques=("keep", "recompute"), **settled)
    assert plan_graph(graph, budget, **settled).seconds <= alone.seconds * 1.05


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10_000), st.floats(0.3, 1.0), st.sampled_from([0.5, 5.0, 50.0]), st.booleans()
)
def test_any_plan_keeps_the_budget(seed, share, speed, recompute):
    graph = random_graph(seed, most_ops=10)
    graph = Graph(graph.storages, graph.ops, name=graph.name, device=link(speed))
    floor, budget = smallest_peak(holes(graph, lean=True), offload=True)[0], budget_of(graph, share)
    techniques = ("keep", "recompute", "offload") if recompute else OFFLOAD
    settled = {"time_limit_s": 0.2, "deterministic": True}
    try:
        plan = plan_graph(graph, budget, techniques=techniques, **settled)
    except BudgetError as error:
        plan = error.plan
        # Where all may leave, only what no plan can do is refused.
        assert budget < floor or any(it.held or it.keep for it in graph.storages)
    found = check_plan(graph, plan)
    assert found.peak_bytes == plan.peak_bytes >= floor
    assert found.seconds == pytest.approx(plan.seconds)
