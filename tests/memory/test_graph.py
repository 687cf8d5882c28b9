"""Graphs from records and files, what of them makes no sense, and what is alive when."""

import json
from dataclasses import replace

import pytest
from random_graphs import random_graph

from sn_memory import Device, Graph, GraphError, Op, Storage, Workspace
from sn_memory.graph.liveness import lifetimes, live_bytes, peak

GRAPH = {
    "format": "sn_memory.graph.v1",
    "storages": [{"name": "x", "bytes": 4, "role": "input"}, {"name": "y", "bytes": 4}],
    "ops": [{"name": "f", "inputs": ["x"], "outputs": ["y"]}],
}


def test_graphs_are_read_as_they_were_written(tmp_path):
    for seed in range(100):
        graph = random_graph(seed)
        assert Graph.from_json(graph.to_json()) == graph
    op = Op("f", ("x",), ("y",), ("x",), flops=3.0, workspaces=(Workspace(1, 2.0, "a"),),
            dtype="bf16")  # fmt: skip
    by_dtype = (("bf16", 2e12), ("fp32", 1e12))
    graph = Graph(
        [Storage("x", 5, "state"), Storage("y", 6, held=True)],
        [op],
        name="all",
        device=Device("d", 1e12, 1e9, 1e9, 2e9, 1e-5, 100, 1e-6, by_dtype),
        allocator="torch",
    )
    path = tmp_path / "graph.json"
    graph.to_json(path)
    assert Graph.from_json(path) == Graph.from_json(str(path)) == graph


def change(path, value):
    data = json.loads(json.dumps(GRAPH))
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (["format"], "v0", "graph.format"),
        (["color"], 1, "unknown key 'color'"),
        (["storages", 0, "bytes"], "4", "storages[0].bytes"),
        (["storages", 0, "bytes"], -4, "storages[0] (x).bytes"),
        (["storages", 0, "bytes"], True, "storages[0].bytes"),
        (["storages", 0, "role"], "weight", "storages[0] (x).role"),
        (["storages", 1, "name"], "x", "'x' is used twice"),
        (["storages", 1, "kep"], True, "storages[1]: unknown key 'kep'"),
        (["device"], {"flops_per_s_by_dtype": {"bf16": -1.0}}, "flops_per_s_by_dtype.bf16"),
        (["device"], {"flops_per_s_by_dtype": {"bf16": "1"}}, "flops_per_s_by_dtype.bf16"),
        (["device"], {"launch_s": -1.0}, "device.launch_s"),
        (["ops", 0, "inputs"], ["z"], "ops[0] (f).inputs: there is no storage named 'z'"),
        (["ops", 0, "inputs"], "x", "ops[0].inputs"),
        (["ops", 0, "inputs"], [1], "ops[0].inputs[0]"),
        (["ops", 0, "inputs"], ["y"], "no op has made yet"),
        (["ops", 0, "outputs"], ["x"], "'x' is resident"),
        (["ops", 0, "outputs"], [], "storages[1] (y): no op makes it"),
        (["ops", 0, "seconds"], -1, "ops[0] (f).seconds"),
        (["ops", 0, "seconds"], float("nan"), "ops[0].seconds"),
        (["ops", 0, "phase"], "sideways", "ops[0] (f).phase"),
        (["ops", 0, "workspaces"], [{"bytes": -1}], "ops[0] (f).workspaces[0]"),
        (["ops"], {}, "graph.ops"),
        (["ops", 0], 3, "ops[0]"),
        (["allocator"], "slab", "'slab'"),
        (["device"], {"flops_per_s": 0}, "device.flops_per_s"),
    ],
)
def test_what_makes_no_sense_is_named(path, value, said):
    with pytest.raises(GraphError) as caught:
        Graph.from_json(change(path, value))
    assert said in str(caught.value)


def test_text_that_is_not_json_names_the_line():
    with pytest.raises(GraphError, match="line 3"):
        Graph.from_json('{\n"format": 1,\n oops}')


