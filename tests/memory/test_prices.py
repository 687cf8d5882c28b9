"""Prices and ways: workspaces, nested checkpoints, and what is held from when on."""

import math

import pytest
from random_graphs import training_chain

from sn_memory import Graph, Op, Storage, Workspace, check_plan, plan_graph
from sn_memory.graph.liveness import holes, peak
from sn_memory.plan.search.candidates import carried
from sn_memory.plan.search.chain import Chain
from sn_memory.plan.search.improve import Rules, anneal
from sn_memory.plan.simulate import emit, simulate


def accepted(shape, schedule):
    return check_plan(shape.graph, emit(shape, schedule, planner="test"))


# Without workspace f holds 60 bytes and g 70.
@pytest.mark.parametrize(
    ("budget", "ways", "seconds"),
    [(70, (2, 2), 10), (100, (1, 2), 7), (110, (1, 1), 4), (160, (0, 1), 3), (170, (0, 0), 2)],
)
def test_each_run_takes_the_fastest_way_that_fits(budget, ways, seconds):
    fast_or_lean = (Workspace(100, 1.0), Workspace(40, 2.0), Workspace(0, 5.0))
    graph = Graph(
        [Storage("x", 10, "input"), Storage("h", 50), Storage("y", 10, keep=True)],
        [
            Op("f", ("x",), ("h",), workspaces=fast_or_lean),
            Op("g", ("h",), ("y",), workspaces=fast_or_lean),
        ],
    )
    plan = plan_graph(graph, budget)
    assert tuple(action.way for action in plan.actions if action.kind == "run") == ways
    assert plan.seconds == seconds
    assert check_plan(graph, plan).peak_bytes <= budget


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
        reruns.append(accepted(shape, simulate(shape, choice)).reruns)
    once, nested, again = reruns
    assert once < nested < again


def test_the_chain_nests_checkpoints_where_memory_is_short():
    shape = holes(training_chain(40, seed=1))
    natural = simulate(shape, shape.natural())
    chain = Chain(shape, natural.peak_bytes, end=math.inf)
    # The least budget that the table has an answer for.
    sizes = range(chain.base, natural.peak_bytes, chain.unit)
    smallest = next(it for it in sizes if math.isfinite(chain.extra_seconds(it)))
    # Holding one activation in every block would already need more than this.
    assert smallest < 0.25 * natural.peak_bytes
    before = math.inf
    for share in (0.2, 0.3, 0.5, 0.8):
        budget = max(smallest, int(share * natural.peak_bytes))
        schedule = simulate(shape, chain.choice(budget))
        accepted(shape, schedule)
        assert schedule.peak_bytes <= 1.1 * budget
        assert chain.extra_seconds(budget) <= before
        before = chain.extra_seconds(budget)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(("share", "kept"), [(0.5, True), (0, False)])
def test_annealing_keeps_the_budget_or_comes_close(offload, share, kept):
    graph = training_chain(12)
    shape, whole = holes(graph), peak(graph).bytes
    budget = graph.base_bytes + int((whole - graph.base_bytes) * share)
    rules = Rules(budget, offload, recompute=True, tries=3000, warm=1e-3)
    found = anneal(shape, carried(shape, shape.natural(), {}), rules, deadline=math.inf)
    assert (found.schedule.peak_bytes <= budget) == kept
    assert found.schedule.peak_bytes < whole
    assert offload or not found.moved
    accepted(shape, found.schedule)
