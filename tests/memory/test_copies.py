"""Copies that start sooner and end later than they must: never another result, never above room."""

from dataclasses import replace

import numpy as np
import pytest

from sn_memory import BudgetError, Device, Graph, Op, Storage, plan_graph
from sn_memory.check import carry_out
from sn_memory.plan.copies import WIDE, spread_copies


def chain(layers, speed):
    """A chain whose activations wait for the backward pass; ops of a second."""
    storages = [Storage("x", 10, "input")]
    storages += [Storage(f"a{i}", 50 + 7 * i) for i in range(layers)]
    storages += [Storage(f"g{i}", 50, "gradient") for i in range(layers)]
    ops = [
        Op(f"f{i}", (f"a{i - 1}" if i else "x",), (f"a{i}",), seconds=1.0) for i in range(layers)
    ]
    last = layers - 1
    ops += [Op("loss", (f"a{last}",), (f"g{last}",), phase="backward", seconds=0.1, fixed=True)]
    ops += [
        Op(f"b{i}", (f"a{i}", f"g{i}"), (f"g{i - 1}",), phase="backward", seconds=1.0)
        for i in range(last, 0, -1)
    ]
    link = Device("link", to_host_bytes_per_s=speed, to_device_bytes_per_s=speed)
    return Graph(storages, ops, name="chain", device=link)


def windows(actions):
    """Per storage, actions from its copy out to its end, and from its copy back to its use."""
    found = []
    for at, (kind, target, _) in enumerate(actions):
        if kind == "offload":
            rest = [it.kind for it in actions[at:] if it.target == target]
            assert rest[1] == "free"
            found.append(actions[at:].index(("free", target, 0)))
    return sum(found)


@pytest.mark.parametrize("speed", [30.0, 100.0, 1000.0])
def test_within_the_room_and_no_slower(speed):
    moved = 0
    for layers in (6, 9, 14):
        graph = chain(layers, speed)
        for share in ("60%", "75%", "90%"):
            try:
                plan = plan_graph(graph, share, techniques=("keep", "offload"), time_limit_s=0.5,
                                  deterministic=True)  # fmt: skip
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
    graph = chain(9, 100.0)
    plan = plan_graph(graph, "75%", techniques=("keep", "offload"), time_limit_s=0.5,
                      deterministic=True)  # fmt: skip
    assert spread_copies(graph, plan.actions, plan.peak_bytes - 1) == plan.actions
    bare = Graph(graph.storages, graph.ops, name="bare")
    assert spread_copies(bare, plan.actions, 10**9) == plan.actions
