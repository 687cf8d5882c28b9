"""The planner: within the budget, accepted by the checker, optimal where that can be known.

SN_TEST_GRAPHS sets how many graphs are planned by each set of techniques: 20 as a rule, which takes
seconds; 10,000 for the acceptance run (`SN_TEST_GRAPHS=10000 pytest tests/memory/test_planner.py`).
"""

import itertools
import math
import os
from contextlib import suppress

import pytest
from exhaustive import optimum
from graphs import layered, resnet, transformer
from random_graphs import budget_of, random_graph, training_chain

from sn_memory import (
    BudgetError,
    Graph,
    Op,
    PlanError,
    Storage,
    Workspace,
    check_plan,
    plan_front,
    plan_graph,
)
from sn_memory.graph.liveness import peak
from sn_memory.plan.policies import names, policy

GRAPHS = int(os.environ.get("SN_TEST_GRAPHS", "20"))
RECOMPUTE = ("keep", "recompute")


def budgets(graph, *shares):
    return [budget_of(graph, share) for share in shares]


def planned_or_refused(graph, budget):
    settled = {"techniques": RECOMPUTE, "time_limit_s": 2, "deterministic": True}
    try:
        return plan_graph(graph, budget, **settled), None
    except BudgetError as error:
        return None, error


@pytest.mark.slow
def test_plans_of_small_graphs_are_compared_with_the_optimum():
    planned = refused = passed_over = 0
    for seed in range(60):
        plain = seed % 3 == 0
        graph = random_graph(seed, most_ops=10, plain=plain)
        for budget in budgets(graph, 0.7, 0.85, 1.0):
            best = optimum(graph, budget)
            plan, error = planned_or_refused(graph, budget)
            if error is not None:
                refused += math.isinf(best)
                passed_over += math.isfinite(best)
                # Of graphs whose writes and flags are drawn at random some plans are
                # passed over; of those without, none.
                assert math.isinf(best) or not plain, f"seed {seed}"
                assert error.budget_bytes == budget
                assert error.op in graph.op_index
                assert error.floor_bytes <= error.peak_bytes
                assert math.isfinite(optimum(graph, error.peak_bytes))
                assert math.isinf(optimum(graph, error.floor_bytes - 1))
                continue
            planned += 1
            assert plan.seconds == pytest.approx(best, rel=1e-12), f"seed {seed}"
            assert plan.lower_bound_seconds <= best * (1 + 1e-12)
            check_plan(graph, plan)
    assert planned > 60
    assert refused > 30
    assert passed_over < 10


def test_refusals_are_the_same_whatever_the_time_and_say_what_is_proven():
    graph = training_chain(8)
    found = []
    for limit in (30, 30, 1e-9):
        with pytest.raises(BudgetError) as caught:
            plan_graph(graph, graph.base_bytes, time_limit_s=limit)
        found.append(caught.value)
    full, again, short = found
    assert str(full) == str(again)
    assert "was stopped" in str(short)
    assert "was stopped" not in str(full)
    for error in found:
        assert graph.base_bytes < error.floor_bytes <= error.peak_bytes < peak(graph).bytes
        replay = check_plan(graph, error.plan)
        assert replay.peak_bytes == error.peak_bytes
        assert error.plan.actions[replay.peak_action].target == error.op
        assert error.floor_bytes == full.floor_bytes


@pytest.mark.parametrize(
    "techniques", [RECOMPUTE, ("keep", "offload"), ("keep", "recompute", "offload")]
)
def test_plans_are_accepted_and_within_the_budget(techniques):
    planned, settled = 0, {"time_limit_s": 0.1, "deterministic": True}
    for seed in range(200, 200 + GRAPHS):
        graph = random_graph(seed, most_ops=25, plain=seed % 2 == 0)
        for budget in budgets(graph, 0.7, 0.85):
            with suppress(BudgetError):
                plan = plan_graph(graph, budget, techniques=techniques, **settled)
                planned += 1
                replay = check_plan(graph, plan)
                assert replay.peak_bytes <= budget
                assert "recompute" in techniques or replay.reruns == 0
                assert "offload" in techniques or replay.host_peak_bytes == 0
    assert planned > 5


