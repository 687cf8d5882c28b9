"""Liveness: one pass gives what asking of every storage at every op gives."""

import pytest
from random_graphs import brute_force_live, random_graph

from sn_memory import Graph, Op, Storage, Workspace
from sn_memory.graph.liveness import lifetimes, live_bytes, peak


@pytest.mark.slow
def test_equals_brute_force_on_ten_thousand_graphs():
    for seed in range(10_000):
        graph = random_graph(seed, most_ops=9)
        assert live_bytes(graph).tolist() == brute_force_live(graph), f"seed {seed}"


def test_lifetimes_of_a_picture():
    #          f1  f2  f3      x is resident, y is kept, w is workspace of f2
    #   h1     ##  ##  ##      h1 skips over f2 to f3
    #   h2         ##  ##
    #   y              ##
    graph = Graph(
        [
            Storage("x", 1, "input"),
            Storage("h1", 10),
            Storage("h2", 20),
            Storage("y", 40, keep=True),
        ],
        [
            Op("f1", ("x",), ("h1",)),
            Op("f2", ("h1",), ("h2",), workspaces=(Workspace(100),)),
            Op("f3", ("h1", "h2"), ("y",)),
        ],
    )
    spans = lifetimes(graph)
    assert spans.start.tolist() == [0, 0, 1, 2]
    assert spans.end.tolist() == [3, 3, 3, 3]
    assert live_bytes(graph).tolist() == [11, 131, 71]
    assert peak(graph).owners == (("workspace", 100), ("h2", 20), ("h1", 10), ("resident", 1))


def test_owners_add_up_to_the_peak():
    for seed in range(200):
        found = peak(random_graph(seed))
        assert sum(size for _, size in found.owners) == found.bytes


def test_a_hundred_thousand_ops_in_seconds():
    count = 100_000
    storages = [Storage("x", 1, "input"), *(Storage(f"h{n}", 1) for n in range(count))]
    ops = [Op(f"f{n}", (f"h{n - 1}" if n else "x",), (f"h{n}",)) for n in range(count)]
    graph = Graph(storages, ops)
    assert peak(graph).bytes == 3
    assert Graph.from_json(graph.to_json()).arrays.bytes.sum() == count + 1