@pytest.mark.parametrize(
    ("allocator", "size", "expected"),
    [
        ("none", 1000, 1000),
        ("torch", 1000, 1024),
        ("torch", 0, 0),
        ("tensorflow", 1000, 1024),
        ("tensorflow", 257, 512),
    ],
)
def test_allocators_round(allocator, size, expected):
    graph = Graph([Storage("x", size, "input")], [], allocator=allocator)
    assert graph.base_bytes == expected


FAST = Device(flops_per_s=100.0, bytes_per_s=10.0)
BY_DTYPE = replace(FAST, launch_s=0.5, flops_per_s_by_dtype=(("bf16", 200.0),))


@pytest.mark.parametrize(
    ("device", "op", "seconds", "source"),
    [
        (FAST, {"seconds": 3.0, "flops": 1e9}, 3.0, "measured"),
        (FAST, {"flops": 5000.0}, 50.0, "roofline"),
        (FAST, {"flops": 5.0}, 20.0, "roofline"),
        (FAST, {"flops": 5.0, "traffic_bytes": 1}, 0.1, "roofline"),
        (Device(), {"flops": 1e12}, 1.0, "flops"),
        (Device(flops_per_s=10.0), {"flops": 50.0}, 5.0, "flops"),
        (FAST, {"workspaces": (Workspace(1, 7.0), Workspace(0, 9.0))}, 7.0, "measured"),
        (BY_DTYPE, {"flops": 5000.0, "dtype": "bf16"}, 25.0, "roofline"),
        (BY_DTYPE, {"flops": 5000.0, "dtype": "fp32"}, 50.0, "roofline"),
        (BY_DTYPE, {"flops": 5.0, "traffic_bytes": 1, "dtype": "bf16"}, 0.5, "roofline"),
    ],
)
def test_seconds_come_from_measurement_then_roofline_then_flops(device, op, seconds, source):
    storages = [Storage("x", 100, "input"), Storage("y", 100)]
    graph = Graph(storages, [Op("f", ("x",), ("y",), **op)], device=device)
    assert graph.arrays.seconds[0][0] == pytest.approx(seconds)
    assert graph.seconds_sources == {source: 1}


# Liveness


def test_lifetimes_of_a_picture():
    #          f1  f2  f3      x is resident, y is kept, f2 has a workspace
    #   h1     ##  ##  ##      h1 skips over f2 to f3
    #   h2         ##  ##
    #   y              ##
    storages = [Storage("x", 1, "input"), Storage("h1", 10), Storage("h2", 20)]
    graph = Graph(
        [*storages, Storage("y", 40, keep=True)],
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


def asked_everywhere(graph):
    """Live bytes per op, by asking of every storage at every op whether it is needed later."""
    last, curve = len(graph.ops) - 1, []
    names = [{*op.inputs, *op.outputs, *op.writes} for op in graph.ops]
    for at, op in enumerate(graph.ops):
        total = op.workspaces[0].bytes if op.workspaces else 0
        for storage in graph.storages:
            uses = [number for number, used in enumerate(names) if storage.name in used]
            if storage.resident or uses[0] <= at <= (last if storage.keep else uses[-1]):
                total += storage.bytes
        curve.append(total)
    return curve


def test_one_pass_gives_what_asking_everywhere_gives():
    for seed in range(1000):
        graph = random_graph(seed, most_ops=9)
        assert live_bytes(graph).tolist() == asked_everywhere(graph), f"seed {seed}"
        top = peak(graph)
        assert sum(size for _, size in top.owners) == top.bytes == live_bytes(graph).max()


@pytest.mark.slow
def test_a_hundred_thousand_ops_in_seconds():
    count = 100_000
    storages = [Storage("x", 1, "input"), *(Storage(f"h{n}", 1) for n in range(count))]
    ops = [Op(f"f{n}", (f"h{n - 1}" if n else "x",), (f"h{n}",)) for n in range(count)]
    graph = Graph(storages, ops)
    assert peak(graph).bytes == 3
    assert Graph.from_json(graph.to_json()).arrays.bytes.sum() == count + 1
