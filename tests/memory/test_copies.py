"""Copies that start sooner and end later than they must: never another result, never above room."""

from dataclasses import replace

import numpy as np
import pytest
from layer_graphs import chain

from sn_memory import BudgetError, Device, Graph, plan_graph
from sn_memory.check import carry_out
from sn_memory.plan.copies import WIDE, spread_copies


def planned(layers, speed, share):
    link = Device("link", to_host_bytes_per_s=speed, to_device_bytes_per_s=speed)
    graph = chain(layers, size=50, device=link)
    settings = {"techniques": ("keep", "offload"), "time_limit_s": 0.5, "deterministic": True}
    return graph, plan_graph(graph, share, **settings)


def windows(actions):
    """Over all storages, the actions from the copy out to its end."""
    found = 0
    for at, (kind, target, _) in enumerate(actions):
        if kind == "offload":
            assert [it.kind for it in actions[at:] if it.target == target][1] == "free"
            found += actions[at:].index(("free", target, 0))
    return found


@pytest.mark.parametrize("speed", [30.0, 100.0, 1000.0])
def test_within_the_room_and_no_slower(speed):
    moved = 0
    for layers in (6, 9, 14):
        for share in ("60%", "75%", "90%"):
            try:
                graph, plan = planned(layers, speed, share)
            except BudgetError:
                continue
            room = plan.peak_bytes + int(np.random.default_rng(layers).integers(0, 100))
            actions = spread_copies(graph, plan.actions, room, times=WIDE)
            found = carry_out(graph, replace(plan, actions=actions))
            assert sorted(actions) == sorted(plan.actions)
            assert found.peak_bytes <= room
            assert found.seconds <= plan.seconds * (1 + 1e-9)
            assert windows(actions) >= windows(plan.actions)
            moved += actions != plan.actions
    assert moved


def test_without_room_or_speeds_all_stays():
    graph, plan = planned(9, 100.0, "75%")
    assert spread_copies(graph, plan.actions, plan.peak_bytes - 1) == plan.actions
    bare = Graph(graph.storages, graph.ops, name="bare")
    assert spread_copies(bare, plan.actions, 10**9) == plan.actions
