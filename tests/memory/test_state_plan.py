"""State on the host in the planner: held against every choice there is, on small chains."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from sn_memory import (
    BudgetError,
    Device,
    Graph,
    GraphError,
    Op,
    PlanError,
    Storage,
    check_plan,
    plan_graph,
)
from sn_memory.check import carry_out
from sn_memory.graph.hosted import PLACES, UPDATE, Unit, with_state
from sn_memory.graph.liveness import peak
from sn_memory.plan.buffers import live_bytes
from sn_memory.plan.copies import seconds_on_lanes, spread_copies
from sn_memory.plan.plan import Action
from sn_memory.plan.state import moves_of, plan_state, planned_with, step_peak

LINK = Device("link", to_host_bytes_per_s=500.0, to_device_bytes_per_s=500.0)


def chain(layers=3, sizes=None, link=LINK):
    """A chain of layers with a parameter each: forward and backward pass, gradients kept."""
    sizes = sizes or [100] * layers
    storages = [Storage("x", 10, "input")]
    storages += [Storage(f"p{i}", size, "parameter") for i, size in enumerate(sizes)]
    storages += [Storage(f"a{i}", 50) for i in range(layers)]
    storages += [Storage(f"g{i}", 50, "gradient") for i in range(layers)]
    storages += [Storage(f"w{i}", it, "gradient", keep=True) for i, it in enumerate(sizes)]
    before = ["x", *(f"a{i}" for i in range(layers))]
    ops = [Op(f"f{i}", (before[i], f"p{i}"), (f"a{i}",), seconds=1.0) for i in range(layers)]
    back, last = {"phase": "backward", "seconds": 1.0}, layers - 1
    loss = {"phase": "backward", "seconds": 0.0, "effect": True, "fixed": True}
    ops.append(Op("loss", (f"a{last}",), (f"g{last}",), **loss))
    for i in reversed(range(layers)):
        ops.append(Op(f"w{i}", (before[i], f"g{i}"), (f"w{i}",), **back))
        if i:
            ops.append(Op(f"b{i}", (f"g{i}", f"p{i}"), (f"g{i - 1}",), **back))
    graph = Graph(storages, ops, name="chain", device=link)
    units = [Unit(f"p{i}", f"w{i}", 2 * it, it, 0.2, counts_bytes=4) for i, it in enumerate(sizes)]
    return graph, units


def planner(graph, budget_bytes):
    return plan_graph(
        graph, budget_bytes, techniques=("keep", "recompute"), time_limit_s=1, deterministic=True
    )


def every_choice(graph, units, budget_bytes, update):
    """The fewest seconds of all places that parameters may have; None where none keeps it."""
    best = None
    for places in itertools.product(PLACES, repeat=len(units)):
        chosen = {unit.parameter: it for unit, it in zip(units, places, strict=True)}
        try:
            found = planned_with(graph, units, chosen, budget_bytes, planner, update=update)
        except BudgetError:
            continue
        best = min(filter(None, (best, found.lanes.seconds)))
    return best


@pytest.mark.parametrize(
    ("sizes", "update"),
    [([100, 100, 100], "step"), ([40, 160, 80], "step"),
     pytest.param([40, 160, 80], "backward", marks=pytest.mark.slow)],
)  # fmt: skip
def test_against_every_choice(sizes, update):
    """Within a tenth of the best of all 27 choices, wherever one keeps the budget."""
    graph, units = chain(3, sizes)
    whole = peak(with_state(graph, units, {}, update=update)).bytes
    for share in (1.0, 0.85, 0.7, 0.55, 0.4, 0.25):
        budget = int(share * whole)
        best = every_choice(graph, units, budget, update)
        if best is None:
            with pytest.raises(BudgetError):
                plan_state(graph, units, budget, planner, update=update)
            continue
        found = plan_state(graph, units, budget, planner, update=update)
        assert best <= found.lanes.seconds <= 1.1 * best, (share, best)
        check_plan(found.graph, replace(found.plan, budget_bytes=budget))
        assert max(live_bytes(found.graph, found.plan.actions)) == found.plan.peak_bytes <= budget


def test_of_many_parameters_few_numbers_are_planned():
    """How little has to move is found to one part in 256, however many there are."""
    graph, units = chain(400)
    asked = []

    def quick(whole, budget_bytes):
        asked.append(whole)
        return plan_graph(whole, budget_bytes, planner="sqrt_n")

    budget = int(0.6 * (peak(graph).bytes + sum(it.state_bytes for it in units)))
    found = plan_state(graph, units, budget, quick)
    assert found.plan.peak_bytes <= budget
    assert len(moves_of(graph, units)) == 800
    # All, none, eight halvings, and three more.
    assert 4 < len(asked) <= 13


def test_all_stays_where_it_fits():
    graph, units = chain()
    found = plan_state(graph, units, 10**6, planner)
    assert set(found.places.values()) == {"device"}
    assert found.lanes.copies_s == 0
    assert found.lanes.hidden == 1


def test_states_go_first_and_large_ones():
    assert moves_of(*chain(3, [40, 160, 80])) == [
        (name, what) for what in ("state", "host") for name in ("p1", "p2", "p0")
    ]


def test_what_may_not_move_stays():
    graph, units = chain()
    units[1] = replace(units[1], movable=False)
    found = plan_state(graph, units, peak(with_state(graph, units, {})).bytes - 100, planner)
    assert found.places["p1"] == "device"
    with pytest.raises(GraphError, match="may not"):
        with_state(graph, units, {"p1": "host"})


@pytest.mark.parametrize(("place", "updater", "last", "late"), [
    # On the device or fetched anew: it has another value.
    *((place, None, f"{UPDATE}p2", "f2") for place in PLACES),
    ("host", None, f"{UPDATE}p2", "fetch p2"), ("host", "host", "host update p2", "fetch p2"),
    # On the device it is the old one until it is brought.
    ("state", "host", "bring updated p2", "f2"),
])  # fmt: skip
def test_nothing_runs_again_with_a_parameter_that_was_updated(place, updater, last, late):
    graph, units = chain()
    units = [replace(it, host_update_s=0.1) for it in units] if updater else units
    updaters = {"p2": updater} if updater else {}
    whole = with_state(graph, units, {"p2": place}, updaters=updaters)
    plan = planner(whole, 10**6)
    actions = [it for it in plan.actions if it.kind == "run"]
    actions.insert(actions.index(Action("run", last)) + 1, Action("run", late))
    with pytest.raises(PlanError, match="in-place writes"):
        carry_out(whole, replace(plan, actions=tuple(actions)))


def test_a_gradient_is_gone_when_its_parameter_is_updated():
    graph, units = chain(8)
    held = with_state(graph, units, {})
    # All gradients at the end, or one at a time.
    assert peak(held).bytes < peak(graph).bytes + sum(it.state_bytes for it in units)
    later = with_state(graph, units, {}, update="step")
    assert peak(later).bytes == peak(graph).bytes + sum(
        it.state_bytes + it.counts_bytes for it in units
    )


def test_the_step_of_the_optimizer_counts_and_the_host_leaves_room_in_it():
    graph, units = chain(3, [40, 160, 80])
    places = dict.fromkeys(("p0", "p1", "p2"), "host")
    whole = with_state(graph, units, places, update="step")
    peaks = {
        by: step_peak(whole, units, places, dict.fromkeys(places, by))
        for by in ("device", "host", "in place")
    }
    # The largest: parameter, gradient, two of state, one of scratch memory; input, counts. By the
    # host nothing of it is on the device; in place its scratch memory is, and where state is made.
    assert peaks == {"device": 5 * 160 + 22, "host": 22, "in place": 3 * 160 + 22}
    with pytest.raises(BudgetError, match="optimizer's step needs"):
        planned_with(graph, units, places, 5 * 160, planner, update="step")


def test_copies_start_ahead_within_the_budget():
    """Never later than before, never above the budget, and all of the same actions."""
    rng = np.random.default_rng(0)
    for _ in range(40):
        layers = int(rng.integers(2, 7))
        sizes = [int(it) for it in rng.integers(20, 200, layers)]
        speed = float(rng.choice([100, 500, 5000]))
        link = Device("link", to_host_bytes_per_s=speed, to_device_bytes_per_s=speed)
        graph, units = chain(layers, sizes, link)
        places = {it.parameter: PLACES[rng.integers(3)] for it in units}
        update = ("step", "backward")[rng.integers(2)]
        whole = with_state(graph, units, places, update=update)
        plan = planner(whole, peak(whole).bytes)
        budget = plan.peak_bytes + int(rng.integers(0, 300))
        moved = spread_copies(whole, plan.actions, budget)
        assert sorted(moved) == sorted(plan.actions)
        found = carry_out(whole, replace(plan, actions=moved))
        assert found.peak_bytes == max(live_bytes(whole, moved)) <= budget
        before, after = seconds_on_lanes(whole, plan.actions), seconds_on_lanes(whole, moved)
        assert after.seconds <= before.seconds + 1e-9
        assert after.copies_s == pytest.approx(before.copies_s)


def one_layer(**unit):
    """An op of 2 s that makes a gradient, of 1 s on the way, of a parameter."""
    link = Device("link", to_host_bytes_per_s=100.0, to_device_bytes_per_s=100.0)
    storages = [Storage("x", 0, "input"), Storage("p", 100, "parameter")]
    storages.append(Storage("w", 100, "gradient", True))
    op = Op("f", ("x", "p"), ("w",), phase="backward", seconds=2.0)
    return Graph(storages, [op], device=link), Unit("p", "w", 200, 0, 0.5, **unit)


def lanes_of(whole, names):
    return seconds_on_lanes(whole, [Action("run", it) for it in names])


def test_lanes_by_hand():
    """One layer: fetch 1 s, op 2 s, fetch of state 2 s beside it, update, store 3 s."""
    graph, unit = one_layer()
    whole = with_state(graph, [unit], {"p": "host"})
    found = lanes_of(whole, ["fetch p", "fetch state of p", "f", "update p", "store p"])
    # p at 1, f from 1 to 3, the state at 3, update to 3.5, store to 6.5.
    assert found.seconds == 6.5
    assert (found.ops_s, found.copies_s) == (2.5, 6.0)
    assert found.hidden == pytest.approx(1 - 4 / 6)


def test_an_update_by_the_host_by_hand():
    """One layer whose parameter stays: op 2 s, gradient 1 s, the host 0.7 s, parameter 1 s."""
    graph, unit = one_layer(host_update_s=0.7)
    whole = with_state(graph, [unit], {"p": "state"}, updaters={"p": "host"})
    names = ["f", "store gradient of p", "host update p", "bring updated p"]
    assert [it.name for it in whole.ops] == names
    found = lanes_of(whole, names)
    assert found.seconds == pytest.approx(4.7)
    assert (found.ops_s, found.copies_s, found.host_s) == (2.0, 2.0, 0.7)
    # No state comes to the device, and what is on the host is fetched, and not brought.
    assert peak(whole).bytes == 200
    there = with_state(graph, [unit], {"p": "host"}, updaters={"p": "host"})
    assert [it.name for it in there.ops] == ["fetch p", *names[:3]]
    # In place nothing moves.
    placed = with_state(graph, [unit], {"p": "host"}, updaters={"p": "in place"})
    assert [it.name for it in placed.ops] == ["fetch p", "f", "update p"]
    assert placed.ops[2].inputs == ("w",)
    assert lanes_of(placed, [it.name for it in placed.ops]).seconds == 3.7


def test_nobody_updates_what_is_not_trained():
    graph, units = chain()
    units[1] = replace(units[1], gradient=None, state_bytes=0)
    places = {it.parameter: "host" for it in units}
    by = dict.fromkeys(places, "host")
    found = planned_with(graph, units, places, 10**6, planner, updaters=by)
    assert found.places["p1"] == "host"
    assert found.updaters == {"p0": "host", "p2": "host"}


@pytest.mark.parametrize(("link", "places", "settings", "words"), [
    (LINK, {"q": "host"}, {}, "no unit"),
    (LINK, {"p0": "disk"}, {}, "expected device, state, host"),
    (Device("none"), {"p0": "host"}, {}, "speeds"), (LINK, {}, {"update": "later"}, "later"),
    (LINK, {}, {"updaters": {"p0": "nobody"}}, "expected device, host, in place"),
])  # fmt: skip
def test_what_makes_no_sense(link, places, settings, words):
    graph, units = chain(link=link)
    with pytest.raises(GraphError, match=words):
        with_state(graph, units, places, **settings)
