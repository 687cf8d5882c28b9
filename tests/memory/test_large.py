"""Graphs too large for relaxations and for the slow planners of the literature."""

import pytest
from random_graphs import training_chain

from sn_memory import check_plan, plan_graph
from sn_memory.graph.liveness import peak
from sn_memory.plan import auto
from sn_memory.plan.search import search


def test_only_what_is_quick_is_asked_of_a_large_graph(monkeypatch):
    graph = training_chain(60)
    budget = graph.base_bytes + int(0.4 * (peak(graph).bytes - graph.base_bytes))
    asked = []
    policy = auto.policies.policy
    monkeypatch.setattr(auto.policies, "policy", lambda name: asked.append(name) or policy(name))
    monkeypatch.setattr(search, "relax", lambda *_, **__: asked.append("relax"))
    monkeypatch.setattr(auto, "MOST_OPS", len(graph.ops) - 1)
    monkeypatch.setattr(search, "RELAXED", len(graph.ops) - 1)
    monkeypatch.setattr(search, "LARGE", len(graph.ops) - 1)
    plan = plan_graph(graph, budget, techniques=("keep", "recompute"), time_limit_s=30)
    assert plan.peak_bytes <= budget
    check_plan(graph, plan)
    assert asked == ["sqrt_n", "greedy"]
    # What they found is taken where nothing is faster.
    found = [policy(name)(graph, budget_bytes=budget) for name in asked]
    assert plan.seconds <= min(it.seconds for it in found if it.peak_bytes <= budget)
    assert plan.lower_bound_seconds == pytest.approx(plan.baseline_seconds)


def test_both_are_asked_of_one_that_is_not(monkeypatch):
    graph = training_chain(60)
    budget = graph.base_bytes + int(0.4 * (peak(graph).bytes - graph.base_bytes))
    asked = []
    relax, policy = search.relax, auto.policies.policy
    monkeypatch.setattr(
        auto.policies, "policy", lambda name: asked.append("policy") or policy(name)
    )
    monkeypatch.setattr(search, "relax", lambda *a, **k: asked.append("relax") or relax(*a, **k))
    plan_graph(graph, budget, techniques=("keep", "recompute"), time_limit_s=30)
    assert {"policy", "relax"} <= set(asked)


def test_where_time_is_short_what_is_quickest_is_asked_first_and_to_its_end():
    """One that takes minutes was cut before it, and a budget refused that could be kept."""
    graph = training_chain(900)
    least = auto.policies.policy("sqrt_n")(graph, budget_bytes=None).peak_bytes
    assert least < 0.3 * peak(graph).bytes
    for limit in (0.01, 0.1, 1):
        settings = {"techniques": ("keep", "recompute"), "deterministic": True}
        plan = plan_graph(graph, least, time_limit_s=limit, **settings)
        assert plan.peak_bytes <= least
        check_plan(graph, plan)
