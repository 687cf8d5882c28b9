"""Prices and ways: workspaces, transfer windows, nested checkpoints, ruin and repair."""

import math

import pytest
from random_graphs import random_graph, training_chain

from sn_memory import Device, Graph, Op, Storage, Workspace, check_plan, plan_graph
from sn_memory.cost.offload import BESIDE, equip, lane_seconds, windows
from sn_memory.graph.liveness import holes, peak
from sn_memory.plan.search.candidates import carried, fit, trim
from sn_memory.plan.search.chain import Chain
from sn_memory.plan.search.improve import Rules, anneal, refine
from sn_memory.plan.simulate import emit, simulate, simulate_moved


def accepted(shape, schedule):
    return check_plan(shape.graph, emit(shape, schedule, planner="test"))


def test_each_run_takes_the_fastest_way_that_fits():
    fast_or_lean = (Workspace(100, 1.0), Workspace(40, 2.0), Workspace(0, 5.0))
    graph = Graph(
        [Storage("x", 10, "input"), Storage("h", 50), Storage("y", 10, keep=True)],
        [
            Op("f", ("x",), ("h",), workspaces=fast_or_lean),
            Op("g", ("h",), ("y",), workspaces=fast_or_lean),
        ],
    )
    shape = holes(graph, lean=True)
    schedule = simulate(shape, shape.natural())
    # Without workspace f holds 60 bytes and g 70.
    for budget, ways, seconds in (
        (70, (2, 2), 10),
        (100, (1, 2), 7),
        (110, (1, 1), 4),
        (160, (0, 1), 3),
        (170, (0, 0), 2),
        (None, (0, 0), 2),
    ):
        equipped = equip(shape, schedule, budget)
        assert equipped.ways == ways
        assert equipped.run_seconds == seconds
        assert budget is None or equipped.peak_bytes <= budget
        accepted(shape, equipped)


def test_a_plan_spends_what_is_free_on_speed():
    ways = (Workspace(0, 9.0), Workspace(100, 1.0))
    graph = Graph(
        [Storage("x", 10, "input"), Storage("y", 10, keep=True)],
        [Op("f", ("x",), ("y",), workspaces=ways)],
    )
    for budget, seconds in ((50, 9.0), (120, 1.0)):
        plan = plan_graph(graph, budget)
        assert plan.seconds == seconds
        check_plan(graph, plan)


def ladder(device):
    """f0 .. f9 in a row, one second each; the first result is needed again at the end."""
    storages = [Storage("x", 1, "input"), *(Storage(f"h{n}", 10) for n in range(10))]
    ops = [Op(f"f{n}", (f"h{n - 1}" if n else "x",), (f"h{n}",), seconds=1.0) for n in range(9)]
    ops.append(Op("f9", ("h8", "h0"), ("h9",), seconds=1.0))
    return Graph(storages, ops, device=device)


def test_windows_are_as_wide_as_the_lanes_let_them_be():
    # h0 is used at 2.0 and again at 9.0; a copy takes 2.5 s out and 1.5 s back.
    #   ops   0  1  2  3  4  5  6  7  8  9
    #   h0    #  #  ##out####      ##back#      gone after op 4, there again before op 7
    shape = holes(ladder(Device(to_host_bytes_per_s=4.0, to_device_bytes_per_s=10 / 1.5)))
    hole = shape.main(shape.graph.storage_index["h0"])
    assert windows(shape, {hole: BESIDE}) == {hole: (4, 7)}
    schedule, _ = simulate_moved(shape, shape.natural(), {hole: BESIDE})
    assert lane_seconds(shape, schedule) == 10.0
    assert accepted(shape, schedule).live_bytes.max() == 31


def test_slow_lanes_make_the_ops_wait():
    shape = holes(ladder(Device(to_host_bytes_per_s=1.0, to_device_bytes_per_s=1.0)))
    hole = shape.main(shape.graph.storage_index["h0"])
    schedule, _ = simulate_moved(shape, shape.natural(), {hole: BESIDE})
    # Out from 2.0 to 12.0, back from 12.0 to 22.0, the last op after it.
    assert lane_seconds(shape, schedule) == pytest.approx(23.0)
    accepted(shape, schedule)