@pytest.mark.parametrize(
    ("graph", "shares"),
    [
        (training_chain(10), [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3]),
        (layered(24, seed=0, largest=1 << 16).graph(), [1.0, 0.85, 0.7, 0.6]),
        (layered(24, seed=1, largest=1 << 16).graph(), [1.0, 0.85, 0.7, 0.6]),
    ],
    ids=["chain", "layered 0", "layered 1"],
)
def test_fronts_are_monotone_and_no_other_planner_is_faster(graph, shares):
    sizes, plans = budgets(graph, *shares), []
    settled = {"time_limit_s": 0.5, "deterministic": True}
    while not plans:
        try:
            plans = plan_front(graph, sizes, **settled)
        except BudgetError:
            sizes.pop()
    assert plans[0].overhead == 0
    for more, less in itertools.pairwise(plans):
        assert more.seconds <= less.seconds
        assert more.peak_bytes >= less.peak_bytes
    for budget, plan in zip(sizes, plans, strict=True):
        check_plan(graph, plan)
        assert plan.lower_bound_seconds <= plan.seconds
        for name in names():
            other = policy(name)(graph, budget_bytes=budget)
            if other.peak_bytes <= budget:
                assert plan.seconds <= other.seconds * (1 + 1e-12), f"{name} at {budget}"


@pytest.mark.parametrize(
    "net", [resnet(4, 50), transformer(batch=32, layers=4, length=256, words=1000)]
)
def test_half_memory_is_planned_close_to_the_bound(net):
    graph = net.graph()
    plan, _ = planned_or_refused(graph, budget_of(graph, 0.5))
    check_plan(graph, plan)
    assert plan.gap < 0.05


def test_checkpoints_nest_where_memory_is_short():
    graph = training_chain(40, seed=1)
    plan, _ = planned_or_refused(graph, peak(graph).bytes // 7)
    # More runs than there are forward ops: some are run three times.
    assert check_plan(graph, plan).reruns > len(graph.ops) / 2
    flat = policy("sqrt_n")(graph, budget_bytes=plan.peak_bytes)
    assert plan.peak_bytes < flat.peak_bytes


def test_cheap_ops_are_rebuilt_first():
    graph = training_chain(8)
    plan, _ = planned_or_refused(graph, budget_of(graph, 0.75))
    rebuilt = plan.decided("recompute")
    assert rebuilt
    assert all(name.startswith("a") for name in rebuilt)


# Without workspace f holds 60 bytes and g 70.
@pytest.mark.parametrize(
    ("budget", "ways", "seconds"),
    [(70, (2, 2), 10), (100, (1, 2), 7), (110, (1, 1), 4), (160, (0, 1), 3), (170, (0, 0), 2)],
)
def test_each_run_takes_the_fastest_way_that_fits(budget, ways, seconds):
    lean = (Workspace(100, 1.0), Workspace(40, 2.0), Workspace(0, 5.0))
    graph = Graph(
        [Storage("x", 10, "input"), Storage("h", 50), Storage("y", 10, keep=True)],
        [Op("f", ("x",), ("h",), workspaces=lean), Op("g", ("h",), ("y",), workspaces=lean)],
    )
    plan = plan_graph(graph, budget)
    assert tuple(action.way for action in plan.actions if action.kind == "run") == ways
    assert plan.seconds == seconds
    assert check_plan(graph, plan).peak_bytes <= budget


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"planner": "magic"}, "'magic'"),
        ({"techniques": ("pray",)}, "'pray'"),
        ({"time_limit_s": 0}, "time_limit_s"),
    ],
)
def test_what_there_is_not_is_refused(settings, said):
    with pytest.raises(PlanError, match=said):
        plan_graph(training_chain(3), 10**9, **settings)
