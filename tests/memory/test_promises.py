"""What the planner promises, on many random graphs.

SN_TEST_GRAPHS sets how many: 100 as a rule, which takes seconds; 10,000 for the acceptance run
(`SN_TEST_GRAPHS=10000 pytest tests/memory/test_promises.py`).
"""

import itertools
import os
from contextlib import suppress

import pytest
from graphs import layered
from random_graphs import random_graph

from sn_memory import BudgetError, check_plan, plan_front, plan_graph
from sn_memory.graph.liveness import peak
from sn_memory.plan.policies import names, policy

GRAPHS = int(os.environ.get("SN_TEST_GRAPHS", "100"))


def budgets(graph, *shares):
    whole, base = peak(graph).bytes, graph.base_bytes
    return [base + int((whole - base) * share) for share in shares]


def test_the_checker_accepts_every_plan_of_every_planner():
    planned = 0
    for seed in range(GRAPHS):
        graph = random_graph(seed, most_ops=9, plain=seed % 2 == 0)
        (budget,) = budgets(graph, 0.8)
        found = [policy(name)(graph, budget_bytes=budget) for name in names()]
        with suppress(BudgetError):
            found.append(plan_graph(graph, budget, time_limit_s=0.02, deterministic=True))
            planned += 1
            assert found[-1].peak_bytes <= budget
        for plan in found:
            replay = check_plan(graph, plan)
            assert replay.peak_bytes == plan.peak_bytes, f"seed {seed}, {plan.planner}"
    assert planned > GRAPHS / 10


@pytest.mark.parametrize("seed", range(2))
def test_auto_is_never_slower_and_fronts_are_monotone_on_layered_graphs(seed):
    graph = layered(24, seed=seed, largest=1 << 16).graph()
    sizes, plans = budgets(graph, 1.0, 0.85, 0.7, 0.6), []
    while not plans:
        try:
            plans = plan_front(graph, sizes, time_limit_s=0.5, deterministic=True)
        except BudgetError:
            sizes.pop()
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