def test_a_rebuild_fetches_what_it_starts_from():
    # a0 is rebuilt before op "dconv1", from c0, whose own next use comes two ops later.
    graph = training_chain(2)
    graph = Graph(
        graph.storages,
        graph.ops,
        device=Device(to_host_bytes_per_s=1e3, to_device_bytes_per_s=1e3),
    )
    shape = holes(graph)
    moved = shape.main(graph.storage_index["c0"])
    choice = shape.natural()
    choice[shape.main(graph.storage_index["a0"])] = 0
    schedule, spans = simulate_moved(shape, choice, {moved: BESIDE})
    (host_copy,) = schedule.host_copies
    assert schedule.at[host_copy.fetched] <= graph.op_index["dconv1"]
    assert spans[moved][1] <= graph.op_index["dconv1"]
    accepted(shape, schedule)


def test_numbers_between_hold_from_then_on():
    # All activations leave; a rebuild on the way to something else is held from op `since` on.
    graph = training_chain(6)
    shape = holes(graph)
    turn = graph.op_index["dloss"]
    reruns = []
    for since in (0, turn + 6, len(graph.ops)):
        choice = shape.natural()
        for hole, storage in enumerate(shape.storage):
            spans = shape.start[hole] < turn <= shape.end[hole]
            if spans and shape.chain[storage][0] < turn and not shape.stays[hole]:
                choice[hole] = since
        schedule = simulate(shape, choice)
        reruns.append(accepted(shape, schedule).reruns)
    once, nested, each = reruns
    assert once < nested < each


def test_the_chain_nests_checkpoints_where_memory_is_short():
    graph = training_chain(40, seed=1)
    shape = holes(graph)
    natural = simulate(shape, shape.natural())
    chain = Chain(shape, natural.peak_bytes, end=math.inf)
    assert len(chain.blocks) > 10
    before = math.inf
    # The least budget that the table has an answer for.
    sizes = range(chain.base, natural.peak_bytes, chain.unit)
    smallest = next(it for it in sizes if math.isfinite(chain.extra_seconds(it)))
    # Holding one activation in every block would already need more than this.
    assert smallest < 0.25 * natural.peak_bytes
    for share in (0.2, 0.3, 0.5, 0.8):
        budget = max(smallest, int(share * natural.peak_bytes))
        choice = chain.choice(budget)
        assert choice is not None
        schedule = simulate(shape, choice)
        accepted(shape, schedule)
        assert schedule.peak_bytes <= 1.1 * budget
        assert chain.extra_seconds(budget) <= before
        before = chain.extra_seconds(budget)


def test_fit_trim_and_refine_keep_the_budget_and_do_not_get_worse():
    late = math.inf
    fitted_any = 0
    for seed in range(40):
        graph = random_graph(seed, most_ops=20, plain=True)
        shape = holes(graph)
        budget = graph.base_bytes + int(0.8 * (peak(graph).bytes - graph.base_bytes))
        fitted = fit(shape, shape.natural(), budget, deadline=late)
        if fitted is None:
            continue
        fitted_any += 1
        trimmed = trim(shape, fitted[0], budget, deadline=late)
        start = carried(shape, trimmed[0], {})
        assert start is not None
        for offload in (False, True):
            refined = refine(
                shape, start, budget, offload=offload, enough_s=0.0, tries=5, deadline=late
            )
            assert refined.seconds <= start.seconds <= fitted[1].run_seconds
            assert refined.seconds == lane_seconds(shape, refined.schedule)
            assert offload or not refined.moved
            for made in (fitted[1], trimmed[1], refined.schedule):
                assert made.peak_bytes <= budget
                accepted(shape, made)
    assert fitted_any > 5


@pytest.mark.parametrize("offload", [False, True])
def test_annealing_keeps_the_budget_or_comes_close(offload):
    graph = training_chain(12)
    shape = holes(graph)
    start = carried(shape, shape.natural(), {})
    assert start is not None
    whole, base = peak(graph).bytes, graph.base_bytes
    for budget, kept in ((base + (whole - base) // 2, True), (base, False)):
        rules = Rules(budget, offload, recompute=True, tries=3000, warm=1e-3)
        found = anneal(shape, start, rules, deadline=math.inf)
        assert found is not None
        assert (found.schedule.peak_bytes <= budget) == kept
        assert found.schedule.peak_bytes < whole
        assert offload or not found.moved
        accepted(shape, found.schedule)
