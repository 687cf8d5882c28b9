"""Graphs too large for relaxations."""

import math

import numpy as np
import pytest
from random_graphs import budget_of, training_chain

from sn_memory import Device, Graph, Op, Storage, check_plan, plan_graph
from sn_memory.graph.liveness import holes, peak
from sn_memory.plan.policies import policy
from sn_memory.plan.search import search
from sn_memory.plan.search.chain import Chain

LANES = Device(to_host_bytes_per_s=1e6, to_device_bytes_per_s=1e6)


@pytest.mark.parametrize("techniques", [("keep", "recompute"), ("keep", "recompute", "offload")])
def test_no_relaxation_of_a_large_graph(monkeypatch, techniques):
    graph = training_chain(40)
    graph = Graph(graph.storages, graph.ops, device=LANES)
    budget = budget_of(graph, 0.4)
    asked = []
    relax = search.relax
    monkeypatch.setattr(search, "relax", lambda *a, **k: asked.append(1) or relax(*a, **k))
    settings = {"techniques": techniques, "time_limit_s": 30}
    plan_graph(graph, budget, **settings)
    assert asked
    asked.clear()
    monkeypatch.setattr(search, "RELAXED", len(graph.ops) - 1)
    monkeypatch.setattr(search, "LARGE", len(graph.ops) - 1)
    plan = plan_graph(graph, budget, **settings)
    assert not asked
    assert check_plan(graph, plan).peak_bytes <= budget
    if "offload" not in techniques:
        found = policy("sqrt_n")(graph, budget_bytes=budget)
        assert found.peak_bytes > budget or plan.seconds <= found.seconds
        assert plan.lower_bound_seconds == pytest.approx(plan.baseline_seconds)


@pytest.mark.parametrize("limit", [0.01, 1])
def test_where_time_is_short_a_budget_that_sqrt_n_keeps_is_kept(limit):
    """Slower planners stood before it, and a budget was refused that could be kept."""
    graph = training_chain(900)
    least = policy("sqrt_n")(graph, budget_bytes=None).peak_bytes
    assert least < 0.3 * peak(graph).bytes
    settings = {"techniques": ("keep", "recompute"), "deterministic": True}
    plan = plan_graph(graph, least, time_limit_s=limit, **settings)
    assert check_plan(graph, plan).peak_bytes <= least


def loop(calls):
    """One layer called so many times, four ops a call, as an ODE solver does; all ops alike."""
    storages, ops = [Storage("w", 64, "parameter"), Storage("x0", 32)], []
    ops.append(Op("start", ("w",), ("x0",), seconds=2.0**-10))
    saved = [[f"x{at}", *(f"h{at}_{part}" for part in range(3))] for at in range(calls)]
    for at in range(calls):
        for part, read in enumerate(saved[at]):
            result = f"x{at + 1}" if part == 3 else saved[at][part + 1]
            storages.append(Storage(result, 32))
            ops.append(Op(f"forward {at} {part}", (read, "w"), (result,), seconds=2.0**-10))
    back = {"phase": "backward", "seconds": 2.0**-9}
    storages.append(Storage(f"g{calls}", 32, "gradient"))
    ops.append(Op("loss", (f"x{calls}",), (f"g{calls}",), **back))
    for at in reversed(range(calls)):
        storages.append(Storage(f"g{at}", 32, "gradient", keep=at == 0))
        ops.append(Op(f"backward {at}", (f"g{at + 1}", *saved[at], "w"), (f"g{at}",), **back))
    return Graph(storages, ops)


def test_a_loop_of_equal_calls_has_a_table_of_lengths_not_of_pairs():
    """2,000 calls took 22 s: the cube of the number of blocks."""
    graph, entries = loop(40), []

    class Counted(Chain):
        def _ways(self, i, j):
            entries.append((i, j))
            return super()._ways(i, j)

    class EachAlone(Counted):
        def _number(self, key):
            return len(self.stretch)

    shape = holes(graph, lean=True)
    chain = Counted(shape, peak(graph).bytes, end=math.inf)
    count, shared = len(chain.blocks), len(entries)
    assert count >= 35
    assert shared < 6 * count < count * (count + 1) / 2 / 2
    whole = EachAlone(shape, peak(graph).bytes, end=math.inf)
    assert len(entries) - shared == count * (count + 1) / 2
    for pair, values in whole.table.items():
        assert np.array_equal(values, chain.table[pair])
