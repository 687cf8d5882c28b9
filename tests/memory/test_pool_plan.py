"""The allocations of a plan: their sum is what the checker counts, and they can be packed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sn_memory import (
    Action,
    Graph,
    Op,
    Plan,
    PlanError,
    Storage,
    Workspace,
    check_packing,
    check_plan,
    pack,
)
from sn_memory.plan import policies
from sn_memory.plan.buffers import live_bytes, peak_action, plan_buffers
from sn_memory.pool.problem import read_problem

from .random_graphs import random_graph

GRAPH = Graph(
    [
        Storage("w", 7, "parameter"),
        Storage("a", 100),
        Storage("b", 50),
        Storage("y", 5, keep=True),
    ],
    [
        Op("f", ("w",), ("a", "b"), seconds=1.0, workspaces=(Workspace(30),)),
        Op("g", ("a", "b"), ("y",), seconds=1.0),
    ],
)


def test_each_stay_is_a_buffer_of_its_own():
    actions = [
        Action("run", "f"),
        Action("offload", "a"),
        Action("free", "a"),
        Action("prefetch", "a"),
        Action("free", "b"),
        # a is there still, so f makes a second one; b comes back.
        Action("run", "f"),
        Action("run", "g"),
    ]
    plan = Plan(tuple(actions), (), "by hand", 187, 3.0, 2.0)
    found = plan_buffers(GRAPH, plan)
    assert list(zip(found.names, found.buffers, strict=True)) == [
        ("w", (0, 7, 7)),
        ("a", (0, 2, 100)),
        ("b", (0, 4, 50)),
        ("workspace of f", (0, 1, 30)),
        ("a", (3, 7, 100)),
        ("a (second copy)", (5, 6, 100)),
        ("b", (5, 7, 50)),
        ("workspace of f", (5, 6, 30)),
        ("y", (6, 7, 5)),
    ]


def test_a_plan_that_frees_twice_is_refused():
    plan = Plan(
        (Action("run", "f"), Action("free", "b"), Action("free", "b")), (), "by hand", 0, 0.0, 0.0
    )
    with pytest.raises(PlanError, match="action 2: frees 'b'"):
        plan_buffers(GRAPH, plan)


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(policies.names()))
def test_live_sum_is_the_checked_peak_whatever_the_plan(seed, name):
    graph = random_graph(seed)
    plan = policies.policy(name)(graph, budget_bytes=None)
    found = plan_buffers(graph, plan)
    assert read_problem(found.buffers).lower_bound == plan.peak_bytes
    offsets = pack(found.buffers, time_limit_s=0.5)
    assert check_packing(found.buffers, offsets) >= plan.peak_bytes
    replay = check_plan(graph, plan)
    assert live_bytes(graph, plan.actions) == replay.live_bytes.tolist()
    assert peak_action(graph, plan) == replay.peak_action
